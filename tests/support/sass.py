"""Machine code of Hopper as `nvdisasm` tells it, and loads of shared memory that a barrier's arrival does not wait for.

An instruction has 128 bits, the control bits from 105 on: 4 of stall, 1 of yield, 3 that name the scoreboard (of six;
7: none) which the arrival of its result counts down, 3 likewise of its operands' reading, 6 that are the scoreboards it
waits for. Source: Z. Jia and others, Dissecting the NVIDIA Volta GPU architecture via microbenchmarking (2018), section
2.1; the encoding has stayed since.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_FIRST = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_SECOND = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_CONTROL = 41
"""First bit of the control bits in the second half of an instruction."""
_NONE = 7
"""Number of the scoreboard of an instruction that has none."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address and text, the scoreboard that its result counts down (None: none has to), and those
    that it waits for.
    """

    address: int
    text: str
    sets: int | None
    waits: frozenset[int]

    @property
    def name(self) -> str:
        """The operation without its predicate: `SYNCS.ARRIVE.TRANS64.A1T0`."""
        words = self.text.split()
        return words[1] if words[0].startswith("@") else words[0]


def disassembler() -> Path | None:
    """Return the path of `nvdisasm` in the wheel `nvidia-cuda-nvdisasm`; None where it is not installed."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvdisasm"), None)


def disassembled(code: bytes, folder: Path) -> list[Instruction]:
    """Return the instructions of a cubin, which is written into `folder`. Raises CalledProcessError."""
    cubin = folder / "code.cubin"
    cubin.write_bytes(code)
    done = subprocess.run(
        [str(disassembler()), "-hex", str(cubin)], capture_output=True, text=True, check=True, timeout=120
    )
    return parsed(done.stdout)


def parsed(text: str) -> list[Instruction]:
    """Return the instructions of what `nvdisasm -hex` prints."""
    found, first = [], None
    for line in text.splitlines():
        if match := _FIRST.search(line):
            first = match
        elif first is not None and (match := _SECOND.match(line)):
            control = int(match[1], 16) >> _CONTROL
            sets, waits = control >> 5 & 7, control >> 11 & 63
            found.append(
                Instruction(
                    int(first[1], 16), " ".join(first[2].split()), None if sets == _NONE else sets,
                    frozenset(board for board in range(6) if waits >> board & 1),
                )
            )  # fmt: skip
            first = None
    return found


ARRIVAL = "SYNCS.ARRIVE.TRANS64.A1T0"
REMOTE_ARRIVAL = "SYNCS.ARRIVE.TRANS64.RED.A1T0"
"""At a barrier of this block, and of any block of the cluster; those that expect bytes have other names."""


def unwaited_loads(instructions: list[Instruction], name: str = ARRIVAL) -> list[tuple[Instruction, Instruction]]:
    """Return (load of shared memory, arrival at a barrier) where the load may still be on its way at the arrival, and
    is of the stage that the arrival gives back: made before the last wait for another stage's barrier, or since the
    arrival before where there was none in between.

    Loads come back in order, so that whoever waited for one has those before it. `name`: of the arrivals looked at.
    """
    found = []
    for place, arrival in enumerate(instructions):
        if arrival.name != name:
            continue
        waited, covered, earlier_stage, loads = set(arrival.waits), False, False, []
        for before in reversed(instructions[:place]):
            if before.name.startswith("SYNCS.ARRIVE"):
                break
            if before.name.startswith("SYNCS.PHASECHK"):
                if earlier_stage:
                    break
                earlier_stage, loads = True, []  # what came after it is of the next stage
            elif before.name.startswith("LDS") and not before.text.startswith("@!PT"):  # that one is never executed
                covered = covered or before.sets in waited
                if not covered:
                    loads.append(before)
            waited |= before.waits
        found += [(load, arrival) for load in loads]
    return found

"""Compiles the kernels for AMD's architectures, without a device, and holds them to their budgets.

    PYTHONPATH=tools python -m amd [--arch gfx942 ...] [--jobs N] [--table] [--update]

A kernel passes that compiles and keeps within its architecture's budget (budgets.json): registers, static shared
memory, spilled registers of a wave, a lane's memory; and that keeps subnormal numbers. One for matrix units must have
the instruction it is named after, no memory of its own and no spilled vector register, whatever the budget. `--update`
writes what is found as the budgets, rounded up: to a multiple of 8 registers, the unit in which they are handed out,
and of 64 of what is spilled.

The compiler is fetched where it is not there (see `toolchain`); if that fails, so does this. What has been compiled is
kept by source and compiler, and not compiled again.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from amd import kernels, toolchain
from amd.compiling import Compiled, CompileError, Session

if TYPE_CHECKING:
    from amd.kernels import Case

_BUDGETS: Final = Path(__file__).with_name("budgets.json")
_UNIT: Final = 8
_SPARE: Final = 64
"""Unit of budgets of what is spilled, which changes by a little with everything."""
Budgets = dict[str, dict[str, list[int]]]
"""By architecture and label, the limits of `_LIMITED` in their order."""
_LIMITED: Final = ("vgpr", "sgpr", "lds", "sgpr_spills", "scratch")


@dataclass(frozen=True)
class Finding:
    """What became of one kernel: `error`, or what was compiled."""

    arch: str
    case: Case
    compiled: Compiled | None
    error: str = ""


def has_instruction(compiled: Compiled, mnemonic: str) -> bool:
    """Whether it is there; gfx90a writes f32_32x32x2f32 for f32_32x32x2_f32."""
    wanted = mnemonic.replace("_", "")
    return any(name.replace("_", "").startswith(wanted) for name in compiled.instructions)


def faults(finding: Finding, budgets: Budgets) -> list[str]:
    """What is wrong, in words."""
    if finding.compiled is None:
        return [finding.error]
    usage, mnemonic = finding.compiled.usage, finding.case.mnemonic
    found = [] if usage.subnormal else ["takes subnormal numbers for zero"]
    if mnemonic:
        if usage.vgpr_spills or usage.scratch:
            found.append(f"spills {usage.vgpr_spills} registers, {usage.scratch} bytes of memory")
        if not has_instruction(finding.compiled, mnemonic):
            found.append(f"has no {mnemonic}")
    budget = budgets.get(finding.arch, {}).get(finding.case.label)
    if budget is None:
        return [*found, "has no budget: run it with --update"]
    for name, allowed in zip(_LIMITED, budget, strict=True):
        if (used := getattr(usage, name)) > allowed:
            found.append(f"{name}: {used}, the budget is {allowed}")
    return found


def updated(findings: list[Finding]) -> Budgets:
    """Budgets that hold what was found."""
    budgets: Budgets = {}
    for finding in findings:
        if finding.compiled is not None:
            usage = finding.compiled.usage
            registers = [-(-count // _UNIT) * _UNIT for count in (usage.vgpr, usage.sgpr)]
            rest = [usage.lds, *(-(-count // _SPARE) * _SPARE for count in (usage.sgpr_spills, usage.scratch))]
            budgets.setdefault(finding.arch, {})[finding.case.label] = [*registers, *rest]
    return budgets


def compile_all(root: Path, work: list[tuple[str, Case]], jobs: int) -> tuple[list[Finding], int]:
    """Everything, by `jobs` processes; and how many sources were compiled rather than known."""
    waiting: queue.SimpleQueue[tuple[int, str, Case]] = queue.SimpleQueue()
    for number, (arch, case) in enumerate(work):
        waiting.put((number, arch, case))
    findings: dict[int, Finding] = {}
    counts: list[int] = []
    broken: list[BaseException] = []

    def run() -> None:
        try:
            with Session(root) as session:
                while True:
                    try:
                        number, arch, case = waiting.get_nowait()
                    except queue.Empty:
                        break
                    findings[number] = _compile(session, arch, case)
                counts.append(session.compiled)
        except BaseException as error:
            broken.append(error)

    threads = [threading.Thread(target=run) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if broken:
        raise broken[0]
    return [findings[number] for number in sorted(findings)], sum(counts)


def _compile(session: Session, arch: str, case: Case) -> Finding:
    try:
        return Finding(arch, case, session.compile(case.source.text, case.source.name, arch)[case.entry])
    except CompileError as error:
        return Finding(arch, case, None, str(error))


def _print_table(findings: list[Finding]) -> None:
    for finding in findings:
        if finding.compiled is None:
            continue
        usage = finding.compiled.usage
        matrix = [
            f"{count} {name}"
            for name, count in finding.compiled.instructions.items()
            if name.startswith(("v_mfma", "v_wmma"))
        ]
        print(
            f"{finding.arch:8} {finding.case.label:52} vgpr {usage.vgpr:3} agpr {usage.agpr:3} sgpr {usage.sgpr:3} "
            f"lds {usage.lds:5} spills {usage.vgpr_spills} + {usage.sgpr_spills} memory {usage.scratch} "
            f"{', '.join(matrix)}"
        )


def main(arguments: list[str] | None = None) -> int:
    """The command line; 0 where every kernel passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=sorted(kernels.SPECS), default=sorted(kernels.SPECS))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--table", action="store_true", help="print what every kernel takes")
    parser.add_argument("--update", action="store_true", help="write the budgets anew")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        root = toolchain.ensure()
    except toolchain.ToolchainError as error:
        print(f"AMD's compiler cannot be had: {error}", file=sys.stderr)
        return 2
    fetched = time.monotonic() - began
    work = [(arch, case) for arch in options.arch for case in kernels.cases(arch)]
    findings, compiled = compile_all(root, work, max(1, options.jobs))
    budgets: Budgets = json.loads(_BUDGETS.read_text(encoding="utf-8")) if _BUDGETS.is_file() else {}
    if options.update:
        budgets |= updated(findings)
        _BUDGETS.write_text(_rendered(budgets), encoding="utf-8")
    if options.table:
        _print_table(findings)
    failed = 0
    for finding in findings:
        for fault in faults(finding, budgets):
            failed += 1
            print(f"{finding.arch} {finding.case.label}: {fault}", file=sys.stderr)
    version = next(line for line in toolchain.packages(root).splitlines() if line.startswith("libhiprtc"))
    for arch in options.arch:
        of_arch = [finding for finding in findings if finding.arch == arch]
        matrix = sum(bool(finding.case.mnemonic) for finding in of_arch)
        print(f"{arch}: {len(of_arch)} kernels, {matrix} of them by matrix instructions")
    seconds = time.monotonic() - began
    print(f"{version}: {compiled} sources compiled in {seconds:.0f} s, {fetched:.0f} s of them to get the compiler")
    print("AMD kernels: " + (f"{failed} faults" if failed else "all within their budgets"))
    return 1 if failed else 0


def _rendered(budgets: Budgets) -> str:
    """A line a kernel, so that differences can be read."""
    parts = []
    for arch in sorted(budgets):
        lines = [f"    {json.dumps(label)}: {json.dumps(budget)}" for label, budget in sorted(budgets[arch].items())]
        parts.append(f"  {json.dumps(arch)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"

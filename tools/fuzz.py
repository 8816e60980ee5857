"""Fuzzes the parsers of what strangers send: `make fuzz`, or `python tools/fuzz.py --seconds 600 npy multipart`.

With atheris (pip install atheris) guided by coverage, else by mutation of well-formed inputs. An input that breaks an
invariant is kept under tests/fuzz/corpus, where the test suite finds it from then on, and ends the run with status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "fuzz" / "corpus"


def keep(target: str, data: bytes) -> Path:
    """Saves an input that went wrong."""
    path = CORPUS / target / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def by_mutation(target: str, seconds: float, seed: int) -> int:
    """Without guidance. Returns how many inputs were tried; raises SystemExit when one goes wrong."""
    from fuzz_targets import TARGETS, mutated, seeds

    chance = random.Random(seed)  # noqa: S311 (no secrets)
    pool = [*seeds(target), *(path.read_bytes() for path in sorted((CORPUS / target).glob("*")))]
    tried, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        data = mutated(chance.choice(pool), chance)
        tried += 1
        try:
            TARGETS[target](data)
        except Exception:
            traceback.print_exc()
            print(f"{target}: kept as {keep(target, data)}", file=sys.stderr)
            raise SystemExit(1) from None
        if len(data) < 1 << 14 and chance.random() < 0.02:
            pool[chance.randrange(len(pool))] = data
    return tried


def guided(target: str, seconds: float, seed: int) -> int:
    """By atheris, in a process of its own (libFuzzer ends it). Returns its status."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "corpus").mkdir()
        sys.path[:0] = [str(ROOT / "tests" / "support")]
        from fuzz_targets import seeds

        for index, data in enumerate(seeds(target)):
            (work / "corpus" / f"seed-{index}").write_bytes(data)
        command = [sys.executable, __file__, "--atheris", target, "--", str(work / "corpus"), str(CORPUS / target)]
        flags = [f"-max_total_time={int(seconds)}", f"-artifact_prefix={work}/", "-max_len=8192", f"-seed={seed}"]
        status = subprocess.run([*command, *flags, "-print_final_stats=1"], check=False).returncode
        for path in work.glob("crash-*"):
            print(f"{target}: kept as {keep(target, path.read_bytes())}", file=sys.stderr)
        return status


def inside_atheris(target: str, arguments: list[str]) -> None:
    """The process that libFuzzer runs in."""
    import atheris

    with atheris.instrument_imports(include=["gemmserve", "gemmserve_service"]):
        from fuzz_targets import TARGETS
    atheris.Setup([sys.argv[0], *arguments], TARGETS[target])
    atheris.Fuzz()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="npy, multipart, json, headers, requests; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), help="of the mutations")
    parser.add_argument("--atheris", metavar="TARGET", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests" / "support")]
    if options.atheris:
        inside_atheris(options.atheris, options.targets)
        return 0
    from fuzz_targets import TARGETS

    with_guidance = importlib.util.find_spec("atheris") is not None
    print(f"fuzz: seed {options.seed}, {'atheris' if with_guidance else 'mutation'}", flush=True)
    for target in options.targets or TARGETS:
        if with_guidance:
            if guided(target, options.seconds, options.seed):
                return 1
        else:
            print(f"fuzz: {target}: {by_mutation(target, options.seconds, options.seed)} inputs", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

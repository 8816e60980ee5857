"""`python -m chaos`: every scenario, one after the other, and a JSON report of what was found."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

from chaos import faults, joined, neighbours


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--jobs", type=int, default=500, help="jobs submitted while processes are killed")
    parser.add_argument("--over-s", type=float, default=120.0, help="seconds over which they are submitted")
    parser.add_argument("--beside-s", type=float, default=15.0, help="seconds of each measurement beside neighbours")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the kills")
    parser.add_argument("--only", action="append", default=[], help="one scenario by name; may be repeated")
    parser.add_argument("--report", type=Path, help="where the JSON goes (default: standard output)")
    arguments = parser.parse_args()
    scenarios = {
        "kills": lambda folder: faults.kills(
            folder, jobs=arguments.jobs, over_s=arguments.over_s, pause_s=(0.5, 3.0), seed=arguments.seed
        ),
        "device_kills": lambda folder: faults.kills(
            folder,
            jobs=arguments.jobs,
            over_s=arguments.over_s,
            pause_s=(0.5, 3.0),
            seed=arguments.seed,
            environment=faults.DEVICE,
        ),
        "joined": lambda folder: joined.joined(
            folder,
            jobs=arguments.jobs,
            over_s=arguments.over_s,
            pause_s=(0.5, 3.0),
            cut_s=(3.0, 10.0),
            seed=arguments.seed,
        ),
        "joined_networks": lambda folder: joined.joined(
            folder,
            jobs=arguments.jobs,
            over_s=2 * arguments.over_s,
            pause_s=(0.5, 3.0),
            cut_s=(5.0, 60.0),
            seed=arguments.seed,
            bits_per_s=1e9,
        ),
        "disk_full": faults.disk_full,
        "clock_jumps": faults.clock_jumps,
        "second_server": faults.second_server,
        "neighbours": lambda folder: neighbours.neighbours(folder, for_s=arguments.beside_s),
    }
    report: dict[str, object] = {
        "machine": {"processors": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    ok = True
    for name, scenario in scenarios.items():
        if arguments.only and name not in arguments.only:
            continue
        print(f"chaos: {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="gemmserve-chaos-") as folder:
            try:
                found = scenario(Path(folder))
            except Exception as error:
                found = {"ok": False, "error": repr(error), "trace": traceback.format_exc().splitlines()[-30:]}
            if not found["ok"] and (log := Path(folder) / "server.log").exists():
                found["log"] = log.read_text(errors="replace").splitlines()[-60:]
        report[name] = found
        ok = ok and bool(found["ok"])
        print(f"chaos: {name}: {'ok' if found['ok'] else 'FAILED'}", file=sys.stderr, flush=True)
    report["ok"] = ok
    text = json.dumps(report, indent=2)
    if arguments.report is None:
        print(text)
    else:
        arguments.report.write_text(text + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

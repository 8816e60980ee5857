"""python -m benchmarks.service fleet | install | overview | run | report: see the modules of these names."""

import sys

from benchmarks.service import fleet, install, overview, report, run

COMMANDS = {
    "fleet": fleet.main,
    "install": install.main,
    "overview": overview.main,
    "run": run.main,
    "report": report.main,
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:] or [""]
    if name not in COMMANDS:
        sys.exit(f"python -m benchmarks.service {'|'.join(COMMANDS)}")
    sys.exit(COMMANDS[name](arguments))

"""python -m benchmarks.service install | run | report: see the modules of these names."""

import sys

from benchmarks.service import install, report, run

COMMANDS = {"install": install.main, "run": run.main, "report": report.main}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:] or [""]
    if name not in COMMANDS:
        sys.exit(f"python -m benchmarks.service {'|'.join(COMMANDS)}")
    sys.exit(COMMANDS[name](arguments))

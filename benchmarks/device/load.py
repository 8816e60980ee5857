"""Load test: the whole service under open and closed loops, each figure beside what bounds it, in one run.

    python -m benchmarks.device.load run --output load.json [--device cuda:0] [--only results one-shot] [--minutes 8]
    python -m benchmarks.device.load report docs/benchmarks/load-nvidia-h200.json

`run` needs `gemmserve[server]` installed; PYTHONPATH may name other sources of it. The rows are in
`benchmarks/load/rows.py`. The JSON is written after every row; a row that could not be measured is named in it with the
reason, and the exit status is 3 if one failed. `--device cpu --tiny` shows without a GPU that all works.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import psutil
from benchmarks.load import report
from benchmarks.load.rows import ROWS, WITH_OWN_SERVERS, Skipped
from benchmarks.load.sizes import FULL, TINY
from benchmarks.load.stage import SETTINGS, Stage, file_system, free_bytes, roomiest
from benchmarks.service.results import digest, write

FAILED = 3


def parsed(arguments):
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.load", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure, and write JSON")
    run.add_argument("--output", type=Path, required=True)
    run.add_argument("--device", default="cuda:0", help="of the server that most rows share: cuda:0, rocm:0 or cpu")
    run.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}")
    run.add_argument("--tiny", action="store_true", help="tiny sizes: shows that all works, and nothing else")
    run.add_argument("--minutes", type=float, default=8.0, help="no row begins when so many are over (default 8)")
    run.add_argument("--data", type=Path, help="folder for arrays; default: the roomier of /tmp and /dev/shm")
    run.add_argument("--seed", type=Path, help="folder of kernels compiled ahead of time, for first-product")
    written = commands.add_parser("report", help="write Markdown and a plot beside the JSON")
    written.add_argument("source", type=Path, nargs="+")
    return parser.parse_args(arguments)


def measure(options):
    """Run the rows that were chosen; return the document, written to `output` after each."""
    began = time.monotonic()
    sizes = TINY if options.tiny else FULL
    folder = options.data or roomiest()
    with Stage(options.device, sizes, folder, options.seed) as stage:
        document = {
            "environment": environment(stage, options), "sources": digest(), "kernels": stage.kernels["products"],
            "figures": [], "not_measured": {},
        }  # fmt: skip
        for name in (name for name in ROWS if name in options.only):
            if time.monotonic() - began > 60 * options.minutes:
                document["not_measured"][name] = "out of time"
                continue
            start = time.monotonic()
            if name in WITH_OWN_SERVERS:
                stage.end_server()
            try:
                for each in ROWS[name](stage):
                    document["figures"].append({"row": name, **each})
                    print(report.line(document["figures"][-1]), flush=True)
            except Skipped as reason:
                document["not_measured"][name] = str(reason)
            except Exception as error:
                document["not_measured"][name] = f"failed: {type(error).__name__}: {error}"
                said = "\n".join([str(error), *getattr(error, "__notes__", ()), stage.log()])
                print(f"{name}: {said}", file=sys.stderr, flush=True)
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
            write(options.output, document)
        document["seconds"] = round(time.monotonic() - began, 1)
        write(options.output, document)
    return document


def environment(stage, options):
    """Return what the figures hold for."""
    return stage.kernels["environment"] | {
        "devices": stage.kernels["devices"], "cpus": len(os.sched_getaffinity(0)),
        "host_memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "store": f"{file_system(stage.folder)}, {free_bytes(stage.folder) >> 30} GiB free",
        "settings": SETTINGS, "served_on": options.device, "tiny": options.tiny,
        "client_processes": stage.sizes.clients,
    }  # fmt: skip


def main(arguments=None):
    """Run a command; 3 where a row failed."""
    options = parsed(arguments)
    if options.command == "report":
        for source in options.source:
            report.write(source)
        return 0
    document = measure(options)
    print(f"{options.output}, {document['seconds']:.0f} s")
    return FAILED if any(reason.startswith("failed") for reason in document["not_measured"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The service beside its rivals on this machine, in one run: times, rates, memory; writes JSON.

    python -m benchmarks.service run [--cases round\\ trip sdk ...] [--quick] [--output FILE]

Every case starts its servers, each in processes of its own with one BLAS thread, lets them take turns in another order
every round, and ends them. The JSON is written after every case: run again, it goes on where it stopped, unless a
source has changed. Who cannot take part is said in the JSON. Exits 3 where a case could not be measured at all.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
from benchmarks.service import ceilings, memory, transfers, turns
from benchmarks.service.agents import AgentError
from benchmarks.service.results import ROOT, Results, digest
from benchmarks.service.servers import KINDS, ServerError, versions
from benchmarks.service.suite import expected_s, quick, suite
from benchmarks.service.summary import summary

OUTPUT = ROOT / "docs" / "benchmarks" / "service.json"
KINDS_OF_CASES = {"turns": turns.measure, "memory": memory.measure, "transfers": transfers.measure}


def environment(options):
    """What the figures hold for."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "blas_threads": 1,
        "options": options,
    }


def variables_of(checkout):
    """That make Python find gemmserve there instead of here."""
    return {"PYTHONPATH": ":".join(str(checkout / package) for package in ("client", "kernels", "service"))}


def extra_of(checkout=None):
    """Arguments and variables of a gemmserve: with a Unix socket where it knows one. Raises ServerError."""
    if checkout is None:
        from gemmserve_service.settings import Settings

        return arguments_for(Settings.model_fields), {}
    code = "import json; from gemmserve_service.settings import Settings as S; print(json.dumps(list(S.model_fields)))"
    variables = variables_of(checkout)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ServerError(f"gemmserve in {checkout}: {done.stderr.strip().splitlines()[-1]}")
    return arguments_for(json.loads(done.stdout)), variables


def arguments_for(fields):
    """What a server with these settings is started with."""
    return ("--uds", "{path}") if "uds" in fields else ()


def with_baseline(case):
    """The same, and everything of ours on the wire a second time from another checkout."""
    ours = [entry for entry in case.entries if entry.server == "gemmserve" and not entry.via.startswith("sdk")]
    again = tuple(replace(entry, server="gemmserve" + turns.BASELINE) for entry in ours)
    return replace(case, entries=case.entries + again) if case.kind == "turns" else case


def parsed(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service run", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", metavar="CASE", help="only these, or all whose names begin so")
    parser.add_argument("--servers", nargs="*", metavar="SERVER", help=f"only these of {', '.join(KINDS)}")
    parser.add_argument("--quick", action="store_true", help="short turns: shows that all works, and nothing else")
    parser.add_argument("--rounds", type=int, help="turns of everyone in a case")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="another checkout, measured beside this one")
    parser.add_argument("--fresh", action="store_true", help="do not go on where the last run stopped")
    parser.add_argument("--list", action="store_true", help="the cases, and nothing else")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    if unknown := set(options.servers or ()) - set(KINDS):
        parser.error(f"no server {', '.join(sorted(unknown))}")
    if not chosen(options):
        parser.error("no such case: --list names them")
    return options


def chosen(options):
    """The cases to measure."""
    cases = suite()
    if options.cases:
        names = {case.name for case in cases}
        beginnings = tuple(name for name in options.cases if name not in names)
        cases = [c for c in cases if c.name in options.cases or (beginnings and c.name.startswith(beginnings))]
    if options.quick:
        cases = map(quick, cases)
    if options.rounds:
        cases = [replace(case, rounds=options.rounds) for case in cases]
    if options.servers:
        cases = [replace(c, entries=tuple(e for e in c.entries if e.server in options.servers)) for c in cases]
    if options.baseline:
        cases = map(with_baseline, cases)
    return [case for case in cases if case.entries]


def main(arguments=None):
    options = parsed(arguments)
    cases = chosen(options)
    if options.list:
        print("\n".join(f"{case.name}: {case.title}" for case in cases))
        print(f"about {sum(map(expected_s, cases)) / 60:.0f} minutes")
        return 0
    settings = {"quick": options.quick, "rounds": options.rounds, "baseline": bool(options.baseline)}
    results = Results(options.output, environment(settings), digest(), fresh=options.fresh)
    if results.replaced:
        print(f"the figures in {options.output} are of other sources or options: from the beginning")
    document, began, status = results.document, time.monotonic(), 0
    if not document["ceilings_mib_s"]:
        small = {"nbytes": 4 * ceilings.MIB, "times": 3} if options.quick else {}
        document["ceilings_mib_s"] = ceilings.measured(**small)
    extra = {"gemmserve": extra_of()}
    if options.baseline:
        extra["gemmserve" + turns.BASELINE] = extra_of(options.baseline.absolute())
    for case in (case for case in cases if case.name not in document["done"]):
        print(f"{case.name}: {case.title}", flush=True)
        record_versions(document, case)
        document.setdefault("load_before", {})[case.name] = round(os.getloadavg()[0], 2)
        try:
            rows, failed = KINDS_OF_CASES[case.kind](case, extra=extra)
        except (ServerError, AgentError, OSError) as error:
            rows, failed = [], {"all": str(error)}
            print(f"  {error}", file=sys.stderr)
        status = status if rows else 3
        results.add(case.name, rows, failed)
    document["summary"] = summary(document["rows"])
    document["minutes"] = round(document.get("minutes", 0.0) + (time.monotonic() - began) / 60, 1)
    results.save()
    for each in (found for found in document["summary"] if found["found"] is not None):
        print(f"{each['name']}: {each['found']} (target {each['target']}, stretch {each['stretch']}) {each['met']}")
    print(f"{results.path}, {time.monotonic() - began:.0f} s")
    return status


def record_versions(document, case):
    """Note the versions of those who take part, once."""
    for server in {entry.server for entry in case.entries} & set(KINDS):
        if server not in document["versions"] and KINDS[server].packages:
            try:
                document["versions"][server] = versions(KINDS[server])
            except ServerError as error:
                document["versions"][server] = {"missing": str(error)}


if __name__ == "__main__":
    sys.exit(main())

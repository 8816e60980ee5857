"""A case's entries taking turns: every round asks each once, in another order, so that noise hits all alike."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.service import histogram
from benchmarks.service.agents import Agent, AgentError, load_generator
from benchmarks.service.exchanges import Work
from benchmarks.service.http1 import server_timing
from benchmarks.service.servers import ENVIRONMENTS, KINDS, RIVALS, Server, ServerError

IDLE_S = 0.5


def sdk_agent(server):
    """The driver of that server's own client. Raises ServerError."""
    if server == "gemmserve" or server.startswith("gemmserve "):
        return Agent("-m", "benchmarks.service.sdk")
    python = ENVIRONMENTS / "triton" / "bin" / "python"
    if server != "tritonserver" or not Path(python).is_file():
        raise ServerError(f"no client of {server} is installed")
    return Agent(str(RIVALS / "sdk_triton.py"), python=str(python))


class Turns:
    """Servers and drivers of one case, started once. `unavailable` says who could not take part, and why."""

    def __init__(self, case, extra=None):
        self.case = case
        self._extra = extra or {}
        self.unavailable = {}

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        self._servers, self._agents = {}, {}
        try:
            self.entries = [entry for entry in self.case.entries if self._prepare(entry)]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *details):
        self._stack.__exit__(*details)

    def _prepare(self, entry):
        """Whether it can take part; `unavailable` says why not."""
        try:
            server = self._server(entry.server)
            self._agent(entry)
        except ServerError as error:
            self.unavailable[entry.who] = str(error)
            return False
        if entry.via == "wire unix" and not Path(server.path).exists():
            self.unavailable[entry.who] = "not available: no Unix socket"
            return False
        return True

    def _server(self, name):
        if name not in self._servers:
            arguments, variables = self._extra.get(name, ((), {}))
            self._servers[name] = None
            server = Server(KINDS[name.removesuffix(BASELINE)], arguments, variables)
            self._servers[name] = self._stack.enter_context(server)
        if self._servers[name] is None:
            raise ServerError(f"{name} did not start")
        return self._servers[name]

    def _agent(self, entry):
        key = entry.server if entry.via.startswith("sdk") else ""
        if key not in self._agents:
            self._agents[key] = self._stack.enter_context(sdk_agent(key) if key else load_generator())
        return self._agents[key]

    def turn(self, entry):
        """One measurement. Raises AgentError."""
        server, case = self._servers[entry.server], self.case
        address = server.path if entry.via == "wire unix" else server.address
        work = {"operation": entry.operation, "n": case.n, "seconds": case.seconds, "most": entry.most}
        how = {"via": entry.via, "path": server.path, "protocol": server.kind.protocol}
        before = server.cpu_by_role()
        answer = self._agent(entry).ask(address=address, clients=case.clients, rate=case.rate, **work, **how)
        if "durations_ns" in answer:
            found = histogram.empty()
            for duration in answer.pop("durations_ns"):
                found.record_value(duration)
            answer |= {"histogram": histogram.encoded(found), "count": found.get_total_count()}
            answer["median_ms"] = histogram.at(found, 50)
        times = answer["count"] + 1  # the first one is not timed
        answer["cpu_by_role_ms"] = {
            name: 1e3 * (used - before[name]) / times for name, used in server.cpu_by_role().items()
        }
        answer["cpu_ms"] = sum(answer["cpu_by_role_ms"].values())
        return answer

    def idle(self):
        """Processors that all servers together keep busy while nobody asks them anything."""
        servers = [server for server in self._servers.values() if server is not None]
        cpu = sum(server.cpu_seconds() for server in servers)
        time.sleep(IDLE_S)
        return (sum(server.cpu_seconds() for server in servers) - cpu) / IDLE_S

    def rss_mib(self, entry):
        """Return the resident memory of that entry's server."""
        return self._servers[entry.server].rss_bytes() / (1 << 20)


BASELINE = ", baseline"
"""Suffix of the name of a second gemmserve, from another checkout."""


def measure(case, *, extra=None, say=print):
    """Rows of the case, and who could not take part."""
    rng = random.Random(case.name)
    with Turns(case, extra) as turns:
        rounds, failed = defaultdict(list), dict(turns.unavailable)
        idle = turns.idle()
        for _ in range(case.rounds):
            order = list(turns.entries)
            rng.shuffle(order)
            for entry in order:
                if entry.who in failed:
                    continue
                try:
                    rounds[entry].append(turns.turn(entry))
                except AgentError as error:
                    failed[entry.who] = str(error)
        memory = {entry: turns.rss_mib(entry) for entry in rounds}
    rows = [row(case, entry, rounds[entry], memory[entry], idle) for entry in case.entries if rounds.get(entry)]
    for each in rows:
        say(describe(each))
    for who, why in failed.items():
        say(f"  {who}: {why.strip().splitlines()[-1]}")
    return rows, failed


def row(case, entry, answers, rss_mib, idle):
    """What the report shows of an entry."""
    whole = histogram.merged(answer["histogram"] for answer in answers)
    work = Work(entry.operation, case.n)
    latency = histogram.summary(whole)
    phases = phases_of([timing for answer in answers for timing in answer.get("timings", [])])
    lag = [answer["lag_p99_ms"] for answer in answers if answer.get("lag_p99_ms") is not None]
    client = [answer["client_cpu"] for answer in answers if answer.get("client_cpu") is not None]
    errors = defaultdict(int)
    for answer in answers:
        for status, count in answer.get("errors", {}).items():
            errors[status] += count
    return {
        "case": case.name, "who": entry.who, "server": entry.server, "operation": entry.operation, "via": entry.via,
        "n": case.n, "clients": case.clients, "rate": case.rate, "up": work.up, "down": work.down,
        "medians_ms": [answer["median_ms"] for answer in answers], "rates": [answer.get("per_s") for answer in answers],
        "latency": latency, "histogram": histogram.encoded(whole), "phases_ms": phases,
        "cpu_ms": statistics.median(answer["cpu_ms"] for answer in answers),
        "cpu_by_role_ms": {name: statistics.median(answer["cpu_by_role_ms"].get(name, 0.0) for answer in answers)
                           for name in sorted({name for answer in answers for name in answer["cpu_by_role_ms"]})},
        "client_cpu": statistics.median(client) if client else None,
        "lag_p99_ms": max(lag, default=None), "errors": dict(errors), "rss_mib": rss_mib, "idle_cpu": idle,
    }  # fmt: skip


def phases_of(timings):
    """Medians of Server-Timing's phases, and of the whole as the client saw it ("total"); {} without any."""
    collected = defaultdict(list)
    for total, text in timings:
        collected["total"].append(total)
        for name, value in server_timing(text).items():
            collected[name].append(value)
    return {name: statistics.median(values) for name, values in collected.items()}


def describe(each):
    """A line for the terminal."""
    latency = each["latency"]
    if not latency["count"]:
        return f"  {each['who']:34} nothing measured, {each['errors']}"
    text = f"  {each['who']:34} median {latency['p50_ms']:9.3f} ms  p99 {latency['p99_ms']:9.3f} ms"
    rates = [rate for rate in each["rates"] if rate]
    return text + (f"  {statistics.median(rates):8.1f}/s" if rates else "") + f"  server {each['cpu_ms']:.2f} ms CPU"

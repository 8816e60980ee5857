"""Rows of a load test about products larger than a device's memory, and about several devices of the host."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from benchmarks.load import block_trace
from benchmarks.load.asking import Skipped, figure, jobs, small, together
from benchmarks.load.gauges import Gauges
from benchmarks.load.stage import PATIENCE_S, absolute_path, pairs, serving, settled
from benchmarks.service.servers import end_with_parent, free_port

from gemmserve_kernels.blocks.grid import SIDE
from gemmserve_service.executor.protocol import BLOCKS_AHEAD

STREAMED = 4
"""Products larger than a device's memory, on each server."""
LARGER = 2
"""The same, where one takes ten seconds."""
COMPLEX64 = 8
MATRICES = 6
"""Matrices that the host's memory must hold for a product: three, those of the client, and as much for the arena."""
END_S = 30.0
SHARED_ARENA = 8 << 30
"""Bytes of the host arena of each of two servers: results are deleted as they come."""


def counts(stage):
    """Return the devices of servers: the first one, and the first two where there are two."""
    kind = stage.device.partition(":")[0]
    return [f"{kind}:0", f"{kind}:0,{kind}:1"][: max(1, min(2, stage.kernels["devices"]))]


def rate_figures(stage, start, extents, what, count, *, arena=True, work="jobs"):
    """Yield the rates of jobs by servers that `start` starts, for each extent, on one device and on two where there are
    two. `arena`: the workers share the server's, whose registering is waited for. `work`: of the clients, "jobs" one by
    one or "mapped".
    """
    for n in extents:
        rates = []
        for devices in counts(stage):
            with start(devices, stage.folder) as server:
                settled(server, len(devices.split(",")) if arena else 0)
                operands = pairs(stage.clients[0], server, n)
                command = {"work": work, "depth": stage.sizes.depth, "then": "delete"}
                jobs(stage, server.url, operands, count=count * len(stage.clients), **command)
                with Gauges(server) as gauges:
                    done = jobs(stage, server.url, operands, seconds=stage.sizes.turn_s, **command)
            rates.append(done["count"] / done["seconds"])
            alone = len(rates) == 1
            yield figure(
                f"{n}^3 on {devices}{what}", "jobs/s", rates[-1],
                1 / stage.kernel_s(n) if alone else 2 * rates[0], "kernel loop" if alone else "twice one device",
                gauges=gauges, client_cpu=done["client_cpu"], count=done["count"],
            )  # fmt: skip


def small_jobs(stage):
    """Jobs a second on two devices over those on one, each by a server of its own. Raises Skipped with one device."""
    if stage.kernels["devices"] < 2:
        raise Skipped("one device")
    yield from rate_figures(stage, serving, (stage.sizes.spread,), "", 10)
    yield from rate_figures(stage, serving, (stage.sizes.spread,), ", by map", 100, work="mapped")
    yield from rate_figures(stage, serving, stage.sizes.larges[-1:], "", 2)


def servers(stage):
    """Jobs a second of two servers, a device and half of the clients each, over those of one of the two alone. Raises
    Skipped with one device.
    """
    if stage.kernels["devices"] < 2:
        raise Skipped("one device")
    n, half = stage.sizes.spread, len(stage.clients) // 2
    halves = stage.clients[:half], stage.clients[half:]
    room = dict.fromkeys(("GEMMSERVE_HOST_ARENA_BYTES", "GEMMSERVE_ARENA_AHEAD_BYTES"), str(SHARED_ARENA))
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(serving(each, stage.folder, **room)) for each in counts(stage)[-1].split(",")]
        for server in both:
            settled(server)
        operands = [pairs(clients[0], server, n) for clients, server in zip(halves, both, strict=True)]
        for work, what, count in (("jobs", "", 10), ("mapped", ", by map", 100)):
            command = {"work": work, "depth": stage.sizes.depth, "then": "delete"}
            alone = None
            for used in (both[:1], both):
                with_clients = list(zip(used, operands, halves, strict=False))
                by_each(stage, with_clients, count=count * half, **command)
                with contextlib.ExitStack() as watched:
                    gauges = [watched.enter_context(Gauges(server)) for server in used]
                    found = by_each(stage, with_clients, seconds=stage.sizes.turn_s, **command)
                rate = sum(each["count"] / each["seconds"] for each in found)
                yield figure(
                    f"{n}^3 by {len(used)} of two servers{what}", "jobs/s", rate,
                    2 * alone if alone else 1 / stage.kernel_s(n), "twice one server" if alone else "kernel loop",
                    gauges=gauges[0], client_cpu=sum(each["client_cpu"] for each in found),
                    count=sum(each["count"] for each in found), cpu_of_each=[each.document()["cpu"] for each in gauges],
                )  # fmt: skip
                alone = rate


def by_each(stage, servers_with_clients, **command):
    """Run jobs on several servers at one time, (server, operands, clients) each; return the answers of `jobs`."""
    found = [None] * len(servers_with_clients)

    def run(number):
        server, operands, clients = servers_with_clients[number]
        found[number] = jobs(stage, server.url, operands, clients=clients, **command)

    together([functools.partial(run, number) for number in range(len(found))])
    return found


def joined(stage):
    """Jobs a second of workers that joined by TCP, a device each, beside a server without a worker of its own."""
    yield from rate_figures(stage, serving_joined, (stage.sizes.spread, stage.sizes.result), ", joined", 4, arena=False)


@contextlib.contextmanager
def serving_joined(devices, folder):
    """Yield a server like `serving`'s without devices; each of `devices` is that of a worker that joins it. Raises
    ServerError.
    """
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": absolute_path()}
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="gemmserve-load-", dir=folder))
        log = stack.enter_context(Path(cache, "log").open("wb"))
        for number, device in enumerate(devices.split(",")):
            where = ("--join", f"http://127.0.0.1:{port}", "--device", device, "--name", f"node{number}")
            worker = subprocess.Popen(
                [sys.executable, "-m", "gemmserve.cli", "worker", *where], stdout=log, stderr=log, env=environment,
                cwd=cache, preexec_fn=end_with_parent,  # noqa: PLW1509 (it is replaced at once)
            )  # fmt: skip
            stack.callback(ended, worker)
        with serving("none", folder, GEMMSERVE_JOIN_PORT=str(port), GEMMSERVE_JOIN_HOST="127.0.0.1") as server:
            yield server


def ended(process):
    """End a process, by SIGKILL if it takes too long."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def streamed(stage):
    """A product larger than what the server may use of the device, from operands in the store's files: from submission
    to the end of the job, the median of all but the first of each server. The bound is the kernels' rate at the largest
    resident product; on two devices, half of the time on one.
    """
    n, near = stage.sizes.streamed, max(stage.sizes.products)
    bound = stage.kernel_s(near) * (n / near) ** 3
    one, *two = counts(stage)
    work = {"work": "streamed", "n": n}
    with tempfile.TemporaryDirectory(prefix="gemmserve-load-", dir=stage.folder) as data:
        with serving(one, stage.folder, data=data) as server:
            ids = stage.clients[0].ask(PATIENCE_S, url=server.url, count=0, ids=[], **work)["ids"]
        os.sync()  # so that no product is computed beside the writing of its operands
        on_one = None
        for devices, budget in [(one, None), *((each, None) for each in two), *((one, b) for b in stage.sizes.budgets)]:
            variables = {} if budget is None else {"GEMMSERVE_DEVICE_MEMORY_BYTES": str(budget)}
            told = ("--log-level", "debug")  # when each block was at which stage
            with serving(devices, stage.folder, *told, data=data, **variables) as server:
                settled(server, len(devices.split(",")))
                with Gauges(server) as gauges:
                    answer = stage.clients[0].ask(PATIENCE_S, url=server.url, count=STREAMED, ids=ids, **work)
                trace = block_trace.last_product(server.log.read_text(errors="replace"))
            first_s, *others = answer["seconds"]
            found = statistics.median(others)
            memory = "all memory" if budget is None else f"{budget / 1e9:g} GB of memory"
            if devices == one:
                where, limit, limit_is = memory, bound, f"kernel loop of {near}^3, by operations"
                on_one = found if budget is None else on_one
            else:
                where, limit, limit_is = f"{memory} of {devices}", on_one / 2, "half of one device's"
            yield figure(
                f"{n}^3 with {where}", "s", found, limit, limit_is,
                better="less", gauges=gauges, client_cpu=answer["client_cpu"], first_s=first_s, others_s=others, n=n,
                budget=budget, devices=devices, phases=answer["phases"], blocks_ahead=BLOCKS_AHEAD, trace=trace,
            )  # fmt: skip


def larger(stage):
    """A product whose operands and result no device holds, on one device and on two, a sample of its rows compared with
    sums in double; and small one-shots beside the first of them. Raises Skipped where the host has no memory for it.
    """
    n, near = stage.sizes.larger, max(stage.sizes.products)
    if psutil.virtual_memory().available < MATRICES * COMPLEX64 * n * n:
        raise Skipped(f"no memory for {MATRICES} matrices of {n} x {n}")
    scale = stage.kernel_s(near) / near**3
    work, on_one = {"work": "streamed", "n": n}, None
    with tempfile.TemporaryDirectory(prefix="gemmserve-load-", dir=stage.folder) as data:
        ids = []
        for devices in counts(stage):
            with serving(devices, stage.folder, data=data, GEMMSERVE_MAX_ARRAY_BYTES=str(COMPLEX64 * n * n)) as server:
                settled(server, len(devices.split(",")))
                began = time.perf_counter()
                ids = ids or stage.clients[0].ask(PATIENCE_S, url=server.url, count=0, ids=[], **work)["ids"]
                put_s = time.perf_counter() - began
                if on_one is None:
                    yield from beside_larger(stage, server, {**work, "ids": ids}, scale * n * SIDE**2)
                with Gauges(server) as gauges:
                    answer = stage.clients[0].ask(PATIENCE_S, url=server.url, count=LARGER, ids=ids, **work)
            best = min(answer["seconds"])
            alone = on_one is None
            on_one = best if alone else on_one
            yield figure(
                f"{n}^3 on {devices}", "s", best, scale * n**3 if alone else on_one / 2,
                f"kernel loop of {near}^3, by operations" if alone else "half of one device's", better="less",
                gauges=gauges, client_cpu=answer["client_cpu"], seconds_each=answer["seconds"], put_s=put_s, n=n,
                devices=devices, phases=answer["phases"],
            )  # fmt: skip


def beside_larger(stage, server, work, block_s):
    """Yield the figure of small one-shots while a product of `work` runs; `lasted`: whether until their end."""
    alone = small(stage, server, "closed")["latency"]["p99_ms"]
    found = {}
    thread = threading.Thread(
        target=lambda: found.update(stage.clients[0].ask(PATIENCE_S, url=server.url, count=1, **work))
    )
    thread.start()
    try:
        time.sleep(stage.sizes.turn_s / 4)
        with Gauges(server) as gauges:
            answer = small(stage, server, "closed")
        lasted = thread.is_alive()
    finally:
        thread.join()
    block = 1e3 * block_s
    yield figure(
        f"{stage.sizes.small}^3 beside {work['n']}^3, closed loop, p99", "ms", answer["latency"]["p99_ms"],
        alone + 2 * block, "alone and two blocks", better="less", gauges=gauges, client_cpu=answer["client_cpu"],
        latency=answer["latency"], histogram=answer["histogram"], block_ms=block, alone_ms=alone, lasted=lasted,
        large_s=found.get("seconds"),
    )  # fmt: skip

"""Rows of a load test. Each takes the stage and yields figures: what was achieved beside what bounds it."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.load import block_trace, first_products
from benchmarks.load.gauges import Gauges
from benchmarks.load.stage import PATIENCE_S, drained, pairs, serving, settled, wait_for_none
from benchmarks.service import ceilings, histogram
from benchmarks.service.servers import KINDS, Server
from benchmarks.service.turns import phases_of

from gemmserve_service.executor.protocol import BLOCKS_AHEAD
from gemmserve_service.tenancy.api_keys import new_key

LINK_BYTES_PER_S = 44e9
"""Rate of results on their way to the host: what one device's link gave stored arrays (docs/transfer.md)."""
SEEN_S = 1.5e-3
FRONT_S = 0.5e-3
SUBMISSIONS_PER_S, MANY_PER_S = 1500.0, 10_000.0
"""Targets, where nothing on the machine is a bound."""
MANY = 500
"""Jobs of one request."""
STREAMED = 4
"""Products larger than a device's memory, on each server."""
CONNECTIONS = (1, 16)
OPEN_CONNECTIONS = 32
COMPLEX64 = 8
MIB = 1 << 20


class Skipped(Exception):  # noqa: N818 (no error)
    """A row that cannot be measured here; the text says why."""


def figure(case, unit, achieved, bound, bound_is, *, better="more", gauges=None, **more):
    """Return one figure: `ratio` is achieved over bound, good where it is large ("more") or small ("less")."""
    return {
        "case": case, "unit": unit, "achieved": achieved, "bound": bound, "bound_is": bound_is, "better": better,
        "ratio": achieved / bound, **(gauges.document() if gauges else {}), **more,
    }  # fmt: skip


def seen_done(stage):
    """`ra @ rb` on resident operands until the client has seen it done; the result stays on the server."""
    for n in stage.sizes.seen:
        pair = stage.operands(n)[0]
        with stage.watch() as gauges:
            answer = stage.clients[0].ask(
                PATIENCE_S, work="matmul", url=stage.server.url, pair=pair, count=stage.sizes.repeats
            )
        latency, text = distribution(answer["durations_ns"])
        bound = 1e3 * (SEEN_S + stage.kernel_s(n))
        yield figure(
            f"{n}^3, p50", "ms", latency["p50_ms"], bound, "1.5 ms and the kernel", better="less", gauges=gauges,
            client_cpu=answer["client_cpu"], latency=latency, histogram=text,
        )  # fmt: skip


def distribution(durations_ns):
    """Return (summary, text) of an HDR histogram of durations."""
    found = histogram.empty()
    for duration in durations_ns:
        found.record_value(duration)
    return histogram.summary(found), histogram.encoded(found)


def jobs(stage, url, operands, *, clients=None, **command):
    """Run jobs by client processes at one time (`clients`; all of them by default), counts divided among them.

    Return {count, seconds, nbytes, ids (of each client), client_cpu (processors)}.
    """
    used = clients or stage.clients
    count = command.pop("count", None)
    shares = [None if count is None else count // len(used) + (i < count % len(used)) for i in range(len(used))]
    commands = [{"work": "jobs", "pairs": operands, "count": share, **command} for share in shares]
    answers = stage.all_clients(url, commands, used)
    began, ended = min(each["began"] for each in answers), max(each["ended"] for each in answers)
    return {
        "count": sum(each["count"] for each in answers), "began": began, "seconds": ended - began,
        "nbytes": sum(each["nbytes"] for each in answers), "ids": [each["ids"] for each in answers],
        "client_cpu": sum(each["client_cpu"] for each in answers),
    }  # fmt: skip


def front_cpu(stage):
    """Processor time of the front for one durable job, submitted and waited for by the SDK."""
    operands = stage.operands(stage.sizes.small)
    with stage.watch() as gauges:
        done = jobs(stage, stage.server.url, operands, count=stage.sizes.jobs, depth=stage.sizes.depth, then="keep")
    each = 1e3 * gauges.cpu_s["front"] / done["count"]
    yield figure(
        f"{stage.sizes.small}^3, submitted and seen done", "ms", each, 1e3 * FRONT_S, "target", better="less",
        gauges=gauges, client_cpu=done["client_cpu"], count=done["count"], jobs_per_s=done["count"] / done["seconds"],
    )  # fmt: skip


def submissions(stage):
    """Jobs accepted on one connection, and the front's time for each until all are done: one a request, then many."""
    sizes, server = stage.sizes, stage.server
    command = {"operation": "submission", "n": sizes.small, "seconds": sizes.turn_s, "most": sizes.jobs}
    with stage.watch() as gauges:
        answer = stage.generators[0].ask(PATIENCE_S, address=server.address, protocol="gemmserve", **command)
        drained(server)
    yield from accepted("one a request", answer, answer["per_s"], SUBMISSIONS_PER_S, gauges)
    command = {"work": "submit_many", "pair": stage.operands(sizes.small)[0], "count": 2 * sizes.jobs, "size": MANY}
    with stage.watch() as gauges:
        answer = stage.clients[0].ask(PATIENCE_S, url=server.url, **command)
        drained(server)
    rate = answer["count"] / (answer["ended"] - answer["began"])
    yield from accepted(f"{MANY} a request", answer, rate, MANY_PER_S, gauges)


def accepted(case, answer, rate, target, gauges):
    """Yield the figures of submissions: their rate, and the front's time for a job."""
    more = {"gauges": gauges, "client_cpu": answer["client_cpu"], "count": answer["count"]}
    yield figure(case, "jobs/s", rate, target, "target", errors=answer.get("errors"), **more)
    each = 1e3 * gauges.cpu_s["front"] / answer["count"]
    yield figure(f"{case}, the front's time for a job", "ms", each, 1e3 * FRONT_S, "target", better="less", **more)


def transfers(stage):
    """Large arrays to the server and back, over TCP and the Unix socket, to space never used and used before."""
    nbytes = stage.sizes.transfer_bytes
    if nbytes > stage.room(1, nbytes):
        raise Skipped(f"no room for {nbytes} bytes")
    memory = ceilings.measured(min(nbytes, 256 * MIB), times=3, folder=stage.folder)
    bounds = {("put", "fresh"): "mapped file fresh", ("put", "recycled"): "mapped file warm"}
    for way, url in (("TCP", stage.server.url), ("Unix socket", f"unix:{stage.server.path}")):
        with stage.watch() as gauges:
            answer = stage.clients[0].ask(PATIENCE_S, work="transfer", url=url, nbytes=nbytes)
        for direction, space in itertools.product(("put", "get"), ("fresh", "recycled")):
            name = bounds.get((direction, space), "memcpy fresh")
            rate = nbytes / answer[space][f"{direction}_s"] / 1e9
            yield figure(
                f"{direction}, {space}, {way}", "GB/s", rate, memory[name] * MIB / 1e9, f"one processor's {name}",
                gauges=gauges, client_cpu=answer["client_cpu"], nbytes=nbytes,
            )  # fmt: skip


def one_shots(stage):
    """One-shot products over TCP, operands and result in the body, over what the sockets or the kernel allow."""
    n = stage.sizes.one_shot
    for connections in CONNECTIONS:
        with Server(KINDS["recv_into, TCP"]) as loop:
            command = {"operation": "product", "n": n, "seconds": stage.sizes.turn_s / 2}
            sockets = generated(stage, loop.address, connections, protocol="loop", **command)["per_s"]
        with stage.watch() as gauges:
            command = {"operation": "product", "n": n, "seconds": stage.sizes.turn_s}
            answer = generated(stage, stage.server.address, connections, protocol="gemmserve", **command)
        kernel = 1 / stage.kernel_s(n)
        bound_is = "recv_into loop, same bytes" if sockets < kernel else "kernel"
        yield figure(
            f"{n}^3, {connections} connections", "products/s", answer["per_s"], min(sockets, kernel), bound_is,
            gauges=gauges, client_cpu=answer["client_cpu"], latency=answer["latency"], histogram=answer["histogram"],
            errors=answer["errors"], phases_ms=answer["phases_ms"],
        )  # fmt: skip


def generated(stage, address, connections, **command):
    """Run a closed loop of so many connections, spread over the load generators; return what they say together."""
    count = min(connections, len(stage.generators))
    answers = []

    def ask(index):
        clients = connections // count + (index < connections % count)
        answers.append(stage.generators[index].ask(PATIENCE_S, address=address, clients=clients, **command))

    together([lambda index=index: ask(index) for index in range(count)])
    whole = histogram.merged(answer["histogram"] for answer in answers)
    return {
        "per_s": sum(answer["per_s"] for answer in answers), "latency": histogram.summary(whole),
        "histogram": histogram.encoded(whole), "client_cpu": sum(answer["client_cpu"] for answer in answers),
        "errors": {status: count for answer in answers for status, count in answer["errors"].items()},
        "phases_ms": phases_of([timing for answer in answers for timing in answer["timings"]]),
    }  # fmt: skip


def together(calls):
    """Make the calls at one time, each in a thread. Raises what the first that failed raised."""
    failed = []

    def guarded(call):
        try:
            call()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def small_beside_large(stage):
    """Small one-shots, closed and open loop, alone and beside large jobs of the same owner."""
    idle = {}
    for loop in ("closed", "open"):
        with stage.watch() as gauges:
            answer = small(stage, stage.server, loop)
        idle[loop] = answer["latency"]["p99_ms"]
        kernel = 1e3 * stage.kernel_s(stage.sizes.small)
        yield beside_figure(stage, f"alone, {loop} loop", answer, kernel, "kernel", gauges)
    for n in stage.sizes.larges:
        operands = stage.operands(n)
        block = 1e3 * stage.kernel_s(min(n, stage.sizes.block))
        for loop in ("closed", "open"):
            with stage.watch() as gauges:
                answer, large = beside(stage, stage.server, loop, operands)
            yield beside_figure(
                stage, f"beside {n}^3, {loop} loop", answer, idle[loop] + block, "alone and a block", gauges,
                block_ms=block, large_per_s=large["count"] / large["seconds"],
                large_of_kernel=large["count"] / large["seconds"] * stage.kernel_s(n),
            )  # fmt: skip


def small(stage, server, loop, **more):
    """Run small one-shots on one connection, or at `open_rate`; return the generator's answer with its `latency`."""
    sizes = stage.sizes
    how = {"clients": 1} if loop == "closed" else {"clients": OPEN_CONNECTIONS, "rate": sizes.open_rate}
    work = {"protocol": "gemmserve", "operation": "product", "n": sizes.small, "seconds": sizes.turn_s}
    answer = stage.generators[0].ask(PATIENCE_S, address=server.address, **work, **how, **more)
    return {**answer, "latency": histogram.summary(histogram.merged([answer["histogram"]]))}


def beside(stage, server, loop, operands, *, small_key=None, large_key=None):
    """Run small one-shots while one client process keeps two large jobs going; return both answers."""
    sizes, found = stage.sizes, {}

    def large():
        # One before, that the kernels are compiled and the operands on the device, is not counted.
        one = stage.clients[:1]
        jobs(stage, server.url, operands[:1], clients=one, count=1, depth=1, then="delete", api_key=large_key)
        started.set()
        span = 1.5 * sizes.turn_s
        found["large"] = jobs(
            stage, server.url, operands, clients=one, seconds=span, depth=2, then="delete", api_key=large_key
        )

    def little():
        if not started.wait(PATIENCE_S):
            raise TimeoutError("no large job was done")
        time.sleep(sizes.turn_s / 10)
        found["small"] = small(stage, server, loop, api_key=small_key)

    started = threading.Event()
    together([large, little])
    return found["small"], found["large"]


def beside_figure(stage, case, answer, bound, bound_is, gauges, **more):
    """Return the figure of small one-shots: their p99."""
    return figure(
        f"{stage.sizes.small}^3 {case}, p99", "ms", answer["latency"]["p99_ms"], bound, bound_is, better="less",
        gauges=gauges, client_cpu=answer["client_cpu"], latency=answer["latency"], histogram=answer["histogram"],
        per_s=answer["per_s"], errors=answer["errors"], **more,
    )  # fmt: skip


def owners(stage):
    """Small one-shots beside another owner's large jobs; device time of two owners with jobs of unlike sizes."""
    sizes = stage.sizes
    keys = [new_key()[1] for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        file.write_text("".join(f"{key} owner{number}\n" for number, key in enumerate(keys)))
        with serving(stage.device.partition(",")[0], stage.folder, "--keys-file", str(file)) as server:
            settled(server, api_key=keys[0])
            n = sizes.larges[-1]
            operands = pairs(stage.clients[0], server, n, api_key=keys[0])
            with Gauges(server) as gauges:
                alone = small(stage, server, "closed", api_key=keys[1])
            block = 1e3 * stage.kernel_s(min(n, sizes.block))
            with Gauges(server) as gauges:
                answer, large = beside(stage, server, "closed", operands, small_key=keys[1], large_key=keys[0])
            yield beside_figure(
                stage, f"beside another owner's {n}^3, closed loop", answer, alone["latency"]["p99_ms"] + block,
                "alone and a block", gauges, block_ms=block, large_per_s=large["count"] / large["seconds"],
            )  # fmt: skip
            yield shares(stage, server, keys)


def shares(stage, server, keys):
    """Return the figure of two owners: the smaller share of device time over a half.

    Each has half of the client processes, and first runs alone: that it could take more of the device than a half is
    what makes its share a matter of fairness (`demands`, of a device).
    """
    sizes = stage.sizes
    half = len(stage.clients) // 2
    clients = stage.clients[:half], stage.clients[half:]
    operands = [pairs(stage.clients[0], server, n, api_key=key) for n, key in zip(sizes.shared, keys, strict=True)]
    found = {}

    def run(number, seconds):
        found[number] = jobs(
            stage, server.url, operands[number], clients=clients[number], seconds=seconds, depth=sizes.depth,
            then="delete", api_key=keys[number],
        )  # fmt: skip

    def spent():
        return [found[number]["count"] * stage.kernel_s(n) for number, n in enumerate(sizes.shared)]

    for number in range(2):
        run(number, sizes.turn_s / 2)
    demands = [used / found[number]["seconds"] for number, used in enumerate(spent())]
    with Gauges(server) as gauges:
        together([lambda: run(0, sizes.turn_s), lambda: run(1, sizes.turn_s)])
    used = spent()
    return figure(
        f"{sizes.shared[0]}^3 and {sizes.shared[1]}^3 of two owners, smaller share of device time", "share",
        min(used) / sum(used), 0.5, "equal shares", gauges=gauges,
        client_cpu=sum(each["client_cpu"] for each in found.values()),
        counts=[found[number]["count"] for number in range(2)], demands=demands,
        bounded_by=None if min(demands) > 0.5 else "demand",
    )  # fmt: skip


def results(stage):
    """Jobs on resident operands: results kept, then in the store; in another turn each fetched by a client."""
    sizes, server = stage.sizes, stage.server
    operands = stage.operands(sizes.result)
    nbytes = COMPLEX64 * sizes.result**2
    work = {"depth": sizes.depth}
    jobs(stage, server.url, operands, count=len(stage.clients), then="delete", **work)
    room = stage.room(nbytes, sizes.results)
    with stage.watch() as gauges:
        done = jobs(stage, server.url, operands, count=room, seconds=sizes.keep_s, then="keep", **work)
    count = done["count"]
    bounded_by = "time" if count < room else "room in the store" if room < sizes.results else None
    yield figure(
        f"{sizes.result}^3, {count} results kept", "jobs/s", count / done["seconds"], 1 / stage.kernel_s(sizes.result),
        "kernel loop", gauges=gauges, client_cpu=done["client_cpu"], count=count, asked=sizes.results,
        bounded_by=bounded_by,
    )  # fmt: skip
    with stage.watch() as gauges:
        wait_for_none(server, "gemmserve_device_unwritten_bytes")
    stored_s = time.monotonic() - done["began"]
    yield figure(
        f"{sizes.result}^3, {count} results in the store", "GB/s", count * nbytes / stored_s / 1e9,
        LINK_BYTES_PER_S / 1e9, "link", gauges=gauges, count=count, since_first_submission_s=stored_s,
    )  # fmt: skip
    stage.all_clients(server.url, [{"work": "delete", "ids": ids} for ids in done["ids"]])
    for way, url in (("TCP", server.url), ("Unix socket", f"unix:{server.path}")):
        with stage.watch() as gauges:
            done = jobs(stage, url, operands, count=count, seconds=sizes.fetch_s, then="fetch", **work)
        yield figure(
            f"{sizes.result}^3, {done['count']} results fetched by {way}", "GB/s",
            done["nbytes"] / done["seconds"] / 1e9, LINK_BYTES_PER_S / 1e9, "link", gauges=gauges,
            client_cpu=done["client_cpu"], count=done["count"], jobs_per_s=done["count"] / done["seconds"],
        )  # fmt: skip


def two_devices(stage):
    """Jobs a second on two devices over those on one, each by a server of its own."""
    sizes = stage.sizes
    if stage.kernels["devices"] < 2:
        raise Skipped("one device")
    kind = stage.device.partition(":")[0]
    rates = []
    for devices in (f"{kind}:0", f"{kind}:0,{kind}:1"):
        with serving(devices, stage.folder) as server:
            settled(server, len(devices.split(",")))
            operands = pairs(stage.clients[0], server, sizes.spread)
            command = {"depth": sizes.depth, "then": "delete"}
            jobs(stage, server.url, operands, count=10 * len(stage.clients), **command)
            with Gauges(server) as gauges:
                done = jobs(stage, server.url, operands, seconds=sizes.turn_s, **command)
        rates.append(done["count"] / done["seconds"])
        alone = len(rates) == 1
        yield figure(
            f"{sizes.spread}^3 on {devices}", "jobs/s", rates[-1],
            1 / stage.kernel_s(sizes.spread) if alone else 2 * rates[0], "kernel loop" if alone else "twice one device",
            gauges=gauges, client_cpu=done["client_cpu"], count=done["count"],
        )  # fmt: skip


def streamed(stage):
    """A product larger than what the server may use of the device, from operands in the store's files: from submission
    to the end of the job, the median of all but the first of each server. The bound is the kernels' rate at the largest
    resident product.
    """
    n, near = stage.sizes.streamed, max(stage.sizes.products)
    bound = stage.kernel_s(near) * (n / near) ** 3
    device, work = stage.device.partition(",")[0], {"work": "streamed", "n": n}
    with tempfile.TemporaryDirectory(prefix="gemmserve-load-", dir=stage.folder) as data:
        with serving(device, stage.folder, data=data) as server:
            ids = stage.clients[0].ask(PATIENCE_S, url=server.url, count=0, ids=[], **work)["ids"]
        os.sync()  # so that no product is computed beside the writing of its operands
        for budget in stage.sizes.budgets:
            variables = {} if budget is None else {"GEMMSERVE_DEVICE_MEMORY_BYTES": str(budget)}
            told = ("--log-level", "debug")  # when each block was at which stage
            with serving(device, stage.folder, *told, data=data, **variables) as server:
                settled(server)
                with Gauges(server) as gauges:
                    answer = stage.clients[0].ask(PATIENCE_S, url=server.url, count=STREAMED, ids=ids, **work)
                trace = block_trace.last_product(server.log.read_text(errors="replace"))
            first_s, *others = answer["seconds"]
            memory = "all memory" if budget is None else f"{budget / 1e9:g} GB of memory"
            bound_is = f"kernel loop of {near}^3, by operations"
            yield figure(
                f"{n}^3 with {memory}", "s", statistics.median(others), bound, bound_is,
                better="less", gauges=gauges, client_cpu=answer["client_cpu"], first_s=first_s, others_s=others, n=n,
                budget=budget, phases=answer["phases"], blocks_ahead=BLOCKS_AHEAD, trace=trace,
            )  # fmt: skip


def first_product(stage):
    """First product of each kind on a fresh server over the second one: kernel cache empty, then kernels shipped.

    Shipped are those of the folder `seed`, or else those that the server with the empty cache compiled.
    """
    kinds = first_products.kinds(stage.sizes.first, stage.kernels["modes"])
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as second:
        seed = stage.seed or cache
        for state, folder, more in (
            ("empty kernel cache", cache, {}),
            ("kernels shipped", second, {"GEMMSERVE_KERNEL_SEED": str(seed)}),
        ):
            variables = {"GEMMSERVE_KERNEL_CACHE": folder, "CUPY_CACHE_DIR": f"{folder}/cupy", **more}
            began = time.perf_counter()
            with serving(stage.device.partition(",")[0], stage.folder, **variables) as server:
                ready_s = time.perf_counter() - began
                with Gauges(server) as gauges:
                    answer = stage.clients[0].ask(
                        PATIENCE_S, work="first", url=server.url, kinds=kinds, seconds=stage.sizes.first_s
                    )
            found = answer["kinds"]
            slowest = max(found, key=lambda each: each["first_s"])
            yield figure(
                f"{state}, slowest first product", "s", slowest["first_s"], slowest["second_s"], "the second one",
                better="less", gauges=gauges, client_cpu=answer["client_cpu"], ready_s=ready_s,
                slowest=first_products.label(slowest), kinds=found, not_tried=len(kinds) - len(found),
                shipped_by="--seed" if stage.seed else "the server with the empty cache",
            )  # fmt: skip


ROWS = {
    "seen-done": seen_done,
    "front-cpu": front_cpu,
    "submissions": submissions,
    "put-get": transfers,
    "one-shot": one_shots,
    "small-beside-large": small_beside_large,
    "results": results,
    "owners": owners,
    "two-devices": two_devices,
    "large-product": streamed,
    "first-product": first_product,
}
"""By the name that `--only` takes, in the order in which they are measured."""
WITH_OWN_SERVERS = ("owners", "two-devices", "large-product", "first-product")
"""Rows before which the shared server ends."""

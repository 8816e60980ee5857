"""Rows of a load test. Each takes the stage and yields figures: what was achieved beside what bounds it."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.load import devices, first_products
from benchmarks.load.asking import Skipped, distribution, figure, jobs, small, together
from benchmarks.load.gauges import Gauges
from benchmarks.load.stage import ARENA_BYTES, PATIENCE_S, drained, gauge, pairs, serving, settled, wait_for_none
from benchmarks.service import ceilings, histogram
from benchmarks.service.servers import KINDS, Server
from benchmarks.service.turns import phases_of

from gemmserve_service.tenancy.api_keys import new_key

LINK_BYTES_PER_S = 44e9
"""Rate of results on their way to the host: what one device's link gave stored arrays (docs/transfer.md)."""
SHARE_OF_ARENA = 0.9
"""Share of the host arena that results take which shall all find room there."""
SEEN_S = 1.5e-3
FRONT_S = 0.5e-3
SUBMISSIONS_PER_S, MANY_PER_S = 1500.0, 10_000.0
"""Targets, where nothing on the machine is a bound."""
DELIVERED = "gemmserve_delivered_bytes_total"
"""Counter of bytes that devices have copied straight into clients' memory."""
MANY = 500
"""Jobs of one request."""
CONNECTIONS = (1, 16)
COMPLEX64 = 8
MIB = 1 << 20


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


def small_beside_map(stage):
    """Small one-shots beside one client's `map` of short products of the same owner, which are many at a time."""
    n = stage.sizes.spread
    operands = stage.operands(n)
    for loop in ("closed", "open"):
        with stage.watch():
            idle = small(stage, stage.server, loop)["latency"]["p99_ms"]
        with stage.watch() as gauges:
            answer, mapped = beside(stage, stage.server, loop, operands, work="mapped")
        yield beside_figure(
            stage, f"beside a map of {n}^3, {loop} loop", answer, idle + 1e3 * stage.kernel_s(n),
            "alone and a product", gauges, mapped_per_s=mapped["count"] / mapped["seconds"],
        )  # fmt: skip


def beside(stage, server, loop, operands, *, work="jobs", small_key=None, large_key=None):
    """Run small one-shots while one client process keeps two large jobs going, or a map; return both answers."""
    sizes, found = stage.sizes, {}

    def large():
        # One before, that the kernels are compiled and the operands on the device, is not counted.
        one = stage.clients[:1]
        jobs(stage, server.url, operands[:1], clients=one, count=1, depth=1, then="delete", api_key=large_key)
        started.set()
        span = 1.5 * sizes.turn_s
        found["large"] = jobs(
            stage, server.url, operands, clients=one, work=work, seconds=span, depth=2, then="delete",
            api_key=large_key,
        )  # fmt: skip

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
    """Jobs on resident operands: results kept until a device has none that nothing else has, as many as the host arena
    takes, then more; in other turns each fetched by a client, and by the Unix socket larger ones, too.
    """
    sizes, server = stage.sizes, stage.server
    operands = stage.operands(sizes.result)
    nbytes = COMPLEX64 * sizes.result**2
    work = {"depth": sizes.depth}
    jobs(stage, server.url, operands, count=len(stage.clients), then="delete", **work)
    room = stage.room(nbytes, sizes.results)
    fitting = min(room, max(len(stage.clients), int(SHARE_OF_ARENA * ARENA_BYTES / nbytes)))
    if fitting < room:
        yield from kept_results(stage, operands, fitting, nbytes, "in the host arena")
    yield from kept_results(stage, operands, room, nbytes, "in the store")
    by_tcp, by_socket = ("TCP", server.url), ("Unix socket", f"unix:{server.path}")
    for n, (way, url) in ((sizes.result, by_tcp), (sizes.result, by_socket), (sizes.larges[-1], by_socket)):
        operands, nbytes = stage.operands(n), COMPLEX64 * n**2
        before = gauge(server, DELIVERED)
        with stage.watch() as gauges:
            done = jobs(stage, url, operands, count=sizes.results, seconds=sizes.fetch_s, then="fetch", **work)
        straight = (gauge(server, DELIVERED) - before) / done["nbytes"]
        bound, bound_is = min((LINK_BYTES_PER_S, "link"), (nbytes / stage.kernel_s(n), "kernel loop"))
        yield figure(
            f"{n}^3, {done['count']} results fetched by {way}", "GB/s", done["nbytes"] / done["seconds"] / 1e9,
            bound / 1e9, bound_is, gauges=gauges, client_cpu=done["client_cpu"], count=done["count"],
            jobs_per_s=done["count"] / done["seconds"], straight=round(straight, 3),
        )  # fmt: skip


def resident_streams(stage):
    """One client's stream of a product of resident operands, which the server keeps prepared; results are deleted as
    they come.
    """
    for shape in stage.sizes.streams:
        m, n, k = shape
        bound_s = stage.kernels["streams"][f"{m}x{n}x{k}"]["seconds"]
        before, client = stage.sizes.stream_before, stage.clients[0]
        command = {"work": "stream", "url": stage.server.url, "shape": shape}
        pair = client.ask(PATIENCE_S, pair=None, count=before, **command)["pair"]
        with stage.watch() as gauges:
            count = max(2 * before, int(stage.sizes.stream_s / bound_s))
            done = client.ask(PATIENCE_S, pair=pair, count=count, **command)
        client.ask(PATIENCE_S, work="delete", url=stage.server.url, ids=pair)
        seconds, flops = done["ended"] - done["began"], 8e-12 * m * n * k
        yield figure(
            f"{m} x {n} x {k}, {done['count']} products of resident operands", "TFLOP/s",
            flops * done["count"] / seconds, flops / bound_s, "kernel loop, prepared", gauges=gauges,
            client_cpu=done["client_cpu"], count=done["count"],
        )  # fmt: skip


def kept_results(stage, operands, most, nbytes, where):
    """Keep the results of `most` jobs, of `nbytes` each, until they are `where` the case says; delete them."""
    sizes, server = stage.sizes, stage.server
    with stage.watch() as gauges:
        done = jobs(stage, server.url, operands, count=most, seconds=sizes.keep_s, then="keep", depth=sizes.depth)
    count = done["count"]
    bounded_by = "time" if count < most else f"room {where}" if most < sizes.results else None
    yield figure(
        f"{sizes.result}^3, {count} results kept", "jobs/s", count / done["seconds"], 1 / stage.kernel_s(sizes.result),
        "kernel loop", gauges=gauges, client_cpu=done["client_cpu"], count=count, asked=sizes.results,
        bounded_by=bounded_by,
    )  # fmt: skip
    with stage.watch() as gauges:
        wait_for_none(server, "gemmserve_device_unwritten_bytes")
    stored_s = time.monotonic() - done["began"]
    yield figure(
        f"{sizes.result}^3, {count} results {where}", "GB/s", count * nbytes / stored_s / 1e9,
        LINK_BYTES_PER_S / 1e9, "link", gauges=gauges, count=count, since_first_submission_s=stored_s,
    )  # fmt: skip
    stage.all_clients(server.url, [{"work": "delete", "ids": ids} for ids in done["ids"]])


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
    "small-beside-map": small_beside_map,
    "resident-stream": resident_streams,
    "results": results,
    "owners": owners,
    "two-devices": devices.small_jobs,
    "two-servers": devices.servers,
    "joined-devices": devices.joined,
    "large-product": devices.streamed,
    "larger-product": devices.larger,
    "first-product": first_product,
}
"""By the name that `--only` takes, in the order in which they are measured."""
WITH_OWN_SERVERS = (
    "owners",
    "two-devices",
    "two-servers",
    "joined-devices",
    "large-product",
    "larger-product",
    "first-product",
)
"""Rows before which the shared server ends."""

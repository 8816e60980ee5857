"""Client process: commands as JSON lines on standard input, one answer each on standard output.

    {"work": "jobs", "url": "http://127.0.0.1:8000", "api_key": null, "pairs": [["arr_..", "arr_.."]], "count": 100,
     "seconds": null, "depth": 8, "then": "keep"}

`url` may be that of a Unix socket. `WORK` has the kinds of work; each answer holds `client_cpu` besides, the share of a
processor that this process took. Times `began` and `ended` are of the monotonic clock, which all processes of a host
share.
"""

from __future__ import annotations

import collections
import functools
import itertools
import time

import numpy as np
from benchmarks.service import driver

from gemmserve import Client

PATIENCE_S = 300.0
DELETED_AT_ONCE = 64
STREAM_IN_FLIGHT = 32
"""Products of a stream at a time: results of half a GiB are not to fill a device before they are deleted."""
REPEATED_ROWS = 256
ROUNDING = 2.0**-20
"""Error that an element of a product may have, over the sum of its terms' sizes: 16 units of single precision."""


@functools.cache
def connected(url, api_key):
    """Return this process's client of that server; it ends with the process."""
    return Client(url, api_key=api_key or "", timeout=PATIENCE_S, progress=False)


def matrix(n, dtype="complex64", seed=0, rows=None):
    """Return a standard normal n x n matrix, or one of so many `rows`; they repeat after REPEATED_ROWS, so that it is
    cheap to make.
    """
    return np.resize(drawn(n, dtype, seed), (rows or n, n)).astype(dtype, copy=False)


def drawn(n, dtype="complex64", seed=0):
    """Return the rows that those of `matrix` repeat, in single precision."""
    parts = 2 if np.dtype(dtype).kind == "c" else 1
    values = np.random.default_rng(seed).standard_normal((min(n, REPEATED_ROWS), parts * n), np.float32)
    return values.view(np.complex64) if parts == 2 else values


def put(client, command):
    """Upload `count` matrices of extent `n`; return their ids."""
    return {"ids": [client.put(matrix(command["n"], seed=seed)).id for seed in range(command["count"])]}


def delete(client, command):
    """Delete the arrays `ids`."""
    for array_id in command["ids"]:
        client.delete(array_id)
    return {"count": len(command["ids"])}


def jobs(client, command):
    """Run products of resident `pairs`, `depth` in flight, until `count` of them are done or `seconds` are over.

    `then`: "keep" the results (their ids are in the answer), "fetch" them and delete them, or "delete" them.
    """
    pairs = itertools.cycle([[client.array(array_id) for array_id in pair] for pair in command["pairs"]])
    most, seconds, then = command.get("count"), command.get("seconds"), command["then"]
    left = itertools.count() if most is None else iter(range(most))
    flying, kept = collections.deque(), []
    began = time.monotonic()
    end = began + (PATIENCE_S if seconds is None else seconds)
    done = nbytes = 0
    while True:
        more = time.monotonic() < end and next(left, None) is not None
        if more:
            flying.append(client.submit("gemm", *next(pairs)))
        if flying and (not more or len(flying) >= command["depth"]):
            result = flying.popleft().result(PATIENCE_S)
            done += 1
            if then == "fetch":
                nbytes += result.numpy().nbytes
            if then == "keep":
                kept.append(result.id)
            else:
                result.delete()
        elif not more:
            break
    return {"began": began, "ended": time.monotonic(), "count": done, "nbytes": nbytes, "ids": kept}


def mapped(client, command):
    """Run products of resident `pairs` by `Client.map`, until `count` of them are asked for or `seconds` are over;
    results are deleted as they come, many by a request. `in_flight`: how many there are at a time (default: the SDK's).
    """
    more = {"in_flight": command["in_flight"]} if "in_flight" in command else {}
    together = min([DELETED_AT_ONCE, *(count // 4 for count in more.values())])
    pairs = itertools.cycle([[client.array(array_id) for array_id in pair] for pair in command["pairs"]])
    most, seconds = command.get("count"), command.get("seconds")
    began = time.monotonic()
    end = began + (PATIENCE_S if seconds is None else seconds)

    def asked():
        for _ in itertools.count() if most is None else range(most):
            if time.monotonic() >= end:
                return
            a, b = next(pairs)
            yield {"op": "gemm", "a": a, "b": b}

    done, old = 0, []
    for result in client.map(asked(), **more):
        done += 1
        old.append(result)
        if len(old) >= together:
            client.delete(old)
            old = []
    if old:
        client.delete(old)
    return {"began": began, "ended": time.monotonic(), "count": done, "nbytes": 0, "ids": []}


def stream(client, command):
    """Run `count` products of shape (m, n, k) of one pair of operands by `Client.map`; put them first, unless their ids
    are given as `pair`.
    """
    m, n, k = command["shape"]
    pair = command["pair"] or [client.put(matrix(k, seed=0, rows=m)).id, client.put(matrix(n, seed=1, rows=k)).id]
    done = mapped(client, {"pairs": [pair], "count": command["count"], "in_flight": STREAM_IN_FLIGHT})
    return {**done, "pair": pair}


def submit_many(client, command):
    """Submit `count` products of one pair by requests of `size` jobs."""
    a, b = (client.array(array_id) for array_id in command["pair"])
    began = time.monotonic()
    asked = {"op": "gemm", "a": a, "b": b}
    taken = sum(len(client.submit_many([asked] * size)) for size in pieces(command["count"], command["size"]))
    return {"began": began, "ended": time.monotonic(), "count": taken}


def streamed(client, command):
    """Put two n x n matrices unless their `ids` are given, and time `count` products of them, from submission to the
    end of the job, with the server's own seconds by phase; a sample of rows of the last is compared with sums in
    double. Raises AssertionError.
    """
    n = command["n"]
    ids = command["ids"] or [client.put(large(n, side)).id for side in (0, 1)]
    spent, phases = [], []
    for left in reversed(range(command["count"])):
        began = time.perf_counter()
        job = client.submit("gemm", *map(client.array, ids))
        result = job.result(PATIENCE_S)
        spent.append(time.perf_counter() - began)
        phases.append({name: seconds for name, seconds in job.info.timings.items() if seconds})
        if not left:
            compare_rows(result, n)
        result.delete()
    return {"ids": ids, "seconds": spent, "phases": phases}


def large(n, side):
    """Return an operand of `streamed`, the left (0) or the right one (1): `matrix`, rows scaled by powers of two."""
    made = matrix(n, seed=side)
    made *= scales(n, side)[:, None]
    return made


def scales(n, side):
    """Return powers of two, one for each row of an operand of `streamed`: rows that are drawn alike differ by them, so
    that a block, or a part of k, out of its place is seen.
    """
    group = np.arange(n) // REPEATED_ROWS
    return np.ldexp(np.float32(1), group % 4 if side else group % 8 + group // 16 % 8)


def compare_rows(result, n):
    """Compare rows of a product that `streamed` made with sums in double. Raises AssertionError."""
    (a, of_a), (b, of_b) = ((drawn(n, seed=side).astype(np.complex128), scales(n, side)) for side in (0, 1))
    for row in np.unique(np.linspace(0, n - 1, 9).astype(int)):
        left = np.zeros((-(-n // len(b)), len(b)), np.complex128)  # row p of the right operand is drawn[p % len(b)]
        left.reshape(-1)[:n] = a[row % len(a)] * of_a[row] * of_b
        expected, size = left.sum(axis=0) @ b, np.abs(left).sum(axis=0) @ np.abs(b)
        worst = np.max(np.abs(result[int(row) : int(row) + 1].numpy()[0] - expected) / size)
        if not worst < ROUNDING:
            raise AssertionError(f"row {row}: an error of {worst:.1e} of what its terms' sizes add up to")


def pieces(whole, size):
    """Yield sizes of at most `size` that add up to `whole`."""
    for begun in range(0, whole, size):
        yield min(size, whole - begun)


def matmul(client, command):
    """Time `a @ b` of one resident pair until the client has seen it done, `count` times."""
    a, b = (client.array(array_id) for array_id in command["pair"])
    durations = driver.timed(
        lambda: a @ b, lambda _: None, PATIENCE_S, command["count"], lambda result: result.delete()
    )
    return {"durations_ns": durations}


def transfer(client, command):
    """Time put and get of `nbytes`: fresh, then again in the space that was used, the server's and the client's; bytes
    that differ are an error.
    """
    array = np.arange(command["nbytes"] // 8, dtype=np.int64).view(np.complex64)
    found, answer = {}, None
    for space in ("fresh", "recycled"):
        if answer is not None:
            answer[...] = 0
        began = time.perf_counter()
        remote = client.put(array)
        half = time.perf_counter()
        answer = remote.numpy(out=answer)
        found[space] = {"put_s": half - began, "get_s": time.perf_counter() - half}
        if not np.array_equal(answer.view(np.int64), array.view(np.int64)):
            raise AssertionError("the array came back different")
        remote.delete()
    return found


def first(client, command):
    """Time the first and the second product of each of `kinds` (as `first_products` makes them), for `seconds`."""
    end = time.monotonic() + command["seconds"]
    found = []
    for kind in command["kinds"]:
        if time.monotonic() > end:
            break
        n, dtype = kind["n"], kind["dtype"]
        operands = [client.put(matrix(n, dtype, seed)) for seed in (1, 2)]
        spent = []
        for _ in range(2):
            began = time.perf_counter()
            results = product(client, kind, *operands)
            spent.append(time.perf_counter() - began)
            for result in results:
                result.delete()
        for operand in operands:
            operand.delete()
        found.append({**kind, "first_s": spent[0], "second_s": spent[1]})
    return {"kinds": found}


def product(client, kind, a, b):
    """Compute one product of that kind on the server; return its results."""
    if kind["op"] == "gemm":
        return [client.gemm(a, b, compute=kind["compute"])]
    if kind["op"] == "gemm_reduce":
        return [client.gemm_reduce(a, b, reduce=kind["reduce"], compute=kind["compute"])]
    with client.program() as program:
        square = program.gemm(a, b)
        peak = program.gemm_reduce(square, b, reduce="absmax")
        program.keep(square)
    return [square, peak]


WORK = {
    each.__name__: each for each in (put, delete, jobs, mapped, stream, submit_many, matmul, transfer, streamed, first)
}


def run(command):
    """Do one command; return its answer. Raises LookupError, GemmserveError, AssertionError."""
    return WORK[command["work"]](connected(command["url"], command.get("api_key")), command)


if __name__ == "__main__":
    driver.serve(run)

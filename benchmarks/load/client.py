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


@functools.cache
def connected(url, api_key):
    """Return this process's client of that server; it ends with the process."""
    return Client(url, api_key=api_key or "", timeout=PATIENCE_S, progress=False)


def matrix(n, dtype="complex64", seed=0):
    """Return a standard normal n x n matrix; rows repeat after 256, so that it is cheap to make."""
    parts = 2 if np.dtype(dtype).kind == "c" else 1
    drawn = np.random.default_rng(seed).standard_normal((min(n, 256), parts * n), np.float32)
    return np.resize(drawn.view(np.complex64) if parts == 2 else drawn, (n, n)).astype(dtype, copy=False)


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


def submit_many(client, command):
    """Submit `count` products of one pair by requests of `size` jobs."""
    a, b = (client.array(array_id) for array_id in command["pair"])
    began = time.monotonic()
    asked = {"op": "gemm", "a": a, "b": b}
    taken = sum(len(client.submit_many([asked] * size)) for size in pieces(command["count"], command["size"]))
    return {"began": began, "ended": time.monotonic(), "count": taken}


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
    """Time put and get of `nbytes`: fresh, then again in the space that was used; bytes that differ are an error."""
    array = np.arange(command["nbytes"] // 8, dtype=np.int64).view(np.complex64)
    found = {}
    for space in ("fresh", "recycled"):
        began = time.perf_counter()
        remote = client.put(array)
        half = time.perf_counter()
        answer = remote.numpy()
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


WORK = {each.__name__: each for each in (put, delete, jobs, submit_many, matmul, transfer, first)}


def run(command):
    """Do one command; return its answer. Raises LookupError, GemmserveError, AssertionError."""
    return WORK[command["work"]](connected(command["url"], command.get("api_key")), command)


if __name__ == "__main__":
    driver.serve(run)

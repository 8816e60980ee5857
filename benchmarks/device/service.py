"""The whole service on a device: what it adds to a product, how fast arrays get there, what hides beneath what.

    PYTHONPATH=examples python benchmarks/device/service.py --output service.json [--shrink 16]

Rivals in the same run: the same products by CuPy (cuBLAS) and by the kernels called directly, the same bytes through
pinned memory. The server is one of its own, on the first device. `--shrink` divides sizes, for a try without a device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from local_server import LocalServer

from gemmserve import Client
from gemmserve_kernels import DeviceSpec, GemmProblem, Operand, gemm
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.freivalds import freivalds_check

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve import RemoteArray

ROUNDS = 5


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Standard normal, complex64, cheap to make."""
    draw = np.random.default_rng(seed)
    block = draw.standard_normal((min(rows, 256), columns, 2), np.float32).view(np.complex64)[..., 0]
    return np.ascontiguousarray(np.resize(block, (rows, columns)))


def seconds(function: Callable[[], Any], rounds: int) -> list[float]:
    """Times of a call that waits for the device; the first is not counted."""
    spent = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        function()
        cupy.cuda.Device().synchronize()
        spent.append(time.perf_counter() - began)
    return spent[1:]


def percentile(values: list[float], share: float) -> float:
    """Return the value below which that share of sorted ones lies."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def link_rate(nbytes: int) -> dict[str, float]:
    """Bytes a second through pinned memory, each way."""
    host = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
    host[:] = 1
    there = cupy.empty(nbytes, cupy.uint8)
    up = min(seconds(lambda: there.set(host), ROUNDS))
    down = min(seconds(lambda: there.get(out=host), ROUNDS))
    return {"host_to_device": nbytes / up, "device_to_host": nbytes / down}


def finished(job: Any) -> dict[str, Any]:
    """A job's end as the server tells it."""
    job.wait(120)
    info = job.info
    if info.state != "succeeded":
        raise RuntimeError(f"{info.id}: {info.state} {info.error}")
    return {
        "created": info.created_at.timestamp(),
        "finished": info.finished_at.timestamp(),
        **info.timings,
        "algorithm": info.algorithm,
    }


def small_jobs(client: Client, size: int, count: int) -> dict[str, Any]:
    """Jobs on resident operands, one by one: from parsed request to succeeded, over the product itself."""
    a, b = matrix(size, size, 1), matrix(size, size, 2)
    ra, rb = client.put(a), client.put(b)
    da, db = cupy.asarray(a), cupy.asarray(b)
    direct = seconds(lambda: cupy.matmul(da, db), count)
    ours = seconds(lambda: gemm(da, db), count)
    jobs = [finished(client.submit("gemm", ra, rb)) for _ in range(count + 3)][3:]
    spent = [job["finished"] - job["created"] for job in jobs]
    return {
        "size": size,
        "job_p50_s": percentile(spent, 0.5),
        "job_p99_s": percentile(spent, 0.99),
        "cupy_p50_s": percentile(direct, 0.5),
        "kernels_p50_s": percentile(ours, 0.5),
        "over_cupy_p50_s": percentile(spent, 0.5) - percentile(direct, 0.5),
        "phases_p50_s": {
            name: percentile([job[name] for job in jobs], 0.5) for name in ("queue_s", "h2d_s", "kernel_s", "d2h_s")
        },
        "algorithm": jobs[-1]["algorithm"],
    }


def first_copy(client: Client, nbytes: int, rate: float) -> dict[str, Any]:
    """What the copy of a stored array takes, the first time; then not at all, and the product less."""
    rows = max(nbytes // (8 * 4096), 1)
    one = client.put(np.ones((4096, 1), np.complex64))
    rates, again, kernel = [], [], []
    for round_ in range(ROUNDS):
        ra = client.put(matrix(rows, 4096, round_))
        first = finished(client.submit("gemm", ra, one))
        second = finished(client.submit("gemm", ra, one))
        rates.append(ra.nbytes / first["h2d_s"])
        again.append(second["h2d_s"])
        kernel.append((first["kernel_s"], second["kernel_s"]))
        ra.delete()
    return {
        "nbytes": rows * 4096 * 8,
        "bytes_per_s": statistics.median(rates),
        "of_pinned": statistics.median(rates) / rate,
        "again_s": statistics.median(again),
        "kernel_first_and_again_s": kernel,
    }


def prepared(client: Client, size: int) -> dict[str, Any]:
    """A product of operands that are used again and again, each time with less to do."""
    ra, rb = client.put(matrix(size, size, 1)), client.put(matrix(size, size, 2))
    jobs = [finished(client.submit("gemm", ra, rb)) for _ in range(6)]
    return {"size": size, "jobs": [{name: job[name] for name in ("h2d_s", "kernel_s", "d2h_s")} for job in jobs]}


def stream(client: Client, size: int, count: int, link: dict[str, float]) -> dict[str, Any]:
    """Products of ever new operands with one that stays: copies beneath kernels."""
    b = client.put(matrix(size, size, 99))
    host = [matrix(size, size, number) for number in range(4)]
    operands: list[RemoteArray] = [client.put(host[number % len(host)]) for number in range(count)]
    da, db = cupy.asarray(host[0]), cupy.asarray(host[1])
    compute = min(seconds(lambda: gemm(da, db), ROUNDS))
    jobs = [client.submit("gemm", each, b) for each in operands]
    done = [finished(job) for job in jobs]
    began = min(job["created"] for job in done)
    ends = sorted(job["finished"] for job in done)
    each = (ends[-1] - ends[2]) / (len(ends) - 3)  # once the pipeline is full
    nbytes = host[0].nbytes
    bound = max(compute, nbytes / link["host_to_device"], nbytes / link["device_to_host"])
    for array in operands:
        array.delete()
    return {
        "size": size,
        "jobs": count,
        "seconds_per_job": each,
        "all_s": ends[-1] - began,
        "compute_s": compute,
        "copy_s": [nbytes / link["host_to_device"], nbytes / link["device_to_host"]],
        "of_bound": bound / each,
        "phases_p50_s": {name: percentile([job[name] for job in done], 0.5) for name in ("h2d_s", "kernel_s", "d2h_s")},
    }


def verification(client: Client, size: int) -> dict[str, Any]:
    """What a check costs beside its product: in a job, where operands and result are on the device, and by itself."""
    a, b = matrix(size, size, 1), matrix(size, size, 2)
    ra, rb = client.put(a), client.put(b)
    jobs = [finished(client.submit("gemm", ra, rb, verify=True)) for _ in range(ROUNDS + 1)]
    da, db = cupy.asarray(a), cupy.asarray(b)
    d = gemm(da, db)
    problem = GemmProblem.build(Operand.of(da), Operand.of(db))
    alone = statistics.median(seconds(lambda: freivalds_check(problem, da, db, None, d, 1), ROUNDS))
    product = statistics.median(seconds(lambda: gemm(da, db), ROUNDS))
    return {
        "size": size,
        "first_verify_s": jobs[0]["verify_s"],  # its kernels are compiled, or found on disk
        "verify_s": statistics.median(job["verify_s"] for job in jobs[1:]),
        "kernel_s": statistics.median(job["kernel_s"] for job in jobs[1:]),
        "alone_s": alone,
        "product_s": product,
        "bytes_read": 3 * a.nbytes,
    }


def out_of_memory(client: Client, size: int, hold: float) -> dict[str, Any]:
    """Another process, this one, holds most of the device's memory: the product is made in panels, and right."""
    a, b = matrix(size, 512, 1), matrix(512, size, 2)
    ra, rb = client.put(a), client.put(b)
    free, _ = cupy.cuda.runtime.memGetInfo()
    leave = int(hold * (a.nbytes + b.nbytes + 8 * size * size))
    held = cupy.cuda.alloc(max(free - leave, 1))
    job = client.submit("gemm", ra, rb)
    info = finished(job)
    rows = np.arange(0, size, max(size // 64, 1))
    d = job.result().numpy()[rows]
    truth = a[rows].astype(np.complex128) @ b.astype(np.complex128)
    error = float(np.linalg.norm(d - truth) / np.linalg.norm(truth))
    del held
    cupy.get_default_memory_pool().free_all_blocks()
    return {"size": size, "left_bytes": leave, "error": error, "kernel_s": info["kernel_s"], "h2d_s": info["h2d_s"]}


def measure(shrink: int) -> dict[str, Any]:
    """Everything, by name. What fails is noted and does not keep the rest from being measured."""
    found: dict[str, Any] = {"link": link_rate((1 << 30) // shrink)}
    link = found["link"]
    options = {"GEMMSERVE_VERIFY_SHARE": "0", "GEMMSERVE_LOG_LEVEL": "warning"}
    with (
        LocalServer("--device", "cuda:0", environment=options, start_within_s=180) as server,
        Client(server.url, timeout=300) as client,
    ):
        cases: dict[str, Callable[[], Any]] = {
            "small": lambda: [small_jobs(client, size, 200) for size in (64, 512, 1024)],
            "first_copy": lambda: first_copy(client, (1 << 30) // shrink, link["host_to_device"]),
            "prepared": lambda: prepared(client, 4096 // shrink),
            "stream": lambda: stream(client, 4096 // shrink, 40, link),
            "verification": lambda: [verification(client, size // shrink) for size in (1024, 4096)],
            "out_of_memory": lambda: out_of_memory(client, 16384 // shrink, 0.6),
        }
        for name, case in cases.items():
            began = time.perf_counter()
            try:
                found[name] = case()
            except Exception as error:
                found[name] = {"failed": f"{type(error).__name__}: {error}", "log": server.tail(15)}
            print(f"{name} ({time.perf_counter() - began:.1f} s): {json.dumps(found[name], default=str)[:1500]}")
    return found


def main() -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shrink", type=int, default=1)
    options = parser.parse_args()
    document = {"environment": environment(DeviceSpec.of(0)), "shrink": options.shrink, **measure(options.shrink)}
    options.output.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

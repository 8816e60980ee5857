"""A sweep of NVIDIA's perf_analyzer over a server of this checkout on the CPU: plain, asynchronous, in shared memory.

Fails where an inference failed, where the client's and the server's counts differ, or where a way gave no figures.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

import httpx  # noqa: E402
from local_server import LocalServer  # noqa: E402

SHAPES = ("--shape", "a:64,64", "--shape", "b:64,64")
SWEEPS = {
    "gemm, binary data": ("-m", "gemm", *SHAPES, "--shape", "c:64,64", "--concurrency-range", "1:4:3"),
    "gemm_reduce, asynchronous": ("-m", "gemm_reduce", *SHAPES, "--async", "--concurrency-range", "2"),
    "gemm_reduce, shared memory": (
        "-m", "gemm_reduce", *SHAPES, "--concurrency-range", "2",
        "--shared-memory", "system", "--output-shared-memory-size", "256",
    ),
}  # fmt: skip
REQUESTS = 40  # of one measurement; three are compared
UNSTABLE = 2  # perf_analyzer's status where three measurements differ by more than -s percent: another load's doing
_COUNTS = re.compile(r"^    (Request|Inference) count: (\d+)$", re.MULTILINE)


def sweep(url: str, arguments: tuple[str, ...]) -> str:
    """Text of one sweep. Raises RuntimeError where it failed."""
    command = [str(HERE / "perf_analyzer.sh"), "-u", url.removeprefix("http://"), *arguments]
    command += [
        "--measurement-mode",
        "count_windows",
        "--measurement-request-count",
        str(REQUESTS),
        "-s",
        "999",
        "-r",
        "3",
    ]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    print(done.stdout)
    if done.returncode not in {0, UNSTABLE}:
        raise RuntimeError(f"perf_analyzer ended with {done.returncode}:\n{done.stderr}")
    counts = [int(count) for _, count in _COUNTS.findall(done.stdout)]
    if not counts or len(counts) % 2 or min(counts) < REQUESTS:
        raise RuntimeError(f"perf_analyzer counted {counts}")
    return done.stdout


def main() -> None:
    """Run every sweep."""
    with LocalServer(environment={"GEMMSERVE_DEVICE": "cpu", "OPENBLAS_NUM_THREADS": "1"}) as server:
        for name, arguments in SWEEPS.items():
            print(f"== {name}")
            sweep(server.url, arguments)
        found = httpx.get(f"{server.url}/v2/models/stats", trust_env=False).json()["model_stats"]
        print("== of the server:", {each["name"]: each["inference_count"] for each in found})
        if any(each["inference_stats"]["fail"]["count"] or not each["inference_count"] for each in found):
            raise RuntimeError(f"inferences failed, or there were none: {found}")


if __name__ == "__main__":
    main()

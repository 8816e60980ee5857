"""Makes tests/e2e/old_data: data directories as earlier versions left them when they were killed.

`python tests/support/old_data_directory.py COMMIT NAME` installs that commit beside this one (with the dependencies of
this environment), runs its server on the CPU, and has it keep arrays, done and cancelled jobs, and, with the workers
stopped, jobs that wait, a job that runs, and an upload that is half way; then every process of it is killed. What the
version did not have yet is left out: keys, uploads in parts, programs. NAME.tar.xz holds `data`, the directory, and
`expected.json`: what has to be readable in it, with the arrays as lists of numbers, and when it was made. Numbers are
whole, so that products are exact. The key is of no other server.

Each release adds one, of its tag. Those of before the first release are from the commits baea865 (schema-1, without
migrations), 834517e (schema-100, with keys, uploads in parts and programs) and a46be41 (schema-130, whose small arrays
share files).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from local_server import READY

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "e2e" / "old_data"


def install(commit: str, folder: Path) -> Path:
    """Return a folder for PYTHONPATH with the packages of that commit and their entry points."""
    tree, site = folder / "tree", folder / "site"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(tree, filter="data")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(site), str(tree)], check=True)
    return site


def npy(array: np.ndarray) -> bytes:
    """The .npy file of it."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def listed(array: np.ndarray) -> dict[str, Any]:
    """An array as JSON: dtype, shape, and lists of the real and imaginary parts in row-major order."""
    numbers = {"real": array.real.ravel().tolist(), "imag": array.imag.ravel().tolist()}
    return {"dtype": array.dtype.name, "shape": array.shape, **numbers}


class Old:
    """The old server, and what is expected of its directory."""

    def __init__(self, site: Path, data_dir: Path) -> None:
        self.environment = {**os.environ, "PYTHONPATH": str(site), "GEMMSERVE_DEVICE": "cpu", "HOME": str(site)}
        self.data_dir = data_dir
        self.command = [sys.executable, "-m", "gemmserve.cli"]
        self.expected: dict[str, Any] = {"keys": [], "arrays": {}, "jobs": {}, "uploads": {}}

    def create_key(self) -> str | None:
        """A key, unless the version has none."""
        command = [*self.command, "keys", "create", "lab", "--data-dir", str(self.data_dir)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout.split()[0] if done.returncode == 0 else None

    @contextlib.contextmanager
    def running(self):
        """Start it; kill all of its processes in the end."""
        log = self.data_dir.parent / "log"
        with log.open("wb") as out:
            command = [*self.command, "serve", "--port", "0", "--data-dir", str(self.data_dir)]
            server = psutil.Popen(command, env=self.environment, stdout=out, stderr=out)
        try:
            while not (ready := READY.search(log.read_text())):
                if server.poll() is not None:
                    raise RuntimeError(log.read_text())
                time.sleep(0.1)
            key = self.expected["keys"][0] if self.expected["keys"] else None
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            with httpx.Client(base_url=ready[1], headers=headers, trust_env=False, timeout=60) as self.http:
                yield server
        finally:
            processes = [server, *server.children(recursive=True)]
            for process in processes:
                process.send_signal(signal.SIGKILL)
            psutil.wait_procs(processes)

    def upload(self, array: np.ndarray) -> str:
        """Store an array; return its id."""
        answer = self.http.post("/v1/arrays", content=npy(array), headers={"Content-Type": "application/x-npy"})
        answer.raise_for_status()
        self.expected["arrays"][answer.json()["id"]] = listed(array)
        return answer.json()["id"]

    def submit(self, name: str, request: dict[str, Any], *, wait: bool) -> dict[str, Any]:
        """Submit a job under an Idempotency-Key; return it, done if it is waited for."""
        headers = {"Idempotency-Key": name, **({"Prefer": "wait=30"} if wait else {})}
        answer = self.http.post("/v1/jobs", json=request, headers=headers)
        answer.raise_for_status()
        return answer.json()

    def job(self, name: str, request: dict[str, Any], results: dict[str, np.ndarray], *, wait: bool) -> None:
        """Submit a job and note what its results are, or will be."""
        job = self.submit(name, request, wait=wait)
        if wait and job["state"] != "succeeded":
            raise RuntimeError(json.dumps(job))
        self.expected["jobs"][job["id"]] = {
            "state": "succeeded" if wait else "waiting",
            "request": request,
            "key": name,
            "results": {result: listed(array) for result, array in results.items()},
        }

    def fill(self, server: psutil.Process) -> None:
        """Have it keep something of every kind."""
        rng = np.random.default_rng(1)
        a = rng.integers(-9, 9, (6, 4)) + 1j * rng.integers(-9, 9, (6, 4))
        b = np.asfortranarray(rng.integers(-9, 9, (4, 5)) + 0j)
        large = np.tile(rng.integers(-9, 9, (4, 4)), (40, 40)).astype(np.float32)  # more than 64 KiB, packed less
        ida, idb, idl = (self.upload(array) for array in (a, b, large))
        self.upload(np.zeros((0, 3), np.complex64))
        gemm = {"op": "gemm", "a": ida, "b": idb}
        reduction = {"op": "gemm_reduce", "a": ida, "b": idb, "reduce": ["sumsq", "argmax"], "axis": "n"}
        reduced = {"sumsq": (abs(a @ b) ** 2).sum(1).round(), "argmax": (abs(a @ b) ** 2).round().argmax(1)}
        self.job("done-gemm", gemm | {"alpha": 2}, {"d": 2 * a @ b}, wait=True)
        self.job("done-reduce", reduction, reduced, wait=True)
        self.job("done-large", {"op": "gemm", "a": idl, "b": idl, "trans_b": "C"}, {"d": large @ large.T}, wait=True)
        s = np.array([[1.0, 2], [3, 4]])
        square = self.upload(s)
        step = {"id": "x", "op": "gemm", "a": square, "b": square, "c": square}
        program = {"op": "program", "steps": [step], "keep": ["x"]}
        # Before migration 150 a step without beta added nothing of its c.
        before = {"x": s @ s}
        programs = True
        try:
            self.job("done-program", program, before, wait=True)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 422:
                raise
            programs = False
        for process in server.children(recursive=True):
            if any("worker" in word for word in process.cmdline()):
                process.suspend()
        self.job("running", gemm | {"trans_a": "R"}, {"d": a.conj() @ b}, wait=False)
        self.job("queued-reduce", reduction, reduced, wait=False)
        self.job("queued-gemm", gemm | {"c": self.upload(np.ones((6, 5))), "beta": 3}, {"d": a @ b + 3}, wait=False)
        if programs:
            self.job("queued-program", program, before, wait=False)
        cancelled = self.submit("cancelled", gemm, wait=False)["id"]
        self.http.delete(f"/v1/jobs/{cancelled}").raise_for_status()
        self.expected["jobs"][cancelled] = {"state": "cancelled", "request": gemm, "key": "cancelled", "results": {}}
        self.half_an_upload(rng.integers(0, 99, 100).astype(np.float64))

    def half_an_upload(self, whole: np.ndarray) -> None:
        """Begin an upload in parts and send its second half, unless the version has none."""
        body = {"Content-Type": "application/octet-stream"}
        begun = self.http.post("/v1/uploads?dtype=float64&shape=100", headers=body, content=b"")
        if begun.status_code == 404:
            return
        begun.raise_for_status()
        upload = begun.json()["id"]
        part = self.http.put(f"/v1/uploads/{upload}/parts/400", headers=body, content=whole.tobytes()[400:])
        part.raise_for_status()
        self.expected["uploads"][upload] = {"missing": [[0, 400]], "array": listed(whole)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("commit")
    parser.add_argument("name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="old-") as temporary:
        folder = Path(temporary)
        old = Old(install(options.commit, folder), folder / "data")
        if key := old.create_key():
            old.expected["keys"].append(key)
        with old.running() as server:
            old.fill(server)
        old.expected["made_at"] = time.time()
        (folder / "expected.json").write_text(json.dumps(old.expected))
        FOLDER.mkdir(exist_ok=True)
        with tarfile.open(FOLDER / f"{options.name}.tar.xz", "w:xz") as archive:
            archive.add(
                folder / "data", "data", filter=lambda entry: None if not (entry.isfile() or entry.isdir()) else entry
            )
            archive.add(folder / "expected.json", "expected.json")
    print(FOLDER / f"{options.name}.tar.xz")


if __name__ == "__main__":
    main()

"""Builds the CUDA image and looks inside it, on a machine without a GPU: `make containers-cuda`.

In the container: CuPy can be imported, NVRTC compiles one of this project's kernels, the kernels compiled ahead of time
are found by the very names that the server looks them up by, and without a driver the server falls back to the CPU. The
image's size is held against its bound. Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE = os.environ.get("GEMMSERVE_IMAGE", "gemmserve") + ":cuda"
LARGEST = 1_600_000_000

INSIDE = """
import os, shutil, tempfile, time
from pathlib import Path
import cupy
from gemmserve_kernels.device import compiler
from gemmserve_kernels import precompile
from cupy.cuda import nvrtc
print("cupy", cupy.__version__, "nvrtc", nvrtc.getVersion())
seed = Path(os.environ["GEMMSERVE_KERNEL_SEED"])
shipped = {path.name for path in seed.iterdir()}
print(len(shipped), "kernels shipped,", sum(path.stat().st_size for path in seed.iterdir()), "bytes")
assert all(compiler.compiled_file(source, "sm_90a") for source in precompile.documented("sm_90a"))
os.environ["GEMMSERVE_KERNEL_CACHE"] = tempfile.mkdtemp()
del os.environ["GEMMSERVE_KERNEL_SEED"]
source = min(precompile.documented("sm_90a"), key=lambda source: len(source.text))
began = time.perf_counter()
compiled = compiler.cubin_file(source, "sm_90a")
print("compiled", compiled.name, "in", round(time.perf_counter() - began, 2), "s")
assert compiled.name in shipped, "the image's kernels are not those that the server looks for"
assert compiled.read_bytes() == (seed / compiled.name).read_bytes(), "compiled twice, and not the same"
"""
READ_ONLY = ("--read-only", "--tmpfs", "/tmp")  # noqa: S108 (in the container)


def run(*command: str) -> str:
    """Standard output and error; ends the program where the command fails."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def until_ready(name: str, within_s: float = 90.0) -> None:
    """Waits for the container's HEALTHCHECK."""
    deadline = time.monotonic() + within_s
    while run("docker", "inspect", "-f", "{{.State.Health.Status}}", name).strip() != "healthy":
        if time.monotonic() > deadline:
            sys.exit(f"not ready within {within_s:g} s:\n{run('docker', 'logs', name)}")
        time.sleep(0.2)


def main() -> None:
    """Runs everything."""
    began = time.monotonic()
    run("docker", "compose", "--profile", "cuda", "build")
    print(f"cuda: built in {time.monotonic() - began:.0f} s")
    size = int(run("docker", "image", "inspect", "-f", "{{.Size}}", IMAGE))
    print(f"cuda: {size / 1e6:.0f} MB")
    if size > LARGEST:
        sys.exit(f"cuda: the image is larger than {LARGEST / 1e6:.0f} MB")
    print(run("docker", "run", "--rm", *READ_ONLY, "--entrypoint", "python", IMAGE, "-c", INSIDE))
    # Without --gpus: no driver in the container.
    name = run(
        "docker", "run", "--detach", *READ_ONLY, "-v", "/var/cache/gemmserve", IMAGE,
        "serve", "--allow-unauthenticated",
    ).strip()  # fmt: skip
    try:
        until_ready(name)
        log = run("docker", "logs", name)
        if "devices: cpu" not in log:
            sys.exit(f"cuda: no fallback to the CPU:\n{log}")
        print(run("docker", "exec", name, "gemmserve", "doctor"))
    finally:
        run("docker", "rm", "--force", "--volumes", name)
    print("cuda: all is well")


if __name__ == "__main__":
    main()

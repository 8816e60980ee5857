"""tritonserver from the wheel of nvidia-pytriton, with models of its python backend: `tritonserver.py PORT FOLDER`.

FOLDER receives the model repository and a copy of the server's backends: the wheel has them without the stub, which it
keeps for every version of Python. Replaces this process by the server.
"""

import os
import shutil
import sys
from pathlib import Path

import pytriton

HERE = Path(__file__).parent
MODELS = {"echo": "AC", "axpy": "ABC", "product": "AB"}
CONFIG = """\
backend: "python"
max_batch_size: 0
input [ {inputs} ]
output [ {{ name: "D" data_type: TYPE_FP32 dims: {dims} }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""


def repository(folder):
    """The models; its path."""
    for name, inputs in MODELS.items():
        place = folder / "models" / name
        (place / "1").mkdir(parents=True)
        shutil.copy(HERE / "triton" / "model.py", place / "1")
        dims = "[-1, -1, 2]" if name == "product" else "[-1]"
        given = ", ".join(f'{{ name: "{each}" data_type: TYPE_FP32 dims: {dims} }}' for each in inputs)
        (place / "config.pbtxt").write_text(CONFIG.format(inputs=given, dims=dims))
    return folder / "models"


def backends(wheel, folder):
    """The server's backends with the stub for this Python; their path."""
    shutil.copytree(wheel / "backends", folder / "backends")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(wheel / "python_backend_stubs" / version / "triton_python_backend_stub", folder / "backends" / "python")
    return folder / "backends"


def main(port, folder):
    wheel = Path(pytriton.__file__).parent / "tritonserver"
    libraries = Path(pytriton.__file__).parent.parent / "nvidia_pytriton.libs"
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "PATH": python}
    environment["PYTHONPATH"] = ":".join(path for path in sys.path if path.endswith("site-packages"))
    prefix = f"gemmserve-bench-{os.getpid()}"
    arguments = [
        f"--model-repository={repository(folder)}",
        f"--backend-directory={backends(wheel, folder)}",
        f"--http-port={port}",
        "--http-address=127.0.0.1",
        "--allow-grpc=false",
        "--allow-metrics=false",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
    ]
    server = str(wheel / "bin" / "tritonserver")
    os.execve(server, [server, *arguments], environment)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

"""What an import loads, in a process of its own; and which package may know which."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def modules_after(code: str) -> set[str]:
    """Top-level names in sys.modules after `code`, in a fresh interpreter."""
    script = f"{code}\nimport json, sys; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {
    *("gemmserve_kernels", "gemmserve_service", "cupy", "cuda", "fastapi", "starlette", "pydantic"),
    *("pydantic_core", "uvicorn", "uvloop", "sqlite3", "structlog", "prometheus_client", "psutil"),
}


@pytest.mark.parametrize(
    "code",
    ["import gemmserve", "import gemmserve.cli", "from gemmserve import *", "import gemmserve; gemmserve.Client()"],
)
def test_the_client_loads_nothing_of_the_server(code) -> None:
    assert not modules_after(code) & HEAVY


def test_rich_is_loaded_only_when_something_is_drawn() -> None:
    assert "rich" not in modules_after("import gemmserve")


def test_the_kernels_load_no_device_library() -> None:
    loaded = modules_after("import gemmserve_kernels")
    assert not loaded & {"cupy", "cuda", "httpx", "fastapi", "pydantic", "gemmserve", "gemmserve_service"}


def test_the_front_never_loads_a_device_library() -> None:
    loaded = modules_after(
        "import gemmserve_service.http.app, gemmserve_service.jobs.core, gemmserve_service.processes.front"
    )
    assert not loaded & {"cupy", "cuda", "ray", "obstore"}


def test_the_supervisor_loads_little() -> None:
    """It starts the others: what it loads, they wait for."""
    loaded = modules_after(
        "import gemmserve.cli, gemmserve_service.processes.cli, gemmserve_service.processes.supervisor"
    )
    assert not loaded & {"numpy", "gemmserve_kernels", "fastapi", "starlette", "uvicorn", "structlog"}


def test_the_client_installs_and_runs_with_numpy_and_httpx_alone(wheel, tmp_path) -> None:
    """The wheel unpacked beside nothing but numpy, httpx and what httpx needs: imports work, the server's commands
    name what to install."""
    site = tmp_path / "site"
    wheel.extractall(site)
    allowed = ["numpy", "httpx", "httpcore", "h11", "certifi", "idna", "anyio", "sniffio", "typing_extensions"]
    for name in allowed:
        spec = __import__("importlib.util").util.find_spec(name)
        if spec is None:
            continue  # sniffio and typing_extensions are no longer needed by every version
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        (site / source.name).symlink_to(source)
        if (libraries := source.parent / f"{name}.libs").exists():
            (site / libraries.name).symlink_to(libraries)
    isolated = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "GEMMSERVE"))}
    run = [sys.executable, "-S", "-c"]  # -S: no site-packages
    start = f"import sys; sys.path.insert(0, {str(site)!r})\n"

    done = subprocess.run(
        [*run, f"{start}import gemmserve; print(gemmserve.Client.__name__)"],
        env=isolated,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Client"

    for command in ("serve", "doctor"):
        done = subprocess.run(
            [*run, f"{start}from gemmserve.cli import main; sys.exit(main([{command!r}]))"],
            env=isolated,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stdout + done.stderr
        assert "pip install '.[server]' (in a clone)" in done.stderr


def test_the_import_rules_hold(root) -> None:
    linter = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert linter, "import-linter is part of the dev extra"
    done = subprocess.run([linter, "--no-cache"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

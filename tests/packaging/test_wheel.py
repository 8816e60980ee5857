"""What `pip install gemmserve` puts on a machine."""

from __future__ import annotations

import re
from email.parser import Parser

PACKAGES = {
    "gemmserve": "client/gemmserve",
    "gemmserve_kernels": "kernels/gemmserve_kernels",
    "gemmserve_service": "service/gemmserve_service",
}


def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_top_level_names_are_the_three_packages(wheel) -> None:
    names = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == set(PACKAGES)


def test_every_source_file_travels(wheel, root) -> None:
    """Python, kernels, measurements, SQL and the typing marker; nothing else."""
    kinds = {".py", ".cu", ".cuh", ".json", ".sql", ".typed"}
    for package, folder in PACKAGES.items():
        here = {
            f"{package}/{path.relative_to(root / folder).as_posix()}"
            for path in (root / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert {name for name in wheel.namelist() if name.startswith(f"{package}/")} == here
        assert {name[name.rindex(".") :] for name in here} <= kinds
        assert f"{package}/py.typed" in here


def test_kernels_and_queries_are_files(wheel) -> None:
    names = wheel.namelist()
    for kind in (".cu", ".cuh", ".json", ".sql"):
        assert any(name.endswith(kind) for name in names), f"the wheel holds no {kind} file"


def test_the_client_needs_numpy_and_httpx_alone(wheel) -> None:
    required = [line for line in metadata(wheel).get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w.-]+", line)[0] for line in required} == {"numpy", "httpx"}


def test_the_extras(wheel) -> None:
    assert set(metadata(wheel).get_all("Provides-Extra")) >= {
        "server",
        "cli",
        "cuda12",
        "cuda13",
        "rocm",
        "demo",
        "dev",
    }


def test_the_licence_is_there_in_full(wheel) -> None:
    assert metadata(wheel)["License-Expression"] == "Apache-2.0"
    (name,) = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    text = wheel.read(name).decode()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_entry_points(wheel) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    text = wheel.read(name).decode()
    assert "gemmserve = gemmserve.cli:main" in text
    assert "[gemmserve.commands]" in text

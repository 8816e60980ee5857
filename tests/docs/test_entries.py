"""Settings, routes, problems, commands and public names have entries in the documentation, and no others are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from inline_executor import InlineExecutor

from gemmserve_service.http.problems import catalogue
from gemmserve_service.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text()


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_every_setting_has_an_entry(name) -> None:
    assert f"`GEMMSERVE_{name.upper()}`" in page("configuration.md")


def test_no_entry_without_a_setting() -> None:
    documented = set(re.findall(r"^\| `GEMMSERVE_(\w+)`", page("configuration.md"), re.MULTILINE))
    others = {"SERVER", "API_KEY", "CA_FILE", "KERNEL_CACHE", "KERNEL_SEED"}  # the client's and the kernels'
    assert {name.lower() for name in documented - others} == set(Settings.model_fields)


def routes() -> set[tuple[str, str]]:
    from gemmserve_service.http.app import create_app
    from gemmserve_service.jobs.core import Core

    settings = Settings()
    schema = create_app(settings, Core(settings, InlineExecutor())).openapi()
    return {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}


def test_every_route_is_described() -> None:
    text = page("http.md")
    missing = [f"{method} {path}" for method, path in sorted(routes()) if f"`{method} {path}`" not in text]
    assert not missing


def test_no_route_is_invented() -> None:
    documented = set(re.findall(r"`(GET|HEAD|POST|PUT|PATCH|DELETE) (/[^`?]*)", page("http.md")))
    outside_openapi = {("GET", "/docs"), ("GET", "/openapi.json")}
    assert documented - outside_openapi <= routes()


@pytest.mark.parametrize("slug", sorted(catalogue()))
def test_every_problem_is_listed_with_its_status(slug) -> None:
    rows = [line for line in page("http.md").splitlines() if line.startswith(f"| `{slug}` |")]
    assert len(rows) == 1
    assert str(catalogue()[slug]["status"]) in rows[0]


def test_every_command_is_described() -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "gemmserve.cli", "--help"], capture_output=True, text=True, check=True
    )
    commands = re.findall(r"^    (\w+)", listing.stdout, re.MULTILINE)
    assert {"gemm", "reduce", "serve", "doctor", "bench"} <= set(commands)
    text = page("cli.md")
    assert not [name for name in commands if f"gemmserve {name}" not in text]


def test_every_public_name_of_the_sdk_is_described() -> None:
    import gemmserve

    text = page("sdk.md")
    assert not [name for name in gemmserve.__all__ if not name.startswith("__") and f"`{name}" not in text]

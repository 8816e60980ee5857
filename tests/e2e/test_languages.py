"""The examples in other languages against the real server with keys, and proof that their checks can fail.

Debian has the interpreters: octave, r-base-core, nodejs. Where one is missing its tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live_server import LiveServer

from gemmserve import Client
from gemmserve_service.tenancy.keyring import create_key

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Language:
    """How its example is run, and three lines to bend, so that one result each is not the language's own."""

    command: tuple[str, ...]
    script: str
    bends: tuple[tuple[str, str], ...]


LANGUAGES = {
    "octave": Language(
        ("octave-cli", "--norc"),
        "octave/products.m",
        (
            ("abs(d - expected)", "abs(1.001 * d - expected)"),
            ("'trans_a', 'C', 'order', 'F'", "'trans_a', 'C', 'order', 'F', 'alpha', 2"),
            ("truth = sum(abs(expected)", "truth = 1.001 * sum(abs(expected)"),
        ),
    ),
    "r": Language(
        ("Rscript", "--vanilla"),
        "r/products.R",
        (
            ("Mod(d - expected) <= bound", "Mod(1.001 * d - expected) <= bound"),
            ('trans_a = "C", order = "F"', 'trans_a = "C", order = "F", alpha = 2'),
            ("truth <- colSums", "truth <- 1.001 * colSums"),
        ),
    ),
    "javascript": Language(
        ("node",),
        "javascript/products.mjs",
        (
            ("difference(data, i) / limit", "difference(data, i + 1) / limit"),
            ("op: 'gemm', a: ida", "op: 'gemm', alpha: 2, a: ida"),
            ("sum += magnitude ** 2", "sum += 1.001 * magnitude ** 2"),
        ),
    ),
    "shell": Language(
        ("sh",),
        "shell/products.sh",
        (
            ("print x; print y", "print x; print -y"),
            ('result=$(job "{\\"op\\": \\"gemm\\",', 'result=$(job "{\\"op\\": \\"gemm\\", \\"alpha\\": 2,'),
            ("power[j] += x * x + y * y", "power[j] += x * x"),
        ),
    ),
}


def named(name: str) -> Language:
    """The language of that name; the test is skipped where this machine lacks what its example needs."""
    language = LANGUAGES[name]
    for program in (language.command[0], *([] if name == "javascript" else ["curl"])):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if name == "javascript":
        version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
        if int(version.removeprefix("v").split(".")[0]) < 20:
            pytest.skip(f"Node.js is {version}, and the example needs 20")
    return language


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, str]]:
    """A server that wants keys, and one of them."""
    data_dir = tmp_path_factory.mktemp("data")
    _, key = create_key(data_dir, "examples")
    with LiveServer(data_dir=data_dir) as server:
        yield server, key


def run(
    language: Language, guarded: tuple[LiveServer, str], folder: Path = EXAMPLES, **more: str
) -> subprocess.CompletedProcess[str]:
    server, key = guarded
    environment = {**os.environ, "GEMMSERVE_SERVER": server.url, "GEMMSERVE_API_KEY": key, **more}
    command = [*language.command, str(folder / language.script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def stored(guarded: tuple[LiveServer, str]) -> dict[str, tuple[int, ...]]:
    """Every array on the server, and its shape."""
    with Client(guarded[0].url, api_key=guarded[1]) as client:
        return {array.id: array.shape for array in client.arrays()}


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_example_agrees_with_the_language_s_own_products(guarded, name) -> None:
    before = stored(guarded)
    done = run(named(name), guarded)
    assert done.returncode == 0, done.stdout + done.stderr
    gemm, job, reduce, problem = done.stdout.splitlines()
    assert gemm.startswith("gemm: ")
    assert job == "job: succeeded by numpy"
    assert reduce.startswith("gemm_reduce: ")
    assert "Shape mismatch: op(a) is " in problem
    (m, n), (length,) = sorted((shape for id_, shape in stored(guarded).items() if id_ not in before), key=len)[::-1]
    assert length == n < m  # the two results; operands are gone


@pytest.mark.parametrize("bend", range(3))
@pytest.mark.parametrize("name", LANGUAGES)
def test_a_wrong_result_is_noticed(guarded, tmp_path, name, bend) -> None:
    language = named(name)
    shutil.copytree(EXAMPLES / Path(language.script).parent, tmp_path / Path(language.script).parent)
    text = (EXAMPLES / language.script).read_text()
    before, after = language.bends[bend]
    assert text.count(before) == 1
    (tmp_path / language.script).write_text(text.replace(before, after))
    done = run(language, guarded, tmp_path)
    assert done.returncode != 0, done.stdout + done.stderr
    assert ("exceeds its bound" in done.stderr) or ("differ" in done.stdout + done.stderr), done.stdout + done.stderr


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_key_that_the_server_does_not_know_is_a_problem_in_plain_words(guarded, name) -> None:
    done = run(named(name), guarded, GEMMSERVE_API_KEY="gs_nobody")
    assert done.returncode != 0
    assert "A valid API key is needed: " in done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in LANGUAGES if name != "javascript"])
def test_the_key_is_in_no_command_line(guarded, tmp_path, name) -> None:
    seen = tmp_path / "seen"
    curl = tmp_path / "curl"
    curl.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{seen}\nexec {shutil.which("curl")} "$@"\n')
    curl.chmod(curl.stat().st_mode | stat.S_IXUSR)
    done = run(named(name), guarded, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/v1/jobs" in seen.read_text()
    assert guarded[1] not in seen.read_text()
    assert "Bearer" not in seen.read_text()

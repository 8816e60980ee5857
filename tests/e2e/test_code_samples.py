"""Every sample of the OpenAPI document runs, as it is printed, and does what its operation does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest
from live_server import LiveServer, until

from gemmserve_service.http.openapi.code_samples import COMMAND_LINE, CURL, PYTHON, code_samples
from gemmserve_service.http.openapi.documentation import DESCRIPTION
from gemmserve_service.tenancy.keyring import create_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SAMPLES = [
    pytest.param(method, path, sample["label"], sample["source"], id=f"{method} {path} {sample['label']}")
    for (method, path), samples in sorted(code_samples().items())
    for sample in samples
]
PATH = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
_REQUESTS = re.compile(r'^gemmserve_http_requests_total\{method="(\w+)",route="([^"]+)",status="(\d)', re.MULTILINE)


class Surroundings:
    """A server, and the folder and variables that the document has one prepare before the first sample."""

    def __init__(self, server: LiveServer, key: str, folder) -> None:
        self.http = httpx.Client(base_url=server.url, headers={"X-API-Key": key}, timeout=120, trust_env=False)
        self.environment = {**os.environ, "PATH": PATH}
        self.folder = folder
        (preparation,) = re.findall(r"```\n(.*?)```", DESCRIPTION, re.DOTALL)
        preparation = preparation.replace("http://127.0.0.1:8000", server.url)
        preparation = preparation.replace("GEMMSERVE_API_KEY= ", f"GEMMSERVE_API_KEY={key} ")
        said = self.bash(preparation + "\nenv -0")
        self.environment |= dict(line.partition("=")[::2] for line in said.split("\0") if line)
        assert self.environment["GEMMSERVE_SERVER"] == server.url
        assert self.environment["GEMMSERVE_API_KEY"] == key

    def bash(self, text: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", text],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def fresh(self) -> Mapping[str, str]:
        """Ids of things that no sample has deleted, cancelled or completed."""
        kind = {"Content-Type": "application/x-npy"}
        array = self.http.post("/v1/arrays", content=(self.folder / "a.npy").read_bytes(), headers=kind).json()["id"]
        operands = {"a": self.environment["A"], "b": self.environment["B"]}
        job = self.http.post("/v1/jobs", json={"op": "gemm", **operands}).json()["id"]
        upload = self.http.post("/v1/uploads", headers=kind).json()["id"]
        return {"ARRAY": array, "JOB": job, "UPLOAD": upload}

    def requests(self) -> Counter[tuple[str, str, str]]:
        """How many requests were answered until now, by method, route and first digit of the status."""
        found: Counter[tuple[str, str, str]] = Counter()
        for line in self.http.get("/metrics").text.splitlines():
            if match := _REQUESTS.match(line):
                found[match.groups()] += int(float(line.split()[-1]))
        return found


@pytest.fixture(scope="module", autouse=True)
def _commands() -> None:
    for command in ("bash", "curl", "gemmserve"):
        if shutil.which(command, path=PATH) is None:
            pytest.skip(f"{command} is not installed")


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory) -> Iterator[Surroundings]:
    data = tmp_path_factory.mktemp("data")
    _, key = create_key(data, "samples")
    with LiveServer(data_dir=data) as live:
        made = Surroundings(live, key, tmp_path_factory.mktemp("samples"))
        with made.http:
            yield made


@pytest.fixture(scope="module")
def without_key(server, tmp_path_factory) -> Iterator[Surroundings]:
    made = Surroundings(server, "", tmp_path_factory.mktemp("samples"))
    with made.http:
        yield made


def run(surroundings: Surroundings, monkeypatch, method: str, path: str, label: str, source: str) -> None:
    """Run it, and demand that the server has answered the operation with success, and no other request without."""
    monkeypatch.chdir(surroundings.folder)
    surroundings.environment |= surroundings.fresh()
    for name in ("GEMMSERVE_SERVER", "GEMMSERVE_API_KEY"):
        monkeypatch.setenv(name, surroundings.environment[name])
    before = surroundings.requests()
    if label == PYTHON:
        exec(compile(source, f"{method} {path}", "exec"), {"__name__": "__main__"})
    else:
        surroundings.bash(source)
    looks = 0

    def answered() -> Counter[tuple[str, str, str]]:
        nonlocal looks
        looks += 1
        found = surroundings.requests() - before
        found["GET", "/metrics", "2"] -= looks  # this test's own
        return found

    # A stream that the client has left counts once the server has written to it in vain: five seconds.
    until(lambda: answered()[method, path, "2"] > 0)
    strange = [entry for entry in answered() if entry[2] not in "23"]
    assert not strange


@pytest.mark.parametrize(("method", "path", "label", "source"), SAMPLES)
def test_every_sample_runs(surroundings, monkeypatch, method, path, label, source) -> None:
    run(surroundings, monkeypatch, method, path, label, source)


@pytest.mark.parametrize(("method", "path", "label", "source"), [each for each in SAMPLES if "/v1/gemm " in each.id])
def test_without_a_key(without_key, monkeypatch, method, path, label, source) -> None:
    run(without_key, monkeypatch, method, path, label, source)


def test_results_are_arrays(surroundings, monkeypatch) -> None:
    """What the samples write is what they say."""
    for label in (CURL, COMMAND_LINE):
        (source,) = (each["source"] for each in code_samples()["POST", "/v1/gemm"] if each["label"] == label)
        run(surroundings, monkeypatch, "POST", "/v1/gemm", label, source)
        a, b = (np.load(surroundings.folder / name) for name in ("a.npy", "b.npy"))
        np.testing.assert_allclose(np.load(surroundings.folder / "d.npy"), 2j * (a @ b.conj().T), rtol=1e-6)

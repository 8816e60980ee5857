"""The command line against the real server, as a shell runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest


@pytest.fixture
def cli(server, tmp_path):
    """cli("put", "a.npy") runs it in a fresh folder and returns the finished process."""

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "GEMMSERVE_SERVER": server.url}
        command = [sys.executable, "-m", "gemmserve.cli", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    return run


@pytest.fixture
def files(tmp_path, random_complex):
    a, b, c = random_complex(12, 20), random_complex(20, 9), random_complex(12, 9)
    for name, array in (("a", a), ("b", b), ("c", c)):
        np.save(tmp_path / f"{name}.npy", array)
    return a, b, c


def test_gemm(cli, tmp_path, files) -> None:
    a, b, c = files
    cli("gemm", "a.npy", "b.npy", "-c", "c.npy", "--alpha", "2", "--beta", "0.5", "-o", "d.npy")
    np.testing.assert_allclose(np.load(tmp_path / "d.npy"), 2 * (a @ b) + 0.5 * c, rtol=1e-4, atol=1e-4)


def test_reduce(cli, tmp_path, files) -> None:
    a, b, _ = files
    cli("reduce", "a.npy", "b.npy", "--reduce", "sumsq", "--axis", "n", "-o", "y.npy")
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), (np.abs(a @ b) ** 2).sum(1), rtol=1e-4)


def test_put_ls_get_rm(cli, tmp_path, files) -> None:
    a, _, _ = files
    identifier = next(word for word in cli("put", "a.npy").stdout.split() if word.startswith("arr_"))
    assert identifier in cli("ls").stdout
    cli("get", identifier, "-o", "back.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "back.npy"), a)
    cli("rm", identifier)
    assert identifier not in cli("ls").stdout
    assert "arr_" in cli("get", identifier, "-o", "again.npy", status=1).stderr


def test_jobs(cli, client, files) -> None:
    a, b, _ = files
    job = client.submit("gemm", a, b)
    job.wait(60)
    listed = cli("jobs").stdout
    assert job.id in listed
    assert "succeeded" in listed


def test_a_mistake_is_one_line(cli, files) -> None:
    done = cli("gemm", "a.npy", "a.npy", "-o", "d.npy", status=1)
    assert "Traceback" not in done.stderr
    assert "12" in done.stderr
    assert "20" in done.stderr


def test_doctor_finds_the_cpu(cli) -> None:
    assert "cpu" in cli("doctor").stdout.lower()


def test_bench_accuracy_knows_the_modes(cli) -> None:
    table = cli("bench", "accuracy", "--m", "32", "--n", "32", "--k", "32").stdout.lower()
    assert all(mode in table for mode in ("fp32", "1xtf32", "3xtf32", "3xfp16"))


def test_bench_gemm_gives_json(cli) -> None:
    size = ("--m", "64", "--n", "64", "--k", "64", "--iterations", "2", "--warmup", "1")
    rows = json.loads(cli("bench", "gemm", *size, "--verify", "--format", "json").stdout)
    assert "64" in json.dumps(rows)

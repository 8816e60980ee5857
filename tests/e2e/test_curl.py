"""The service without any of our code on the client's side: curl and files."""

from __future__ import annotations

import io
import json
import shutil
import subprocess

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(*arguments: str) -> bytes:
    answer = subprocess.run(["curl", "--silent", "--show-error", *arguments], capture_output=True, check=False)
    assert answer.returncode == 0, answer.stderr.decode()
    return answer.stdout


@pytest.fixture
def operands(tmp_path, random_complex):
    a, b = random_complex(33, 65), random_complex(65, 17)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    return a, b


def test_one_shot_gemm(server, tmp_path, operands) -> None:
    a, b = operands
    headers = tmp_path / "headers"
    fields = ("-F", f"a=@{tmp_path}/a.npy", "-F", f"b=@{tmp_path}/b.npy")
    curl(*fields, f"{server.url}/v1/gemm", "-o", f"{tmp_path}/d.npy", "-D", str(headers))
    np.testing.assert_allclose(np.load(tmp_path / "d.npy"), a @ b, rtol=1e-5, atol=1e-5)
    received = headers.read_text().lower()
    assert "gemm-algorithm: numpy" in received
    assert all(phase in received for phase in ("server-timing:", "queue", "h2d", "kernel", "d2h"))


def test_one_shot_with_params(server, tmp_path, operands) -> None:
    a, b = operands
    params = json.dumps({"trans_a": "C", "trans_b": "C", "alpha": [0, 2], "order": "F"})
    np.save(tmp_path / "a.npy", a.conj().T)
    np.save(tmp_path / "b.npy", b.conj().T)
    body = curl(
        *("-F", f"a=@{tmp_path}/a.npy", "-F", f"b=@{tmp_path}/b.npy", "-F", f"params={params}"), f"{server.url}/v1/gemm"
    )
    d = np.load(io.BytesIO(body))
    assert d.flags.f_contiguous
    np.testing.assert_allclose(d, 2j * (a @ b), rtol=1e-5, atol=1e-4)


def test_one_shot_reductions_come_as_npz(server, tmp_path, operands) -> None:
    a, b = operands
    params = json.dumps({"op": "gemm_reduce", "reduce": ["sumsq", "argmax"]})
    fields = ("-F", f"a=@{tmp_path}/a.npy", "-F", f"b=@{tmp_path}/b.npy", "-F", f"params={params}")
    with np.load(io.BytesIO(curl(*fields, f"{server.url}/v1/gemm-reduce"))) as results:
        assert set(results) == {"sumsq", "argmax"}
        np.testing.assert_allclose(results["sumsq"], (np.abs(a @ b) ** 2).sum(0), rtol=1e-5)
        np.testing.assert_array_equal(results["argmax"], np.abs(a @ b).argmax(0))


def test_upload_job_download(server, tmp_path, operands) -> None:
    a, b = operands
    ids = []
    for name in ("a", "b"):
        data = ("-H", "Content-Type: application/x-npy", "--data-binary", f"@{tmp_path}/{name}.npy")
        ids.append(json.loads(curl(*data, f"{server.url}/v1/arrays"))["id"])
    request = json.dumps({"op": "gemm", "a": ids[0], "b": ids[1]})
    headers = ("-H", "Content-Type: application/json", "-H", "Prefer: wait=60")
    job = json.loads(curl(*headers, "-d", request, f"{server.url}/v1/jobs"))
    assert job["state"] == "succeeded", job
    curl(f"{server.url}/v1/arrays/{job['result']['d']}/data", "-o", f"{tmp_path}/d.npy")
    np.testing.assert_allclose(np.load(tmp_path / "d.npy"), a @ b, rtol=1e-5, atol=1e-5)
    part = curl("-r", "0-7", "-H", "Accept: application/octet-stream", f"{server.url}/v1/arrays/{ids[0]}/data")
    assert part == a.tobytes()[:8]


def test_a_mistake_is_explained(server, tmp_path, operands) -> None:
    fields = ("-F", f"a=@{tmp_path}/a.npy", "-F", f"b=@{tmp_path}/a.npy")
    answer = curl(*fields, "-w", "\n%{http_code} %{content_type}", f"{server.url}/v1/gemm").decode()
    problem, status = answer.rsplit("\n", 1)
    assert status == "422 application/problem+json"
    assert json.loads(problem)["type"].endswith("/shape-mismatch")
    assert "65" in json.loads(problem)["detail"]
    assert "33" in json.loads(problem)["detail"]

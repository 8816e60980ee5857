"""Samples: of every operation in Python and curl, on the command line where it has a command; and none of another."""

from __future__ import annotations

from gemmserve_service.http.openapi.code_samples import COMMAND_LINE, CURL, PYTHON, code_samples

WITHOUT_A_COMMAND = {
    ("GET", "/v1/arrays/{array_id}"), ("GET", "/v1/arrays/{array_id}/sample"), ("HEAD", "/v1/arrays/{array_id}/data"),
    ("POST", "/v1/uploads"), ("GET", "/v1/uploads/{upload_id}"), ("DELETE", "/v1/uploads/{upload_id}"),
    ("PUT", "/v1/uploads/{upload_id}/parts/{offset}"), ("POST", "/v1/uploads/{upload_id}/complete"),
    ("POST", "/v1/batch"), ("GET", "/v1/jobs/{job_id}/events"), ("GET", "/livez"), ("GET", "/metrics"),
    ("GET", "/problems"), ("GET", "/problems/{slug}"), ("GET", "/v1/overview"), ("GET", "/v1/overview/stream"),
    ("GET", "/v1/cells"), ("POST", "/v1/job-states"),
}  # fmt: skip
"""Operations that no command does by itself."""


async def test_every_operation_has_its_samples(client):
    document = (await client.get("/openapi.json")).json()
    operations = {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert set(code_samples()) == set(operations)
    for key, operation in operations.items():
        without = key in WITHOUT_A_COMMAND or key[1].startswith("/v2")  # that protocol's clients are others
        wanted = [PYTHON, CURL] if without else [PYTHON, CURL, COMMAND_LINE]
        assert [sample["label"] for sample in operation["x-codeSamples"]] == wanted, key


def test_they_fit_a_page():
    for key, samples in code_samples().items():
        for sample in samples:
            assert max(map(len, sample["source"].splitlines())) <= 120, key
            assert sample["lang"] in {"Python", "Shell"}


def test_a_refusal_of_theirs_shows_why():
    """The problem is in the body, which curl's -f throws away."""
    for key, samples in code_samples().items():
        for sample in samples:
            assert " -f " not in sample["source"], key

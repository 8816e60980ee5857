"""What people may rely on: names, signatures, and that the light import stays light."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import pytest

import gemmserve

FUNCTIONS = {
    "broadcast_to", "conj", "conjugate", "copy", "diagonal", "dot", "einsum", "einsum_path",
    "expand_dims", "flip", "imag", "inner", "matmul", "matrix_transpose", "matvec", "moveaxis", "multi_dot", "ndim",
    "outer", "ravel", "real", "reshape", "shape", "size", "squeeze", "swapaxes", "tensordot", "to_numpy", "trace",
    "transpose", "vdot", "vecdot", "vecmat",
}  # fmt: skip
NAMES = {
    "APIError", "ArrayInfo", "AsyncClient", "AsyncJob", "AsyncProgram", "AsyncProgramArray", "AsyncRemoteArray",
    "Client", "ClientClosed", "ComputeUnsupported", "ConfigInfeasible", "CorruptAnswer", "CrossedAnswer",
    "DeviceError", "DigestMismatch", "DownloadWarning", "DtypeUnsupported", "Forbidden", "GemmserveError", "Gone",
    "IdempotencyConflict", "InvalidNpy", "InvalidRequest", "Job", "JobCancelled", "JobFailed", "JobInfo",
    "JobTimeout", "NotFound", "NotPositiveDefinite", "NotReady", "Overloaded", "ParameterInvalid", "Program",
    "ProgramArray", "ProgramError", "ProtocolError", "QueueFull", "QuotaExceeded", "RemoteArray", "RetryPolicy",
    "ServerError", "ShapeMismatch", "SingularMatrix", "StoreFull", "TooLarge", "TransportError", "TransportTimeout",
    "Unauthorized", "WorkerCrashed", "__version__",
} | FUNCTIONS  # fmt: skip

CLIENT = {
    "array", "arrays", "close", "delete", "devices", "einsum", "empty", "freeze", "gemm", "gemm_many", "gemm_reduce",
    "gemm_reduce_many", "get", "health", "job", "jobs", "map", "overview", "program", "put", "ready", "submit",
    "submit_many", "tensordot", "url", "usage",
}  # fmt: skip
ARRAY = {
    "H", "T", "conj", "conjugate", "copy", "delete", "diagonal", "dot", "dtype", "id", "imag", "info", "item", "keep",
    "mT", "nbytes", "ndim", "numpy", "ravel", "real", "refresh", "reshape", "shape", "size", "squeeze", "sum",
    "swapaxes", "transpose",
}  # fmt: skip
LINEAR_ALGEBRA = {"cholesky", "expm", "hemm", "herk", "inv", "matrix_power", "solve", "triangle", "trmm"}
JOB = {"cancel", "done", "events", "id", "progress", "refresh", "result", "state", "wait"}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_the_names() -> None:
    assert set(gemmserve.__all__) == NAMES
    assert set(dir(gemmserve)) >= NAMES
    for name in NAMES:
        assert getattr(gemmserve, name) is not None
    with pytest.raises(AttributeError):
        gemmserve.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("sync", "awaited", "names"),
    [
        (gemmserve.Client, gemmserve.AsyncClient, CLIENT | LINEAR_ALGEBRA),
        (gemmserve.RemoteArray, gemmserve.AsyncRemoteArray, ARRAY),
        (gemmserve.ProgramArray, gemmserve.AsyncProgramArray, ARRAY),
        (
            gemmserve.Program,
            gemmserve.AsyncProgram,
            {"einsum", "gemm", "gemm_reduce", "keep", "tensordot"} | LINEAR_ALGEBRA,
        ),
        (gemmserve.Job, gemmserve.AsyncJob, JOB),
    ],
)
def test_both_clients_offer_the_same(sync, awaited, names) -> None:
    assert public(sync) == public(awaited) == names
    for name in names:
        one, other = getattr(sync, name), getattr(awaited, name)
        if inspect.isfunction(one):
            assert [*map(str, inspect.signature(one).parameters.values())] == [
                str(parameter).replace("Async", "") for parameter in inspect.signature(other).parameters.values()
            ], name


def test_gemm_has_the_published_keywords_and_defaults() -> None:
    found = {
        name: parameter.default
        for name, parameter in inspect.signature(gemmserve.Client.gemm).parameters.items()
        if parameter.default is not parameter.empty
    }
    assert found == {
        "c": None, "alpha": 1, "beta": None, "trans_a": "N", "trans_b": "N", "order": "C", "layout": "interleaved",
        "compute": "auto", "config": None, "timeout": None,
    }  # fmt: skip


def test_a_keyword_that_there_is_not() -> None:
    with gemmserve.Client() as client, pytest.raises(TypeError, match=r"'gamma'.*alpha, beta"):
        client.gemm([[1.0]], [[1.0]], gamma=1)  # type: ignore[call-overload]


def test_errors_name_the_package_and_can_be_pickled() -> None:
    error = gemmserve.QueueFull("later", status=429, retry_after=3.0)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.retry_after) == (gemmserve.QueueFull, "later", 3.0)
    assert gemmserve.QueueFull.__module__ == "gemmserve"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import gemmserve.wire", {"httpx", "rich"}),
        ("import gemmserve.cli; gemmserve.cli.main(['--version'])", {"httpx", "rich"}),
        (
            "import gemmserve; gemmserve.Client().close(); import gemmserve.cli._products, gemmserve.cli._jobs",
            {"gemmserve_kernels", "gemmserve_service", "cupy", "fastapi", "starlette", "pydantic", "uvicorn"},
        ),
    ],
)
def test_imports_are_light(code, absent) -> None:
    script = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not absent & set(done.stdout.split())

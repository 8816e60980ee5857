"""The client of gemmserve: matrix products on a GPU somewhere else, NumPy arrays in and out.

>>> from gemmserve import Client
>>> with Client("http://127.0.0.1:8000") as client:
...     d = client.gemm(a, b)

Names are loaded when first used: the service, too, imports this package (for `gemmserve.wire`), and neither it nor
`gemmserve --version` should wait for an HTTP client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemmserve._async_client import AsyncClient
    from gemmserve._client import Client
    from gemmserve._errors import (
        APIError,
        ComputeUnsupported,
        ConfigInfeasible,
        CorruptAnswer,
        CrossedAnswer,
        DeviceError,
        DigestMismatch,
        DtypeUnsupported,
        Forbidden,
        GemmserveError,
        Gone,
        IdempotencyConflict,
        InvalidNpy,
        InvalidRequest,
        JobCancelled,
        JobFailed,
        JobTimeout,
        NotFound,
        NotReady,
        Overloaded,
        ParameterInvalid,
        ProgramError,
        ProtocolError,
        QueueFull,
        QuotaExceeded,
        ServerError,
        ShapeMismatch,
        StoreFull,
        TooLarge,
        TransportError,
        TransportTimeout,
        Unauthorized,
        WorkerCrashed,
    )
    from gemmserve._job import AsyncJob, Job
    from gemmserve._model import ArrayInfo, JobInfo
    from gemmserve._program import AsyncProgram, AsyncProgramArray, Program, ProgramArray
    from gemmserve._remote import AsyncRemoteArray, RemoteArray
    from gemmserve._transport.retry import RetryPolicy

    __version__: str

__all__ = [
    "APIError",
    "ArrayInfo",
    "AsyncClient",
    "AsyncJob",
    "AsyncProgram",
    "AsyncProgramArray",
    "AsyncRemoteArray",
    "Client",
    "ComputeUnsupported",
    "ConfigInfeasible",
    "CorruptAnswer",
    "CrossedAnswer",
    "DeviceError",
    "DigestMismatch",
    "DtypeUnsupported",
    "Forbidden",
    "GemmserveError",
    "Gone",
    "IdempotencyConflict",
    "InvalidNpy",
    "InvalidRequest",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobInfo",
    "JobTimeout",
    "NotFound",
    "NotReady",
    "Overloaded",
    "ParameterInvalid",
    "Program",
    "ProgramArray",
    "ProgramError",
    "ProtocolError",
    "QueueFull",
    "QuotaExceeded",
    "RemoteArray",
    "RetryPolicy",
    "ServerError",
    "ShapeMismatch",
    "StoreFull",
    "TooLarge",
    "TransportError",
    "TransportTimeout",
    "Unauthorized",
    "WorkerCrashed",
    "__version__",
]

_HOME = {
    "ArrayInfo": "_model",
    "AsyncClient": "_async_client",
    "AsyncJob": "_job",
    "AsyncProgram": "_program",
    "AsyncProgramArray": "_program",
    "AsyncRemoteArray": "_remote",
    "Client": "_client",
    "Job": "_job",
    "JobInfo": "_model",
    "Program": "_program",
    "ProgramArray": "_program",
    "RemoteArray": "_remote",
    "RetryPolicy": "_transport.retry",
}
"""The private module of each name; every other one is an error."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("gemmserve")
    elif name in __all__:
        from importlib import import_module

        value = getattr(import_module(f"gemmserve.{_HOME.get(name, '_errors')}"), name)
    else:
        raise AttributeError(f"module 'gemmserve' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

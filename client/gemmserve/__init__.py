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
    from gemmserve._contraction.calls import einsum_path
    from gemmserve._errors import (
        APIError,
        ClientClosed,
        ComputeUnsupported,
        ConfigInfeasible,
        CorruptAnswer,
        CrossedAnswer,
        DeviceError,
        DigestMismatch,
        DownloadWarning,
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
        NotPositiveDefinite,
        NotReady,
        Overloaded,
        ParameterInvalid,
        ProgramError,
        ProtocolError,
        QueueFull,
        QuotaExceeded,
        ServerError,
        ShapeMismatch,
        SingularMatrix,
        StoreFull,
        TooLarge,
        TransportError,
        TransportTimeout,
        Unauthorized,
        WorkerCrashed,
    )
    from gemmserve._handles.functions import (
        broadcast_to,
        conj,
        conjugate,
        copy,
        diagonal,
        dot,
        einsum,
        expand_dims,
        flip,
        imag,
        inner,
        matmul,
        matrix_transpose,
        matvec,
        moveaxis,
        multi_dot,
        ndim,
        outer,
        ravel,
        real,
        reshape,
        shape,
        size,
        squeeze,
        swapaxes,
        tensordot,
        to_numpy,
        trace,
        transpose,
        vdot,
        vecdot,
        vecmat,
    )
    from gemmserve._job import AsyncJob, Job
    from gemmserve._model import ArrayInfo, JobInfo
    from gemmserve._programs.program import AsyncProgram, AsyncProgramArray, Program, ProgramArray
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
    "ClientClosed",
    "ComputeUnsupported",
    "ConfigInfeasible",
    "CorruptAnswer",
    "CrossedAnswer",
    "DeviceError",
    "DigestMismatch",
    "DownloadWarning",
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
    "NotPositiveDefinite",
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
    "SingularMatrix",
    "StoreFull",
    "TooLarge",
    "TransportError",
    "TransportTimeout",
    "Unauthorized",
    "WorkerCrashed",
    "__version__",
    "broadcast_to",
    "conj",
    "conjugate",
    "copy",
    "diagonal",
    "dot",
    "einsum",
    "einsum_path",
    "expand_dims",
    "flip",
    "imag",
    "inner",
    "matmul",
    "matrix_transpose",
    "matvec",
    "moveaxis",
    "multi_dot",
    "ndim",
    "outer",
    "ravel",
    "real",
    "reshape",
    "shape",
    "size",
    "squeeze",
    "swapaxes",
    "tensordot",
    "to_numpy",
    "trace",
    "transpose",
    "vdot",
    "vecdot",
    "vecmat",
]

_HOME = {
    "ArrayInfo": "_model",
    "AsyncClient": "_async_client",
    "AsyncJob": "_job",
    "AsyncProgram": "_programs.program",
    "AsyncProgramArray": "_programs.program",
    "AsyncRemoteArray": "_remote",
    "Client": "_client",
    "Job": "_job",
    "JobInfo": "_model",
    "Program": "_programs.program",
    "ProgramArray": "_programs.program",
    "RemoteArray": "_remote",
    "RetryPolicy": "_transport.retry",
    "einsum_path": "_contraction.calls",
}
"""The private module of each name; of the others small letters are functions on handles, the rest errors."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("gemmserve")
    elif name in __all__ or name == "sum":  # which `import *` must not take the place of Python's
        from importlib import import_module

        home = _HOME.get(name, "_handles.functions" if name.islower() else "_errors")
        value = getattr(import_module(f"gemmserve.{home}"), name)
    else:
        raise AttributeError(f"module 'gemmserve' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

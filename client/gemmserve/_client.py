"""The blocking client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, overload

import httpx

from gemmserve._base import ClientBase
from gemmserve._calls import batch, requests
from gemmserve._calls.flows import Flow, prepare, submission
from gemmserve._calls.params import (
    GemmManyOptions,
    GemmOptions,
    ReduceManyOptions,
    ReduceOptions,
    keywords,
    params_of,
)
from gemmserve._job import Job
from gemmserve._model import ArrayInfo, JobInfo
from gemmserve._program import Program
from gemmserve._remote import RemoteArray
from gemmserve._transfer.arrays import as_array
from gemmserve._transport.sync_io import SyncIO

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias, Unpack

    from gemmserve._calls.params import OneReduction
    from gemmserve._transfer.arrays import AnyArray, LocalArray

    Operand: TypeAlias = RemoteArray | LocalArray

T = TypeVar("T")


class Client(ClientBase[SyncIO, httpx.BaseTransport]):
    """A connection to a gemmserve server; close it, or use it in a `with` block. Safe to share between threads.

    `url`: by default the variable GEMMSERVE_SERVER, else http://127.0.0.1:8000; `unix:/path` for a Unix socket.
    `api_key`: by default the variable GEMMSERVE_API_KEY; "" sends none. It goes to this server alone, never after a
    redirect. `verify`: whose certificates are trusted over https: True the system's, a path the CA certificates of that
    PEM file, or an SSLContext; False anybody's, which protects from nobody on the way.

    `timeout` is how many seconds the server may be silent when it has nothing to wait for; products and long polls add
    their own time. `retry` says how long what fails in passing is repeated (every request may safely be).
    Arrays of 64 MiB and more are sent and fetched in parts over so many `connections`, and go on where one of them
    broke; 0 sends and fetches every array whole. `compression="zstd"` compresses what `put` sends and downloads fetch,
    for slow lines, where that makes it an eighth shorter; all arrays then go whole but those that `put` does not
    compress. `digests`: "known" compares a download with the SHA-256 that the server has of it, if it has one; "always"
    has every body checked on both sides, products and JSON too, at the time of hashing; "never" none.

    `pickle_key`: the key goes along where the client or a handle is pickled, which it does not otherwise.
    `progress=False` keeps large transfers from drawing a bar on a terminal's stderr. `transport` is httpx's, for tests
    and proxies. Every method may raise any GemmserveError; the docstrings name the ones to expect.
    """

    _connect = SyncIO

    def close(self) -> None:
        """Closes the connections; arrays and jobs stay on the server."""
        self._io.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, flow: Flow[T]) -> T:
        return self._io.drive(flow)

    def _call(self, request: requests.Request[T]) -> T:
        return self._run(self._flows.call(request))

    @overload
    def gemm(
        self, a: RemoteArray, b: Operand, c: Operand | None = None, **options: Unpack[GemmOptions]
    ) -> RemoteArray: ...
    @overload
    def gemm(
        self, a: LocalArray, b: RemoteArray, c: Operand | None = None, **options: Unpack[GemmOptions]
    ) -> RemoteArray: ...
    @overload
    def gemm(self, a: LocalArray, b: LocalArray, c: RemoteArray, **options: Unpack[GemmOptions]) -> RemoteArray: ...
    @overload
    def gemm(
        self, a: LocalArray, b: LocalArray, c: LocalArray | None = None, **options: Unpack[GemmOptions]
    ) -> AnyArray: ...
    @keywords(GemmOptions)
    def gemm(self, a: Any, b: Any, c: Any = None, **options: Unpack[GemmOptions]) -> AnyArray | RemoteArray:
        """D = alpha * op(A) * op(B) + beta * C.

        op by `trans_a` and `trans_b`: "N", "T" (transpose), "C" (conjugate transpose), "R" (conjugate).

        Operands have shape (..., m, k) and (..., k, n) after op, leading dimensions broadcasting as in numpy.matmul,
        and dtype float16, float32, float64, complex64 or complex128; the result has NumPy's result type. NumPy in,
        NumPy out, in one exchange. If any operand is a RemoteArray, the others are uploaded for this product only and
        the result is a RemoteArray. `layout="planar"`: real arrays with a leading axis of 2 (real, imaginary).

        `timeout`: seconds until the product must be done; it is cancelled then, as it is on KeyboardInterrupt.
        Raises ShapeMismatch, DtypeUnsupported, ComputeUnsupported, ParameterInvalid, ConfigInfeasible, JobTimeout,
        QueueFull; with remote operands JobFailed, JobCancelled, NotFound, Gone.
        """
        return cast("AnyArray | RemoteArray", self._product("gemm", {"a": a, "b": b, "c": c}, GemmOptions, options))

    @overload
    def gemm_reduce(self, a: RemoteArray, b: Operand, **options: Unpack[OneReduction]) -> RemoteArray: ...
    @overload
    def gemm_reduce(self, a: LocalArray, b: RemoteArray, **options: Unpack[OneReduction]) -> RemoteArray: ...
    @overload
    def gemm_reduce(self, a: LocalArray, b: LocalArray, **options: Unpack[OneReduction]) -> AnyArray: ...
    @overload
    def gemm_reduce(self, a: RemoteArray, b: Operand, **options: Unpack[ReduceOptions]) -> dict[str, RemoteArray]: ...
    @overload
    def gemm_reduce(
        self, a: LocalArray, b: RemoteArray, **options: Unpack[ReduceOptions]
    ) -> dict[str, RemoteArray]: ...
    @overload
    def gemm_reduce(self, a: LocalArray, b: LocalArray, **options: Unpack[ReduceOptions]) -> dict[str, AnyArray]: ...
    @keywords(ReduceOptions)
    def gemm_reduce(
        self, a: Any, b: Any, **options: Unpack[ReduceOptions]
    ) -> AnyArray | RemoteArray | dict[str, AnyArray] | dict[str, RemoteArray]:
        """Reduces pre_op(alpha * op(A) op(B)) over `axis` ("m", "n", or a list that adds "batch") as it is formed.

        `reduce`: sum, max, min, mean, sumsq, absmax, absmin, argmax or argmin, or several in one pass. One array for
        one name; a dict by name for a list, or with `return_c=True`, which adds the product as "c". Remote operands,
        the dtypes and `timeout` are as in `gemm`, and so are the errors.
        """
        result = self._product("gemm_reduce", {"a": a, "b": b}, ReduceOptions, options)
        return cast("AnyArray | RemoteArray | dict[str, AnyArray] | dict[str, RemoteArray]", result)

    @keywords(GemmManyOptions)
    def gemm_many(self, a: Any, b: Any, c: Any = None, **options: Unpack[GemmManyOptions]) -> list[Any]:
        """`gemm` of many operands in one exchange: a list of the results, each with the bits that it would have alone.

        `a`, `b` and `c` are each a list of operands, one a product, of any shapes; or an array of three dimensions or
        more, a stack along its first axis; or one matrix (or RemoteArray) that every product uses. NumPy in, NumPy out;
        if any operand is a RemoteArray, the others are uploaded for the while and the results are RemoteArrays.

        What is wrong with one product does not keep the others from being computed. `errors="raise"` raises the first
        error then, which names the product (`problem["item"]`); `errors="return"` leaves each error in its place in the
        list. The options, and the errors, are those of `gemm`; `timeout` is for all products together.
        """
        return self._many("gemm", {"a": a, "b": b, "c": c}, GemmManyOptions, options)

    @keywords(ReduceManyOptions)
    def gemm_reduce_many(self, a: Any, b: Any, **options: Unpack[ReduceManyOptions]) -> list[Any]:
        """`gemm_reduce` of many operands in one exchange: see `gemm_many`.

        The list holds dicts where `gemm_reduce` gives one.
        """
        return self._many("gemm_reduce", {"a": a, "b": b}, ReduceManyOptions, options)

    def _many(self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]) -> list[Any]:
        params, others = params_of(kind, options)
        results = self._run(batch.run_batch(self._flows, op, operands, params, timeout=others["timeout"]))
        batch.check(results, others["errors"])
        return [batch.with_handles(result, lambda info: RemoteArray(self, info.id, info)) for result in results]

    def _product(self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]) -> Any:
        params, others = params_of(kind, options)
        timeout: float | None = others["timeout"]
        present, encoded, remote = prepare(op, operands, params)
        if not remote:
            return self._run(self._flows.one_shot(op, present, encoded, timeout=timeout))
        job = Job(self, self._run(self._flows.run(op, present, encoded, timeout=timeout)))
        return job._result(timeout)

    def submit(self, op: str, a: Operand, b: Operand, c: Operand | None = None, **params: Any) -> Job:
        """Queues a "gemm" or "gemm_reduce" and returns its Job at once.

        `params` are those of the method of that name, without `timeout`, and: `priority` (-100 to 100, higher first),
        `timeout_s` (deadline of queue and run), `ttl_s` (life of the results), `verify` (the job's `info.residual` then
        holds the residual of sampled columns). Local operands are uploaded for this job only.
        """
        operands, encoded = submission(op, {"a": a, "b": b, "c": c}, params)
        return Job(self, self._run(self._flows.submit(op, operands, encoded)))

    def put(self, a: LocalArray, ttl_s: float | None = None, *, digest: bool = False) -> RemoteArray:
        """Uploads an array; it stays for `ttl_s` seconds (None: the server's default) or until it is deleted.

        Contiguous arrays are sent from their own memory, Fortran order kept. `digest=True` sends a SHA-256 that the
        server checks. Raises DtypeUnsupported, TooLarge, StoreFull, DigestMismatch.
        """
        info = self._run(self._flows.put(as_array(a), ttl_s=ttl_s, digest=digest))
        return RemoteArray(self, info.id, info)

    def get(self, array: str | RemoteArray) -> AnyArray:
        """Downloads an array, by its id or handle. Raises NotFound, Gone."""
        return array.numpy() if isinstance(array, RemoteArray) else self._download(array)

    def array(self, array_id: str) -> RemoteArray:
        """The handle of an array that is on the server. Raises NotFound, Gone."""
        return RemoteArray(self, array_id, self._array_info(array_id))

    def arrays(self, *, limit: int | None = None) -> list[RemoteArray]:
        """The arrays on the server, newest first."""
        infos = self._run(self._flows.listing("/v1/arrays", ArrayInfo.parse, limit=limit))
        return [RemoteArray(self, info.id, info) for info in infos]

    def delete(self, array_id: str) -> None:
        """Deletes an array: it is hidden at once and freed after the last job that uses it. Raises NotFound."""
        self._call(requests.delete_array(array_id))

    def program(
        self, *, priority: int = 0, timeout: float | None = None, ttl_s: float | None = None, verify: bool = False
    ) -> Program:
        """A program: steps recorded in a `with` block, which run as one job when it ends.

            with client.program() as p:
                x2 = p.gemm(ra, ra)
                x4 = x2 @ x2
                y = p.gemm_reduce(x4, rb, reduce="absmax")
                p.keep(x4)
            x4.numpy(), y.numpy()

        What passes between steps stays on the server's device. `timeout`: seconds until it must be done; it is
        cancelled then, as it is on KeyboardInterrupt. `priority`, `ttl_s` and `verify` are those of `submit`. If the
        block raises, nothing is submitted. Raises at the block's end what `gemm` raises; `problem["step"]` names the
        step.
        """
        return Program(self, priority=priority, timeout=timeout, ttl_s=ttl_s, verify=verify)

    def job(self, job_id: str) -> Job:
        """A job by its id. Raises NotFound."""
        return Job(self, self._call(requests.job_info(job_id)))

    def jobs(self, *, state: str | None = None, limit: int | None = None) -> list[Job]:
        """The jobs, newest first; only those in `state` if given."""
        infos = self._run(self._flows.listing("/v1/jobs", JobInfo.parse, {"state": state}, limit=limit))
        return [Job(self, info) for info in infos]

    def devices(self) -> list[dict[str, Any]]:
        """The server's devices: what each is, its memory, its compute modes."""
        return requests.device_list(self._call(requests.document("/v1/devices")))

    def usage(self) -> dict[str, Any]:
        """Quotas and what is used of them."""
        return cast("dict[str, Any]", self._call(requests.document("/v1/usage")))

    def health(self) -> dict[str, Any]:
        """The server's own account of its health."""
        return cast("dict[str, Any]", self._call(requests.document("/healthz")))

    def ready(self) -> bool:
        """Whether the server takes work: False while it starts or drains. Raises TransportError if it is not there."""
        return self._run(self._flows.ready())

    def _array_info(self, array_id: str) -> ArrayInfo:
        return self._call(requests.array_info(array_id))

    def _download(self, array_id: str, nbytes: int = 0) -> AnyArray:
        return requests.single_array(self._run(self._flows.download(array_id, nbytes=nbytes)))

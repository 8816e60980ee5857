"""The blocking client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, overload

from gemmserve._base import ClientBase, flattened, newest
from gemmserve._calls import batch, requests
from gemmserve._calls.exchanges import CLEANUP_LIMIT_S, TEMPORARY_TTL_S, Flow
from gemmserve._calls.linalg import LinearAlgebra
from gemmserve._calls.mapped import Mapped
from gemmserve._calls.params import (
    EinsumOptions,
    GemmManyOptions,
    GemmOptions,
    ReduceManyOptions,
    ReduceOptions,
    TensordotOptions,
    keywords,
    params_of,
)
from gemmserve._calls.submissions import expected_of, prepare, submission, submissions
from gemmserve._contraction import calls as contraction
from gemmserve._errors import APIError, GemmserveError, ParameterInvalid, numbered
from gemmserve._handles.handle import local_array
from gemmserve._job import Job
from gemmserve._model import ArrayInfo, JobInfo
from gemmserve._programs.program import Program
from gemmserve._remote import RemoteArray
from gemmserve._transport.library import httpx
from gemmserve._transport.sync_io import SyncIO

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from typing import Literal, TypeAlias, Unpack

    from gemmserve._calls.linalg import Computation
    from gemmserve._calls.params import OneReduction
    from gemmserve._contraction.calls import Contraction
    from gemmserve._handles.lifetime import OpenDelete
    from gemmserve._handles.view import Base, View
    from gemmserve._transfer.arrays import AnyArray, LocalArray

    Operand: TypeAlias = RemoteArray | LocalArray

T = TypeVar("T")


class Client(ClientBase[SyncIO, httpx.BaseTransport], LinearAlgebra):
    """A connection to a gemmserve server; close it, or use it in a `with` block. Safe to share between threads.

    `url`: by default the variable GEMMSERVE_SERVER, else http://127.0.0.1:8000; `unix:/path` for a Unix socket.
    `api_key`: by default the variable GEMMSERVE_API_KEY; "" sends none. It goes to this server alone, never after a
    redirect. `verify`: whose certificates are trusted over https: True the system's, a path the CA certificates of that
    PEM file, or an SSLContext; False anybody's, which protects from nobody on the way.

    `timeout` is how many seconds the server may be silent when it has nothing to wait for; products and long polls add
    their own time. `retry` says how long what fails in passing is repeated (every request may safely be).
    Arrays of 64 MiB and more are sent and fetched in parts over so many `connections`, and go on where one of them
    broke, but for what goes by shared memory; 0 sends and fetches every array whole. `compression="zstd"` compresses
    what `put` sends and downloads fetch, for slow lines, where that makes it an eighth shorter; all arrays then go
    whole but those that `put` does not compress. `digests`: "known" compares a download with the SHA-256 that the
    server has of it, if it has one; "always" has every body checked on both sides, products and JSON too, at the
    time of hashing; "never" none.

    `auto_delete=True`: arrays that this client makes, by `put` without a name and as results, are deleted when the last
    handle on them is gone, and what handles still hold when the client is closed.
    `pickle_key`: the key goes along where the client or a handle is pickled, which it does not otherwise.
    `warn_download`: bytes above which numpy.asarray of a handle warns, once, that it downloads them; None: never.
    `progress=False` keeps large transfers from drawing a bar on a terminal's stderr. `transport` is httpx's (or
    httpx2's), for tests and proxies. Every method may raise any GemmserveError; the docstrings name the ones to expect.
    """

    _connect = SyncIO

    def close(self) -> None:
        """Closes the connections; arrays and jobs stay on the server, but for what `auto_delete` deletes."""
        if self._auto_delete is not None:
            self._auto_delete.end(CLEANUP_LIMIT_S)
        self._io.close()

    def _open_delete(self, transport: httpx.BaseTransport | None) -> OpenDelete:  # noqa: ARG002 (as the other's)
        io, flows = self._io, self._flows  # not the client, which would never be collected
        return lambda: (lambda ids: io.drive(flows.delete(ids)), lambda: None)

    def __enter__(self) -> Self:
        self._io.check_open()
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
        """D = alpha * op(A) * op(B) + beta * C; `beta` is 1 where there is a c unless it is given.

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

    @keywords(EinsumOptions)
    def einsum(self, *operands: Any, **options: Unpack[EinsumOptions]) -> Any:
        """The sum of products that an equation names, as numpy.einsum: `einsum("ij,jk->ik", a, b)`, with implicit
        output, ellipses, repeated labels and the form `einsum(a, [0, 1], b, [1, 2], [0, 2])`.

        It is contracted two operands at a time, in one job: every contraction that sums is one batched product, on
        views where the axes allow it; what passes between them stays on the server's device. NumPy in, NumPy out; with
        a RemoteArray among the operands the result is one (a view of the operand, where nothing is computed).

        `optimize`: True or "auto" (the best order of up to eight operands; of more a greedy one, or that of cotengra or
        opt_einsum where one is installed and it is cheaper), "optimal", "greedy", False (as the operands come), the
        name of an optimizer of theirs, a path (numpy.einsum_path), a tree (cotengra), or an optimizer (opt_einsum).
        `dtype`: of computation and result, one that holds the operands'; by default NumPy's result type. `compute`:
        that of every product, as in `gemm`. `memory_limit`: bytes of operands and intermediate results at one time; a
        plan that needs more is refused before anything is sent. `timeout` is as in `gemm`.

        Raises ShapeMismatch, DtypeUnsupported, ParameterInvalid, and what `gemm` raises.
        """
        params, others = params_of(EinsumOptions, options)
        return self._contracted(contraction.einsum(operands, **params), **others)

    @keywords(TensordotOptions)
    def tensordot(self, a: Any, b: Any, axes: Any = 2, **options: Unpack[TensordotOptions]) -> Any:
        """The sum of products over axes of both, as numpy.tensordot: the last `axes` of a and the first of b, or
        pairs of two sequences, (axes of a, axes of b). One job; the rest as in `einsum`.
        """
        params, others = params_of(TensordotOptions, options)
        return self._contracted(contraction.tensordot(a, b, axes, **params), **others)

    def _contracted(self, planned: Contraction, *, timeout: float | None) -> Any:
        if not planned.plan.steps:
            return planned.seen()
        product = planned.product()
        if product is not None:
            a, b = product
            return planned.shown(self.gemm(a, b, compute=cast("Any", planned.compute), timeout=timeout))
        return self._several(planned, timeout=timeout)

    def _many(self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]) -> list[Any]:
        params, others = params_of(kind, options)
        results = self._run(batch.run_batch(self._flows, op, operands, params, timeout=others["timeout"]))
        batch.check(results, others["errors"])
        return [batch.with_handles(result, self._made) for result in results]

    def _product(self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]) -> Any:
        params, others = params_of(kind, options)
        timeout: float | None = others["timeout"]
        present, encoded, remote = prepare(op, operands, params)
        if not remote:
            return self._run(self._flows.one_shot(op, present, encoded, timeout=timeout))
        info = self._run(self._flows.run(op, present, encoded, timeout=timeout))
        return Job(self, info, expected_of(op, present, params))._result(timeout)

    def submit(self, op: str, a: Operand, b: Operand, c: Operand | None = None, **params: Any) -> Job:
        """Queues a "gemm" or "gemm_reduce" and returns its Job at once.

        `params` are those of the method of that name, without `timeout`, and: `priority` (-100 to 100, higher first),
        `timeout_s` (deadline of queue and run), `ttl_s` (life of the results), `name` and `labels` (of the result),
        `verify` (the job's `info.residual` then holds the residual of sampled columns). Local operands are uploaded for
        this job only.
        """
        operands, encoded = submission(op, {"a": a, "b": b, "c": c}, params)
        return Job(self, self._run(self._flows.submit(op, operands, encoded)), expected_of(op, operands, encoded))

    def submit_many(self, asked: Iterable[Mapping[str, Any]]) -> list[Job]:
        """Queues many products by few exchanges and returns their Jobs, in order.

        `asked`: for each a mapping of `submit`'s arguments by name, such as `{"op": "gemm", "a": ra, "b": rb,
        "priority": 5}`. Five hundred at a time are accepted together or not at all; where some are refused, those that
        were accepted before are cancelled, and the error names the first that is wrong (`problem["item"]`). A local
        operand that several of them use is uploaded once. Raises what `gemm` raises.
        """
        products = submissions(asked)
        infos = [info for each in self._run(self._flows.submit_many(products)) for info in each.infos]
        return [Job(self, info, expected_of(*each)) for info, each in zip(infos, products, strict=True)]

    def map(
        self, asked: Iterable[Mapping[str, Any]], *, in_flight: int = 256, errors: Literal["raise", "return"] = "raise"
    ) -> Generator[Any]:
        """The results of many products, in order, as they come: an iterator of what each `Job.result()` would give.

        `asked` is what `submit_many` takes, and may be endless: so many products as `in_flight` are on the server at
        one time, and the next are asked for as results are taken. As with `concurrent.futures.Executor.map`, the error
        of a product, one that is refused or one that fails, is raised in its place, after the results before it, and
        ends the iteration; `errors="return"` gives it in the place of the result, and goes on. `problem["item"]` is the
        product's number in `asked`. What keeps the server from taking any product (a full store, a key that is not
        valid, no answer), and an error of `asked` itself, is raised with either, after the results before it. When the
        iterator is closed, products that are not done are cancelled, and results that it has not given are deleted,
        but those with a name or labels.
        """
        products = Mapped(self._flows, asked, in_flight, errors)
        try:
            while (numbers := self._run(products.next())) is not None:
                for number in numbers:
                    outcome = products.take()
                    result: Any = outcome
                    if not isinstance(outcome, APIError):
                        try:
                            result = Job(self, *outcome)._result()
                        except GemmserveError as error:
                            result = numbered(error, number) if isinstance(error, APIError) else error
                    if isinstance(result, GemmserveError) and errors == "raise":
                        raise result
                    yield result
        finally:
            self._run(products.close())

    def put(
        self,
        a: LocalArray,
        ttl_s: float | None = None,
        *,
        digest: bool = False,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> RemoteArray:
        """Uploads an array; it stays for `ttl_s` seconds (None: the server's default) or until it is deleted.

        Contiguous arrays are sent from their own memory, Fortran order kept. `digest=True` sends a SHA-256 that the
        server checks. `name`: up to 128 characters by which `client[name]` and `arrays` find it; `labels`: up to 16 of
        them. Raises DtypeUnsupported, ParameterInvalid, TooLarge, StoreFull, DigestMismatch.
        """
        info = self._run(self._flows.put(local_array(a), ttl_s=ttl_s, digest=digest, name=name, labels=labels))
        return self._made(info) if name is None else self._handle(info.id, info)

    def get(self, array: str | RemoteArray, *, out: AnyArray | None = None) -> AnyArray:
        """Downloads an array, by its id or handle. `out`: see `RemoteArray.numpy`. Raises NotFound, Gone."""
        if isinstance(array, RemoteArray):
            return array.numpy(out=out)
        return self._download(array) if out is None else self.array(array).numpy(out=out)

    def array(self, array_id: str) -> RemoteArray:
        """The handle of an array that is on the server. Raises NotFound, Gone."""
        return self._handle(array_id, self._array_info(array_id))

    def arrays(
        self,
        *,
        limit: int | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        everybody: bool = False,
    ) -> list[RemoteArray]:
        """The arrays on the server, newest first; only those of that name, and with all of those labels. `everybody`:
        other owners' too, which needs the scope admin.
        """
        query = requests.tags_query(name, labels) | requests.view_query(everybody=everybody)
        infos = self._run(self._flows.listing("/v1/arrays", ArrayInfo.parse, query, limit=limit))
        return [self._handle(info.id, info) for info in infos]

    def __getitem__(self, name: str) -> RemoteArray:
        """The newest array of that name. Raises NotFound, which is a LookupError."""
        return newest(self.arrays(limit=1, name=name), name)

    def delete(
        self,
        *arrays: str | RemoteArray | Iterable[str | RemoteArray],
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        older_than_s: float | None = None,
        dry_run: bool = False,
    ) -> int:
        """Deletes arrays, by their ids or handles, and returns how many. They are hidden at once and freed after the
        last job that uses them.

        One array: raises NotFound if there is none. Several, also as one list, go many by an exchange, and those that
        are gone already are passed over. Without any, those that all of `name`, `labels` and `older_than_s` (seconds
        since they were made) choose go; `dry_run=True` only counts them. Raises ParameterInvalid for a call that
        chooses nothing.
        """
        if not arrays:
            chosen = self._flows.delete_chosen(name, labels, older_than_s, dry_run=dry_run)
            return self._run(chosen)
        if dry_run or name is not None or labels or older_than_s is not None:
            raise ParameterInvalid("delete takes arrays, or what chooses them; not both")
        single = len(arrays) == 1 and isinstance(arrays[0], str | RemoteArray)
        several = flattened(arrays)
        ids = [each if isinstance(each, str) else each.id for each in several]
        if single:
            self._run(self._flows.delete_one(ids[0]))
            count = 1
        else:
            count = self._run(self._flows.delete(ids))
        self._deleted(several)
        return count

    def program(
        self,
        *,
        priority: int = 0,
        timeout: float | None = None,
        ttl_s: float | None = None,
        verify: bool = False,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Program:
        """A program: steps recorded in a `with` block, which run as one job when it ends.

            with client.program() as p:
                x2 = p.gemm(ra, ra)
                x4 = x2 @ x2
                y = p.gemm_reduce(x4, rb, reduce="absmax")
                p.keep(x4)
            x4.numpy(), y.numpy()

        What passes between steps stays on the server's device. `timeout`: seconds until it must be done; it is
        cancelled then, as it is on KeyboardInterrupt. `priority`, `ttl_s`, `verify`, `name` and `labels` are those of
        `submit`; of several results each is called by the name, a dot and its own. If the block raises, nothing is
        submitted. Raises at the block's end what `gemm` raises; `problem["step"]` names the step.
        """
        return Program(self, priority=priority, timeout=timeout, ttl_s=ttl_s, verify=verify, name=name, labels=labels)

    def job(self, job_id: str) -> Job:
        """A job by its id. Raises NotFound."""
        return Job(self, self._call(requests.job_info(job_id)))

    def jobs(self, *, state: str | None = None, limit: int | None = None, everybody: bool = False) -> list[Job]:
        """The jobs, newest first; only those in `state` if given. `everybody`: other owners' too, which needs the scope
        admin.
        """
        query = {"state": state} | requests.view_query(everybody=everybody)
        infos = self._run(self._flows.listing("/v1/jobs", JobInfo.parse, query, limit=limit))
        return [Job(self, info) for info in infos]

    def devices(self) -> list[dict[str, Any]]:
        """The server's devices: what each is, its memory, its compute modes."""
        return requests.device_list(self._call(requests.document("/v1/devices")))

    def usage(self, *, everybody: bool = False) -> dict[str, Any]:
        """Quotas and what is used of them; with `everybody`, which needs the scope admin, also by owner ("owners")."""
        path = "/v1/usage?all=true" if everybody else "/v1/usage"
        return cast("dict[str, Any]", self._call(requests.document(path)))

    def overview(self, *, history: bool = False) -> dict[str, Any]:
        """The server now: readiness and what to do, devices, queue by owner, memory, last failures.

        `history`: the last hour too, a point every five seconds.
        """
        path = "/v1/overview?history=true" if history else "/v1/overview"
        return cast("dict[str, Any]", self._call(requests.document(path)))

    def health(self) -> dict[str, Any]:
        """The server's own account of its health."""
        return cast("dict[str, Any]", self._call(requests.document("/healthz")))

    def ready(self) -> bool:
        """Whether the server takes work: False while it starts or drains. Raises TransportError if it is not there."""
        return self._run(self._flows.ready())

    def _array_info(self, array_id: str) -> ArrayInfo:
        return self._call(requests.array_info(array_id))

    def _look(self, array_id: str, info: ArrayInfo | None) -> tuple[ArrayInfo, AnyArray | None]:
        return self._run(self._flows.look(array_id, info))

    def _download(self, array_id: str, nbytes: int = 0, out: AnyArray | None = None) -> AnyArray:
        return requests.single_array(self._run(self._flows.download(array_id, nbytes=nbytes, out=out)))

    def _download_view(self, array_id: str, base: Base, view: View) -> AnyArray | None:
        return self._run(self._flows.download_view(array_id, base, view))

    def _step(
        self,
        op: str,
        operands: Mapping[str, Any],
        params: Mapping[str, Any],
        made: Base,
        *,
        ttl_s: float | None = None,
        timeout: float | None = None,
    ) -> RemoteArray:
        """Run one step of a program as a job of its own; `made`: what its result is. Raises as `gemm` does."""
        fields = {} if ttl_s is None else {"ttl_s": ttl_s}
        flow = self._flows.run_step(op, operands, params, timeout=timeout, **fields)
        job = Job(self, self._run(flow))
        job._raise_unless_succeeded(timeout)
        return self._handle(job.info.result["s0"], base=made, made=True)

    def _several(self, call: Contraction | Computation, *, timeout: float | None = None) -> Any:
        """Run the steps of a call as a program: a handle where an operand is one, else the result itself."""
        ttl_s = None if call.remote else TEMPORARY_TTL_S  # should the client die before it has the result
        with self.program(timeout=timeout, ttl_s=ttl_s) as p:
            made = p._several(call)
        if call.remote:
            return RemoteArray(self, made.id, made._info, base=made._known, view=made._view, lifetime=made._lifetime)
        with made:
            return made.numpy()[()]

    def _in_one_job(self, operands: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> RemoteArray:
        """Multiply pairs, numbered as the operands and then the products, in one program; returns the last product."""
        with self.program() as p:
            return p._in_one_job(operands, pairs)

    def _handle(
        self, array_id: str, info: ArrayInfo | None = None, *, base: Base | None = None, made: bool = False
    ) -> RemoteArray:
        """A handle; `made`: this client has made the array, which goes with it where the client deletes by itself."""
        return RemoteArray(self, array_id, info, base=base, lifetime=self._lifetime(array_id, made=made))

    def _made(self, info: ArrayInfo) -> RemoteArray:
        return self._handle(info.id, info, made=True)

"""The awaited client: `Client` with `await`, on asyncio. What it does is decided in the modules both share."""

from __future__ import annotations

import asyncio
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
from gemmserve._job import AsyncJob
from gemmserve._model import ArrayInfo, JobInfo
from gemmserve._programs.program import AsyncProgram
from gemmserve._remote import AsyncRemoteArray
from gemmserve._transport.async_io import AsyncIO
from gemmserve._transport.library import httpx
from gemmserve._transport.sync_io import SyncIO

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
    from typing import Literal, TypeAlias, Unpack

    from gemmserve._calls.linalg import Computation
    from gemmserve._calls.params import OneReduction
    from gemmserve._contraction.calls import Contraction
    from gemmserve._handles.lifetime import Delete, OpenDelete
    from gemmserve._handles.view import Base, View
    from gemmserve._transfer.arrays import AnyArray, LocalArray

    Operand: TypeAlias = AsyncRemoteArray | LocalArray

T = TypeVar("T")


class AsyncClient(ClientBase[AsyncIO, httpx.AsyncBaseTransport], LinearAlgebra):
    """`Client`, awaited: the same arguments, methods and errors. Use it in an `async with` block, or close it.

    Cancelling a task that waits for a product of remote operands cancels the product too.
    """

    _connect = AsyncIO

    async def close(self) -> None:
        """Closes the connections; arrays and jobs stay on the server, but for what `auto_delete` deletes."""
        if self._auto_delete is not None:
            await asyncio.to_thread(self._auto_delete.end, CLEANUP_LIMIT_S)
        await self._io.close()

    def _open_delete(self, transport: httpx.AsyncBaseTransport | None) -> OpenDelete:
        if transport is not None:
            raise ParameterInvalid("auto_delete needs blocking connections beside: not with a transport of your own")
        made, flows = self._io, self._flows
        key = "" if made.auth is None else made.auth.key
        options: dict[str, Any] = {"api_key": key, "verify": made.verify, "timeout": made.timeout}

        def opened() -> tuple[Delete, Callable[[], None]]:
            # Of the thread that deletes: no event loop runs there.
            io = SyncIO(made.url, **options, progress=False, digests=made.digests, transport=None)
            return lambda ids: io.drive(flows.delete(ids)), io.close

        return opened

    async def __aenter__(self) -> Self:
        self._io.check_open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _run(self, flow: Flow[T]) -> T:
        return await self._io.drive(flow)

    async def _call(self, request: requests.Request[T]) -> T:
        return await self._run(self._flows.call(request))

    @overload
    async def gemm(
        self, a: AsyncRemoteArray, b: Operand, c: Operand | None = None, **options: Unpack[GemmOptions]
    ) -> AsyncRemoteArray: ...
    @overload
    async def gemm(
        self, a: LocalArray, b: AsyncRemoteArray, c: Operand | None = None, **options: Unpack[GemmOptions]
    ) -> AsyncRemoteArray: ...
    @overload
    async def gemm(
        self, a: LocalArray, b: LocalArray, c: AsyncRemoteArray, **options: Unpack[GemmOptions]
    ) -> AsyncRemoteArray: ...
    @overload
    async def gemm(
        self, a: LocalArray, b: LocalArray, c: LocalArray | None = None, **options: Unpack[GemmOptions]
    ) -> AnyArray: ...
    @keywords(GemmOptions)
    async def gemm(self, a: Any, b: Any, c: Any = None, **options: Unpack[GemmOptions]) -> AnyArray | AsyncRemoteArray:
        """D = alpha * op(A) * op(B) + beta * C: see `Client.gemm`. Remote operands give an AsyncRemoteArray."""
        return cast(
            "AnyArray | AsyncRemoteArray", await self._product("gemm", {"a": a, "b": b, "c": c}, GemmOptions, options)
        )

    @overload
    async def gemm_reduce(
        self, a: AsyncRemoteArray, b: Operand, **options: Unpack[OneReduction]
    ) -> AsyncRemoteArray: ...
    @overload
    async def gemm_reduce(
        self, a: LocalArray, b: AsyncRemoteArray, **options: Unpack[OneReduction]
    ) -> AsyncRemoteArray: ...
    @overload
    async def gemm_reduce(self, a: LocalArray, b: LocalArray, **options: Unpack[OneReduction]) -> AnyArray: ...
    @overload
    async def gemm_reduce(
        self, a: AsyncRemoteArray, b: Operand, **options: Unpack[ReduceOptions]
    ) -> dict[str, AsyncRemoteArray]: ...
    @overload
    async def gemm_reduce(
        self, a: LocalArray, b: AsyncRemoteArray, **options: Unpack[ReduceOptions]
    ) -> dict[str, AsyncRemoteArray]: ...
    @overload
    async def gemm_reduce(
        self, a: LocalArray, b: LocalArray, **options: Unpack[ReduceOptions]
    ) -> dict[str, AnyArray]: ...
    @keywords(ReduceOptions)
    async def gemm_reduce(
        self, a: Any, b: Any, **options: Unpack[ReduceOptions]
    ) -> AnyArray | AsyncRemoteArray | dict[str, AnyArray] | dict[str, AsyncRemoteArray]:
        """Reduces pre_op(alpha * op(A) op(B)) over `axis` as it is formed: see `Client.gemm_reduce`."""
        result = await self._product("gemm_reduce", {"a": a, "b": b}, ReduceOptions, options)
        return cast("AnyArray | AsyncRemoteArray | dict[str, AnyArray] | dict[str, AsyncRemoteArray]", result)

    @keywords(GemmManyOptions)
    async def gemm_many(self, a: Any, b: Any, c: Any = None, **options: Unpack[GemmManyOptions]) -> list[Any]:
        """Many products in one exchange: see `Client.gemm_many`. Remote operands give AsyncRemoteArrays."""
        return await self._many("gemm", {"a": a, "b": b, "c": c}, GemmManyOptions, options)

    @keywords(ReduceManyOptions)
    async def gemm_reduce_many(self, a: Any, b: Any, **options: Unpack[ReduceManyOptions]) -> list[Any]:
        """Many products in one exchange: see `Client.gemm_many`."""
        return await self._many("gemm_reduce", {"a": a, "b": b}, ReduceManyOptions, options)

    @keywords(EinsumOptions)
    async def einsum(self, *operands: Any, **options: Unpack[EinsumOptions]) -> Any:
        """The sum of products that an equation names: see `Client.einsum`."""
        params, others = params_of(EinsumOptions, options)
        return await self._contracted(contraction.einsum(operands, **params), **others)

    @keywords(TensordotOptions)
    async def tensordot(self, a: Any, b: Any, axes: Any = 2, **options: Unpack[TensordotOptions]) -> Any:
        """The sum of products over axes of both: see `Client.tensordot`."""
        params, others = params_of(TensordotOptions, options)
        return await self._contracted(contraction.tensordot(a, b, axes, **params), **others)

    async def _contracted(self, planned: Contraction, *, timeout: float | None) -> Any:  # noqa: ASYNC109 (the server's)
        if not planned.plan.steps:
            return planned.seen()
        product = planned.product()
        if product is not None:
            a, b = product
            return planned.shown(await self.gemm(a, b, compute=cast("Any", planned.compute), timeout=timeout))
        return await self._several(planned, timeout=timeout)

    async def _many(self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]) -> list[Any]:
        params, others = params_of(kind, options)
        results = await self._run(batch.run_batch(self._flows, op, operands, params, timeout=others["timeout"]))
        batch.check(results, others["errors"])
        return [batch.with_handles(result, self._made) for result in results]

    async def _product(self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]) -> Any:
        params, others = params_of(kind, options)
        timeout: float | None = others["timeout"]
        present, encoded, remote = prepare(op, operands, params)
        if not remote:
            return await self._run(self._flows.one_shot(op, present, encoded, timeout=timeout))
        info = await self._run(self._flows.run(op, present, encoded, timeout=timeout))
        return await AsyncJob(self, info, expected_of(op, present, params))._result(timeout)

    async def submit(self, op: str, a: Operand, b: Operand, c: Operand | None = None, **params: Any) -> AsyncJob:
        """Queues a "gemm" or "gemm_reduce" and returns its AsyncJob at once: see `Client.submit`."""
        operands, encoded = submission(op, {"a": a, "b": b, "c": c}, params)
        info = await self._run(self._flows.submit(op, operands, encoded))
        return AsyncJob(self, info, expected_of(op, operands, encoded))

    async def submit_many(self, asked: Iterable[Mapping[str, Any]]) -> list[AsyncJob]:
        """Queues several products at once and returns their Jobs: see `Client.submit_many`."""
        products = submissions(asked)
        infos = [info for each in await self._run(self._flows.submit_many(products)) for info in each.infos]
        return [AsyncJob(self, info, expected_of(*each)) for info, each in zip(infos, products, strict=True)]

    async def map(
        self, asked: Iterable[Mapping[str, Any]], *, in_flight: int = 256, errors: Literal["raise", "return"] = "raise"
    ) -> AsyncGenerator[Any]:
        """The results of many products, in order, as they come: see `Client.map`."""
        products = Mapped(self._flows, asked, in_flight, errors)
        try:
            while (numbers := await self._run(products.next())) is not None:
                for number in numbers:
                    outcome = products.take()
                    result: Any = outcome
                    if not isinstance(outcome, APIError):
                        try:
                            result = await AsyncJob(self, *outcome)._result()
                        except GemmserveError as error:
                            result = numbered(error, number) if isinstance(error, APIError) else error
                    if isinstance(result, GemmserveError) and errors == "raise":
                        raise result
                    yield result
        finally:
            await self._run(products.close())

    async def put(
        self,
        a: LocalArray,
        ttl_s: float | None = None,
        *,
        digest: bool = False,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncRemoteArray:
        """Uploads an array: see `Client.put`."""
        array = local_array(a)
        info = await self._run(self._flows.put(array, ttl_s=ttl_s, digest=digest, name=name, labels=labels))
        return self._made(info) if name is None else self._handle(info.id, info)

    async def get(self, array: str | AsyncRemoteArray, *, out: AnyArray | None = None) -> AnyArray:
        """Downloads an array, by its id or handle. `out`: see `RemoteArray.numpy`. Raises NotFound, Gone."""
        if isinstance(array, AsyncRemoteArray):
            return await array.numpy(out=out)
        return await (self._download(array) if out is None else (await self.array(array)).numpy(out=out))

    async def array(self, array_id: str) -> AsyncRemoteArray:
        """The handle of an array that is on the server. Raises NotFound, Gone."""
        return self._handle(array_id, await self._array_info(array_id))

    async def arrays(
        self,
        *,
        limit: int | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        everybody: bool = False,
    ) -> list[AsyncRemoteArray]:
        """The arrays on the server, newest first; only those of that name, and with all of those labels. `everybody`:
        other owners' too, which needs the scope admin.
        """
        query = requests.tags_query(name, labels) | requests.view_query(everybody=everybody)
        infos = await self._run(self._flows.listing("/v1/arrays", ArrayInfo.parse, query, limit=limit))
        return [self._handle(info.id, info) for info in infos]

    async def __getitem__(self, name: str) -> AsyncRemoteArray:
        """The newest array of that name: `await client["weights"]`. Raises NotFound, which is a LookupError."""
        return newest(await self.arrays(limit=1, name=name), name)

    async def delete(
        self,
        *arrays: str | AsyncRemoteArray | Iterable[str | AsyncRemoteArray],
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        older_than_s: float | None = None,
        dry_run: bool = False,
    ) -> int:
        """Deletes arrays, by their ids or handles, and returns how many: see `Client.delete`."""
        if not arrays:
            chosen = self._flows.delete_chosen(name, labels, older_than_s, dry_run=dry_run)
            return await self._run(chosen)
        if dry_run or name is not None or labels or older_than_s is not None:
            raise ParameterInvalid("delete takes arrays, or what chooses them; not both")
        single = len(arrays) == 1 and isinstance(arrays[0], str | AsyncRemoteArray)
        several = flattened(arrays)
        ids = [each if isinstance(each, str) else each.id for each in several]
        if single:
            await self._run(self._flows.delete_one(ids[0]))
            count = 1
        else:
            count = await self._run(self._flows.delete(ids))
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
    ) -> AsyncProgram:
        """A program, recorded in an `async with` block whose steps are awaited: see `Client.program`."""
        return AsyncProgram(
            self, priority=priority, timeout=timeout, ttl_s=ttl_s, verify=verify, name=name, labels=labels
        )

    async def job(self, job_id: str) -> AsyncJob:
        """A job by its id. Raises NotFound."""
        return AsyncJob(self, await self._call(requests.job_info(job_id)))

    async def jobs(
        self, *, state: str | None = None, limit: int | None = None, everybody: bool = False
    ) -> list[AsyncJob]:
        """The jobs, newest first; only those in `state` if given. `everybody`: other owners' too, which needs the scope
        admin.
        """
        query = {"state": state} | requests.view_query(everybody=everybody)
        infos = await self._run(self._flows.listing("/v1/jobs", JobInfo.parse, query, limit=limit))
        return [AsyncJob(self, info) for info in infos]

    async def devices(self) -> list[dict[str, Any]]:
        """The server's devices: what each is, its memory, its compute modes."""
        return requests.device_list(await self._call(requests.document("/v1/devices")))

    async def usage(self, *, everybody: bool = False) -> dict[str, Any]:
        """Quotas and what is used of them; with `everybody`, which needs the scope admin, also by owner ("owners")."""
        path = "/v1/usage?all=true" if everybody else "/v1/usage"
        return cast("dict[str, Any]", await self._call(requests.document(path)))

    async def overview(self, *, history: bool = False) -> dict[str, Any]:
        """The server now: readiness and what to do, devices, queue by owner, memory, last failures.

        `history`: the last hour too, a point every five seconds.
        """
        path = "/v1/overview?history=true" if history else "/v1/overview"
        return cast("dict[str, Any]", await self._call(requests.document(path)))

    async def health(self) -> dict[str, Any]:
        """The server's own account of its health."""
        return cast("dict[str, Any]", await self._call(requests.document("/healthz")))

    async def ready(self) -> bool:
        """Whether the server takes work: False while it starts or drains. Raises TransportError if it is not there."""
        return await self._run(self._flows.ready())

    async def _array_info(self, array_id: str) -> ArrayInfo:
        return await self._call(requests.array_info(array_id))

    async def _download(self, array_id: str, nbytes: int = 0, out: AnyArray | None = None) -> AnyArray:
        return requests.single_array(await self._run(self._flows.download(array_id, nbytes=nbytes, out=out)))

    async def _download_view(self, array_id: str, base: Base, view: View) -> AnyArray | None:
        return await self._run(self._flows.download_view(array_id, base, view))

    async def _step(
        self,
        op: str,
        operands: Mapping[str, Any],
        params: Mapping[str, Any],
        made: Base,
        *,
        ttl_s: float | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (the same signature as Client's)
    ) -> AsyncRemoteArray:
        """Run one step of a program as a job of its own; `made`: what its result is. Raises as `gemm` does."""
        fields = {} if ttl_s is None else {"ttl_s": ttl_s}
        flow = self._flows.run_step(op, operands, params, timeout=timeout, **fields)
        job = AsyncJob(self, await self._run(flow))
        job._raise_unless_succeeded(timeout)
        return self._handle(job.info.result["s0"], base=made, made=True)

    async def _several(self, call: Contraction | Computation, *, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        """Run the steps of a call as a program: see `Client._several`."""
        ttl_s = None if call.remote else TEMPORARY_TTL_S
        async with self.program(timeout=timeout, ttl_s=ttl_s) as p:
            made = await p._several(call)
        if call.remote:
            return AsyncRemoteArray(
                self, made.id, made._info, base=made._known, view=made._view, lifetime=made._lifetime
            )
        async with made:
            return (await made.numpy())[()]

    async def _in_one_job(self, operands: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> AsyncRemoteArray:
        """Multiply pairs, numbered as the operands and then the products, in one program; returns the last product."""
        async with self.program() as p:
            return await p._in_one_job(operands, pairs)

    def _handle(
        self, array_id: str, info: ArrayInfo | None = None, *, base: Base | None = None, made: bool = False
    ) -> AsyncRemoteArray:
        """A handle; `made`: this client has made the array, which goes with it where the client deletes by itself."""
        return AsyncRemoteArray(self, array_id, info, base=base, lifetime=self._lifetime(array_id, made=made))

    def _made(self, info: ArrayInfo) -> AsyncRemoteArray:
        return self._handle(info.id, info, made=True)

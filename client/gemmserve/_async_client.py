"""The awaited client: `Client` with `await`, on asyncio. What it does is decided in the modules both share."""

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
from gemmserve._job import AsyncJob
from gemmserve._model import ArrayInfo, JobInfo
from gemmserve._program import AsyncProgram
from gemmserve._remote import AsyncRemoteArray
from gemmserve._transfer.arrays import as_array
from gemmserve._transport.async_io import AsyncIO

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias, Unpack

    from gemmserve._calls.params import OneReduction
    from gemmserve._transfer.arrays import AnyArray, LocalArray

    Operand: TypeAlias = AsyncRemoteArray | LocalArray

T = TypeVar("T")


class AsyncClient(ClientBase[AsyncIO, httpx.AsyncBaseTransport]):
    """`Client`, awaited: the same arguments, methods and errors. Use it in an `async with` block, or close it.

    Cancelling a task that waits for a product of remote operands cancels the product too.
    """

    _connect = AsyncIO

    async def close(self) -> None:
        """Closes the connections; arrays and jobs stay on the server."""
        await self._io.close()

    async def __aenter__(self) -> Self:
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

    async def _many(self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]) -> list[Any]:
        params, others = params_of(kind, options)
        results = await self._run(batch.run_batch(self._flows, op, operands, params, timeout=others["timeout"]))
        batch.check(results, others["errors"])
        return [batch.with_handles(result, lambda info: AsyncRemoteArray(self, info.id, info)) for result in results]

    async def _product(self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]) -> Any:
        params, others = params_of(kind, options)
        timeout: float | None = others["timeout"]
        present, encoded, remote = prepare(op, operands, params)
        if not remote:
            return await self._run(self._flows.one_shot(op, present, encoded, timeout=timeout))
        job = AsyncJob(self, await self._run(self._flows.run(op, present, encoded, timeout=timeout)))
        return await job._result(timeout)

    async def submit(self, op: str, a: Operand, b: Operand, c: Operand | None = None, **params: Any) -> AsyncJob:
        """Queues a "gemm" or "gemm_reduce" and returns its AsyncJob at once: see `Client.submit`."""
        operands, encoded = submission(op, {"a": a, "b": b, "c": c}, params)
        return AsyncJob(self, await self._run(self._flows.submit(op, operands, encoded)))

    async def put(self, a: LocalArray, ttl_s: float | None = None, *, digest: bool = False) -> AsyncRemoteArray:
        """Uploads an array: see `Client.put`."""
        info = await self._run(self._flows.put(as_array(a), ttl_s=ttl_s, digest=digest))
        return AsyncRemoteArray(self, info.id, info)

    async def get(self, array: str | AsyncRemoteArray) -> AnyArray:
        """Downloads an array, by its id or handle. Raises NotFound, Gone."""
        return await (array.numpy() if isinstance(array, AsyncRemoteArray) else self._download(array))

    async def array(self, array_id: str) -> AsyncRemoteArray:
        """The handle of an array that is on the server. Raises NotFound, Gone."""
        return AsyncRemoteArray(self, array_id, await self._array_info(array_id))

    async def arrays(self, *, limit: int | None = None) -> list[AsyncRemoteArray]:
        """The arrays on the server, newest first."""
        infos = await self._run(self._flows.listing("/v1/arrays", ArrayInfo.parse, limit=limit))
        return [AsyncRemoteArray(self, info.id, info) for info in infos]

    async def delete(self, array_id: str) -> None:
        """Deletes an array: it is hidden at once and freed after the last job that uses it. Raises NotFound."""
        await self._call(requests.delete_array(array_id))

    def program(
        self, *, priority: int = 0, timeout: float | None = None, ttl_s: float | None = None, verify: bool = False
    ) -> AsyncProgram:
        """A program, recorded in an `async with` block whose steps are awaited: see `Client.program`."""
        return AsyncProgram(self, priority=priority, timeout=timeout, ttl_s=ttl_s, verify=verify)

    async def job(self, job_id: str) -> AsyncJob:
        """A job by its id. Raises NotFound."""
        return AsyncJob(self, await self._call(requests.job_info(job_id)))

    async def jobs(self, *, state: str | None = None, limit: int | None = None) -> list[AsyncJob]:
        """The jobs, newest first; only those in `state` if given."""
        infos = await self._run(self._flows.listing("/v1/jobs", JobInfo.parse, {"state": state}, limit=limit))
        return [AsyncJob(self, info) for info in infos]

    async def devices(self) -> list[dict[str, Any]]:
        """The server's devices: what each is, its memory, its compute modes."""
        return requests.device_list(await self._call(requests.document("/v1/devices")))

    async def usage(self) -> dict[str, Any]:
        """Quotas and what is used of them."""
        return cast("dict[str, Any]", await self._call(requests.document("/v1/usage")))

    async def health(self) -> dict[str, Any]:
        """The server's own account of its health."""
        return cast("dict[str, Any]", await self._call(requests.document("/healthz")))

    async def ready(self) -> bool:
        """Whether the server takes work: False while it starts or drains. Raises TransportError if it is not there."""
        return await self._run(self._flows.ready())

    async def _array_info(self, array_id: str) -> ArrayInfo:
        return await self._call(requests.array_info(array_id))

    async def _download(self, array_id: str, nbytes: int = 0) -> AnyArray:
        return requests.single_array(await self._run(self._flows.download(array_id, nbytes=nbytes)))

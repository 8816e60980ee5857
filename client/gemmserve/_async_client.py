"""The awaited client: `Client` with `await`, on asyncio. What it does is decided in the modules both share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast, overload

from gemmserve import _batch, _requests
from gemmserve._arrays import as_array
from gemmserve._async_io import AsyncIO
from gemmserve._compression import check
from gemmserve._digests import check_digests
from gemmserve._flows import Flow, Flows, prepare, submission
from gemmserve._job import AsyncJob
from gemmserve._model import ArrayInfo, JobInfo
from gemmserve._params import (
    GemmManyOptions,
    GemmOptions,
    ReduceManyOptions,
    ReduceOptions,
    keywords,
    params_of,
)
from gemmserve._pickling import made_of, reduced_client
from gemmserve._program import AsyncProgram
from gemmserve._remote import AsyncRemoteArray
from gemmserve._retry import RetryPolicy
from gemmserve._urls import server_url

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias, Unpack

    import httpx

    from gemmserve._arrays import AnyArray, LocalArray
    from gemmserve._digests import Digests
    from gemmserve._params import OneReduction, Order

    Operand: TypeAlias = AsyncRemoteArray | LocalArray

T = TypeVar("T")


class AsyncClient:
    """`Client`, awaited: the same arguments, methods and errors. Use it in an `async with` block, or close it.

    Cancelling a task that waits for a product of remote operands cancels the product too.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        verify: bool | str | ssl.SSLContext = True,
        timeout: float = 30.0,
        retry: RetryPolicy | None = None,
        progress: bool = True,
        connections: int = 3,
        compression: Literal["zstd"] | None = None,
        digests: Digests = "known",
        pickle_key: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        compress = check(compression)
        check_digests(digests)
        retry = retry or RetryPolicy()
        self._io = AsyncIO(
            server_url(url),
            api_key=api_key,
            verify=verify,
            timeout=timeout,
            progress=progress,
            digests=digests,
            transport=transport,
        )
        # What shared memory carries does not go in parts.
        self._flows = Flows(
            retry,
            connections=connections if self._io.socket is None else 0,
            compression=compress and self._io.socket is None,
            digests=digests,
        )
        self._options = made_of(
            self._io.url,
            api_key=api_key,
            key=None if self._io.auth is None else self._io.auth.key,
            verify=verify,
            own_transport=transport is not None,
            pickle_key=pickle_key,
            timeout=timeout,
            retry=retry,
            progress=progress,
            connections=connections,
            compression=compression,
            digests=digests,
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """By its URL and options, without the key unless `pickle_key`. Raises TypeError for what belongs to here."""
        return reduced_client(type(self), self._options)

    def __copy__(self) -> Self:
        """Itself: a client is what it is connected to."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself."""
        return self

    @property
    def url(self) -> str:
        """The server's base URL."""
        return self._io.url

    async def close(self) -> None:
        """Closes the connections; arrays and jobs stay on the server."""
        await self._io.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _run(self, flow: Flow[T]) -> T:
        return await self._io.drive(flow)

    async def _call(self, request: _requests.Request[T]) -> T:
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
    async def gemm(
        self,
        a: Any,
        b: Any,
        c: Any = None,
        **options: Unpack[GemmOptions],
    ) -> AnyArray | AsyncRemoteArray:
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
        self,
        a: Any,
        b: Any,
        **options: Unpack[ReduceOptions],
    ) -> AnyArray | AsyncRemoteArray | dict[str, AnyArray] | dict[str, AsyncRemoteArray]:
        """Reduces pre_op(alpha * op(A) op(B)) over `axis` as it is formed: see `Client.gemm_reduce`."""
        result = await self._product("gemm_reduce", {"a": a, "b": b}, ReduceOptions, options)
        return cast("AnyArray | AsyncRemoteArray | dict[str, AnyArray] | dict[str, AsyncRemoteArray]", result)

    @keywords(GemmManyOptions)
    async def gemm_many(
        self,
        a: Any,
        b: Any,
        c: Any = None,
        **options: Unpack[GemmManyOptions],
    ) -> list[Any]:
        """Many products in one exchange: see `Client.gemm_many`. Remote operands give AsyncRemoteArrays."""
        return await self._many("gemm", {"a": a, "b": b, "c": c}, GemmManyOptions, options)

    @keywords(ReduceManyOptions)
    async def gemm_reduce_many(
        self,
        a: Any,
        b: Any,
        **options: Unpack[ReduceManyOptions],
    ) -> list[Any]:
        """Many products in one exchange: see `Client.gemm_many`."""
        return await self._many("gemm_reduce", {"a": a, "b": b}, ReduceManyOptions, options)

    async def _many(self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]) -> list[Any]:
        params, others = params_of(kind, options)
        results = await self._run(_batch.run_batch(self._flows, op, operands, params, timeout=others["timeout"]))
        _batch.check(results, others["errors"])
        return [_batch.with_handles(result, lambda info: AsyncRemoteArray(self, info.id, info)) for result in results]

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

    def empty(self, shape: int | Sequence[int], dtype: Any = float, order: Order = "C") -> AnyArray:
        """See `Client.empty`; nothing is awaited."""
        return self._io.empty(shape, dtype, order)

    def freeze(self, a: LocalArray) -> AnyArray:
        """See `Client.freeze`; nothing is awaited."""
        return self._io.freeze(as_array(a))

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
        await self._call(_requests.delete_array(array_id))

    def program(
        self, *, priority: int = 0, timeout: float | None = None, ttl_s: float | None = None, verify: bool = False
    ) -> AsyncProgram:
        """A program, recorded in an `async with` block whose steps are awaited: see `Client.program`."""
        return AsyncProgram(self, priority=priority, timeout=timeout, ttl_s=ttl_s, verify=verify)

    async def job(self, job_id: str) -> AsyncJob:
        """A job by its id. Raises NotFound."""
        return AsyncJob(self, await self._call(_requests.job_info(job_id)))

    async def jobs(self, *, state: str | None = None, limit: int | None = None) -> list[AsyncJob]:
        """The jobs, newest first; only those in `state` if given."""
        infos = await self._run(self._flows.listing("/v1/jobs", JobInfo.parse, {"state": state}, limit=limit))
        return [AsyncJob(self, info) for info in infos]

    async def devices(self) -> list[dict[str, Any]]:
        """The server's devices: what each is, its memory, its compute modes."""
        return _requests.device_list(await self._call(_requests.document("/v1/devices")))

    async def usage(self) -> dict[str, Any]:
        """Quotas and what is used of them."""
        return cast("dict[str, Any]", await self._call(_requests.document("/v1/usage")))

    async def health(self) -> dict[str, Any]:
        """The server's own account of its health."""
        return cast("dict[str, Any]", await self._call(_requests.document("/healthz")))

    async def ready(self) -> bool:
        """Whether the server takes work: False while it starts or drains. Raises TransportError if it is not there."""
        return await self._run(self._flows.ready())

    async def _array_info(self, array_id: str) -> ArrayInfo:
        return await self._call(_requests.array_info(array_id))

    async def _download(self, array_id: str, nbytes: int = 0) -> AnyArray:
        return _requests.single_array(await self._run(self._flows.download(array_id, nbytes=nbytes)))

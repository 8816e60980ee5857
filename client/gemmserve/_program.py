"""Programs: steps recorded in a `with` block, run as one job when it ends. See `Client.program`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack

from gemmserve._calls.flows import TEMPORARY_TTL_S
from gemmserve._calls.params import GemmStep, ReduceStep, keywords, params_of
from gemmserve._job import AsyncJob, AsyncSession, Job, Session
from gemmserve._recording import Recording, Slot
from gemmserve._remote import ArrayHandle, AsyncRemoteArray, RemoteArray

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    import numpy as np

    from gemmserve._model import ArrayInfo, JobInfo
    from gemmserve._transfer.arrays import LocalArray

S = TypeVar("S")
J = TypeVar("J")


class _Lazy(ArrayHandle[Any]):
    """A handle whose array comes later: what it knows is in the slot that its views share."""

    _slot: Slot
    _plain: type[ArrayHandle[Any]]
    """Class that the handle has elsewhere (unpickled), once the program has run."""

    def __init__(self, program: Any, slot: Slot, *, transposed: bool = False, conjugated: bool = False) -> None:
        self._program = program
        self._client = program._client
        self._slot = slot
        self._transposed = transposed
        self._conjugated = conjugated

    def _view(self, *, transposed: bool, conjugated: bool) -> Self:
        return type(self)(self._program, self._slot, transposed=transposed, conjugated=conjugated)

    def _reduced(self) -> tuple[Any, ...]:
        """The way to make the array of what the program kept, once it has run. Raises ProgramError."""
        return self._plain._arrived, self.id, self._slot.info, self._transposed, self._conjugated

    @property
    def _id(self) -> str:  # type: ignore[override]
        return self._slot.id or self._slot.reference

    @property
    def _info(self) -> ArrayInfo | None:  # type: ignore[override]
        return self._slot.info

    @property
    def id(self) -> str:
        """The array's id. Raises ProgramError before the program has run, and for what it did not keep."""
        return self._slot.resolved()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this view; while it is recorded only where those of all operands are known."""
        shape = self._slot.shape
        if shape is None:
            return super().shape
        return (*shape[:-2], shape[-1], shape[-2]) if self._transposed else shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype; while it is recorded as `shape`."""
        return self._slot.dtype or super().dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions; while it is recorded as `shape`."""
        return len(self.shape)


class ProgramArray(_Lazy, RemoteArray):
    """A result of a step of a program. In the block `@`, `.T`, `.H` and `.conj()` record; after it this is a
    RemoteArray, if the program kept it: what no step used, and what `Program.keep` was given.
    """

    _plain = RemoteArray

    @property
    def info(self) -> ArrayInfo:
        """The stored array, without this view's flags. The first look asks the server."""
        if self._slot.info is None:
            self._slot.info = self._client._array_info(self.id)
        return self._slot.info

    def numpy(self) -> Any:
        """Downloads the array (this view of it) into fresh memory. Raises ProgramError as `id` does."""
        self._slot.resolved()
        return super().numpy()

    def delete(self) -> None:
        """Deletes the stored array, and with it every view; jobs that already use it finish."""
        self._slot.resolved()
        super().delete()

    def __matmul__(self, other: RemoteArray | LocalArray) -> RemoteArray:
        return self._program.gemm(self, other) if self._program._open else super().__matmul__(other)

    def __rmatmul__(self, other: RemoteArray | LocalArray) -> RemoteArray:
        return self._program.gemm(other, self) if self._program._open else super().__rmatmul__(other)


class AsyncProgramArray(_Lazy, AsyncRemoteArray):
    """A ProgramArray of an AsyncProgram: `await (x @ x)` records in the block, `await x.numpy()` downloads after it."""

    _plain = AsyncRemoteArray

    @property
    def info(self) -> ArrayInfo:
        """The stored array, without this view's flags. Raises ProgramError as `id` does."""
        self._slot.resolved()
        assert self._slot.info is not None  # the program's end saw to it
        return self._slot.info

    async def numpy(self) -> Any:
        """Downloads the array (this view of it) into fresh memory. Raises ProgramError as `id` does."""
        self._slot.resolved()
        return await super().numpy()

    async def delete(self) -> None:
        """Deletes the stored array, and with it every view; jobs that already use it finish."""
        self._slot.resolved()
        await super().delete()

    def __matmul__(self, other: AsyncRemoteArray | LocalArray) -> Coroutine[Any, Any, AsyncRemoteArray]:
        return self._program.gemm(self, other) if self._program._open else super().__matmul__(other)

    def __rmatmul__(self, other: AsyncRemoteArray | LocalArray) -> Coroutine[Any, Any, AsyncRemoteArray]:
        return self._program.gemm(other, self) if self._program._open else super().__rmatmul__(other)


def _one_or_all(arrays: dict[str, Any], options: ReduceStep) -> Any:
    """The one array of a reduction by name; else all by their names."""
    named = isinstance(options.get("reduce", "sum"), str)
    return next(iter(arrays.values())) if named and len(arrays) == 1 else arrays


class _Base(Generic[S, J]):
    """Base of both kinds of program."""

    def __init__(
        self, client: S, *, priority: int = 0, timeout: float | None = None, ttl_s: float | None = None,
        verify: bool = False,
    ) -> None:  # fmt: skip
        self._client = client
        self.job: J | None = None
        self._recording = Recording()
        self._timeout = timeout
        self._fields = {"priority": priority or None, "ttl_s": ttl_s, "verify": verify or None}
        self._temporaries: list[str] = []

    def __reduce__(self) -> str:
        raise TypeError("a program cannot be pickled; its results can, once it has run")

    @property
    def _open(self) -> bool:
        return self._recording.state == "open"

    def keep(self, *arrays: Any) -> None:
        """Make results that other steps use into arrays; a result that no step uses becomes one anyway.

        Raises ProgramError.
        """
        self._recording.keep(arrays)

    def _job(self) -> dict[str, Any]:
        self._recording.state = "running"
        return self._recording.job(**self._fields)


class Program(_Base[Session, Job]):
    """Steps that are recorded, and run as one job when the block ends; see `Client.program`.

    `job` is that job, a Job, once the block has ended.
    """

    def __enter__(self) -> Self:
        self._recording.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        flows, run = self._client._flows, self._client._run
        try:
            if kind is None and self._recording.steps:
                info = run(flows.run_job(self._job(), timeout=self._timeout))
                self.job = Job(self._client, info)
                self.job._raise_unless_succeeded(self._timeout)
                self._recording.resolve(info.result)
        finally:
            if self._recording.state != "done":
                self._recording.state = "failed"
            run(flows.delete_all(self._temporaries))

    @keywords(GemmStep)
    def gemm(
        self,
        a: RemoteArray | LocalArray,
        b: RemoteArray | LocalArray,
        c: RemoteArray | LocalArray | None = None,
        **options: Unpack[GemmStep],
    ) -> ProgramArray:
        """Records a step that is what `Client.gemm` does. `name`: its id; "s0", "s1" ... otherwise.

        Operands are results of this program, remote arrays, and local ones, which are uploaded now. Raises
        ShapeMismatch, DtypeUnsupported, ParameterInvalid for what can be known now; the rest when the block ends.
        """
        return ProgramArray(self, self._record("gemm", {"a": a, "b": b, "c": c}, GemmStep, options)["d"])

    @keywords(ReduceStep)
    def gemm_reduce(
        self, a: RemoteArray | LocalArray, b: RemoteArray | LocalArray, **options: Unpack[ReduceStep]
    ) -> Any:
        """Records a step that is what `Client.gemm_reduce` does: a ProgramArray, or a dict of them by name."""
        made = self._record("gemm_reduce", {"a": a, "b": b}, ReduceStep, options)
        arrays = {result: ProgramArray(self, slot) for result, slot in made.items()}
        return _one_or_all(arrays, options)

    def _record(self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]) -> dict[str, Slot]:
        params, others = params_of(kind, options)
        name: str | None = others["name"]
        present, encoded = self._recording.check(op, operands, params, name)
        ids: dict[str, str] = {}
        for operand, x in present.items():
            if not isinstance(x, ArrayHandle):
                ids[operand] = self._client.put(x, ttl_s=TEMPORARY_TTL_S).id
                self._temporaries.append(ids[operand])
        return self._recording.add(op, present, ids, params, encoded, name)


class AsyncProgram(_Base[AsyncSession, AsyncJob]):
    """A Program of an AsyncClient: `async with`, its steps awaited."""

    async def __aenter__(self) -> Self:
        self._recording.begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        flows, run = self._client._flows, self._client._run
        try:
            if kind is None and self._recording.steps:
                info: JobInfo = await run(flows.run_job(self._job(), timeout=self._timeout))
                self.job = AsyncJob(self._client, info)
                self.job._raise_unless_succeeded(self._timeout)
                self._recording.resolve(info.result)
                for slot in self._recording.slots.values():
                    if slot.id is not None:
                        slot.info = await self._client._array_info(slot.id)
        finally:
            if self._recording.state != "done":
                self._recording.state = "failed"
            await run(flows.delete_all(self._temporaries))

    @keywords(GemmStep)
    async def gemm(
        self,
        a: AsyncRemoteArray | LocalArray,
        b: AsyncRemoteArray | LocalArray,
        c: AsyncRemoteArray | LocalArray | None = None,
        **options: Unpack[GemmStep],
    ) -> AsyncProgramArray:
        """Records a step: see `Program.gemm`."""
        return AsyncProgramArray(self, (await self._record("gemm", {"a": a, "b": b, "c": c}, GemmStep, options))["d"])

    @keywords(ReduceStep)
    async def gemm_reduce(
        self, a: AsyncRemoteArray | LocalArray, b: AsyncRemoteArray | LocalArray, **options: Unpack[ReduceStep]
    ) -> Any:
        """Records a step: see `Program.gemm_reduce`."""
        made = await self._record("gemm_reduce", {"a": a, "b": b}, ReduceStep, options)
        arrays = {result: AsyncProgramArray(self, slot) for result, slot in made.items()}
        return _one_or_all(arrays, options)

    async def _record(
        self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]
    ) -> dict[str, Slot]:
        params, others = params_of(kind, options)
        name: str | None = others["name"]
        present, encoded = self._recording.check(op, operands, params, name)
        ids: dict[str, str] = {}
        for operand, x in present.items():
            if not isinstance(x, ArrayHandle):
                ids[operand] = (await self._client.put(x, ttl_s=TEMPORARY_TTL_S)).id
                self._temporaries.append(ids[operand])
        return self._recording.add(op, present, ids, params, encoded, name)

"""Programs: steps recorded in a `with` block, run as one job when it ends. See `Client.program`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack

from gemmserve._calls.exchanges import TEMPORARY_TTL_S
from gemmserve._calls.linalg import LinearAlgebra
from gemmserve._calls.params import EinsumStep, GemmStep, ReduceStep, TensordotStep, keywords, params_of
from gemmserve._calls.requests import texts
from gemmserve._contraction import calls as _contraction
from gemmserve._handles.handle import ArrayHandle
from gemmserve._handles.protocols import NumpyHandle
from gemmserve._job import AsyncJob, AsyncSession, Job, Session
from gemmserve._programs.recording import Recording, Slot
from gemmserve._remote import AsyncRemoteArray, RemoteArray

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gemmserve._calls.exchanges import Flow
    from gemmserve._calls.linalg import Computation
    from gemmserve._contraction.calls import Contraction
    from gemmserve._handles.lifetime import Lifetime
    from gemmserve._handles.view import Base, View
    from gemmserve._model import ArrayInfo, JobInfo
    from gemmserve._transfer.arrays import LocalArray

S = TypeVar("S", bound=Session | AsyncSession)
J = TypeVar("J")


class _Lazy(NumpyHandle[Any]):
    """A handle whose array comes later: what it knows is in the slot that its views share."""

    _slot: Slot
    _plain: type[ArrayHandle[Any]]
    """Class that the handle has elsewhere (unpickled), once the program has run."""

    def __init__(self, program: Any, slot: Slot, *, view: View | None = None) -> None:
        self._program = program
        self._client = program._client
        self._slot = slot
        self._view = view

    def _viewed(self, view: View) -> Self:
        return type(self)(self._program, self._slot, view=view)

    def _reduced(self) -> tuple[Any, ...]:
        """The way to make the array of what the program kept, once it has run. Raises ProgramError."""
        return self._plain._arrived, self.id, self._slot.info, self._slot.base, self._view

    @property
    def _recorded(self) -> bool:  # type: ignore[override]
        return bool(self._program._open)

    @property
    def _place(self) -> Any:
        return self._program if self._program._open else self._client

    @property
    def _identity(self) -> Any:
        return id(self._slot)

    @property
    def _id(self) -> str:  # type: ignore[override]
        return self._slot.id or self._slot.reference

    @property
    def _info(self) -> ArrayInfo | None:
        return self._slot.info

    @_info.setter
    def _info(self, info: ArrayInfo | None) -> None:
        self._slot.info = info

    @property
    def _expected(self) -> Base | None:  # type: ignore[override]
        return self._slot.base

    @property
    def _lifetime(self) -> Lifetime:  # type: ignore[override]
        return self._slot.lifetime

    @property
    def id(self) -> str:
        """The array's id. Raises ProgramError before the program has run, and for what it did not keep."""
        return self._slot.resolved()


class ProgramArray(_Lazy, RemoteArray):
    """A result of a step of a program. In the block its views and what is computed with it are recorded; after it this
    is a RemoteArray, if the program kept it: what no step used, and what `Program.keep` was given.

    Shape and dtype are known in the block where those of all operands are; else asking for them raises ProgramError.
    """

    _plain = RemoteArray


class AsyncProgramArray(_Lazy, AsyncRemoteArray):
    """A ProgramArray of an AsyncProgram: `await (x @ x)` records in the block, `await x.numpy()` downloads after it."""

    _plain = AsyncRemoteArray

    @property
    def info(self) -> ArrayInfo:
        """The stored array, as of an AsyncRemoteArray. Raises ProgramError as `id` does."""
        self._slot.resolved()
        return super().info


def _one_or_all(arrays: dict[str, Any], options: ReduceStep) -> Any:
    """The one array of a reduction by name; else all by their names."""
    named = isinstance(options.get("reduce", "sum"), str)
    return next(iter(arrays.values())) if named and len(arrays) == 1 else arrays


class _Base(Generic[S, J]):
    """Base of both kinds of program."""

    def __init__(
        self, client: S, *, priority: int = 0, timeout: float | None = None, ttl_s: float | None = None,
        verify: bool = False, name: str | None = None, labels: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._client = client
        self.job: J | None = None
        self._recording = Recording()
        self._timeout = timeout
        self._fields = {
            "priority": priority or None, "ttl_s": ttl_s, "verify": verify or None, "name": name,
            "labels": texts(labels) if labels else None,
        }  # fmt: skip
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

    def _recorded(
        self, op: str, operands: Mapping[str, Any], kind: type, options: Mapping[str, Any]
    ) -> Flow[dict[str, Slot]]:
        """Records a step, its local operands uploaded for the while."""
        params, others = params_of(kind, options)
        name: str | None = others["name"]
        present, encoded = self._recording.check(op, operands, params, name)
        ids = yield from self._uploaded(present)
        return self._recording.add(op, present, ids, params, encoded, name)

    def _recorded_step(
        self,
        op: str,
        operands: Mapping[str, Any],
        params: Mapping[str, Any],
        made: Base | None,
        name: str | None = None,
    ) -> Flow[Slot]:
        """Records a step that is no product and has one result. `params`: its parameters as JSON; `made`: what the
        result is, as far as that is known. Raises ProgramError, ParameterInvalid, DtypeUnsupported.
        """
        present = self._recording.check_step(operands, name)
        ids = yield from self._uploaded(present)
        return self._recording.add_step(op, present, ids, params, {"d": made}, name=name)["d"]

    def _uploaded(self, operands: Mapping[str, Any]) -> Flow[dict[str, str]]:
        """Puts the operands that are on this side, for the while; returns their ids by name."""
        ids: dict[str, str] = {}
        for operand, x in operands.items():
            if not isinstance(x, ArrayHandle):
                info = yield from self._client._flows.put(x, ttl_s=TEMPORARY_TTL_S)
                ids[operand] = info.id
                self._temporaries.append(info.id)
        return ids

    def _job(self) -> dict[str, Any]:
        self._recording.state = "running"
        return self._recording.job(**self._fields)


class Program(_Base[Session, Job], LinearAlgebra):
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
                self._recording.resolve(info.result, partial(self._client._lifetime, made=self.job._makes))
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
        made = self._client._run(self._recorded("gemm", {"a": a, "b": b, "c": c}, GemmStep, options))
        return ProgramArray(self, made["d"])

    @keywords(ReduceStep)
    def gemm_reduce(
        self, a: RemoteArray | LocalArray, b: RemoteArray | LocalArray, **options: Unpack[ReduceStep]
    ) -> Any:
        """Records a step that is what `Client.gemm_reduce` does: a ProgramArray, or a dict of them by name."""
        made = self._client._run(self._recorded("gemm_reduce", {"a": a, "b": b}, ReduceStep, options))
        arrays = {result: ProgramArray(self, slot) for result, slot in made.items()}
        return _one_or_all(arrays, options)

    @keywords(EinsumStep)
    def einsum(self, *operands: Any, **options: Unpack[EinsumStep]) -> RemoteArray:
        """Records the steps of a contraction: see `Client.einsum`. `name`: the id of the last step.

        Without `name`, what takes no step (a transpose, a diagonal) is a view of the operand.
        """
        params, others = params_of(EinsumStep, options)
        return self._several(_contraction.einsum(operands, **params), **others)

    @keywords(TensordotStep)
    def tensordot(self, a: Any, b: Any, axes: Any = 2, **options: Unpack[TensordotStep]) -> RemoteArray:
        """Records the steps of a tensordot: see `Client.tensordot`. `name`: the id of the last one."""
        params, others = params_of(TensordotStep, options)
        return self._several(_contraction.tensordot(a, b, axes, **params), **others)

    def _step(
        self,
        op: str,
        operands: Mapping[str, Any],
        params: Mapping[str, Any],
        made: Base | None,
        *,
        name: str | None = None,
    ) -> ProgramArray:
        """Records a step that is no product: see `_recorded_step`."""
        return ProgramArray(self, self._client._run(self._recorded_step(op, operands, params, made, name)))

    def _several(self, call: Contraction | Computation, *, name: str | None = None) -> RemoteArray:
        """Records the steps of a call; `name`: the id of the last one."""
        made: RemoteArray = self._client._run(call.record(self, ProgramArray, name))
        return made

    def _in_one_job(self, operands: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> ProgramArray:
        """Records products of pairs, numbered as the operands and then the products; returns the last."""
        values = [*operands]
        for one, other in pairs:
            values.append(self.gemm(values[one], values[other]))
        last: ProgramArray = values[-1]
        return last


class AsyncProgram(_Base[AsyncSession, AsyncJob], LinearAlgebra):
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
                self._recording.resolve(info.result, partial(self._client._lifetime, made=self.job._makes))
                for slot in self._recording.slots.values():
                    if slot.id is not None and slot.base is None:
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
        made = await self._client._run(self._recorded("gemm", {"a": a, "b": b, "c": c}, GemmStep, options))
        return AsyncProgramArray(self, made["d"])

    @keywords(ReduceStep)
    async def gemm_reduce(
        self, a: AsyncRemoteArray | LocalArray, b: AsyncRemoteArray | LocalArray, **options: Unpack[ReduceStep]
    ) -> Any:
        """Records a step: see `Program.gemm_reduce`."""
        made = await self._client._run(self._recorded("gemm_reduce", {"a": a, "b": b}, ReduceStep, options))
        arrays = {result: AsyncProgramArray(self, slot) for result, slot in made.items()}
        return _one_or_all(arrays, options)

    @keywords(EinsumStep)
    async def einsum(self, *operands: Any, **options: Unpack[EinsumStep]) -> AsyncRemoteArray:
        """Records the steps of a contraction: see `Program.einsum`."""
        params, others = params_of(EinsumStep, options)
        return await self._several(_contraction.einsum(operands, **params), **others)

    @keywords(TensordotStep)
    async def tensordot(self, a: Any, b: Any, axes: Any = 2, **options: Unpack[TensordotStep]) -> AsyncRemoteArray:
        """Records the steps of a tensordot: see `Program.tensordot`."""
        params, others = params_of(TensordotStep, options)
        return await self._several(_contraction.tensordot(a, b, axes, **params), **others)

    async def _step(
        self,
        op: str,
        operands: Mapping[str, Any],
        params: Mapping[str, Any],
        made: Base | None,
        *,
        name: str | None = None,
    ) -> AsyncProgramArray:
        """Records a step that is no product: see `_recorded_step`."""
        return AsyncProgramArray(self, await self._client._run(self._recorded_step(op, operands, params, made, name)))

    async def _several(self, call: Contraction | Computation, *, name: str | None = None) -> AsyncRemoteArray:
        """Records the steps of a call; `name`: the id of the last one."""
        made: AsyncRemoteArray = await self._client._run(call.record(self, AsyncProgramArray, name))
        return made

    async def _in_one_job(self, operands: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> AsyncProgramArray:
        """Records products of pairs: see `Program._in_one_job`."""
        values = [*operands]
        for one, other in pairs:
            values.append(await self.gemm(values[one], values[other]))
        last: AsyncProgramArray = values[-1]
        return last

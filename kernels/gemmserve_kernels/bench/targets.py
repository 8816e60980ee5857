"""Targets that run and time a case: this machine's CPU, a GPU through CuPy, or a server.

A target hands out contenders: ours, and the strongest rival that the machine has. GPU times are those of device events;
operands rotate through copies that together exceed three times the level-2 cache. CPU and server times are wall clock.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_kernels.dispatch.gemm import gemm
from gemmserve_kernels.dispatch.gemm_reduce import gemm_reduce
from gemmserve_kernels.dispatch.routes import plan
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gemmserve_kernels.bench.cases import Case

    Array = np.ndarray[Any, Any]

_CACHES: Final = 3
"""Operands rotate through that many times the level-2 cache, so that no iteration finds the last one's."""
_MAX_SETS: Final = 32
_RIVAL_COMPUTE: Final = {"tf32": "tf32", "1xtf32": "tf32", "fp64": "fp64"}
"""Mode of the vendor's BLAS beside a mode of ours; plain arithmetic beside the others."""
_FILL_BYTES: Final = 1 << 30
_FILL_RATE: Final = 5e12
"""Bytes a second, not less than any device writes."""


@dataclass(frozen=True)
class Contender:
    """One way to compute a case. `run(i)` uses the i-th copy of the operands and returns the results by name."""

    who: str
    algorithm: str
    run: Callable[[int], dict[str, Any]]


class Target(Protocol):
    """A machine to measure on."""

    name: str

    def contenders(self, case: Case, operands: Mapping[str, Array], *, rival: bool) -> list[Contender]:
        """Ours first. Raises KernelError where the machine cannot run the case."""

    def seconds(self, contender: Contender, iterations: int) -> list[float]:
        """The time of each iteration."""

    def fetch(self, results: dict[str, Any]) -> dict[str, Array]:
        """The results on the host."""

    def release(self) -> None:
        """Frees what `contenders` put on the machine."""


def open_target(device: str) -> CpuTarget | GpuTarget:
    """The target of "auto" (a GPU where there is one), "cpu", "cuda:0", "rocm:1". Raises DeviceError."""
    if device == "cpu" or (device == "auto" and not DeviceSpec.all()):
        return CpuTarget()
    return GpuTarget(int(device.partition(":")[2] or 0))


class CpuTarget:
    """NumPy on this machine; the rival is `np.matmul`, with whatever reduction follows in NumPy."""

    def __init__(self) -> None:
        self.spec = DeviceSpec.cpu()
        self.name = self.spec.name

    def contenders(self, case: Case, operands: Mapping[str, Array], *, rival: bool) -> list[Contender]:
        """See Target."""
        ours = Contender("gemmserve", plan(case.problem(), self.spec).algorithm, lambda _: run_case(case, operands))
        if not rival or case.layout == "planar":
            return [ours]
        return [ours, Contender("np.matmul", "numpy", lambda _: by_hand(np, case, operands))]

    def seconds(self, contender: Contender, iterations: int) -> list[float]:
        """See Target."""
        return [_wall(lambda i=i: contender.run(i)) for i in range(iterations)]  # type: ignore[misc]

    def fetch(self, results: dict[str, Any]) -> dict[str, Array]:
        """See Target."""
        return results

    def release(self) -> None:
        """See Target. The operands are the caller's."""


class GpuTarget:
    """One CUDA or ROCm device; the rival is the vendor's BLAS, called as directly as CuPy can."""

    def __init__(self, ordinal: int) -> None:
        self.spec = DeviceSpec.of(ordinal)
        self.name = self.spec.name
        import cupy

        cupy.cuda.Device(ordinal).use()
        self._cupy = cupy
        self._sets: list[dict[str, Any]] = []
        self._sets_of: Mapping[str, Array] | None = None

    def contenders(self, case: Case, operands: Mapping[str, Array], *, rival: bool) -> list[Contender]:
        """See Target."""
        sets = self.sets(operands)
        found = [self.ours(case, sets, "gemmserve", plan(case.problem(), self.spec).algorithm)]
        if rival:
            found.append(self._rival(case, sets))
        return found

    def sets(self, operands: Mapping[str, Array]) -> list[dict[str, Any]]:
        """The operands on the device as often as it takes to exceed the cache; those last asked for are kept."""
        if self._sets_of is not operands:
            nbytes = sum(array.nbytes for array in operands.values())
            count = min(_MAX_SETS, max(1, math.ceil(_CACHES * self.spec.l2_bytes / max(1, nbytes))))
            first = {name: self._cupy.asarray(array) for name, array in operands.items()}
            self._sets_of = operands
            self._sets = [first] + [{name: array.copy() for name, array in first.items()} for _ in range(count - 1)]
        return self._sets

    def ours(self, case: Case, sets: list[dict[str, Any]], who: str, algorithm: str) -> Contender:
        """Our functions on that case."""
        return Contender(who, algorithm, lambda i: run_case(case, sets[i % len(sets)]))

    def _rival(self, case: Case, sets: list[dict[str, Any]]) -> Contender:
        if case.op == "gemm":
            compute = _RIVAL_COMPUTE.get(case.compute, "auto")
            vendor = replace(case, compute=compute, config=GemmConfig(algorithm="vendor"))
            try:
                plan(vendor.problem(), self.spec)
            except ConfigInfeasible:
                pass  # strides or conjugations that a BLAS call cannot express: CuPy copies instead
            else:
                return self.ours(vendor, sets, "vendor BLAS", "vendor")
        return Contender("cupy", "cupy", lambda i: by_hand(self._cupy, case, sets[i % len(sets)]))

    def seconds(self, contender: Contender, iterations: int) -> list[float]:
        """See Target. The device is kept busy until every iteration is enqueued: it never waits for the host."""
        cuda = self._cupy.cuda
        self._occupy(iterations * _wall(lambda: contender.run(0)))
        events = [cuda.Event() for _ in range(2 * iterations)]
        for i in range(iterations):
            events[2 * i].record()
            contender.run(i)
            events[2 * i + 1].record()
        events[-1].synchronize()
        return [cuda.get_elapsed_time(events[2 * i], events[2 * i + 1]) / 1e3 for i in range(iterations)]

    def _occupy(self, seconds: float) -> None:
        """Enqueues writes that take longer than the host needs for `seconds` of enqueuing."""
        memory = self._cupy.empty(_FILL_BYTES, self._cupy.uint8)
        for _ in range(math.ceil(2 * seconds * _FILL_RATE / _FILL_BYTES)):
            memory.fill(0)

    def fetch(self, results: dict[str, Any]) -> dict[str, Array]:
        """See Target."""
        return {name: self._cupy.asnumpy(array) for name, array in results.items()}

    def release(self) -> None:
        """See Target."""
        self._sets, self._sets_of = [], None
        self._cupy.get_default_memory_pool().free_all_blocks()


class ServerTarget:
    """A server, through the SDK's client or anything like it: operands stay there, jobs are timed."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._kept: list[Any] = []
        self.name = f"server {client.url}"

    def contenders(self, case: Case, operands: Mapping[str, Array], *, rival: bool) -> list[Contender]:
        """See Target. A server has no rival."""
        del rival
        remote = {name: self._client.put(array) for name, array in operands.items()}
        self._kept += remote.values()
        return [Contender("gemmserve", "server", lambda _: self._run(case, remote))]

    def _run(self, case: Case, remote: Mapping[str, Any]) -> dict[str, Any]:
        if case.op == "gemm":
            return {"d": self._client.gemm(remote["a"], remote["b"], remote.get("c"), **case.options())}
        found = self._client.gemm_reduce(remote["a"], remote["b"], **case.options())
        return dict(found) if isinstance(found, dict) else {case.reduce[0]: found}

    def seconds(self, contender: Contender, iterations: int) -> list[float]:
        """See Target. A result is deleted before the next run, outside the measured time."""
        times = []
        for i in range(iterations):
            start = time.perf_counter()
            results = contender.run(i)
            times.append(time.perf_counter() - start)
            for array in results.values():
                array.delete()
        return times

    def fetch(self, results: dict[str, Any]) -> dict[str, Array]:
        """See Target. Takes the results off the server."""
        arrays = {name: array.numpy() for name, array in results.items()}
        for array in results.values():
            array.delete()
        return arrays

    def release(self) -> None:
        """See Target."""
        while self._kept:
            self._kept.pop().delete()


def _wall(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def run_case(case: Case, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Our functions on that case, results by name."""
    if case.op == "gemm":
        return {"d": gemm(operands["a"], operands["b"], operands.get("c"), **case.options())}
    found = gemm_reduce(operands["a"], operands["b"], **case.options())
    return found if isinstance(found, dict) else {case.reduce[0]: found}


def by_hand(xp: Any, case: Case, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Run what a user of NumPy or CuPy would write."""
    planar = case.layout == "planar"
    joined = {name: x[0] + 1j * x[1] if planar else x for name, x in operands.items()}
    a, b, c = joined["a"], joined["b"], joined.get("c")
    half = xp is np and a.dtype == np.float16
    if half:  # NumPy has no BLAS for float16 and would take minutes
        a, b = a.astype(np.float32), b.astype(np.float32)
    d = _product(xp, _op(a, case.trans_a), _op(b, case.trans_b))
    if case.alpha != 1:
        d *= d.dtype.type(case.alpha)
    if case.op == "gemm":
        if c is not None:
            d += d.dtype.type(case.beta) * c
        d = d.astype(np.float16) if half else d
        return {"d": xp.stack([d.real, d.imag]) if planar else d}
    return reduced(xp, case, d)


def _product(xp: Any, a: Any, b: Any) -> Any:
    """`matmul`; of CuPy's float16 the vendor's BLAS as it can be called: CuPy's own way reaches a tenth of its rate."""
    if xp is not np and a.dtype == b.dtype == np.float16:
        with suppress(ConfigInfeasible):  # strides that a BLAS call cannot express
            return gemm(a, b, config=GemmConfig(algorithm="vendor"))
    return xp.matmul(a, b)


def reduced(xp: Any, case: Case, d: Any) -> dict[str, Any]:
    """The reductions of `case` by NumPy or CuPy, from its product."""
    results = {"c": d} if case.return_c else {}
    values = {"identity": lambda x: x, "abs": xp.abs, "square": xp.square}[case.pre_op](d)
    axis = -2 if "m" in case.axis else -1
    return {name: _reduce(xp, name, values, axis, over_batch="batch" in case.axis) for name in case.reduce} | results


def _op(x: Any, trans: str) -> Any:
    x = x.swapaxes(-1, -2) if trans in {"T", "C"} else x
    return x.conj() if trans in {"C", "R"} else x


def _reduce(xp: Any, name: str, values: Any, axis: int, *, over_batch: bool) -> Any:
    if over_batch:
        values = values.swapaxes(-1, -2) if axis == -1 else values
        values, axis = values.reshape(-1, values.shape[-1]), 0
    if name == "sumsq":
        return xp.square(xp.abs(values)).sum(axis=axis)
    magnitude = name.startswith("abs") or (values.dtype.kind == "c" and name.startswith("arg"))
    return getattr(xp, name.removeprefix("abs"))(xp.abs(values) if magnitude else values, axis=axis)

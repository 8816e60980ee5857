"""The kernels that AMD's compiler is to check: the very sources that the host code would launch, by architecture.

The portable kernels for every architecture, those for matrix units as far as an architecture has the instructions. A
launcher that runs nothing notes what it is asked to launch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve_kernels.algorithms.mfma import gemm as mfma
from gemmserve_kernels.algorithms.mfma import gemm_reduce as mfma_reduce
from gemmserve_kernels.algorithms.mfma.tile import ARCHITECTURES, CANDIDATES, MfmaTile, candidates_of
from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.algorithms.small import gemm as small
from gemmserve_kernels.algorithms.splits import gemm as planes
from gemmserve_kernels.algorithms.splits import gemm_reduce as planes_reduce
from gemmserve_kernels.algorithms.sums import gemm_reduce as sums
from gemmserve_kernels.algorithms.vendor import gemm_reduce as vendor_reduce
from gemmserve_kernels.device.element_counts import READ_COUNTERS
from gemmserve_kernels.device.replay import LaunchRecorder, RecordedLaunch
from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_kernels.freivalds import device as freivalds
from gemmserve_kernels.freivalds import sampled_device as sampled
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem
from gemmserve_kernels.problem.problem import Operand as OperandSpec
from gemmserve_kernels.problem.vocabulary import REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gemmserve_kernels.device.compiler import KernelSource

SPECS: Final = {spec.arch: spec for spec in KNOWN.values() if spec.kind == "rocm"}
_LARGE: Final = 4096
_REDUCTIONS: Final = [name for name in REDUCTIONS if name not in {"max", "min"}]
_DTYPES: Final = ("float16", "float32", "float64", "complex64", "complex128")
_EVERYTHING: Final = "gfx942"
"""The architecture for which every way to read an operand is compiled."""
_BOTH_FAMILIES: Final = (_EVERYTHING, "gfx1100")
"""Where portable kernels are compiled for all dtypes, and every tile of the others: one CDNA, one RDNA."""
_EVERY_TILE: Final = ("fp32", "3xfp16")
"""Arithmetic whose second tiles are compiled too; the others take fewer registers."""
_DATA: Final = {
    ("fp32", False): "float32", ("fp32", True): "complex64", ("xf32", False): "float32", ("xf32", True): "complex64",
    ("fp64", False): "float64", ("fp64", True): "complex128", ("fp16", False): "float16",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kernel to compile. `mnemonic`: the matrix instruction that it must have, "" for none."""

    label: str
    source: KernelSource
    entry: str
    mnemonic: str = ""


def cases(arch: str) -> list[Case]:
    """All of an architecture, without repetition."""
    spec = SPECS[arch]
    found: dict[tuple[KernelSource, str], Case] = {}
    reading = Case(READ_COUNTERS.name, READ_COUNTERS, READ_COUNTERS.name)
    for case in (reading, *_portable(spec), *_matrix(spec)):
        found.setdefault((case.source, case.entry), case)
    labels = [case.label for case in found.values()]
    if len(set(labels)) != len(labels):
        raise ValueError(f"labels of {arch} repeat: {sorted(each for each in set(labels) if labels.count(each) > 1)}")
    return list(found.values())


def _notes(spec: DeviceSpec, run: Callable[[LaunchRecorder], Any]) -> list[RecordedLaunch]:
    recorder = LaunchRecorder(spec, 2**31 - 1, 0)
    run(recorder)
    return [step for step in recorder.steps if isinstance(step, RecordedLaunch)]


def _array(recorder: LaunchRecorder, operand: OperandSpec) -> Any:
    itemsize = operand.dtype.itemsize
    return recorder.argument(operand.shape, operand.dtype, tuple(stride * itemsize for stride in operand.strides))


def _gemm(spec: DeviceSpec, module: Any, problem: GemmProblem, config: Any) -> list[RecordedLaunch]:
    def run(recorder: LaunchRecorder) -> None:
        a, b, out = (_array(recorder, x) for x in (problem.a, problem.b, problem.result))
        module.run_gemm(recorder, problem, config, a, b, None, out)

    return _notes(spec, run)


def _reduce(spec: DeviceSpec, module: Any, problem: GemmReduceProblem, config: Any) -> list[RecordedLaunch]:
    def run(recorder: LaunchRecorder) -> None:
        a, b = (_array(recorder, x) for x in (problem.a, problem.b))
        results = {
            name: _array(recorder, OperandSpec.contiguous(shape, dtype))
            for name, (shape, dtype) in problem.results.items()
        }
        module.run_gemm_reduce(recorder, problem, config, a, b, results)

    return _notes(spec, run)


def _operand(
    dtype: str, *, extent: int = _LARGE, order: Any = "C", planar: bool = False, batch: int = 0
) -> OperandSpec:
    shape = (*((2,) if planar else ()), *((batch,) if batch else ()), extent, extent)
    return OperandSpec.contiguous(shape, np.dtype(dtype), order)


def _named(label: str, notes: list[RecordedLaunch], mnemonic: str = "", *, only: str = "") -> Iterator[Case]:
    distinct = list(dict.fromkeys((note.source, note.entry) for note in notes if only in {"", note.entry}))
    for number, (source, entry) in enumerate(distinct):
        again = sum(other == entry for _, other in distinct[:number])
        has = mnemonic if entry.startswith("mfma") else ""
        yield Case(f"{entry} {label}{f' {again + 1}' if again else ''}", source, entry, has)


def _portable(spec: DeviceSpec) -> Iterator[Case]:
    everything = spec.arch in _BOTH_FAMILIES
    for dtype in _DTYPES if everything else ("complex64",):
        x = _operand(dtype)
        yield from _named(dtype, _gemm(spec, simt, GemmProblem.build(x, x), None))
        yield from _named(dtype, _reduce(spec, simt, GemmReduceProblem.build(x, x, reduce=_REDUCTIONS), None))
    yield from _sums(spec)
    yield from _stored(spec)
    yield from _checks(spec)
    if not everything:
        return
    across = GemmProblem.build(_operand("complex64", order="F"), _operand("complex64"), trans_b="R")
    yield from _named("complex64 across k", _gemm(spec, simt, across, None))
    planar = GemmProblem.build(_operand("float32", planar=True), _operand("float32", planar=True), layout="planar")
    yield from _named("planar", _gemm(spec, simt, planar, None))
    extremes = GemmReduceProblem.build(_operand("float32"), _operand("float32"), reduce=["max", "min"])
    yield from _named("float32 max min", _reduce(spec, simt, extremes, None))
    atomic = GemmReduceProblem.build(
        _operand("complex64"), _operand("complex64"), reduce=["sum", "sumsq"], reproducible=False, return_c=True
    )
    yield from _named("complex64 atomic with c", _reduce(spec, simt, atomic, None), only="gemm_reduce")
    for dtype, extent in (("float32", 8), ("complex64", 4), ("complex64", 16), ("complex128", 8), ("float16", 32)):
        x = _operand(dtype, extent=extent, batch=100_000)
        yield from _named(f"{dtype} {extent}", _gemm(spec, small, GemmProblem.build(x, x), None))


def _sums(spec: DeviceSpec) -> Iterator[Case]:
    for axis in ("m", "n"):
        x = _operand("complex64")
        total = GemmReduceProblem.build(x, x, reduce=["sum", "mean"], axis=axis)
        yield from _named(f"complex64 over {axis}", _reduce(spec, sums, total, None))


def _stored(spec: DeviceSpec) -> Iterator[Case]:
    """Yield passes over products of the vendor's BLAS."""
    for dtype in ("complex64", "complex128"):
        x = _operand(dtype)
        for label, options in (("", {}), (" returned", {"return_c": True})):
            problem = GemmReduceProblem.build(x, x, reduce=_REDUCTIONS, **options)
            yield from _named(f"{dtype}{label}", _reduce(spec, vendor_reduce, problem, None), only="stored_reduce")


def _checks(spec: DeviceSpec) -> Iterator[Case]:
    """Yield checks of results, whose kernels are the portable ones too."""
    for order in ("C", "F"):
        x = _operand("complex64", order=order)
        problem = GemmProblem.build(x, x)

        def run(recorder: LaunchRecorder, problem: GemmProblem = problem, x: OperandSpec = x) -> None:
            a, b, d = (_array(recorder, x) for _ in range(3))
            freivalds.figures(recorder, problem, a, b, None, d, seed=0)
            sampled.figures(recorder, problem, a, b, None, d, recorder.empty((1,), np.dtype(np.uint64)))

        yield from _named(f"complex64 {order}", _notes(spec, run))


def _matrix(spec: DeviceSpec) -> Iterator[Case]:
    """The kernels for matrix units, and what comes before and after products of planes."""
    known = ARCHITECTURES[spec.arch]
    for arithmetic, is_complex in CANDIDATES:
        if arithmetic not in known:
            continue
        tiles, reducing = (
            candidates_of(arithmetic, spec.arch, is_complex=is_complex, reducing=which) for which in (False, True)
        )
        every = spec.arch in _BOTH_FAMILIES and arithmetic in _EVERY_TILE
        for tile in tiles if every else tiles[:1]:
            yield from _matrix_gemm(spec, arithmetic, tile, is_complex=is_complex)
        for tile in reducing if every else reducing[:1]:
            yield from _matrix_reduce(spec, arithmetic, tile, is_complex=is_complex)
    if "fp32" in known and "fp16" not in known:
        x = _operand("float16")
        yield from _named(
            "float16 as float32", _gemm(spec, mfma, GemmProblem.build(x, x), None), _mnemonic(spec, "fp32")
        )
    if "fp16" in known:
        yield from _across(spec, "float16")
    if spec.arch == _EVERYTHING:
        yield from _matrix_variants(spec)


def _mnemonic(spec: DeviceSpec, arithmetic: str) -> str:
    return ARCHITECTURES[spec.arch][arithmetic].instruction.mnemonic


def _label(arithmetic: str, tile: MfmaTile, *, is_complex: bool) -> str:
    shape = f"{tile.block_m}x{tile.block_n}x{tile.block_k}/{tile.warp_m}x{tile.warp_n}"
    return f"{arithmetic} {'complex' if is_complex else 'real'} {shape}"


def _matrix_gemm(spec: DeviceSpec, arithmetic: str, tile: MfmaTile, *, is_complex: bool) -> Iterator[Case]:
    label = _label(arithmetic, tile, is_complex=is_complex)
    if ARCHITECTURES[spec.arch][arithmetic].planes:
        x = _operand("complex64" if is_complex else "float32")
        problem = replace(GemmProblem.build(x, x), compute=_mode(arithmetic))
        notes = _gemm(spec, planes, problem, _requested(tile))
        if arithmetic != "3xfp16":  # the pre-pass and the fallback are much the same
            notes = [note for note in notes if note.entry == "mfma_gemm"]
        yield from _named(label, notes, _mnemonic(spec, arithmetic))
        return
    x = _operand(_DATA[arithmetic, is_complex])
    problem = GemmProblem.build(x, x, compute=_mode(arithmetic))
    yield from _named(label, _gemm(spec, mfma, problem, tile), _mnemonic(spec, arithmetic))


def _matrix_reduce(spec: DeviceSpec, arithmetic: str, tile: MfmaTile, *, is_complex: bool) -> Iterator[Case]:
    label = _label(arithmetic, tile, is_complex=is_complex)
    if ARCHITECTURES[spec.arch][arithmetic].planes:
        x = _operand("complex64" if is_complex else "float32")
        problem = replace(GemmReduceProblem.build(x, x, reduce=_REDUCTIONS), compute=_mode(arithmetic))
        entries = {"mfma_reduce"} | ({"reduce_fallback"} if arithmetic == "3xfp16" else set())
        notes = [n for n in _reduce(spec, planes_reduce, problem, _requested(tile)) if n.entry in entries]
    else:
        x = _operand(_DATA[arithmetic, is_complex])
        problem = GemmReduceProblem.build(x, x, reduce=_REDUCTIONS, compute=_mode(arithmetic))
        notes = [n for n in _reduce(spec, mfma_reduce, problem, tile) if n.entry == "mfma_reduce"]
    yield from _named(label, notes, _mnemonic(spec, arithmetic))


def _matrix_variants(spec: DeviceSpec) -> Iterator[Case]:
    """What operands change in the text."""
    for dtype in ("complex64", "complex128"):
        yield from _across(spec, dtype)
    odd = GemmProblem.build(_operand("complex64", extent=4095), _operand("complex64", extent=4095), trans_a="C")
    yield from _named("complex64 odd", _gemm(spec, mfma, odd, None), _mnemonic(spec, "fp32"))
    planar = GemmProblem.build(_operand("float32", planar=True), _operand("float32", planar=True), layout="planar")
    yield from _named("planar", _gemm(spec, mfma, planar, None), _mnemonic(spec, "fp32"))
    for options in ({"reduce": ["max", "min"], "pre_op": "abs"}, {"reduce": ["sum", "absmax"], "return_c": True}):
        x = _operand("complex64")
        problem = GemmReduceProblem.build(x, x, **options)
        notes = [n for n in _reduce(spec, mfma_reduce, problem, None) if n.entry == "mfma_reduce"]
        yield from _named(f"complex64 {' '.join(map(str, options['reduce']))}", notes, _mnemonic(spec, "fp32"))


def _across(spec: DeviceSpec, dtype: str) -> Iterator[Case]:
    """An operand that lies across k."""
    arithmetic = {"float16": "fp16", "complex128": "fp64"}.get(dtype, "fp32")
    across = GemmProblem.build(_operand(dtype, order="F"), _operand(dtype))
    yield from _named(f"{dtype} across k", _gemm(spec, mfma, across, None), _mnemonic(spec, arithmetic))


def _requested(tile: MfmaTile) -> GemmConfig:
    return GemmConfig(algorithm="mfma", **{field.name: getattr(tile, field.name) for field in fields(tile)})


def _mode(arithmetic: str) -> str:
    """The compute mode that has it."""
    return {"xf32": "tf32", "1xfp16": "tf32", "fp16": "auto", "fp64": "auto"}.get(arithmetic, arithmetic)

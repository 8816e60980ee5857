"""Choice of the algorithm that runs a problem on a device. Pure: it depends on the job and the device alone, never on
load or luck.

A compute mode has routes, pairs of an algorithm and the arithmetic it does. Those that can run the problem are compared
by `estimate`, which knows what was measured on the architecture, and the fastest is taken. The routes of `auto` are
those whose error, real and imaginary part each, is no larger than plain FP32's (FP64's).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from gemmserve_kernels.algorithms.algorithm import product_algorithm, reduction_algorithm
from gemmserve_kernels.algorithms.common.panels import pass_seconds
from gemmserve_kernels.algorithms.common.runs import is_cut, is_tiny
from gemmserve_kernels.algorithms.simt.tile import resolve_simt
from gemmserve_kernels.algorithms.vendor.blas import BlasPlan, NotExpressible, copied_bytes, lower
from gemmserve_kernels.dispatch.estimate import call_seconds, estimate
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ComputeUnsupported, ConfigInfeasible
from gemmserve_kernels.problem.operand import Operand, real_dtype
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem
from gemmserve_kernels.problem.validation import compute_modes
from gemmserve_kernels.problem.vocabulary import COMPUTE_MODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.vocabulary import AlgorithmName

    Route = tuple[AlgorithmName, str]

P = TypeVar("P", GemmProblem, GemmReduceProblem)

_PLAIN: Final[tuple[Route, ...]] = (
    ("vendor", "plain"),
    ("simt", "plain"),
    ("small", "plain"),
    ("mfma", "plain"),
    ("dmma", "plain"),
)
_ROUTES: Final[dict[str, tuple[Route, ...]]] = {
    "auto": (
        *_PLAIN,
        ("wgmma", "3xfp16"),
        ("fused", "3xfp16"),
        ("wgmma", "fp16"),
        ("mma", "3xfp16"),
        ("ozaki", "ozaki"),
    ),
    "fp32": _PLAIN,
    "fp64": _PLAIN,
    "tf32": (
        ("vendor", "tf32"),
        ("wgmma", "1xfp16"),
        ("mma", "1xfp16"),
        ("mma", "1xtf32"),
        ("mfma", "xf32"),
        ("mfma", "1xfp16"),
    ),
    "1xtf32": (("mma", "1xtf32"),),
    "3xtf32": (("mma", "3xtf32"), ("small", "3xtf32")),
    "3xfp16": (("wgmma", "3xfp16"), ("fused", "3xfp16"), ("mma", "3xfp16"), ("mfma", "3xfp16")),
    "3xfp16-3m": (("wgmma", "3xfp16-3m"),),
    "6xbf16": (("wgmma", "6xbf16"), ("mma", "6xbf16")),
    "9xbf16": (("wgmma", "9xbf16"), ("mma", "9xbf16")),
    "ozaki": (("ozaki", "ozaki"),),
}
_REDUCE_ROUTES: Final[dict[str, tuple[Route, ...]]] = {
    "auto": (
        ("sums", "plain"),
        ("gram", "plain"),
        ("screen", "plain"),
        ("simt", "plain"),
        ("vendor", "plain"),
        ("mfma", "plain"),
        ("dmma", "plain"),
        ("wgmma", "3xfp16"),
        ("wgmma", "fp16"),
        ("mma", "3xfp16"),
        ("ozaki", "ozaki"),
    ),
    "fp32": (("sums", "plain"), ("simt", "plain"), ("vendor", "plain"), ("mfma", "plain")),
    "fp64": (("sums", "plain"), ("simt", "plain"), ("vendor", "plain"), ("mfma", "plain"), ("dmma", "plain")),
    "tf32": _ROUTES["tf32"],
    "1xtf32": (("mma", "1xtf32"),),
    "3xtf32": (("mma", "3xtf32"),),
    "3xfp16": (("wgmma", "3xfp16"), ("mma", "3xfp16"), ("mfma", "3xfp16")),
    "3xfp16-3m": (("wgmma", "3xfp16-3m"),),
    "6xbf16": (("wgmma", "6xbf16"), ("mma", "6xbf16")),
    "9xbf16": (("wgmma", "9xbf16"), ("mma", "9xbf16")),
}
"""The same for gemm_reduce."""
_PLAIN_MODES: Final = ("auto", "fp32", "fp64")
"""Modes in which a configuration without an algorithm's name is one of the portable kernels."""
WITHOUT_PRODUCT: Final = ("sums", "gram", "screen")
"""Algorithms that reduce a product without making it, or most of it."""
_DOUBLE: Final = (np.dtype(np.float64), np.dtype(np.complex128))
_COPY_RATE: Final = 3.5e12
"""Bytes a second of a strided copy on an H200."""
_BATCH_DOUBT: Final = 1.6
"""Factor of reductions of batches by residues: on an H200 they took 1.1 to 1.8 times as long as is estimated
(complex128, 4 or 8 products of 1024 to 2048 rows), single products of 1024 to 8192 rows within a twentieth of it."""
_LAUNCH_S: Final = 1e-5
"""Seconds of one more copy: its kernel and its allocation."""
_BESIDE_CALL_S: Final = 15e-6
"""Seconds of the host for the two launches, at least, behind a product by the vendor's BLAS that is reduced: such calls
are no graph. Short ones take 36 to 50 us from one to the next on a host of an H200 on which a product by the vendor's
BLAS takes 32."""


@dataclass(frozen=True)
class Plan:
    """Choice of what will run. `blas` holds the calls of a product where the algorithm is "vendor". `reduces`: it is a
    plan of gemm_reduce.

    `arithmetic` is "plain", or what the tensor cores multiply ("3xfp16", "ozaki" ...). Where `uniform`, A, B and C are
    first converted to the problem's dtype.
    """

    algorithm: AlgorithmName
    config: GemmConfig | None = None
    blas: BlasPlan | None = None
    arithmetic: str = "plain"
    uniform: bool = False
    reduces: bool = False

    @property
    def takes_prepared(self) -> bool:
        """Whether its module has a use for what `prepare` makes (the payload says which arithmetics take it)."""
        if self.algorithm == "fused" or (self.reduces and self.arithmetic == "ozaki"):
            return False
        return self.arithmetic in {"3xfp16", "3xfp16-3m", "1xfp16", "ozaki"}

    def prepared_by(self, compute: str) -> str | None:
        """Return the compute mode by which operands of a product in mode `compute` are prepared so that it takes them:
        of `auto` that of the arithmetic, which depends on the partner, too. None where it takes none.
        """
        if not self.takes_prepared:
            return None
        return self.arithmetic if compute == "auto" and self.arithmetic in COMPUTE_MODES else compute

    def run_gemm(self, launcher: Launcher, problem: GemmProblem, a: Any, b: Any, c: Any, out: Any) -> None:
        """Launches a plan of products that is neither the vendor's BLAS nor NumPy: see ProductAlgorithm."""
        module = product_algorithm(self.algorithm, self.arithmetic)
        module.run_gemm(launcher, problem, self.config, a, b, c, out)

    def run_gemm_reduce(
        self, launcher: Launcher, problem: GemmReduceProblem, a: Any, b: Any, results: dict[str, Any]
    ) -> None:
        """Launches a plan of reductions that is not NumPy: see ReductionAlgorithm."""
        module = reduction_algorithm(self.algorithm, self.arithmetic)
        module.run_gemm_reduce(launcher, problem, self.config, a, b, results)


def plan(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> Plan:
    """The plan for either kind of problem. Raises ComputeUnsupported, ConfigInfeasible."""
    return plan_gemm(problem, spec) if isinstance(problem, GemmProblem) else plan_gemm_reduce(problem, spec)


def plan_gemm(problem: GemmProblem, spec: DeviceSpec, result: Operand | None = None) -> Plan:
    """Plan how `problem` runs on `spec`, into a `result` stored in its own way (by default a fresh array).

    The algorithm does not depend on `result`. Raises ComputeUnsupported naming the modes there are; ConfigInfeasible.
    """
    _check_compute(problem, available(problem.dtype, spec))
    requested = _requested(problem, spec)
    if spec.kind == "cpu":
        return Plan("numpy", problem.config)
    # An empty sum, or alpha = 0, which must not hide NaN in A and B: nothing that tensor cores or a BLAS would gain.
    degenerate = problem.k == 0 or problem.alpha == 0 or 0 in problem.result_shape
    if degenerate and requested != "vendor":
        return Plan("simt", problem.config if requested == "simt" else None)
    found = candidates(problem, spec, requested)
    chosen = (
        found[0] if len(found) == 1 else min(found, key=lambda each: _taken(each, _seconds(each, problem, spec), spec))
    )
    if chosen.blas is not None and result is not None:
        return replace(chosen, blas=lower(problem, result))
    return chosen


def candidates(problem: GemmProblem, spec: DeviceSpec, requested: str | None = None) -> list[Plan]:
    """Every plan that can run `problem` on a GPU, or those of the algorithm `requested`; never none.

    Raises ConfigInfeasible with the reasons where there would be none.
    """
    found, reasons = [], []
    for route in _ROUTES[problem.compute]:
        if route[0] == requested or (requested is None and not lags(route, problem)):
            try:
                found.append(_candidate(route, problem, spec))
            except ConfigInfeasible as reason:
                reasons.append(str(reason))
    if not found:
        raise ConfigInfeasible("; ".join(reasons) or _no_route(problem.compute, requested))
    return found


def plan_gemm_reduce(problem: GemmReduceProblem, spec: DeviceSpec) -> Plan:
    """Plan how `problem` runs on `spec`. Raises ComputeUnsupported naming the modes there are; ConfigInfeasible."""
    _check_compute(problem, tuple(m for m in available(problem.dtype, spec) if m in _REDUCE_ROUTES))
    requested = _requested(problem, spec)
    if spec.kind == "cpu":
        if requested not in {None, "numpy", "product"}:
            raise ConfigInfeasible(f"algorithm: {requested} has no gemm_reduce here")
        return Plan("numpy", problem.config, reduces=True)
    if problem.k == 0 or problem.alpha == 0 or problem.extent == 0 or 0 in problem.outputs_shape:
        return Plan("simt", problem.config if requested == "simt" else None, reduces=True)
    found, reasons = [], []
    for route in _REDUCE_ROUTES[problem.compute]:
        if requested is None and lags(route, problem):
            continue
        if requested in {None, route[0]} or (requested == "product" and route[0] not in WITHOUT_PRODUCT):
            try:
                found.append(_reduce_candidate(route, problem, spec))
            except ConfigInfeasible as reason:
                reasons.append(str(reason))
    if any(each.algorithm == "sums" for each in found):
        return found[0]  # reads every element once: nothing is faster
    if not found:
        names = ", ".join(dict.fromkeys(algorithm for algorithm, _ in _REDUCE_ROUTES[problem.compute]))
        raise ConfigInfeasible(
            "; ".join(reasons) or f"algorithm: {requested} has no gemm_reduce in {problem.compute}; {names} have"
        )
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda each: _taken(each, _reduce_seconds(each, problem, spec), spec))


def _reduce_candidate(route: Route, problem: GemmReduceProblem, spec: DeviceSpec) -> Plan:
    algorithm, arithmetic = route
    config = replace(problem.config or GemmConfig(), algorithm=algorithm)
    if algorithm == "simt":
        return Plan("simt", problem.config, reduces=True)
    module = reduction_algorithm(*route)
    if algorithm == "vendor":
        _check_vendor(arithmetic, spec)
        if reason := module.supports(problem, spec):
            raise ConfigInfeasible(f"algorithm: the vendor's BLAS cannot do this: {reason}")
        return Plan("vendor", problem.config, None, arithmetic, reduces=True)
    if algorithm in WITHOUT_PRODUCT:
        if reason := module.supports(problem, spec):
            raise ConfigInfeasible(f"algorithm: {algorithm} cannot do this: {reason}")
        module.resolve(config, problem, spec)
        return Plan(algorithm, config, reduces=True)
    uniform, converted = as_uniform(problem)
    reason = _unfit(route, uniform.product, spec) or module.supports(uniform, spec)
    if reason is not None:
        raise ConfigInfeasible(f"algorithm: {algorithm} cannot do this: {reason}")
    module.resolve(config, uniform, spec)
    return Plan(algorithm, config, None, arithmetic, uniform=converted, reduces=True)


def _requested(problem: GemmProblem | GemmReduceProblem, spec: DeviceSpec) -> AlgorithmName | None:
    """The algorithm that the problem's configuration asks for, by name or by its tile. Raises ConfigInfeasible."""
    config = problem.config
    if config is None:
        return None
    plain = problem.compute in _PLAIN_MODES
    if config.algorithm is not None or plain:
        check_feasible(config, spec, problem.accumulate)
    if config.algorithm == "numpy" and spec.kind != "cpu":
        raise ConfigInfeasible(f"algorithm: numpy runs on the CPU, and the operands are on {spec.name}")
    return "simt" if config.algorithm is None and config.tile_fields and plain else config.algorithm


def check_feasible(config: GemmConfig, spec: DeviceSpec, dtype: np.dtype[Any]) -> None:
    """Raises ConfigInfeasible, naming the limit, unless `spec` can run `config` on an accumulator of `dtype`."""
    if config.algorithm in {"numpy", "vendor"} or spec.kind == "cpu":
        name = config.algorithm or "numpy"
        for field in config.tile_fields:
            raise ConfigInfeasible(f"{field}: the {name} algorithm has no tiles to set")
        if spec.kind == "cpu" and name not in {"numpy", "product"}:
            raise ConfigInfeasible(f"algorithm: {name} needs a CUDA or ROCm device, and this one is a CPU")
        return
    if config.algorithm not in {None, "simt"}:
        return  # the algorithm's own module looks at its settings
    resolve_simt(config, m=1 << 12, n=1 << 12, batch=1, accumulate=dtype, spec=spec)


def available(dtype: np.dtype[Any], spec: DeviceSpec) -> tuple[str, ...]:
    """The compute modes that both the arithmetic dtype and the device have."""
    return tuple(mode for mode in compute_modes(dtype) if mode in spec.compute_modes)


def compute_unsupported(compute: str, dtype: np.dtype[Any], modes: Sequence[str]) -> ComputeUnsupported:
    """The error of a compute mode that the arithmetic dtype or the device lacks; `modes`: those that both have."""
    if compute not in COMPUTE_MODES:
        why = "is not known"
    else:
        why = "is not available here" if compute in compute_modes(dtype) else f"does not apply to {dtype.name}"
    return ComputeUnsupported(f"compute {compute!r} {why}; there are {', '.join(modes)}", modes)


def _check_compute(problem: GemmProblem | GemmReduceProblem, modes: tuple[str, ...]) -> None:
    if problem.compute not in modes:
        raise compute_unsupported(problem.compute, problem.dtype, modes)


def _no_route(compute: str, requested: str | None) -> str:
    names = ", ".join(dict.fromkeys(algorithm for algorithm, _ in _ROUTES[compute]))
    return f"algorithm: {requested} has no {compute} arithmetic; {names} have"


def _candidate(route: Route, problem: GemmProblem, spec: DeviceSpec) -> Plan:
    """The plan of one route. Raises ConfigInfeasible with the reason why it cannot run."""
    algorithm, arithmetic = route
    if algorithm == "vendor":
        _check_vendor(arithmetic, spec)
        try:
            return Plan("vendor", problem.config, lower(problem), arithmetic)
        except NotExpressible as error:
            raise ConfigInfeasible(f"algorithm: the vendor's BLAS cannot do this: {error}") from None
    if algorithm == "simt":
        return Plan("simt", problem.config)
    uniform, converted = as_uniform(problem)
    config = replace(problem.config or GemmConfig(), algorithm=algorithm)
    module = product_algorithm(*route)
    reason = _unfit(route, uniform, spec) or module.supports(uniform, spec)
    if reason is not None:
        raise ConfigInfeasible(f"algorithm: {algorithm} cannot do this: {reason}")
    module.resolve(config, uniform, spec)
    return Plan(algorithm, config, None, arithmetic, uniform=converted)


def _check_vendor(arithmetic: str, spec: DeviceSpec) -> None:
    if arithmetic == "tf32" and spec.kind == "rocm":
        raise ConfigInfeasible("algorithm: the vendor's BLAS has no TF32 on AMD devices")


def _unfit(route: Route, problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """Return why the device or the dtype rules the route out, or None."""
    algorithm, arithmetic = route
    if algorithm == "small":
        return None
    if algorithm == "mfma":
        return None if spec.kind == "rocm" else "mfma needs an AMD device"
    if algorithm == "dmma":
        return None  # its module says what it multiplies, and where
    if spec.kind != "cuda":
        return f"{algorithm} needs an NVIDIA device"
    if algorithm in {"wgmma", "fused", "ozaki"} and not spec.has_wgmma:
        return f"{algorithm} needs compute capability 9.0, and {spec.name} is {spec.arch}"
    double = problem.accumulate in _DOUBLE
    half = problem.dtype == np.float16
    if half != (arithmetic == "fp16") or (double and arithmetic != "ozaki"):
        return f"{arithmetic} does not apply to {problem.dtype.name}"
    return None


def lags(route: Route, problem: GemmProblem | GemmReduceProblem) -> bool:
    """Whether the route is less accurate than plain arithmetic, which `auto` is to be, on a product so small.

    Residues of float64 have an error that does not shrink where operands are sparse: data dense in 64 of 16,384 steps
    of k, or in a tenth of them, are off by 4.6 u at 1024 x 1024, where a BLAS that cuts k has 1.5.
    """
    if problem.compute != "auto":
        return False
    if route[1] == "3xfp16":
        return is_tiny(problem)
    return route[0] == "ozaki" and problem.dtype.name == "float64" and is_cut(problem)


def as_uniform(problem: P) -> tuple[P, bool]:
    """The problem with all operands in its dtype, and whether that takes conversions."""
    stored = real_dtype(problem.dtype) if problem.planar else problem.dtype
    operands = {name: getattr(problem, name) for name in ("a", "b", "c") if getattr(problem, name, None) is not None}
    if all(x.dtype == stored for x in operands.values()):
        return problem, False
    found: dict[str, Any] = {name: Operand.contiguous(x.shape, stored) for name, x in operands.items()}
    return replace(problem, **found), True


def taken_problem(problem: GemmReduceProblem, chosen: Plan) -> GemmReduceProblem:
    """The reduction of the operands that `chosen` takes: `problem` itself, or copies in the place of some."""
    if chosen.algorithm == "vendor":
        from gemmserve_kernels.algorithms.vendor.gemm_reduce import as_readable

        return as_readable(problem)
    return as_uniform(problem)[0] if chosen.uniform else problem


def _reduce_seconds(candidate: Plan, problem: GemmReduceProblem, spec: DeviceSpec) -> float:
    """The estimate for one way to reduce."""
    if candidate.algorithm == "gram":
        from gemmserve_kernels.algorithms.gram.gemm_reduce import seconds

        return seconds(problem, spec)
    if candidate.algorithm == "screen":
        from gemmserve_kernels.algorithms.screen.seconds import screen_seconds

        return screen_seconds(problem, spec, partial(estimate, spec, "wgmma", "fp16", "float16"))
    if candidate.arithmetic == "ozaki":
        over = pass_seconds(problem, spec, problem.dtype.itemsize)
        doubt = _BATCH_DOUBT if problem.batch > 1 else 1.0
        return doubt * (_seconds(candidate, problem.product, spec) + over)
    if candidate.algorithm == "vendor":
        from gemmserve_kernels.algorithms.vendor.gemm_reduce import call_count, copies

        copied, count = copies(problem)
        beside = copied / _COPY_RATE + (count + call_count(problem) - 1) * _LAUNCH_S
        over = pass_seconds(problem, spec, problem.accumulate.itemsize)
        return _seconds(candidate, problem.product, spec) + beside + over
    return _seconds(candidate, problem.product, spec, written=problem.return_c)


def _taken(candidate: Plan, seconds: float, spec: DeviceSpec) -> tuple[float, float]:
    """The estimate of the seconds from one call to the next, the device's `seconds` or the host's, whichever are more;
    and the device's.
    """
    call_s = call_seconds(spec, candidate.algorithm)
    if candidate.reduces and candidate.algorithm == "vendor" and call_s:
        call_s += _BESIDE_CALL_S
    return max(seconds, call_s), seconds


def _seconds(candidate: Plan, problem: GemmProblem, spec: DeviceSpec, *, written: bool = True) -> float:
    """The estimate for one candidate, with the copies that it needs."""
    dtype = problem.accumulate.name if problem.compute == "fp64" else problem.dtype.name
    shape = (problem.batch, problem.m, problem.n, problem.k)
    seconds = estimate(spec, candidate.algorithm, candidate.arithmetic, dtype, shape, written=written)
    copied, copies = 0, 0
    if candidate.blas is not None:
        calls = candidate.blas
        copied, copies = copied_bytes(problem, calls), sum((calls.a.copied, calls.b.copied, calls.d.copied))
        seconds += (math.prod(calls.outer_shape) - 1) * _LAUNCH_S
    elif candidate.arithmetic == "fp16":
        from gemmserve_kernels.algorithms.wgmma.direct.gemm import copies as copies_of

        copied, copies = copies_of(problem)
    elif candidate.uniform:
        copied, copies = 2 * (problem.a.nbytes + problem.b.nbytes), 2
    return seconds + copied / _COPY_RATE + copies * _LAUNCH_S

"""Products through residues on INT8 tensor cores: Ozaki scheme II. The host side.

    scale    the norm of every row of op(A) and column of op(B), rounded up -> a scale of 3 bits and an exponent
    convert  elements times scales, exactly, rounded to integers -> residues, one byte for each modulus (two for complex
             numbers: see `moduli`); and how many elements of a line are large; nothing of lines that norms have told
             of, nor of what meets only such
    multiply residues modulo each p, exactly, in INT8 with 32-bit sums
    combine  Chinese remainders, exactly, one rounding, then alpha, beta and C
    tiles    those that the counts do not let pass: in double precision on tensor cores (`dmma`), or where operands are
             of single precision from three bfloat16 parts (`ozaki.wide`)

Source: K. Ozaki, Y. Uchino, T. Imamura, arXiv 2504.08009. Unlike there, the scale of a row depends on that row alone
(see `moduli`), so that a prepared operand serves any partner, and products are reduced before they are written.

What the counts promise of every element is a theorem (`ozaki.bound`); the device decides by it tile by tile, without a
look from the host, and makes those that do not pass another way, and only so.

Workspace: at most `plan.WORKSPACE` bytes for the residues of operands and products, or what the smallest panel
takes; larger problems go panel by panel, and any in `GemmConfig.strips`. Results do not depend on panels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np

from gemmserve_kernels.algorithms.common.prepared_operand import PreparedOperand, source_of
from gemmserve_kernels.algorithms.ozaki import wide
from gemmserve_kernels.algorithms.ozaki.bound import MOST_OUTLIERS, most_outliers
from gemmserve_kernels.algorithms.ozaki.lines import Lines, Prepared
from gemmserve_kernels.algorithms.ozaki.moduli import MAX_K, Moduli, available, needed
from gemmserve_kernels.algorithms.ozaki.plan import SHARED, OzakiTile, Run
from gemmserve_kernels.device.struct_params import StoredArray, launches, matrix_view, stored_operands
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_kernels.device.launch import Launcher
    from gemmserve_kernels.device.spec import DeviceSpec
    from gemmserve_kernels.problem.problem import GemmProblem


_SINGLE: Final = ("float32", "complex64")
_DTYPES: Final = (*_SINGLE, "float64", "complex128")
MIN_K: Final = 128
"""Shortest k of `auto`: from there on ordinary data pass (`ozaki.bound`)."""
AUTO_FROM: Final = {"complex64": 2048}
"""Extents m, n and k of products of single precision from which on `auto` may have them made of residues; of dtypes
that are not here never. Those of double precision have `MIN_K` alone."""


@dataclass(frozen=True)
class OzakiOperand:
    """A prepared operand: residues that serve any partner, and the array itself for what residues cannot do.

    `residues`: uint8 (matrices, moduli * parts, lines, pitch). `codes`: int32 (matrices, lines), the scales.
    `deficits`: uint32, what they lack (ozaki.lines.Deficits). `apart`: int32, where outliers are
    (ozaki.lines.Tally), `outliers` a line at most; None where that is 0.
    """

    arithmetics: ClassVar = frozenset({"ozaki"})
    """Arithmetics that take it in the place of the array."""

    array: Any
    side: Literal["a", "b"]
    trans: str
    planar: bool
    moduli: int
    outliers: int
    residues: Any
    codes: Any
    deficits: Any
    apart: Any | None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All that it holds beside the array."""
        return self.residues, self.codes, self.deficits, *(() if self.apart is None else (self.apart,))

    def with_arrays(self, source: Any, arrays: Sequence[Any]) -> OzakiOperand:
        """The same with other arrays, made of `source`."""
        residues, codes, deficits, *apart = arrays
        return replace(
            self, array=source, residues=residues, codes=codes, deficits=deficits, apart=apart[0] if apart else None
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory beside the array's own."""
        return sum(int(array.nbytes) for array in self.arrays)

    def serves(self, problem: GemmProblem, side: int, tile: OzakiTile) -> bool:
        """Whether it was prepared for this side of this product; otherwise `array` is used, to the same bits."""
        trans = (problem.trans_a, problem.trans_b)[side]
        wanted = ("ab"[side], trans, problem.planar, tile.moduli, tile.outliers)
        own = self.array.shape[1:-2] if problem.planar else self.array.shape[:-2]
        return (self.side, self.trans, self.planar, self.moduli, self.outliers) == wanted and (
            self.codes.shape[0] == 1 or tuple(own) == problem.batch_shape
        )


def supports(problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """Return why this algorithm cannot run the problem on the device, or None."""
    if not spec.has_wgmma:
        return f"it needs INT8 wgmma (compute capability 9.0), and {spec.name} is {spec.arch}"
    if problem.dtype.name not in _DTYPES:
        return f"there are no residues of {problem.dtype.name}"
    if any(operand.dtype != problem.a.dtype for operand in (problem.b, problem.c) if operand is not None):
        return "A, B and C must have one dtype"
    if problem.compute == "auto" and problem.k < MIN_K:
        return f"below k = {MIN_K} the rounding to integers shows beside {problem.dtype.name}'s own"
    if problem.compute == "auto" and problem.dtype.name in _SINGLE and (reason := _unfit_for_auto(problem, spec)):
        return reason
    if problem.k > MAX_K:
        return f"k is at most {MAX_K}"
    return None


def _unfit_for_auto(problem: GemmProblem, spec: DeviceSpec) -> str | None:
    """Return why `auto` has no residues for a product of single precision, or None."""
    least = AUTO_FROM.get(problem.dtype.name)
    if least is None:
        return f"auto has no residues of {problem.dtype.name}"
    if min(problem.m, problem.n, problem.k) < least:
        return f"auto has residues of {problem.dtype.name} from {least} x {least} x {least} on"
    if not wide.serves(problem, spec):
        return "tiles that residues do not serve have no planes"
    return None


@lru_cache(maxsize=1024)
def resolve(config: GemmConfig | None, problem: GemmProblem, spec: DeviceSpec) -> OzakiTile:
    """The number of moduli from the accuracy of the dtype and k, that of outliers from k, or as `config` has them.
    Raises ConfigInfeasible.
    """
    config = config or GemmConfig()
    config.only("ozaki", ("moduli", "stages", "raster", "cluster", "outliers", "strips"))
    moduli = config.moduli or needed(problem.k, problem.dtype)
    complex_ = problem.dtype.kind == "c"
    most = len(available(complex_=complex_))
    if not 2 <= moduli <= most:
        raise ConfigInfeasible(f"moduli: from 2 to {most}, not {moduli}")
    if Moduli.first(moduli, complex_=complex_).target(problem.k) < 1:
        raise ConfigInfeasible(f"moduli: {moduli} are too few for k = {problem.k}")
    outliers = most_outliers(problem.k, problem.dtype) if config.outliers is None else config.outliers
    if outliers > MOST_OUTLIERS:
        raise ConfigInfeasible(f"outliers: at most {MOST_OUTLIERS} a line, not {outliers}")
    tile = OzakiTile(moduli, config.stages or 4, config.raster or 8, config.cluster or 2, outliers, config.strips or 1)
    if tile.cluster > 2:
        raise ConfigInfeasible(f"cluster: the ozaki kernel has 1 and 2, not {tile.cluster}")
    if tile.shared + SHARED > spec.shared_per_block:
        raise ConfigInfeasible(f"shared memory: {tile.stages} stages do not fit {spec.shared_per_block} bytes")
    return tile


def run_gemm(
    launcher: Launcher,
    problem: GemmProblem,
    config: GemmConfig | OzakiTile | None,
    a: Any,
    b: Any,
    c: Any | None,
    out: Any,
) -> None:
    """Writes alpha op(a) op(b) + beta c into `out`, which overlaps no operand; `c` is not read where beta is 0.

    `a` and `b` are arrays, or what `prepare_operand` made of them for this side and transposition. Raises
    ConfigInfeasible, CompileError.
    """
    tile = config if isinstance(config, OzakiTile) else resolve(config, problem, launcher.spec)
    payloads = [x.payload if isinstance(x, PreparedOperand) else x for x in (a, b)]
    arrays = [x.array if isinstance(x, OzakiOperand) else source_of(y) for x, y in zip(payloads, (a, b), strict=True)]
    stored, bases = stored_operands(launcher, problem, arrays[0], arrays[1], c, out)
    prepared: list[Prepared | None] = []
    for side, x in enumerate(payloads):
        usable = isinstance(x, OzakiOperand) and x.serves(problem, side, tile)
        prepared.append(Prepared(x.residues, x.codes, x.deficits, x.apart) if usable else None)
    goes_wide = wide.serves(problem, launcher.spec)
    run = Run(launcher, problem, tile, stored, bases, (prepared[0], prepared[1]), keeps=goes_wide)
    run.run()
    if goes_wide:
        c = None if problem.beta == 0 else c
        wide.run(launcher, problem, tile.strips, tile.workspace, arrays[0], arrays[1], c, out, run.found)


def prepare_operand(
    launcher: Launcher,
    array: Any,
    side: Literal["a", "b"],
    trans: str = "N",
    *,
    planar: bool = False,
    moduli: int = 0,
    outliers: int | None = None,
) -> OzakiOperand:
    """Residues of op(array), (..., rows, columns) behind the planar axis, for any partner.

    `moduli`: as `needed` says where it is 0; `outliers`: as `most_outliers` says where it is None. `run_gemm` gives the
    same bits with them as without.
    """
    stored, base = StoredArray.of(launcher, array)
    shape = stored.shape[1:] if planar else stored.shape
    complex_ = planar or stored.dtype.kind == "c"
    view = matrix_view(stored, shape, planar=planar).shifted_by(base)
    view = view.transposed() if (trans in {"T", "C"}) != (side == "b") else view
    dtype = np.dtype(f"c{2 * stored.dtype.itemsize}") if planar else stored.dtype
    count = moduli or needed(view.columns, dtype)
    constants = Moduli.first(count, complex_=complex_)
    most = most_outliers(view.columns, dtype) if outliers is None else outliers
    lines = Lines(view, complex_, planar, trans in {"C", "R"}, constants, most)
    matrices = int(np.prod(shape[:-2], dtype=np.int64))
    codes = launcher.empty((matrices, view.rows), np.dtype(np.int32))
    residues = lines.empty(launcher, matrices, view.rows)
    tally = lines.tally(launcher, matrices)
    for first, batch_shape, (piece,) in launches(shape[:-2], [view]):
        here, count_here = replace(lines, view=piece), int(np.prod(batch_shape, dtype=np.int64))
        part_codes, part = codes[first : first + count_here], residues[first : first + count_here]
        here.scale(launcher, batch_shape, 0, part_codes, count_here, tally, first)
        here.convert(launcher, batch_shape, 0, part_codes, part, 0, view.rows, tally, first)
    deficits, apart = tally.deficits.array, tally.outliers
    return OzakiOperand(array, side, trans, planar, count, most, residues, codes, deficits, apart)

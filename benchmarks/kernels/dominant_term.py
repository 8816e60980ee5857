"""Errors of sums that one term dominates, in several ways, by a NumPy model of a Hopper tensor core; writes JSON.

    python benchmarks/kernels/dominant_term.py [--extent 256] [--output FILE]

Times nothing and needs no device. A tensor core aligns 16 products and the sum so far to the largest of them and cuts
what lies 25 bits below (`gemmserve_kernels.numerics.models`). Each way changes how complex64 products of two float16
parts leave it, or which data are given to it; beside the errors stands what it costs. Of each kind of data the worst
error of an element over (|A| |B|) is told in units of 2^-24, and the norm's error; of the last way also the share of
tiles that float16 planes still serve (`algorithms.common.verdict`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
from kernel_models import splits

from gemmserve_kernels.algorithms.common.verdict import most_deficit
from gemmserve_kernels.bench.elementwise import elementwise, limit
from gemmserve_kernels.bench.kinds import operands
from gemmserve_kernels.numerics import models

OUTPUT = Path(__file__).parents[2] / "docs" / "benchmarks" / "dominant-term-model.json"
K = 64
GRID = 13
"""Bits below a vector's largest power of two: products of two such first parts need no more than 26."""
LARGE = 11
"""Binary logarithm of the magnitude from which on elements would be large (common.verdict has 8)."""
UNIT = models.HOPPER
SERVED = ((64, 64), (64, 256), (256, 256))
"""k and extent of the tiles that are served or not: those of `fused`, and of planes."""


@dataclass(frozen=True)
class Way:
    """Sums leave the tensor core every `promote` steps of k, the two real products of a part in one sum or `apart`.

    `exactly`: promoted sums are added without rounding. `share`: units of the last place that are given back. `grid`:
    first parts are multiples of one number. `large`: see LARGE. `cost`: what it adds, in words.
    """

    name: str
    cost: str
    promote: int = 16
    apart: bool = False
    exactly: bool = False
    share: int | None = None
    grid: bool = False
    large: int = 8


WAYS = (
    Way("every 16 steps (`wgmma` up to a k of 512)", "-"),
    Way("every 32 steps (`fused` in batches)", "an addition in the place of two", promote=32),
    Way("every 64 steps", "an addition in the place of four", promote=64),
    Way("every 32 steps, the two real products apart", "registers for a second sum", promote=32, apart=True),
    Way("every 16 steps, compensated addition", "five additions more for each", exactly=True),
    Way("every 16 steps, three units given back", "none", share=3),
    Way("every 16 steps, first parts on a common grid", "two additions for each number that is split", grid=True),
    Way("every 16 steps, large from 2^11 on", "fewer data served by float16 planes", large=LARGE),
)


def dominated(rng, m, n, k, others):
    """The last of k terms outweighs those before it, whose factors lie within (1, 9/8] of `others`; one sign."""
    factors = np.full(k, others, np.float32)
    factors[-1] = 1 / 1.125

    def part(*shape):
        return 1 + rng.random(shape, np.float32) / 8

    a, b = (part(m, k) + 1j * part(m, k)) * factors, (part(k, n) + 1j * part(k, n)) * factors[:, None]
    return a.astype(np.complex64), b.astype(np.complex64)


def spiked(a, b):
    """A step of k at which A is 64 times as large, and B next to nothing."""
    a[:, 5] *= 64
    b[5] /= 2048
    return a, b


def data(extent, large):
    """Operands by name; those that one term dominates as much as planes are given."""
    rng = np.random.default_rng(1)
    shape = (extent, extent, K, "complex64", 1)
    yield (
        "dominant-term",
        operands(np, "dominant-term", *shape) if large == 8 else dominated(rng, *shape[:3], 2.0 ** (large - 15)),
    )
    for kind in ("positive", "exp-1n", "normal"):
        yield kind, operands(np, kind, *shape)
    yield "spike by nothing", spiked(*operands(np, "normal", *shape))


def planes(x, side, grid):
    """(parts, rows, k) and exponents: high parts of both numbers, then low ones."""
    split = splits.split(x, "3xfp16", side)
    if not grid:
        return split.planes.astype(np.float32), split.exponents
    parts = np.stack([np.ldexp(part, -split.exponents[:, None]) for part in (x.real, x.imag)])
    step = 2.0 ** (15 - GRID)
    on_grid = np.rint(parts / step) * step
    high = np.where(abs(on_grid) < step * 2**11, on_grid, parts.astype(np.float16)).astype(np.float32)
    return np.concatenate([high, (parts - high).astype(np.float16).astype(np.float32)]), split.exponents


def sums(x, y, way, *, imaginary):
    """The real or imaginary part, as float32: both products of a part in turns, small ones of low parts first."""

    def terms(i, j, sign):
        return [(np.float32(sign) * x[i + p], y[j + q]) for p, q in ((2, 0), (0, 2), (0, 0))]

    total = np.zeros((x.shape[1], y.shape[2]))
    for number, first in enumerate(range(0, K, way.promote)):
        i, j = (0, 1) if number % 2 == 0 else (1, 0)
        sign = 1 if imaginary or number % 2 == 0 else -1
        left, right = (terms(i, j, 1), terms(j, i, 1)) if imaginary else (terms(i, i, 1), terms(j, j, -1))
        together = [*left[:2], *right[:2], left[2], right[2]]
        here = slice(first, first + way.promote)
        for part in (left, right) if way.apart else (together,):
            total += sign * models.chain([(p[:, here], q[here]) for p, q in part], UNIT.fp16, UNIT)
            if not way.exactly:
                total = total.astype(np.float32).astype(np.float64)
    total = total.astype(np.float32)
    if way.share is None:
        return models.restored(total, models.accumulations(way.promote, 1 if way.apart else 2))
    more = (total.astype(np.float64) * (1 + way.share * 2.0**-24)).astype(np.float32)
    return np.where(total.view(np.uint32) & np.uint32(7), more, total)


def product(a, b, way):
    """A B, as that way has it."""
    x, rows = planes(a, "a", way.grid)
    y, columns = planes(np.ascontiguousarray(b.T), "b", way.grid)
    y = y.swapaxes(1, 2)
    found = sums(x, y, way, imaginary=False) + 1j * sums(x, y, way, imaginary=True)
    return models.times_powers(found.astype(np.complex64), rows[:, None] + columns)


def plain(a, b):
    """A B in float32, one multiply-add after the other."""
    parts = [np.zeros((len(a), b.shape[1]), np.float32) for _ in range(2)]
    for x, y in zip(a.T[:, :, None], b[:, None, :], strict=True):
        for part, pairs in enumerate((((x.real, y.real), (-x.imag, y.imag)), ((x.real, y.imag), (x.imag, y.real)))):
            for left, right in pairs:
                parts[part] = (parts[part] + left.astype(np.float64) * right).astype(np.float32)
    return parts[0] + 1j * parts[1]


def deficits(x, large, tile):
    """The largest counts in every tile of rows of x: of the better part, of the worse one, of losses."""
    largest = np.maximum(abs(x.real), abs(x.imag)).max(axis=1)
    scaled = [np.ldexp(abs(part), 15 - np.frexp(largest)[1][:, None]) for part in (x.real, x.imag)]
    below = [(part < 2.0**large).sum(axis=1) for part in scaled]
    losses = sum(((part > 0) & (part < 2.0**-4)).sum(axis=1) for part in scaled)
    return [c.reshape(-1, tile).max(axis=1) for c in (np.minimum(*below), np.maximum(*below), losses)]


def served(kind, k, tile, large, vectors=4096):
    """Share of tiles of which planes serve all elements."""
    a, b = operands(np, kind, vectors, vectors, k, "complex64", 1)
    left = [c[:, None] for c in deficits(a, large, tile)]
    right = [c[None] for c in deficits(np.ascontiguousarray(b.T), large, tile)]
    below = np.minimum(left[0] + right[1], left[1] + right[0])
    share = float((below + (left[2] + right[2] + 3) // 4 <= most_deficit(k)).mean())
    return {"kind": kind, "k": k, "tile": tile, "large": large, "share": float(f"{share:.4g}")}


def row(way, kind, a, b):
    """Errors of a way on one kind of data, beside those of plain float32."""
    made = {"model": product(a, b, way), "plain": plain(a, b)}
    found = {name: each.modulus for name, each in elementwise(np, a, b, made).items()}
    exact = a.astype(np.complex128) @ b
    norm = float(np.linalg.norm(made["model"] - exact) / np.linalg.norm(exact))
    return asdict(way) | {
        "kind": kind, "error": float(f"{found['model']:.4g}"), "plain": float(f"{found['plain']:.4g}"),
        "rule": float(f"{limit(found['plain']):.4g}"), "norm": float(f"{norm:.4g}"),
    }  # fmt: skip


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extent", type=int, default=256, help="m = n")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(argv)
    rows = [row(way, kind, a, b) for way in WAYS for kind, (a, b) in data(options.extent, way.large)]
    shares = [
        served(kind, k, tile, large)
        for kind, (k, tile), large in itertools.product(("normal", "exp-1n"), SERVED, (8, LARGE))
    ]
    for each in rows:
        print(f"{each['name']}; {each['kind']}: {each['error']:.3g} u, {each['rule']:.3g} allowed, {each['norm']:.2g}")
    for each in shares:
        print(" ".join(f"{name} {value}" for name, value in each.items()))
    lines, more = (",\n".join(map(json.dumps, each)) for each in (rows, shares))
    text = f'{{"extent": {options.extent}, "k": {K}, "rows": [\n{lines}\n], "served": [\n{more}\n]}}\n'
    options.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

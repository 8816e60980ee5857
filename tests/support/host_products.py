"""Random operands of every kind, and products of them that owe nothing to the code under test."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

DTYPES = ["float16", "float32", "float64", "complex64", "complex128"]
EXTENTS = [0, 1, 2, 3, 5, 8, 17]
VIEWS = ["C", "F", "gaps", "reversed", "broadcast"]


def op(x: np.ndarray, trans: str) -> np.ndarray:
    x = x.swapaxes(-1, -2) if trans in {"T", "C"} else x
    return x.conj() if trans in {"C", "R"} else x


def join(x: np.ndarray) -> np.ndarray:
    return x[0] + 1j * x[1].astype(x.dtype)


def widen(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, view: str = "C") -> np.ndarray:
    """Normal data of that shape, as a view of that kind."""
    dtype = np.dtype(dtype)
    x = rng.standard_normal(shape)
    if dtype.kind == "c":
        x = x + 1j * rng.standard_normal(shape)
    x = x.astype(dtype)
    if view == "F":
        return np.asfortranarray(x)
    if view == "gaps":
        return np.repeat(np.repeat(x, 2, axis=-1), 3, axis=-2)[..., ::3, ::2]
    if view == "reversed":
        return x[..., ::-1, ::-1]
    if view == "broadcast" and x.ndim > 2 and x.shape[-3]:
        return np.broadcast_to(x[..., :1, :, :], x.shape)
    return x


@dataclass
class Drawn:
    """Arguments of one product, and what it must be in double precision."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray | None
    options: dict[str, Any] = field(default_factory=dict)
    planar: bool = False

    @property
    def product(self) -> np.ndarray:
        """alpha op(A) op(B)."""
        a, b = (join(self.a), join(self.b)) if self.planar else (self.a, self.b)
        left, right = op(widen(a), self.options["trans_a"]), op(widen(b), self.options["trans_b"])
        return self.options["alpha"] * (left @ right)

    @property
    def expected(self) -> np.ndarray:
        """D."""
        if self.c is None:
            return self.product
        c = join(self.c) if self.planar else self.c
        return self.product + self.options["beta"] * widen(c)

    @property
    def dtype(self) -> np.dtype:
        """What NumPy would return for the operands."""
        arrays = [x for x in (self.a, self.b, self.c) if x is not None]
        return np.result_type(*((join(x) if self.planar else x).dtype for x in arrays))


@st.composite
def products(draw: st.DrawFn, *, with_c: bool = True) -> Drawn:
    """Any shapes, strides, dtypes, broadcasting, ops, layouts, alpha and beta."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    m, n, k = (draw(st.sampled_from(EXTENTS)) for _ in range(3))
    batch = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))
    planar = draw(st.sampled_from([False, False, False, True]))
    trans_a, trans_b = draw(st.sampled_from("NTCR")), draw(st.sampled_from("NTCR"))

    def operand(rows: int, columns: int, *, whole: bool = False) -> np.ndarray:
        outer = list(batch) if whole else [draw(st.sampled_from([1, extent])) for extent in batch]
        if not whole:
            outer = outer[draw(st.integers(0, len(outer))) :]
        dtype = draw(st.sampled_from(["float32", "float64"] if planar else DTYPES))
        shape = ((2,) if planar else ()) + (*outer, rows, columns)
        return array(rng, shape, dtype, draw(st.sampled_from(VIEWS)))

    a = operand(*((m, k) if trans_a in "NR" else (k, m)))
    b = operand(*((k, n) if trans_b in "NR" else (n, k)), whole=True)
    c = operand(m, n) if with_c and draw(st.booleans()) else None
    drawn = Drawn(a, b, c, planar=planar)
    imaginary = drawn.dtype.kind == "c" and draw(st.booleans())
    alpha = draw(st.sampled_from([1, -2.5, 0])) + (0.5j if imaginary else 0)
    drawn.options = {"alpha": alpha, "trans_a": trans_a, "trans_b": trans_b}
    drawn.options["layout"] = "planar" if planar else "interleaved"
    if with_c:
        beta = draw(st.sampled_from([0, 1, -0.5])) if c is not None else 0
        drawn.options |= {"beta": beta * (1 - 1j) if imaginary else beta, "order": draw(st.sampled_from("CF"))}
    return drawn


def assert_close(found: np.ndarray, expected: np.ndarray, dtype: Any, terms: int) -> None:
    """Within rounding of `terms` operations in `dtype`, relative to the largest element."""
    assert found.shape == expected.shape
    if not found.size:
        return
    tolerance = 4 * math.sqrt(terms + 8) * terms * float(np.finfo(dtype).eps) + 8 * float(np.finfo(dtype).eps)
    scale = max(1.0, float(np.abs(expected).max()))
    assert float(np.abs(found - expected).max()) <= tolerance * scale


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def on_device(x: np.ndarray) -> Any:
    """A CuPy array with the elements and the strides of `x`."""
    import cupy

    if not x.size:
        return cupy.empty(x.shape, x.dtype)
    item = x.dtype.itemsize
    lowest = [extent - 1 if stride < 0 else 0 for extent, stride in zip(x.shape, x.strides, strict=True)]
    corner = x[tuple(slice(i, i + 1) for i in lowest)]
    before = sum(i * -stride for i, stride in zip(lowest, x.strides, strict=True)) // item
    after = sum((extent - 1) * max(0, stride) for extent, stride in zip(x.shape, x.strides, strict=True)) // item
    memory = cupy.asarray(np.lib.stride_tricks.as_strided(corner, (before + after + 1,), (item,)))
    return cupy.ndarray(x.shape, x.dtype, memory.data + before * item, x.strides)

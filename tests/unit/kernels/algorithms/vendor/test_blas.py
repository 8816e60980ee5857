"""The calls that `lower` plans, run on a NumPy model of a column-major strided-batched BLAS over flat memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from host_products import array, assert_close, join, op
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmserve_kernels import GemmProblem, Operand
from gemmserve_kernels.algorithms.vendor.blas import BlasPlan, NotExpressible, copied_bytes, lower


class Memory:
    """An array's elements as a pointer sees them: index 0 is the array's first element, whatever its strides."""

    def __init__(self, x: np.ndarray) -> None:
        item = x.dtype.itemsize
        steps = [(extent - 1) * stride // item for extent, stride in zip(x.shape, x.strides, strict=True)]
        self.low = sum(step for step in steps if step < 0)
        high = sum(step for step in steps if step > 0)
        lowest = [extent - 1 if stride < 0 else 0 for extent, stride in zip(x.shape, x.strides, strict=True)]
        corner = x[tuple(slice(i, i + 1) for i in lowest)]  # a view: an index alone would copy the element
        self.flat = np.lib.stride_tricks.as_strided(corner, (high - self.low + 1,), (item,))

    def matrix(self, offset: int, rows: int, columns: int, leading: int) -> np.ndarray:
        """A column-major matrix; a read past the array's end is an error."""
        start = offset - self.low
        last = start + (columns - 1) * leading + rows - 1
        assert 0 <= start <= last < self.flat.size, "the call leaves the array"
        item = self.flat.itemsize
        return np.lib.stride_tricks.as_strided(self.flat[start:], (rows, columns), (item, leading * item))


def gemm_call(plan: BlasPlan, x, x_memory, x_offset, y, y_memory, y_offset, d_memory, d_offset, alpha, beta):
    """xGEMM, batched, with BLAS's checks of its arguments."""
    rows, columns = (plan.n, plan.m) if plan.swapped else (plan.m, plan.n)

    def stored(matrix, memory, offset, height, width):
        if matrix.trans != "N":
            height, width = width, height
        assert matrix.leading >= max(1, height), "leading dimension"
        return op(memory.matrix(offset, height, width, matrix.leading), matrix.trans)

    assert plan.d.leading >= max(1, rows)
    for i in range(plan.batch):
        left = stored(x, x_memory, x_offset + i * x.batch_stride, rows, plan.k)
        right = stored(y, y_memory, y_offset + i * y.batch_stride, plan.k, columns)
        d = d_memory.matrix(d_offset + i * plan.d.batch_stride, rows, columns, plan.d.leading)
        product = left.astype(np.complex128) @ right.astype(np.complex128)
        result = alpha * product + (beta * d if beta else 0)
        d[...] = result if d.dtype.kind == "c" else result.real


def run(problem: GemmProblem, plan: BlasPlan, a, b, c, out):
    """What vendor.py does, with the model for the BLAS."""
    planar = problem.planar

    def operand(x, trans, copied):
        if not copied:
            return x
        return np.ascontiguousarray(op(join(x) if planar else x, trans)).astype(plan.dtype)

    a, b = operand(a, problem.trans_a, plan.a.copied), operand(b, problem.trans_b, plan.b.copied)
    d = np.empty((*problem.batch_shape, problem.m, problem.n), plan.dtype) if plan.d.copied else out
    if c is not None and problem.beta:
        d[...] = join(c) if planar else c
    for offset_a, offset_b, offset_d in plan.offsets():
        left, right = (plan.a, Memory(a), offset_a), (plan.b, Memory(b), offset_b)
        if plan.swapped:
            left, right = right, left
        gemm_call(plan, *left, *right, Memory(d), offset_d, problem.alpha, problem.beta)
    if plan.d.copied and planar:
        out[0], out[1] = d.real, d.imag
    elif plan.d.copied:
        out[...] = d.astype(out.dtype)


VIEWS = ["C", "F", "row gaps", "column gaps", "gaps", "reversed", "broadcast", "batch inside"]


def stored_as(x: np.ndarray, view: str) -> np.ndarray:
    """The same elements in another arrangement."""
    if view == "F":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if view == "row gaps":
        return np.repeat(x, 2, axis=-2)[..., ::2, :]
    if view == "column gaps":
        return stored_as(stored_as(x.swapaxes(-1, -2), "row gaps"), "C").swapaxes(-1, -2)
    if view == "gaps":
        return np.repeat(x, 2, axis=-1)[..., ::2]
    if view == "reversed":
        return np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :]
    if view == "broadcast" and x.ndim > 2:
        return np.broadcast_to(x[..., :1, :, :], x.shape)
    if view == "batch inside" and x.ndim > 2:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -2)), -2, 0)
    return x


def check(rng, dtype, batches, sizes, trans, views, *, layout="interleaved", beta=0, compute="auto") -> BlasPlan:
    m, n, k = sizes
    planar = layout == "planar"
    outer = (2,) if planar else ()
    shape_a = (m, k) if trans[0] in "NR" else (k, m)
    shape_b = (k, n) if trans[1] in "NR" else (n, k)
    a = stored_as(array(rng, (*outer, *batches[0], *shape_a), dtype[0]), views[0])
    b = stored_as(array(rng, (*outer, *batches[1], *shape_b), dtype[1]), views[1])
    c = array(rng, (*outer, m, n), dtype[1]) if beta else None
    problem = GemmProblem.build(
        Operand.of(a), Operand.of(b), Operand.of(c) if beta else None,
        trans_a=trans[0], trans_b=trans[1], beta=beta, alpha=1.5, layout=layout, compute=compute,
    )  # fmt: skip
    out = stored_as(np.zeros(problem.result_shape, problem.result_dtype), views[2])
    if view_overlaps(out):
        out = np.zeros(problem.result_shape, problem.result_dtype)
    plan = lower(problem, Operand.of(out))
    run(problem, plan, a, b, c, out)
    full = [join(x) if planar else x for x in (a, b)]
    expected = 1.5 * (op(full[0], trans[0]).astype("c16") @ op(full[1], trans[1]).astype("c16"))
    if beta:
        expected = expected + beta * (join(c) if planar else c)
    assert_close(join(out) if planar else out, expected, problem.dtype, 4 * k + 8)
    return plan


def view_overlaps(x: np.ndarray) -> bool:
    return any(stride == 0 and extent > 1 for stride, extent in zip(x.strides, x.shape, strict=True))


@pytest.mark.parametrize("trans", ["".join(pair) for pair in itertools.product("NTCR", repeat=2)])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_every_storage_of_every_operand(trans, dtype):
    """All combinations of op and storage: what BLAS can express is not copied, what it cannot is."""
    rng = np.random.default_rng(0)
    for views in itertools.product(["C", "F", "row gaps", "gaps"], repeat=3):
        plan = check(rng, (dtype, dtype), ((), ()), (5, 4, 3), trans, views)
        for matrix, letter, view in ((plan.a, trans[0], views[0]), (plan.b, trans[1], views[1])):
            row_major = view in {"C", "row gaps"}
            if view == "gaps":
                assert matrix.copied
            elif dtype == "float32" or letter in "NT":
                assert not matrix.copied
            else:
                # In a row-major product "C" is conj(stored^T): the stored rows, conjugated alone.
                assert matrix.copied == ((letter == "R") == (row_major == plan.swapped))
        assert plan.d.copied == (views[2] == "gaps")


@settings(max_examples=400)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([("f4", "f4"), ("c8", "c8"), ("f8", "c8"), ("f2", "f2"), ("c16", "c16")]),
    st.sampled_from(
        [((), ()), ((3,), ()), ((), (3,)), ((3,), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((2, 3), (2, 3))]
    ),
    st.tuples(*[st.sampled_from([1, 2, 3, 5, 8])] * 3),
    st.tuples(*[st.sampled_from("NTCR")] * 2),
    st.tuples(*[st.sampled_from(VIEWS)] * 3),
    st.sampled_from([0, 1, -0.5]),
)
def test_batches_vectors_and_mixed_dtypes(seed, dtypes, batches, sizes, trans, views, beta):
    try:
        plan = check(np.random.default_rng(seed), dtypes, batches, sizes, trans, views, beta=beta)
    except NotExpressible as reason:
        assert dtypes == ("f2", "f2") or "backwards" in str(reason)  # noqa: PT017 (the others must not raise)
        return
    if dtypes == ("f2", "f2"):
        strides = [s for x in (plan.a, plan.b, plan.d) for s in (x.batch_stride, *x.outer_strides)]
        assert not any(stride % 8 for stride in strides)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.tuples(*[st.sampled_from("NTCR")] * 2), st.sampled_from([0, 1 + 1j]))
def test_planar_operands_are_joined(seed, trans, beta):
    rng = np.random.default_rng(seed)
    plan = check(rng, ("f4", "f4"), ((), ()), (3, 4, 5), trans, ["C"] * 3, layout="planar", beta=beta)
    assert plan.a.copied
    assert plan.b.copied
    assert plan.d.copied


def test_fp64_on_single_data_multiplies_copies():
    plan = check(np.random.default_rng(0), ("c8", "c8"), ((), ()), (3, 4, 5), "NN", ["C"] * 3, compute="fp64")
    assert plan.dtype == np.complex128


def problem(m, n, k, *, batch=(), dtype="complex64", **options) -> GemmProblem:
    a = Operand.contiguous((*batch, m, k), dtype)
    return GemmProblem.build(a, Operand.contiguous((*batch, k, n), dtype), **options)


def test_contiguous_batches_are_one_call():
    plan = lower(problem(4, 5, 6, batch=(2, 3, 7)))
    assert (plan.outer_shape, plan.batch, plan.a.batch_stride, plan.d.batch_stride) == ((), 42, 24, 20)


def test_broadcast_has_batch_stride_0():
    a, b = Operand.contiguous((9, 4, 6), "f4"), Operand.contiguous((6, 5), "f4")
    assert lower(GemmProblem.build(a, b)).b.batch_stride == 0


def test_the_longest_axis_is_the_batch_of_a_call():
    a = Operand((1000, 2, 4, 6), np.dtype("f4"), (24, 24 * 2000, 6, 1))
    plan = lower(GemmProblem.build(a, Operand.contiguous((1000, 2, 6, 5), "f4")))
    assert (plan.outer_shape, plan.batch) == ((2,), 1000)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (problem(0, 4, 5), "empty"),
        (problem(3, 4, 0), "empty"),
        (problem(3, 4, 5, alpha=0), "alpha"),
        (problem(2**31, 1, 1, dtype="float32"), "32 bits"),
        (problem(3, 3, 3, batch=(4,), dtype="float16"), "aligned"),
    ],
)
def test_what_a_blas_cannot_do(case, reason):
    with pytest.raises(NotExpressible, match=reason):
        lower(case)


def test_too_many_calls():
    a = Operand((50, 50, 4, 6), np.dtype("f4"), (24, 24 * 2000, 6, 1))
    with pytest.raises(NotExpressible, match="50 calls"):
        lower(GemmProblem.build(a, Operand.contiguous((50, 50, 6, 5), "f4")))


def test_bytes_that_are_copied():
    case = problem(10, 20, 30, trans_a="R", batch=(2,))
    assert copied_bytes(case, lower(case)) == 2 * 2 * 300 * 8
    plain = problem(10, 20, 30)
    assert copied_bytes(plain, lower(plain)) == 0
    gaps = Operand((10, 20), np.dtype("c8"), (80, 2))
    assert copied_bytes(plain, lower(plain, gaps)) == 2 * 200 * 8

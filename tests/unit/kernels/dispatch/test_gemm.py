"""gemm on the CPU against NumPy in double precision."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from host_products import array, assert_close, join, op, products
from hypothesis import given, settings

from gemmserve_kernels import (
    ComputeUnsupported,
    ConfigInfeasible,
    DtypeUnsupported,
    GemmConfig,
    ParameterInvalid,
    ShapeMismatch,
    gemm,
)
from gemmserve_kernels.algorithms.cpu import gemm as cpu

SMALL = 512
"""Bytes of a block in tests of blocking: every loop then runs more than once."""


@pytest.fixture
def rng():
    return np.random.default_rng(1)


@pytest.fixture
def tiny_blocks(monkeypatch):
    monkeypatch.setattr(cpu, "BLOCK_BYTES", SMALL)
    monkeypatch.setattr(cpu, "_CACHED_BYTES", SMALL // 2)


def check(drawn):
    d = gemm(drawn.a, drawn.b, drawn.c, **drawn.options)
    expected = drawn.expected
    order = drawn.options["order"]
    assert d.flags.c_contiguous if order == "C" else d.flags.f_contiguous
    found = join(d) if drawn.planar else d
    assert found.dtype == drawn.dtype
    terms = drawn.a.shape[-1] + drawn.a.shape[-2]
    assert_close(found, expected, drawn.dtype, terms)
    out = np.repeat(np.full_like(d, np.nan), 2, axis=-1)[..., ::2]
    assert gemm(drawn.a, drawn.b, drawn.c, out=out, **drawn.options) is out
    assert_close(join(out) if drawn.planar else out, expected, drawn.dtype, terms)


@settings(max_examples=400)
@given(products())
def test_everything_against_numpy(drawn):
    check(drawn)


@pytest.mark.usefixtures("tiny_blocks")
class TestBlocks:
    """The same with blocks of a few elements."""

    def test_everything_against_numpy(self):
        settings(max_examples=400)(given(products())(check))()

    def test_blocks_are_bounded_and_cover_the_product(self, rng):
        a, b = array(rng, (2, 37, 11), "f2"), array(rng, (2, 11, 29), "f2")
        from gemmserve_kernels import GemmProblem, Operand

        product = cpu.Product(GemmProblem.build(Operand.of(a), Operand.of(b)), a, b)
        seen = np.zeros((2, 37, 29), int)
        for block in product.blocks(SMALL):
            assert seen[block].size * 4 <= SMALL
            seen[block] += 1
        assert (seen == 1).all()


def test_one_call_where_blas_can(monkeypatch, rng):
    a, b = array(rng, (64, 48), "c8"), array(rng, (48, 32), "c8")
    calls = []
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda *args, **kwargs: calls.append(args) or matmul(*args, **kwargs))
    out = np.empty((64, 32), "c8")
    gemm(a, b, out=out)
    assert len(calls) == 1
    assert calls[0][0] is not None
    assert np.shares_memory(calls[0][0], a)
    assert np.shares_memory(calls[0][1], b)


@pytest.mark.parametrize("trans_a", "NTCR")
@pytest.mark.parametrize("trans_b", "NTCR")
@pytest.mark.parametrize("dtypes", [("c8", "c8"), ("f4", "c8"), ("c16", "f4")])
def test_conjugations(rng, trans_a, trans_b, dtypes):
    a, b = array(rng, (6, 6), dtypes[0]), array(rng, (6, 6), dtypes[1])
    expected = op(a, trans_a) @ op(b, trans_b)
    assert_close(gemm(a, b, trans_a=trans_a, trans_b=trans_b), expected, expected.dtype, 12)


def test_c_is_not_read_where_beta_is_0(rng):
    a, b = array(rng, (3, 4), "f4"), array(rng, (4, 5), "f4")
    c = np.full((3, 5), np.nan, "f4")
    assert np.array_equal(gemm(a, b, c, beta=0), gemm(a, b))


def test_k_0_gives_beta_c(rng):
    c = array(rng, (3, 5), "c8")
    a, b = np.empty((3, 0), "c8"), np.empty((0, 5), "c8")
    assert np.array_equal(gemm(a, b, c, beta=2), 2 * c)
    assert not gemm(a, b).any()


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_results(shape):
    batch, m, n = shape
    assert gemm(np.ones((batch, m, 2), "f4"), np.ones((2, n), "f4")).shape == shape


def test_alpha_0_still_multiplies():
    """BLAS would skip the product and hide its NaN."""
    a = np.array([[np.nan, 1.0]])
    assert np.isnan(gemm(a, np.ones((2, 2)), alpha=0)).all()


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_non_finite_elements_spread_as_in_numpy(rng, dtype):
    a, b = array(rng, (9, 7), dtype), array(rng, (7, 8), dtype)
    a[2, 3], a[5, 0], b[1, 6] = np.inf, np.nan, -np.inf
    with np.errstate(all="ignore"):
        expected = a @ b
    for trans in "NC":
        stored = a if trans == "N" else np.ascontiguousarray(a.conj().T)
        assert np.array_equal(np.isfinite(gemm(stored, b, trans_a=trans)), np.isfinite(expected))


def test_float16_accumulates_in_float32():
    a, b = np.full((1, 4096), 1, "f2"), np.full((4096, 1), 0.125, "f2")
    assert gemm(a, b)[0, 0] == 512
    assert np.isinf(gemm(np.full((1, 2), 60000, "f2"), np.ones((2, 1), "f2")))[0, 0]
    assert gemm(np.full((1, 2), 60000, "f2"), np.ones((2, 1), "f2"), alpha=0.25)[0, 0] == 30000


def test_fp64_on_single_data_is_rounded_once(rng):
    a, b = array(rng, (20, 500), "c8"), array(rng, (500, 20), "c8")
    d = gemm(a, b, compute="fp64")
    assert d.dtype == np.complex64
    assert np.array_equal(d, (a.astype("c16") @ b.astype("c16")).astype("c8"))


def test_big_endian_unaligned_and_structured_operands(rng):
    a, b = array(rng, (3, 4), "f4"), array(rng, (4, 5), "f4")
    expected = a @ b
    assert np.allclose(gemm(a.astype(">f4"), b), expected)
    unaligned = np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view("f4").reshape(3, 4)
    assert np.allclose(gemm(unaligned, b), expected)
    fields = np.zeros((4, 5), [("flag", "i1"), ("x", "<f4")])
    fields["x"] = b
    assert np.allclose(gemm(a, fields["x"]), expected)


def test_huge_operands_as_views():
    """2^40 elements of A and B that are one element each: only blocks of them are ever copied."""
    one = np.ones((1, 1), "f4")
    a, b = np.broadcast_to(one, (4, 1 << 22)), np.broadcast_to(one, (1 << 22, 2))
    assert (gemm(a, b) == 1 << 22).all()
    outer = np.broadcast_to(one, (1 << 20, 1 << 20))
    assert gemm(outer[:2], outer[:, :2]).shape == (2, 2)


def test_results_are_the_same_bit_for_bit(rng):
    a, b, c = array(rng, (65, 300), "c8"), array(rng, (300, 70), "c8"), array(rng, (65, 70), "c8")
    first = gemm(a, b, c, alpha=1.5, beta=0.5j, trans_a="R")
    assert all(gemm(a, b, c, alpha=1.5, beta=0.5j, trans_a="R").tobytes() == first.tobytes() for _ in range(3))


def test_out_may_overlap_an_operand(rng):
    a, b = array(rng, (6, 6), "f8"), array(rng, (6, 6), "f8")
    expected = a @ b + a
    assert gemm(a, b, a, beta=1, out=a) is a
    assert np.allclose(a, expected)


@pytest.mark.parametrize(
    "out",
    [
        np.empty((3, 4), "f4"),
        np.empty((3, 5), "f8"),
        np.broadcast_to(np.empty((1, 5), "f4"), (3, 5)),
        np.empty((3, 5), ">f4"),
    ],
)
def test_out_that_cannot_take_the_result(rng, out):
    with pytest.raises(ParameterInvalid, match="out"):
        gemm(array(rng, (3, 4), "f4"), array(rng, (4, 5), "f4"), out=out)


def test_out_must_be_writeable(rng):
    out = np.empty((3, 5), "f4")
    out.flags.writeable = False
    with pytest.raises(ParameterInvalid, match="writeable"):
        gemm(array(rng, (3, 4), "f4"), array(rng, (4, 5), "f4"), out=out)


def test_bad_requests_are_typed():
    a, b = np.ones((3, 4), "f4"), np.ones((4, 5), "f4")
    with pytest.raises(ShapeMismatch):
        gemm(a, a)
    with pytest.raises(DtypeUnsupported):
        gemm(a.astype("i4"), b)
    with pytest.raises(ComputeUnsupported) as error:
        gemm(a, b, compute="tf32")
    assert error.value.available == ["auto", "fp32", "fp64"]
    with pytest.raises(ConfigInfeasible):
        gemm(a, b, config=GemmConfig(algorithm="simt"))
    with pytest.raises(ConfigInfeasible):
        gemm(a, b, config=GemmConfig(block_m=64))


def test_lists_are_arrays_too():
    assert gemm([[1.0, 2.0]], [[3.0], [4.0]]).tolist() == [[11.0]]


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("shape", [(64, 64, 64), (1, 7, 5), (33, 1, 9), (40, 130, 3)])
def test_what_is_one_call_of_the_blas_has_the_bits_of_the_longer_way(rng, monkeypatch, dtype, shape):
    m, k, n = shape
    calls = []
    one_call = cpu._is_one_call
    monkeypatch.setattr(cpu, "_is_one_call", lambda *args: calls.append(one_call(*args)) or calls[-1])
    for trans_a, trans_b, order in itertools.product("NT", "NT", "CF"):
        a = array(rng, (m, k) if trans_a == "N" else (k, m), dtype)
        b = np.asfortranarray(array(rng, (k, n) if trans_b == "N" else (n, k), dtype))
        options = {"trans_a": trans_a, "trans_b": trans_b, "order": order}
        short = gemm(a, b, **options)
        assert calls[-1]
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "_is_one_call", lambda *_: False)
            long = gemm(a, b, **options)
        assert short.tobytes() == long.tobytes()
        assert short.flags.c_contiguous == long.flags.c_contiguous

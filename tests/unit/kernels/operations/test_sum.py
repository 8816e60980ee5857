"""Sums over axes beside exact sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from linalg_cases import random, run

from gemmserve_kernels import Operand, ParameterInvalid, ShapeMismatch
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_kernels.operations import sum as sums
from gemmserve_kernels.operations.sum import Sum


@given(
    shape=array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
    dtype=st.sampled_from(["f2", "f4", "f8", "c8", "c16"]),
    alpha=st.sampled_from([1, -0.5, 2j]),
    data=st.data(),
    limit=st.sampled_from([1, 7, 1 << 22]),
)
def test_sums(shape, dtype, alpha, data, limit):
    axes = (
        data.draw(st.lists(st.sampled_from(range(-len(shape), len(shape))), unique_by=lambda i: i % len(shape)))
        if shape
        else []
    )
    a = random(np.random.default_rng(data.draw(st.integers(0, 99))), shape, dtype)
    a = a.transpose(data.draw(st.permutations(range(len(shape)))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "_HOST_ELEMENTS", limit)
        _, made, found = run(Sum, {"a": a}, axes=axes, alpha=alpha)
    over = tuple(axes)
    expected = alpha * a.astype("c16").sum(axis=over) if axes else alpha * a.astype("c16")
    size = np.abs(alpha) * (np.abs(a.astype("c16")).sum(axis=over) if axes else np.abs(a).astype("f8"))
    assert made.shape == expected.shape
    assert made.dtype == (np.result_type(a, np.complex64) if alpha == 2j else a.dtype)
    terms = a.size // max(made.size, 1)
    unit = np.finfo("f4" if dtype == "f2" else dtype).eps
    bound = (terms + 4) * unit * size + np.finfo(made.dtype).eps * np.abs(expected) + np.finfo(dtype).tiny
    assert np.all(np.abs(made - expected) <= bound)
    assert not found.excess > 8


def test_a_wrong_sum_is_found():
    a = np.random.default_rng(1).standard_normal((50, 8))
    operation, made, _ = run(Sum, {"a": a}, axes=[0])
    made += 1e-6
    assert operation.find({"a": a}, {"d": made}, 5).excess > 1e3


def test_a_check_reads_the_terms_of_a_sum_once(monkeypatch):
    """Sixteen samples were taken of a single sum."""
    monkeypatch.setattr(sums, "_HOST_ELEMENTS", 10)
    a = np.ones(80)
    operation, made, _ = run(Sum, {"a": a}, axes=[0])
    looks = []
    with interruptible(lambda: looks.append(1)):
        assert operation.find({"a": a}, {"d": made}, 5).residual == 0
    assert len(looks) == 8


def test_float16_is_summed_wider():
    _, made, _ = run(Sum, {"a": np.full(4096, 0.25, "f2")}, axes=[0])
    assert made == 1024
    assert made.dtype == np.float16


@pytest.mark.parametrize(("axes", "error"), [([2], ShapeMismatch), ([0, -2], ParameterInvalid), ([-3], ShapeMismatch)])
def test_axes_that_there_are_not(axes, error):
    with pytest.raises(error):
        Sum.build(a=Operand.contiguous((2, 3), "f8"), axes=axes)

"""How a device would run what comes again and again: worked out once, whatever else is asked in between."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve_kernels import DeviceSpec, GemmConfig, KernelError, Operand
from gemmserve_kernels.problem.errors import ComputeUnsupported, ShapeMismatch
from gemmserve_service import products
from gemmserve_service.scheduling import tasks
from gemmserve_service.schemas import GemmParams, GemmReduceParams

CPU = DeviceSpec.cpu()


def stored(*shape, dtype="complex64", order="C"):
    return SimpleNamespace(shape=shape, dtype=dtype, order=order)


@pytest.fixture
def counted(monkeypatch):
    """Every plan that is made."""
    made = []
    plan = tasks.plan_problem

    def count(problem, spec):
        made.append(problem)
        return plan(problem, spec)

    monkeypatch.setattr(tasks, "plan_problem", count)
    tasks._plan.cache_clear()
    yield made
    tasks._plan.cache_clear()


def test_the_same_product_is_planned_once_and_another_for_itself(counted):
    def problem(m):
        return products.build(GemmParams(), {name: Operand.contiguous((m, m), np.dtype("c8")) for name in "ab"})

    first = tasks.plan_of(problem(7), CPU)
    assert tasks.plan_of(problem(7), CPU) is first
    assert len(counted) == 1
    tasks.plan_of(problem(8), CPU)
    assert len(counted) == 2


def test_what_a_device_lacks_is_said_anew_each_time(counted):
    """An error that is raised keeps where it was raised: one for all would grow with each."""
    params = GemmParams(compute="ozaki")
    problem = products.build(params, {name: Operand.contiguous((4, 4), np.dtype("f8")) for name in "ab"})
    first, second = tasks.plan_of(problem, CPU), tasks.plan_of(problem, CPU)
    assert isinstance(first, KernelError)
    assert isinstance(second, ComputeUnsupported)
    assert first is not second


@pytest.mark.parametrize(
    ("params", "other"),
    [
        (GemmParams(alpha=2), GemmParams(alpha=3)),
        (GemmParams(), GemmParams(trans_b="T")),
        (GemmReduceParams(reduce=["sum", "max"], pre_op="abs"), GemmReduceParams(reduce=["sum"], pre_op="abs")),
    ],
)
def test_stored_operands_and_what_is_asked_make_the_problem(params, other):
    arrays = {"a": stored(5, 5), "b": stored(5, 5)}

    def plainly(params, arrays):
        return products.build(params, {name: products.operand_of(each) for name, each in arrays.items()})

    for asked in (params, other, params):
        assert products.build_stored(asked, arrays) == plainly(asked, arrays)
    for b in (stored(5, 5, dtype="float32"), stored(5, 5, order="F"), stored(5, 6)):
        changed = {"a": stored(5, 5), "b": b}
        try:
            expected = plainly(params, changed)
        except ShapeMismatch:
            with pytest.raises(ShapeMismatch):
                products.build_stored(params, changed)
            continue
        found = products.build_stored(params, changed)
        assert found == expected
        assert found.b == expected.b


def test_a_zero_has_no_sign():
    """Params that are equal share plans and forms: what is computed must not depend on who came first."""
    negative, zero = GemmParams(alpha=-0.0, beta=complex(-0.0, -0.0)), GemmParams(alpha=0.0, beta=0.0)
    assert negative == zero
    for value in (negative.alpha.real, negative.alpha.imag, negative.beta.real, negative.beta.imag):
        assert not np.signbit(value)
    problem = products.build(
        GemmParams(alpha=[-0.0, -0.0]), {name: Operand.contiguous((2, 2), np.dtype("c8")) for name in "ab"}
    )
    assert not np.signbit(problem.alpha.real)
    assert not np.signbit(problem.alpha.imag)


def test_none_is_a_number_of_outliers():
    """What asks for the bits without them: 0 is not left out on the way to the kernels."""
    params = GemmParams.model_validate({"config": {"algorithm": "ozaki", "outliers": 0}})
    problem = products.build(params, {name: Operand.contiguous((2, 2), np.dtype("c16")) for name in "ab"})
    assert problem.config == GemmConfig(algorithm="ozaki", outliers=0)
    for count in (-1, 65):
        with pytest.raises(ValueError, match="outliers"):
            GemmParams.model_validate({"config": {"outliers": count}})

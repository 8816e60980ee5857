"""Keyword arguments become JSON, flags become letters, and shapes that cannot fit never leave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemmserve
from gemmserve._calls import params

OPS = {"N": lambda x: x, "T": lambda x: x.swapaxes(-1, -2), "C": lambda x: x.conj().swapaxes(-1, -2), "R": np.conj}


@pytest.mark.parametrize("trans", "NTCR")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("conjugated", [False, True])
def test_flags_compose_with_letters(trans, transposed, conjugated, random_complex) -> None:
    stored = random_complex(2, 3, 4)
    view = stored.swapaxes(-1, -2) if transposed else stored
    view = view.conj() if conjugated else view
    letter = params.compose(trans, transposed=transposed, conjugated=conjugated)
    np.testing.assert_array_equal(OPS[letter](stored), OPS[trans](view))


@pytest.mark.parametrize("trans", ["n", "H", "", None, 3, ["T"]])
def test_other_letters_are_refused(trans) -> None:
    with pytest.raises(gemmserve.ParameterInvalid):
        params.compose(trans, transposed=False, conjugated=False)


def test_defaults_stay_at_home() -> None:
    defaults = {"alpha": 1, "beta": None, "trans_a": "N", "compute": "auto", "config": None, "order": "C"}
    assert params.to_json(defaults) == {}


def test_what_is_said_is_sent() -> None:
    @dataclass
    class Config:
        block_m: int | None = 128
        block_n: int | None = None

    encoded = params.to_json(
        {
            "alpha": np.complex64(1 + 2j),
            "beta": np.float32(0.5),
            "config": Config(),
            "reduce": ("sum", "max"),
            "axis": ["m"],
        }
    )
    assert encoded == {
        "alpha": [1.0, 2.0], "beta": 0.5, "config": {"block_m": 128}, "reduce": ["sum", "max"], "axis": ["m"],
    }  # fmt: skip
    assert params.to_json({"config": {"stages": 3}}) == {"config": {"stages": 3}}


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), complex(0, float("nan")), "x", "2", None, np.eye(2), 10**400]
)
def test_scalars_are_finite_numbers(value) -> None:
    with pytest.raises(gemmserve.ParameterInvalid) as caught:
        params.to_json({"alpha": value})
    assert caught.value.parameter == "alpha"


@pytest.mark.parametrize("config", [3, "fast", object])
def test_a_config_is_a_mapping(config) -> None:
    with pytest.raises(gemmserve.ParameterInvalid):
        params.to_json({"config": config})


SHAPES = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


@given(SHAPES, SHAPES, st.sampled_from("NT"), st.sampled_from("NT"))
def test_shapes_are_judged_as_matmul_judges_them(a, b, trans_a, trans_b) -> None:
    try:
        params.check_shapes(a, b, trans_a=trans_a, trans_b=trans_b, layout="interleaved")
    except gemmserve.ShapeMismatch:
        fits = False
    else:
        fits = True
    if min(len(a), len(b)) < 2:
        assert not fits
        return
    try:
        OPS[trans_a](np.zeros(a)) @ OPS[trans_b](np.zeros(b))
    except ValueError:
        assert not fits
    else:
        assert fits


@pytest.mark.parametrize(
    ("c", "fits"),
    [((3, 4), True), ((5, 3, 4), True), ((1, 4), True), ((4,), True), ((2, 3, 4), False), ((3, 5), False)],
)
def test_c_broadcasts_to_the_result(c, fits) -> None:
    def check() -> None:
        params.check_shapes((5, 3, 2), (2, 4), c, trans_a="N", trans_b="N", layout="interleaved")

    if fits:
        check()
    else:
        with pytest.raises(gemmserve.ShapeMismatch):
            check()


def test_planar_operands_have_a_leading_two() -> None:
    params.check_shapes((2, 7, 3, 4), (2, 4, 5), (2, 3, 5), trans_a="N", trans_b="N", layout="planar")
    for a in ((3, 4), (3, 3, 4), (2, 4)):
        with pytest.raises(gemmserve.ShapeMismatch):
            params.check_shapes(a, (2, 4, 5), trans_a="N", trans_b="N", layout="planar")


def test_the_message_names_both_extents() -> None:
    with pytest.raises(gemmserve.ShapeMismatch, match=r"12 x 20.*12 x 20.*20 is not 12"):
        params.check_shapes((12, 20), (12, 20), trans_a="N", trans_b="N", layout="interleaved")


@pytest.mark.parametrize(("name", "value"), [("axis", 0), ("reduce", None), ("axis", 1.5)])
def test_names_that_are_none(name, value):
    with pytest.raises(
        gemmserve.ParameterInvalid, match=rf"^{name} is a name, as .*, or a list of names, not {value}$"
    ):
        params.to_json({name: value})

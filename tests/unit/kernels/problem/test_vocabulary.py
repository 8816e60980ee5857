"""Each list of words once: what the device code and the client have of their own agrees with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import gemmserve_kernels
from gemmserve._calls import params
from gemmserve_kernels.algorithms.common.splits import SCHEMES, Scheme
from gemmserve_kernels.algorithms.common.verdict import TILES
from gemmserve_kernels.algorithms.wgmma import plan
from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_kernels.problem import vocabulary

CUDA = Path(gemmserve_kernels.__file__).parent / "cuda"


def enum(file: str, name: str) -> list[str]:
    """The names of a C enumeration, in their order."""
    (body,) = re.findall(rf"enum {name}\b[^{{]*{{([^}}]*)}}", (CUDA / file).read_text())
    return [word.strip().lower() for word in body.split(",") if word.strip()]


@pytest.mark.parametrize(
    ("file", "name", "words"),
    [
        ("epilogue/reductions.cuh", "Kind", (*vocabulary.PARTIAL_KINDS, "mean")),
        ("epilogue/pre_op.cuh", "PreOp", vocabulary.PRE_OPS),
        ("mma/round.cuh", "Rounding", vocabulary.ROUNDINGS),
        ("common/judging/verdict.cuh", "Tiles", [f"tiles_{word or 'all'}" for word in TILES]),
        ("wgmma/kernel.cuh", "Scheme", [f"scheme_{word.replace('-', '_')}" for word in plan._SCHEMES]),
    ],
)
def test_enumerations_of_the_device_code(file, name, words):
    assert enum(file, name) == list(words)


def test_numbers_of_the_device_code_are_positions():
    for numbers in (TILES, plan._SCHEMES):
        assert list(numbers.values()) == list(range(len(numbers)))


def test_every_reduction_has_its_partials():
    assert {*vocabulary.PARTIAL_KINDS, "mean"} == set(vocabulary.REDUCTIONS)


@pytest.mark.parametrize("name", ["Trans", "Order", "Layout", "Compute", "Reduction", "Axis", "PreOp"])
def test_the_client_has_the_same_words(name):
    assert get_args(getattr(params, name)) == get_args(getattr(vocabulary, name))


def test_modes_of_devices_are_compute_modes():
    found = {mode for spec in (*KNOWN.values(), DeviceSpec.cpu()) for mode in spec.compute_modes}
    assert found == set(vocabulary.COMPUTE_MODES)
    assert set(SCHEMES) < set(vocabulary.COMPUTE_MODES)
    assert set(SCHEMES.values()) < set(get_args(Scheme))

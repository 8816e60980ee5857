"""The fused kernel on the CPU shim, which plays the matrix instructions: the unmodified source and host code."""

from __future__ import annotations

import numpy as np
import pytest
from fused_cases import CASES, HOSTILE, SERVED, SPLITS, check_case, check_elements, check_not_finite, run
from simt_cases import ShimMachine, random
from simt_shim import Order, ShimLauncher

from gemmserve_kernels.device.spec import KNOWN

SPEC = KNOWN["H200"]


def machine(**options):
    return ShimMachine(ShimLauncher(SPEC, **options))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case(case):
    check_case(machine(), case)


@pytest.mark.parametrize(("case", "config"), SPLITS.values(), ids=SPLITS)
def test_parts_of_k_of_several_blocks(case, config):
    check_case(machine(), case, config)


@pytest.mark.parametrize("kind", HOSTILE)
def test_every_element_is_as_accurate_as_plain_float32s(kind):
    on = machine()
    a, b = HOSTILE[kind]
    result = check_elements(on, a, b)
    counts = on.launcher.counts()
    assert (counts.plain == 0) == (kind in SERVED)
    if kind in {"identity", "small integers"}:
        np.testing.assert_array_equal(result, a.astype("c16") @ b.astype("c16"))


def test_what_is_not_finite_is_what_plain_float32_makes_of_it():
    check_not_finite(machine())

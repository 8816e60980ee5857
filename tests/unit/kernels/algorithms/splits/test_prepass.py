"""The pre-pass beside the kernels ahead of it, which may still run: what it counts into, and whom it waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from kernel_models import splits as plane_models
from simt_cases import random
from simt_shim import DataRace, ShimLauncher

from gemmserve_kernels.algorithms.common import verdict
from gemmserve_kernels.algorithms.splits import prepass
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.problem import GemmProblem, Operand


@dataclass(frozen=True)
class TextSource:
    """A kernel source given as text."""

    text: str


class WithoutWait(ShimLauncher):
    """Takes the wait for the kernels ahead out of one kernel's source."""

    kernel = ""

    def launch(self, source, entry, **options):
        if entry == self.kernel:
            begin = 'extern "C"'
            kernels = [
                part.replace("wait_for_previous();", ";") if f" {entry}(" in part else part
                for part in source.text.split(begin)
            ]
            source = TextSource(begin.join(kernels))
        super().launch(source, entry, **options)


def operands(k):
    return [random(i, "complex64", *shape) for i, shape in enumerate(((20, k), (k, 12)))]


def split(launcher, k):
    a, b = map(launcher.array, operands(k))
    return prepass.run(launcher, GemmProblem.build(Operand.of(a), Operand.of(b)), "3xfp16", a, b)


@pytest.mark.parametrize(("device", "k"), [("H200", 40), ("H200", 700), ("A100", 1030)])
def test_what_is_counted_into_is_zeroed_by_a_kernel(device, k):
    """Fresh memory holds no zeros on the shim."""
    launcher = ShimLauncher(KNOWN[device], checked=True)
    found = split(launcher, k)
    assert launcher.launches == ["split_clear", "split"]
    words, (a, b) = np.array(found.words), operands(k)
    assert words[0] == 0  # no vector is flagged
    for name, operand, x in (("a", found.a, a), ("b", found.b, np.ascontiguousarray(b.T))):
        counts, first = plane_models.split(x, "3xfp16", name).counts, operand.deficits.first
        assert words[first] == verdict.is_doubtful(counts, k).sum()
        np.testing.assert_array_equal(words[first + 1 : first + 5], plane_models.group_counts(counts)[0])


@pytest.mark.parametrize("kernel", ["split_clear", "split"])
@pytest.mark.parametrize(("device", "k"), [("H200", 40), ("H200", 700), ("A100", 1030)])
def test_each_waits_for_the_kernels_ahead(device, k, kernel):
    launcher = WithoutWait(KNOWN[device], checked=True)
    launcher.kernel = kernel
    with pytest.raises(DataRace, match="the kernels ahead"):
        split(launcher, k)

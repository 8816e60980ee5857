"""The kernel of a reading of counters for every architecture, by NVRTC, without a device."""

from __future__ import annotations

import pytest
from kernel_sources import compiled

from gemmserve_kernels import precompile
from gemmserve_kernels.device.element_counts import READ_COUNTERS

pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.mark.parametrize("arch", [arch for arch in precompile.DEVICES if arch.startswith("sm_")])
def test_every_architecture(arch):
    cubin = compiled(READ_COUNTERS, arch)
    assert cubin.registers["read_counters"] <= 32
    assert cubin.spill_bytes["read_counters"] == 0


@pytest.mark.parametrize("arch", precompile.DEVICES)
def test_it_is_compiled_ahead(arch):
    assert precompile.documented(arch)[0] == READ_COUNTERS

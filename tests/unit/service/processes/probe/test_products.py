"""Times of products within a budget of time and memory."""

from __future__ import annotations

import time
from dataclasses import replace

from gemmserve_kernels import DeviceSpec
from gemmserve_service.processes.probe import products
from gemmserve_service.processes.probe.amounts import QUICK, Deadline
from gemmserve_service.processes.probe.products import DTYPES, fastest, product_times

SMALL = replace(QUICK, slice_s=0.001, first_extents=(8, 24), extents=(8,))
CPU = DeviceSpec.cpu()


def test_every_dtype_has_its_smallest_product_before_any_has_a_larger_one() -> None:
    found, skipped = product_times(CPU, SMALL, Deadline(600))
    assert [(each.n, each.dtype) for each in found] == [(8, dtype) for dtype in DTYPES] + [(24, "complex64")]
    assert skipped == []
    assert all(each.seconds > 0 for each in found)
    assert fastest(found, "complex64") >= found[0].flops / found[0].seconds
    assert fastest(found, "int8") == 0


def test_without_time_all_are_named() -> None:
    found, skipped = product_times(CPU, SMALL, Deadline(0))
    assert found == []
    assert skipped == [f"{dtype} 8: no time" for dtype in DTYPES] + ["complex64 24: no time"]


def test_what_does_not_fit() -> None:
    found, skipped = product_times(replace(CPU, memory_bytes=4 * 3 * 8 * 8 * 8), SMALL, Deadline(600))
    assert [each.dtype for each in found] == [dtype for dtype in DTYPES if dtype != "complex128"]
    assert skipped == ["complex128 8: too little memory", "complex64 24: too little memory"]


def test_what_would_take_too_long_is_not_begun() -> None:
    """From the smaller product's rate: 10^15 operations are hours for a processor."""
    found, skipped = product_times(CPU, replace(SMALL, first_extents=(8, 50_000)), Deadline(600))
    assert ("complex64", 50_000) not in {(each.dtype, each.n) for each in found}
    assert skipped[-1].startswith("complex64 50000: ")


def test_what_is_compiled_costs_no_measurement(monkeypatch) -> None:
    """On a host without a kernel cache, the largest squares would be left out: those that the planner needs most."""
    multiply, seen = products.gemm, set()

    def compiling(a, b):
        if a.dtype not in seen:
            seen.add(a.dtype)
            time.sleep(0.5)
        return multiply(a, b)

    monkeypatch.setattr(products, "gemm", compiling)
    deadline = Deadline(1.0)
    found, skipped = product_times(CPU, SMALL, deadline)
    assert skipped == []
    assert {each.m for each in found if each.dtype == "complex64"} == set(SMALL.first_extents)
    assert 0 < deadline.left_s <= 1.0

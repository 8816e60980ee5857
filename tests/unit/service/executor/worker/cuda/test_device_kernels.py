"""Kernels that products and programs take on a device, found without one."""

from __future__ import annotations

import pytest

from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.sources import check_sources, sources
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_service.executor.protocol import Kind
from gemmserve_service.executor.worker.cuda.kernels import missing_kernels
from gemmserve_service.schemas import GemmParams, GemmReduceParams, GemmReduceStep, GemmStep, ProgramParams

A, B = (f"arr_{letter * 26}" for letter in "ab")
SPEC = KNOWN["H200"]
SQUARE = Kind(dtype="complex64", shape=(1024, 1024), order="C")
CASE = Case(m=1024, n=1024, k=1024, compute="3xfp16")
GEMM = sources(CASE, SPEC, every=False)
SUM = sources(Case(op="gemm_reduce", m=1024, n=1024, k=1024, reduce=("absmax",)), SPEC, every=False)


@pytest.fixture
def there(monkeypatch):
    """Kernels that are compiled."""
    found = set()
    monkeypatch.setattr(compiler, "compiled_file", lambda source, arch: "a file" if source in found else None)
    return found


def test_of_a_product(there):
    params = GemmParams(compute="3xfp16")
    operands = {"a": SQUARE, "b": SQUARE}
    assert GEMM
    assert set(missing_kernels(params, operands, SPEC, checked=False)) == GEMM
    assert set(missing_kernels(params, operands, SPEC, checked=True)) == GEMM | check_sources(CASE, SPEC)
    there |= GEMM
    assert missing_kernels(params, operands, SPEC, checked=False) == []


def test_of_a_reduction(there):
    params = GemmReduceParams(reduce="absmax")
    assert SUM
    assert set(missing_kernels(params, {"a": SQUARE, "b": SQUARE}, SPEC, checked=False)) == SUM


def test_of_a_program_each_once(there):
    steps = [
        GemmStep(op="gemm", id="x", a=A, b=B, compute="3xfp16"),
        GemmStep(op="gemm", id="y", a="$x", b=B, compute="3xfp16"),
        GemmReduceStep(op="gemm_reduce", id="peak", a="$y", b=B, reduce="absmax"),
    ]
    params = ProgramParams(steps=steps)
    found = missing_kernels(params, {A: SQUARE, B: SQUARE}, SPEC, checked=False)
    assert set(found) == GEMM | SUM
    assert len(found) == len(set(found))


def test_what_the_device_cannot_run_has_no_kernels(there):
    with pytest.raises(KernelError):
        missing_kernels(GemmParams(compute="ozaki"), {"a": SQUARE, "b": SQUARE}, KNOWN["A100"], checked=False)

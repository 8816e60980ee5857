"""Rates of hosts: documents, interpolation between measured products, what devices share."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from gemmserve_kernels.device.spec import KNOWN, DeviceSpec
from gemmserve_kernels.planning.rates import (
    MeasuredProduct,
    Rates,
    Way,
    product_plan,
    rates_of,
    read_rates,
    shipped,
    shipped_hosts,
    traffic,
)
from gemmserve_kernels.problem.errors import ComputeUnsupported, ParameterInvalid

CPU = Rates(
    DeviceSpec("cpu", "a processor", "cpu", 2, 1, 0, 0, 0, 1 << 34, 0, ("auto", "fp32", "fp64")),
    (
        MeasuredProduct("complex64", "auto", 512, 512, 512, 8 * 512**3 / 1e11),
        MeasuredProduct("complex64", "auto", 2048, 2048, 2048, 8 * 2048**3 / 4e11),
    ),
    Way(math.inf, math.inf),
    Way(math.inf, math.inf),
    2e10,
)


@pytest.mark.parametrize(
    "rates",
    [CPU, *map(shipped, shipped_hosts()), replace(shipped(), stored=Way(29e9, 17e9))],
    ids=lambda rates: rates.spec.name,
)
def test_a_document_says_everything(rates) -> None:
    assert rates_of(json.loads(json.dumps(rates.document(), allow_nan=False))) == rates


def test_a_measured_product_is_itself() -> None:
    assert CPU.product_seconds("complex64", "auto", 512, 512, 512) == pytest.approx(8 * 512**3 / 1e11)


def test_between_two_measured_products_the_rate_is_between_theirs() -> None:
    rate = 8 * 1024**3 / CPU.product_seconds("complex64", "auto", 1024, 1024, 1024)
    assert rate == pytest.approx(2e11)  # as far from both: the geometric mean


def test_a_product_counts_for_its_transpose() -> None:
    wide = replace(CPU, products=(MeasuredProduct("float32", "auto", 64, 4096, 512, 0.25),))
    assert wide.product_seconds("float32", "auto", 4096, 64, 512) == pytest.approx(0.25)


def test_without_a_measurement_the_kernels_estimate_holds() -> None:
    """Where nothing was measured on the host, what was measured on the architecture."""
    found = replace(shipped(), products=())
    assert 8 * 8192**3 / found.product_seconds("complex64", "auto", 8192, 8192, 8192) == pytest.approx(293e12, rel=0.05)
    with pytest.raises(ParameterInvalid, match="no rate of float64 auto products on a processor"):
        CPU.product_seconds("float64", "auto", 64, 64, 64)


def test_a_mode_that_the_device_lacks() -> None:
    with pytest.raises(ComputeUnsupported):
        CPU.product_seconds("complex64", "3xfp16", 64, 64, 64)


def test_what_multiplies() -> None:
    assert product_plan(KNOWN["H200"], "complex64", "auto", 4096, 4096, 4096) == ("ozaki", "ozaki")
    assert product_plan(KNOWN["H200"], "complex64", "auto", 4096, 1024, 4096) == ("wgmma", "3xfp16")
    assert product_plan(CPU.spec, "complex64", "auto", 4096, 4096, 4096) == ("numpy", "plain")


def test_devices_share_the_memory_of_their_host() -> None:
    rates = replace(shipped(), pinned=Way(50e9, 40e9), pageable=Way(45e9, 30e9), host_memory=200e9)
    assert rates.way("pinned", 1) == Way(50e9, 40e9)
    assert rates.way("pinned", 8) == Way(25e9, 25e9)
    assert rates.way("pageable", 2) == Way(200e9 / (2 * traffic("pageable")), 200e9 / (2 * traffic("pageable")))
    assert rates.way("device", 8) == CPU.way("pageable", 4) == Way(math.inf, math.inf)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "format 2"),
        ({"host_memory": 0}, "0 is no rate"),
        ({"host_memory": "fast"}, "could not convert"),
        ({"pinned": {"up": 1e9}}, "down"),
        ({"pinned": {"up": 1e9, "down": -1}}, "no rate"),
        ({"products": [{"dtype": "complex64"}]}, "'m'"),
        (
            {"products": [{"dtype": "complex64", "compute": "auto", "m": 0, "n": 1, "k": 1, "seconds": 1}]},
            "0 x 1 x 1",
        ),
        ({"spec": {"name": "x"}}, "compute_modes"),
        ({"peer": math.nan}, "nan is no rate"),
    ],
)
def test_what_is_no_document(change, said) -> None:
    with pytest.raises(ParameterInvalid, match=said):
        rates_of(shipped().document() | change)


def test_files(tmp_path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(CPU.document()))
    assert read_rates(path) == CPU
    path.write_text("{")
    with pytest.raises(ParameterInvalid, match="no JSON"):
        read_rates(path)
    path.write_text("[]")
    with pytest.raises(ParameterInvalid, match="no rates of a host"):
        read_rates(path)
    with pytest.raises(FileNotFoundError):
        read_rates(tmp_path / "absent.json")


def test_hosts_that_are_not_shipped() -> None:
    with pytest.raises(ParameterInvalid, match="there are nvidia-h200"):
        shipped("abacus")

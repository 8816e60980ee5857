"""Ceilings, summaries, targets and the file that grows."""

from __future__ import annotations

import argparse
import itertools
import json
import math

import pytest
from benchmark_scripts import load

from gemmserve_kernels.bench.cases import Case

data, ceilings, results, summary, suite, tune_dispatch = load(
    "data", "ceilings", "results", "summary", "suite", "tune_dispatch"
)
RATES = {"copy": 4e12, "fp16": 7.5e14, "int8": 1.4e15, "tf32": 3.9e14, "fp32": 5e13, "fp64": 5.8e13}


def row(who, seconds, *, table="square", **more):
    return {
        "table": table, "case": "1", "dtype": "complex64", "label": "", "op": "gemm", "compute": "auto", "who": who,
        "seconds": seconds, "wall": None, "m": 1024, "n": 1024, "k": 4096, "flops": 1e12, "nbytes": 1e9,
        "init": "normal", "arithmetic": "",
        "rel_fro": 1e-7, "rel_real": 1e-7, "rel_imag": 1e-7, "fallback": None, "bandwidth_share": 0.5,
    } | more  # fmt: skip


@pytest.mark.parametrize(
    ("arithmetic", "dtype", "rate"),
    [
        ("3xfp16", "complex64", 2.5e14),
        ("3xfp16-3m", "complex64", 7.5e14 / 2.25),
        ("1xfp16", "float32", 7.5e14),
        ("3xtf32", "complex64", 1.3e14),
        ("plain", "complex64", 5e13),
        ("plain", "complex128", 5.8e13),
        ("plain", "float16", 7.5e14),
        ("ozaki", "complex128", 1.4e15 / 15 * 4 / 2),
    ],
)
def test_ceilings_of_arithmetic(arithmetic, dtype, rate):
    found = ceilings.seconds(row("x", 1, arithmetic=arithmetic, dtype=dtype, flops=1e15, nbytes=1), RATES)
    assert 1e15 / found == pytest.approx(rate)


def test_ceilings_of_reductions_without_the_product():
    """Ceilings of the work that is done, at the rate of the unit that does it: not of the product's."""
    work = {"m": 65536, "n": 4096, "k": 64, "flops": 8 * 65536 * 4096 * 64, "nbytes": 1, "arithmetic": "plain"}
    found = ceilings.seconds(row("x", 1, algorithm="gram", **work), RATES)
    assert found == pytest.approx(8 * 64**2 * (65536 + 4096) / 2 / RATES["fp64"])
    assert ceilings.seconds(row("x", 1, algorithm="sums", **work), RATES) == 1 / RATES["copy"]
    found = ceilings.seconds(row("x", 1, algorithm="screen", dtype="complex128", **work), RATES)
    assert found == pytest.approx(work["flops"] / RATES["fp16"])


def test_memory_is_a_ceiling_too():
    assert ceilings.seconds(row("x", 1, arithmetic="plain", flops=1, nbytes=4e12), RATES) == pytest.approx(1)
    assert ceilings.seconds(row("x", 1, arithmetic="plain"), {"copy": None}) is None


def test_auto_is_compared_with_the_best_of_the_same_class():
    rows = [row("gemmserve", 1.0), row("wgmma", 0.9), row("vendor BLAS", 4.0), row("cuBLAS FAST_TF32", 0.1)]
    rows += [row("prepared", 0.1), row("gemmserve", 2.0, case="2"), row("vendor BLAS", 2.0, case="2")]
    found = summary.summary(rows)
    assert found["auto_over_best"] == pytest.approx(0.9)
    assert found["auto_over_best_at"] == "square 1 complex64: wgmma"
    assert [each["case"] for each in found["below"]] == ["square 1 complex64"]
    assert found["rival_over_auto"] == pytest.approx(2.0)
    assert found["auto_over_best_wall"] is None


def test_the_wall_is_compared_by_itself():
    rows = [row("gemmserve", 1e-5, wall=8e-5), row("vendor BLAS", 2e-5, wall=2e-5)]
    found = summary.summary(rows)
    assert found["auto_over_best"] == 1
    assert found["auto_over_best_wall"] == pytest.approx(0.25)


def test_targets():
    rows = [row("gemmserve", 4e-3, table="headline"), row("vendor BLAS", 2e-2, table="headline")]
    rows += [
        row("auto", None, table="errors complex64", rel_real=2e-7),
        row("vendor BLAS", None, table="errors complex64"),
    ]
    found = {each["name"]: each for each in summary.summary(rows)["targets"]}
    assert found["headline, auto, over cuBLAS"]["found"] == pytest.approx(5)
    assert found["headline, auto, over cuBLAS"]["met"] is True
    assert found["headline, prepared"]["met"] is None
    assert found["complex64 auto, parts' errors over cuBLAS's"]["found"] == pytest.approx(2)
    assert found["complex64 auto, parts' errors over cuBLAS's"]["met"] is False


def test_nothing_that_is_nan_passes():
    rows = [row("auto", None, table="errors complex64", rel_fro=e, case=str(e)) for e in (1e-7, math.nan, 2e-7)]
    found = {each["name"]: each for each in summary.summary(rows)["targets"]}
    assert found["complex64 auto, largest error of every kind and k"]["met"] is False


def test_results_survive_being_written(tmp_path):
    path = tmp_path / "r.json"
    about = {"device": "x"}
    first = results.Results(path, about, "abc")
    first.add("one", [{"a": math.nan, "b": [1.0, math.inf]}])
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    again = results.Results(path, about, "abc")
    assert again.done("one")
    assert math.isnan(again.document["rows"][0]["a"])
    assert again.document["rows"][0]["b"] == [1.0, math.inf]
    assert not results.Results(path, about, "other sources").done("one")
    assert not results.Results(path, {"device": "y"}, "abc").done("one")
    assert not results.Results(path, about, "abc", fresh=True).done("one")


def test_the_digest_is_of_the_kernels():
    assert results.digest() == results.digest()
    assert len(results.digest()) == 16


def test_every_case_of_the_suite_is_a_problem():
    keys = set()
    for quick in (True, False):
        for table in suite.suite(quick):
            for case in table.cases:
                case.problem()
                keys.add((table.name, case, quick))
                assert isinstance(suite.label(case), str)
    names = [table.name for table in suite.suite()]
    assert len(names) == len(set(names))
    sizes = {(c.m, c.n, c.k) for t in suite.suite() for c in t.cases}
    assert {(3456, 4096, 4096), (16384, 16384, 16384), (256, 256, 256), (4096, 16, 4096)} <= sizes
    kinds = {(c.init, c.k) for t in suite.suite() if t.name == "errors complex64" for c in t.cases}
    assert kinds == {(kind, k) for kind in suite.KINDS for k in suite.DEPTHS}


def test_the_table_s_grid_has_every_shape_of_the_suite():
    for dtype in tune_dispatch.MOST_FLOPS:
        shapes = tune_dispatch.grid(dtype)
        assert len(shapes) == len(set(shapes))
        for table in suite.suite():
            for case in table.cases:
                fits = case.problem().flops() <= tune_dispatch.MOST_FLOPS[dtype]
                if case.op == "gemm" and case.dtype == dtype and fits:
                    assert (case.batch, case.m, case.n, case.k) in shapes


def test_shapes_are_read():
    assert tune_dispatch.parsed("512x64x2048") == (1, 512, 64, 2048)
    assert tune_dispatch.parsed("16x3x4x5") == (16, 3, 4, 5)
    for text in ("12x13", "0x1x1", "1x2x3x4x5"):
        with pytest.raises(argparse.ArgumentTypeError):
            tune_dispatch.parsed(text)


def test_rotated_operands_leave_the_cache_and_do_not_overlap():
    import numpy as np

    class Spec:
        l2_bytes = 1 << 20

    buffer = np.zeros(1 << 22, np.float32)
    sets = tune_dispatch.rotated(Spec, Case(m=100, n=64, k=33, dtype="complex64"), buffer)
    assert 3 * Spec.l2_bytes <= sum(x.nbytes for arrays in sets for x in arrays.values()) or len(sets) == 32
    flat = [x for arrays in sets for x in arrays.values()]
    assert all(x.ctypes.data % 512 == flat[0].ctypes.data % 512 for x in flat)
    spans = sorted((x.ctypes.data, x.ctypes.data + x.nbytes) for x in flat)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


# ---- the second wave


def second(who, seconds, **more):
    """A row of its table: complex128 8192^3 where nothing else is said."""
    cube = {"m": 8192, "n": 8192, "k": 8192, "batch": 1, "dtype": "complex128", "case": "8192", "element": 1.0}
    return row(who, seconds, **({"table": "second-wave"} | cube | more))


def wave(rows):
    return {each["name"]: each for each in summary.summary(rows)["targets"]}


def test_the_newest_library_is_compared_at_its_own_error():
    rows = [
        second("gemmserve", 30e-3, rel_fro=1.6e-15), second("ozaki 16", 33e-3, rel_fro=1.6e-16),
        second("ozaki 17", 36e-3, rel_fro=2e-17), second("simt", 300e-3, rel_fro=1e-17),
        second("vendor BLAS", 87e-3, rel_fro=4e-15), second("newest cuBLAS", 93e-3, rel_fro=4e-15),
        second("newest cuBLAS 55 bits", 45e-3, rel_fro=9.7e-17), second("newest cuBLAS 47 bits", 36e-3, rel_fro=2e-14),
        second("newest cuBLAS dynamic", 48e-3, rel_fro=7e-17), second("prepared", 20e-3, rel_fro=1e-17),
    ]  # fmt: skip
    found = wave(rows)
    at_its_error = found["complex128 8192^3, over 55 bits at its error"]
    assert at_its_error["found"] == pytest.approx(45 / 36)  # prepared operands are other work
    assert (at_its_error["target"], at_its_error["stretch"], at_its_error["met"]) == (1.15, 1.3, True)
    assert found["complex128 8192^3, auto over 55 bits"]["found"] == pytest.approx(45 / 30)
    assert found["complex128 8192^3, auto's error over that of 55 bits"]["found"] == pytest.approx(1.6e-15 / 9.7e-17)
    assert found["complex128 8192^3 at 2e-15, over 47 bits"]["found"] == pytest.approx(36 / 30)
    assert found["complex128 8192^3, normal, over dynamic bits, accuracy rule kept"]["found"] == pytest.approx(48 / 30)
    assert found["complex128 8192^3, spikes, over dynamic bits, accuracy rule kept"]["found"] is None
    assert found["any case of the second wave, over cuBLAS at worst"]["found"] == pytest.approx(48 / 30)
    assert wave(rows[:2] + rows[4:-1])["complex128 8192^3, over 55 bits at its error"]["found"] is None


@pytest.mark.parametrize(("element", "ratio"), [(3.9, 1.5), (8.1, 0.5), (math.nan, 0.5)])
def test_what_breaks_the_accuracy_rule_does_not_count(element, ratio):
    rows = [second("gemmserve", 40e-3, element=element, init="spikes"), second("dmma", 120e-3, init="spikes")]
    rows += [second("vendor BLAS", 90e-3, element=4.0, init="spikes")]
    rows += [second("newest cuBLAS dynamic", 60e-3, init="spikes")]
    found = wave(rows)["complex128 8192^3, spikes, over dynamic bits, accuracy rule kept"]
    assert found["found"] == pytest.approx(ratio)
    assert found["met"] == (ratio > 1.3)


def test_the_second_wave_beside_plain_rivals():
    thin = {"m": 64, "n": 8192, "k": 8192, "dtype": "complex64", "case": "thin"}
    reduced = {"op": "gemm_reduce", "m": 1024, "n": 1024, "k": 512, "batch": 8, "dtype": "float64", "case": "8"}
    rows = [
        second("gemmserve", 2e-4, **thin), second("vendor BLAS", 6e-4, **thin), second("newest cuBLAS", 5e-4, **thin),
        second("gemmserve", 4e-4, **reduced), second("cupy", 2e-4, **reduced),
        second("newest cuBLAS", 3e-4, **reduced), second("our product", 1e-4, **reduced),
        second("gemmserve", 1e-4, **(thin | {"compute": "tf32"})),
        second("vendor BLAS", 3e-4, **(thin | {"compute": "tf32"})),
    ]  # fmt: skip
    found = wave(rows)
    assert found["complex64 64x8192x8192, over cuBLAS"]["found"] == pytest.approx(2.5)
    reduction = found["float64 8x1024x1024x512 max, over cuBLAS then CuPy"]
    assert (reduction["found"], reduction["met"]) == (pytest.approx(0.5), False)
    assert found["any case of the second wave, over cuBLAS at worst"]["found"] == pytest.approx(0.5)
    below = summary.summary(rows)["second_wave_below"]
    assert below == [{"case": "gemm_reduce 8 float64 auto", "best": "cupy", "ratio": 0.5}]


def test_the_newest_library_is_a_plain_rival_and_its_fixed_bits_are_none():
    rows = [row("gemmserve", 1.0), row("newest cuBLAS", 0.8), row("newest cuBLAS 47 bits", 0.1), row("ozaki 16", 0.2)]
    found = summary.summary(rows)
    assert found["rival_over_auto"] == pytest.approx(0.8)
    assert found["auto_over_best"] == pytest.approx(0.8)

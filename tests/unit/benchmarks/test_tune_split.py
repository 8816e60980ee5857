"""tune_split.py without a device: what it would measure, and that it finds what is wrong. Every script imports."""

from __future__ import annotations

import numpy as np
from benchmark_scripts import FOLDER, load
from simt_shim import ShimLauncher

from gemmserve_kernels.algorithms.splits import split
from gemmserve_kernels.algorithms.splits.geometry import geometry_of
from gemmserve_kernels.device.spec import KNOWN

split_variants, tune_split = load("split_variants", "tune_split")
H200 = KNOWN["H200"]
JOBS = list(split_variants.jobs())


def test_every_script_imports():
    load(*(path.stem for path in FOLDER.glob("*.py")))


def test_every_variant_fits_the_device_and_changes_something():
    assert len(set(JOBS)) == len(JOBS)
    for job in JOBS:
        defines = dict(tune_split.source(job, H200).defines)
        assert int(defines["SHARED_BYTES"]) <= H200.shared_per_block
        assert int(defines["THREADS"]) * int(defines["MIN_BLOCKS"]) <= 2048
        default = geometry_of(job.k, H200)
        now = [getattr(default, name) for name, _ in job.changes]
        assert now != [value for _, value in job.changes] or not job.changes


def test_what_is_sure_to_take_the_same_time_is_left_out():
    names = {layout: [job.variant for job in JOBS if job.layout == layout and job.k == 512] for layout in ("NT", "TT")}
    assert names["TT"] == ["default"]
    assert "b2" in names["NT"]
    assert "s64" not in names["NT"]  # strips are of vectors across memory
    assert {job.k for job in split_variants.jobs([1024])} == {1024}


def test_probes_change_the_text_and_nothing_else_does_afterwards():
    (job, *_) = (job for job in JOBS if job.probe)
    probe, plain = tune_split.source(job, H200), tune_split.source(JOBS[0], H200)
    assert probe.text != plain.text
    assert type(tune_split.source(JOBS[0], H200)) is type(plain)
    assert split.geometry_of is geometry_of


def test_what_the_pre_pass_writes_is_checked():
    job = next(split_variants.jobs(tiny=True))
    launcher = ShimLauncher(H200, optimize="-O0")
    words, (operands,) = held = tune_split.operand_sets(np, launcher, job)
    row = tune_split.measure(np, launcher, job, held, 1)
    assert row["wrong"] == []
    operands.outputs[0].planes.data[0, 2, 7, 3] += 1
    operands.outputs[1].planes.data[0, 1, 3, job.k] = 1
    words[operands.outputs[1].deficits.first] += 1
    words[operands.outputs[1].deficits.first + 1] += 1
    assert tune_split.wrong(np, operands, job) == ["a low 0", "b doubt", "b deficits", "b padding"]


def test_the_table_has_a_line_for_each_variant():
    row = {"k": 8, "m": 3, "n": 4, "dtype": "complex64", "layout": "NN", "variant": "s64", "us": 2.0, "tbs": 1.5}
    lines = tune_split.table([row | {"wrong": []}, row | {"wrong": ["a flags"], "layout": "TT"}])
    assert [line.split() for line in lines] == [
        ["complex64", "3x4x8,", "us", "(TB/s)", "NN", "NT", "TN", "TT"],
        ["s64", "2.00", "(1.50)", "WRONG"],
    ]

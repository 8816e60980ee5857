"""Probes of this machine, and of a GPU that is NumPy; what a plan makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gemmserve_kernels import DeviceSpec
from gemmserve_kernels.planning.model import Hosts, Product, predict
from gemmserve_kernels.planning.rates import Way, rates_of
from gemmserve_service.processes.probe.amounts import QUICK
from gemmserve_service.processes.probe.probe import ordinals_of, probe, summary

TINY = replace(
    QUICK,
    seconds=600.0,
    slice_s=0.001,
    copied_bytes=5 << 20,
    file_bytes=1 << 20,
    first_extents=(16, 32),
    extents=(16,),
    threads=(1, 2),
)
ON_NUMPY = Path(__file__).parents[4] / "support" / "cupy_on_numpy" / "run.py"
SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path
from gemmserve_service.processes.probe.amounts import QUICK
from gemmserve_service.processes.probe.probe import probe
amounts = replace(QUICK, **json.loads(sys.argv[1]))
print(json.dumps(probe("auto", Path(sys.argv[2]), amounts)))
"""


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    return probe("cpu", tmp_path_factory.mktemp("data"), TINY)


@pytest.fixture(scope="module")
def on_a_gpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "script.py").write_text(SCRIPT)
    amounts = json.dumps(vars(TINY))
    command = [sys.executable, ON_NUMPY, folder / "script.py", amounts, folder / "store"]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_on_the_cpu(on_the_cpu) -> None:
    rates = rates_of(json.loads(json.dumps(on_the_cpu, allow_nan=False)))
    assert rates.spec == DeviceSpec.cpu()
    assert {(each.dtype, each.n) for each in rates.products} == {
        ("complex64", 16), ("complex64", 32), ("float32", 16), ("float64", 16), ("complex128", 16), ("float16", 16)
    }  # fmt: skip
    assert on_the_cpu["pinned"] is on_the_cpu["pageable"] is on_the_cpu["measured"]["links"] is None
    assert on_the_cpu["environment"]["kind"] == "cpu"
    host = on_the_cpu["measured"]["host"]
    assert set(host["copy"]) == set(host["first_touch"]) == {"1", "2"}
    assert min([*host["copy"].values(), *host["first_touch"].values(), *host["disk"].values()]) > 0


def test_nothing_is_left_behind(tmp_path) -> None:
    probe("cpu", tmp_path / "new", TINY)
    assert list((tmp_path / "new").iterdir()) == []


def test_on_a_gpu(on_a_gpu) -> None:
    rates = rates_of(on_a_gpu)
    assert rates.spec.arch == "sm_90a"
    assert 0 < rates.pinned.up < float("inf")
    assert 0 < rates.pageable.down < float("inf")
    links = on_a_gpu["measured"]["links"]
    assert set(links) == {"pinned_up", "pinned_down", "pinned_both", "ring_up", "ring_down", "stored"}
    assert rates.stored == Way(**links["stored"])
    assert min(links["stored"].values()) > 0
    assert set(links["ring_up"]) == {"1", "2"}
    assert rates.pageable.up == max(each["alone"] for each in links["ring_up"].values())


@pytest.mark.parametrize("which", ["on_the_cpu", "on_a_gpu"])
def test_a_plan_can_be_made_from_it(which, request) -> None:
    rates = rates_of(request.getfixturevalue(which))
    found = predict(rates, Product(32768, 32768, 32768), Hosts())
    assert found.seconds > 0
    assert (found.uploaded == 0) == (which == "on_the_cpu")


@pytest.mark.parametrize("which", ["on_the_cpu", "on_a_gpu"])
def test_summaries(which, request) -> None:
    lines = summary(request.getfixturevalue(which))
    assert "cores, measured 20" in lines[0]
    assert "complex64" in lines[1]
    assert any("link, through the ring" in line for line in lines) == (which == "on_a_gpu")


def test_devices() -> None:
    assert ordinals_of("cpu") == ordinals_of("cpu:0,cpu:1") == []
    assert ordinals_of("cuda:0,cuda:3") == [0, 3]
    assert ordinals_of("rocm:1") == [1]
    assert ordinals_of("auto") == list(range(len(DeviceSpec.all())))

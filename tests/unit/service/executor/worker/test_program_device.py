"""A program on a device: what passes over its link, what lives how long there, and the bits of its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parents[4] / "support" / "device_program_script.py"


@pytest.fixture(scope="module")
def stand_in():
    """What the CUDA backend did on the stand-in for CuPy, in a process of its own."""
    done = subprocess.run([sys.executable, STAND_IN], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_intermediates_never_touch_the_host(stand_in):
    found = stand_in["chain"]
    assert found["right"]
    assert found["uploads"] == ["a", "b"], "each stored operand once"
    assert found["downloads"] == ["kept", "y.absmax", "y.sum"], "each result once"


def test_every_step_is_the_call_that_its_own_job_would_be(stand_in):
    """The same operands, lying the same way, extents of 1 included: nothing that the bits could depend on differs."""
    assert stand_in["layouts"] == {"same": True, "steps": 5, "bits": True}


def test_stored_operands_that_are_resident_stay(stand_in):
    assert stand_in["again"]["right"]
    assert stand_in["again"]["uploads"] == []


def test_values_on_the_device_go_after_their_last_use(stand_in):
    assert stand_in["chain"]["alive"] == stand_in["chain"]["expected_alive"]


def test_no_more_than_a_few_steps_are_under_way(stand_in):
    found = stand_in["ahead"]
    assert 1 < found["most_ahead"] <= 5
    assert found["cancelled_after"] == 7


def test_a_checked_program_is_checked_step_by_step(stand_in):
    assert stand_in["checked"]["right"]
    assert stand_in["checked"]["residuals"] == 3
    assert stand_in["checked"]["downloads"] == ["z"], "each is checked where it is"


def test_operations_beside_products_stay_on_the_device_and_are_checked_there(stand_in):
    found = stand_in["operations"]
    assert found["right"]
    assert found["downloads"] == ["m", "copy"]
    assert found["residuals"] == 4
    assert (found["algorithms"][0], *found["algorithms"][2:]) == ("add", "multiply", "add")
    assert found["little memory"]["right"]


def test_views_are_taken_where_the_values_are(stand_in):
    found = stand_in["views"]
    assert found["right"]
    assert set(found["uploads"]) <= {"a", "b"}
    assert found["downloads"] == ["p", "m"]
    assert found["residuals"] == 4


def test_through_our_own_kernels_every_step_has_the_bits_of_its_own_job(tmp_path):
    script = STAND_IN.with_name("program_shim_script.py")
    environment = {**os.environ, "GEMMSERVE_KERNEL_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"] == dict.fromkeys(["x2", "y.absmax", "y.argmax", "y.sumsq", "y.c", "z"], True)
    assert found["error"] < 1e-6
    assert found["by view"] < 1e-6, "windows that overlap, backwards, broadcast, parts of complex numbers"


def test_through_the_kernels_own_functions(stand_in):
    assert stand_in["vendor"] == {
        "right": True, "uploads": ["a"], "downloads": ["x3", "x4"], "algorithms": ["vendor"] * 3,
    }  # fmt: skip


def test_out_of_device_memory_values_live_on_the_host(stand_in):
    found = stand_in["little memory"]
    assert found["right"]
    assert found["fitted"]
    assert stand_in["no memory"]["error"] == "OutOfDeviceMemory"

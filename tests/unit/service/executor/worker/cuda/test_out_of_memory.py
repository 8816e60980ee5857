"""Out of device memory: room is made, panels are tried, and then it is said clearly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gemmserve_kernels.problem.errors import OutOfDeviceMemory
from gemmserve_service.errors import describe
from gemmserve_service.executor.worker.cuda.out_of_memory import within_memory


class FullError(Exception):
    pass


class Device:
    """Fits what it has room for; copies and unwritten results take some of it until room is made."""

    def __init__(self, room, needs=64, copies=0, results=0, cuts=256):
        self.room, self.needs, self.copies, self.results, self.cuts = room, needs, copies, results, cuts
        self.tried = []

    def drop_copies(self):
        self.copies = 0
        return True

    def vacate(self):
        found, self.results = bool(self.results), 0
        return found

    def whole(self):
        return self.panels(1)

    def panels(self, count):
        if count > self.cuts:
            return None
        self.tried.append(count)
        if self.needs / count > self.room - self.copies - self.results:
            raise FullError(f"{self.needs // count} bytes")
        return count

    def run(self):
        return within_memory(self.whole, self.panels, (self.drop_copies, self.vacate), (FullError, OutOfDeviceMemory))


@pytest.mark.parametrize(
    ("device", "tried"),
    [
        (Device(64), [1]),
        (Device(64, copies=60), [1, 1]),
        (Device(64, copies=30, results=30), [1, 1, 1]),
        (Device(33), [1, 1, 2]),
        (Device(5), [1, 1, 2, 4, 8, 16]),
    ],
    ids=["fits", "fits once copies are dropped", "fits once results are gone, too", "two panels", "sixteen"],
)
def test_the_fewest_panels_that_fit(device, tried):
    assert device.run() == tried[-1]
    assert device.tried == tried


def test_what_cannot_be_cut_so_far_fails_with_a_clear_error():
    device = Device(5, cuts=4)
    with pytest.raises(OutOfDeviceMemory, match=r"does not fit .*: 16 bytes") as caught:
        device.run()
    assert device.tried == [1, 1, 2, 4]
    assert describe(caught.value).slug == "out-of-device-memory"


def test_there_is_an_end_to_cutting():
    device = Device(0.001)
    with pytest.raises(OutOfDeviceMemory):
        device.run()
    assert device.tried[-1] == 256


def test_other_errors_pass():
    def broken():
        raise ValueError("not memory")

    with pytest.raises(ValueError, match="not memory"):
        within_memory(broken, lambda _: None, (), (FullError,))


def test_the_cuda_backend_computes_in_panels_what_does_not_fit_whole():
    """On the stand-in for CuPy: results in C and Fortran order, reductions, and what fits in no way."""
    script = Path(__file__).parents[5] / "support" / "out_of_memory_script.py"
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr
    *found, prepared, late, pressed, written = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [each.get("right") for each in found] == [True] * 5 + [None]
    assert [each["tries"] for each in found[:2]] == [1, 7]  # twice whole, one of two panels, all of four
    assert "does not fit into the device's memory" in found[-1]["error"]
    assert (prepared["right"], prepared["tries"]) == (True, 3), "whole, without copies, and when the step had ended"
    assert late == {"right": True, "tries": 1, "resident": True}, "an operand that the device alone has"
    assert (pressed["right"], pressed["resident"]) == (True, False), "its bytes were needed on the host"
    assert written == {"told": [[f"task-{number}" for number in range(4)], []], "right": True}

"""Readings of a device's counters: when they copy, what they share, what their difference is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gemmserve_kernels import ElementCounts

SUPPORT = Path(__file__).parents[3] / "support"


def test_shares():
    counts = ElementCounts.of(16, 3, 1)
    assert counts == ElementCounts(planned=12, wide=3, plain=1)
    assert (counts.total, counts.wide_share, counts.fallback_share) == (16, 3 / 16, 1 / 16)
    assert ElementCounts(20, 5, 1) - counts == ElementCounts(8, 2, 0)
    nothing = counts - counts
    assert (nothing.total, nothing.wide_share, nothing.fallback_share) == (0, None, None)


SCRIPT = """
import ctypes
from types import SimpleNamespace

import cupy
from gemmserve_kernels import ElementCounts, read_element_counts
from gemmserve_kernels.device import element_counts
from gemmserve_kernels.device.element_counts import READ_COUNTERS, WORDS, counters_of
from gemmserve_kernels.device.launch import CupyLauncher

copies = []

def launch(self, source, entry, *, grid, block, shared, params, dependent):
    assert (source, entry, grid, shared) == (READ_COUNTERS, "read_counters", 1, 0)
    copies.append(params)
    ctypes.memmove(params.to, params.from_, 8 * WORDS)

CupyLauncher.launch = launch
CupyLauncher.current = classmethod(lambda cls: cls(SimpleNamespace(kind="rocm")))  # each launch by itself

def get(self, *args, **options):
    raise AssertionError("a copy, which waits behind those of others")

cupy.ndarray.get = get

assert read_element_counts().counts() == ElementCounts()  # before there are counters
counters = counters_of(0)
assert counters_of(0) is counters
first = read_element_counts()
assert first.done and first.counts() == ElementCounts() and not copies

words = counters.add(100)
assert counters.add(20) == words
wide, plain = (ctypes.c_uint64.from_address(words + 8 * i) for i in range(2))
wide.value, plain.value = 30, 5
second = read_element_counts()
assert read_element_counts() is second  # nothing was counted since
assert len(copies) == 1
counters.add(7)
wide.value -= 13  # as where plain arithmetic takes the place of the wide way
third = read_element_counts()
assert len(counters._under_way) == 1  # what the first has written is there, whoever still wants it
assert second.counts() == ElementCounts(85, 30, 5)
assert third.counts() - second.counts() == ElementCounts(20, -13, 0)
assert len(copies) == 2
assert first.counts() == ElementCounts()

import gc
import threading

def elsewhere(before):
    # Counters of another thread, and its reading of none if it takes one first.
    found = []
    def look():
        if before:
            found.append(read_element_counts().counts())
        found.append(counters_of(0))
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found

(other,) = elsewhere(False)
assert other is not counters
assert other.add(9) != words
assert read_element_counts().counts() == third.counts()  # nothing of another thread's
gc.collect()
assert elsewhere(False) == [other]  # whose thread has ended
gc.collect()
none, fresh = elsewhere(True)
assert none == ElementCounts() and fresh is not other and fresh.add(0) and fresh.read().counts() == ElementCounts()
"""


def test_readings_copy_where_something_was_counted():
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SUPPORT / 'cupy_on_numpy')!r})\n{SCRIPT}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr

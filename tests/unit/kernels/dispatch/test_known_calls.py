"""Calls that are kept: found again, bounded, whatever the key; bounds of arrays in memory."""

from __future__ import annotations

import threading

import numpy as np

from gemmserve_kernels.dispatch import known_calls
from gemmserve_kernels.dispatch.known_calls import KnownCalls, Span, is_apart


def test_what_was_kept_is_found_by_an_equal_key():
    calls = KnownCalls()
    calls.keep((1, (2, 3)), "call")
    assert calls.find((1, (2, 3))) == "call"
    assert calls.find((1, (2, 4))) is None


def test_keys_that_cannot_be_hashed_are_passed_over():
    calls = KnownCalls()
    calls.keep(([],), "call")
    assert calls.find(([],)) is None


def test_the_oldest_go(monkeypatch):
    monkeypatch.setattr(known_calls, "_MOST", 3)
    calls = KnownCalls()
    for key in range(5):
        calls.keep(key, key)
    assert [calls.find(key) for key in range(5)] == [None, None, 2, 3, 4]


def test_threads_that_keep_at_the_same_time(monkeypatch):
    monkeypatch.setattr(known_calls, "_MOST", 4)
    calls, failures = KnownCalls(), []

    def work(first):
        try:
            for key in range(first, first + 2000):
                calls.keep(key, key)
                assert calls.find(key) in {None, key}
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(10_000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_spans_are_what_numpy_says():
    whole = np.zeros((6, 7, 8), np.complex64)
    for array in (
        whole,
        whole[::2, 1:4, ::-1],
        whole[::-1, ::-1, 3:5],
        whole.T,
        whole[:, :0],
        np.broadcast_to(whole[0], (5, 7, 8)),
    ):
        low, high = np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data,) * 2
        assert Span.of(array) == Span(low - array.ctypes.data, high - array.ctypes.data)


def test_results_apart_from_operands():
    memory = np.zeros(100)
    spans = [Span.of(memory[20:40]), Span.of(memory[60:70][::-1])]
    at = [memory[20:40].ctypes.data, memory[60:70][::-1].ctypes.data]

    def apart(out):
        return is_apart(out.ctypes.data, Span.of(out), at, spans)

    assert apart(memory[40:60])
    assert apart(memory[:20])
    assert apart(memory[70:])
    assert not apart(memory[39:60])
    assert not apart(memory[40:61])
    assert not apart(memory[:100][::-1])
    assert not apart(memory[25:30])

"""Memory of one device: what stays, what streams, and how many bytes are uploaded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmserve_kernels.algorithms.common.splits import PLANES
from gemmserve_kernels.planning.memory import Share, least_bytes, memory_of, plane_bytes
from gemmserve_kernels.problem.errors import ParameterInvalid

SHARE = Share(32768, 32768, 32768, 4096, 4096, "complex64", "3xfp16")


@pytest.mark.parametrize("scheme", ["3xfp16", "3xfp16-3m", "1xfp16", "6xbf16", "9xbf16"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_planes_are_those_of_the_kernels(scheme, dtype) -> None:
    planes = PLANES.get((scheme, dtype == "complex64", "a"), ())
    assert plane_bytes(dtype, scheme) == 2 * len(planes)


def test_arithmetic_without_planes() -> None:
    assert plane_bytes("complex64", "plain") == plane_bytes("complex128", "ozaki") == 0


def test_all_stays_where_it_fits() -> None:
    found = memory_of(SHARE, 150 * 10**9)
    assert found.streams is None
    assert found.uploaded_bytes == 2 * 32768**2 * 8
    assert found.used_bytes == 2 * 32768**2 * 8 + 8192 * 32768 * 8 + 2 * 4096**2 * 8


def test_too_little() -> None:
    least = least_bytes(SHARE)
    assert least == 8192 * 32768 * 16 + 4096**2 * 8
    assert memory_of(SHARE, least).streams == "both"
    with pytest.raises(ParameterInvalid, match="needs 4,429,185,024 bytes"):
        memory_of(SHARE, least - 1)


def test_the_longer_operand_streams_once() -> None:
    """All of the shorter one stays: nothing is uploaded twice."""
    share = Share(4096, 131072, 8192, 2048, 2048, "complex64", "3xfp16")
    found = memory_of(share, 10**9 + share.workspace_bytes)
    assert found.streams == "b"
    assert found.uploaded_bytes == share.copied_bytes


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 1 << 16),
    columns=st.integers(1, 1 << 16),
    k=st.integers(1, 1 << 16),
    side=st.sampled_from([64, 2048, 4096]),
    times=st.floats(1.0, 20.0),
)
def test_within_the_budget_and_not_below_the_operands(rows, columns, k, side, times) -> None:
    share = Share(rows, columns, k, min(side, rows), min(side, columns), "complex64", "3xfp16")
    budget = int(least_bytes(share) * times) + 1
    found = memory_of(share, budget)
    more = memory_of(share, 2 * budget)
    assert found.used_bytes <= budget
    assert share.copied_bytes <= more.uploaded_bytes <= found.uploaded_bytes
    down, across = -(-rows // share.block_rows), -(-columns // share.block_columns)
    assert found.uploaded_bytes <= (rows * across + columns * down) * k * 8

"""Sizes and rates, read and written."""

from __future__ import annotations

import pytest

from gemmserve_kernels.planning.quantities import bytes_text, digits, parse_bytes, parse_rate, seconds_text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512", 512),
        ("6.4GB", 6_400_000_000),
        ("6.4 g", 6_400_000_000),
        ("16GiB", 16 << 30),
        ("2Ti", 2 << 40),
        ("1kB", 1000),
    ],
)
def test_sizes(text, nbytes) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 PB", "1e9", "6,4GB"])
def test_no_sizes(text) -> None:
    with pytest.raises(ValueError, match="a size is written"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100Gb/s", 12.5e9), ("400 Gbit/s", 50e9), ("12.5GB/s", 12.5e9), ("1GiB/s", 1 << 30), ("8Mbps", 1e6)],
)
def test_rates(text, rate) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["100", "100Gb", "fast", "0Gb/s", "-1GB/s"])
def test_no_rates(text) -> None:
    with pytest.raises(ValueError, match="a rate is written"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (6.4e9, "6.40 GB"), (34.36e9, "34.4 GB"), (1e17, "100 PB")],
)
def test_bytes_text(nbytes, text) -> None:
    assert bytes_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.478, "1.48 s"), (0.0857, "85.7 ms"), (12e-6, "12.0 us"), (1234.0, "1,234 s")]
)
def test_seconds_text(seconds, text) -> None:
    assert seconds_text(seconds) == text


def test_digits() -> None:
    assert [digits(value) for value in (0.0, 0.5, 1.94, 38.2, 100.4)] == ["0", "0.500", "1.94", "38.2", "100"]

"""Scaled sums of products, recorded: as many gemms as products, with the results of the steps by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve import Client
from gemmserve._handles.view import Base


@pytest.fixture
def live(app_url):
    with Client(app_url) as client:
        yield client


CHAINS = {
    "scaled": (lambda d, c: 2 * d(), ["gemm"]),
    "scaled twice": (lambda d, c: -(2 * d() / 4), ["gemm"]),
    "sum": (lambda d, c: d() + c, ["gemm"]),
    "sum of scaled": (lambda d, c: 2 * d() + 3 * c, ["gemm"]),
    "the other way": (lambda d, c: 3 * c - 2 * d(), ["gemm"]),
    "scaled sum": (lambda d, c: 2 * (d() - c), ["gemm"]),
    "an addend of its own": (lambda d, c: 2 * d(c), ["add", "gemm"]),
    "two products": (lambda d, c: d() - 2 * d(), ["gemm", "gemm"]),
    "row": (lambda d, c: d() + c[:1], ["add", "gemm"]),
    "vector": (lambda d, c: d() + c[0], ["add", "gemm", "add"]),
    "zero": (lambda d, c: 0 * d(), ["gemm", "add"]),
    "zero times c": (lambda d, c: d() + 0 * c, ["add", "add", "gemm"]),
    "with a number": (lambda d, c: d() + 1, ["gemm", "add"]),
    "wider": (lambda d, c: 1j * d(), ["gemm", "add"]),
    "view": (lambda d, c: 2 * d().T, ["gemm", "add"]),
    "larger": (lambda d, c: d()[:1] + c, ["gemm", "add"]),
    "too large": (lambda d, c: 1e200 * (1e200 * d()), ["gemm", "add", "add"]),
    "too small for float32": (lambda d, c: 1e-30 * (1e-30 * d()), ["gemm", "add"]),
    "product of elements": (lambda d, c: 2 * (d() * c), ["add", "gemm", "multiply", "add"]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_scaled_sums_of_products_are_one_gemm(live, rng, name) -> None:
    chain, expected = CHAINS[name]
    a, b, c = rng.standard_normal((3, 4, 4))
    ra, rb, rc = live.put(a), live.put(b), live.put(c)
    with np.errstate(over="ignore"):
        values = chain(lambda addend=0: a @ b + addend, c)
    with live.program() as p:
        copied = p._step("add", {"a": rc}, {}, Base(rc.shape, rc.dtype))  # recorded, as is all that is made of it
        made = chain(lambda addend=None: p.gemm(ra, rb, addend), copied)
        if not copied._slot.used:
            p._recording.steps.pop(0)
            del p._recording.slots[copied._slot.name]
    assert [step.get("algorithm") for step in p.job.info.steps] == ["numpy" if op == "gemm" else op for op in expected]
    np.testing.assert_allclose(made.numpy(), values, atol=1e-12)


def test_what_is_kept_or_used_again_is_not_folded_away(live, rng) -> None:
    a, b = rng.standard_normal((2, 4, 4))
    with live.program() as p:
        kept = p.gemm(a, b)
        twice = p.gemm(b, a)
        x, y, z = 2 * kept, 3 * twice, twice + twice
        p.keep(kept)
    for made, expected in ((kept, a @ b), (x, 2 * a @ b), (y, 3 * b @ a), (z, 2 * b @ a)):
        np.testing.assert_allclose(made.numpy(), expected, atol=1e-12)

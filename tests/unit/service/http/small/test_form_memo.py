"""The memory for one form: what is the same product, and what is not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gemmserve.wire import RESULT_DTYPES, format_npy_header
from gemmserve_service.http.requests.multipart_decoder import split
from gemmserve_service.http.requests.strict_json import one_shot_params
from gemmserve_service.http.small.form_memo import FormMemo
from gemmserve_service.jobs.small.small_products import SmallProducts
from gemmserve_service.schemas import GemmParams

BOUNDARY = b"0123abcd"
HEAD = b"POST /v1/gemm HTTP/1.1\r\n\r\n"


def form(a, b, params=b"{}", names=("a", "b", "params"), order="C", tail=b"--\r\n"):
    """A head, and a form behind it."""
    pieces = [HEAD[:-2]]
    for name in names:
        value = params
        if name != "params":
            x = {"a": a, "b": b}[name]
            value = format_npy_header(RESULT_DTYPES[x.dtype.name], x.shape, fortran_order=order == "F") + x.tobytes()
        pieces += [b"\r\n--", BOUNDARY, b'\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % name.encode(), value]
    return b"".join([*pieces, b"\r\n--", BOUNDARY, tail])


def matrices(seed, m=3, n=4, k=5, dtype=np.complex64):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(s) + 1j * rng.standard_normal(s)).astype(dtype) for s in ((m, k), (k, n))]


@pytest.fixture
def learnt():
    """A memory that has seen one form, and that form's product and parts."""
    memo, body = FormMemo(), form(*matrices(0))
    parts = split(body, BOUNDARY, len(HEAD))
    product = SmallProducts().get(GemmParams, lambda text: one_shot_params(GemmParams, text), body, parts)
    assert product is not None
    assert memo.find(body) is None
    memo.learn(body, len(HEAD), product, parts)
    return memo, product, parts


def test_other_elements_are_the_same_form(learnt):
    memo, product, parts = learnt
    for seed in range(1, 4):
        body = form(*matrices(seed))
        assert memo.find(body) == (product, parts)
        assert parts == split(body, BOUNDARY, len(HEAD))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(form(*matrices(1), params=b"{ }"), id="parameters of another length"),
        pytest.param(form(*matrices(1), params=b"[]"), id="parameters"),
        pytest.param(form(*matrices(1), names=("b", "a", "params")), id="other order of the parts"),
        pytest.param(form(*matrices(1), names=("a", "b")), id="a part less"),
        pytest.param(form(*matrices(1, m=4, n=3)), id="shapes of as many bytes"),
        pytest.param(form(*matrices(1), order="F"), id="order"),
        pytest.param(form(*matrices(1), tail=b"\r\n--"), id="another end"),
        pytest.param(form(*matrices(1))[:-1], id="shorter"),
        pytest.param(form(*matrices(1)) + b"x", id="longer"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_another_form(learnt, body):
    assert learnt[0].find(body) is None


def test_each_byte_around_the_elements_counts(learnt):
    memo, product, parts = learnt
    body = form(*matrices(2))
    elements = {
        at
        for slot in product.operands
        for at in range(parts[slot.name][0] + product.heads[slot.name], parts[slot.name][1])
    }
    for at in range(len(HEAD), len(body)):
        changed = bytearray(body)
        changed[at] ^= 1
        assert (memo.find(bytes(changed)) is None) == (at not in elements), at


def test_elements_may_have_the_bytes_of_a_delimiter(learnt):
    memo, product, parts = learnt
    body = bytearray(form(*matrices(3)))
    begin = parts["a"][0] + product.heads["a"]
    body[begin : begin + 12] = b"\r\n--" + BOUNDARY
    assert memo.find(bytes(body)) == (product, parts)


def test_a_form_with_much_around_its_elements_is_not_kept(learnt):
    memo, product, _ = learnt
    body = form(*matrices(0), params=b'{"alpha": 1}' + b" " * 5000)
    parts = split(body, BOUNDARY, len(HEAD))
    other = FormMemo()
    other.learn(body, len(HEAD), product, parts)
    assert other.find(body) is None
    assert memo.find(form(*matrices(4))) is not None


def test_the_last_form_is_kept(learnt):
    memo, _, _ = learnt
    chance = random.Random(1)
    products = SmallProducts()
    for _ in range(5):
        shape = {name: chance.randrange(1, 6) for name in "mnk"}
        body = form(*matrices(0, **shape))
        parts = split(body, BOUNDARY, len(HEAD))
        product = products.get(GemmParams, lambda text: one_shot_params(GemmParams, text), body, parts)
        memo.learn(body, len(HEAD), product, parts)
        assert memo.find(form(*matrices(9, **shape))) == (product, parts)

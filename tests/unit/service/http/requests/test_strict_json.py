"""JSON that the standard library would let pass."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_service.errors import InvalidParameters
from gemmserve_service.http.problems import MalformedJson
from gemmserve_service.http.requests.strict_json import parse_object, validate
from gemmserve_service.schemas import GemmParams


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b'{"alpha": NaN}', "NaN"),
        (b'{"alpha": -Infinity}', "Infinity"),
        (b'{"alpha": 1, "alpha": 2}', "twice"),
        (b'{"a": {"b": 1, "b": 1}}', "twice"),
        (b'{"alpha": 1', "cannot be read"),
        (b"", "cannot be read"),
        (b"{'alpha': 1}", "cannot be read"),
        (b'{"x": "\xff"}', "UTF-8"),
        (b'{"x": ' + b"9" * 5000 + b"}", "cannot be read"),
        ("{}".encode("utf-16"), "UTF-8"),
    ],
)
def test_malformed(text, word):
    with pytest.raises(MalformedJson, match=word):
        parse_object(text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [(b"[]", "an array"), (b"3", "a number"), (b'"x"', "a string"), (b"null", "null"), (b"true", "a boolean")],
)
def test_not_an_object(text, kind):
    with pytest.raises(InvalidParameters, match=kind):
        parse_object(text)


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.lists(st.text(max_size=5)),
        max_size=5,
    )
)
def test_what_json_writes_is_read(value):
    assert parse_object(json.dumps(value).encode()) == value


def test_every_wrong_field_is_named():
    with pytest.raises(InvalidParameters) as caught:
        validate(GemmParams, {"trans_a": "X", "gamma": 1, "alpha": [1, 2, 3]})
    assert [error["field"] for error in caught.value.extra["errors"]] == ["trans_a", "alpha", "gamma"]


@pytest.mark.parametrize("value", ["1", True, None, [1], [1, 2, 3], {"re": 1}, 1e999, [0, 1e999], 10**400])
def test_alpha_is_a_finite_scalar(value):
    with pytest.raises(InvalidParameters, match="alpha"):
        validate(GemmParams, {"alpha": value})


@pytest.mark.parametrize(("value", "number"), [(2, 2), (2.5, 2.5), ([0, -1], -1j), (-0.0, 0)])
def test_alpha(value, number):
    assert validate(GemmParams, {"alpha": value}).alpha == number

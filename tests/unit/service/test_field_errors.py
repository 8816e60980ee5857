"""Messages about fields: no words of pydantic's reach a user."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from gemmserve_service.errors import InvalidParameters
from gemmserve_service.field_errors import message_of
from gemmserve_service.http.requests.strict_json import validate
from gemmserve_service.schemas import PATTERNS, STEP_OPS, VALUE, VIEW, Deletion, JobRequest, SeveralJobs, StatesQuestion

ARRAY = "arr_01jd2w7m4h8k3n5p6q9r0s1t2v"
JOB = {"op": "gemm", "a": ARRAY, "b": ARRAY}
STEP = {"id": "x", **JOB}
LABEL_KEY = next(pattern for pattern, words in PATTERNS.items() if words.startswith("1 to 63"))
OF_AN_ARRAY = "must be the id of an array, arr_ and 26 digits and small letters, not "


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"trans_a": "H"}, "trans_a", "must be 'N', 'T', 'C' or 'R', not 'H'"),
        ({"priority": 1000}, "priority", "must be at most 100, not 1000"),
        ({"priority": "high"}, "priority", "must be a whole number, not 'high'"),
        ({"priority": 1.5}, "priority", "must be a whole number, not 1.5"),
        ({"timeout_s": 0}, "timeout_s", "must be more than 0, not 0"),
        ({"timeout_s": "1"}, "timeout_s", "must be a number, not '1'"),
        ({"ttl_s": 1e30}, "ttl_s", "must be at most 31536000, not 1e+30"),
        ({"verify": "yes"}, "verify", "must be true or false, not 'yes'"),
        ({"alpha": "1"}, "alpha", "a scalar is a number or [re, im]"),
        ({"gamma": 1}, "gamma", "there is no such field here"),
        ({"alhpa": 1}, "alhpa", "there is no such field here; is alpha meant?"),
        ({"reduce": "sum"}, "reduce", "there is no such field here"),
        ({"a": "nope"}, "a", f"{OF_AN_ARRAY}'nope'"),
        ({"a": "x" * 50}, "a", f"{OF_AN_ARRAY}'{'x' * 40}...'"),
        ({"a": {"id": ARRAY, "strides": [1.5]}}, "a.strides.0", "must be a whole number, not 1.5"),
        ({"config": 3}, "config", "must be an object, not 3"),
        ({"config": {"block_m": 0}}, "config.block_m", "must be at least 1, not 0"),
        ({"name": 5}, "name", "must be a string, not 5"),
        ({"labels": {"a b": ""}}, "labels.a b", f"the key must be {PATTERNS[LABEL_KEY]}, not 'a b'"),
        ({"labels": [1]}, "labels", "must be an object, not a list"),
        ({"labels": {str(n): "" for n in range(17)}}, "labels", "must have at most 16 items"),
        ({"op": "solve"}, "op", "must be one of 'gemm', 'gemm_reduce', 'program', not 'solve'"),
        ({"op": None}, "op", "must be one of 'gemm', 'gemm_reduce', 'program', not null"),
        ({"op": "program", "steps": [], "a": ..., "b": ...}, "steps", "must have at least 1 item"),
        ({"op": "program", "steps": [3], "a": ..., "b": ...}, "steps.0", "must be an object, not 3"),
        ({"op": "program", "steps": [{**STEP, "id": "x y"}], "a": ..., "b": ...}, "steps.0.id",
         "must be up to 64 letters, digits, _ and -, of which the first is a letter, not 'x y'"),
        ({"b": ...}, "b", "is missing"),
        ({"op": ...}, "op", "is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_job(fields, field, message) -> None:
    """`...`: without that field."""
    job = {name: value for name, value in (JOB | fields).items() if value is not ...}
    with pytest.raises(InvalidParameters) as caught:
        validate(TypeAdapter(JobRequest), job, tags=(*STEP_OPS, "program", VALUE, VIEW))
    assert caught.value.extra["errors"] == [{"field": field, "message": message}]
    assert caught.value.detail == f"{field}: {message}"


@pytest.mark.parametrize("value", [7, None, True, []])
def test_an_operand_is_told_both_ways_to_name_it_once(value) -> None:
    with pytest.raises(InvalidParameters, match=r"the id of an array .* or a view of one, an object, not") as caught:
        validate(TypeAdapter(JobRequest), JOB | {"a": value}, tags=(*STEP_OPS, "program", VALUE, VIEW))
    assert "; or: " not in caught.value.detail


def patterns(schema) -> set[str]:
    """All patterns in a JSON schema."""
    below = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else []
    own = {schema["pattern"]} if isinstance(schema, dict) and isinstance(schema.get("pattern"), str) else set()
    keys = set(schema.get("patternProperties", ())) if isinstance(schema, dict) else set()
    return own.union(keys, *map(patterns, below))


def test_every_pattern_has_its_words() -> None:
    models = (SeveralJobs, Deletion, StatesQuestion)
    found = set().union(*(patterns(model.model_json_schema()) for model in models))
    assert found == set(PATTERNS)


@pytest.mark.parametrize(("number", "shown"), [("1001", "1001"), ("9" * 4000, "9" * 40 + "...")])
def test_a_number_of_a_query_is_shown_without_quotes_as_far_as_it_is_short(number, shown) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(Annotated[int, Field(le=1000)]).validate_python(number)
    assert message_of(caught.value.errors()[0]) == f"must be at most 1000, not {shown}"


class Numbers(BaseModel):
    """A model of whatever pydantic may find, beside what requests have."""

    model_config = {"allow_inf_nan": False}

    x: float = 0
    n: int = 0
    text: str = ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": float("inf")}, "must be finite, not Infinity"),
        ({"n": 1.5}, "must be a whole number, not 1.5"),
        ({"n": "x"}, "must be a whole number, not 'x'"),
        ({"text": b"\xff"}, "must be a valid string, unable to parse raw data as a unicode string"),
    ],
)
def test_other_errors(fields, message) -> None:
    with pytest.raises(ValidationError) as caught:
        Numbers(**fields)
    (error,) = caught.value.errors()
    assert message_of(error) == message
    assert message_of(error, show=False) == message.partition(", not ")[0]

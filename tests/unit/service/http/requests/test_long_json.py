"""Long JSON: read as the short one is, in turns that are short whatever it holds, and refused by its bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time

import numpy as np
import pytest
from fuzz_targets import mutated
from long_bodies import BODIES

from gemmserve_service.errors import InvalidParameters, ServiceError, TooLarge
from gemmserve_service.http.problems import MalformedJson
from gemmserve_service.http.requests import long_json
from gemmserve_service.http.requests.batch_items import StoredItems
from gemmserve_service.http.requests.long_json import MAX_VALUE, read_object
from gemmserve_service.http.requests.strict_json import MAX_DEPTH, MAX_MEMBERS, parse_object
from gemmserve_service.http.routes.jobs import _read
from gemmserve_service.jobs.forms.known_forms import KnownForms
from gemmserve_service.runtime.yielding import Turns


def read(text, **lists):
    data = text if isinstance(text, bytes) else text.encode()
    return asyncio.run(read_object(data, {"items": lambda _, element: element, **lists}, Turns()))


def most(count):
    def keep(number, element):
        if number >= count:
            raise TooLarge("too many")
        return element

    return keep


GOOD = [
    "{}",
    " { } \n",
    '{"a": 1}',
    '{"items": []}',
    '{"items": [ ] , "b": null}',
    '{"items": [1, "two", {"three": [3.5, -1e3]}, [], true], "a": {"b": "c"}}',
    '\r\n{\t"items"\n:\r[1 , 2 ]}',
    '{"items": 5, "x": "\\u00e9\\ud83d\\ude00"}',
    '{"ä": "€😀", "items": ["€", "😀", "ÿ"]}',
    '{"\\u0069tems": [1, [2]]}',
]


@pytest.mark.parametrize("window", [64, 1000, long_json._WINDOW])
@pytest.mark.parametrize("text", GOOD)
def test_as_the_short_one(text, window, monkeypatch):
    monkeypatch.setattr(long_json, "_WINDOW", window)
    monkeypatch.setattr(long_json, "MAX_VALUE", 40)
    assert read(text) == parse_object(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", '{"a"', '{"a":', '{"a":1', '{"a":1,', '{"a":1,}', "{,}", "{1:2}", '{"a" 1}', '{"a":1 "b":2}',
        '{"items":[', '{"items":[1', '{"items":[1,', '{"items":[1,]}', '{"items":[,1]}', '{"items":[1 2]}', "{} {}",
        "{}x", '{"a":1,"a":2}', '{"a":1,"\\u0061":2}', '{"items":[{"a":1,"a":2}]}', '{"a":NaN}', '{"items":[Infinity]}',
        '{"a":01}', '{"a":"\t"}', b'{"a":"\xff"}', b'{"a":"\xc3', b'{"items":["\xed\xa0\x80"]}',
    ],
)  # fmt: skip
def test_malformed(text):
    data = text if isinstance(text, bytes) else text.encode()
    for parse in (parse_object, read):
        with pytest.raises(MalformedJson):
            parse(data)


@pytest.mark.parametrize("text", ["[]", "[{}]", "1", '"x"', "null", "true"])
def test_no_object(text):
    with pytest.raises(InvalidParameters, match="expected a JSON object"):
        read(text)


def test_mutations():
    """Whatever it is, both ways take it, as the same, or neither does."""
    chance = random.Random("long json")
    for _ in range(4000):
        data = mutated(chance.choice(GOOD).encode(), chance)
        outcomes = []
        for parse in (parse_object, read):
            try:
                outcomes.append(parse(data))
            except ServiceError:
                outcomes.append("refused")
        assert repr(outcomes[0]) == repr(outcomes[1]), data


@pytest.mark.parametrize("parse", [parse_object, read])
class TestBounds:
    def test_members(self, parse):
        def members(count):
            return ("{" + ",".join(f'"{n}":{{}}' for n in range(count)) + "}").encode()

        assert len(parse(members(MAX_MEMBERS))) == MAX_MEMBERS
        with pytest.raises(InvalidParameters, match="members"):
            parse(members(MAX_MEMBERS + 1))
        with pytest.raises(InvalidParameters, match="members"):
            parse(b'{"items":[' + members(MAX_MEMBERS + 1) + b"]}")

    @pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
    def test_levels(self, parse, opening, closing):
        def nested(depth):
            return f'{{"a":{opening * depth}1{closing * depth}}}'.encode()

        parse(nested(MAX_DEPTH - 1))
        for depth in (MAX_DEPTH + 1, 900):
            with pytest.raises(InvalidParameters, match="levels"):
                parse(nested(depth))
        with pytest.raises((InvalidParameters, MalformedJson)):
            parse(b'{"a":' + opening.encode() * 100_000)

    def test_brackets_in_strings_are_no_levels(self, parse):
        text = '{"a":"' + "[{" * 100 + '\\"[","b":["]"]}'
        assert parse(text.encode()) == json.loads(text)


def test_many_arrays_beside_each_other():
    text = '{"items":[' + ",".join(["[[1],[2]]"] * 1000) + "]}"
    assert read(text) == parse_object(text.encode()) == json.loads(text)


@pytest.mark.parametrize("where", ["a", "items"])
def test_values_have_a_longest(where):
    def sized(size):
        value = '"' + "x" * (size - 2) + '"'
        return f'{{"items":[{value}]}}' if where == "items" else f'{{"a":{value}}}'

    read(sized(MAX_VALUE))
    for size in (MAX_VALUE + 1, 10 * MAX_VALUE):
        with pytest.raises((InvalidParameters, MalformedJson), match=f"more than {MAX_VALUE}"):
            read(sized(size))


def test_numbers_are_not_cut():
    with pytest.raises((InvalidParameters, MalformedJson)):
        read('{"a":' + "1" * (2 * MAX_VALUE) + "}")
    with pytest.raises((InvalidParameters, MalformedJson)):
        read('{"a":0.' + "1" * (8 * MAX_VALUE) + "}")


def test_too_many_elements_end_it_at_once():
    seen = []

    def keep(number, element):
        seen.append((number, element))
        return most(3)(number, element)

    with pytest.raises(TooLarge):
        read('{"items":[' + "1," * 1000 + "1]}", items=keep)
    assert seen == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_what_is_kept_of_an_element_is_said_by_who_wants_it():
    assert read('{"items":[1,[2],3]}', items=lambda number, element: (number, type(element).__name__)) == {
        "items": [(0, "int"), (1, "list"), (2, "int")]
    }


class Counted(Turns):
    """A caller who asks for a pause gets it."""

    pauses = 0

    async def pause(self):
        self.pauses += 1


@pytest.mark.parametrize("before", ["", "{", '{"a"', '{"a":', '{"a":1', '{"a":1,', '{"items":[', '{"items":[1', "{}"])
def test_white_space_is_passed_in_windows_with_a_chance_for_others_between(before):
    """Wherever it is: 16 MiB of it took 30 ms in one turn."""
    turns, windows = Counted(), 20
    data = (before + " " * windows * long_json._WINDOW).encode()
    with contextlib.suppress(MalformedJson):
        asyncio.run(read_object(data, {"items": most(5)}, turns))
    assert turns.pauses >= windows


async def test_nothing_is_kept_of_items_that_the_garbage_collector_looks_at(settings):
    """Five million arrays in the items of one batch were a tenth of a second for it, again and again."""
    item = {"a": "arr_" + "0" * 26, "b": "arr_" + "1" * 26, "alpha": [[{}]] * 100, "beta": {"x": [1.5] * 100}}
    for count in (5, 500):
        document = json.dumps({"items": [{**item, "n": n} for n in range(count)]}).encode()
        assert (len(document) < long_json.LONG) == (count == 5)
        stored = await StoredItems.read(document, settings)
        kept = [value for entry in stored.envelope.items for value in entry]
        assert {type(value) for value in kept} == {str, type(None)}
        assert [json.loads(entry.overrides)["n"] for entry in stored.envelope.items] == list(range(count))


@pytest.mark.parametrize("steps", [[], [{"id": "x"}] * 900])
async def test_results_to_keep_are_counted_before_they_are_looked_at(client, problem, steps):
    """Each of thirty thousand numbers was a problem of its own."""
    document = {"op": "program", "keep": [1] * 1001, "steps": steps}
    assert (len(json.dumps(document)) < long_json.LONG) == (not steps)
    told = problem(await client.post("/v1/jobs", json=document), 422, "parameter-invalid")
    assert "1001 results" in told["detail"]
    assert "errors" not in told


@pytest.mark.parametrize("name", [name for name, (path, kind, _) in BODIES.items() if "json" in kind])
def test_no_turn_is_long(name, settings):
    """By the processor's time of this thread, which others on the machine do not take; `make attacks` is exact."""
    path, _, make = BODIES[name]
    body = bytearray(make().encode())
    most = settings.max_program_steps
    reading = StoredItems.read(body, settings) if path == "/v1/batch" else _read(KnownForms(), body, most)
    longest = 0.0
    try:
        while True:
            began = time.thread_time()
            try:
                reading.send(None)
            finally:
                longest = max(longest, time.thread_time() - began)
    except (StopIteration, ServiceError, ValueError):
        pass
    assert longest < 1.0


async def test_errors_of_a_long_program_are_named_and_counted(client, problem):
    """As those of a short one."""
    wrong = {"id": "x", "op": "gemm", "a": "$y", "b": 5, "strange": 1}
    for count in (2, 900):
        padding = [{"id": f"s{n}", "op": "gemm", "a": "arr_" + "0" * 26, "b": "arr_" + "0" * 26} for n in range(count)]
        document = problem(
            await client.post("/v1/jobs", json={"op": "program", "steps": [*padding, wrong]}), 422, "parameter-invalid"
        )
        fields = [entry["field"] for entry in document["errors"]]
        assert fields == [f"steps.{count}.b", f"steps.{count}.strange"]
    many = {"op": "program", "steps": [{"id": "x", "op": "gemm", **{f"n{n}": 1 for n in range(50)}}] * 900}
    document = problem(await client.post("/v1/jobs", json=many), 422, "parameter-invalid")
    assert len(document["errors"]) == 20


async def test_a_long_program_is_taken(client, put):
    array = await put(np.eye(2))
    steps = [{"id": f"s{n}", "op": "gemm", "a": array, "b": array, "compute": "auto"} for n in range(900)]
    document = {"op": "program", "keep": ["s1"], "steps": steps}
    assert len(json.dumps(document)) > long_json.LONG
    answer = await client.post("/v1/jobs", json=document, headers={"Prefer": "wait=60"})
    assert answer.json()["state"] == "succeeded", answer.text
    request = (await client.get(f"/v1/jobs/{answer.json()['id']}")).json()["request"]
    assert request["steps"] == steps

"""Texts of jobs that are found again: what comes of them is what a parser makes of them, or nothing."""

from __future__ import annotations

import json
import random

import pytest
from pydantic import TypeAdapter

from gemmserve_service.errors import InvalidParameters
from gemmserve_service.http.requests.strict_json import parse_object, validate
from gemmserve_service.jobs.forms import known_forms
from gemmserve_service.jobs.forms.form import plain
from gemmserve_service.jobs.forms.known_forms import MAX_CHARACTERS, KnownForms, elements
from gemmserve_service.schemas import JobRequest

A, B, C, D = (f"arr_01jd2w7m4h8k3n5p6q9r0s1t2{last}" for last in ("v", "w", "x", "y_12"))
REQUEST = TypeAdapter(JobRequest)


def parse(text):
    return validate(REQUEST, parse_object(text.encode()))


@pytest.fixture
def known():
    return KnownForms()


def taught(known, text):
    known.learn(text, parse)
    known.learn(text, parse)
    return known.find(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"op":"gemm","a":"%s","b":"%s"}',
        '{"b":"%s","op":"gemm","a":"%s"}',
        '{"c":"%s","b":"%s","a":"%s","op":"gemm"}',
        '{"op":"gemm","a":"%s","c":"%s","beta":0,"b":"%s"}',
        ' {\n"op" : "gemm", "alpha": [1.50, 2e0] ,"a": "%s",\t"b":"%s" } ',
        '{"op":"gemm_reduce","a":"%s","b":"%s","reduce":["sum"],"axis":"n"}',
        '{"op":"gemm","a":"%s","b":"%s","name":"x","labels":{"run":"7"},"ttl_s":5,"priority":1}',
    ],
)
def test_a_text_that_comes_again_is_known_on_other_operands(known, text):
    count = text.count("%s")
    assert known.find(text % (A, B, C)[:count]) is None
    known.learn(text % (A, B, C)[:count], parse)
    assert known.find(text % (A, B, C)[:count]) is None, "what comes once is not kept"
    known.learn(text % (B, B, C)[:count], parse)
    for ids in ((A, B, C), (D, A, B), (C, C, C), (B, D, D)):
        given = text % ids[:count]
        asked = known.find(given)
        assert plain(asked) == parse(given)
        assert asked.form is known.find(text % (A, B, C)[:count]).form
    assert known.find(text % (A, B.upper(), C)[:count]) is None
    assert known.find((text % (A, B, C)[:count]).replace("op", "oq")) is None
    assert known.find(text % (A[:-1], B, C)[:count]) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"op":"gemm","a":"%s","b":"%s","name":"%s"}',
        '{"op":"gemm","a":"%s","b":"%s","labels":{"of":"%s"}}',
        '{"op":"gemm","a":{"id":"%s"},"b":"%s"}',
        '{"op":"gemm","a":"%s","b":"%s","c":{"id":"%s"}}',
        '{"op":"program","steps":[{"id":"x","op":"gemm","a":"%s","b":"%s"}]}',
        '{"op":"gemm","a":"%s","b":"%s","labels":{"x":"a\\\\\\"%s"}}',
        '{"op":"gemm","a":"%s"}',
    ],
)
def test_ids_that_are_no_operands_are_not_taken_for_some(known, text):
    assert taught(known, text % (A, B, C)[: text.count("%s")]) is None


def test_an_operand_named_twice_is_not_learned(known):
    """As the app reads it, it is no job at all, whatever a parser that takes the last one would say."""
    assert taught(known, f'{{"op":"gemm","a":"{A}","a":"{B}","b":"{C}"}}') is None


def test_long_ones_and_too_many_are_not_kept(known):
    long = f'{{"op":"gemm","a":"{A}","b":"{B}"{" " * MAX_CHARACTERS}}}'
    assert parse(long)
    assert taught(known, long) is None
    texts = [f'{{"op":"gemm","a":"{A}","b":"{B}","priority":{n - 100}{" " * k}}}' for n in range(200) for k in range(8)]
    assert all(taught(known, text) is not None for text in texts)
    assert len(known._known) == known_forms._MAX_KEPT
    assert known.find(texts[0]) is None
    assert taught(known, texts[0]) is not None, "it may come back"
    for n in range(2 * known_forms._MAX_SEEN):
        known.learn(f'{{"op":"gemm","a":"{A}","b":"{B}","priority":1{" " * (n % 1024)}{" " * (n // 1024)}}}', parse)
    assert len(known._seen) <= known_forms._MAX_SEEN


def test_what_is_asked_for_often_stays(known):
    often, *others = [f'{{"op":"gemm","a":"{A}","b":"{B}","priority":1{" " * n}}}' for n in range(600)]
    assert taught(known, often) is not None
    for other in others:
        assert taught(known, other) is not None
        assert known.find(often) is not None


@pytest.mark.parametrize("rest", ['"name":"%s"', '"c":{"id":"%s"}'])
def test_what_has_no_form_is_found_out_once(known, rest):
    parsed = []

    def noted(text):
        parsed.append(text)
        return parse(text)

    for n in range(5):
        known.learn(f'{{"op":"gemm","a":"{A}","b":"{B}",{rest % (C, D)[n % 2]}}}', noted)
    assert len(parsed) == 1


def random_job(random):
    """A job's text, as somebody may write it; most have a form."""
    job = {"op": "gemm", "a": random.choice((A, B)), "b": random.choice((A, C, "arr_1", {"id": A}))}
    for name, values in {
        "c": (A, D, None, 5),
        "alpha": (1, [1, 2], [1], "x", 1e-9),
        "name": ("x", A, "a]b", "}{", '"', "[]", "\\"),
        "labels": ({}, {"k": "v"}, {"k": A}, {"k": "]}"}),
        "priority": (0, 101, -5),
        "trans_a": ("T", "X"),
        "unknown": (None,),
    }.items():
        if random.random() < 0.2:
            job[name] = random.choice(values)
    entries = list(job.items())
    random.shuffle(entries)
    separators = random.choice([(",", ":"), (", ", ": "), (" ,\n", " :\t")])
    return json.dumps(dict(entries), separators=separators)


def test_random_texts_are_what_a_parser_makes_of_them(known):
    rng = random.Random(5)
    found = 0
    for _ in range(3000):
        text = random_job(rng)
        asked = known.find(text)
        try:
            request = parse(text)
        except InvalidParameters:
            assert asked is None, text
            continue
        known.learn(text, parse)
        if asked is not None:
            found += 1
            assert plain(asked) == request, text
    assert found > 200


def split(text, most=1000):
    return [*elements(text, most)]


def test_elements_are_those_of_a_parser():
    rng = random.Random(7)
    plain_ones = 0
    for _ in range(2000):
        jobs = [random_job(rng) for _ in range(rng.randrange(1, 5))]
        text = rng.choice(['{"jobs":[%s]}', ' { "jobs" :\n[ %s ]\t} ']) % rng.choice([",", " , "]).join(jobs)
        try:
            found = split(text)
        except ValueError:
            continue
        # Where each is an object, as those must be that are parsed or known, they are the elements.
        try:
            objects = [json.loads(each) for each in found]
        except ValueError:
            continue
        plain_ones += 1
        assert objects == json.loads(text)["jobs"]
    assert plain_ones > 400


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", '{"jobs":[]}', '{"jobs":{}}', '{"jobs":[1]}', '{"jobs":[{}', '{"jobs":[{}]', '{"jobs":[{},]}',
        '{"jobs":[{}{}]}', '{"jobs":[{}]}x', '{"jobs":[{}],"jobs":[{}]}', '{"jobs":[{}],"more":1}', '{"Jobs":[{}]}',
        '{"jobs":[{"a":"\\""}]}', '{"jobs":[{"a":{"b":1}}]}', '{"jobs":[[{}]]}', '{"jobs":[{"a":["]"]}]}',
        '{"jobs":[{"a":"' + "x" * MAX_CHARACTERS + '"}]}', '\ufeff{"jobs":[{}]}', '{"jobs":[{}\u00a0]}',
    ],
)  # fmt: skip
def test_what_is_no_list_of_plain_jobs(text):
    with pytest.raises(ValueError, match="plain"):
        split(text)


def test_no_more_are_taken_than_there_may_be():
    text = f'{{"jobs":[{",".join(["{}"] * 5)}]}}'
    assert split(text, 5) == ["{}"] * 5
    with pytest.raises(ValueError, match="plain"):
        split(text, 4)


def test_hostile_texts_take_no_longer_than_others():
    """Whatever is tried again and again would take hours here."""
    for each in ('{"a":' + "[1]" * 600, "{" + '"' * 2000, "{" + "[" * 2000, "{[" + "1" * 2000, "{" + "]" * 2000):
        with pytest.raises(ValueError, match="plain"):
            split('{"jobs":[' + ",".join([each] * 400))

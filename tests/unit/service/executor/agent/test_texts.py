"""Texts of tasks: what is known of one, and what of it goes on to a worker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from works import form_of

from gemmserve_service.executor.agent.link import Link
from gemmserve_service.executor.agent.rows import SHIFT, uses_of
from gemmserve_service.executor.agent.texts import Finished, Texts, finished_in, frame_with
from gemmserve_service.executor.join_protocol import Joined
from gemmserve_service.executor.protocol import (
    TO_WORKER,
    Done,
    Failed,
    Kind,
    Part,
    ProtocolError,
    RunBatch,
    Work,
    encode,
    row_without_place,
)
from gemmserve_service.schemas import GemmParams, Timings

KIND = Kind(dtype="float64", shape=(4, 4), order="C")
FORM = form_of(GemmParams(op="gemm"), {"a": KIND, "b": KIND}, {"d": KIND})
ROWS = [("x", "/x", 4096, 64, "a1"), ("y", "/y", 4096, 0, None), row_without_place("d1")]


def work(task="t1", rows=ROWS, form=FORM, at=0, **fields):
    part = Part(form=form, algorithm="blas", operands={"a": [(0, 0)], "b": [(1, at)]}, results={"d": [(2, 0)]})
    return Work(task=task, extents=rows, parts=[part], **fields)


def text(*works):
    return encode(RunBatch(tasks=list(works)))[4:]


def knows(*works):
    texts = Texts()
    texts.learn(text(*works), RunBatch(tasks=list(works)))
    return texts


@pytest.mark.parametrize(
    "name", ["t2", 't,"parts":[', "t\\", 't"}]}', "grüße\x00"], ids=["plain", "tail", "slash", "end", "other"]
)
def test_a_task_of_a_known_text_is_what_it_says(name):
    texts = knows(work(attempt=2, defer=True, express=True))
    rows = [(name, f"/{name}", 8192, 0, None), ("z", "/z", 4096, 128, f"a{name}"), ("e", "/e", 4096, 0, "d2")]
    same = work(name, rows, attempt=2, defer=True, express=True)
    sent = texts.find(text(same))
    assert (sent.work, sent.uses) == (same, uses_of(same))
    on_node = [("n", '/n"\\', 4096, 7, None), *rows[1:]]
    frame = frame_with(sent.tail, same.task, on_node)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert TO_WORKER.validate_json(frame[4:]) == RunBatch(tasks=[replace(same, extents=on_node)])


def test_a_text_that_differs_is_not_known():
    texts = knows(work())
    other = form_of(GemmParams(op="gemm", alpha=2.0), {"a": KIND, "b": KIND}, {"d": KIND})
    for task in (work(attempt=1), work(form=other), work(verify=True), work(at=128)):
        assert texts.find(text(task)) is None


@pytest.mark.parametrize(
    "works",
    [[work("t1"), work("t2")], [work(form=FORM + " " * 4096)], [work(at=SHIFT)]],
    ids=["two", "long", "moved"],
)
def test_what_has_to_be_read_whole_is_not_kept(works):
    texts = knows(*works)
    assert len(texts) == 0
    assert texts.find(text(*works)) is None


def test_two_tasks_are_not_taken_for_the_last_of_them():
    assert knows(work("t2")).find(text(work("t1"), work("t2"))) is None


@pytest.mark.parametrize(
    "head",
    [
        "[",
        '{"kind":"run_batch","tasks":[{"task":"t1"',
        '{"kind":"run_batch","tasks":[{"task":"t1","extents":[["x","/x",4096,0]]',
        '{"kind":"run_batch","tasks":[{"task":"t1","extents":[],"more":1',
        '{"kind":"run_batch","more":1,"tasks":[{"task":"t1","extents":[]',
        '{"kind":"run_batch","tasks":[{"task":"t1","extents":null',
        '{"kind":"run_batch","tasks":[{"task":"t1","extents":[]},{"task":"t2","extents":[]',
        '{"kind":"run_batch","tasks":[{"task":"t1","extents":' + "[" * 100_000 + "]" * 100_000,
        "\xff",
    ],
    ids=range(9),
)
def test_a_head_that_is_none_is_left_to_who_reads_all_of_it(head):
    body = text(work())
    tail = body[body.index(b',"parts":') :]
    assert knows(work()).find(head.encode("latin-1") + tail) is None


@pytest.mark.parametrize(
    "row",
    [
        '["x",1,4096,0,null]',
        '["x","/x","4096",0,null]',
        '["x","/x",4096,0.5,null]',
        '["x","/x",true,0,null]',
        '["x","/x",1,0,7]',
    ],
)
def test_a_row_of_other_types_is_refused_by_who_reads_all_of_it(row):
    other = text(work()).replace(b'["x","/x",4096,64,"a1"]', row.encode())
    assert other != text(work())
    assert knows(work()).find(other) is None
    assert knows(work()).find(text(work())) is not None


def test_a_task_that_lacks_a_row():
    with pytest.raises(ProtocolError, match="task t9"):
        knows(work()).find(text(work("t9", ROWS[:2])))


def test_the_texts_that_came_last_are_kept():
    texts = Texts()
    first, *others = [work(attempt=number) for number in range(513)]
    for task in (first, *others[:-1]):
        texts.learn(text(task), RunBatch(tasks=[task]))
    assert texts.find(text(first)) is not None
    texts.learn(text(others[-1]), RunBatch(tasks=[others[-1]]))
    assert len(texts) == 512
    assert texts.find(text(first)) is not None
    assert texts.find(text(others[0])) is None


async def test_a_link_reads_what_comes_again_by_its_text():
    link, heard = Link(), []
    link.on_message, link.on_task = heard.append, heard.append
    joined = Joined(worker="n/cpu", link="s", silence_s=60, heartbeat_timeout_s=60, block_side=1, server="s")
    messages = [RunBatch(tasks=[work(task)]) for task in ("t1", "t2")]
    link.data_received(b"".join(map(encode, (joined, *messages))))
    link.close("over")
    first, second = heard
    assert first == messages[0]
    assert second.work == messages[1].tasks[0]
    assert second.tail is not None


def done(task="t1", **fields):
    return Done(task=task, algorithm="blas", timings=Timings(), **fields).model_dump_json().encode()


def test_an_answer_by_its_first_and_last_words():
    assert finished_in(done("grüße")) == Finished("grüße")


@pytest.mark.parametrize(
    "body",
    [
        done(written=False),
        done('t"1'),
        Failed(task="t1", slug="s", status=500, title="t", detail="d", extra={"written": True})
        .model_dump_json()
        .encode(),
        b'{"kind":"done","task":"t1","timings":{"written":true}}',
        b"",
    ],
)
def test_any_other_answer_is_read_whole(body):
    assert finished_in(body) is None

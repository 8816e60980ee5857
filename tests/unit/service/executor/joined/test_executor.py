"""Workers that join: their tasks, what is refused of them, and what becomes of their work when they go."""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np
import pytest

from gemmserve_service.executor.join_protocol import GREETING, Leave, Pulse, Rate, Refused, ResultBytes, binary_frame
from gemmserve_service.executor.joined import link
from gemmserve_service.executor.joined.connection import GREETING_S
from gemmserve_service.executor.joined.executor import EXPECTED_S, HELLO_S, MAX_UNKNOWN
from gemmserve_service.executor.protocol import Beat, Cancel, Failed, Kept, Stop, Written
from gemmserve_service.schemas import JobState
from gemmserve_service.tenancy.api_keys import Scope
from gemmserve_service.tenancy.keyring import create_key, revoke_key

A = np.arange(36.0).reshape(6, 6)
LARGE = np.arange(1 << 16, dtype="f8").reshape(256, 256)  # too large for a frame of operands


async def until(condition):
    """Turns the event loop until that is so."""
    while not condition():  # noqa: ASYNC110 (of the code under test, which sets no event)
        await asyncio.sleep(0)


async def submitted(core, put, gemm, array=A):
    a = await put(core.store, array)
    return (await core.jobs.submit(gemm(a, a)))[0]


def failed(work):
    return Failed(task=work.task, slug="device-error", status=500, title="Device error", detail="it broke")


async def test_a_front_without_workers_is_ready_when_one_has_joined(joined, make_node):
    assert not joined.ready()[0]
    await make_node(hello=False)
    assert not joined.ready()[0]
    node = await make_node("other")
    assert joined.ready()[0]
    (device,) = joined.devices()
    assert (device.id, device.state, device.link.host) == ("other/cpu", "ready", "there")
    node.say(Rate(bytes_s=5e8))
    node.say(Beat())


async def test_a_task_goes_over_the_link_and_its_bytes_by_data_connections(
    joined, make_node, put, gemm, fetch, targets
):
    node = await make_node()
    info = await submitted(joined, put, gemm, LARGE)
    work = await node.task()
    assert (work.attempt, node.frames) == (1, [])
    reads, writes = targets
    data = await node.data()
    answer = await data.exchange("GET", reads(work, "a", LARGE.nbytes))
    assert (answer.status, answer.body) == (200, LARGE.tobytes())
    assert (await data.exchange("PUT", writes(work), (LARGE @ LARGE).tobytes())).status == 204
    node.done(work)
    done = await joined.jobs.wait(info.id, 60)
    assert done.state == JobState.SUCCEEDED
    np.testing.assert_array_equal(fetch(joined.store, done.result["d"]), LARGE @ LARGE)
    link = joined.devices()[0].link
    assert (link.fetched_bytes, link.returned_bytes) == (LARGE.nbytes, LARGE.nbytes)


async def test_small_arrays_travel_in_frames(joined, make_node, put, gemm, fetch):
    node = await make_node()
    info = await submitted(joined, put, gemm)
    work = await node.task()
    assert [raw for _, raw in node.frames] == [A.tobytes()]  # once, though it is both operands
    node.inline(work, (A @ A).tobytes())
    node.done(work)
    done = await joined.jobs.wait(info.id, 60)
    np.testing.assert_array_equal(fetch(joined.store, done.result["d"]), A @ A)


async def test_small_operands_are_sent_once(joined, make_node, put, gemm, fetch):
    node = await make_node()
    a = await put(joined.store, A)
    for number in range(3):
        if number == 2:
            node.writer.close()
            node = await make_node("another")  # which was sent nothing yet
        info = (await joined.jobs.submit(gemm(a, a)))[0]
        work = await node.task()
        assert len(node.frames) == 1, number
        node.inline(work, (A @ A).tobytes())
        node.done(work)
        done = await joined.jobs.wait(info.id, 60)
        np.testing.assert_array_equal(fetch(joined.store, done.result["d"]), A @ A)


async def test_a_result_may_come_in_a_large_frame(joined, make_node, put, gemm, fetch):
    node = await make_node()
    info = await submitted(joined, put, gemm, LARGE)
    work = await node.task()
    node.inline(work, (LARGE @ LARGE).tobytes())
    node.done(work)
    done = await joined.jobs.wait(info.id, 60)
    np.testing.assert_array_equal(fetch(joined.store, done.result["d"]), LARGE @ LARGE)
    assert joined.devices()[0].link.returned_bytes == LARGE.nbytes


async def test_the_head_of_a_large_frame_is_read_once(joined, make_node, put, gemm, fetch, monkeypatch):
    node = await make_node()
    info = await submitted(joined, put, gemm, LARGE)
    work = await node.task()
    read = []
    really = link._result_in
    monkeypatch.setattr(link, "_result_in", lambda head: read.append(head) or really(head))
    raw = (LARGE @ LARGE).tobytes()
    node.inline(work, raw, of=len(raw) // 2)  # two parts of the frame at least
    await until_returned(joined, len(raw) // 4)
    node.inline(work, raw, after=len(raw) // 2)
    node.done(work)
    done = await joined.jobs.wait(info.id, 60)
    np.testing.assert_array_equal(fetch(joined.store, done.result["d"]), LARGE @ LARGE)
    assert len(read) == 1


async def test_a_result_before_the_hello_ends_the_link(joined, make_node):
    node = await make_node(hello=False)
    head = ResultBytes(task="job_1", attempt=1, extent="x", offset=0)
    node.say(b"".join(binary_frame(head, b"abc")))
    assert await node.hear() is None


async def test_what_came_of_a_large_frame_that_was_cut_off_does_not_stay(joined, make_node, put, gemm, fetch):
    slow = await make_node("slow")
    info = await submitted(joined, put, gemm, LARGE)
    work = await slow.task()
    slow.inline(work, b"\xff" * LARGE.nbytes, of=LARGE.nbytes // 2)
    await until_returned(joined, LARGE.nbytes // 4)
    slow.writer.close()
    honest = await make_node("honest")
    again = await honest.task()
    assert again.attempt == 2
    honest.inline(again, (LARGE @ LARGE).tobytes())
    honest.done(again)
    done = await joined.jobs.wait(info.id, 60)
    np.testing.assert_array_equal(fetch(joined.store, done.result["d"]), LARGE @ LARGE)


async def test_a_result_may_come_row_by_row(joined, make_node, put, gemm, fetch, targets):
    node = await make_node()
    info = await submitted(joined, put, gemm, LARGE)
    work = await node.task()
    data, product = await node.data(), LARGE @ LARGE
    (extent, offset), row = (targets[1](work).split("/")[5].split("?")[0], int(targets[1](work).split("=")[1])), 2048
    assert extent
    for first in (0, 1024):
        columns = product.view(np.uint8)[:, first : first + 1024]
        target = targets[1](work, offset=offset + first, rows=256, stride=row)
        assert (await data.exchange("PUT", target, columns.tobytes())).status == 204
    node.done(work)
    done = await joined.jobs.wait(info.id, 60)
    np.testing.assert_array_equal(fetch(joined.store, done.result["d"]), product)


class TestStaleResults:
    """What an attempt that is over sends changes no byte."""

    async def test_an_upload_that_is_half_way_when_the_link_ends(self, joined, make_node, put, gemm, fetch, targets):
        old = await make_node()
        info = await submitted(joined, put, gemm, LARGE)
        work = await old.task()
        wrong, right = np.full_like(LARGE, np.nan).tobytes(), (LARGE @ LARGE).tobytes()
        data = await old.data()
        data.send("PUT", targets[1](work), wrong[:100_000], length=len(wrong))
        await until_returned(joined, 100_000)
        new = await make_node()  # of the same name: the old link ends
        assert await old.hear() is None
        again = await new.task()
        assert again.attempt == 2
        assert (await (await new.data()).exchange("PUT", targets[1](again), right)).status == 204
        data.writer.write(wrong[100_000:])
        assert (await data.answer()).status == 409
        new.done(again)
        done = await joined.jobs.wait(info.id, 60)
        assert fetch(joined.store, done.result["d"]).tobytes() == right
        assert joined.executor.counts.stale_results == 1

    async def test_an_upload_that_is_half_way_when_its_place_becomes_another_arrays(
        self, joined, make_node, put, gemm, targets
    ):
        """The task ends, its place is free, and serves the next array: of that not a byte changes."""
        node = await make_node()
        info = await submitted(joined, put, gemm, LARGE)
        work = await node.task()
        wrong = np.full_like(LARGE, np.nan).tobytes()
        data = await node.data()
        data.send("PUT", targets[1](work), wrong[:100_000], length=len(wrong))
        await until_returned(joined, 100_000)
        node.say(failed(work))
        assert (await joined.jobs.wait(info.id, 60)).state == JobState.FAILED
        other = await put(joined.store, LARGE + 1)
        pinned = joined.store.pin(other.id)
        assert pinned.extent.file[0] == work.extents[work.parts[0].results["d"][0][0]][0]  # the very place
        data.writer.write(wrong[100_000:])
        assert (await data.answer()).status == 409
        assert pinned.extent.view(LARGE.nbytes).tobytes() == (LARGE + 1).tobytes()
        pinned.release()

    @pytest.mark.parametrize("change", [{"attempt": 2}, {"attempt": 0}, {"task": "job_unknown"}])
    async def test_another_attempt_or_task_than_it_has(self, joined, make_node, put, gemm, targets, change):
        node = await make_node()
        await submitted(joined, put, gemm, LARGE)
        work = await node.task()
        target = targets[1](work, **change)
        assert (await (await node.data()).exchange("PUT", target, LARGE.tobytes())).status == 409

    @pytest.mark.parametrize("array", [A, LARGE], ids=["small", "large"])
    async def test_what_comes_in_a_frame_for_a_task_that_is_over(self, joined, make_node, put, gemm, array):
        node = await make_node()
        info = await submitted(joined, put, gemm, array)
        work = await node.task()
        node.say(failed(work))
        node.inline(work, bytes(array.nbytes))
        node.done(work)
        assert (await joined.jobs.wait(info.id, 60)).state == JobState.FAILED
        await heartbeat(node, joined)
        assert joined.executor.counts.stale_results == 1

    async def test_a_link_that_has_ended_is_told_so_by_its_secret(self, joined, make_node, put, gemm, targets):
        node = await make_node()
        await submitted(joined, put, gemm, LARGE)
        work = await node.task()
        node.writer.close()
        second = await make_node("second")
        again = await second.task()
        data = await node.data()
        assert (await data.exchange("PUT", targets[1](again), LARGE.tobytes())).status == 409
        data = await node.data()
        assert (await data.exchange("GET", targets[0](again, "a", 8))).status == 410
        data = await node.data(secret="0" * 32)
        assert (await data.exchange("GET", targets[0](work, "a", 8))).status == 401


async def until_returned(core, nbytes):
    """Waits until so many bytes of results have come."""
    await until(lambda: core.executor.counts.returned_bytes >= nbytes)


async def heartbeat(node, core):
    """Waits until the front has heard all that the node has said."""
    (worker,) = [worker for worker in core.executor.workers() if worker.id == node.join.worker]
    worker.prepares = True
    node.say(Beat(prepares=False))
    await until(lambda: not worker.prepares)


async def test_done_without_the_result_is_no_answer(joined, make_node, put, gemm, fetch):
    liar = await make_node("liar")
    info = await submitted(joined, put, gemm)
    work = await liar.task()
    liar.inline(work, (A @ A).tobytes()[:-8])
    liar.done(work)
    assert await liar.hear() is None
    honest = await make_node("honest")
    work = await honest.task()
    assert work.attempt == 2
    honest.inline(work, (A @ A).tobytes())
    honest.done(work)
    done = await joined.jobs.wait(info.id, 60)
    np.testing.assert_array_equal(fetch(joined.store, done.result["d"]), A @ A)


async def test_a_download_ends_with_the_last_task_that_reads_it(joined, make_node, put, gemm, targets):
    """What is not sent yet would be another array's bytes by then."""
    node = await make_node()
    array = np.zeros((2048, 2048))  # more than the system keeps of a connection
    await submitted(joined, put, gemm, array)
    work = await node.task()
    data = await node.data()
    data.writer.transport.pause_reading()
    data.send("GET", targets[0](work, "a", array.nbytes))
    await until(lambda: joined.executor.counts.fetched_bytes)
    node.say(failed(work))
    await heartbeat(node, joined)
    data.writer.transport.resume_reading()
    assert await data.answer() is None
    assert joined.executor.counts.fetched_bytes < array.nbytes


async def test_two_requests_at_once_are_answered_in_turn(joined, make_node, put, gemm, targets):
    node = await make_node()
    await submitted(joined, put, gemm, LARGE)
    work = await node.task()
    data = await node.data()
    data.send("GET", targets[0](work, "a", LARGE.nbytes))
    data.send("PUT", "/internal/probe", b"x" * 1000)
    data.send("GET", "/internal/probe?length=70000")
    data.send("GET", targets[0](work, "a", 16))
    answers = [await data.answer() for _ in range(4)]
    assert [(each.status, len(each.body)) for each in answers] == [
        (200, LARGE.nbytes),
        (204, 0),
        (200, 70000),
        (200, 16),
    ]


async def test_a_worker_that_goes_is_expected_back_and_then_no_more(joined, make_node, eventually):
    node = await make_node()
    (worker,) = joined.executor.workers()
    node.writer.close()
    await eventually(lambda: not worker.ready)
    assert [device.state for device in joined.devices()] == ["away"]
    assert joined.scheduler.fleet.representatives  # work is taken for it
    again = await make_node()
    assert joined.executor.workers() == (worker,)
    assert worker.restarts == 1
    again.writer.close()
    await eventually(lambda: not worker.ready)
    joined.executor.tick(time.monotonic() + EXPECTED_S - 60)
    assert joined.executor.workers() == (worker,)
    joined.executor.tick(time.monotonic() + EXPECTED_S + 60)
    assert joined.executor.workers() == ()
    assert not joined.scheduler.fleet.representatives
    third = await make_node()
    assert third.joined.worker == "node/cpu"
    assert [device.state for device in joined.devices()] == ["ready"]


async def test_a_node_that_says_that_it_ends_is_gone_at_once_unless_it_was_the_last(joined, make_node, eventually):
    first, second = await make_node("first"), await make_node("second")
    first.say(Leave())
    assert await first.hear() is None
    await until(lambda: [worker.id for worker in joined.executor.workers()] == ["second/cpu"])
    second.say(Leave())
    assert await second.hear() is None
    (left,) = joined.executor.workers()  # jobs wait for such a device
    assert not left.ready
    await make_node("second")
    assert left.ready


async def test_a_silent_link_is_given_up_and_its_task_goes_elsewhere(joined, make_node, put, gemm):
    node = await make_node("silent")
    await submitted(joined, put, gemm)
    work = await node.task()
    other = await make_node("other")
    (worker,) = [each for each in joined.executor.workers() if each.id == "silent/cpu"]
    joined.executor.kill(worker, "test")
    again = await other.task()
    assert (again.task, again.attempt) == (work.task, 2)
    assert await node.hear() is None


async def test_a_link_over_which_nothing_comes_is_given_up_long_before_a_worker_is_taken_for_hung(
    make_joined, make_node
):
    core = await make_joined(join_silence_s=700)
    node = await make_node(core=core)
    (worker,) = core.executor.workers()
    now = time.monotonic()
    for seconds in range(100, 1000, 100):  # no pause of this process
        core.executor.tick(now + seconds)
        assert worker.ready == (seconds < 700)
    assert await node.hear() is None


async def test_a_pulse_is_the_link_s_sign_of_life_and_not_the_worker_s(joined, make_node, eventually):
    node = await make_node()
    (worker,) = joined.executor.workers()
    link = joined.executor.link_of(node.joined.link)
    heard, worker.heard = link.heard, 0.0
    node.say(Pulse())
    await eventually(lambda: link.heard > heard)
    assert worker.heard == 0.0
    node.say(Beat())
    await eventually(lambda: worker.heard > heard)


async def test_both_hear_that_the_other_lives(joined, make_node):
    node = await make_node()
    joined.executor.tick(time.monotonic())
    while not any(isinstance(message, Pulse) for message in node.heard):
        for frame in node.decoder.feed(await asyncio.wait_for(node.reader.read(1 << 16), 60)):
            node.heard.append(Pulse.model_validate_json(frame.body))


async def test_a_node_that_never_says_hello_is_given_up(joined, make_node):
    node = await make_node(hello=False)
    now = time.monotonic()
    for look in range(1, 4):  # more often than half the time after which it would be taken for a pause of this process
        joined.executor.tick(now + look * HELLO_S * 2.5)
    assert await node.hear() is None


async def ended(reader):
    """Waits until the front has hung up, and has said nothing."""
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b""


@pytest.mark.parametrize(
    "body", [b"[" * 16_000, b"{}", b'{"kind": "hello"}', b"[]", b"\xff"], ids=lambda body: str(body[:8])
)
async def test_a_link_that_begins_with_nonsense_ends(joined, make_node, caplog, body):
    node = await make_node()
    reader, writer = await asyncio.open_connection("127.0.0.1", joined.port)
    writer.write(GREETING + len(body).to_bytes(4, "big") + body)
    await ended(reader)
    writer.close()
    assert not [record for record in caplog.records if record.exc_info]
    await heartbeat(node, joined)


async def test_connections_that_say_nothing_are_closed(joined, make_node):
    node = await make_node()
    connections = [await asyncio.open_connection("127.0.0.1", joined.port) for _ in range(3)]
    connections[1][1].write(b"GEMMSERVE-LI")
    connections[2][1].write(b"GET /internal/probe?le")
    await until(lambda: len(joined.executor._connections) == 4)
    joined.executor.tick(time.monotonic() + GREETING_S + 1)
    for reader, writer in connections:
        await ended(reader)
        writer.close()
    await heartbeat(node, joined)


async def test_one_too_many_takes_the_place_of_the_longest(joined, make_node):
    node = await make_node()
    connections = [await asyncio.open_connection("127.0.0.1", joined.port) for _ in range(MAX_UNKNOWN + 1)]
    await ended(connections[0][0])
    await heartbeat(node, joined)
    for _, writer in connections:
        writer.close()


@pytest.fixture
async def closed(make_joined, settings):
    """A core with keys, the id and the text of a worker's."""
    settings.data_dir.mkdir(exist_ok=True)
    key_id, text = create_key(settings.data_dir, "node", scopes=[Scope.WORKER])
    core = await make_joined()
    return core, key_id, text


async def test_with_keys_a_token_is_needed_and_its_end_is_the_links(closed, make_node, settings):
    core, key_id, text = closed
    refused = await make_node("none", core=core)
    assert isinstance(refused.joined, Refused)
    assert refused.joined.slug == "token"
    assert core.executor.counts.refused == 1
    node = await make_node("node", core=core, token=text)
    revoke_key(settings.data_dir, key_id)
    core.keyring.refresh()
    assert await node.hear() is None
    assert isinstance((await make_node("node", core=core, token=text)).joined, Refused)


@pytest.mark.parametrize(
    "fields",
    [
        {"worker": "other/cpu"},
        {"ahead": -1},
        {"memory_used": -1},
        {"result_bytes": 1 << 80},
        {"spec": {}},
        {"spec": {"kind": "cpu", "memory_bytes": -1}},
    ],
    ids=str,
)
async def test_a_hello_of_no_sense_ends_the_link(joined, make_node, fields):
    node = await make_node(hello=False)
    node.hello(**fields)
    assert await node.hear() is None
    assert not joined.ready()[0]


async def test_answers_of_another_links_task_change_nothing(joined, make_node, put, gemm):
    node = await make_node()
    info = await submitted(joined, put, gemm)
    work = await node.task()
    other = await make_node("other")
    other.done(work)
    other.say(failed(work))
    other.say(Written(tasks=[work.task], lost=[work.task]))
    other.say(Kept(came=["arr_unknown"], used=1))
    await heartbeat(other, joined)
    assert (await joined.jobs.wait(info.id, 0)).state == JobState.RUNNING
    fleet = joined.scheduler.fleet
    assert not any(map(fleet.others_have_copies, joined.executor.workers()))


async def test_a_cancelled_task_is_told_and_answered_without_bytes(joined, make_node, put, gemm):
    node = await make_node()
    info = await submitted(joined, put, gemm)
    work = await node.task()
    await joined.jobs.cancel(info.id)
    assert (await node.hear(Cancel)).task == work.task
    node.done(work)
    await heartbeat(node, joined)
    assert (await joined.jobs.wait(info.id, 60)).state == JobState.CANCELLED
    assert joined.ready()[0]


async def test_at_the_end_the_nodes_are_told(joined, make_node):
    node = await make_node()
    await joined.executor.stop()
    assert isinstance(await node.hear(Stop), Stop)
    assert await node.hear() is None

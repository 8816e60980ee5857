"""The agent with a real worker, against a front that is made by hand."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import psutil
import pytest
from join_front import JoinFront

from gemmserve_service.executor.agent.agent import Agent, address_of
from gemmserve_service.executor.join_protocol import Leave
from gemmserve_service.executor.protocol import Cancel, Done, Failed, Forget, Hello
from gemmserve_service.runtime.start_error import UsageError

RNG = np.random.default_rng(7)
A, B = RNG.standard_normal((2, 64, 64))
LARGE = RNG.standard_normal((1024, 1200))
"""Nine megabytes: two exchanges."""


def close(result, a, b):
    bound = 2 * a.shape[1] * np.finfo(a.dtype).eps * (np.abs(a) @ np.abs(b))
    return bool((np.abs(result - a @ b) <= bound).all())


async def test_a_product_whose_operands_come_with_the_message_needs_no_exchange(front, joined, product):
    await joined(front)
    message, result = product(front, A, B)
    inline = [(name, 0, bytes(front.extents[name])) for name in ("x-a", "x-b")]
    front.say(message, inline=inline)
    assert (await front.hear(Done)).task == "t1"
    assert close(result(), A, B)
    assert front.gets == front.puts == []
    assert [head.task for head in front.inline] == ["t1"]
    again, result = product(front, A, B, task="t2")
    front.say(again)  # what the node has is not sent again
    await front.hear(Done)
    assert close(result(), A, B)
    assert front.gets == []


async def test_one_that_is_told_to_stop_says_that_it_leaves(front, joined):
    agent = await joined(front)
    agent.stop()
    said = [None]
    while (message := await front.hear()) is not None:
        said.append(message)
    assert said[-1] == Leave()


async def test_large_operands_are_fetched_and_large_results_uploaded_in_pieces(front, joined, product):
    await joined(front)
    message, result = product(front, LARGE.T, LARGE, start=128)
    front.say(message)
    assert (await front.hear(Done)).written
    assert close(result(), LARGE.T, LARGE)
    assert len(front.gets) == 4
    assert len(front.puts) == 2
    assert {put.attempt for put in front.puts} == {0}
    message, result = product(front, result().copy(), LARGE.T[:, :8].copy(), task="t2", ids=("t1-d", None), start=128)
    front.gets.clear()
    front.say(message)  # what was made here is here
    await front.hear(Done)
    assert {get.extent for get in front.gets} == {"x-t2b"}


async def test_arrays_that_are_gone_and_another_front_s_are_fetched_anew(front, joined, product):
    await joined(front)
    for number in range(3):
        message, result = product(front, A, B, task=f"t{number}")
        front.say(message)
        await front.hear(Done)
        assert close(result(), A, B)
        assert len(front.gets) == (2, 3, 5)[number]
        if number == 0:
            front.say(Forget(arrays=["a"]))
        if number == 1:
            front.server = "another"
            await front.stop()
            await front.start()
            await front.hear(Hello)


async def test_a_front_that_comes_back_finds_the_copies(front, joined, product):
    await joined(front)
    message, _ = product(front, A, B)
    front.say(message)
    await front.hear(Done)
    await front.stop()
    await front.start()
    await front.hear(Hello)
    assert len({join.session for join in front.joins}) == 1
    message, result = product(front, A, B, task="t2")
    front.say(message)
    await front.hear(Done)
    assert close(result(), A, B)
    assert len(front.gets) == 2


async def test_a_task_whose_operands_are_on_their_way_is_cancelled_at_once(front, joined, product):
    await joined(front)
    front.hold.clear()
    first, _ = product(front, A, B)
    second, result = product(front, A, B, task="t2", ids=("a", None))
    front.say(first, second, Cancel(task="t1"))
    answer = await front.hear(Failed)
    assert (answer.task, answer.slug) == ("t1", "cancelled")
    front.hold.set()
    assert (await front.hear(Done)).task == "t2"
    assert close(result(), A, B)


async def test_express_tasks_pass_those_that_wait_for_operands(front, joined, product):
    await joined(front)
    front.hold.clear()
    slow, _ = product(front, A, B)
    short, result = product(front, A, B, task="t2", ids=(None, None), express=True)
    front.say(slow)
    front.say(short, inline=[(name, 0, bytes(front.extents[name])) for name in ("x-t2a", "x-t2b")])
    assert (await front.hear(Done)).task == "t2"
    assert close(result(), A, B)
    front.hold.set()
    assert (await front.hear(Done)).task == "t1"


async def test_a_result_that_the_front_does_not_want_is_no_reason_to_end(joined, product):
    async with JoinFront(answer_put=lambda put: 409 if put.task == "t1" else 204) as front:
        await joined(front)
        message, _ = product(front, LARGE.T, LARGE)
        front.say(message)
        assert (await front.hear(Failed)).task == "t1"
        message, result = product(front, LARGE.T, LARGE, task="t2")
        front.say(message)
        assert (await front.hear(Done)).task == "t2"
        assert close(result(), LARGE.T, LARGE)
        assert len(front.joins) == 1


async def test_a_silent_front_loses_the_worker_s_tasks(joined, product):
    async with JoinFront(heartbeat_timeout_s=2) as front:
        agent = await joined(front)
        front.hold.clear()
        message, _ = product(front, A, B)
        front.say(message)
        front.pulses = False
        while await front.hear() is not None:  # the link's end; no answer before it
            pytest.fail("an answer of a task whose operands never came")
        front.pulses = True
        front.hold.set()
        await front.hear(Hello)
        assert agent.memory.used_bytes == 0  # nothing of that task, nor of operands that did not come
        message, result = product(front, A, B, task="t2")
        front.say(message)
        assert (await front.hear(Done)).task == "t2"
        assert close(result(), A, B)


async def test_a_link_that_carries_nothing_is_given_up_long_before_a_worker_would_be(joined):
    async with JoinFront(heartbeat_timeout_s=600, silence_s=2) as front:
        await joined(front)
        await asyncio.wait_for(front.pulsed.wait(), 60)
        front.pulses = False
        assert await front.hear() is None
        front.pulses = True
        await front.hear(Hello)


async def test_the_end_of_the_worker_ends_the_link_and_a_new_one_follows(front, joined, product):
    await joined(front)
    os.kill(front.hellos[0].pid, signal.SIGKILL)
    assert await front.hear() is None
    assert (await front.hear(Hello)).pid != front.hellos[0].pid
    message, result = product(front, A, B)
    front.say(message)
    await front.hear(Done)
    assert close(result(), A, B)


async def test_the_front_s_side_of_blocks_is_the_worker_s(joined):
    async with JoinFront(block_side=512) as front:
        await joined(front)
        assert len(front.joins) == 2  # once more, with a worker that knows it
        front.say()


async def test_more_than_the_memory_s_arrays(front, joined, product):
    agent = await joined(front, memory_bytes=1 << 20)
    arrays = RNG.standard_normal((12, 128, 128))
    for number, array in enumerate(arrays):
        message, result = product(front, array, arrays[0], task=f"t{number}", ids=(f"a{number}", "b"))
        front.say(message)
        await front.hear(Done)
        assert close(result(), array, arrays[0])
        assert agent.memory.used_bytes <= 1 << 20
    assert sum(get.extent == "x-b" for get in front.gets) == 1  # used all the time
    message, result = product(front, LARGE.T, LARGE, task="large", ids=("la", "lb"))
    front.say(message)  # larger than all of it
    await front.hear(Done)
    assert close(result(), LARGE.T, LARGE)


@pytest.mark.parametrize(
    ("slug", "status"), [("token", os.EX_NOPERM), ("protocol", os.EX_PROTOCOL), ("name", os.EX_CONFIG)]
)
async def test_a_refusal_ends_the_agent(handoff, slug, status):
    async with JoinFront(refuse=slug) as front:
        assert await asyncio.wait_for(Agent(handoff(front, token="wrong")).run(), 120) == status
        assert [join.token for join in front.joins] == ["wrong"]
    assert not [each for each in psutil.Process().children() if "executor.worker" in " ".join(each.cmdline())]


async def test_a_device_that_is_none(front, handoff):
    agent = Agent(handoff(front, device="cuda:99"))
    assert await asyncio.wait_for(agent.run(), 120) == os.EX_UNAVAILABLE
    assert front.joins == []


@pytest.mark.parametrize("url", ["front:8443", "ftp://front", "https://", "http://front/path", "http://front:port"])
def test_urls_that_are_none(handoff, front_of, url):
    with pytest.raises(UsageError, match="URL"):
        address_of(handoff(front_of(url)))

"""Products of an iterable, a few at a time: `map` of both clients."""

from __future__ import annotations

import inspect
import json
from typing import Any

import numpy as np
import pytest
from fake_service import problem

import gemmserve
from gemmserve import _errors


async def done(result):
    return await result if inspect.isawaitable(result) else result


async def given(results) -> tuple[list[Any], Exception | None]:
    """What an iterator gave, and what it raised then."""
    found: list[Any] = []
    try:
        async for result in each(results):
            found.append(result)  # noqa: PERF401 (what came before the error counts)
    except (gemmserve.GemmserveError, TypeError, ZeroDivisionError) as error:
        return found, error
    return found, None


def kinds(found) -> list[str]:
    return [type(result).__name__.removeprefix("Async") for result in found]


async def test_map_is_lazy_ordered_and_bounded(connected, service, random_complex) -> None:
    a = random_complex(2, 2)
    remote = await done(connected.put(a))
    taken = []

    def asked():
        for number in range(1, 31):
            taken.append(number)
            yield {"op": "gemm", "a": remote, "b": remote, "alpha": number}

    results = connected.map(asked(), in_flight=8)
    assert taken == []
    number = 0
    async for result in each(results):
        number += 1
        np.testing.assert_allclose(await done(result.numpy()), number * (a @ a), rtol=1e-5)
        assert len(taken) <= number + 11
    assert number == 30
    assert {job["state"] for job in service.jobs.values()} == {"succeeded"}


async def each(results):
    if hasattr(results, "__aiter__"):
        async for result in results:
            yield result
    else:
        for result in results:
            yield result


async def test_map_waits_and_does_not_spin(connected, service, clock, random_complex) -> None:
    remote = await done(connected.put(random_complex(2, 2)))
    service.polls_until_done = 3
    asked = [{"op": "gemm", "a": remote, "b": remote}] * 4
    assert len([result async for result in each(connected.map(asked))]) == 4
    assert clock.slept


def slow(service, number, polls):
    """Has the job of that number take so many polls."""
    list(service.jobs.values())[number]["polls"] = polls


async def test_results_come_as_they_are_done(connected, service, random_complex) -> None:
    """Not when all are that were submitted together."""
    remote = await done(connected.put(random_complex(2, 2)))
    service.polls_until_done = 10**9
    service.script += [None, lambda _: slow(service, 0, 0), lambda _: slow(service, 1, 0)]
    results = each(connected.map([{"op": "gemm", "a": remote, "b": remote}] * 8, in_flight=16))
    await anext(results)
    assert [job["state"] for job in service.jobs.values()] == ["succeeded"] + ["queued"] * 7
    await anext(results)
    assert [job["state"] for job in service.jobs.values()] == ["succeeded"] * 2 + ["queued"] * 6
    await results.aclose()


async def test_what_is_done_before_its_turn_waits_for_it(connected, service, random_complex) -> None:
    a = random_complex(2, 2)
    remote = await done(connected.put(a))

    def odd_ones_later(_):
        for number in range(1, 12, 2):
            slow(service, number, 3)

    service.script += [None, odd_ones_later]
    asked = [{"op": "gemm", "a": remote, "b": remote, "alpha": number} for number in range(12)]
    found = [await done(result.numpy()) async for result in each(connected.map(asked, in_flight=24))]
    np.testing.assert_allclose(found, [number * (a @ a) for number in range(12)], rtol=1e-5)


def test_short_products_are_told_of_many_at_a_time(client, service, random_complex) -> None:
    """Each exchange that took next to no time is followed by one for twice as many."""
    remote = client.put(random_complex(2, 2))

    def ends(request):
        """Has those end alone that are waited for."""
        names, asked = list(service.jobs), json.loads(request.content)
        for name in names[: names.index(asked["ids"][0]) + 1]:
            service.jobs[name]["polls"] = 0

    service.polls_until_done = 10**9
    service.script += [None, *[ends] * 6]
    assert len(list(client.map([{"op": "gemm", "a": remote, "b": remote}] * 63, in_flight=126))) == 63
    assert service.calls.count("POST /v1/job-states") == 6, "1 + 2 + 4 + 8 + 16 + 32"


def test_long_products_behind_short_ones_are_not_waited_for_together(client, service, random_complex) -> None:
    remote = client.put(random_complex(2, 2))

    def some_are_long(_):
        for number in range(20, 64):
            slow(service, number, 10**9)

    service.script += [None, some_are_long]
    results = client.map([{"op": "gemm", "a": remote, "b": remote}] * 64, in_flight=128)
    for _ in range(20):
        next(results)
    service.script += [None, lambda _: slow(service, 20, 0)]
    next(results)
    asked = [json.loads(each.content) for each in service.requests if each.url.path == "/v1/job-states"]
    names = list(service.jobs)
    assert [(names.index(each["ids"][0]), each["wait"] > 1) for each in asked] == [(0, True), (21, False), (20, True)]
    results.close()


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_a_server_that_tells_of_one_job_alone(connected, service, random_complex, status) -> None:
    remote = await done(connected.put(random_complex(2, 2)))
    service.polls_until_done = 2
    refused = {403: "forbidden", 404: "not-found", 405: "method-not-allowed"}[status]
    service.script += [None, None, problem(status, refused)]
    found, error = await given(connected.map([{"op": "gemm", "a": remote, "b": remote}] * 9, in_flight=6))
    assert (len(found), error) == (9, None)
    assert service.calls.count("POST /v1/job-states") == 1


async def test_jobs_that_the_server_has_forgotten_are_asked_for_by_their_key(
    connected, service, random_complex
) -> None:
    """As after the loss of its data: the same products are made again."""
    remote = await done(connected.put(random_complex(2, 2)))
    service.polls_until_done = 2

    def forget(_):
        service.jobs.clear()
        service.keys.clear()

    service.script += [None, forget]
    found, error = await given(connected.map([{"op": "gemm", "a": remote, "b": remote}] * 4, in_flight=8))
    assert (len(found), error) == (4, None)


async def test_a_server_that_answers_early_is_not_asked_without_a_pause(
    connected, service, random_complex, clock
) -> None:
    remote = await done(connected.put(random_complex(2, 2)))
    service.polls_until_done = 9
    assert len([x async for x in each(connected.map([{"op": "gemm", "a": remote, "b": remote}] * 3))]) == 3
    assert len(clock.slept) == 9


async def test_the_next_are_on_the_server_while_results_are_taken(connected, service, random_complex) -> None:
    remote = await done(connected.put(random_complex(2, 2)))
    results = each(connected.map(({"op": "gemm", "a": remote, "b": remote} for _ in iter(int, 1)), in_flight=8))
    for taken in range(1, 13):
        await anext(results)
        assert len(service.jobs) >= taken + 7
        assert len(service.jobs) <= taken + 11
    await results.aclose()


async def test_what_is_refused_behind_the_end_is_not_given(connected, service, random_complex) -> None:
    """The server takes no more than the first of a chunk whose last was refused here."""
    remote = await done(connected.put(random_complex(2, 2)))
    good, bad = {"op": "gemm", "a": remote, "b": remote}, {"op": "gemm", "a": np.eye(2), "b": np.eye(3)}
    full = problem(507, "store-full", "no room", item=2)
    service.script.append(full)
    found, error = await given(connected.map([good, good, good, bad], in_flight=8, errors="return"))
    assert kinds(found) == ["RemoteArray"] * 2
    assert isinstance(error, gemmserve.StoreFull)


@pytest.mark.parametrize("errors", ["raise", "return"])
async def test_map_and_a_product_that_fails(connected, service, random_complex, errors) -> None:
    remote = await done(connected.put(random_complex(2, 2)))
    asked = [{"op": "gemm", "a": remote, "b": remote}] * 6
    failed = {"type": "/problems/device-error", "title": "", "status": 500, "detail": "it broke"}

    def fail(_) -> None:
        job = list(service.jobs.values())[1]
        job |= {"state": "failed", "error": failed}

    service.script.extend([None, fail])  # before the answer to the second exchange
    results = each(connected.map(asked, in_flight=12, errors=errors))
    if errors == "raise":
        assert isinstance(await anext(results), gemmserve.RemoteArray | gemmserve.AsyncRemoteArray)
        with pytest.raises(gemmserve.JobFailed, match="it broke"):
            await anext(results)
    else:
        assert [isinstance(result, gemmserve.JobFailed) async for result in results] == [False, True] + [False] * 4


async def test_a_map_that_is_closed_cancels_what_is_not_done(connected, service, random_complex) -> None:
    remote = await done(connected.put(random_complex(2, 2)))
    results = connected.map(({"op": "gemm", "a": remote, "b": remote} for _ in iter(int, 1)), in_flight=4)
    await done(anext(results) if hasattr(results, "__anext__") else next(results))
    await done(results.aclose() if hasattr(results, "aclose") else results.close())
    states = [job["state"] for job in service.jobs.values()]
    assert states == ["succeeded"] * 2 + ["cancelled"] * 4


@pytest.mark.parametrize("tags", [{}, {"name": "wanted"}, {"labels": {"run": "7"}}])
async def test_a_map_that_is_closed_leaves_no_result_that_nobody_was_given(
    connected, service, random_complex, tags
) -> None:
    """But what has a name or labels, by which it is found."""
    remote = await done(connected.put(random_complex(2, 2)))
    results = connected.map(({"op": "gemm", "a": remote, "b": remote, **tags} for _ in iter(int, 1)), in_flight=4)
    taken = await done(anext(results) if hasattr(results, "__anext__") else next(results))
    ends_meanwhile = list(service.jobs.values())[3]
    service._advance(ends_meanwhile)
    assert ends_meanwhile["state"] == "succeeded"
    await done(results.aclose() if hasattr(results, "aclose") else results.close())
    assert set(service.arrays) >= {remote.id, taken.id}
    assert len(service.arrays) == (4 if tags else 2)


@pytest.mark.parametrize("errors", ["raise", "return"])
@pytest.mark.parametrize("wrong", ["refused", "local"])
async def test_a_product_that_is_refused_is_told_in_its_place(connected, random_complex, errors, wrong) -> None:
    """By its number in what was passed, and the others' results are given."""
    remote, other = await done(connected.put(random_complex(2, 2))), await done(connected.put(random_complex(2, 2)))
    good = {"op": "gemm", "a": remote, "b": remote}
    bad = (
        {"op": "gemm", "a": remote, "b": other}
        if wrong == "refused"
        else {"op": "gemm", "a": np.eye(2), "b": np.eye(3)}
    )
    await done(other.delete())
    asked = [bad if number in {6, 7, 20} else good for number in range(30)]
    found, error = await given(connected.map(asked, in_flight=8, errors=errors))
    kind = {"refused": gemmserve.NotFound, "local": gemmserve.ShapeMismatch}[wrong]
    if errors == "raise":
        assert kinds(found) == ["RemoteArray"] * 6
        assert isinstance(error, kind)
        refused = {6: error}
    else:
        assert error is None
        assert len(found) == 30
        refused = {number: x for number, x in enumerate(found) if isinstance(x, Exception)}
        assert {*refused} == {6, 7, 20}
    for number, each in refused.items():
        assert type(each) is kind
        assert each.problem["item"] == number
        assert str(each).startswith(f"product {number}: ")
        assert "job " not in str(each)
        assert not each.problem.get("pointer")


async def test_all_products_may_be_refused(connected, service, random_complex) -> None:
    lost = await done(connected.put(random_complex(2, 2)))
    await done(lost.delete())
    found, error = await given(connected.map([{"op": "gemm", "a": lost, "b": np.eye(2)}] * 5, errors="return"))
    assert (kinds(found), error) == (["NotFound"] * 5, None)
    assert service.arrays == {}, "what was put for them is deleted"


@pytest.mark.parametrize("errors", ["raise", "return"])
@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (lambda _: problem(507, "store-full", "job 2: the store is full", item=2), gemmserve.StoreFull),
        (lambda _: problem(401, "unauthorized", "the key has expired"), gemmserve.Unauthorized),
    ],
)
async def test_what_keeps_the_server_from_all_comes_after_what_it_took(
    connected, service, random_complex, errors, refusal, kind
) -> None:
    remote = await done(connected.put(random_complex(2, 2)))
    service.script.extend([None, refusal])
    results = connected.map(
        ({"op": "gemm", "a": remote, "b": remote} for _ in iter(int, 1)), in_flight=8, errors=errors
    )
    found, error = await given(results)
    assert kinds(found) == ["RemoteArray"] * (6 if kind is gemmserve.StoreFull else 4)
    assert type(error) is kind


async def test_an_iterable_that_fails_ends_its_products(connected, random_complex) -> None:
    remote = await done(connected.put(random_complex(2, 2)))

    def asked():
        yield from [{"op": "gemm", "a": remote, "b": remote}] * 5
        yield 1 / 0

    for errors in ("raise", "return"):
        found, error = await given(connected.map(asked(), in_flight=6, errors=errors))
        assert (len(found), type(error)) == (5, ZeroDivisionError)
    found, error = await given(connected.map([{"op": "gemm", "a": remote, "b": remote}, 7], errors="return"))
    assert (len(found), type(error)) == (1, TypeError)


async def test_an_error_of_the_client_s_that_the_iterable_raises_is_no_product_s(connected, random_complex) -> None:
    """One that looks operands up itself, say; what it would give afterwards is not asked for."""
    remote = await done(connected.put(random_complex(2, 2)))

    class Asked:
        taken = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.taken += 1
            if self.taken == 4:
                raise gemmserve.NotFound("no array is called weights")
            return {"op": "gemm", "a": remote, "b": remote}

    for errors in ("raise", "return"):
        found, error = await given(connected.map(Asked(), in_flight=4, errors=errors))
        assert kinds(found) == ["RemoteArray"] * 3
        assert (type(error), str(error)) == (gemmserve.NotFound, "no array is called weights")


async def test_errors_are_raised_or_returned(connected) -> None:
    _, error = await given(connected.map([], errors="ignore"))
    assert "raise" in str(error)


def test_an_error_names_its_product_by_the_caller_s_number() -> None:
    entries = [{"field": "jobs.3.alpha", "message": "must be a number"}, {"field": "jobs.5.beta", "message": "too"}]
    document = {
        "type": "/problems/parameter-invalid", "status": 422, "item": 3, "pointer": "/jobs/3",
        "parameter": "jobs.3.alpha", "detail": "jobs.3.alpha: must be a number; jobs.5.beta: too",
        "errors": entries,
    }  # fmt: skip
    error = _errors.numbered(_errors.from_problem(document), 131)
    assert str(error) == error.detail == error.problem["detail"] == "product 131: alpha: must be a number"
    assert (error.parameter, error.problem["item"]) == ("alpha", 131)
    assert [entry["field"] for entry in error.problem["errors"]] == ["alpha"]

"""Programs in Python: what is recorded, what is sent, what handles are afterwards, and how it can go wrong."""

from __future__ import annotations

import json
import math

import httpx
import numpy as np
import pytest
from fake_service import problem

import gemmserve
from gemmserve import AsyncClient, Client, ProgramArray, ProgramError, RemoteArray


@pytest.fixture
def live(app_url):
    with Client(app_url) as client:
        yield client


@pytest.fixture
def sent(service):
    """The steps of the last submission."""
    return lambda: json.loads(
        next(r for r in reversed(service.requests) if (r.method, r.url.path) == ("POST", "/v1/jobs")).content
    )


# -- against the real app -------------------------------------------------------------------------------------------


def test_recorded_steps_run_as_one_job(live, random_complex) -> None:
    a, b = random_complex(6, 6), random_complex(6, 3)
    ra, rb = live.put(a), live.put(b)
    with live.program() as p:
        x2 = p.gemm(ra, ra)
        x4 = x2 @ x2
        y = p.gemm_reduce(x4, rb, reduce="absmax")
        p.keep(x4)
    powers = np.linalg.matrix_power(a.astype(complex), 4)
    assert np.linalg.norm(x4.numpy() - powers) < 1e-5 * np.linalg.norm(powers)
    np.testing.assert_allclose(y.numpy(), np.abs(powers @ b).max(0), rtol=1e-4)
    np.testing.assert_allclose(np.asarray(y), np.abs(powers @ b).max(0), rtol=1e-4)
    assert (p.job.info.op, p.job.state) == ("program", "succeeded")
    assert [step["id"] for step in p.job.info.steps] == ["s0", "s1", "s2"]
    with pytest.raises(ProgramError, match="keep"):
        x2.numpy()
    assert {name: array.id for name, array in p.job.result().items()} == {"s1": x4.id, "s2.absmax": y.id}
    assert isinstance(x4, RemoteArray)
    np.testing.assert_allclose((x4 @ rb).numpy(), powers @ b, rtol=1e-3)
    np.testing.assert_allclose((ra.H @ x4.H).numpy(), (powers @ a).conj().T, rtol=1e-3, atol=1e-3)
    x4.delete()
    with pytest.raises(gemmserve.NotFound):
        x4.numpy()


def test_views_operators_and_local_operands(live, random_complex) -> None:
    a, b, c = random_complex(5, 4), random_complex(4, 5), random_complex(4, 4)
    ra = live.put(a)
    before = {array.id for array in live.arrays()}
    with live.program(verify=True) as p:
        product = p.gemm(b, ra, c, alpha=2, beta=1j, name="product")
        left = a @ product  # NumPy on the left
        right = product @ b
        mixed = p.gemm(product.H, product.conj(), trans_a="T", trans_b="C", order="F")
        remote = ra.H @ left
        several = p.gemm_reduce(product.T, product, reduce=["sum", "argmax"], return_c=True)
    d = 2 * (b.astype(complex) @ a) + 1j * c
    for handle, truth in (
        (left, a @ d),
        (right, d @ b),
        (mixed, d.conj() @ (d.conj().conj().T)),
        (remote, a.conj().T @ (a @ d)),
        (several["sum"], (d.T @ d).sum(0)),
        (several["c"], d.T @ d),
    ):
        if handle is not left:  # which `remote` used
            np.testing.assert_allclose(handle.numpy(), truth, rtol=1e-3, atol=1e-4)
    assert list(several) == ["sum", "argmax", "c"]
    assert mixed.info.order == "F"
    np.testing.assert_array_equal(several["argmax"].numpy(), np.abs(d.T @ d).argmax(0))
    assert p.job.info.residual < 1e-5
    assert len({array.id for array in live.arrays()} - before) == 6, "what was uploaded for the program is gone"
    assert right.shape == (4, 5)
    assert right.T.shape == (5, 4)
    assert right.dtype == np.complex64


def test_errors_come_typed_and_name_the_step(live, random_complex) -> None:
    ra = live.put(random_complex(4, 5))
    lazy = ra @ ra.H  # a handle that knows no shape
    lazy._info = lazy._expected = None
    for options, kind in (({}, gemmserve.ShapeMismatch), ({"compute": "ozaki"}, gemmserve.ComputeUnsupported)):
        p = live.program()
        with pytest.raises(kind) as caught, p:
            y = p.gemm(p.gemm(lazy, lazy, name="first"), lazy if options else ra.H, name="second", **options)
        assert (caught.value.status, caught.value.problem["step"]) == (422, "second")
        assert p.job is None
        with pytest.raises(ProgramError, match="did not succeed"):
            y.numpy()
    gone = live.put(np.eye(4))
    gone.delete()
    with pytest.raises(gemmserve.NotFound) as caught, live.program() as p:
        p.gemm(gone, gone)
    assert caught.value.problem["pointer"] == "/steps/0/a"


async def test_awaited(app_url, random_complex) -> None:
    a, b = random_complex(6, 6), random_complex(6, 3)
    async with AsyncClient(app_url) as client:
        ra = await client.put(a)
        async with client.program(priority=3, ttl_s=60) as p:
            x2 = await p.gemm(ra, a)
            x4 = await (x2 @ x2)
            y = await p.gemm_reduce(x4, b, reduce="sumsq", name="y")
            z = await (ra.H @ x4.T)
            p.keep(x4)
        powers = np.linalg.matrix_power(a.astype(complex), 4)
        assert np.linalg.norm(await x4.numpy() - powers) < 1e-5 * np.linalg.norm(powers)
        np.testing.assert_allclose(await y.numpy(), (np.abs(powers @ b) ** 2).sum(0), rtol=1e-4)
        np.testing.assert_allclose(await z.numpy(), a.conj().T @ powers.T, rtol=1e-3, atol=1e-3)
        assert (y.shape, (await y.refresh()).info.expires_at is not None) == ((3,), True)
        assert [step["id"] for step in p.job.info.steps] == ["s0", "s1", "y", "s3"]
        np.testing.assert_allclose(await (await (x4 @ b)).numpy(), powers @ b, rtol=1e-3, atol=1e-3)
        with pytest.raises(ProgramError):
            await x2.numpy()
        with pytest.raises(gemmserve.ShapeMismatch):
            async with client.program() as p:
                await p.gemm(await p.gemm(ra, b), b)
        await x4.delete()


# -- what is sent ---------------------------------------------------------------------------------------------------


def test_what_is_submitted(client, service, sent) -> None:
    ra = client.put(np.eye(3))
    with client.program(priority=2, ttl_s=9.0, timeout=60) as p:
        x = p.gemm(ra.T, ra, alpha=2j, config={"block_m": 64, "stages": None})
        y = p.gemm_reduce(x.H, ra, reduce=["sum"], axis="n")
        p.gemm(ra, x, x, beta=1, trans_b="C")
    assert sent() == {
        "op": "program", "priority": 2, "ttl_s": 9.0, "timeout_s": 60,
        "steps": [
            {"id": "s0", "op": "gemm", "a": ra.id, "b": ra.id, "trans_a": "T", "alpha": [0, 2],
             "config": {"block_m": 64}},
            {"id": "s1", "op": "gemm_reduce", "a": "$s0", "b": ra.id, "trans_a": "C", "reduce": ["sum"], "axis": "n"},
            {"id": "s2", "op": "gemm", "a": ra.id, "b": "$s0", "c": "$s0", "beta": 1, "trans_b": "C"},
        ],
    }  # fmt: skip
    assert list(y) == ["sum"]


def test_what_is_kept(client, sent) -> None:
    ra = client.put(np.eye(3))
    with client.program() as p:
        x = p.gemm(ra, ra)
        y = p.gemm_reduce(x.T, ra, reduce=["sum", "absmax"], return_c=True)
        z = y["c"] @ ra
        p.keep(x.H, x)
    assert sent()["keep"] == ["s0", "s1.sum", "s1.absmax", "s2"]
    assert {x.id, y["sum"].id, z.id} <= set(p.job.info.result.values())
    with pytest.raises(ProgramError):
        y["c"].id  # noqa: B018


def test_names_never_meet(client, sent) -> None:
    ra = client.put(np.eye(3))
    with client.program() as p:
        p.gemm(ra, ra, name="s1")
        p.gemm(ra, ra)
        p.gemm(ra, ra, name="s3")
        p.gemm(ra, ra)
        with pytest.raises(gemmserve.ParameterInvalid):
            p.gemm(ra, ra, name="s1")
        for name in ("", "1", "a.b", "x" * 65, 3):
            with pytest.raises(gemmserve.ParameterInvalid):
                p.gemm(ra, ra, name=name)
    ids = [step["id"] for step in sent()["steps"]]
    assert ids[0] == "s1"
    assert len(set(ids)) == 4


def test_nothing_is_submitted_if_the_block_raises(client, service) -> None:
    made = []

    def block():
        with client.program() as p:
            made.append(p.gemm(np.eye(3), np.eye(3)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert service.calls == ["POST /v1/arrays"] * 2 + ["DELETE /v1/arrays/arr"] * 2
    assert not service.arrays
    with pytest.raises(ProgramError, match="did not succeed"):
        made[0].numpy()


async def test_nothing_is_submitted_if_the_awaited_block_raises(async_client, service) -> None:
    async def block():
        async with async_client.program() as p:
            await p.gemm(np.eye(3), np.eye(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()
    assert "POST /v1/jobs" not in service.calls
    assert not service.arrays


def test_a_program_without_steps_is_nothing(client, service) -> None:
    with client.program() as p:
        pass
    assert service.calls == []
    assert p.job is None


def test_local_operands_are_uploaded_when_they_are_recorded(client) -> None:
    """So a loop may use one buffer again and again."""
    buffer = np.eye(3)
    with client.program() as p:
        product = p.gemm(buffer, buffer)
        for factor in (2, 3):
            buffer[...] = np.eye(3) * factor
            product = product @ buffer
    np.testing.assert_array_equal(product.numpy(), np.eye(3) * 6)


def test_a_submission_is_repeated_under_one_key(client, service) -> None:
    ra = client.put(np.eye(3))
    service.script.extend([httpx.ReadError("broke"), problem(503, "not-ready", headers={"retry-after": "1"})])
    with client.program() as p:
        x = ra.T @ p.gemm(ra, ra)
    np.testing.assert_array_equal(x.numpy(), np.eye(3))
    assert len(service.jobs) == 1
    keys = {r.headers["idempotency-key"] for r in service.requests if r.url.path == "/v1/jobs"}
    assert len(keys) == 1


def test_past_its_timeout_it_is_cancelled(client, service, clock) -> None:
    ra = client.put(np.eye(3))
    service.polls_until_done = math.inf
    with pytest.raises(gemmserve.JobTimeout), client.program(timeout=5) as p:
        x = p.gemm(ra, ra)
    assert p.job.state == "cancelled" or service.jobs[p.job.id]["state"] == "cancelled"
    with pytest.raises(ProgramError):
        x.id  # noqa: B018


def test_an_interruption_cancels_it_and_tidies_up(client, service) -> None:
    service.polls_until_done = math.inf

    def interrupt(_):
        raise KeyboardInterrupt

    service.script.extend([None, None, None, interrupt])  # two uploads, the submission, then a poll
    with pytest.raises(KeyboardInterrupt), client.program() as p:
        p.gemm(np.eye(3), np.eye(3))
    (job,) = service.jobs.values()
    assert job["state"] == "cancelled"
    assert not service.arrays


def test_a_failed_job_is_an_error_that_names_it(client, service) -> None:
    ra = client.put(np.eye(3))

    def fail(_):
        return httpx.Response(200, json={"id": "job_1", "state": "failed", "op": "program", "error":
                                         {"type": "/problems/out-of-device-memory", "status": 500}})  # fmt: skip

    service.script.append(fail)
    with pytest.raises(gemmserve.JobFailed) as caught, client.program() as p:
        p.gemm(ra, ra)
    assert isinstance(caught.value.__cause__, gemmserve.DeviceError)
    assert p.job.id == "job_1"


def test_a_program_too_large_is_typed(client, service) -> None:
    ra = client.put(np.eye(3))
    service.script.append(problem(422, "program-too-large", parameter="steps"))
    with pytest.raises(gemmserve.TooLarge), client.program() as p:
        p.gemm(ra, ra)


# -- the wrong time and the wrong thing -----------------------------------------------------------------------------


def test_what_can_be_known_is_said_while_it_is_recorded(client, service) -> None:
    ra, rb, rc = client.put(np.ones((3, 4))), client.put(np.ones((3, 4), "c8")), client.put(np.ones((4, 4)))
    rp = client.put(np.ones((2, 3, 4)))
    with client.program() as p:
        x = p.gemm(ra, rb.H)
        assert (x.shape, x.T.shape, x.dtype, x.ndim) == ((3, 3), (3, 3), np.complex128, 2)
        y = p.gemm_reduce(x, ra, reduce="absmax")
        assert (y.shape, y.dtype) == ((4,), np.float64)
        y = p.gemm_reduce(rp, rp, trans_b="T", layout="planar")
        with pytest.raises(ProgramError, match="once the program"):
            y.shape  # noqa: B018
        for wrong in (lambda: x @ ra.T, lambda: ra @ x, lambda: p.gemm(x, ra, rc, beta=1), lambda: x @ np.ones(4)):
            with pytest.raises(gemmserve.ShapeMismatch):
                wrong()
        with pytest.raises(gemmserve.DtypeUnsupported):
            p.gemm(x, np.ones((3, 3), int))
        with pytest.raises(gemmserve.ParameterInvalid):
            p.gemm(x, x, beta=1)
        with pytest.raises(gemmserve.ParameterInvalid):
            p.gemm(x, x, alpha=math.nan)
        with pytest.raises(gemmserve.ParameterInvalid):
            p.gemm(x, x, trans_a="X")
    assert service.calls == ["POST /v1/arrays"] * 4 + ["POST /v1/jobs"], "nothing was uploaded for what is refused"
    assert len(json.loads(service.requests[-1].content)["steps"]) == 3


def test_planar_shapes(client) -> None:
    ra = client.put(np.ones((2, 3, 4), "f4"))
    with client.program() as p:
        x = p.gemm(ra, ra, layout="planar", trans_b="T")
        assert (x.shape, x.dtype) == ((2, 3, 3), np.float32)
        raise_late = p.gemm(x, ra, layout="planar")
        assert raise_late.shape == (2, 3, 4)
        p._recording.steps.clear()


def test_handles_before_and_after(client) -> None:
    ra = client.put(np.eye(3))
    program = client.program()
    with pytest.raises(ProgramError, match="with block"):
        program.gemm(ra, ra)
    with program as p:
        x = p.gemm(ra, ra)
        for use in (
            x.numpy,
            x.delete,
            lambda: x.id,
            lambda: client.gemm(x, ra),
            lambda: np.asarray(x),
            x.__enter__().__exit__,
        ):
            with pytest.raises(ProgramError):
                use()
        with pytest.raises(TypeError, match="truth"):
            bool(x)
        assert "$s0" in repr(x.H)
        with client.program() as q:
            with pytest.raises(ProgramError):
                q.gemm(x, ra)
            with pytest.raises(ProgramError):
                q.keep(x)
            with pytest.raises(ProgramError):
                q.keep(ra)
    with pytest.raises(ProgramError):
        p.gemm(ra, ra)
    with pytest.raises(ProgramError):
        p.keep(x)
    with pytest.raises(ProgramError, match="once"), program:
        pass
    assert isinstance(x, ProgramArray)
    assert x.numpy().shape == (3, 3), "a second begin changes nothing"
    with client.program() as after:
        again = after.gemm(x, x.T)
    np.testing.assert_array_equal(again.numpy(), np.eye(3))


def test_a_result_frees_itself_at_the_end_of_its_own_block(client, service) -> None:
    ra = client.put(np.eye(3))
    with client.program() as p:
        x = p.gemm(ra, ra)
    with x:
        assert x.numpy().shape == (3, 3)
    assert len(service.arrays) == 1

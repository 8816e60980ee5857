"""Both clients against the real app: what the fake service cannot vouch for."""

from __future__ import annotations

import numpy as np
import pytest

import gemmserve
from gemmserve import AsyncClient, Client
from gemmserve._calls import arrays as array_flows


@pytest.fixture
def live(app_url):
    with Client(app_url) as client:
        yield client


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("layout", ["C", "F", "strided", "big-endian"])
def test_there_and_back(live, rng, dtype, layout) -> None:
    array = rng.standard_normal((30, 20, 10)).astype(dtype)
    array = {
        "C": lambda: array,
        "F": lambda: np.asfortranarray(array),
        "strided": lambda: array[::2, ::-1],
        "big-endian": lambda: array.astype(array.dtype.newbyteorder(">")),
    }[layout]()
    with live.put(array, digest=True) as remote:
        assert remote.info.order == ("F" if layout == "F" else "C")
        assert (remote.shape, remote.dtype, remote.nbytes) == (array.shape, np.dtype(dtype), array.nbytes)
        np.testing.assert_array_equal(remote.numpy(), array)
        assert live.array(remote.id).info.created_at is not None


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,)])
def test_small_and_empty_arrays(live, shape) -> None:
    np.testing.assert_array_equal(live.put(np.ones(shape)).numpy(), np.ones(shape))


def test_pieces_of_several_mebibytes(live, rng) -> None:
    a = rng.standard_normal((3, 700, 800))
    with live.put(a) as remote:
        np.testing.assert_array_equal(remote.numpy(), a)
    np.testing.assert_allclose(live.gemm(a, a, trans_b="T"), a @ a.swapaxes(-1, -2))


def test_gemm_here_and_there(live, random_complex) -> None:
    a, b, c = random_complex(2, 20, 30), random_complex(30, 10), random_complex(20, 10)
    expected = (1 - 1j) * (a.astype(complex) @ b) + 2j * c
    for order in ("C", "F"):
        d = live.gemm(a, b, c, alpha=1 - 1j, beta=2j, order=order)
        np.testing.assert_allclose(d, expected, rtol=1e-3, atol=1e-4)
        assert d.dtype == np.complex64
    remote = live.gemm(live.put(a), b, c, alpha=1 - 1j, beta=2j)
    np.testing.assert_allclose(remote.numpy(), expected, rtol=1e-3, atol=1e-4)
    assert remote.shape == (2, 20, 10)


def test_c_is_added_unless_beta_says_otherwise(live, random_complex) -> None:
    a, b, c = random_complex(6, 7), random_complex(7, 5), random_complex(6, 5)
    ra, rb, rc = live.put(a), live.put(b), live.put(c)
    with live.program() as program:
        step = program.gemm(ra, rb, rc)
    added = [
        live.gemm(a, b, c), live.gemm_many([a], [b], [c])[0], live.gemm_many([ra], [rb], [rc])[0].numpy(),
        live.gemm(ra, b, c).numpy(), live.submit("gemm", ra, rb, rc).result().numpy(), step.numpy(),
    ]  # fmt: skip
    for d in added:
        np.testing.assert_allclose(d, a @ b + c, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(live.gemm(a, b, c, beta=0), a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("local", [True, False])
def test_every_flag_and_letter(live, random_complex, local) -> None:
    ops = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T, "R": np.conj}
    a, b = random_complex(6, 6), random_complex(6, 6)
    for letter, op in ops.items():
        d = live.gemm(a if local else live.put(a), b, trans_a=letter)
        np.testing.assert_allclose(np.asarray(d), op(a) @ b, rtol=1e-4, atol=1e-5)
    ra, rb = live.put(a), live.put(b)
    for view in (lambda x: x.T, lambda x: x.H if hasattr(x, "H") else x.conj().T, lambda x: x.conj()):
        np.testing.assert_allclose((view(ra) @ view(rb)).numpy(), view(a) @ view(b), rtol=1e-4, atol=1e-5)


def test_planar(live, random_complex) -> None:
    a, b = random_complex(5, 6), random_complex(6, 7)
    planar = [np.stack([x.real, x.imag]) for x in (a, b)]
    d = live.gemm(*planar, layout="planar")
    np.testing.assert_allclose(d[0] + 1j * d[1], a @ b, rtol=1e-4, atol=1e-5)


def test_reductions(live, random_complex) -> None:
    a, b = random_complex(3, 20, 30), random_complex(3, 30, 10)
    c = a.astype(complex) @ b
    for operand in (a, live.put(a)):
        one = live.gemm_reduce(operand, b, reduce="absmax", axis="m")
        np.testing.assert_allclose(np.asarray(one), np.abs(c).max(1), rtol=1e-4)
        where = live.gemm_reduce(operand, b, reduce="argmin", axis="n")
        assert where.dtype == np.int64
        np.testing.assert_array_equal(np.asarray(where), np.abs(c).argmin(2))
        listed = live.gemm_reduce(operand, b, reduce=["sumsq"], axis=["n", "batch"])
        assert list(listed) == ["sumsq"]
        np.testing.assert_allclose(np.asarray(listed["sumsq"]), (np.abs(c) ** 2).sum((0, 2)), rtol=1e-4)
        several = live.gemm_reduce(operand, b, reduce=["sum", "argmax"], return_c=True)
        assert list(several) == ["sum", "argmax", "c"]
        assert np.asarray(several["argmax"]).dtype == np.int64
        np.testing.assert_array_equal(np.asarray(several["argmax"]), np.abs(c).argmax(1))
        np.testing.assert_allclose(np.asarray(several["c"]), c, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("op", "params"),
    [
        ("gemm", {}),
        ("gemm", {"order": "F", "trans_a": "C", "trans_b": "T"}),
        ("gemm", {"compute": "fp32"}),
        ("gemm_reduce", {}),
        ("gemm_reduce", {"reduce": ["sum", "sumsq", "argmin", "mean"], "axis": ["n", "batch"], "return_c": True}),
        ("gemm_reduce", {"reduce": "max", "pre_op": "abs"}),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "complex64"])
def test_what_results_are_is_known_here_as_the_server_has_it(live, rng, op, params, dtype) -> None:
    a, b = rng.standard_normal((2, 4, 4)).astype(dtype), rng.standard_normal((4, 4)).astype("float32")
    found = live.submit(op, live.put(a), b, **params).result(60)
    for handle in found.values() if isinstance(found, dict) else [found]:
        expected, info = handle._known, handle.info
        assert handle._known is not expected, "the server was asked only now"
        assert (expected.shape, expected.dtype, expected.order) == (info.shape, info.dtype, info.order)


def test_jobs(live, random_complex) -> None:
    a = random_complex(40, 40)
    job = live.submit("gemm", a, a, priority=5, ttl_s=600, verify=True)
    states = [info.state for info in job.events()]
    assert states[-1] == "succeeded"
    assert job.info.residual < 1e-4
    assert job.info.algorithm
    np.testing.assert_allclose(job.result(60).numpy(), a @ a, rtol=1e-3, atol=1e-4)
    assert job.id in {listed.id for listed in live.jobs(limit=5)}
    again = live.job(job.id)
    assert again.wait(60).state == "succeeded"
    assert again.cancel().state == "succeeded"  # too late


def test_errors_are_typed(live, random_complex) -> None:
    a = random_complex(4, 5)
    ra = live.put(a)
    with pytest.raises(gemmserve.ShapeMismatch) as caught:
        live.gemm(ra, ra)
    assert caught.value.status == 422
    assert caught.value.request_id
    with pytest.raises(gemmserve.ParameterInvalid, match="absmax"):
        live.gemm_reduce(a, a.T, reduce="max")
    with pytest.raises(gemmserve.ComputeUnsupported) as caught:
        live.gemm(a, a.T, compute="ozaki")
    assert "fp32" in caught.value.available
    with pytest.raises(gemmserve.ParameterInvalid):
        live.gemm(a.real, a.real.T, alpha=1j)
    with pytest.raises(gemmserve.NotFound):
        live.array("arr_" + "0" * 26)
    with pytest.raises(gemmserve.NotFound):
        live.job("job_" + "0" * 26)
    ra.delete()
    with pytest.raises(gemmserve.NotFound):
        live.gemm(ra, ra.H)
    with pytest.raises(gemmserve.InvalidRequest):
        live.submit("gemm", a, a.T, ttl_s=-1)
    with pytest.raises(gemmserve.InvalidRequest):
        live.submit("gemm", a, a.T, unknown=1)


def test_listings(live) -> None:
    made = {live.put(np.ones(3)).id for _ in range(3)}
    assert {remote.id for remote in live.arrays(limit=3)} == made
    assert made < {remote.id for remote in live.arrays()} | made
    for array_id in made:
        live.delete(array_id)
    assert not made & {remote.id for remote in live.arrays()}


def test_the_server_about_itself(live) -> None:
    assert live.ready()
    assert live.health()["status"] == "ok"
    assert "fp32" in live.devices()[0]["compute_modes"]
    assert live.usage()["max_array_bytes"] > 0
    assert live.overview()["devices"][0]["id"] == "cpu"
    assert live.overview(history=True)["history"]["step"] == 5


async def test_awaited(app_url, random_complex) -> None:
    a, b = random_complex(20, 30), random_complex(30, 10)
    async with AsyncClient(app_url) as client:
        np.testing.assert_allclose(await client.gemm(a, b), a @ b, rtol=1e-4, atol=1e-5)
        remote = await (await client.put(a) @ b)
        np.testing.assert_allclose(await remote.numpy(), a @ b, rtol=1e-4, atol=1e-5)
        job = await client.submit("gemm_reduce", a, b, reduce=["sum", "sumsq"])
        assert [info.state async for info in job.events()][-1] == "succeeded"
        assert list(await job.result()) == ["sum", "sumsq"]
        with pytest.raises(gemmserve.ShapeMismatch):
            await client.gemm(remote, remote)


VIEWS = {
    "rows": lambda x: x[1:3],
    "steps": lambda x: x[::-2, 1::2],
    "new axis": lambda x: x[None],
    "column": lambda x: x[:, 2],
    "transposed part": lambda x: x[1:, :3].T,
    "conjugated part": lambda x: x[:3, ::-1].conj(),
    "adjoint of a part": lambda x: x[:3, ::-1].conj().mT,
    "real": lambda x: x.real,
    "imag of a part": lambda x: x[::2].imag,
    "diagonal": lambda x: x.diagonal(1),
    "reshaped": lambda x: x.reshape(2, 12),
    "none": lambda x: x[3:3],
}


@pytest.mark.parametrize("dtype", ["complex64", "float64"])
@pytest.mark.parametrize("order", "CF")
def test_views_as_operands_and_downloads(live, rng, dtype, order, monkeypatch) -> None:
    a = np.asarray(rng.standard_normal((4, 6)) + 1j * rng.standard_normal((4, 6)))
    a = np.asarray(a if dtype == "complex64" else a.real, dtype=dtype, order=order)
    remote = live.put(a)
    for gathered in (False, True):
        if gathered:
            monkeypatch.setattr(array_flows, "SMALL_SPAN", 0)
            monkeypatch.setattr(array_flows, "SPARSE", 0)
        for name, view in VIEWS.items():
            if (dtype == "float64" and "imag" in name) or (order == "F" and name == "reshaped"):
                continue
            shown, truth = view(remote), view(a)
            assert (shown.shape, shown.dtype) == (truth.shape, truth.dtype)
            np.testing.assert_array_equal(shown.numpy(), truth, err_msg=name)
            b = rng.standard_normal((truth.shape[-1], 3)).astype(truth.dtype)
            np.testing.assert_allclose((shown @ b).numpy(), truth @ b, rtol=1e-4, atol=1e-4, err_msg=name)
            c = rng.standard_normal((3, *truth.shape[-2:-1])).astype(truth.dtype)
            if truth.ndim == 2:
                np.testing.assert_allclose(
                    live.gemm(c.T, np.eye(3, dtype=c.dtype), live.put(c).T, beta=2).numpy(), 3 * c.T, rtol=1e-4
                )
    with live.program() as p:
        x = p.gemm(remote, remote.H)
        y = x[::2, 1] @ remote[::2]
        z = np.reshape(x[:, ::-1].T, -1)
        w = np.linalg.multi_dot([remote[0].conj(), remote.T, x, x[:, :2]])
    full = a.astype(complex) @ a.conj().T
    np.testing.assert_allclose(y.numpy(), full[::2, 1] @ a[::2], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(z.numpy(), full[:, ::-1].T.ravel(), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(w.numpy(), a[0].conj() @ a.T @ full @ full[:, :2], rtol=1e-3, atol=1e-2)


def test_views_in_batches_and_jobs(live, rng) -> None:
    a = rng.standard_normal((6, 4))
    remote = live.put(a)
    rows = [remote[i : i + 2] for i in (0, 2, 4)]
    for product, truth in zip(live.gemm_many(rows, remote.T[:, 1:]), a.reshape(3, 2, 4), strict=True):
        np.testing.assert_allclose(product.numpy(), truth @ a.T[:, 1:], rtol=1e-12)
    jobs = live.submit_many({"op": "gemm", "a": row, "b": remote.T} for row in rows)
    for job, truth in zip(jobs, a.reshape(3, 2, 4), strict=True):
        np.testing.assert_allclose(job.result().numpy(), truth @ a.T, rtol=1e-12)
    reduced = live.gemm_reduce(remote[::2], remote[1::2].T, reduce="absmax", axis="n")
    np.testing.assert_allclose(reduced.numpy(), np.abs(a[::2] @ a[1::2].T).max(1), rtol=1e-12)


async def test_large_stretches_come_in_parts(live, app_url, rng, monkeypatch) -> None:
    for name, nbytes in (("PARTS_FROM", 1000), ("PART", 700)):
        monkeypatch.setattr(array_flows, name, nbytes)
    a = rng.standard_normal((40, 10))
    remote = live.put(a)
    np.testing.assert_array_equal(remote[1:-1, ::-1].numpy(), a[1:-1, ::-1])
    async with AsyncClient(app_url) as client:
        again = await client.array(remote.id)
        np.testing.assert_array_equal(await again[7:, 1:].T.numpy(), a[7:, 1:].T)
        np.testing.assert_array_equal(await again[:, 3].numpy(), a[:, 3])
        monkeypatch.setattr(array_flows, "SPARSE", 0)
        monkeypatch.setattr(array_flows, "SMALL_SPAN", 0)
        np.testing.assert_array_equal(await again[:, 3].numpy(), a[:, 3])
    with Client(app_url, digests="always") as client:
        again = client.array(remote.id)
        np.testing.assert_array_equal(again[3:5].numpy(), a[3:5])
        np.testing.assert_array_equal(again.T.numpy(), a.T)
        argmax = live.gemm_reduce(remote, remote.T, reduce="argmax")
        for handle in (argmax, client.array(argmax.id)):
            np.testing.assert_array_equal(handle[::3].numpy(), (a @ a.T).argmax(0)[::3])


@pytest.mark.parametrize("order", ["C", "F"])
def test_downloads_are_received_into_memory_of_the_callers(live, rng, order, monkeypatch) -> None:
    a = np.asarray(rng.standard_normal((64, 48)), order=order)
    remote = live.put(a)
    out = np.zeros_like(a)
    allocated = []
    empty = np.empty

    def noted(shape, *args, **options):
        allocated.append(shape)
        return empty(shape, *args, **options)

    monkeypatch.setattr("gemmserve._transfer.bodies.np.empty", noted)
    assert remote.numpy(out=out) is out
    np.testing.assert_array_equal(out, a)
    assert a.shape not in allocated
    other = np.zeros(a.shape, a.dtype, order="F" if order == "C" else "C")
    np.testing.assert_array_equal(remote.numpy(out=other), a)
    assert a.shape in allocated, "its elements lie in another order"

"""einsum and tensordot of both clients and of programs, against NumPy's; what is sent for them, and what is left."""

from __future__ import annotations

import gc
import subprocess
import sys
import time

import numpy as np
import pytest

import gemmserve
from gemmserve import AsyncClient, Client, ParameterInvalid, RemoteArray, ShapeMismatch


@pytest.fixture(scope="module")
def live(app_url):
    with Client(app_url) as client:
        yield client


def random_of(*shape):
    rng = np.random.default_rng(len(shape))
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


EQUATIONS = [
    ("ij,jk->ik", [(3, 4), (4, 5)]),
    ("ij,jk,kl->li", [(3, 4), (4, 5), (5, 6)]),
    ("ij,ij->ij", [(3, 4), (3, 4)]),
    ("i,j->ij", [(3,), (4,)]),
    ("i,i", [(3,), (3,)]),
    ("ij->ji", [(3, 4)]),
    ("ii->i", [(3, 3)]),
    ("ii", [(3, 3)]),
    ("ijk,k->k", [(2, 3, 4), (4,)]),
    ("aibj,ijc->abc", [(4, 3, 5, 2), (3, 2, 6)]),
    ("...ij,...jk", [(2, 1, 3, 4), (5, 4, 3)]),
    ("xy,ayb->axb", [(2, 2), (16, 2, 16)]),
    ("ai,bi,ci->abc", [(3, 4), (5, 4), (6, 4)]),
    ("ij,jk->ik", [(3, 0), (0, 5)]),
    ("ij,jk,kl->il", [(0, 3), (3, 5), (5, 2)]),
    (",ij", [(), (3, 4)]),
]


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_einsum_is_numpys(live, equation, shapes) -> None:
    arrays = [random_of(*shape) for shape in shapes]
    expected = np.einsum(equation, *arrays)
    stored = {array.id for array in live.arrays()}
    found = live.einsum(equation, *arrays)
    assert type(found) is type(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert {array.id for array in live.arrays()} == stored  # nothing is left of it
    handles = [live.put(x) for x in arrays]
    remote = live.einsum(equation, *handles)
    assert isinstance(remote, RemoteArray)
    assert (remote.shape, remote.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(remote.numpy(), expected, rtol=1e-12, atol=1e-12)
    with live.program() as p:
        recorded = p.einsum(equation, *handles[:1], *arrays[1:], name="found")
    np.testing.assert_allclose(recorded.numpy(), expected, rtol=1e-12, atol=1e-12)
    assert "found" in p.job.result()


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        ([(2, 3), (4,)], 0),
        ([(2, 3, 4), (4, 5)], 1),
        ([(2, 3, 4), (3, 4, 5)], 2),
        ([(3, 4, 5), (4, 3, 5)], ([1, 0], [0, 1])),
        ([(3, 4, 5), (5, 3)], ([-1], [-2])),
        ([(3, 4, 5), (2, 5)], (2, 1)),
    ],
)
def test_tensordot_is_numpys(live, shapes, axes) -> None:
    a, b = (random_of(*shape) for shape in shapes)
    expected = np.tensordot(a, b, axes=axes)
    np.testing.assert_allclose(live.tensordot(a, b, axes), expected, rtol=1e-12, atol=1e-12)
    with live.program() as p:
        recorded = p.tensordot(live.put(a), b, axes)
    np.testing.assert_allclose(recorded.numpy(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.tensordot(live.put(a), live.put(b), axes).numpy(), expected, rtol=1e-12, atol=1e-12)


async def test_the_awaited_client_has_them(app_url) -> None:
    a, b = random_of(3, 4), random_of(4, 5)
    async with AsyncClient(app_url) as client:
        np.testing.assert_allclose(await client.einsum("ij,jk,lk->il", a, b, b), a @ b @ b.T, rtol=1e-12)
        np.testing.assert_allclose(await client.tensordot(a, b, 1), a @ b, rtol=1e-12)
        ra = await client.put(a)
        remote = await client.einsum("ij,jk,lk->il", ra, b, b)
        np.testing.assert_allclose(await remote.numpy(), a @ b @ b.T, rtol=1e-12)
        np.testing.assert_allclose(await (await client.einsum("ij->ji", ra)).numpy(), a.T)
        async with client.program() as p:
            recorded = await p.einsum("ij,jk->ki", ra, b)
            dotted = await p.tensordot(ra, b, 1)
        np.testing.assert_allclose(await recorded.numpy(), (a @ b).T, rtol=1e-12)
        np.testing.assert_allclose(await dotted.numpy(), a @ b, rtol=1e-12)


def test_views_are_operands_and_nothing_is_downloaded(service, client) -> None:
    a = random_of(6, 8, 4)
    ra = client.put(a)
    expected = np.einsum("ijk,ljk->il", a[::2, 1:-1].conj(), a[1::2, 6:0:-1])
    service.requests.clear()
    found = client.einsum("ijk,ljk->il", ra[::2, 1:-1].conj(), ra[1::2, 6:0:-1])
    chain = np.einsum("il,ml,mk->ik", found, found, found)
    assert service.calls == ["POST /v1/jobs"] * 2
    np.testing.assert_allclose(chain.numpy(), expected @ expected.T @ expected, rtol=1e-12, atol=1e-12)


def test_a_product_of_local_operands_is_one_exchange(service, client) -> None:
    a, b = random_of(3, 4).astype("c8"), random_of(5, 4).astype("c8")
    np.testing.assert_allclose(client.einsum("ij,kj->ki", a, b), b @ a.T, rtol=1e-5)
    assert [(request.method, request.url.path) for request in service.requests] == [("POST", "/v1/gemm")]


def test_what_takes_no_step_is_not_sent(service, client) -> None:
    a = random_of(3, 3)
    np.testing.assert_array_equal(client.einsum("ij->ji", a), a.T)
    np.testing.assert_array_equal(client.einsum("ii->i", a), np.diagonal(a))
    assert client.einsum("ij->ji", a.real, dtype=complex).dtype == complex
    assert service.requests == []


def test_small_operands_are_sent_as_one_array(live) -> None:
    rng = np.random.default_rng(0)
    gates = [rng.standard_normal((2, 2)).astype("f4") for _ in range(5)]
    large = rng.standard_normal((2, 1 << 18)).astype("f4")
    with live.program() as p:
        chain = p.einsum("ab,bc,cd,de,ef,fg->ag", *gates, large)
        uploads = len(p._temporaries)
    assert uploads == 2  # the gates, and the large one
    np.testing.assert_allclose(chain.numpy(), np.linalg.multi_dot([*gates, large]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "dtypes"),
    [
        ("ij,jk->ik", ["f4", "c16"]),
        ("ij,jk,kl->il", ["f4", "c8", "f8"]),
        ("ij,ij,ij->ij", ["f2", "f2", "c8"]),
        ("ij,ij->j", ["f2", "c16"]),
        ("ij->j", ["f2"]),
    ],
)
def test_results_have_numpys_dtype(live, equation, dtypes) -> None:
    arrays = [random_of(5, 5).real.astype(dtype) for dtype in dtypes]
    handles = [live.put(x) for x in arrays]
    expected = np.einsum(equation, *(x.astype(complex) for x in arrays))
    remote = live.einsum(equation, *handles)
    tolerance = 50 * np.finfo(np.result_type(*arrays)).eps * np.abs(expected).max()
    for found in (live.einsum(equation, *arrays), remote.numpy()):
        assert found.dtype == remote.dtype == np.result_type(*arrays)
        np.testing.assert_allclose(found.astype(complex), expected, rtol=0, atol=tolerance)
    assert live.einsum("ij->ji", handles[0], dtype=complex).dtype == complex


def test_steps_name_the_mode_and_the_result(live) -> None:
    a = random_of(4, 4).astype("c8")
    with live.program() as p:
        p.einsum("ij,jk,kl->il", a, a, a, compute="fp32", name="cube")
    assert [(step["op"], step["compute"]) for step in p._recording.steps] == [("gemm", "fp32")] * 2
    assert {*p.job.result()} == {"cube"}


def test_a_network_of_random_tensors(live) -> None:
    from contraction_steps import ring

    terms, sizes = ring(14, seed=2)
    arrays = [random_of(*(sizes[label] for label in term)) / 2 for term in terms]
    equation = ",".join(terms) + "->" + terms[0][:1]
    expected = np.einsum(equation, *arrays, optimize=True)
    handles = [live.put(x) for x in arrays]
    found = np.einsum(equation, *handles)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


def test_the_order_is_told_and_nothing_is_sent(service, client) -> None:
    a, b, c = np.ones((3, 40)), np.ones((40, 5)), np.ones((5, 40))
    handles = [client.put(x) for x in (a, b, c)]
    service.requests.clear()
    for path, report in (
        np.einsum_path("ij,jk,kl->il", *handles),
        gemmserve.einsum_path("ij,jk,kl->il", a, b, handles[2]),
    ):
        assert path == ["einsum_path", (0, 1), (0, 1)]
        assert "steps: 2 gemm, 0 multiply, 0 sum, 0 copies" in report
    assert service.requests == []


def test_what_is_refused_before_anything_is_sent(service, client) -> None:
    a, b = np.ones((3, 4)), np.ones((4, 5))
    for wrong, error in (
        (lambda: client.einsum("ij,jk->ik", a, a), ShapeMismatch),
        (lambda: client.einsum("ij,jk->iz", a, b), ParameterInvalid),
        (lambda: client.einsum("ij,jk,kl->il", a, b, np.ones((5, 6)), optimize="nonsense"), ParameterInvalid),
        (lambda: client.einsum("ij,jk->ik", a, b, memory_limit=100), ParameterInvalid),
        (lambda: client.einsum("ij,jk->ik", a, "b"), TypeError),
        (lambda: client.einsum("ij,jk->ik", a, b, dtype="f4"), gemmserve.DtypeUnsupported),
        (lambda: client.einsum("ij,jk->ik", a, b, order="F"), TypeError),
        (lambda: client.tensordot(a, b, 2), ShapeMismatch),
        (lambda: client.tensordot(a, b, 3), ParameterInvalid),
        (lambda: client.tensordot(a, b, -1), ParameterInvalid),
        (lambda: client.tensordot(a, b, ([0, 0], [0, 0])), ParameterInvalid),
        (lambda: client.tensordot(a, b, ([0], [0, 1])), ParameterInvalid),
        (lambda: client.tensordot(a, b, "ab"), ParameterInvalid),
    ):
        with pytest.raises(error):
            wrong()
    assert service.requests == []


def test_steps_are_recorded_inside_of_the_block(service, client) -> None:
    with pytest.raises(gemmserve.ProgramError):
        client.program().einsum("ij,jk,kl", *[np.ones((2, 2))] * 3)
    assert service.requests == []


def test_a_result_lives_as_long_as_its_handles(app_url, live) -> None:
    a = random_of(4, 4)
    with Client(app_url, auto_delete=True) as client:
        ra = client.put(a)
        found = client.einsum("ij,jk,kl->il", ra, ra, ra).T
        gc.collect()
        np.testing.assert_allclose(found.numpy(), (a @ a @ a).T, rtol=1e-12)
        dropped = client.einsum("ij,jk->ik", ra, ra).id
        gc.collect()
        assert any(is_gone(live, dropped) for _ in range(500))
        kept = found.id
    assert is_gone(live, kept)


def is_gone(client, array_id) -> bool:
    """Whether there is no such array, or will be none in a moment."""
    try:
        client.array(array_id)
    except (gemmserve.NotFound, gemmserve.Gone):
        return True
    time.sleep(0.01)
    return False


def test_optimizers_are_imported_only_when_asked_for() -> None:
    code = (
        "import sys, numpy as np; from gemmserve._contraction.plan import Operand, plan; "
        "plan('ij,jk,kl', [Operand((2, 2), np.dtype('f8'))] * 3); "
        "assert not {'cotengra', 'opt_einsum'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

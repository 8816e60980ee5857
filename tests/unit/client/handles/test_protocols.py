"""NumPy's protocols: what has no form on the server is refused by name, and nothing is downloaded instead."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import gemmserve


@pytest.fixture
def remote(client, service):
    """A handle; what the service is asked from then on is kept."""
    made = client.put(np.arange(12.0).reshape(3, 4))
    service.requests.clear()
    return made


REFUSED = {
    "absolute": np.abs,
    "concatenate": lambda x: np.concatenate([x, x]),
    "linalg.norm": np.linalg.norm,
    "linalg.svd": np.linalg.svd,
    "fft": np.fft.fft,
    "where": lambda x: np.where(x, x, x),
    "array_equal": lambda x: np.array_equal(x, x),
    "equal": lambda x: np.ones((3, 4)) == x,
    "add.reduce": np.add.reduce,
    "add.at": lambda x: np.add.at(np.ones((3, 4)), 0, x),
    "exp": np.exp,
    "save": lambda x: np.save("nowhere.npy", x),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_has_no_form_is_refused(remote, service, call) -> None:
    with pytest.raises(TypeError, match=r"\.numpy\(\)"):
        call(remote)
    assert service.requests == []


def test_options_that_have_no_form_are_refused(remote, service) -> None:
    out = np.empty((3, 3))
    for call in (
        lambda: np.matmul(remote, remote.T, out=out),
        lambda: np.matmul(remote, remote.T, dtype=np.float32),
        lambda: np.dot(remote, remote.T, out=out),
        lambda: np.add(remote, remote, where=np.ones((3, 4), bool)),
        lambda: np.copy(remote, subok=True),
    ):
        with pytest.raises(TypeError, match=r"\.numpy\(\)"):
            call()
    in_place = np.ones((3, 3))
    for change in (operator.iadd, operator.imatmul):
        with pytest.raises(TypeError, match=r"\+=.*\.numpy\(\)"):
            change(in_place, remote)
    with pytest.raises(TypeError, match="has no dtype"):
        np.add(remote, remote, dtype=np.float32)
    with pytest.raises(TypeError, match="matrix product"):
        in_place.view(np.matrix) * remote
    for number in (float, int, complex):
        with pytest.raises(TypeError, match=r"\.item\(\)"):
            number(remote[0, 0])
    assert service.requests == []


async def test_attributes_that_arrays_alone_have_are_told_of(remote, async_client) -> None:
    for name, said in (("mean", "x.numpy().mean()"), ("astype", "x.numpy().astype()"), ("flags", "x.numpy().flags")):
        with pytest.raises(AttributeError, match="download the array first") as caught:
            getattr(remote, name)
        assert str(caught.value).endswith(said)
        assert not hasattr(remote, name)
    with pytest.raises(AttributeError, match=r"\(await x.numpy\(\)\).mean\(\)$"):
        (await async_client.put(np.eye(2))).mean  # noqa: B018 (an attribute)
    with pytest.raises(AttributeError, match=r"^'RemoteArray' object has no attribute 'meen'$"):
        remote.meen  # noqa: B018 (as above)


def test_others_that_have_a_say_are_asked(remote) -> None:
    class Other:
        def __array_function__(self, func, types, args, kwargs):
            return "theirs"

    assert np.dot(remote, Other()) == "theirs"


@pytest.mark.parametrize(
    ("call", "method", "operands"),
    [
        (lambda x: np.einsum("ij,kj", x, x), "einsum", 3),
        (lambda x: np.tensordot(x, x, axes=([1], [1])), "tensordot", 2),
        (lambda x: np.dot(x[None], x[None].mT), "tensordot", 2),
        (lambda x: np.inner(x[None], x[None]), "tensordot", 2),
        (lambda x: np.linalg.solve(x, x), "solve", 2),
        (np.linalg.inv, "inv", 1),
        (np.linalg.cholesky, "cholesky", 1),
        (lambda x: np.linalg.matrix_power(x, 3), "matrix_power", 2),
    ],
)
def test_what_the_client_has_a_method_for(remote, client, monkeypatch, call, method, operands) -> None:
    seen = []
    monkeypatch.setattr(
        type(client), method, lambda self, *args, **options: seen.append((self, args, options)), raising=False
    )
    call(remote)
    ((called, args, _),) = seen
    assert called is client
    assert len(args) == operands


def test_operators_reach_the_handle_from_either_side(remote, monkeypatch) -> None:
    kind = gemmserve.RemoteArray
    for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv"):
        monkeypatch.setattr(kind, f"__{name}__", lambda self, other, name=name: (name, other), raising=False)
    monkeypatch.setattr(kind, "__neg__", lambda self: "neg", raising=False)
    ones = np.ones(4)
    assert np.add(remote, 1) == ("add", 1)
    assert (np.float64(2) * remote)[0] == "rmul"
    assert (ones + remote)[0] == "radd"
    assert (ones - remote)[0] == "rsub"
    assert np.subtract(remote, ones)[0] == "sub"
    assert np.divide(remote, 2) == ("truediv", 2)
    assert np.negative(remote) == "neg"
    assert np.dot(remote, 3.0)[0] == "mul"
    assert np.inner(2.0, remote)[0] == "rmul"
    with pytest.raises(TypeError, match=r"\.numpy\(\)"):
        np.divide(2, remote)


async def test_an_awaited_handle_refuses_what_cannot_wait(async_client) -> None:
    remote = await async_client.put(np.ones((3, 4)))
    with pytest.raises(TypeError, match=r"await gemmserve\.dot"):
        np.dot(remote, remote.T)
    with pytest.raises(TypeError, match="await"):
        np.einsum("ij->ji", remote)
    with pytest.raises(TypeError, match=r"\.numpy\(\)"):
        np.abs(remote)
    assert np.shape(np.transpose(remote)) == (4, 3)
    assert (await np.matmul(remote, remote.T)).shape == (3, 3)

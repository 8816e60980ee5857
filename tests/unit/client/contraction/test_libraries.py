"""Libraries of tensor networks on handles: they find the functions of the package, and what they make stays there."""

from __future__ import annotations

import numpy as np
import pytest
from contraction_steps import ring

from gemmserve import Client, RemoteArray


@pytest.fixture(scope="module")
def live(app_url):
    with Client(app_url) as client:
        yield client


def network(seed):
    """Terms, arrays and truth of a closed network of twelve tensors."""
    terms, sizes = ring(12, seed=seed)
    rng = np.random.default_rng(seed)
    shapes = [[sizes[label] for label in term] for term in terms]
    arrays = [(rng.standard_normal(shape) + 1j * rng.standard_normal(shape)) / 2 for shape in shapes]
    return terms, arrays, np.einsum(",".join(terms) + "->", *arrays, optimize=True)


def close(found, truth) -> None:
    assert isinstance(found, RemoteArray)
    np.testing.assert_allclose(found.numpy(), truth, rtol=1e-10, atol=1e-10 * np.abs(truth).max())


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk,kl->li", [(3, 4), (4, 5), (5, 3)]),
        ("ij,jk,ki->", [(3, 4), (4, 5), (5, 3)]),
        ("ai,bi,ci->abc", [(3, 4), (2, 4), (6, 4)]),
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 3)]),
        ("iij,j->i", [(3, 3, 4), (4,)]),
    ],
)
def test_opt_einsum(live, equation, shapes) -> None:
    opt_einsum = pytest.importorskip("opt_einsum")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    handles = [live.put(x) for x in arrays]
    truth = np.einsum(equation, *arrays)
    close(opt_einsum.contract(equation, *handles), truth)
    close(opt_einsum.contract_expression(equation, *shapes)(*handles), truth)
    path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True)
    close(live.einsum(equation, *handles, optimize=path), truth)


def test_cotengra(live) -> None:
    cotengra = pytest.importorskip("cotengra")
    terms, arrays, truth = network(seed=6)
    handles = [live.put(x) for x in arrays]
    sizes = {label: n for term, x in zip(terms, arrays, strict=True) for label, n in zip(term, x.shape, strict=True)}
    tree = cotengra.array_contract_tree([tuple(term) for term in terms], (), sizes)
    close(cotengra.einsum(",".join(terms) + "->", *handles), truth)
    close(tree.contract(handles), truth)
    close(live.einsum(",".join(terms) + "->", *handles, optimize=tree), truth)


def test_a_tree_of_cotengras_is_one_job_slices_and_all(live) -> None:
    cotengra = pytest.importorskip("cotengra")
    terms, arrays, truth = network(seed=7)
    handles = [live.put(x) for x in arrays]
    sizes = {label: n for term, x in zip(terms, arrays, strict=True) for label, n in zip(term, x.shape, strict=True)}
    tree = cotengra.array_contract_tree([tuple(term) for term in terms], (), sizes).slice(target_slices=3)
    jobs = len(live.jobs())
    with live.program() as p:
        found = tree.contract(handles, implementation=(p.einsum, p.tensordot))
    close(found, truth)
    assert tree.nslices >= 3
    assert len(live.jobs()) == jobs + 1


def test_autoray_finds_the_functions(live) -> None:
    autoray = pytest.importorskip("autoray")
    a, b = np.random.default_rng(0).standard_normal((2, 4, 4))
    ra, rb = live.put(a), live.put(b)
    assert autoray.infer_backend(ra) == "gemmserve"
    close(autoray.do("tensordot", ra, rb, 1), a @ b)
    close(autoray.do("einsum", "ij,kj->ki", ra, rb), b @ a.T)
    close(autoray.do("transpose", ra), a.T)
    close(autoray.do("reshape", ra, (2, 8)), a.reshape(2, 8))


def test_circuits_of_quimb(live) -> None:
    quimb = pytest.importorskip("quimb.tensor")

    def circuit(**options):
        made = quimb.Circuit(6, **options)
        rng = np.random.default_rng(0)
        for layer in range(4):
            for qubit in range(6):
                made.apply_gate("U3", *rng.uniform(0, 6, 3), qubit)
            for qubit in range(layer % 2, 5, 2):
                made.apply_gate("CZ", qubit, qubit + 1)
        return made

    plain = circuit()
    truth = plain.amplitude("010011", dtype="complex128")
    remote = circuit(to_backend=lambda x: live.put(np.asarray(x)))
    close(remote.amplitude("010011", dtype="complex128", simplify_sequence=""), truth)
    state = plain.psi.astype("complex128")
    for qubit, bit in enumerate("010011"):
        state.isel_({f"k{qubit}": int(bit)})
    # The network as one job: each tensor with its labels.
    arguments = [each for tensor in state for each in (live.put(np.asarray(tensor.data)), list(tensor.inds))]
    close(live.einsum(*arguments, []), truth)

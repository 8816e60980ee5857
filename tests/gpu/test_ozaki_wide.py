"""Residues of single precision on the device, and the wide way of what they do not serve: sizes that fill it."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve_kernels import GemmConfig, GemmProblem, Operand, gemm, plan, prepare, read_element_counts
from gemmserve_kernels.bench.elementwise import elementwise, limit
from gemmserve_kernels.bench.kinds import KINDS, most, operands
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.device.spec import DeviceSpec

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cupy():
    import cupy

    if CupyLauncher.current().spec.arch != "sm_90a":
        pytest.skip("no INT8 wgmma")
    return cupy


def counted(run):
    """The result, and its elements by the way they were computed."""
    before = read_element_counts()
    found = run()
    return found, read_element_counts().counts() - before.counts()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_every_element_is_in_the_class_of_plain_arithmetic(cupy, dtype, kind):
    seed = int(np.random.SeedSequence().entropy % 2**32)
    for m, n, k in ((515, 700, 300), (512, 512, 4096)):
        a, b = operands(cupy, kind, m, n, k, dtype, seed)
        results = {"ours": gemm(a, b, compute="ozaki"), "vendor": gemm(a, b, config=GemmConfig(algorithm="vendor"))}
        found = elementwise(cupy, a, b, results)
        assert not found["ours"].odd, (kind, seed)
        allowed = most(kind, dtype, found["vendor"].modulus)
        assert found["ours"].modulus <= allowed, (kind, m, n, k, seed, found)


def mixed(cupy, m, n, k, dtype="complex64"):
    """Data of which some tiles fail, at the edges, too, and some pairs are none for bfloat16 parts."""
    a, b = operands(cupy, "normal", m, n, k, dtype, 3)
    a[m // 2] *= cupy.exp2(cupy.linspace(-30, 30, k)).astype("f4")
    a[-1, 3], a[3, 5] = 1e9, 1e-33
    b[: k // 2 + 2, 40] *= 1e-33
    b[:, -1] *= (cupy.arange(k) < 5).astype("f4")
    a[200, ::2] *= 1e-33
    return a, b


@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (3001, 2500, 2049), (2050, 5000, 3000)], ids=str)
def test_what_shows_in_no_bit(cupy, shape):
    """Strips, what was prepared, the graph of a call that comes again, and who asks."""
    a, b = mixed(cupy, *shape)
    found, counts = counted(lambda: gemm(a, b, compute="ozaki"))
    assert counts.planned > 0
    assert counts.wide > 0
    assert counts.plain > 0
    assert counts.total == shape[0] * shape[1]
    pa, pb = prepare(a, "a", "ozaki"), prepare(b, "b", "ozaki")
    for left, right, options in (
        *((a, b, {}),) * 4,
        (pa, b, {}),
        (a, pb, {}),
        (pa, pb, {}),
        (a, b, {"config": GemmConfig(strips=4)}),
        (a, b, {"config": GemmConfig(strips=7)}),
        (pa, b, {"config": GemmConfig(strips=2)}),
        (a, b, {"config": GemmConfig(cluster=1)}),
    ):
        again, other = counted(
            lambda left=left, right=right, options=options: gemm(left, right, compute="ozaki", **options)
        )
        assert bool((again == found).all()), options
        assert other == counts
    results = {"ours": found, "vendor": gemm(a, b, config=GemmConfig(algorithm="vendor"))}
    errors = elementwise(cupy, a, b, results)
    assert errors["ours"].modulus <= limit(errors["vendor"].modulus)


def test_a_batch_has_the_bits_of_its_products(cupy):
    pairs = [mixed(cupy, 300, 560, 500) for _ in range(3)]
    pairs[1] = tuple(operands(cupy, "normal", 300, 560, 500, "complex64", 9))
    a, b = (cupy.stack([pair[side] for pair in pairs]) for side in (0, 1))
    c = cupy.ones((300, 560), "complex64")
    together = gemm(a, b, c, beta=0.5j, compute="ozaki")
    shared = gemm(a, b[0], c, beta=0.5j, compute="ozaki")
    for i in range(3):
        assert bool((together[i] == gemm(a[i], b[i], c, beta=0.5j, compute="ozaki")).all())
        assert bool((shared[i] == gemm(a[i], b[0], c, beta=0.5j, compute="ozaki")).all())


def test_auto_takes_what_was_prepared_for_it(cupy):
    n = 6144
    a, b = operands(cupy, "normal", n, n, n, "complex64", 1)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b))
    assert plan(problem, DeviceSpec.current()).algorithm == "ozaki"
    pa, pb = prepare(a, "a"), prepare(b, "b")
    assert "ozaki" in pa.payload.arithmetics
    assert bool((gemm(pa, pb) == gemm(a, b)).all())
    assert bool((gemm(a, b) == gemm(a, b, compute="ozaki")).all())
    thin = b[:, :256].copy()
    assert bool((gemm(pa, thin) == gemm(a, thin)).all()), "residues that do not serve"

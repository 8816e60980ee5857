"""Strips of a result on the CPU shim: the bits of the whole, on usual data and on what planes cannot hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simt_cases import ShimMachine, random
from simt_shim import ShimLauncher

from gemmserve_kernels import GemmConfig, GemmProblem, GemmReduceProblem, Operand
from gemmserve_kernels.algorithms.splits import gemm as product
from gemmserve_kernels.algorithms.splits import gemm_reduce
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.dispatch.prepare import prepare_on
from gemmserve_kernels.problem.errors import ConfigInfeasible

M, N, K = 40, 560, 40
"""Columns of two strips of 256 and a rest."""


@pytest.fixture(scope="module")
def machines():
    """With few multiprocessors, so that neither the whole nor a strip is a matter of few tiles, and with many."""
    return [ShimMachine(ShimLauncher(replace(KNOWN["A100"], sm_count=count), optimize="-O2")) for count in (1, 108)]


def run(machine, config, a, b, c=None, *, order="C", **options):
    """Bytes of the result."""
    operands = [Operand.of(x) if x is not None else None for x in (a, b, c)]
    problem = GemmProblem.build(*operands, order=order, **options)
    out = machine.put(np.full(problem.result_shape, np.nan, problem.result_dtype, order=order))
    before = machine.launcher.counts()
    on = [machine.put(x) if x is not None else None for x in (a, b, c)]
    product.run_gemm(machine.launcher, problem, config, *on, out)
    assert (machine.launcher.counts() - before).total == problem.batch * problem.m * problem.n
    return np.ascontiguousarray(machine.get(out)).tobytes()


def hostile(dtype, m=M):
    """Spread-out rows, sparse columns, an infinity, NaN and the smallest numbers, in tiles of every strip."""
    a, b = random(1, dtype, m, K), random(2, dtype, K, N)
    a[3] *= np.exp2(np.linspace(-30, 30, K)).astype("f4")
    b[:, 300] *= np.exp2(np.linspace(40, -40, K)).astype("f4")
    b[1:, 17], b[4, 500], b[2, 259], b[:, 555] = 0, np.inf, np.nan, 1e-42
    return a, b


@pytest.mark.parametrize("strips", [2, 3])
@pytest.mark.parametrize("compute", ["3xfp16", "tf32", "6xbf16"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_strips_have_the_bits_of_the_whole(machines, dtype, compute, strips):
    for machine in machines:
        for a, b in ((random(1, dtype, M, K), random(2, dtype, K, N)), hostile(dtype)):
            whole, cut = (
                run(machine, GemmConfig(algorithm="mma", strips=count), a, b, compute=compute) for count in (1, strips)
            )
            assert whole == cut


def test_on_hopper():
    machine = ShimMachine(ShimLauncher(replace(KNOWN["H200"], sm_count=2), optimize="-O0"))
    for a, b in ((random(1, "complex64", M, K), random(2, "complex64", K, N)), hostile("complex64")):
        config = GemmConfig(algorithm="wgmma")
        whole, cut = (run(machine, replace(config, strips=n), a, b, compute="3xfp16") for n in (1, 2))
        assert whole == cut
    a, b = hostile("complex64", 300)
    whole, cut = (run(machine, replace(config, strips=n), a, b, compute="3xfp16") for n in (1, 4))
    assert whole == cut


@pytest.mark.parametrize(("strips", "made"), [(4, 4), (6, 6), (9, 6)])
def test_rows_are_cut_where_there_are_many_strips(machines, strips, made, monkeypatch):
    """300 rows are two strips of 256 and a rest at most, 560 columns three."""
    shapes = []
    multiply = product._multiply

    def noted(launcher, problem, *args):
        shapes.append((problem.m, problem.n))
        multiply(launcher, problem, *args)

    monkeypatch.setattr(product, "_multiply", noted)
    a, b = hostile("complex64", 300)
    a[280] *= np.exp2(np.linspace(20, -30, K)).astype("f4")
    a[299, 3], c = np.inf, random(3, "complex64", 300, N)
    options = {"compute": "3xfp16", "beta": 1j}
    plain = [GemmConfig(algorithm="mma", strips=count) for count in (1, strips)]
    whole, cut = (run(machines[0], config, a, b, c, **options) for config in plain)
    assert whole == cut
    assert len(shapes) == 1 + made
    turned = [np.ascontiguousarray(x.T) for x in (a, b)]
    options |= {"trans_a": "T", "trans_b": "T", "order": "F"}
    whole, cut = (run(machines[1], config, *turned, c, **options) for config in plain)
    assert whole == cut


@pytest.mark.parametrize("ready", ["a", "b", "ab"])
def test_operands_that_are_ready_are_not_cut(machines, ready):
    machine = machines[0]
    arrays = {"a": random(4, "complex64", 300, K), "b": random(5, "complex64", K, N)}
    on = {side: machine.put(array) for side, array in arrays.items()}
    problem = GemmProblem.build(*map(Operand.of, arrays.values()), compute="3xfp16")
    planes = {side: prepare_on(machine.launcher, on[side], side, "3xfp16") for side in ready}
    assert all(operand.payload is not None for operand in planes.values())
    found = set()
    for operands, strips in ((on, 1), (on, 4), (on | planes, 1), (on | planes, 4)):
        out = machine.put(np.full(problem.result_shape, np.nan, problem.result_dtype))
        config = GemmConfig(algorithm="mma", strips=strips)
        product.run_gemm(machine.launcher, problem, config, operands["a"], operands["b"], None, out)
        found.add(np.ascontiguousarray(machine.get(out)).tobytes())
    assert len(found) == 1


def test_any_layout(machines):
    machine = machines[0]
    a, b, c = random(1, "complex64", 2, M, K), random(2, "complex64", N, K), random(3, "complex64", M, N)
    options = {"compute": "3xfp16", "trans_b": "C", "alpha": 2 - 1j, "beta": -1, "order": "F"}
    whole, cut = (run(machine, GemmConfig(algorithm="mma", strips=n), a, b, c, **options) for n in (1, 2))
    assert whole == cut
    planar = [np.stack([x.real, x.imag]) for x in (a[0], b)]
    options = {"compute": "3xfp16", "trans_b": "T", "layout": "planar"}
    whole, cut = (run(machine, GemmConfig(algorithm="mma", strips=n), *planar, **options) for n in (1, 2))
    assert whole == cut


def test_what_has_no_strips_says_so(machines):
    spec = machines[0].launcher.spec
    operand = Operand.contiguous((8, 8), np.dtype("f4"))
    problem = GemmProblem.build(operand, operand, compute="3xfp16")
    with pytest.raises(ConfigInfeasible, match="strips"):
        product.resolve(GemmConfig(strips=0), problem, spec)
    reduction = GemmReduceProblem.build(operand, operand, compute="3xfp16")
    with pytest.raises(ConfigInfeasible, match="strips"):
        gemm_reduce.resolve(GemmConfig(strips=2), reduction, spec)

"""How Gram matrices are planned: parts of rows, turns through a batch, memory, and the bound by itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmserve_kernels import GemmConfig, GemmReduceProblem, Operand
from gemmserve_kernels.algorithms.common.partials import written_dtype
from gemmserve_kernels.algorithms.gram.plan import ACCURACY, RUN, WORKSPACE, Cut, Tile, matrix_bytes, turns
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.device.struct_params import MatrixView
from gemmserve_kernels.dispatch.planned_call import fresh_key
from gemmserve_kernels.dispatch.planned_reduce import program_of
from gemmserve_kernels.dispatch.routes import plan_gemm_reduce

WIDE = {"f": np.dtype(np.float64), "c": np.dtype(np.complex128)}
EXTENTS = st.integers(1, 10**7)


@given(EXTENTS, st.integers(1, 1024), st.sampled_from("fc"))
def test_parts_cover_the_rows_and_fit(rows, k, kind):
    cut = Cut.of(rows, k, WIDE[kind])
    assert cut.rows % RUN == 0
    assert (cut.parts - 1) * cut.rows < rows <= cut.parts * cut.rows
    assert cut.parts == 1 or cut.parts * matrix_bytes(WIDE[kind], k) <= WORKSPACE
    assert cut.parts <= 64


@given(EXTENTS, st.integers(1, 1024), st.sampled_from("fc"))
def test_what_is_usual_is_far_from_the_bound(rows, k, kind):
    """Forms of random data are about 2 / (pi k) of their squared sums, complex ones pi / (4 k)."""
    assert Cut.of(rows, k, WIDE[kind]).tolerance(k, WIDE[kind]) < 0.1 / k


def test_the_bound_counts_the_longest_chain():
    short, long = Cut.of(64, 16, WIDE["c"]), Cut.of(10**6, 16, WIDE["c"])
    assert 2 * 512 < short.roundings(16, WIDE["c"]) < 2 * 512 + 300
    assert long.roundings(16, WIDE["c"]) > short.roundings(16, WIDE["c"]) + long.rows // RUN
    assert Cut.of(10**6, 16, WIDE["f"]).roundings(16, WIDE["f"]) < long.roundings(16, WIDE["c"]) / 1.5
    assert long.tolerance(16, WIDE["c"]) * ACCURACY >= long.roundings(16, WIDE["c"]) * 2.0**-53


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(0, 26), st.sampled_from("fc"))
def test_the_bound_holds_in_a_model(seed, k, bits, kind):
    """Sums in double in any order stay within (roundings u) (squared sum), of data that cancel to `bits` bits."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        x = rng.standard_normal(shape)
        return (x + 1j * rng.standard_normal(shape) if kind == "c" else x).astype("c8" if kind == "c" else "f4")

    a = np.tile(normal(600, 1), (1, k)) + np.float32(2.0**-bits) * normal(600, k)
    b = normal(k, 5)
    b -= b.mean(0)
    wide = a.astype(WIDE[kind])
    gram = wide.conj().T @ wide
    forms = np.einsum("ij,ik,kj->j", b.conj(), gram, b.astype(WIDE[kind])).real
    exact = (np.abs(wide.astype(np.clongdouble) @ b.astype(np.clongdouble)) ** 2).sum(0)
    one_norm = np.abs(b.real) + np.abs(b.imag)
    weights = (np.sqrt(np.diag(gram).real)[:, None] * one_norm.astype("f8")).sum(0) ** 2
    cut = Cut.of(600, k, WIDE[kind])
    assert (np.abs(forms - exact) <= cut.roundings(k, WIDE[kind]) * 2.0**-53 * weights).all()
    kept = forms >= cut.tolerance(k, WIDE[kind]) * weights
    assert (np.abs(forms - exact)[kept] <= ACCURACY * exact[kept]).all()


def test_tiles_are_wide_where_they_are_full():
    assert [Tile.of(k).block for k in (1, 16, 32, 33, 64, 128, 1000)] == [32, 32, 32, 64, 64, 64, 64]
    assert Tile.of(96).block == 32 or Tile.of(96).cost(96) <= 3 * 64**2
    assert [Tile(64, 1).triangle(k) for k in (1, 64, 65, 128, 129)] == [1, 1, 3, 3, 6]


def view(strides):
    return MatrixView(0, 0, np.dtype(np.float32), 8, 4, 4, 1, tuple(strides))


def place(index, strides):
    """Bytes to a float32."""
    return 4 * sum(i * s for i, s in zip(index, strides, strict=True))


@given(st.lists(st.integers(1, 5), max_size=4), st.lists(st.booleans(), min_size=4, max_size=4), st.integers(1, 40))
def test_turns_walk_through_the_batch_in_order(shape, shared, room):
    steps = [math.prod(shape[i + 1 :]) * 32 for i in range(len(shape))]
    own = [0 if repeated or extent == 1 else step for repeated, extent, step in zip(shared, shape, steps, strict=False)]
    a, b = view(own), view(steps)
    found = []
    for turn in turns(tuple(shape), a, b, WORKSPACE // room):
        assert math.prod(turn.own) <= room
        assert turn.first == len(found)
        found += [
            tuple(x.re + place(index, x.batch_strides) for x in (turn.a, turn.b))
            for index in np.ndindex(*turn.batch_shape)
        ]
    expected = [tuple(place(index, strides) for strides in (own, steps)) for index in np.ndindex(*shape)]
    assert found == expected


@pytest.mark.parametrize(
    "shape", [(16, 65536, 4096, 64), (100_000, 256, 64, 4), (3, 1 << 20, 8192, 256), (8, 32768, 16384, 1024)], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_memory_beside_operands_and_results(shape, dtype):
    """At most 64 MiB, and for each result a double and a flag."""
    batch, m, n, k = shape
    if k == 4:
        m, n = 1024, 64
    a, b = Operand.contiguous((batch, m, k), dtype), Operand.contiguous((batch, k, n), dtype)
    problem = GemmReduceProblem.build(a, b, reduce="sumsq", config=GemmConfig(algorithm="gram"))
    spec = KNOWN["H200"]
    written = {name: (shape, written_dtype(problem, name)) for name, (shape, _) in problem.results.items()}
    keys = fresh_key(problem.a), fresh_key(problem.b)
    program = program_of(CupyLauncher(spec), problem, plan_gemm_reduce(problem, spec), keys, written)
    assert program.workspace <= (64 << 20) + 12 * batch * n + 4096

"""Kernels compiled ahead of their use: which, in which order, and what random documented products need beyond them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gemmserve_kernels import precompile
from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.sources import check_sources, prepared_sources, sources
from gemmserve_kernels.device import compiler
from gemmserve_kernels.problem.validation import compute_modes
from gemmserve_kernels.problem.vocabulary import REDUCTIONS

DTYPES = ("complex64", "float32", "complex128", "float64", "float16")
TRANS = (("N", "N"), ("C", "N"), ("N", "C"), ("T", "N"), ("N", "T"))
COVERED = {"gemm": 0.85, "gemm_reduce": 0.6}
"""Share of random aligned products whose kernels are all compiled ahead, at least. Tiles depend on every extent: the
rest, mostly reductions of thin products, is compiled when it is first asked for."""
MISSED = {
    "small_gemm", "wgmma_gemm", "wgmma_reduce", "mma_gemm", "mma_reduce", "split", "gemm_reduce", "sums", "dmma_tiles",
    "dmma_reduce", "dmma_fallback", "reduce_fallback", "fallback", "gemm", "combine", "ozaki_patch", "mfma_gemm",
    "mfma_reduce",
}  # fmt: skip
"""Kernels with tiles of their own for some extents; all others are complete."""
SLOW = [pytest.param(arch, marks=() if arch == "sm_80" else pytest.mark.slow) for arch in precompile.DEVICES]


@pytest.mark.parametrize("arch", SLOW)
def test_documented_kinds_need_no_compiler(arch):
    found = set(precompile.documented(arch))
    spec = precompile.DEVICES[arch][0]
    assert spec.arch == arch
    for dtype in DTYPES:
        for compute in compute_modes(np.dtype(dtype)):
            for n in (64, 1024, 4096):
                assert sources(Case(m=n, n=n, k=n, dtype=dtype, compute=compute), spec, every=False) <= found
        assert sources(Case(m=1024, n=1024, k=1024, dtype=dtype, trans_a="C", beta=1), spec, every=False) <= found
        assert sources(Case(m=64, n=64, k=64, batch=64, dtype=dtype), spec, every=False) <= found
        assert check_sources(Case(m=4096, n=4096, k=4096, dtype=dtype, trans_a="T"), spec) <= found
        assert prepared_sources(Case(m=2048, n=2048, k=2048, dtype=dtype), spec) <= found
        for reduce in REDUCTIONS:
            case = Case(op="gemm_reduce", m=1024, n=1024, k=1024, dtype=dtype, reduce=(reduce,))
            assert sources(case, spec, every=False) <= found


def drawn(rng, op):
    """A random product or reduction of a documented kind, extents multiples of 16 from 16 to 8192."""
    m, n, k = (max(16, int(2 ** rng.uniform(4, 13)) // 16 * 16) for _ in range(3))
    trans_a, trans_b = TRANS[rng.integers(5 if op == "gemm" else 3)]
    fields = {"reduce": (str(rng.choice(REDUCTIONS)),), "axis": (str(rng.choice(["m", "n"])),)}
    return Case(
        op=op, m=m, n=n, k=k, dtype=str(rng.choice(DTYPES)), trans_a=trans_a, trans_b=trans_b,
        **(fields if op == "gemm_reduce" else {}),
    )  # fmt: skip


@pytest.mark.parametrize("arch", SLOW)
@pytest.mark.parametrize("op", COVERED)
def test_random_products_seldom_need_a_compiler(arch, op):
    found = set(precompile.documented(arch))
    rng = np.random.default_rng(7)
    needed = [sources(drawn(rng, op), precompile.DEVICES[arch][0], every=False) for _ in range(150)]
    assert any(needed)
    missing = [each - found for each in needed]
    assert {source.name for each in missing for source in each} <= MISSED
    assert sum(not each for each in missing) >= COVERED[op] * len(missing)


def test_the_likeliest_come_first():
    first = precompile.documented("sm_80")[:100]
    likely = Case(m=1024, n=1024, k=1024, dtype="complex64")
    assert sources(likely, precompile.DEVICES["sm_80"][0], every=False) <= set(first)
    assert len(set(precompile.documented("sm_80"))) == len(precompile.documented("sm_80"))


def test_a_source_that_does_not_compile_is_named_and_the_others_compiled(monkeypatch, capsys, tmp_path):
    good, bad = (compiler.KernelSource("gemm", ((name, "1"),)) for name in ("GOOD", "BAD"))

    def compiled(source, arch):
        if source == bad:
            raise compiler.CompileError("an error in line 7")
        (tmp_path / "good.cubin").write_bytes(b"code")
        return tmp_path / "good.cubin"

    monkeypatch.setattr(compiler, "cubin_file", compiled)
    monkeypatch.setattr(precompile, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(precompile, "documented", lambda arch: (good, bad))
    assert precompile.main(["sm_80", "--jobs", "1"]) == 1
    told = capsys.readouterr()
    assert "sm_80: 1 kernels" in told.out
    assert "line 7" in told.err
    assert precompile.main(["sm_80", "--jobs", "1", "--first", "1"]) == 0


def test_the_first_product_of_a_worker_is_among_them():
    """Every worker verifies a product before it is ready: that one above all must not wait for a compiler."""
    from gemmserve_service.executor.worker.checks import selftest
    from gemmserve_service.schemas import GemmParams

    class Asked(Exception):  # noqa: N818 (carries what was asked for)
        pass

    class Backend:
        def run(self, params, operands, results):
            raise Asked(params, operands["a"].data)

    with pytest.raises(Asked) as caught:
        selftest.verified_error(Backend())
    params, a = caught.value.args
    assert isinstance(params, GemmParams)
    k, m = a.shape
    first = next(precompile.cases())
    assert (first.m, first.k, first.dtype) == (m, k, a.dtype.name)
    assert (first.trans_a, first.trans_b) == (params.trans_a, params.trans_b)
    assert (complex(first.alpha), complex(first.beta)) == (complex(params.alpha), complex(params.beta))

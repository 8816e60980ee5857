"""Kernels compiled ahead of their use: which, and how they come into a cache that outlives the release."""

from __future__ import annotations

import pytest

from gemmserve_kernels import precompile
from gemmserve_kernels.bench.cases import Case
from gemmserve_kernels.bench.sources import check_sources, sources
from gemmserve_kernels.device import compiler, shipped_kernels
from gemmserve_kernels.device.shipped_kernels import SEED_VARIABLE, seed_cache


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """An image's kernels and a server's cache, which is not there yet."""
    shipped, cache = tmp_path / "shipped", tmp_path / "volume" / "kernels"
    shipped.mkdir()
    monkeypatch.setenv(SEED_VARIABLE, str(shipped))
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(cache))
    return shipped, cache


def test_what_is_missing_is_copied_and_nothing_replaced(folders):
    shipped, cache = folders
    for name in ("a", "b"):
        (shipped / f"{name}.cubin").write_bytes(name.encode())
    (shipped / "notes.txt").write_text("no kernel")
    cache.mkdir(parents=True)
    (cache / "b.cubin").write_bytes(b"compiled here")
    (cache / "old.cubin").write_bytes(b"of the release before")
    assert seed_cache() == 1
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == {
        "a.cubin": b"a",
        "b.cubin": b"compiled here",
        "old.cubin": b"of the release before",
    }
    assert seed_cache() == 0


def test_nothing_is_shipped(folders, monkeypatch):
    monkeypatch.delenv(SEED_VARIABLE)
    assert seed_cache() == 0
    assert not folders[1].exists()


def test_a_copy_that_breaks_off_leaves_nothing(folders, monkeypatch):
    shipped, cache = folders
    (shipped / "a.cubin").write_bytes(b"a")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shipped_kernels.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        seed_cache()
    assert list(cache.iterdir()) == []


def test_a_shipped_kernel_is_found_by_the_name_that_is_looked_up(folders, monkeypatch):
    """The name comes from source, architecture and compiler: what `warm` compiled, `cubin_file` finds."""
    pytest.importorskip("cupy")
    shipped, cache = folders
    source = min(precompile.common("sm_90a"), key=lambda each: len(each.text))
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(shipped))
    assert precompile._compile("sm_90a", source) > 0
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(cache))
    assert seed_cache() == 1

    def compile_again(*_, **__):
        raise AssertionError("it was compiled ahead of time")

    monkeypatch.setattr(compiler, "compile_cuda", compile_again)
    assert compiler.cubin_file(source, "sm_90a").parent == cache


@pytest.mark.parametrize("arch", sorted(precompile.DEVICES))
def test_common_products_need_no_compiler_afterwards(arch):
    """A sample of what a first request asks for is among what `warm` compiles; and it is not everything."""
    found = precompile.common(arch)
    assert 20 < len(found) < 300
    spec = precompile.DEVICES[arch]
    assert spec.arch == arch
    for case in (
        Case(m=256, n=256, k=256, dtype="complex64", trans_a="C"),
        Case(m=64, n=64, k=64, batch=64, dtype="complex64"),
        Case(op="gemm_reduce", m=1024, n=1024, k=1024, dtype="complex64", reduce=("sumsq",)),
    ):
        assert sources(case, spec, every=False) <= found
    checked = check_sources(Case(m=1024, n=1024, k=1024, dtype="complex64"), spec)
    assert {source.name for source in checked} == {"freivalds", "freivalds_judge", "sampled"}
    assert checked <= found
    assert check_sources(Case(m=4096, n=4096, k=4096, dtype="float32", trans_a="T"), spec) <= found
    assert not check_sources(Case(op="gemm_reduce", m=64, n=64, k=64), spec)


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

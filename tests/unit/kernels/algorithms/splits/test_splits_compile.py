"""Pre-pass and fallback for every CUDA architecture: registers and spills, without a device."""

from __future__ import annotations

import pytest
from kernel_sources import compiled

from gemmserve_kernels.algorithms.dmma.tile import SINGLE_TILES
from gemmserve_kernels.algorithms.splits import dmma_fallback, fallback, split
from gemmserve_kernels.device import compiler
from gemmserve_kernels.device.spec import KNOWN, cuda_arch
from gemmserve_kernels.device.struct_params import StoredArray
from gemmserve_kernels.problem.problem import GemmProblem, Operand

pytestmark = pytest.mark.usefixtures("nvrtc")

SPECS = {"sm_80": KNOWN["A100"], "sm_90a": KNOWN["H200"], "sm_120": KNOWN["RTX5090"]}
SPLIT_SPILLS = 0
"""Bytes at most."""
REGISTERS = {"fallback": 255}


def side(shape, dtype, name, trans="N"):
    operand = Operand.contiguous(shape, dtype)
    strides = tuple(stride * operand.dtype.itemsize for stride in operand.strides)
    return split.SplitSide.of(StoredArray(shape, strides, operand.dtype, 0), (), trans, left=name == "a", planar=False)


SCHEMES = [
    ("3xfp16", "complex64"), ("3xfp16", "float32"), ("3xfp16-3m", "complex64"), ("1xfp16", "complex64"),
    ("6xbf16", "complex64"), ("6xbf16", "float32"), ("3xbf16", "complex64"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "scheme", "dtype"),
    [("sm_90a", *case) for case in SCHEMES] + [(arch, *SCHEMES[0]) for arch in SPECS if arch != "sm_90a"],
)
def test_split(arch, scheme, dtype):
    spec = SPECS[arch]
    a, b = side((4096, 4096), dtype, "a"), side((4096, 4096), dtype, "b")
    plan = split.plan(spec, scheme, a, b)
    cubin = compiled(plan.source, arch)
    assert cubin.registers["split"] * plan.geometry.threads * plan.geometry.blocks <= spec.registers_per_sm
    assert cubin.spill_bytes["split"] <= SPLIT_SPILLS
    assert plan.shared + 1024 <= spec.shared_per_block


@pytest.mark.parametrize("arch", SPECS)
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_fallback(arch, dtype):
    operand = Operand.contiguous((512, 512), dtype)
    problem = GemmProblem.build(operand, operand)
    stored = StoredArray((512, 512), (512 * operand.dtype.itemsize, operand.dtype.itemsize), operand.dtype, 0)
    plan = fallback._plan(SPECS[arch], problem, stored, stored, stored, stored, (), ())
    cubin = compiled(plan.kernel.source, arch)
    assert cubin.registers["fallback"] <= REGISTERS["fallback"]
    assert cubin.spill_bytes["fallback"] == 0


def _double_plan(kind, trans, tile=None, odd=0):
    """That of a product of 8192 x 8192 matrices, `odd` elements off an aligned row length."""
    planar = kind.startswith("planar")
    shape, operand = (8192, 8192), Operand.contiguous((8192, 8192), "float32" if planar else kind)
    row = (8192 + odd) * operand.dtype.itemsize
    strides = (row, operand.dtype.itemsize)
    if planar:
        shape, strides = (2, *shape), (8192 * row, *strides)
        operand = Operand.contiguous(shape, operand.dtype)
    layout = "planar" if planar else "interleaved"
    problem = GemmProblem.build(operand, operand, trans_a=trans[0], trans_b=trans[1], layout=layout)
    stored = StoredArray(shape, strides, operand.dtype, 0)
    return dmma_fallback._plan(KNOWN["H200"], problem, tile, stored, stored, stored, stored, (), ())


DOUBLE = [
    *(("float32", trans, None, 0) for trans in ("NN", "TN", "NT", "TT")),
    *(("complex64", trans, None, 0) for trans in ("NN", "CN", "NR", "TC")),
    *(("planar float32", trans, None, 0) for trans in ("NN", "TN", "NT", "CC")),
    *((kind, trans, None, 1) for kind in ("float32", "complex64") for trans in ("NN", "TN", "NT", "TT")),
    *((kind, trans, SINGLE_TILES[kind][-1], 0) for kind in ("float32", "complex64") for trans in ("NN", "TN")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "trans", "tile", "odd"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case[1] != "NN" else []) for case in DOUBLE],
    ids=str,
)
def test_fallback_in_double(kind, trans, tile, odd):
    (kernel, _), = _double_plan(kind, trans, tile, odd).pieces  # fmt: skip
    assert (kernel.sources is None) == (odd == 1)
    source = compiler.KernelSource("dmma_fallback", tuple(kernel.defines.items()))
    cubin = compiled(source, "sm_90a")
    assert cubin.spill_bytes["dmma_fallback"] == 0
    assert cubin.registers["dmma_fallback"] <= 255


def test_planes_that_threads_would_copy_take_plain_arithmetic():
    assert _double_plan("planar float32", "NN", odd=1) is None


@pytest.mark.parametrize("kind", SINGLE_TILES)
def test_a_block_of_the_fallback_in_double_has_the_memory(kind):
    """Beside its tiles and the table, and what the system keeps."""
    spec = KNOWN["H200"]
    for tile in SINGLE_TILES[kind]:
        shared = tile.shared_bytes + 4 * dmma_fallback._PLACES
        assert shared <= spec.shared_per_block
        assert tile.min_blocks * (shared + 1024) <= spec.shared_per_sm


@pytest.mark.parametrize(
    ("k", "scheme"),
    [
        *((k, "3xfp16") for k in (64, 100, 200, 500, 1000, 8000, 16000)),
        *((k, scheme) for k in (64, 500, 1000) for scheme in ("6xbf16", "3xfp16-3m")),
    ],
)
def test_other_lengths_on_hopper(k, scheme):
    a, b = side((900, k), "complex64", "a"), side((k, 900), "complex64", "b")
    plan = split.plan(SPECS["sm_90a"], scheme, a, b)
    cubin = compiled(plan.source, "sm_90a")
    assert cubin.spill_bytes["split"] <= SPLIT_SPILLS
    resident = int(dict(plan.source.defines)["MIN_BLOCKS"])
    assert cubin.registers["split"] * plan.geometry.threads * resident <= SPECS["sm_90a"].registers_per_sm


@pytest.mark.parametrize("k", [1, 64, 65, 300, 1024, 4096, 5000, 16384])
def test_the_geometry_depends_on_k_alone(k):
    alone = split.plan(KNOWN["H200"], "3xfp16", side((100, k), "complex64", "a"), None).geometry
    both = split.plan(
        KNOWN["H200"], "3xfp16", side((9000, k), "complex64", "a"), side((k, 77), "complex64", "b")
    ).geometry
    assert alone == both


def test_work_is_shared_out_by_its_size():
    a, b = side((9000, 4096), "complex64", "a"), side((4096, 1000), "complex64", "b")
    plan = split.plan(KNOWN["H200"], "3xfp16", a, b)
    left, right = plan.params.a.groups, plan.params.b.groups
    assert plan.grid == plan.cluster * (left + right)
    assert left == pytest.approx(9 * right, rel=0.2)
    assert plan.grid <= plan.geometry.blocks * KNOWN["H200"].sm_count
    alone = split.plan(KNOWN["H200"], "3xfp16", a, None)
    assert (alone.cluster, alone.params.b.matrices, alone.params.b.groups) == (1, 0, 0)
    tiny = split.plan(KNOWN["H200"], "3xfp16", side((8, 512), "complex64", "a"), side((512, 4), "complex64", "b"))
    assert tiny.grid == 2  # a unit of either
    short = split.plan(KNOWN["H200"], "3xfp16", side((8, 64), "complex64", "a"), side((64, 40), "complex64", "b"))
    assert short.grid == 3  # a unit and two


def test_architectures_are_named_as_devices_name_them():
    assert {spec.arch for spec in SPECS.values()} == set(SPECS) == {cuda_arch(c) for c in (80, 90, 120)}

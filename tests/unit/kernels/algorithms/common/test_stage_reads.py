"""Stages that the copy engine fills are given back after what was read of them has come, in Hopper's machine code.

An arrival at the barrier "stage is empty" that passes a load of shared memory lets the engine overwrite what is being
read: wrong elements, now and then, which no test without a device sees. The source is no proof, for the compiler waits
for a load where its result is used. Kernels of single precision in double wait by a fence instead and are not here.
"""

from __future__ import annotations

import pytest
from kernel_sources import SourceRecorder, compiled, matrix
from sass import ARRIVAL, REMOTE_ARRIVAL, disassembled, disassembler, parsed, unwaited_loads

from gemmserve_kernels.algorithms.dmma import gemm as dmma
from gemmserve_kernels.algorithms.dmma import gemm_reduce as dmma_reduce
from gemmserve_kernels.algorithms.dmma.tile import TILES
from gemmserve_kernels.algorithms.fused import gemm as fused
from gemmserve_kernels.device import compiler
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand

ENGINE_TILES = [tile for kind, tiles in TILES.items() for tile in tiles if kind != "planar"]
TRANS = [
    pytest.param(trans, marks=() if trans in {"NN", "TT"} else pytest.mark.slow) for trans in ("NN", "NT", "TN", "TT")
]


def check(source, tmp_path, name=ARRIVAL, *, arrivals=2):
    if disassembler() is None:
        pytest.skip("the wheel nvidia-cuda-nvdisasm is not installed: no disassembler")
    code = disassembled(compiled(source, "sm_90a").code, tmp_path)
    # In the loop over k and after it: or what is looked for has another name.
    assert sum(each.name == name for each in code) >= arrivals
    assert any(each.name.startswith("LDS") for each in code)
    assert unwaited_loads(code, name) == []


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("trans", TRANS)
@pytest.mark.parametrize("tile", ENGINE_TILES, ids=str)
def test_products_in_double(tile, trans, tmp_path):
    x = matrix(tile.kind, rows=512, columns=512)
    recorder = SourceRecorder()
    problem = GemmProblem.build(Operand.of(x), Operand.of(x), trans_a=trans[0], trans_b=trans[1])
    dmma.run_gemm(recorder, problem, tile, x, x, None, x)
    ((source, _, _),) = recorder.launched
    assert dict(source.defines)["ENGINE"] == "1"
    check(source, tmp_path)
    if trans == "NN":
        check(compiler.KernelSource("dmma_tiles", source.defines), tmp_path)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("tile", ENGINE_TILES, ids=str)
def test_reductions_in_double(tile, tmp_path):
    x = matrix(tile.kind, rows=512, columns=512)
    recorder = SourceRecorder()
    problem = GemmReduceProblem.build(Operand.of(x), Operand.of(x), reduce=["sum", "absmax"], axis="n")
    results = {name: matrix(dtype.name, rows=1, columns=512)[0] for name, (_, dtype) in problem.results.items()}
    dmma_reduce.run_gemm_reduce(recorder, problem, tile, x, x, results)
    check(recorder.sources["dmma_reduce"], tmp_path)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("tile", "name"),
    [(GemmConfig(block_m=128), ARRIVAL), (GemmConfig(cluster=2), REMOTE_ARRIVAL)],
    ids=["tall", "cluster"],
)
def test_scales_of_tall_and_cluster_tiles(tile, name, tmp_path):
    x = matrix("complex64", rows=512, columns=512)
    recorder = SourceRecorder()
    fused.run_gemm(recorder, GemmProblem.build(Operand.of(x), Operand.of(x)), tile, x, x, None, x)
    (source,) = (each for kernel, each in recorder.sources.items() if kernel != "fused_columns")
    check(source, tmp_path, name, arrivals=1)


# ---- what is looked for

WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R11"
ARRIVE = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R5+UR7], RZ"


def listing(*lines):
    """What nvdisasm prints of (text, scoreboard set or None, scoreboards waited for)."""
    printed = []
    for number, (text, sets, *waits) in enumerate(lines):
        control = (7 if sets is None else sets) << 5 | 7 << 8 | sum(1 << board for board in waits) << 11
        printed += [f"        /*{16 * number:04x}*/  {text} ;  /* 0x00000000ff057984 */"]
        printed += [f"                           /* 0x{control << 41:016x} */"]
    return parsed("\n".join(printed))


def unwaited(*lines):
    return [load.address // 16 for load, _ in unwaited_loads(listing(*lines))]


def test_a_load_that_nobody_waited_for_is_seen():
    assert unwaited((WAIT, None), ("LDS.64 R4, [R2]", 1), (ARRIVE, None)) == []  # of the next stage
    assert unwaited((ARRIVE, None), ("LDS.64 R4, [R2]", 1), (ARRIVE, None)) == [1]
    assert unwaited((WAIT, None), ("LDS R4, [R2]", 1), (WAIT, None), ("LDS R6, [R3]", 2), (ARRIVE, None)) == [1]
    assert unwaited((WAIT, None), ("LDS R4, [R2]", None), (WAIT, None), (ARRIVE, None)) == [1]
    assert unwaited((ARRIVE, None), ("@!PT LDS RZ, [RZ]", None), (ARRIVE, None)) == []  # is never executed


def test_whoever_waited_has_it_and_those_before():
    loads = (("LDS R4, [R2]", 0), ("LDS R5, [R2]", 1), ("LDS R6, [R2]", 2))
    assert unwaited((ARRIVE, None), *loads, (ARRIVE, None, 2)) == []
    assert unwaited((ARRIVE, None), *loads, (ARRIVE, None, 1)) == [3]
    assert unwaited((ARRIVE, None), *loads, ("DADD R4, R4, R6", None, 0, 2), ("NOP", None), (ARRIVE, None)) == []
    assert unwaited((ARRIVE, None), ("NOP", None, 0, 1, 2), *loads, (ARRIVE, None)) == [4, 3, 2]


def test_instructions_are_read_with_their_control_bits():
    (found,) = listing(("@P1 LDS.128 R4, [R2+0x10]", 3, 0, 5))
    assert (found.address, found.name, found.sets, found.waits) == (0, "LDS.128", 3, {0, 5})

"""`gemm` on CuPy arrays with the CPU shim behind the CUDA driver: what `Call` and the launcher hand over really runs.

A process of its own (`python shim_driver.py`), because it puts stand-ins for CuPy and the driver in their places. Runs
every function below that is named `check_...` and prints their outcomes as JSON, by name: null, or what went wrong.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "cupy_on_numpy"), str(HERE)]

import cupy  # noqa: E402
import numpy as np  # noqa: E402
from simt_cases import random  # noqa: E402
from simt_shim.module import compile_source  # noqa: E402

from gemmserve_kernels import GemmConfig, gemm, gemm_reduce, prepare, read_element_counts  # noqa: E402
from gemmserve_kernels.algorithms.common import panels  # noqa: E402
from gemmserve_kernels.algorithms.common.panels import StoredReduceParams  # noqa: E402
from gemmserve_kernels.algorithms.gram.gemm_reduce import GramFormParams, GramParams  # noqa: E402
from gemmserve_kernels.algorithms.mma.plan import MmaParams  # noqa: E402
from gemmserve_kernels.algorithms.small.gemm import SmallParams  # noqa: E402
from gemmserve_kernels.algorithms.splits.fallback import FallbackParams  # noqa: E402
from gemmserve_kernels.algorithms.splits.reduce_fallback import ReduceFallbackParams  # noqa: E402
from gemmserve_kernels.algorithms.splits.split import ClearParams, SplitParams  # noqa: E402
from gemmserve_kernels.algorithms.sums.gemm_reduce import SumsParams  # noqa: E402
from gemmserve_kernels.device import compiler, driver, replay  # noqa: E402
from gemmserve_kernels.device.element_counts import ReadCountersParams  # noqa: E402
from gemmserve_kernels.device.launch import CupyLauncher  # noqa: E402
from gemmserve_kernels.device.spec import KNOWN, DeviceSpec  # noqa: E402
from gemmserve_kernels.device.struct_params import CombineParams, GemmParams, GemmReduceParams  # noqa: E402
from gemmserve_kernels.device.tensor_map import MAP_BYTES, Box, TensorMap  # noqa: E402
from gemmserve_kernels.dispatch import gemm as gemm_module  # noqa: E402
from gemmserve_kernels.dispatch import gemm_reduce as reduce_module  # noqa: E402
from gemmserve_kernels.freivalds import device as freivalds_device  # noqa: E402
from gemmserve_kernels.freivalds import freivalds_check, sampled_device  # noqa: E402
from gemmserve_kernels.freivalds.sampled_reductions import sampled_reduction_errors  # noqa: E402
from gemmserve_kernels.problem.errors import DeviceError  # noqa: E402
from gemmserve_kernels.problem.problem import GemmProblem, GemmReduceProblem, Operand  # noqa: E402

PARAMS = {
    "gemm": GemmParams,
    "mma_gemm": MmaParams,
    "mma_reduce": MmaParams,
    "gemm_reduce": GemmReduceParams,
    "gemm_reduce_combine": CombineParams,
    "gemm_reduce_finish": CombineParams,
    "reduce_fallback": ReduceFallbackParams,
    "fallback": FallbackParams,
    "split": SplitParams,
    "split_clear": ClearParams,
    "small_gemm": SmallParams,
    "sums": SumsParams,
    "gram": GramParams,
    "gram_form": GramFormParams,
    "stored_reduce": StoredReduceParams,
    "read_counters": ReadCountersParams,
    "freivalds_signs": freivalds_device.SignsParams,
    "freivalds_times": freivalds_device.TimesParams,
    "freivalds_fold": freivalds_device.FoldParams,
    "freivalds_judge": freivalds_device.JudgeParams,
    "sampled_elements": sampled_device.SampledParams,
    "sampled_worst": sampled_device.WorstParams,
}
kernels: list[tuple[str, object]] = []
launched: list[str] = []
streams: list[int] = []
singly: list[int] = []
"""Functions of kernels that were launched by themselves, not by a graph."""
set_anew: list[str] = []
"""Kernels of graphs that were given their arguments again."""
graphs_work: list[bool] = [True]
captured: list[bool] = []
"""Whether the caller records what is enqueued: not empty."""


def load(source, entry, arch, device):
    kernels.append((entry, compile_source(source.text)))
    return SimpleNamespace(kernel=SimpleNamespace(ptr=len(kernels)), max_dynamic_shared_size_bytes=227 << 10)


def arguments_at(function, pointers):
    """A copy of the one argument that a kernel is given."""
    kind = PARAMS[kernels[function - 1][0]]
    (pointer,) = (ctypes.c_void_p * 1).from_address(pointers)
    return kind.from_buffer_copy((ctypes.c_char * ctypes.sizeof(kind)).from_address(pointer))


def run_kernel(config, function, params, stream):
    entry, module = kernels[function - 1]
    module.launch(entry, tuple(config.grid), tuple(config.block), (params,), shared=config.shared)
    launched.append(entry)
    streams.append(stream)


def launch(config, function, pointers, extra):
    config = driver.LaunchConfig.from_address(config)
    run_kernel(config, function, arguments_at(function, pointers), config.stream or 0)
    singly.append(function)
    return 0


class Graph:
    """The driver's, on the shim: what nodes are given is copied, and copied again where they are set anew."""

    made = 0

    def __init__(self):
        if not graphs_work:
            raise DeviceError("no graphs")
        Graph.made += 1
        self.nodes = []

    def add_kernel(self, config, function, pointer):
        config = driver.LaunchConfig.from_buffer_copy(config)
        self.nodes.append([config, function, pointer, arguments_at(function, pointer)])

    def add_fill(self, address, nbytes):
        self.nodes.append([address, nbytes])

    def finish(self):
        self.nodes = tuple(self.nodes)

    def set_kernel(self, number):
        node = self.nodes[number]
        node[3] = arguments_at(node[1], node[2])
        set_anew.append(kernels[node[1] - 1][0])

    def set_fill(self, number, address):
        self.nodes[number][0] = address
        set_anew.append("fill")

    def launch(self, stream):
        for node in self.nodes:
            if len(node) == 2:
                fill(node[0], 0, node[1], stream.handle)
            else:
                run_kernel(node[0], node[1], node[3], stream.handle)


def fill(address, value, nbytes, stream):
    ctypes.memset(address, value, nbytes)
    return 0


compiler.load = load
driver.launcher = lambda: launch
driver.filler = lambda: fill
driver.Graph = Graph
driver.Stream.is_capturing = lambda stream: bool(captured)
driver.argument = lambda address: address
DeviceSpec.of = classmethod(lambda cls, ordinal: KNOWN["A100"])


def pair(seed=1, m=40, n=30, k=70, dtype="c8"):
    return random(seed, dtype, m, k), random(seed + 1, dtype, k, n)


def put(array):
    return cupy.array(array)


def agree(result, expected, places=1e-5):
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(result.get(), expected, rtol=0, atol=places * scale)


CONFIGS = {
    "simt": {"config": GemmConfig(algorithm="simt")},
    "planes": {"config": GemmConfig(algorithm="mma"), "compute": "3xfp16"},
    "3xtf32": {"config": GemmConfig(algorithm="mma"), "compute": "3xtf32"},
}


def check_other_arrays_take_the_same_launches():
    for options in CONFIGS.values():
        counts = []
        for seed in (1, 5, 9):
            a, b = pair(seed)
            before = len(launched)
            agree(gemm(put(a), put(b), **options), a.astype("c16") @ b)
            counts.append(launched[before:])
        assert counts[0] == counts[1] == counts[2], counts


def check_everything_at_once():
    a, b = pair()
    c = random(3, "c8", 40, 30)
    for options in CONFIGS.values():
        d = gemm(put(a.T.copy()), put(b.conj()), put(c), alpha=2j, beta=0.5, trans_a="T", trans_b="R", **options)
        agree(d, 2j * (a.astype("c16") @ b) + 0.5 * c)


def check_a_call_that_comes_again_is_planned_once():
    planned = []
    asked = gemm_module.plan_call
    gemm_module.plan_call = lambda *arguments: planned.append(arguments) or asked(*arguments)
    c = random(9, "c8", 40, 30)
    out = put(np.zeros((40, 30), "c8"))
    alike = [
        lambda x, y: gemm(x, y, alpha=1.25),
        lambda x, y: gemm(x, y, put(c), alpha=3, beta=-1),
        lambda x, y: gemm(x, y, alpha=5, out=out),
    ]
    expected = [lambda p: 1.25 * p, lambda p: 3 * p - c, lambda p: 5 * p]
    for call, of in zip(alike, expected, strict=True):
        for seed in (1, 5, 9):
            a, b = pair(seed)
            agree(call(put(a), put(b)), of(a.astype("c16") @ b))
    gemm_module.plan_call = asked
    assert len(planned) == len(alike), len(planned)


def check_out_that_overlaps_only_sometimes():
    """One key, other addresses: the first call writes where it is told, the second must not."""
    a, b = random(1, "c8", 32, 32), random(2, "c8", 32, 32)
    x, y, out = put(a), put(b), put(np.zeros((32, 32), "c8"))
    for _ in range(2):
        assert gemm(x, y, out=out, **CONFIGS["simt"]) is out
        agree(out, a.astype("c16") @ b)
    assert gemm(x, y, out=x, **CONFIGS["simt"]) is x
    agree(x, a.astype("c16") @ b)


def check_options_that_cannot_be_hashed():
    a, b = pair()
    for _ in range(2):
        agree(gemm(put(a), put(b), alpha=np.array(2.0), **CONFIGS["simt"]), 2 * (a.astype("c16") @ b))


def alternating(options, times, seeds=(1, 5)):
    """Products of the same kind in turns, every operand and result somewhere else; none may be given back meanwhile."""
    kept = []
    for number in range(times):
        a, b = pair(seeds[number % len(seeds)], m=41, n=33, k=90)
        operands = put(a), put(b)
        result = gemm(*operands, **options)
        agree(result, a.astype("c16") @ b)
        kept.append((operands, result))
    return kept


PLANES = CONFIGS["planes"]
"""Several kernels; those of the others are one."""


def check_graphs_take_what_has_moved():
    made, before = Graph.made, len(singly)
    alternating(PLANES, 7)
    assert Graph.made == made + 2  # for each set of addresses that is kept
    a, b = pair(1, m=41, n=33, k=90)
    kernels_of_one = (len(singly) - before) // 2  # two runs were made of single launches
    *pairs, last = [(put(a), put(b)) for _ in range(6)]
    out = put(np.zeros((41, 33), "c8"))
    for pair_of_arrays in pairs:
        gemm(*pair_of_arrays, out=out, **PLANES)
    del set_anew[:]
    out.fill(0)
    gemm(*last, out=out, **PLANES)
    assert 0 < len(set_anew) <= kernels_of_one + 1, (set_anew, kernels_of_one)
    agree(out, a.astype("c16") @ b)


def check_graphs_set_nothing_where_nothing_has_moved():
    a, b = pair(1, m=43, n=35, k=90)
    x, y, out = put(a), put(b), put(np.zeros((43, 35), "c8"))
    of = cupy.cuda.alloc
    cupy.cuda.alloc = functools.cache(of)  # the same workspace every time
    try:
        for _ in range(5):
            gemm(x, y, out=out, **PLANES)
        del set_anew[:]
        out.fill(0)
        gemm(x, y, out=out, **PLANES)
    finally:
        cupy.cuda.alloc = of
    assert not set_anew, set_anew
    agree(out, a.astype("c16") @ b)


def check_results_that_take_turns_between_two_places():
    """Nothing is set; what lies in a third place, or where the operands are others, is."""
    a, b = pair(1, m=53, n=35, k=90)
    x, y, expected = put(a), put(b), a.astype("c16") @ b
    outs = [put(np.zeros((53, 35), "c8")) for _ in range(3)]
    of = cupy.cuda.alloc
    cupy.cuda.alloc = functools.cache(of)  # the same workspace every time
    try:
        for number in range(6):
            gemm(x, y, out=outs[number % 2], **PLANES)
        made = Graph.made
        for number, anew in ((0, False), (1, False), (2, True), (1, False), (2, False), (0, True)):
            del set_anew[:]
            outs[number].fill(0)
            gemm(x, y, out=outs[number], **PLANES)
            agree(outs[number], expected)
            assert bool(set_anew) == anew, (number, set_anew)
        other = random(7, "c8", 53, 90)
        agree(gemm(put(other), y, out=outs[2], **PLANES), other.astype("c16") @ b)
        agree(gemm(x, y, out=outs[1], **PLANES), expected)
    finally:
        cupy.cuda.alloc = of
    assert Graph.made == made


def check_arguments_that_the_driver_did_not_take():
    """They are given again with the next call, though its addresses are the same."""
    a, b = pair(1, m=55, n=35, k=90)
    x, y, expected = put(a), put(b), a.astype("c16") @ b
    outs = [put(np.zeros((55, 35), "c8")) for _ in range(6)]
    for out in outs[:5]:
        gemm(x, y, out=out, **PLANES)
    set_kernel, failing = Graph.set_kernel, [True]

    def fails(self, number):
        if failing:
            failing.clear()
            raise DeviceError("set")
        set_kernel(self, number)

    Graph.set_kernel = fails
    try:
        try:
            gemm(x, y, out=outs[5], **PLANES)
        except DeviceError:
            assert not failing
        else:
            raise AssertionError("no error")
        agree(gemm(x, y, out=outs[5], **PLANES), expected)
    finally:
        Graph.set_kernel = set_kernel


class Mapped(ctypes.Structure):
    """Arguments of a kernel that nobody runs."""

    _fields_ = (("map", TensorMap), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def check_addresses_after_a_tensor_map_that_the_driver_refused():
    box, refused, seen = Box((64, 4), (64, 4)), [], []

    def encode(self, address):
        if address in refused:
            raise DeviceError("a tensor map")
        return TensorMap((ctypes.c_uint64 * (MAP_BYTES // 8))(address))

    def record(recorder):
        a, b = (recorder.argument((4, 64), np.dtype("f2"), (128, 2)) for _ in range(2))
        params = Mapped(recorder.tensor_map(box, recorder.pointer(b)), recorder.pointer(a), recorder.pointer(b))
        recorder.launch(compiler.KernelSource("none", ()), "none", grid=1, block=32, shared=0, params=params)
        return 2

    def look(config, function, pointers, extra):
        (pointer,) = (ctypes.c_void_p * 1).from_address(pointers)
        words = Mapped.from_address(pointer)
        seen.append((words.map.words[0], words.a, words.b))
        return 0

    loading, encoding, known = compiler.load, Box.encode, driver.launcher
    compiler.load = lambda *_: SimpleNamespace(kernel=SimpleNamespace(ptr=1), max_dynamic_shared_size_bytes=0)
    Box.encode, driver.launcher = encode, lambda: look
    try:
        ready = CupyLauncher(KNOWN["H200"]).ready(replay.record(KNOWN["H200"], 100, record))
        first, second, third = ((number << 40, number << 41) for number in (1, 3, 5))
        ready.run(first)
        ready.run(second)
        refused.append(third[1])
        try:
            ready.run(third)
        except DeviceError:
            refused.clear()
        assert not refused
        for each in (first, third, second, first):
            ready.run(each)
    finally:
        compiler.load, Box.encode, driver.launcher = loading, encoding, known
    assert seen == [(b, a, b) for a, b in (first, second, first, third, second, first)], seen


def check_one_kernel_is_no_graph():
    made = Graph.made
    alternating(CONFIGS["simt"], 5)
    assert Graph.made == made


def check_a_stream_that_records_gets_single_launches():
    a, b = pair(1, m=45, n=35, k=90)
    x, y = put(a), put(b)
    for _ in range(4):
        agree(gemm(x, y, **PLANES), a.astype("c16") @ b)
    before = len(singly)
    gemm(x, y, **PLANES)
    assert len(singly) == before
    captured.append(True)
    try:
        agree(gemm(x, y, **PLANES), a.astype("c16") @ b)
    finally:
        captured.clear()
    assert len(singly) > before


def check_drivers_without_graphs():
    graphs_work.clear()
    try:
        a, b = pair(1, m=47, n=35, k=90)
        launches = []
        for _ in range(5):
            before = len(singly)
            agree(gemm(put(a), put(b), **PLANES), a.astype("c16") @ b)
            launches.append(len(singly) - before)
        assert min(launches) == max(launches) > 1, launches
    finally:
        graphs_work.append(True)


def check_a_graph_for_each_stream():
    a, b = pair(1, m=49, n=35, k=90)
    x, y, out = put(a), put(b), put(np.zeros((49, 35), "c8"))
    of, allocate = cupy.cuda.get_current_stream, cupy.cuda.alloc
    cupy.cuda.alloc = functools.cache(allocate)  # the same workspace every time
    for _ in range(3):
        gemm(x, y, out=out, **PLANES)
    made, alone = Graph.made, []
    try:
        for handle in 2 * (3, 4, 5, 6, 7):  # more than there are graphs for: the others are launched by themselves
            cupy.cuda.get_current_stream = lambda handle=handle: SimpleNamespace(ptr=handle)
            before = len(singly)
            out.fill(0)
            agree(gemm(x, y, out=out, **PLANES), a.astype("c16") @ b)
            assert streams[-1] == handle
            alone.append(len(singly) > before)
    finally:
        cupy.cuda.get_current_stream, cupy.cuda.alloc = of, allocate
    assert Graph.made - made == 3
    assert alone == 2 * [False, False, False, True, True]


def check_reductions_by_graphs():
    a, b = random(1, "c8", 3, 40, 70), random(2, "c8", 3, 70, 30)
    for _ in range(5):
        found = gemm_reduce(put(a), put(b), reduce=["absmax", "sum"], axis="m")
        agree(found["absmax"], np.abs(a.astype("c16") @ b).max(1))
        agree(found["sum"], (a.astype("c16") @ b).sum(1))


def check_out_of_any_strides():
    a, b = pair()
    for options in CONFIGS.values():
        wide = put(np.full((80, 93), np.nan, "c8"))
        view = wide[::2, 1::3][:40, :30]
        assert gemm(put(a), put(b), out=view, **options) is view
        agree(view, a.astype("c16") @ b)


def check_out_that_overlaps_an_operand():
    a, b = random(1, "c8", 32, 32), random(2, "c8", 32, 32)
    for options in CONFIGS.values():
        x = put(a)
        gemm(x, put(b), out=x, **options)
        agree(x, a.astype("c16") @ b)


def check_c_is_not_read_where_beta_is_zero():
    a, b = pair()
    c = put(np.full((40, 30), np.nan, "c8"))
    for options in CONFIGS.values():
        agree(gemm(put(a), put(b), c, beta=0, **options), a.astype("c16") @ b)


def check_batches_in_turns():
    from gemmserve_kernels.algorithms.splits import gemm as planes

    planes._WORKSPACE = 70000  # of planes at once: two matrices of five
    a, b = random(1, "c8", 5, 20, 70), random(2, "c8", 70, 33)
    before = len(launched)
    agree(gemm(put(a), put(b), **CONFIGS["planes"]), a.astype("c16") @ b)
    assert launched[before:].count("split") > 1
    planes._WORKSPACE = 256 << 20


def check_mixed_dtypes_are_converted():
    a, b = random(1, "f4", 40, 70), random(2, "c8", 70, 30)
    agree(gemm(put(a), put(b), **CONFIGS["planes"]), a.astype("f8") @ b)


def check_unaligned_operands():
    a, b = pair()
    wide = put(np.zeros((40, 71), "c8"))
    wide[:, 1:] = put(a)
    for options in CONFIGS.values():
        agree(gemm(wide[:, 1:], put(b), **options), a.astype("c16") @ b)


def check_elements_at_odd_addresses():
    """Complex numbers that begin in the middle of a pair of floats, as operands and as results."""
    flat = random(1, "f4", 2 * 40 * 40 + 1)
    a = np.frombuffer(flat.tobytes()[4:], "c8").reshape(40, 40)
    b = random(2, "c8", 40, 40)
    device = put(flat)
    x = cupy.ndarray((40, 40), "c8", device.data + 4)
    assert x.data.ptr % 8
    for options in CONFIGS.values():
        agree(gemm(x, put(b), **options), a.astype("c16") @ b)
        agree(gemm(put(b), put(b), x, beta=1, **options), b.astype("c16") @ b + a)
        agree(gemm_reduce(put(b), x, **options), (b.astype("c16") @ a).sum(0))
        agree(gemm(prepare(x, "a", "3xfp16"), put(b), **options), a.astype("c16") @ b)
        out = cupy.ndarray((40, 40), "c8", put(np.zeros_like(flat)).data + 4)
        assert gemm(put(b), put(b), out=out, **options) is out
        agree(out, b.astype("c16") @ b)


def check_prepared_operands_have_the_same_bits():
    a, b = pair()
    options = CONFIGS["planes"]
    plain = gemm(put(a), put(b), **options).get()
    left, right = prepare(put(a), "a", "3xfp16"), prepare(put(b), "b", "3xfp16")
    assert left.payload is not None
    assert right.payload is not None
    for x, y in ((left, put(b)), (put(a), right), (left, right)):
        np.testing.assert_array_equal(gemm(x, y, **options).get(), plain)
    # Another one of the same shape, at another address, in the same launches.
    other = random(7, "c8", 40, 70)
    agree(gemm(prepare(put(other), "a", "3xfp16"), right, **options), other.astype("c16") @ b)
    # Prepared for the other side, it is taken for what it is: an array.
    square = random(8, "c8", 32, 32)
    agree(gemm(prepare(put(square), "b", "3xfp16"), put(square), **options), square.astype("c16") @ square)


def check_what_falls_back_is_seen():
    a, b = pair()
    a[3] = 0
    a[3, 4], a[3, 5] = 2.0**60, 2.0**-50
    before = read_element_counts()
    with np.errstate(invalid="ignore"):
        result = gemm(put(a), put(b), **CONFIGS["planes"]).get()
    counts = read_element_counts().counts() - before.counts()
    # All go the wide way; the row that is deep and sparse is computed once more.
    assert (counts.planned, counts.wide, counts.plain) == (0, 39 * 30, 30), counts
    assert read_element_counts() is read_element_counts()
    np.testing.assert_allclose(result[3], a[3].astype("c16") @ b, rtol=1e-6)
    np.testing.assert_allclose(result[:3], a[:3].astype("c16") @ b, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(gemm(put(a), put(b), **CONFIGS["planes"]).get()))


def check_threads():
    a, b = pair()
    x, y, expected = put(a), put(b), a.astype("c16") @ b
    wrong = []

    def work():
        try:
            for _ in range(3):
                agree(gemm(x, y, **CONFIGS["planes"]), expected)
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def check_the_stream_of_the_moment():
    a, b = pair()
    x, y = put(a), put(b)
    of = cupy.cuda.get_current_stream
    try:
        for handle in (0, 7, 7, 9):
            cupy.cuda.get_current_stream = lambda handle=handle: SimpleNamespace(ptr=handle)
            before = len(streams)
            gemm(x, y, **CONFIGS["planes"])
            assert set(streams[before:]) == {handle}
    finally:
        cupy.cuda.get_current_stream = of


def check_small_batches():
    a, b = random(1, "c8", 9, 7, 5), random(2, "c8", 9, 5, 6)
    agree(gemm(put(a), put(b), config=GemmConfig(algorithm="small")), a.astype("c16") @ b)


def check_empty_products():
    a, b = np.zeros((4, 0), "c8"), np.zeros((0, 5), "c8")
    c = random(1, "c8", 4, 5)
    agree(gemm(put(a), put(b), put(c), beta=2), 2 * c.astype("c16"))
    assert gemm(put(np.zeros((0, 3), "c8")), put(np.zeros((3, 2), "c8"))).shape == (0, 2)


def check_what_is_checked_on_the_device():
    """The finding is the host's, whatever the stream, and of arrays that lie at odd addresses too."""
    a, b = pair()
    c = random(3, "c8", 40, 30)
    problem = GemmProblem.build(*(Operand.of(x) for x in (a, b, c)), alpha=2j, beta=1)
    d = gemm(a, b, c, alpha=2j, beta=1)
    for value in (1, 1.1):
        d[3, 4] *= value
        flat = put(np.concatenate([np.zeros(1, "f4"), d.view("f4").ravel()]))
        odd = cupy.ndarray(d.shape, "c8", flat.data + 4)
        expected = freivalds_check(problem, a, b, c, d, 7)
        assert (expected.excess > 8) == (value > 1)
        for held in (put(d), odd):
            found = freivalds_check(problem, put(a), put(b), put(c), held, 7)
            np.testing.assert_allclose([found.residual, found.excess], [expected.residual, expected.excess], rtol=1e-6)
            assert found.element.place == expected.element.place
            np.testing.assert_allclose(found.element.excess, expected.element.excess, rtol=1e-6)


def check_sampled_reductions():
    """Columns computed again in double precision by our own kernel, of every dtype and layout."""
    for dtype, options in (
        ("f2", {}), ("f4", {"axis": "n", "trans_a": "T"}), ("c8", {"trans_b": "C", "alpha": 2j}), ("c16", {}),
        ("f4", {"layout": "planar", "axis": ["m", "batch"]}),
    ):  # fmt: skip
        planar = (2,) if "layout" in options else ()
        a, b = random(1, dtype, *planar, 3, 40, 40), random(2, dtype, *planar, 40, 40)
        problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce=["absmax", "sumsq", "argmax"], **options)
        names = {"reduce": list(problem.reductions), **options}
        results = gemm_reduce(a, b, **names)
        for wrong in (False, True):
            if wrong:
                results["absmax"][..., :] *= 2
            held = {name: put(array) for name, array in results.items()}
            found = sampled_reduction_errors(problem, put(a), put(b), held, np.random.default_rng(5))
            expected = sampled_reduction_errors(problem, a, b, results, np.random.default_rng(5))
            assert (found["absmax"] > 0.5) == wrong
            np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-4, atol=1e-13)


def check_reductions():
    a, b = random(1, "c8", 3, 40, 70), random(2, "c8", 70, 30)
    product = a.astype("c16") @ b
    for options in CONFIGS.values():
        counts = []
        for _ in range(2):
            before = len(launched)
            found = gemm_reduce(put(a), put(b), reduce=["sum", "absmax", "argmax", "mean"], axis="n", **options)
            counts.append(launched[before:])
            agree(found["sum"], product.sum(-1))
            agree(found["mean"], product.mean(-1))
            agree(found["absmax"], np.abs(product).max(-1))
            np.testing.assert_array_equal(found["argmax"].get(), np.abs(product).argmax(-1))
        assert counts[0] == counts[1]
        agree(gemm_reduce(put(a), put(b), axis=["m", "batch"], **options), product.sum((0, 1)))


def check_reductions_into_given_arrays():
    a, b = pair()
    product = a.astype("c16") @ b
    for options in CONFIGS.values():
        wide, direct, c = put(np.full((60,), np.nan, "f4")), put(np.zeros(30, "c8")), put(np.zeros((30, 40), "c8"))
        out = {"absmax": wide[::2], "sum": direct, "c": c.T}
        found = gemm_reduce(put(a), put(b), reduce=["absmax", "sum"], return_c=True, out=out, **options)
        assert list(found) == ["absmax", "sum", "c"]
        assert found["sum"] is direct
        agree(wide[::2], np.abs(product).max(0))
        agree(direct, product.sum(0))
        agree(c.T, product)


def check_given_arrays_of_reductions_that_overlap_only_sometimes():
    """One key, other addresses: what overlaps an operand is written elsewhere first."""
    a, b = random(1, "f4", 32, 32), random(2, "f4", 32, 32)
    x, y, out = put(a), put(b), put(np.zeros(32, "f4"))
    expected = np.abs(a.astype("f8") @ b).max(0)
    options = {"reduce": "absmax", "config": GemmConfig(algorithm="simt")}
    asked, long_way = reduce_module._on_device, []
    reduce_module._on_device = lambda *arguments: long_way.append(arguments) or asked(*arguments)
    try:
        for _ in range(3):
            assert gemm_reduce(x, y, out={"absmax": out}, **options) is out
            agree(out, expected)
        assert len(long_way) == 1
        gemm_reduce(x, y, out={"absmax": x[1]}, **options)
        assert len(long_way) == 2
    finally:
        reduce_module._on_device = asked
    agree(x[1], expected)
    np.testing.assert_array_equal(x[2:].get(), a[2:])


def check_planar_reductions():
    a, b = random(1, "f4", 2, 40, 70), random(2, "f4", 2, 70, 30)
    product = (a[0] + 1j * a[1].astype("f8")) @ (b[0] + 1j * b[1].astype("f8"))
    for options in CONFIGS.values():
        found = gemm_reduce(put(a), put(b), reduce=["sum", "absmax"], layout="planar", **options)
        assert (found["sum"].shape, found["sum"].dtype) == ((2, 30), np.float32)
        agree(found["sum"][0], product.sum(0).real)
        agree(found["sum"][1], product.sum(0).imag)


def check_reductions_of_prepared_and_mixed_operands():
    a, b = pair()
    options = CONFIGS["planes"]
    plain = gemm_reduce(put(a), put(b), reduce="sum", **options).get()
    ready = prepare(put(a), "a", "3xfp16")
    np.testing.assert_array_equal(gemm_reduce(ready, put(b), reduce="sum", **options).get(), plain)
    real = random(3, "f4", 40, 70)
    agree(gemm_reduce(put(real), put(b), reduce="sum", **options), (real.astype("f8") @ b).sum(0))


def check_sums_of_squares_by_gram_matrices():
    """The same launches for other arrays, in the middle of which some go back to the product."""
    options = {"reduce": ["sumsq", "mean"], "config": GemmConfig(algorithm="gram")}
    counts = []
    for seed in (1, 5, 9):
        a, b = random(seed, "c8", 2, 1, 300, 20), random(seed + 1, "c8", 3, 20, 30)
        if seed == 5:
            a[..., 1], b[..., 7] = a[..., 0] * np.float32(1 + 2.0**-20), 0
            b[..., 0, 7], b[..., 1, 7] = 1, -1
        before = len(launched)
        found = gemm_reduce(put(a), put(b), **options)
        counts.append(launched[before:])
        product = a.astype("c16") @ b
        expected = (np.abs(product) ** 2).sum(-2)
        np.testing.assert_allclose(found["sumsq"].get(), expected, rtol=1e-5)
        agree(found["mean"], product.mean(-2))
    assert counts[0] == counts[1] == counts[2]
    assert counts[0].count("gram") == counts[0].count("reduce_fallback") == 1
    out = put(np.full((60,), np.nan, "f4"))
    a, b = pair()
    gemm_reduce(put(a), put(b), axis="n", out={"sumsq": out[:40]}, reduce="sumsq", config=options["config"])
    agree(out[:40], (np.abs(a.astype("c16") @ b) ** 2).sum(-1))


def frames_of(function):
    """Calls of the package's functions that one call makes once it is known."""
    counted = []

    def count(frame, event, _):
        if event == "call" and "gemmserve_kernels" in frame.f_code.co_filename:
            counted.append(frame.f_code.co_name)

    for _ in range(5):
        function()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counted


def check_calls_that_come_again_take_few_calls_of_functions():
    """What they cost the host, as far as it can be counted; one with its result in the caller's array takes more."""
    a, b = (put(x) for x in pair())
    config = GemmConfig(algorithm="simt")
    product = frames_of(lambda: gemm(a, b, config=config))
    assert len(product) <= 9, product
    x, y = (put(matrix) for matrix in pair())
    left, right, out = prepare(x, "a", "3xfp16"), prepare(y, "b", "3xfp16"), put(np.zeros((40, 30), "c8"))
    prepared = frames_of(lambda: gemm(left, right, out=out, **CONFIGS["planes"]))
    assert "plan_call" not in prepared
    assert "_call" not in prepared, "no plan is looked for"
    assert len(prepared) <= 25, prepared
    fresh = frames_of(lambda: gemm(left, right, **CONFIGS["planes"]))
    assert len(fresh) <= 21, fresh
    reduced = frames_of(lambda: gemm_reduce(a, b, reduce="absmax", compute="fp32"))
    assert len(reduced) <= 10, reduced
    into = {"absmax": put(np.zeros(30, "f4"))}
    given = frames_of(lambda: gemm_reduce(a, b, reduce="absmax", compute="fp32", out=into))
    assert len(given) <= 18, given


VENDOR = {"config": GemmConfig(algorithm="vendor")}


def check_the_vendors_products_are_reduced():
    """Its BLAS is called between our launches, which are no graph; operands and results lie elsewhere each time."""
    kept, made = [], Graph.made
    for along, axis in enumerate("mn"):
        for seed in (1, 5, 1, 5, 1):
            a, b = pair(seed, m=41, n=33, k=90)
            operands = put(a), put(b)
            product = a.astype("c16") @ b
            found = gemm_reduce(*operands, reduce=["sum", "absmax", "argmax"], axis=axis, **VENDOR)
            agree(found["sum"], product.sum(along))
            agree(found["absmax"], np.abs(product).max(along))
            np.testing.assert_array_equal(found["argmax"].get(), np.abs(product).argmax(along))
            kept.append((operands, found))
    assert Graph.made == made


def check_the_vendors_products_panel_by_panel():
    a, b = pair(1, m=600, n=35, k=40, dtype="f4")
    whole = gemm_reduce(put(a), put(b), reduce="max", axis="n", **VENDOR)
    before, panels.PANEL = launched.count("stored_reduce"), 256 * 36 * 4
    try:
        for _ in range(3):
            found = gemm_reduce(put(a), put(b), reduce="max", axis="n", alpha=2, **VENDOR)
            agree(found, 2 * (a.astype("f8") @ b).max(1))
    finally:
        panels.PANEL = 1 << 30
    assert launched.count("stored_reduce") == before + 9
    agree(whole, (a.astype("f8") @ b).max(1))


def check_the_vendors_products_of_copies():
    """Operands that the vendor's BLAS does not read as they lie are copied."""
    a, b = pair()
    product = a.conj().astype("c16") @ b
    options = {"reduce": ["sum", "absmax"], **VENDOR}
    for along, axis in enumerate("mn"):
        for _ in range(3):
            found = gemm_reduce(put(a), put(b), trans_a="R", axis=axis, **options)
            agree(found["sum"], product.sum(along))
        found = gemm_reduce(put(a.real.copy()), put(b), axis=axis, **options)
        agree(found["absmax"], np.abs(a.real.astype("f8") @ b).max(along))
        found = gemm_reduce(put(a.conj()), put(b), axis=axis, compute="fp64", **options)
        agree(found["absmax"], np.abs(product).max(along))
        planes = [put(np.stack([x.real, x.imag])) for x in (a.conj(), b)]
        found = gemm_reduce(*planes, layout="planar", axis=axis, return_c=True, **options)
        agree(found["sum"], np.stack([product.real, product.imag]).sum(1 + along))
        agree(found["c"], np.stack([product.real, product.imag]))
        ready = prepare(put(a.conj()), "a", "3xfp16")
        agree(gemm_reduce(ready, put(b), axis=axis, **options)["sum"], product.sum(along))


def check_the_vendors_products_that_are_returned():
    a, b = pair()
    product = a.astype("c16") @ b
    out = {"c": put(np.zeros((40, 30), "c8", order="F")), "sum": put(np.zeros(60, "c8"))[::2]}
    for given in ({}, out):
        found = gemm_reduce(put(a), put(b), reduce=["sum", "absmax"], return_c=True, out=given, **VENDOR)
        agree(found["c"], product)
        agree(found["sum"], product.sum(0))
        agree(found["absmax"], np.abs(product).max(0))
        assert all(found[name] is array for name, array in given.items())


def check_the_vendors_products_of_float16_at_odd_addresses():
    a, b = random(1, "f2", 3, 16, 32), random(2, "f2", 3, 24, 16)
    whole = put(a)
    for start in (0, 1, 3, 8):
        x = whole[:, :, start : start + 24]
        expected = (a[:, :, start : start + 24].astype("f8") @ b).max(1)
        for _ in range(2):
            agree(gemm_reduce(x, put(b), reduce="max", **VENDOR), expected, 2e-3)


def check_what_a_reduction_of_the_vendors_product_costs_the_host():
    a, b = (put(x) for x in pair())
    calls = frames_of(lambda: gemm_reduce(a, b, reduce="absmax", **VENDOR))
    assert "plan_reduce_call" not in calls
    assert "lower" not in calls
    assert len(calls) <= 24, calls


def check_reductions_of_nothing():
    a, b = put(np.zeros((0, 3), "c8")), put(np.zeros((3, 4), "c8"))
    assert gemm_reduce(a, b, reduce="sumsq").get().tolist() == [0, 0, 0, 0]
    assert gemm_reduce(b.T, a.T, reduce="absmax").shape == (0,)


if __name__ == "__main__":
    outcomes: dict[str, str | None] = {}
    for name, function in list(globals().items()):
        if name.startswith("check_"):
            try:
                function()
                outcomes[name] = None
            except Exception:
                outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))

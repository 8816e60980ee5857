"""From messages to tasks: forms are read once, and small products in one extent have the bits of any other task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from works import form_of

from gemmserve_kernels import Operand
from gemmserve_service import products
from gemmserve_service.executor.protocol import TO_WORKER, Decoder, Part, RunBatch, Work, encode, row_without_place
from gemmserve_service.executor.worker import unpack
from gemmserve_service.executor.worker.host.backend import CpuBackend
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.executor.worker.unpack import Forms, Run
from gemmserve_service.jobs.small.bundles import Layout
from gemmserve_service.schemas import GemmParams, GemmReduceParams
from gemmserve_service.store.extents.extents import ExtentPool


@pytest.fixture
def bundle(tmp_path):
    """bundle(params, a=..., b=...) -> the message, and what reads the result."""
    pool = ExtentPool(tmp_path, keep_bytes=0)
    pool.take(1)  # the others do not begin where their file does

    def make(params, **arrays):
        layout = Layout()
        orders = {name: "C" if array.flags.c_contiguous else "F" for name, array in arrays.items()}
        slots = [layout.place(name, array.dtype, array.shape, orders[name]) for name, array in arrays.items()]
        operands = {slot.name: Operand.contiguous(slot.shape, arrays[slot.name].dtype, slot.order) for slot in slots}
        outputs = products.outputs(products.build(params, operands))
        (result,) = (layout.place(name, dtype, shape, order) for name, (shape, dtype, order) in outputs.items())
        extent = pool.take(layout.nbytes)
        view = extent.view(layout.nbytes)
        view[:] = b"\xff" * layout.nbytes
        for slot in slots:
            view[slot.offset : slot.offset + slot.nbytes] = arrays[slot.name].tobytes(order="A")
        part = Part(
            form=form_of(params, {slot.name: slot for slot in slots}, {result.name: result}), algorithm="numpy",
            operands={slot.name: [(0, slot.offset)] for slot in slots}, results={result.name: [(0, result.offset)]},
        )  # fmt: skip
        row = (extent.file[0], extent.path, extent.file[1], extent.start, None)
        message = Work(task="t", extents=[row], parts=[part])
        return message, lambda: bytes(view[result.offset : result.offset + result.nbytes])

    return make


CASES = {
    "one call": (GemmParams(), "c8", False),
    "turned": (GemmParams(trans_a="T", trans_b="T"), "f4", False),
    "conjugated": (GemmParams(alpha=2 - 1j, trans_a="C", trans_b="N"), "c16", False),
    "added": (GemmParams(alpha=2, beta=-0.5, order="F"), "c8", True),
    "halves": (GemmParams(), "f2", False),
    "reduced": (GemmReduceParams(reduce="sumsq"), "c8", False),
    "large": (GemmParams(), "f4", False),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_any_other_task(bundle, case, monkeypatch):
    if case == "large":
        monkeypatch.setattr("gemmserve_service.executor.worker.host.backend._PANEL_FLOPS", 1)
    params, dtype, with_c = CASES[case]
    rng = np.random.default_rng(1)

    def random(*shape):
        values = rng.standard_normal(shape)
        return (values + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else values).astype(dtype)

    runner, other = Runner(CpuBackend()), Runner(CpuBackend())
    turned_a, turned_b = params.trans_a in "TC", params.trans_b in "TC"
    for _ in range(3):
        a, b = random(9, 7) if turned_a else random(7, 9), random(5, 9) if turned_b else random(9, 5)
        arrays = {"a": a, "b": b, **({"c": random(7, 5)} if with_c else {})}
        short, result = bundle(params, **arrays)
        long, expected = bundle(params, **arrays)
        assert isinstance(runner.unpacked(long), Run)
        done = runner.run(short)
        assert (done.kind, done.task, done.algorithm, done.residual) == ("done", "t", "numpy", None)
        assert other.run(other.unpacked(long)).kind == "done"
        assert result() == expected()
        assert result().strip(b"\xff")


def test_a_checked_one_is_checked(bundle):
    message, _ = bundle(GemmParams(), a=np.eye(4, dtype="c8"), b=np.ones((4, 3), "c8"))
    assert Runner(CpuBackend()).run(replace(message, verify=True)).residual == 0


def test_cancelled_and_lost(bundle):
    runner = Runner(CpuBackend())
    message, _ = bundle(GemmParams(), a=np.eye(4, dtype="c8"), b=np.ones((4, 3), "c8"))
    runner.cancel("t")
    assert runner.run(message).slug == "cancelled"
    assert runner.run(message).kind == "done", "that is forgotten"
    Path(message.extents[0][1]).unlink()
    assert runner.run(message).kind == "done"  # still mapped
    runner.forget([message.extents[0][0]])
    assert (runner.run(message).slug, runner.run(message).status) == ("internal", 500)


def test_nonsense_is_an_answer_too(bundle):
    message, _ = bundle(GemmParams(), a=np.eye(4, dtype="c8"), b=np.ones((4, 3), "c8"))
    runner = Runner(CpuBackend())
    for form in ("{}", "[]"):
        part = replace(message.parts[0], form=form)
        wrong = replace(message, parts=[part])
        assert runner.run(wrong).slug == "internal"
        with pytest.raises(ValidationError):
            runner.unpacked(wrong)


def test_a_form_is_read_once_and_not_kept_for_ever(bundle, monkeypatch):
    monkeypatch.setattr(unpack, "_MAX_FORMS", 2)
    backend = CpuBackend()
    known = Forms(backend)
    texts = [bundle(GemmParams(alpha=n), a=np.eye(2), b=np.eye(2))[0].parts[0].form for n in range(3)]
    first, second = known.of(texts[0]), known.of(texts[1])
    assert known.of(texts[0]) is first
    known.of(texts[2])
    assert known.of(texts[0]) is first
    assert known.of(texts[1]) is not second


def test_it_travels(bundle):
    message, _ = bundle(GemmParams(alpha=1j), a=np.eye(4, dtype="c8"), b=np.ones((4, 3), "c8"))
    for sent in (RunBatch(tasks=[message]), RunBatch(tasks=[message, message])):
        (body,) = Decoder().feed(encode(sent))
        assert TO_WORKER.validate_json(body) == sent


def test_what_has_no_place_yet_has_no_extent(bundle):
    a = np.ones((3, 4), "f4")
    message, _ = bundle(GemmParams(), a=a, b=a.T.copy())
    (part,) = message.parts
    rows = [*message.extents, row_without_place("arr_1")]
    part = replace(part, results={"d": [(1, 0)]})
    run = Forms(CpuBackend()).of(part.form).run(Work(task="t", extents=rows, parts=[part], defer=True))
    ref = run.results["d"]
    assert (ref.extent, ref.cache_id, ref.nbytes) == (None, "arr_1", 3 * 3 * 4)
    assert run.operands["a"].extent == message.extents[0][0]

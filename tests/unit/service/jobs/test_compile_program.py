"""Steps become a program: names resolved, every product checked, nothing run that nobody needs, memory foreseen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from gemmserve_kernels import DeviceSpec, Operand
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.errors import ComputeUnsupported, ConfigInfeasible, ParameterInvalid, ShapeMismatch
from gemmserve_service.errors import ProgramTooLarge, StepInvalid, TooLarge, describe
from gemmserve_service.jobs.compile_program import arrays_of, compile_program
from gemmserve_service.programs import last_uses, outputs
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.schemas import JobRequest, ProgramJob, ProgramParams

A, B, C = (new_id("arr") for _ in range(3))
ARRAYS = {
    A: Operand.contiguous((6, 6), np.dtype("c8")),
    B: Operand.contiguous((6, 4), np.dtype("f4")),
    C: Operand.contiguous((6, 4), np.dtype("c16"), "F"),
}
REQUEST = TypeAdapter(JobRequest)
CPU = DeviceSpec.cpu()


def program(*steps, **fields):
    request = REQUEST.validate_python({"op": "program", "steps": list(steps), **fields}, strict=True)
    assert isinstance(request, ProgramJob)
    return request


def compiled(*steps, most=None, **fields):
    request = program(*steps, **fields)
    named = {array_id for *_, array_id in arrays_of(request.steps)}
    return compile_program(request, {name: ARRAYS[name] for name in named}, most)


def gemm(step, a, b, **fields):
    return {"id": step, "op": "gemm", "a": a, "b": b, **fields}


def reduction(step, a, b, **fields):
    return {"id": step, "op": "gemm_reduce", "a": a, "b": b, **fields}


def test_shapes_and_dtypes_pass_from_step_to_step():
    found = compiled(
        gemm("x2", A, A, order="F"),
        gemm("p", "$x2", B, c=C, beta=2),
        reduction("y", "$x2", "$p", reduce=["absmax", "argmax"], return_c=True, axis="n"),
        keep=["p", "y"],
    )
    assert [value for made in found.values for value in made] == ["$x2", "$p", "$y.absmax", "$y.argmax", "$y.c"]
    values = {name: (v.shape, v.dtype.name, v.order) for made in found.values for name, v in made.items()}
    assert values["$x2"] == ((6, 6), "complex64", "F")
    assert values["$p"] == ((6, 4), "complex128", "C"), "promoted by c"
    assert values["$y.absmax"] == ((6,), "float64", "C")
    assert values["$y.argmax"] == ((6,), "int64", "C")
    assert values["$y.c"] == ((6, 4), "complex128", "C")
    assert list(outputs(found)) == ["p", "y.absmax", "y.argmax", "y.c"]
    assert found.flops() == 8 * 6 * 6 * 6 + 2 * 8 * 6 * 6 * 4
    assert found.dtype == np.complex64
    stored = 6 * 6 * 8 + 6 * 4 * 4 + 6 * 4 * 16
    assert found.nbytes() == stored + 6 * 4 * 16 * 2 + 6 * 8 * 2


def test_a_step_of_one_result_needs_no_name_for_it():
    found = compiled(reduction("y", A, A, return_c=False, reduce=["sum"]), reduction("z", A, A), keep=["y", "z.sum"])
    assert list(found.results) == ["y.sum", "z.sum"]
    chained = compiled(
        reduction("c", A, A, reduce="sum", return_c=True), gemm("d", "$c.c", B), reduction("s", "$d", B, trans_a="T")
    )
    assert chained.params.steps[1].a == "$c.c"
    assert list(chained.results) == ["c.sum", "s.sum"]


def test_a_short_reference_is_resolved():
    batch = new_id("arr")
    arrays = {batch: Operand.contiguous((3, 5, 5), np.dtype("f8"))}
    request = program(reduction("y", batch, batch, reduce=["sumsq"]), gemm("g", "$y", "$y", trans_b="T"))
    found = compile_program(request, arrays, None)
    assert (found.params.steps[1].a, found.params.steps[1].b) == ("$y.sumsq", "$y.sumsq")
    assert found.results["g"].shape == (3, 3)


def test_by_default_what_no_step_uses_is_kept():
    found = compiled(gemm("x2", A, A), gemm("x4", "$x2", "$x2"), gemm("z", "$x2", B))
    assert list(found.results) == ["x4", "z"]


def test_what_nobody_needs_is_checked_and_not_run():
    steps = (gemm("u", A, B), gemm("x2", A, A), gemm("v", "$x2", "$u"), gemm("x4", "$x2", "$x2"))
    found = compiled(*steps, keep=["x4"])
    assert [step.id for step in found.params.steps] == ["x2", "x4"]
    assert found.places == (1, 3)
    assert list(found.arrays) == [A]
    with pytest.raises(StepInvalid):
        compiled(gemm("u", B, B), gemm("x2", A, A), keep=["x2"])


def test_a_value_that_is_used_and_kept():
    found = compiled(gemm("x2", A, A), gemm("x4", "$x2", "$x2"), keep=["x4", "x2"])
    assert list(found.results) == ["x4", "x2"]
    assert last_uses(found.params.steps) == {A: 0, "$x2": 1}


@pytest.mark.parametrize(
    ("steps", "step", "pointer", "cause", "says"),
    [
        ([gemm("x", "$y", A)], "x", "/steps/0/a", ParameterInvalid, "no step before"),
        ([gemm("x", A, "$x")], "x", "/steps/0/b", ParameterInvalid, "own result"),
        ([gemm("x", A, "$y"), gemm("y", A, A)], "x", "/steps/0/b", ParameterInvalid, "no step before"),
        ([gemm("x", A, A), gemm("x", A, A)], "x", "/steps/1/id", ParameterInvalid, "has the id"),
        ([gemm("x", A, A), gemm("y", "$x.d", A)], "y", "/steps/1/a", ParameterInvalid, "one result"),
        (
            [reduction("r", A, A, reduce=["sum", "mean"]), gemm("y", "$r", A)],
            "y", "/steps/1/a", ParameterInvalid, r"\$r.sum, \$r.mean",
        ),
        ([reduction("r", A, A), gemm("y", "$r.mean", A)], "y", "/steps/1/a", ParameterInvalid, "one result"),
        ([gemm("x", A, B), gemm("y", "$x", "$x")], "y", "/steps/1", ShapeMismatch, "4"),
        ([reduction("r", A, A), gemm("y", "$r", A)], "y", "/steps/1", ShapeMismatch, "dimensions"),
        ([gemm("x", A, A, beta=1)], "x", "/steps/0/beta", ParameterInvalid, "no c"),
        ([gemm("x", A, A), reduction("m", "$x", A, reduce="max")], "m", "/steps/1/reduce", ParameterInvalid, "absmax"),
        ([gemm("x", A, A), gemm("y", "$x", B, compute="3xfp16-3n")], None, None, ValidationError, "compute"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_step_is_said_of_it(steps, step, pointer, cause, says):
    if cause is ValidationError:
        with pytest.raises(ValidationError, match=says):
            compiled(*steps)
        return
    with pytest.raises(StepInvalid, match=says) as caught:
        compiled(*steps)
    assert (caught.value.step, caught.value.pointer, type(caught.value.cause)) == (step, pointer, cause)
    description = describe(caught.value)
    assert (description.slug, description.status) == (cause.slug, 422)
    assert description.extra["step"] == step
    assert description.detail.startswith(f"step {step}: ")


@pytest.mark.parametrize("keep", [["z"], ["x.d"], ["x.sum"], ["r.mean"], ["x", "r", "x"]])
def test_what_cannot_be_kept(keep):
    with pytest.raises(ParameterInvalid, match="keep"):
        compiled(gemm("x", A, A), reduction("r", A, A, reduce=["sum"]), keep=keep)


def test_all_results_of_a_step_and_one_of_them():
    found = compiled(reduction("r", A, A, reduce=["sum", "sumsq"]), keep=["r.sumsq", "r"])
    assert list(found.results) == ["r.sumsq", "r.sum"]


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": []},
        {"steps": [gemm("x", A, A)], "keep": []},
        {"steps": [gemm("x", A, A)], "a": A},
        {"steps": [gemm("x.y", A, A)]},
        {"steps": [gemm("", A, A)]},
        {"steps": [gemm("x" * 65, A, A)]},
        {"steps": [gemm("x", A, "x")]},
        {"steps": [gemm("x", A, None)]},
        {"steps": [gemm("x", A, {"step": "y"})]},
        {"steps": [gemm("x", A, A, priority=1)]},
        {"steps": [{**gemm("x", A, A), "op": "program"}]},
        {"steps": [{"op": "gemm", "a": A, "b": A}]},
        {"steps": {"x": gemm("x", A, A)}},
    ],
)
def test_what_is_no_program(fields):
    with pytest.raises(ValidationError):
        REQUEST.validate_python({"op": "program", **fields}, strict=True)


def test_values_past_the_limit_of_an_array_are_refused_before_anything_is_made():
    row, column = new_id("arr"), new_id("arr")
    arrays = {
        row: Operand.contiguous((1, 1 << 24), np.dtype("c16")),
        column: Operand.contiguous((1 << 24, 1), np.dtype("c16")),
    }
    request = program(gemm("outer", column, row), reduction("y", "$outer", "$outer"))
    with pytest.raises(StepInvalid, match="outer has 4503599627370496 bytes") as caught:
        compile_program(request, arrays, 1 << 34)
    assert isinstance(caught.value.cause, TooLarge)
    assert describe(caught.value).status == 413


def test_peak_memory_is_that_of_the_worst_moment():
    square = 6 * 6 * 8
    chain = compiled(gemm("x1", A, A), *(gemm(f"x{n}", f"$x{n - 1}", f"$x{n - 1}") for n in range(2, 9)))
    assert chain.peaks == (2 * square, 2 * square), "two of them at a time; A went after the first step"
    pair = compiled(gemm("x1", A, A), gemm("x2", "$x1", "$x1"))
    assert pair.peaks == (2 * square, square), "a result is no scratch"
    held = compiled(gemm("x1", A, A), gemm("x2", "$x1", A), gemm("x3", "$x2", "$x1"), gemm("x4", "$x3", "$x2"))
    assert held.peaks == (3 * square, 3 * square)  # x1, x2 and x3
    kept = compiled(gemm("x1", A, A), gemm("x2", "$x1", A), gemm("x3", "$x2", "$x1"), keep=["x1", "x2", "x3"])
    assert kept.peaks == (3 * square, 0)


def test_unused_results_of_a_step_count_while_it_runs():
    found = compiled(reduction("r", A, A, reduce=["sum", "sumsq"], return_c=True), gemm("x", "$r.c", B), keep=["x"])
    square, small = 6 * 6 * 8, 6 * 4 * 4
    assert found.peaks[0] == max(2 * square + 6 * 8 + 6 * 4, square + small + 6 * 4 * 8)
    assert found.peaks[1] == square + 6 * 8 + 6 * 4


def test_what_can_never_fit_is_refused_by_name():
    found = compiled(gemm("x1", A, A), gemm("x2", "$x1", "$x1"), gemm("x3", "$x2", B))
    all_values, scratch = found.peaks
    h200 = KNOWN["H200"]
    assert found.plan(dataclasses.replace(h200, memory_bytes=all_values)) is not None
    with pytest.raises(ProgramTooLarge, match=str(all_values)):
        found.plan(dataclasses.replace(h200, memory_bytes=all_values - 1))
    found.plan(dataclasses.replace(CPU, memory_bytes=scratch))
    with pytest.raises(ProgramTooLarge):
        found.plan(dataclasses.replace(CPU, memory_bytes=scratch - 1))
    assert describe(ProgramTooLarge("x")).slug == "program-too-large"


@pytest.mark.parametrize(
    ("fields", "device", "cause"),
    [
        ({"compute": "ozaki"}, "cpu", ComputeUnsupported),
        ({"compute": "3xfp16"}, "MI250X", ComputeUnsupported),
        ({"config": {"algorithm": "wgmma"}}, "A100", ConfigInfeasible),
        ({"config": {"block_m": 512, "block_n": 512}}, "H200", ConfigInfeasible),
    ],
)
def test_a_mode_or_configuration_that_the_device_lacks_is_said_of_the_step(fields, device, cause):
    found = compiled(gemm("x1", A, A), gemm("u", A, A), gemm("x2", "$x1", A, **fields), keep=["x2"])
    spec = CPU if device == "cpu" else KNOWN[device]
    for _ in range(2):  # looked into once, and said as often as it is asked
        with pytest.raises(StepInvalid) as caught:
            found.plan(spec)
    assert (caught.value.step, caught.value.pointer, type(caught.value.cause)) == ("x2", "/steps/2", cause)
    if cause is ComputeUnsupported:
        assert "fp32" in describe(caught.value).extra["available"]
    others = KNOWN["H200"]
    if cause is ComputeUnsupported:
        assert found.plan(others).algorithm == "program" or fields["compute"] == "ozaki"


def test_equal_products_are_kept_once():
    found = compiled(gemm("x1", A, A), *(gemm(f"x{n}", f"$x{n - 1}", A) for n in range(2, 50)))
    assert len({id(product) for product in found.computations}) == 1


def test_a_worker_is_sent_what_was_given_and_no_more():
    found = compiled(gemm("x1", A, A), gemm("x2", "$x1", A, alpha=[0.1, -2]))
    text = found.params.model_dump_json()
    assert "layout" not in text
    back = ProgramParams.model_validate_json(text)
    assert back == found.params
    assert back.steps[1].alpha == 0.1 - 2j


def add(step, a, b=None, op="add", **fields):
    return {"id": step, "op": op, "a": a, **({} if b is None else {"b": b}), **fields}


def test_elementwise_steps_between_products():
    found = compiled(
        gemm("x2", A, A, order="F"),
        add("s", "$x2", A, alpha=2, gamma=1),
        add("m", "$s", C, op="multiply") | {"b": A},
        add("wide", B, alpha=[0, 1], dtype="complex128", order="F"),
        gemm("p", "$m", "$wide"),
    )
    values = {name: (v.shape, v.dtype.name, v.order) for made in found.values for name, v in made.items()}
    assert values["$s"] == values["$m"] == ((6, 6), "complex64", "C")
    assert values["$wide"] == ((6, 4), "complex128", "F")
    assert list(found.results) == ["p"]
    assert found.flops() > 8 * 6 * 6 * (6 + 4)
    assert found.plan(CPU).algorithm == "program"
    size = 6 * 6 * 8
    assert compiled(add("s", A, A)).peaks == (2 * size + 2 * size, 2 * size), "with the blocks that a sum takes"
    assert compiled(add("s", A)).peaks == (2 * size, 0)


@pytest.mark.parametrize(
    ("step", "error", "pointer"),
    [
        (add("s", A, B), ShapeMismatch, "/steps/1"),
        (add("s", "$t", B), ParameterInvalid, "/steps/1/a"),
        (add("s", A, beta=2), ParameterInvalid, "/steps/1/beta"),
        (add("s", A, dtype="float64"), ParameterInvalid, "/steps/1/dtype"),
        (add("s", B, A, op="multiply"), ShapeMismatch, "/steps/1"),
    ],
)
def test_what_is_wrong_with_an_elementwise_step_names_it(step, error, pointer):
    with pytest.raises(StepInvalid) as caught:
        compiled(gemm("x2", A, A), step)
    assert (caught.value.step, caught.value.pointer) == ("s", pointer)
    assert isinstance(caught.value.cause, error)


def test_steps_have_the_fields_of_their_kind_alone():
    for wrong in (add("s", A, op="multiply"), add("s", A, gamma=1, op="multiply", b=A), add("s", A, trans_a="T")):
        with pytest.raises(ValidationError):
            program(wrong)


def view(name, offset=0, shape=None, strides=None, **fields):
    extents = {} if shape is None else {"shape": list(shape), "strides": list(strides)}
    return {"id": name, "offset": offset, **extents, **fields}


def test_views_of_arrays_and_of_steps():
    found = compiled(
        gemm("x2", A, A, order="F"),
        gemm("p", view(A, 0, (3, 6), (12, 1)), view("$x2", 35, (6, 4), (-1, -6))),
        add("re", view("$p", part="real"), view(A, 1, (3, 4), (0, 1), part="imag")),
        reduction("y", view("$re", 0, (4, 3), (1, 4)), view("$re", 2, (3, 2), (4, 1))),
        add("z", view("$y", 1, (1,), (5,))),
        keep=["p", "re", "z"],
    )
    values = {name: (v.shape, v.dtype.name) for made in found.values for name, v in made.items()}
    assert values["$p"] == ((3, 4), "complex64")
    assert values["$re"] == ((3, 4), "float32")
    assert values["$z"] == ((1,), "float32")
    product = found.computations[1]
    assert (product.a.strides, product.b.strides) == ((12, 1), (-1, -6))
    assert found.computations[2].b.strides == (0, 2)
    assert found.params.steps[4].a.id == "$y.sum", "a short reference is resolved in a view too"
    assert list(found.arrays) == [A]
    assert last_uses(found.params.steps) == {A: 2, "$x2": 1, "$p": 2, "$re": 3, "$y.sum": 4}


@pytest.mark.parametrize(("trans", "folded"), [("N", "R"), ("T", "C"), ("C", "T"), ("R", "N")])
def test_a_conjugate_costs_a_product_nothing(trans, folded):
    found = compiled(gemm("p", view(A, conj=True), view(B, conj=True), trans_a=trans, trans_b="N"))
    (step,) = found.params.steps
    assert (step.a, step.trans_a, step.b, step.trans_b) == (A, folded, B, "R")
    assert found.peaks == compiled(gemm("p", A, B)).peaks


def test_other_conjugates_take_memory_of_their_own():
    found = compiled(add("s", view(A, 0, (6, 6), (1, 6), conj=True)))
    assert found.params.steps[0].a.conj
    assert found.computations[0].a == Operand.contiguous((6, 6), "c8")
    size = 6 * 6 * 8
    assert found.peaks == (3 * size, size)
    for real in (add("s", view(B, conj=True)), gemm("p", A, B, c=view(B, conj=True), beta=1)):
        step = compiled(real).params.steps[0]
        assert B in (step.a, getattr(step, "c", None)), "nothing to conjugate: the array as it is"


def test_the_request_keeps_its_form():
    request = program(gemm("p", view(A, 2, (2, 6), (6, 1), conj=True), B))
    before = request.model_dump_json(exclude_unset=True)
    compile_program(request, {name: ARRAYS[name] for name in (A, B)}, None)
    assert request.model_dump_json(exclude_unset=True) == before
    assert REQUEST.validate_json(before) == request
    params = compile_program(request, {name: ARRAYS[name] for name in (A, B)}, None).params
    assert ProgramParams.model_validate_json(params.model_dump_json()) == params


@pytest.mark.parametrize(
    ("step", "error", "pointer"),
    [
        (add("s", view(A, 1, (6, 6), (6, 1))), ParameterInvalid, "/steps/1/a/strides"),
        (add("s", view(A, 36, (1,), (1,))), ParameterInvalid, "/steps/1/a/offset"),
        (add("s", A, view(A, 0, (2,), (-1,))), ParameterInvalid, "/steps/1/b/strides"),
        (add("s", view(B, part="imag")), ParameterInvalid, "/steps/1/a/part"),
        (add("s", view("$later")), ParameterInvalid, "/steps/1/a"),
        (add("s", view("$s")), ParameterInvalid, "/steps/1/a"),
        (add("s", view("$x2.sum")), ParameterInvalid, "/steps/1/a"),
        (add("s", view(A, 0, (2**31, 2**31), (0, 0))), ShapeMismatch, "/steps/1"),
        (add("s", view(A, 0, (1000, 1000), (0, 0))), TooLarge, "/steps/1"),
        (gemm("s", view(A, 0, (6,), (1,)), B), ShapeMismatch, "/steps/1"),
        (gemm("s", A, B, c=view(B, conj=True), layout="planar"), ParameterInvalid, "/steps/1/c/conj"),
    ],
)
def test_what_is_wrong_with_a_view_names_its_field(step, error, pointer):
    with pytest.raises(StepInvalid) as caught:
        compiled(gemm("x2", A, A), step, most=10_000)
    assert (caught.value.step, caught.value.pointer) == ("s", pointer)
    assert isinstance(caught.value.cause, error)


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": -1},
        {"shape": [1]},
        {"shape": [1], "strides": [2**62 + 1]},
        {"shape": [-1], "strides": [1]},
        {"shape": [1] * 33, "strides": [1] * 33},
        {"shape": [1.5], "strides": [1]},
        {"shape": ["1"], "strides": [1]},
        {"shape": [True], "strides": [1]},
        {"conj": True, "part": "real"},
        {"part": "abs"},
        {"id": "nothing"},
        {"order": "C"},
    ],
)
def test_what_is_no_view(wrong):
    with pytest.raises(ValidationError):
        program(add("s", {"id": A, **wrong}))

"""Compilation of a request's steps to a `Program`: names resolved, every step checked, unneeded steps left out."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from gemmserve_kernels import Operand, ParameterInvalid
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_service import products
from gemmserve_service.errors import ServiceError, StepInvalid, TooLarge
from gemmserve_service.programs import Program, Value, described_operands, operands_of, value_name, views_of
from gemmserve_service.schemas import GemmJob, GemmReduceStep, GemmStep, ProgramJob, ProgramParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gemmserve_service.products import Computation
    from gemmserve_service.schemas import AnyStep, GemmReduceJob, View


_CONJUGATE: Final = {"N": "R", "R": "N", "T": "C", "C": "T"}
"""Flag of an operand's conjugate, by the operand's flag."""


@contextlib.contextmanager
def step_errors(number: int, step: AnyStep, field: str = "") -> Iterator[None]:
    """Names the step, and the field if known, in whatever is wrong with it."""
    try:
        yield
    except StepInvalid:
        raise
    except (KernelError, ServiceError) as error:
        where = field or getattr(error, "parameter", "")
        known = where.partition(".")[0] in type(step).model_fields
        pointer = f"/steps/{number}/{where.replace('.', '/')}" if known else f"/steps/{number}"
        raise StepInvalid(step.id, pointer, error) from error


def arrays_of(steps: Sequence[AnyStep]) -> Iterator[tuple[int, AnyStep, str, str]]:
    """Every stored array that the steps name, once: number and step that name it first, the operand, the id."""
    seen: set[str] = set()
    for number, step in enumerate(steps):
        for field, name in operands_of(step).items():
            if not name.startswith("$") and name not in seen:
                seen.add(name)
                yield number, step, field, name


def has_views(request: GemmJob | GemmReduceJob) -> bool:
    """Whether an operand of a product is a view: then it is run as a program of one step."""
    return not (isinstance(request.a, str) and isinstance(request.b, str) and isinstance(_c_of(request), str | None))


def as_program(request: GemmJob | GemmReduceJob) -> ProgramJob:
    """Return the program of one step that a product of views is run as; `product_result` has its results' names."""
    kind = GemmStep if isinstance(request, GemmJob) else GemmReduceStep
    fields = {name: getattr(request, name) for name in kind.model_fields if name != "id"}
    return ProgramJob.model_construct(op="program", steps=[kind.model_construct(id="d", **fields)], keep=None)


def product_result(name: str) -> str:
    """Return the name that a product's result has in its job, by its name in `as_program`: "sum" for "d.sum"."""
    return name.rpartition(".")[2]


def _c_of(request: GemmJob | GemmReduceJob) -> str | View | None:
    return request.c if isinstance(request, GemmJob) else None


class product_errors:  # noqa: N801 (used like a function; one of contextlib's takes three times as long)
    """Context manager: errors of a product that is run as a program speak of no step, for its request has none."""

    __slots__ = ("_request",)

    def __init__(self, request: GemmJob | GemmReduceJob | ProgramJob) -> None:
        self._request = request

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StepInvalid) and not isinstance(self._request, ProgramJob):
            raise error.cause from error


def compile_program(request: ProgramJob, arrays: Mapping[str, Operand], max_array_bytes: int | None) -> Program:
    """The program of `request` on `arrays` (by id). `max_array_bytes`: of any one value; None: as long as it is.

    Raises StepInvalid for what is wrong with a step, ParameterInvalid for what is wrong with `keep`.
    """
    compiler = _Compiler(dict(arrays), max_array_bytes)
    for number, step in enumerate(request.steps):
        compiler.add(number, step)
    kept = compiler.kept(request.keep)
    needed = compiler.needed(kept)
    steps = tuple(compiler.steps[number] for number in needed)
    used = {name for step in steps for name in operands_of(step).values()}
    return Program(
        ProgramParams.model_construct(op="program", steps=steps),
        tuple(compiler.computations[number] for number in needed),
        tuple(compiler.values[number] for number in needed),
        {name: operand.nbytes for name, operand in arrays.items() if name in used},
        {name.removeprefix("$"): compiler.made[name][1] for name in kept},
        tuple(needed),
    )


class _Compiler:
    """Compiler state after the steps so far."""

    def __init__(self, known: dict[str, Operand], max_array_bytes: int | None) -> None:
        self.steps: list[AnyStep] = []
        """Their operands' names whole: `$y.sum` where the request says `$y`."""
        self.computations: list[Computation] = []
        self.values: list[dict[str, Value]] = []
        self.made: dict[str, tuple[int, Value]] = {}
        """Number of the step that makes a value, and what it is, by value name."""
        self._known = known
        self._ids: dict[str, int] = {}
        self._alike: dict[Computation, Computation] = {}
        self._max_array_bytes = max_array_bytes

    def add(self, number: int, step: AnyStep) -> None:
        """Checks the next step. Raises StepInvalid."""
        with step_errors(number, step, "id"):
            if step.id in self._ids:
                raise ParameterInvalid(f"a step before it has the id {step.id!r} too", "id")
        names: dict[str, str] = {}
        for field, name in operands_of(step).items():
            with step_errors(number, step, field):
                names[field] = self._resolve(field, name, step.id)
        with step_errors(number, step):
            step = self._plain(step, names)
            described = described_operands(step, self._known)
            self._check_views(step, described)
            computation = products.build_step(step, described)
            values = {
                value_name(step, result): Value(shape, dtype, order)
                for result, (shape, dtype, order) in products.outputs(computation).items()
            }
            self._check_sizes(values)
        self._ids[step.id] = number
        self.steps.append(step)
        self.computations.append(self._alike.setdefault(computation, computation))
        self.values.append(values)
        for name, value in values.items():
            self.made[name] = (number, value)
            self._known[name] = Operand.contiguous(value.shape, value.dtype, value.order)

    def kept(self, wanted: Sequence[str] | None) -> list[str]:
        """The names of the values that become arrays. Raises ParameterInvalid."""
        if wanted is None:
            used = {name for step in self.steps for name in operands_of(step).values()}
            return [name for name in self.made if name not in used]
        found: dict[str, None] = {}
        if len(set(wanted)) != len(wanted):
            raise ParameterInvalid("keep names something twice", "keep")
        for name in wanted:
            step, _, result = name.partition(".")
            if step not in self._ids:
                raise ParameterInvalid(f"keep: no step has the id {step[:80]!r}", "keep")
            if result and f"${name}" not in self.made:
                raise ParameterInvalid(f"keep: {_results(step, self.values[self._ids[step]])}, not {name!r}", "keep")
            found |= dict.fromkeys([f"${name}"] if result else self.values[self._ids[step]])
        return list(found)

    def needed(self, kept: Sequence[str]) -> list[int]:
        """The numbers of the steps that the values in `kept` depend on, in order."""
        wanted = set(kept)
        found: list[int] = []
        for number in range(len(self.steps) - 1, -1, -1):
            if wanted & self.values[number].keys():
                found.append(number)
                wanted.update(operands_of(self.steps[number]).values())
        return found[::-1]

    def _resolve(self, field: str, name: str, own: str) -> str:
        """The whole name of the value that an operand refers to. Raises ParameterInvalid."""
        if not name.startswith("$"):
            return name
        step, _, result = name[1:].partition(".")
        if step == own:
            raise ParameterInvalid(f"{field} is the step's own result: a step may refer to earlier ones alone", field)
        if step not in self._ids:
            raise ParameterInvalid(f"{field} is {name}, and no step before this one has the id {step!r}", field)
        values = self.values[self._ids[step]]
        if result and name in values:
            return name
        if result or len(values) != 1:
            raise ParameterInvalid(f"{field} is {name}, but {_results(step, values)}", field)
        return next(iter(values))

    def _plain(self, step: AnyStep, names: Mapping[str, str]) -> AnyStep:
        """The same step, its operands' names whole; conjugates are flags where there are any, and views no more than
        they need be.
        """
        changed: dict[str, Any] = {field: name for field, name in names.items() if name != getattr(step, field)}
        for field, view in views_of(step).items():
            conj, flag = view.conj, step.turned.get(field)
            if conj and flag is not None:
                changed[flag], conj = _CONJUGATE[getattr(step, flag)], False
            elif conj and getattr(step, "layout", "") == "planar":
                raise ParameterInvalid(f"{field} is planar: it has no conjugate by view", f"{field}.conj")
            elif self._known[names[field]].dtype.kind != "c":
                conj = False
            whole = view.shape is None and view.strides is None and not view.offset and view.part is None and not conj
            changed[field] = names[field] if whole else view.model_copy(update={"id": names[field], "conj": conj})
        return step.model_copy(update=changed) if changed else step

    def _check_views(self, step: AnyStep, described: Mapping[str, Operand]) -> None:
        for field in views_of(step):
            nbytes = described[field].nbytes
            if self._max_array_bytes is not None and nbytes > self._max_array_bytes:
                raise TooLarge(
                    f"{field} shows {nbytes} bytes; this server takes at most {self._max_array_bytes} in one array"
                )

    def _check_sizes(self, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            if self._max_array_bytes is not None and value.nbytes > self._max_array_bytes:
                raise TooLarge(
                    f"{name} has {value.nbytes} bytes; this server takes at most {self._max_array_bytes} in one array"
                )


def _results(step: str, values: Mapping[str, Value]) -> str:
    if len(values) == 1:
        return f"{step} has one result, {next(iter(values))}"
    return f"{step} has the results {', '.join(values)}"

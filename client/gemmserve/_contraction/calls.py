"""Calls of `einsum` and `tensordot`: arguments become a plan, and the plan the steps of a program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gemmserve import _errors
from gemmserve._contraction import equation as _equation
from gemmserve._contraction.plan import Operand, Plan, Step, plan
from gemmserve._handles.functions import FUNCTIONS, VIEWS
from gemmserve._handles.handle import ArrayHandle
from gemmserve._handles.view import Base
from gemmserve._transfer.arrays import as_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve._calls.exchanges import Flow
    from gemmserve._transfer.arrays import AnyArray

PACKED: Final = 1 << 20
"""Bytes of an operand up to which it is sent with others, as one array: a network has hundreds of small ones."""

ALIGNED: Final = 64
"""Bytes of which the start of each is a multiple there; kernels load 16 at a time, the host up to 64."""


@dataclass(frozen=True)
class Contraction:
    """A planned contraction of handles and arrays."""

    operands: Sequence[Any]
    plan: Plan
    compute: str

    @property
    def remote(self) -> bool:
        """Whether any operand is on the server, or will be."""
        return any(isinstance(x, ArrayHandle) for x in self.operands)

    @cached_property
    def _laid(self) -> dict[int, AnyArray]:
        """The operands that are not on the server, by number, in the order of axes that the plan wants."""
        return {
            number: np.ascontiguousarray(self.operands[number].transpose(laid.axes), laid.dtype)
            for number, laid in self.plan.laid.items()
        }

    def seen(self) -> Any:
        """Return the result of a plan without steps: a view of the operand; a scalar where NumPy gives one."""
        source, view = self.plan.result
        if self.remote:
            return self.operands[source]._viewed(view)
        return view.show(self._laid[source].reshape(-1))[()]

    def shown(self, made: AnyArray) -> Any:
        """Return the result for local operands, of what the last step made; a scalar where NumPy gives one."""
        return self.plan.result[1].show(made.reshape(-1))[()]

    def product(self) -> tuple[AnyArray, AnyArray] | None:
        """Return the operands of the one gemm that computes it for local ones; None: it takes something else."""
        if self.remote or [step.op for step in self.plan.steps] != ["gemm"]:
            return None
        views = self.plan.steps[0].operands
        a, b = (view.show(self._laid[source].reshape(-1)) for source, view in (views["a"], views["b"]))
        return a, b

    def record(self, program: Any, kind: type, name: str | None) -> Flow[Any]:
        """Records the steps; returns the handle of the result. `kind`: the class of the program's handles.

        Operands that are not on the server are sent for the while, small ones of a dtype as one array.
        """
        recording = program._recording
        recording.check_step({f"operand {number}": x for number, x in enumerate(self.operands)}, name)
        packs, places = self._packed()
        sent = yield from program._uploaded({f"operands {number}": pack for number, pack in enumerate(packs)})
        ids = [*sent.values()]
        values = [*self.operands]
        steps = self.plan.steps

        def add(step: Step, name: str | None) -> Any:
            operands: dict[str, Any] = {}
            references: dict[str, Any] = {}
            for operand, (source, view) in step.operands.items():
                if source in places:
                    at, offset = places[source]
                    operands[operand] = packs[at]
                    whole = Base(packs[at].shape, packs[at].dtype)
                    references[operand] = replace(view, offset=view.offset + offset).wire(ids[at], whole)
                else:
                    operands[operand] = values[source]._viewed(view)
            encoded: dict[str, Any] = {}
            if step.op == "gemm" and self.compute != "auto":
                encoded["compute"] = self.compute
            elif step.op == "sum":
                encoded["axes"] = [*step.axes]
            elif step.op == "add":
                encoded["dtype"] = step.dtype.name
            trans: dict[str, Any] | None = {} if step.op == "gemm" else None
            made = recording.add_step(
                step.op, operands, references, encoded, {"d": step.result}, name=name, trans=trans
            )
            return kind(program, made["d"])

        for number, step in enumerate(steps, 1):
            values.append(add(step, name if number == len(steps) else None))
        source, view = self.plan.result
        if not steps and (name is not None or source in places):
            # Nothing to compute, and no array of the server's that could be seen as the result: a copy.
            copied = Step("add", {"a": (source, view)}, self.plan.equation.shape, self.plan.dtype)
            values.append(add(copied, name))
            return values[-1]
        return values[source]._viewed(view)

    def _packed(self) -> tuple[list[AnyArray], dict[int, tuple[int, int]]]:
        """(flat arrays that are sent, for each local operand which of them it is in and from which element on)."""
        packs: list[list[AnyArray]] = []
        lengths: list[int] = []
        known: dict[Any, tuple[int, int]] = {}
        places: dict[int, tuple[int, int]] = {}
        shared: dict[np.dtype[Any], int] = {}
        for number, array in self._laid.items():
            laid = self.plan.laid[number]
            key = id(self.operands[number]), laid.axes, laid.dtype
            if key not in known:
                small = array.nbytes <= PACKED
                at = shared.setdefault(laid.dtype, len(packs)) if small else len(packs)
                if at == len(packs):
                    packs.append([])
                    lengths.append(0)
                gap = -lengths[at] % (ALIGNED // laid.dtype.itemsize)
                known[key] = at, lengths[at] + gap
                packs[at] += [np.zeros(gap, laid.dtype), array.reshape(-1)]
                lengths[at] += gap + array.size
            places[number] = known[key]
        return [parts[1] if len(parts) == 2 else np.concatenate(parts) for parts in packs], places


def einsum(arguments: Sequence[Any], *, optimize: Any = True, **params: Any) -> Contraction:
    """Return the planned contraction of einsum's arguments.

    Raises ParameterInvalid, ShapeMismatch, DtypeUnsupported.
    """
    equation, given = _equation.split(arguments)
    operands = [x if isinstance(x, ArrayHandle) else as_array(x, f"operand {n}") for n, x in enumerate(given)]
    return _planned(equation, operands, optimize, **params)


def tensordot(a: Any, b: Any, axes: Any, **params: Any) -> Contraction:
    """Return the planned contraction of tensordot's arguments. Raises as `einsum`."""
    operands = [x if isinstance(x, ArrayHandle) else as_array(x, name) for name, x in (("a", a), ("b", b))]
    return _planned(_equation.of_tensordot(operands[0].shape, operands[1].shape, axes), operands, True, **params)


def _planned(
    equation: Any,
    operands: Sequence[Any],
    optimize: Any,
    *,
    dtype: Any = None,
    compute: str = "auto",
    memory_limit: int | None = None,
) -> Contraction:
    told = [
        Operand(x.shape, x.dtype.newbyteorder("="), x._seen if isinstance(x, ArrayHandle) else None) for x in operands
    ]
    planned = plan(equation, told, optimize=optimize, dtype=dtype)
    if memory_limit is not None and planned.peak_nbytes > memory_limit:
        raise _errors.ParameterInvalid(
            f"{planned.peak_nbytes} bytes are needed at one time, and memory_limit is {memory_limit}: "
            "another order of contraction may need less (optimize)",
            problem={"parameter": "memory_limit"},
        )
    return Contraction(operands, planned, compute)


def einsum_path(*operands: Any, optimize: Any = True, dtype: Any = None) -> tuple[list[Any], str]:
    """Return the order in which `einsum` contracts, and a report, as numpy.einsum_path: nothing is sent or computed.

    The report has the numbers of products and copies, the operations, the largest intermediate result, and the bytes
    that are needed at one time. Operands may be arrays. Raises ShapeMismatch, ParameterInvalid, DtypeUnsupported.
    """
    planned = einsum(operands, optimize=optimize, dtype=dtype).plan
    return planned.path, planned.report


FUNCTIONS[np.einsum_path] = einsum_path  # as numpy.einsum_path of handles
VIEWS.add(np.einsum_path)

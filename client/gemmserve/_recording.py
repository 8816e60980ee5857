"""Recording of a program: steps, handles' slots, checks. No I/O; both clients record with this."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gemmserve import _errors
from gemmserve._calls import params as _params
from gemmserve._calls.flows import prepare
from gemmserve._remote import ArrayHandle, plain_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from gemmserve._model import ArrayInfo

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


@dataclass(eq=False)
class Slot:
    """A result of a step: what all views of it share."""

    recording: Recording
    name: str
    """Name by which the server knows it: "x2", "y.absmax"."""
    shape: tuple[int, ...] | None = None
    dtype: np.dtype[Any] | None = None
    """Dtype; where this or the shape is None, the server works it out."""
    used: bool = False
    kept: bool = False
    id: str | None = None
    info: ArrayInfo | None = None

    @property
    def reference(self) -> str:
        """Reference by which a step names it."""
        return f"${self.name}"

    def resolved(self) -> str:
        """The array's id. Raises ProgramError while there is none, or if there will be none."""
        if self.id is None:
            raise _errors.ProgramError(self.recording.why_not(self))
        return self.id


@dataclass
class Recording:
    """The steps of one program."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    slots: dict[str, Slot] = field(default_factory=dict)
    state: str = "new"
    """new, open, running, done or failed."""
    _ids: set[str] = field(default_factory=set)
    _keeps: bool = False

    def begin(self) -> None:
        """Opens it, once. Raises ProgramError the second time."""
        if self.state != "new":
            raise _errors.ProgramError("a program is recorded once: ask the client for another")
        self.state = "open"

    def check(
        self, op: str, operands: Mapping[str, Any], params: Mapping[str, Any], name: str | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(operands without None, parameters as JSON); everything that can be known now is checked.

        Raises ProgramError, ParameterInvalid, DtypeUnsupported, ShapeMismatch.
        """
        if self.state != "open":
            raise _errors.ProgramError("steps are recorded inside the program's with block")
        if name is not None and (not isinstance(name, str) or not _NAME.fullmatch(name) or name in self._ids):
            raise _errors.ParameterInvalid(
                f"name must be new, a letter and up to 63 letters, digits, _ and -, not {name!r}",
                problem={"parameter": "name"},
            )
        present, encoded, _ = prepare(op, operands, params)
        for operand, x in present.items():
            slot = getattr(x, "_slot", None)
            if slot is not None and slot.recording is not self:
                slot.resolved()
            if operand == "c" and isinstance(x, ArrayHandle):
                _check_plain(x)
        known = {operand: _stored(x) for operand, x in present.items()}
        if all(each is not None for each in known.values()):
            shapes = {operand: each[0] for operand, each in known.items() if each is not None}
            trans = _composed(present, params)
            _params.check_shapes(
                shapes["a"], shapes["b"], shapes.get("c"), **trans, layout=str(params.get("layout", "interleaved"))
            )
        return present, encoded

    def add(
        self,
        op: str,
        operands: Mapping[str, Any],
        ids: Mapping[str, str],
        params: Mapping[str, Any],
        encoded: Mapping[str, Any],
        name: str | None,
    ) -> dict[str, Slot]:
        """Records a step that `check` has passed; `ids` are of the local operands. Its results, by name."""
        step_id = name or self._fresh()
        step: dict[str, Any] = {"id": step_id, "op": op, **encoded}
        for operand, x in operands.items():
            slot = getattr(x, "_slot", None)
            if slot is not None and slot.recording is self:
                slot.used = True
                step[operand] = slot.reference
            else:
                step[operand] = x.id if isinstance(x, ArrayHandle) else ids[operand]
        for operand, trans in _composed(operands, params).items():
            if trans != "N":
                step[operand] = trans
            else:
                step.pop(operand, None)
        self._ids.add(step_id)
        self.steps.append(step)
        made = self._results(op, step_id, operands, params)
        self.slots |= {slot.name: slot for slot in made.values()}
        return made

    def keep(self, handles: Sequence[Any]) -> None:
        """Keep these as arrays, used or not. Raises ProgramError for a handle that is no result of this program."""
        for handle in handles:
            slot = getattr(handle, "_slot", None)
            if slot is None or slot.recording is not self or self.state != "open":
                raise _errors.ProgramError(f"{handle!r} is no result of a program that is being recorded")
            slot.kept = self._keeps = True

    def job(self, **fields: Any) -> dict[str, Any]:
        """The submission's JSON."""
        job: dict[str, Any] = {"op": "program", "steps": self.steps}
        if self._keeps:
            job["keep"] = [slot.name for slot in self.slots.values() if slot.kept or not slot.used]
        return job | {name: value for name, value in fields.items() if value is not None}

    def resolve(self, result: Mapping[str, str]) -> None:
        """Takes over the ids of the job's results."""
        for name, array_id in result.items():
            if name in self.slots:
                self.slots[name].id = array_id
        self.state = "done"

    def why_not(self, slot: Slot) -> str:
        """Return the reason why a slot has no array."""
        if self.state == "done":
            return f"{slot.reference} was used by another step and not kept: p.keep(...) inside the block keeps it"
        if self.state == "failed":
            return f"{slot.reference} was not computed: the program did not succeed"
        return f"{slot.reference} is there once the program's with block has ended"

    def _fresh(self) -> str:
        number = len(self.steps)
        while f"s{number}" in self._ids:
            number += 1
        return f"s{number}"

    def _results(
        self, op: str, step_id: str, operands: Mapping[str, Any], params: Mapping[str, Any]
    ) -> dict[str, Slot]:
        shape, dtype = _product(operands, params)
        if op == "gemm":
            return {"d": Slot(self, step_id, shape, dtype)}
        names = params.get("reduce", "sum")
        made = {
            name: Slot(self, f"{step_id}.{name}") for name in ([names] if isinstance(names, str) else map(str, names))
        }
        return made | ({"c": Slot(self, f"{step_id}.c", shape, dtype)} if params.get("return_c") else {})


def _stored(x: Any) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
    """Shape and dtype of what is stored, without a view's flags, where that is known here."""
    slot = getattr(x, "_slot", None)
    if slot is not None:
        return None if slot.shape is None else (slot.shape, slot.dtype)
    if isinstance(x, ArrayHandle):
        return None if x._info is None else (x._info.shape, x._info.dtype)
    return x.shape, x.dtype.newbyteorder("=")


def _composed(operands: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for operand in ("a", "b"):
        x, trans = operands[operand], str(params.get(f"trans_{operand}", "N"))
        found[f"trans_{operand}"] = x._compose(trans) if isinstance(x, ArrayHandle) else trans
    return found


def _product(
    operands: Mapping[str, Any], params: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, np.dtype[Any] | None]:
    """Shape and dtype of the product, where those of all operands are known."""
    known: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    for operand, x in operands.items():
        found = _stored(x)
        if found is None:
            return None, None
        known[operand] = found
    return _params.product_of(known, _composed(operands, params), str(params.get("layout", "interleaved")))


def _check_plain(x: ArrayHandle[Any]) -> None:
    slot = getattr(x, "_slot", None)
    if slot is None:
        plain_id(x, "c")
    elif x._transposed or x._conjugated:
        raise _errors.ParameterInvalid(
            "c cannot be a transposed or conjugated view: only a and b have trans flags", problem={"parameter": "c"}
        )

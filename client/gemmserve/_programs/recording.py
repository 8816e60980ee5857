"""Recording of a program: steps, handles' slots, checks. No I/O; both clients record with this."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gemmserve import _errors
from gemmserve._calls import params as _params
from gemmserve._calls.submissions import prepare
from gemmserve._handles.handle import ArrayHandle, base_of
from gemmserve._handles.lifetime import Lifetime
from gemmserve._programs.folding import folded
from gemmserve._transfer.arrays import as_array

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gemmserve._handles.view import Base
    from gemmserve._model import ArrayInfo

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


@dataclass(eq=False)
class Slot:
    """A result of a step: what all views of it share."""

    recording: Recording
    name: str
    """Name by which the server knows it: "x2", "y.absmax"."""
    base: Base | None = None
    """Shape, dtype and order; None: the server works them out."""
    used: bool = False
    kept: bool = False
    id: str | None = None
    info: ArrayInfo | None = None
    lifetime: Lifetime = field(default_factory=Lifetime)

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
    operands: list[Any] = field(default_factory=list)
    """Handles of arrays that steps use, which must be there until the program is submitted."""
    _ids: set[str] = field(default_factory=set)
    _bases: dict[str, dict[str, Base | None]] = field(default_factory=dict)
    """Operands as they are seen, by step and name."""
    _keeps: bool = False

    def begin(self) -> None:
        """Opens it, once. Raises ProgramError the second time."""
        if self.state != "new":
            raise _errors.ProgramError("a program is recorded once: ask the client for another")
        self.state = "open"

    def check(
        self, op: str, operands: Mapping[str, Any], params: Mapping[str, Any], name: str | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(operands without None, parameters as JSON) of a product; everything that can be known now is checked.

        Raises ProgramError, ParameterInvalid, DtypeUnsupported, ShapeMismatch.
        """
        self._check_name(name)
        present, encoded, _ = prepare(op, operands, params)
        self._check_times(present)
        if all(base_of(x) is not None for x in present.values()):
            _params.check_shapes(
                present["a"].shape,
                present["b"].shape,
                present["c"].shape if "c" in present else None,
                trans_a=str(params.get("trans_a", "N")),
                trans_b=str(params.get("trans_b", "N")),
                layout=str(params.get("layout", "interleaved")),
            )
        return present, encoded

    def check_step(self, operands: Mapping[str, Any], name: str | None = None) -> dict[str, Any]:
        """Return the operands of a step that is no product, those on this side as arrays.

        Raises ProgramError, ParameterInvalid, DtypeUnsupported.
        """
        self._check_name(name)
        present = {
            each: x if isinstance(x, ArrayHandle) else as_array(x, each)
            for each, x in operands.items()
            if x is not None
        }
        self._check_times(present)
        return present

    def _check_name(self, name: str | None) -> None:
        if self.state != "open":
            raise _errors.ProgramError("steps are recorded inside the program's with block")
        if name is not None and (not isinstance(name, str) or not _NAME.fullmatch(name) or name in self._ids):
            raise _errors.ParameterInvalid(
                f"name must be new, a letter and up to 63 letters, digits, _ and -, not {name!r}",
                problem={"parameter": "name"},
            )

    def _check_times(self, operands: Mapping[str, Any]) -> None:
        """Raise ProgramError for results of other programs that have no array."""
        for x in operands.values():
            slot = getattr(x, "_slot", None)
            if slot is not None and slot.recording is not self:
                slot.resolved()

    def add(
        self,
        op: str,
        operands: Mapping[str, Any],
        ids: Mapping[str, str],
        params: Mapping[str, Any],
        encoded: Mapping[str, Any],
        name: str | None,
    ) -> dict[str, Slot]:
        """Records a product that `check` has passed; `ids` are of the local operands. Its results, by name."""
        made = _params.results_of(op, {each: base_of(x) for each, x in operands.items()}, params)
        return self.add_step(op, operands, ids, encoded, made, name=name, trans=params)

    def add_step(
        self,
        op: str,
        operands: Mapping[str, Any],
        ids: Mapping[str, str],
        encoded: Mapping[str, Any],
        made: Mapping[str, Base | None],
        *,
        name: str | None = None,
        trans: Mapping[str, Any] | None = None,
    ) -> dict[str, Slot]:
        """Records a step. `ids`: of the local operands; `encoded`: its parameters as JSON; `made`: its results by name,
        "d" for one that the step's id names; `trans`: the flags of a product. Returns the results' slots by name.
        """
        step_id = name or self._fresh()
        step: dict[str, Any] = {"id": step_id, "op": op, **encoded}
        for operand, x in operands.items():
            flag = f"trans_{operand}"
            given = None if trans is None or operand == "c" else str(trans.get(flag, "N"))
            slot = getattr(x, "_slot", None)
            reference: str | None = None
            if slot is not None and slot.recording is self:
                slot.used = True
                reference = slot.reference
            letter = given
            if isinstance(x, ArrayHandle):
                step[operand], letter = x._operand(reference, given)
                self.operands += [] if reference else [x]
            else:
                step[operand] = ids[operand]
            if letter not in {None, "N"}:
                step[flag] = letter
            else:
                step.pop(flag, None)
        self._ids.add(step_id)
        self.steps.append(step)
        self._bases[step_id] = {operand: base_of(x) for operand, x in operands.items()}
        slots = {each: Slot(self, step_id if each == "d" else f"{step_id}.{each}", base) for each, base in made.items()}
        self.slots |= {slot.name: slot for slot in slots.values()}
        return slots

    def keep(self, handles: Sequence[Any]) -> None:
        """Keep these as arrays, used or not. Raises ProgramError for a handle that is no result of this program."""
        for handle in handles:
            slot = getattr(handle, "_slot", None)
            if slot is None or slot.recording is not self or self.state != "open":
                raise _errors.ProgramError(f"{handle!r} is no result of a program that is being recorded")
            slot.kept = self._keeps = True

    def job(self, **fields: Any) -> dict[str, Any]:
        """The submission's JSON."""
        kept = {slot.name for slot in self.slots.values() if slot.kept}
        made = {slot.name: slot.base for slot in self.slots.values()}
        job: dict[str, Any] = {"op": "program", "steps": folded(self.steps, kept, made, self._bases)}
        if self._keeps:
            job["keep"] = [slot.name for slot in self.slots.values() if slot.kept or not slot.used]
        return job | {name: value for name, value in fields.items() if value is not None}

    def resolve(self, result: Mapping[str, str], lifetime_of: Callable[[str], Lifetime]) -> None:
        """Takes over the ids of the job's results; `lifetime_of`: what the handles on an array share, by its id."""
        for name, array_id in result.items():
            if name in self.slots:
                self.slots[name].id = array_id
                self.slots[name].lifetime = lifetime_of(array_id)
        self.state = "done"
        self.operands.clear()

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

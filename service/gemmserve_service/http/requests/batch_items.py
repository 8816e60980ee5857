"""The JSON of /v1/batch: many products of stored arrays, most of them alike."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import Field

from gemmserve_service.errors import InvalidParameters, ServiceError, TooLarge
from gemmserve_service.http.problems import MAX_ERRORS
from gemmserve_service.http.requests.long_json import LONG, read_object
from gemmserve_service.http.requests.strict_json import parse_object, validate
from gemmserve_service.jobs.batch.task import Item, placed
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.schemas import BatchOptions, GemmParams, GemmReduceParams

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Awaitable, Callable, Mapping

    from gemmserve_service.jobs.batch.task import Placed
    from gemmserve_service.settings import Settings
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.pin import Pinned

_MAX_ERRORS: Final = 4  # that are told of one product: there may be ten thousand that are wrong
_ID: Final = re.compile(r"arr_[0-9a-z]{26}(?:_[1-9][0-9]{0,2})?")
_KINDS: Final[dict[object, type[GemmParams | GemmReduceParams]]] = {
    "gemm": GemmParams,
    "gemm_reduce": GemmReduceParams,
}


class _Entry(NamedTuple):
    """Item of a batch as it is kept. Overrides stay text: objects made of megabytes of them would hold everybody up
    whenever the garbage collector looks at them, and when they go.
    """

    a: str
    b: str
    c: str | None = None
    overrides: str = ""
    """Overrides as JSON; empty: there are none."""

    @property
    def operands(self) -> tuple[str, ...]:
        """Ids of the operands."""
        return (self.a, self.b) if self.c is None else (self.a, self.b, self.c)


class _Envelope(BatchOptions):
    """`BatchRequest`, whose items are looked at one by one: `_Entry`, or None."""

    params: dict[str, Any] = Field(default_factory=dict)
    items: list[Any] = Field(min_length=1)


def parse_params(document: dict[str, Any]) -> GemmParams | GemmReduceParams:
    """The params of a product, by their `op` (gemm where there is none). Raises InvalidParameters."""
    op = document.get("op", "gemm")
    kind = _KINDS.get(op) if isinstance(op, str) else None
    if kind is None:
        raise InvalidParameters("params.op is gemm or gemm_reduce")
    params: GemmParams | GemmReduceParams = validate(kind, document)
    return params


class StoredItems:
    """The items of one request."""

    def __init__(self, document: dict[str, Any]) -> None:
        """Raises InvalidParameters for what is wrong with the request apart from its items."""
        self.envelope: _Envelope = validate(_Envelope, document)
        self._params = {"": ("", parse_params(self.envelope.params))}
        """Pairs by the text of overrides: a key that is equal for equal ones, and the params of such products."""

    @classmethod
    async def read(cls, body: bytes | bytearray | memoryview, settings: Settings) -> StoredItems:
        """Read the items and options from the JSON. Others have their turns meanwhile.

        Raises MalformedJson, TooLarge, and InvalidParameters for what is wrong with the request as a whole.
        """
        entries = _Entries(settings.max_batch_items)
        turns = Turns()
        if len(body) < LONG:
            document = parse_object(body)
            if isinstance(listed := document.get("items"), list):
                document["items"] = [entries.keep(number, entry) for number, entry in enumerate(listed)]
        else:
            document = await read_object(body, {"items": entries.keep}, turns)
        stored = cls(document)
        if entries.errors:
            first = entries.errors[0]
            raise InvalidParameters(f"{first['field']}: {first['message']}", entries.errors)
        return stored

    async def makers(self, elsewhere: Callable[[str], int | None]) -> dict[str, int | None]:
        """Return what `elsewhere` says of each operand's id. Others have their turns meanwhile."""
        found: dict[str, int | None] = {}
        turns = Turns()
        for entry in self.envelope.items:
            for array_id in entry.operands:
                if array_id not in found:
                    found[array_id] = elsewhere(array_id)
            await turns.pause()
        return found

    async def pin(
        self,
        store: ArrayStore,
        held: contextlib.ExitStack,
        owner: str,
        readable: Callable[[Pinned], Awaitable[object]],
        there: Callable[[list[Pinned]], Awaitable[object]],
        away: Mapping[str, int],
    ) -> list[Item | ServiceError]:
        """Every product with its operands held, or what is wrong with it. Others have their turns meanwhile.

        `readable` returns when an operand's bytes can be read, `there` when all are in the store that are in its tier;
        what they raise is raised. `away`: cells that made operands which this one has not; their products are wrong.
        """
        pins: dict[str, Pinned | ServiceError] = {
            name: InvalidParameters(
                f"cell {cell} has {name}: a batch takes operands of one cell, jobs those of several"
            )
            for name, cell in away.items()
        }

        def release() -> None:
            for pinned in pins.values():
                if not isinstance(pinned, ServiceError):
                    pinned.release()

        held.callback(release)
        turns = Turns()
        for entry in self.envelope.items:
            for array_id in entry.operands:
                if array_id not in pins:
                    try:
                        pins[array_id] = store.pin(array_id, owner=owner)
                    except ServiceError as error:
                        pins[array_id] = error
            await turns.pause()
        # A batch reads them where they lie together: not from the device that has some.
        found = [pinned for pinned in pins.values() if not isinstance(pinned, ServiceError)]
        await there(found)
        await asyncio.gather(*(readable(pinned) for pinned in found if pinned.pending is not None))
        arrays = {name: pin if isinstance(pin, ServiceError) else placed(pin) for name, pin in pins.items()}

        def operand(array_id: str) -> Placed:
            found = arrays[array_id]
            if isinstance(found, ServiceError):
                raise found
            return found

        items: list[Item | ServiceError] = []
        for entry in self.envelope.items:
            try:
                items.append(self._item(entry, operand))
            except ServiceError as error:
                items.append(_alone(error))
            await turns.pause()
        return items

    def _item(self, entry: _Entry, operand: Callable[[str], Placed]) -> Item:
        operands = {"a": operand(entry.a), "b": operand(entry.b)}
        if entry.c is not None:
            operands["c"] = operand(entry.c)
        found = self._params.get(entry.overrides)
        if found is None:
            found = self._params[entry.overrides] = self._overridden(json.loads(entry.overrides))
        key, params = found
        if "c" in operands and isinstance(params, GemmReduceParams):
            raise InvalidParameters("gemm_reduce has no c")
        return Item(params, key, operands)

    def _overridden(self, overrides: dict[str, Any]) -> tuple[str, GemmParams | GemmReduceParams]:
        if "op" in overrides:
            raise InvalidParameters("op is the same for every product of a batch")
        fields = type(self._params[""][1]).model_fields
        # More would not be told of them, and to complain of sixty takes a tenth of a millisecond.
        for name in [name for name in overrides if name not in fields][_MAX_ERRORS:]:
            del overrides[name]
        try:
            return json.dumps(overrides, sort_keys=True), parse_params(self.envelope.params | overrides)
        except InvalidParameters as error:
            listed = error.extra.get("errors", [])[:_MAX_ERRORS]
            said = [f"{entry['field']}: {entry['message']}" for entry in listed] or [error.detail]
            raise InvalidParameters("; ".join(said), listed) from None


def _alone(error: ServiceError) -> ServiceError:
    """Strip an error of its causes: ten thousand of them would keep as many stacks, with all that was in them."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


class _Entries:
    """Reader of the items of one request, each as it comes."""

    def __init__(self, most: int) -> None:
        self.errors: list[dict[str, str]] = []
        """Some of what makes items none."""
        self._most = most
        self._seen: set[str] = set()
        """Ids that were looked at, for they come often."""

    def keep(self, number: int, entry: object) -> _Entry | None:
        """Return what is kept of the item with that number, from 0 on; None where it is no item. Raises TooLarge."""
        if number >= self._most:
            raise TooLarge(f"a batch of more than {self._most} products, which this server takes")
        if not isinstance(entry, dict):
            self._wrong(f"items.{number}", "an item is an object")
            return None
        a, b, c = entry.pop("a", None), entry.pop("b", None), entry.pop("c", None)
        named = {"a": a, "b": b} if c is None else {"a": a, "b": b, "c": c}
        wrong = [name for name, value in named.items() if not self._is_id(value)]
        for name in wrong:
            self._wrong(f"items.{number}.{name}", "the id of an array is needed")
        return None if wrong else _Entry(a, b, c, json.dumps(entry) if entry else "")

    def _is_id(self, value: object) -> bool:
        if not isinstance(value, str):
            return False
        if value not in self._seen:
            if not _ID.fullmatch(value):
                return False
            self._seen.add(value)
        return True

    def _wrong(self, field: str, message: str) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"field": field, "message": message})

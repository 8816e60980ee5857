"""The JSON of /v1/batch: many products of stored arrays, most of them alike."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from gemmserve_service.batches import Item, Placed, placed
from gemmserve_service.errors import ServiceError, TooLarge
from gemmserve_service.long_json import LONG, read_object
from gemmserve_service.problems import MAX_ERRORS, InvalidParameters
from gemmserve_service.schemas import ArrayId, GemmParams, GemmReduceParams, Strict
from gemmserve_service.strict_json import parse_object, validate
from gemmserve_service.turns import Turns

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator

    from gemmserve_service.pins import Pinned
    from gemmserve_service.settings import Settings
    from gemmserve_service.store import ArrayStore

_MOST_ERRORS: Final = 4  # that are told of one product: there may be ten thousand that are wrong
_ID: Final = re.compile(r"arr_[0-9a-z]{26}")
_KINDS: Final[dict[object, type[GemmParams | GemmReduceParams]]] = {
    "gemm": GemmParams,
    "gemm_reduce": GemmReduceParams,
}


class BatchItem(BaseModel):
    """One product. Fields of `params` may follow that differ for this one."""

    model_config = ConfigDict(extra="allow")

    a: ArrayId
    b: ArrayId
    c: ArrayId | None = None


class BatchRequest(Strict):
    """Many products of stored arrays. What is wrong with one of them is told of it; the others are computed."""

    params: GemmParams | GemmReduceParams = Field(GemmParams(), description="of every product", discriminator="op")
    items: list[BatchItem] = Field(min_length=1)
    results: Literal["inline", "packed", "each"] = Field(
        "inline",
        description="inline: in the answer, as .npy or .npz; packed: one stored array, the products along its first "
        "axis, if their results have one shape; each: a stored array for every product",
    )
    verify: bool = Field(default=False, description="check every product, and report the largest residual")
    priority: int = Field(0, ge=-100, le=100, description="higher runs first")
    timeout_s: float | None = Field(None, gt=0, le=86_400, description="covers queue and run")
    ttl_s: float | None = Field(
        None, gt=0, le=31_536_000, description="life of stored results; null: the server's default"
    )


class _Envelope(Strict):
    """`BatchRequest`, whose items are looked at one by one."""

    params: dict[str, Any] = Field(default_factory=dict)
    items: list[Any] = Field(min_length=1)
    results: Literal["inline", "packed", "each"] = "inline"
    verify: bool = False
    priority: int = Field(0, ge=-100, le=100)
    timeout_s: float | None = Field(None, gt=0, le=86_400)
    ttl_s: float | None = Field(None, gt=0, le=31_536_000)


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
        self._params = {"": parse_params(self.envelope.params)}
        self.pins: list[Pinned] = []
        """Holds on the operands, from `pin` on."""

    @classmethod
    async def read(cls, body: bytes | bytearray, settings: Settings) -> StoredItems:
        """What the JSON asks for. Others have their turns meanwhile.

        Raises MalformedJson, TooLarge, and InvalidParameters for what is wrong with the request as a whole.
        """

        def check(count: int) -> None:
            if count > settings.max_batch_items:
                raise TooLarge(f"a batch of more than {settings.max_batch_items} products, which this server takes")

        document = parse_object(body) if len(body) < LONG else await read_object(body, {"items": check})
        stored = cls(document)
        check(len(stored.envelope.items))
        plain: set[object] = set()
        errors: list[dict[str, str]] = []
        turns = Turns()
        for number, entry in enumerate(stored.envelope.items):
            if not _is_plain(entry, plain):
                errors += _malformed(number, entry)
                if len(errors) >= MAX_ERRORS:
                    break
            await turns.pause()
        if errors:
            raise InvalidParameters(errors[0]["field"] + ": " + errors[0]["message"], errors[:MAX_ERRORS])
        return stored

    async def pin(self, store: ArrayStore, held: contextlib.ExitStack, owner: str) -> list[Item | ServiceError]:
        """Every product with its operands held, or what is wrong with it. Others have their turns meanwhile."""
        arrays: dict[str, Placed | ServiceError] = {}
        pins = self.pins

        def release() -> None:
            for pinned in pins:
                pinned.release()

        held.callback(release)

        def operand(array_id: str) -> Placed:
            found = arrays.get(array_id)
            if found is None:
                try:
                    pins.append(store.pin(array_id, owner=owner))
                    found = placed(pins[-1])
                except ServiceError as error:
                    found = error
                arrays[array_id] = found
            if isinstance(found, ServiceError):
                raise found
            return found

        items: list[Item | ServiceError] = []
        async for some in Turns().slices(self.envelope.items):
            for entry in some:
                try:
                    items.append(self._item(entry, operand))
                except ServiceError as error:
                    items.append(_alone(error))
        return items

    def _item(self, entry: dict[str, Any], operand: Callable[[str], Placed]) -> Item:
        if len(entry) == 2:  # a and b alone, as most have
            return Item(self._params[""], "", {"a": operand(entry["a"]), "b": operand(entry["b"])})
        names = ("a", "b") if entry.get("c") is None else ("a", "b", "c")
        operands = {name: operand(entry[name]) for name in names}
        overrides = {name: value for name, value in entry.items() if name not in {"a", "b", "c"}}
        key = json.dumps(overrides, sort_keys=True) if overrides else ""
        params = self._params.get(key)
        if params is None:
            if "op" in overrides:
                raise InvalidParameters("op is the same for every product of a batch")
            try:
                params = self._params[key] = parse_params(self.envelope.params | overrides)
            except InvalidParameters as error:
                listed = error.extra.get("errors", [])[:_MOST_ERRORS]
                said = [f"{entry['field']}: {entry['message']}" for entry in listed] or [error.detail]
                raise InvalidParameters("; ".join(said), listed) from None
        if "c" in operands and isinstance(params, GemmReduceParams):
            raise InvalidParameters("gemm_reduce has no c")
        return Item(params, key, operands)


def _alone(error: ServiceError) -> ServiceError:
    """Without what it came of: ten thousand of them would keep as many stacks, with all that was in them."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def _is_plain(entry: object, plain: set[object]) -> bool:
    """Whether an item is well-formed, with a and b alone. `plain`: ids that were looked at, for they come often."""
    if not isinstance(entry, dict) or len(entry) != 2:
        return False
    for name in ("a", "b"):
        value = entry.get(name)
        if not isinstance(value, str):
            return False
        if value not in plain:
            if not _ID.fullmatch(value):
                return False
            plain.add(value)
    return True


def _malformed(number: int, entry: object) -> Iterator[dict[str, str]]:
    """What makes an item none."""
    if not isinstance(entry, dict):
        yield {"field": f"items.{number}", "message": "an item is an object"}
        return
    for name in ("a", "b", "c"):
        value = entry.get(name)
        if value is None and name == "c":
            continue
        if not isinstance(value, str) or not _ID.fullmatch(value):
            yield {"field": f"items.{number}.{name}", "message": "the id of an array is needed"}

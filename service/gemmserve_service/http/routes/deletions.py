"""/v1/deletions: many arrays at once, by their ids, or by name, labels and age."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from gemmserve.wire import MAX_DELETED
from gemmserve_service.errors import InvalidParameters
from gemmserve_service.http.cells.redirects import check_ids
from gemmserve_service.http.openapi import documentation as doc
from gemmserve_service.http.requests.long_json import LONG, read_object, validate_each
from gemmserve_service.http.requests.strict_json import parse_object, read_json, too_large, validate
from gemmserve_service.http.routes.common import ViewQuery, core_of, render, view_of
from gemmserve_service.runtime.clock import now
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.schemas import ArrayId, Deleted, Deletion
from gemmserve_service.store.record import Tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve_service.jobs.core import Core
    from gemmserve_service.schemas import ArrayInfo
    from gemmserve_service.store.array_store import ArrayStore

router = APIRouter(tags=["arrays"], default_response_class=Response)

_MAX_BODY: Final = 64 << 10
_WHAT: Final = "a choice of arrays"
_ID: Final[TypeAdapter[str]] = TypeAdapter(ArrayId)


@router.post(
    "/v1/deletions",
    summary="Delete arrays",
    responses={
        200: doc.model(Deleted, "Deleted, or counted."),
        **doc.problems(
            "other-cell", "malformed-json", "invalid-request", "too-large", "unsupported-media-type",
            "parameter-invalid", "store-full",
        ),
    },
    openapi_extra=doc.json_body(
        Deletion,
        examples={
            "by id": {"ids": ["arr_01jd2w7m4h8k3n5p6q9r0s1t2v"]},
            "by label and age": {"labels": {"run": "7"}, "older_than_s": 3600, "dry_run": True},
        },
    ),
)  # fmt: skip
async def delete(request: Request, query: Annotated[ViewQuery, Query()]) -> Response:
    """Hides arrays at once, all by one transaction; their bytes are freed as after `DELETE /v1/arrays/{array_id}`. Ids
    that are gone already are no error, so that the request may be repeated. Without `ids` it takes the oldest of those
    that are chosen; one that chooses nothing is refused (`"older_than_s": 0` means all).

    Of several cells each answers for its own arrays: ids that are all one other cell's are sent on to it (307), of
    mixed ones those of other cells come back as `elsewhere`. Names, labels and ages choose among the cell's own.
    """
    core, owner = core_of(request), view_of(request, query)
    asked = await _parsed(await read_json(request, _MAX_BODY, _WHAT))
    if asked.ids is None:
        return await _delete_chosen(core.store, asked, owner)
    ids, elsewhere = check_ids(core.cells, request, asked.ids)
    return await _delete_ids(core.store, asked, ids, owner, elsewhere)


async def answer(core: Core, body: bytes, owner: str) -> Response:
    """Delete what a JSON text chooses, where there are no other cells; return the answer. Raises ServiceError."""
    if len(body) > _MAX_BODY:
        raise too_large(_MAX_BODY, _WHAT)
    asked = await _parsed(body)
    if asked.ids is None:
        return await _delete_chosen(core.store, asked, owner)
    return await _delete_ids(core.store, asked, asked.ids, owner)


async def _delete_ids(
    store: ArrayStore, asked: Deletion, ids: Sequence[str], owner: str, elsewhere: Sequence[str] = ()
) -> Response:
    if asked.dry_run:
        infos, missing = store.find(ids, owner=owner)
    else:
        infos, missing = await store.delete_all(ids, owner=owner)
    return _answer(infos, missing, elsewhere)


async def _delete_chosen(store: ArrayStore, asked: Deletion, owner: str) -> Response:
    before = None if asked.older_than_s is None else now() - timedelta(seconds=min(asked.older_than_s, _SECONDS))
    tags = Tags(asked.name, asked.labels)
    limit = None if asked.dry_run else MAX_DELETED + 1
    infos = await store.select(owner=owner, tags=tags, created_before=before, limit=limit)
    if asked.dry_run:
        return _answer(infos)
    deleted, _ = await store.delete_all([info.id for info in infos[:MAX_DELETED]], owner=owner)
    return _answer(deleted, more=len(infos) > MAX_DELETED)


_SECONDS: Final = 60.0 * 365 * 86_400  # before that nobody made arrays, and datetime's first year is out of reach


def _answer(
    infos: Sequence[ArrayInfo], missing: Sequence[str] = (), elsewhere: Sequence[str] = (), *, more: bool = False
) -> Response:
    nbytes = sum(info.nbytes for info in infos)
    return render(Deleted(count=len(infos), nbytes=nbytes, missing=list(missing), elsewhere=list(elsewhere), more=more))


async def _parsed(body: bytes | bytearray) -> Deletion:
    """The choice. Raises ServiceError."""
    if len(body) < LONG:
        document = parse_object(body)
    else:
        turns = Turns()
        document = await read_object(body, {"ids": _counted}, turns)
        if isinstance(document.get("ids"), list):
            document["ids"] = await validate_each(_ID, document["ids"], "ids", turns)
    asked: Deletion = validate(Deletion, document)
    chosen = (asked.name, asked.labels or None, asked.older_than_s)
    if (asked.ids is None) == all(each is None for each in chosen):
        message = "either ids, or one of name, labels and older_than_s"
        raise InvalidParameters(f"ids: {message}", [{"field": "ids", "message": message}])
    return asked


def _counted(number: int, element: Any) -> Any:
    if number >= MAX_DELETED:
        raise InvalidParameters(
            f"ids: {MAX_DELETED} are the most", [{"field": "ids", "message": f"{MAX_DELETED} are the most"}]
        )
    return element

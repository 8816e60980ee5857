"""Parts that several routes share: the core of the running app, rendered models, paging, timings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, cast
from urllib.parse import urlencode

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.responses import Response

from gemmserve.wire import ELEMENTS_HEADER
from gemmserve_service.errors import InvalidParameters
from gemmserve_service.http.problems import describe_validation
from gemmserve_service.http.requests.queries import Integer  # noqa: TC001 (pydantic resolves it at run time)
from gemmserve_service.schemas import ArrayName, Labels
from gemmserve_service.store.record import Tags

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

    from gemmserve_service.jobs.core import Core
    from gemmserve_service.schemas import Elements, Timings
    from gemmserve_service.tenancy.identity import Caller

ArrayPath = Annotated[str, Path(description="id of an array", examples=["arr_01jd2w7m4h8k3n5p6q9r0s1t2v"])]
JobPath = Annotated[str, Path(description="id of a job", examples=["job_01jd2w7m4h8k3n5p6q9r0s1t2v"])]


class ViewQuery(BaseModel):
    """Choice between the caller's own things and everybody's."""

    model_config = ConfigDict(extra="forbid")

    all: bool = Field(
        default=False, description="everybody's, not only what belongs to the key's owner; needs the scope admin"
    )


class PageQuery(ViewQuery):
    """Position in a listing."""

    limit: Integer = Field(100, ge=1, le=1000, description="entries on a page")
    cursor: str | None = Field(None, max_length=256, description="next_cursor of the page before")


class TagsQuery(BaseModel):
    """Name and labels of an array."""

    name: ArrayName | None = Field(None, description="of the array; several may have the same")
    label: list[str] = Field(
        default_factory=list,
        max_length=16,
        description="key=value, any number of times",
        json_schema_extra={"examples": [["run=7"]]},
    )

    @property
    def tags(self) -> Tags:
        """Return the name and the labels. Raises InvalidParameters for what is no label, and a key given twice."""
        labels: dict[str, str] = {}
        for text in self.label:
            key, equals, value = text.partition("=")
            if not equals or key in labels:
                message = "a label is key=value" if not equals else "the label is given twice"
                raise InvalidParameters(f"label: {message}", [{"field": "label", "message": message}])
            labels[key] = value
        try:
            return Tags(self.name, _LABELS.validate_python(labels))
        except ValidationError as error:
            listed = [{**entry, "loc": ("label", *entry["loc"])} for entry in error.errors(include_url=False)]
            raise InvalidParameters(*describe_validation(listed)) from None


_LABELS: Final[TypeAdapter[dict[str, str]]] = TypeAdapter(Labels)


def core_of(request: Request) -> Core:
    """The core that the app was made with."""
    return cast("Core", request.app.state.core)


def caller_of(request: Request) -> Caller:
    """Return the caller that `access.Access` identified."""
    return cast("Caller", request.state.caller)


def view_of(request: Request, query: ViewQuery) -> str:
    """Return the owner whose things the request may see, or "" for everybody's. Raises Forbidden."""
    return caller_of(request).view(everybody=query.all)


def render(model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A model as JSON that nobody caches."""
    return Response(
        model.model_dump_json(), status, {"Cache-Control": "no-store", **(headers or {})}, media_type="application/json"
    )


def page_headers(request: Request, query: BaseModel, next_cursor: str | None) -> dict[str, str]:
    """The Link to the next page (RFC 8288), if there is one."""
    if next_cursor is None:
        return {}
    fields = {**query.model_dump(mode="json", exclude_defaults=True), "cursor": next_cursor}
    return {"Link": f'<{request.url.path}?{urlencode(fields, doseq=True)}>; rel="next"'}


def elements_header(elements: Elements | None) -> dict[str, str]:
    """Gemm-Elements, a dictionary of integers (RFC 9651), where there is something to say."""
    if elements is None:
        return {}
    return {ELEMENTS_HEADER: ", ".join(f"{route}={count}" for route, count in elements)}


def server_timing(timings: Timings, receive_s: float | None = None, whole_s: float | None = None) -> str:
    """Server-Timing's value: milliseconds by phase.

    `receive_s`: of the body. `whole_s`: of the request until now; what the phases leave of it is "handover", what it
    takes to tell a worker and to hear of it.
    """
    text = (
        f"queue;dur={timings.queue_s * 1e3:.3f}, h2d;dur={timings.h2d_s * 1e3:.3f}, "
        f"kernel;dur={timings.kernel_s * 1e3:.3f}, d2h;dur={timings.d2h_s * 1e3:.3f}"
    )
    if timings.compile_s:
        text = f"compile;dur={timings.compile_s * 1e3:.3f}, {text}"
    if timings.verify_s:
        text += f", verify;dur={timings.verify_s * 1e3:.3f}"
    if receive_s is not None:
        text = f"receive;dur={receive_s * 1e3:.3f}, {text}"
    if whole_s is None:
        return text
    device_s = timings.h2d_s + timings.kernel_s + timings.d2h_s + timings.verify_s
    known_s = timings.queue_s + timings.compile_s + device_s + (receive_s or 0.0)
    return f"{text}, handover;dur={max(whole_s - known_s, 0.0) * 1e3:.3f}"

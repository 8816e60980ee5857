"""One function a route: what to send and what reads the answer. No I/O; both clients send what is built here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np

from gemmserve import _errors
from gemmserve._calls.params import gemm_nbytes
from gemmserve._model import ArrayInfo, JobInfo
from gemmserve._transfer import parts
from gemmserve._transfer.arrays import is_fortran
from gemmserve._transfer.bodies import (
    Body,
    MultipartBody,
    NpyBody,
    Receiver,
    Whole,
    json_body,
    parse_json,
    receive_arrays,
)
from gemmserve._transport.content_coding import ZSTD
from gemmserve._transport.digests import field_value
from gemmserve.wire import IDEMPOTENCY_HEADER, NPY, NPZ, OCTET_STREAM

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from gemmserve._transfer.arrays import AnyArray
    from gemmserve._transfer.parts import Span, Stretch

T = TypeVar("T")

Query: TypeAlias = "Mapping[str, str | int | float | Sequence[str]]"
"""Fields of a query; those of a sequence are given several times."""

LONG_POLL_S = 30.0
"""One long poll's length: below the minute after which common proxies drop a silent connection (nginx
proxy_read_timeout 60 s)."""

ONE_SHOT_WAIT_S = 3600.0
"""Seconds that a one-shot product may keep silent when no timeout is given: no computed figure, but a server that
vanished without closing its connection must not hold a client for ever."""


@dataclass(frozen=True)
class Request(Generic[T]):
    """One exchange: `receiver` makes, from the answer's headers, what takes its body and gives its value."""

    method: str
    path: str
    receiver: Callable[[Mapping[str, str]], Receiver[T]]
    query: Query = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body | None = None
    label: str = ""
    """Name of the transfer beside its progress bar."""
    wait_s: float = 0.0
    """Seconds that the server may rightly keep silent, on top of the client's own timeout."""
    limit_s: float | None = None
    """Upper bound on the seconds of silence, whatever the client's timeout; None: that timeout alone."""
    digest: Literal["content", "repr", "none"] = "content"
    """Digest that the answer can have (RFC 9530): of what is sent, or of the whole that it is part of."""
    idle: bool = False
    """Whether the server does nothing for it but wait: such requests do not count among those at one time."""
    result_nbytes: int = 0
    """Bytes of the array that is the answer, where that is known beforehand; shared memory for it is then at hand."""


@dataclass(frozen=True)
class Together:
    """Flows that run at the same time, at most `limit` of them; the first error ends the others.

    `label` and `nbytes` are those of their common progress bar.
    """

    flows: Sequence[Generator[Any, Any, Any]]
    limit: int
    label: str
    nbytes: int


@dataclass(frozen=True)
class Work(Generic[T]):
    """Computation that takes its time; like a pause, it sends nothing."""

    call: Callable[[], T]


@dataclass(frozen=True)
class Pause:
    """Pause of so many seconds, in which nothing is sent but the question whether the server speaks TLS, where it may
    be that which went wrong.
    """

    seconds: float
    after: _errors.GemmserveError | None = None
    """Failure that it follows."""
    spare_s: float = 0.0
    """Seconds that the pause may take longer by."""


def _json(parse: Callable[[Any], T]) -> Callable[[Mapping[str, str]], Receiver[T]]:
    return lambda _headers: Whole(lambda data: parse(parse_json(data)))


def _nothing(_headers: Mapping[str, str]) -> Receiver[None]:
    return Whole(lambda _data: None)


def put_array(
    array: AnyArray,
    *,
    query: Query | None = None,
    digest: bool = False,
    label: str = "put",
    compressed: Body | None = None,
) -> Request[ArrayInfo]:
    """Stores an array, as `compressed` if there is that; with `digest` after a pass over the body for its
    Content-Digest (RFC 9530). `query`: of `kept`.
    """
    body = compressed or NpyBody(array)
    headers = {"Content-Digest": field_value(body.pieces())} if digest else {}
    if compressed is not None:
        headers["Content-Encoding"] = ZSTD
    return Request(
        "POST", "/v1/arrays", _json(ArrayInfo.parse), query=query or {}, headers=headers, body=body, label=label
    )


def kept(*, ttl_s: float | None = None, name: str | None = None, labels: Mapping[str, str] | None = None) -> Query:
    """The query that says for how long an array is kept, and by which name and labels; also what a listing filters by.

    Raises ParameterInvalid for what is no name or labels.
    """
    query: dict[str, str | int | float | Sequence[str]] = {} if ttl_s is None else {"ttl_s": ttl_s}
    return query | tags_query(name, labels)


def tags_query(name: str | None, labels: Mapping[str, str] | None) -> dict[str, str | Sequence[str]]:
    """Name and labels as fields of a query. Raises ParameterInvalid for other types; the server checks the rest."""
    found: dict[str, str | Sequence[str]] = {} if name is None else {"name": _text("name", name)}
    if labels:
        found["label"] = [f"{key}={value}" for key, value in texts(labels).items()]
    return found


def view_query(*, everybody: bool) -> dict[str, str]:
    """Choice between the key's owner's things and everybody's, as a field of a query."""
    return {"all": "true"} if everybody else {}


def texts(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels as they are sent. Raises ParameterInvalid unless they are a mapping of strings."""
    try:
        return {_text("labels", key): _text("labels", value) for key, value in labels.items()}
    except AttributeError:
        message = f"labels are a mapping of strings, not {type(labels).__name__}"
        raise _errors.ParameterInvalid(message, problem={"parameter": "labels"}) from None


def _text(parameter: str, value: object) -> str:
    if not isinstance(value, str):
        message = f"{parameter}: a string is expected, not {type(value).__name__}"
        raise _errors.ParameterInvalid(message, problem={"parameter": parameter})
    return value


def array_info(array_id: str, *, limit_s: float | None = None) -> Request[ArrayInfo]:
    """Request the metadata of an array."""
    return Request("GET", f"/v1/arrays/{segment(array_id)}", _json(ArrayInfo.parse), limit_s=limit_s)


def array_sample(array_id: str, *, limit_s: float | None = None) -> Request[AnyArray | None]:
    """Request some elements of an array, of two dimensions; None: they are on a device alone."""
    path = f"/v1/arrays/{segment(array_id)}/sample"

    def receiver(headers: Mapping[str, str]) -> Receiver[Any]:
        return receive_arrays(headers) if headers.get("content-type") else Whole(lambda _data: None)

    return Request("GET", path, receiver, headers={"Accept": NPY}, limit_s=limit_s)


def array_data(array_id: str, *, nbytes: int = 0, compression: bool = False) -> Request[AnyArray | dict[str, AnyArray]]:
    """An array's elements; `nbytes` where they are known. `compression`: they may come compressed."""
    path = f"/v1/arrays/{segment(array_id)}/data"
    headers = {"Accept": NPY} | ({"Accept-Encoding": ZSTD} if compression else {})
    return Request("GET", path, receive_arrays, headers=headers, label="get", digest="repr", result_nbytes=nbytes)


def array_part(array_id: str, span: Span) -> Request[int]:
    """Request the missing bytes of a span of an array's .npy file; the value is the position where it ends."""
    path = f"/v1/arrays/{segment(array_id)}/data"
    return Request("GET", path, span.answer, headers={"Accept": NPY, **span.headers()}, label="get", digest="repr")


def array_stretch(array_id: str, stretch: Stretch) -> Request[int]:
    """Request the missing bytes of a stretch of an array's bare data; the value is the position where it ends."""
    path = f"/v1/arrays/{segment(array_id)}/data"
    headers = {"Accept": OCTET_STREAM, **stretch.headers()}
    return Request("GET", path, stretch.answer, headers=headers, label="get", digest="none")


@dataclass(frozen=True)
class Begun:
    """An upload in parts."""

    id: str
    part: int
    """Bytes of a part."""
    received: tuple[tuple[int, int], ...] = ()


def begin_upload(array: AnyArray, *, query: Query) -> Request[Begun]:
    """An upload in parts of an array that is `divisible`. `query`: of `kept`."""
    query = {
        **query,
        "dtype": array.dtype.name,
        "shape": ",".join(map(str, array.shape)),
        "order": "F" if is_fortran(array) else "C",
    }
    return Request("POST", "/v1/uploads", _json(_begun), query=query, body=Body(OCTET_STREAM, ()))


def _begun(value: Any) -> Begun:
    try:
        received = tuple((int(start), int(end)) for start, end in value["received"])
        return Begun(segment(value["id"]), max(1, min(parts.PART, int(value["max_part_bytes"]))), received)
    except (KeyError, TypeError, ValueError) as error:
        raise _errors.ProtocolError(f"the answer describes no upload: {error!r}") from error


def upload_info(upload_id: str) -> Request[Begun]:
    """Request the state of an upload: the parts of it that have come."""
    return Request("GET", f"/v1/uploads/{upload_id}", _json(_begun))


def send_part(upload_id: str, offset: int, data: memoryview, *, digest: bool, label: str) -> Request[None]:
    """The array's bytes from `offset` on."""
    body = Body(OCTET_STREAM, [np.asarray(data)])
    headers = {"Content-Digest": field_value(body.pieces())} if digest else {}
    path = f"/v1/uploads/{upload_id}/parts/{offset}"
    return Request("PUT", path, _nothing, headers=headers, body=body, label=label)


def complete_upload(upload_id: str) -> Request[ArrayInfo]:
    """Makes an upload an array; may be repeated."""
    return Request("POST", f"/v1/uploads/{upload_id}/complete", _json(ArrayInfo.parse))


def cancel_upload(upload_id: str, *, limit_s: float | None = None) -> Request[None]:
    """Gives an upload up."""
    return Request("DELETE", f"/v1/uploads/{upload_id}", _nothing, limit_s=limit_s)


def delete_array(array_id: str) -> Request[None]:
    """Hides an array at once; its bytes go when no job needs them."""
    return Request("DELETE", f"/v1/arrays/{segment(array_id)}", _nothing)


@dataclass(frozen=True)
class Deleted:
    """Outcome of one exchange."""

    count: int
    more: bool
    """Whether more were chosen than one exchange deletes."""


def delete_arrays(choice: Mapping[str, Any], *, limit_s: float | None = None) -> Request[Deleted]:
    """Deletes arrays by `ids`, or by `name`, `labels` and `older_than_s`; may be repeated."""

    def parse(value: Any) -> Deleted:
        try:
            return Deleted(int(value["count"]), bool(value["more"]))
        except (KeyError, TypeError, ValueError) as error:
            raise _errors.ProtocolError(f"the answer does not say what was deleted: {error!r}") from error

    return Request("POST", "/v1/deletions", _json(parse), body=json_body(choice), limit_s=limit_s)


def page(path: str, query: Query) -> Request[dict[str, Any]]:
    """One page of a listing."""
    return Request("GET", path, _json(_object), query=query)


def submit(job: Mapping[str, Any], *, key: str, wait_s: float = 0.0, limit_s: float | None = None) -> Request[JobInfo]:
    """Submits a job; with `wait_s` the answer comes when it is done, or after that time."""
    headers = {IDEMPOTENCY_HEADER: key}
    if wait_s > 0:
        headers["Prefer"] = f"wait={max(1, round(wait_s))}"
    body = json_body(job)
    return Request("POST", "/v1/jobs", _json(JobInfo.parse), headers=headers, body=body, wait_s=wait_s, limit_s=limit_s)


def submit_many(
    jobs: Sequence[Mapping[str, Any]], *, key: str, wait_s: float = 0.0, limit_s: float | None = None
) -> Request[list[JobInfo]]:
    """Submits jobs together; with `wait_s` the answer comes when all are done, or after that time. Sent again with the
    same key it asks for their states.
    """
    headers = {IDEMPOTENCY_HEADER: key}
    if wait_s > 0:
        headers["Prefer"] = f"wait={max(1, round(wait_s))}"

    def parse(value: Any) -> list[JobInfo]:
        listed = _object(value).get("jobs")
        if not isinstance(listed, list) or len(listed) != len(jobs):
            raise _errors.ProtocolError(f"the answer does not list the {len(jobs)} jobs")
        # The answer leaves out what was asked.
        return [JobInfo.parse({**_object(each), "request": job}) for each, job in zip(listed, jobs, strict=True)]

    body = json_body({"jobs": jobs})
    return Request("POST", "/v1/jobs", _json(parse), headers=headers, body=body, wait_s=wait_s, limit_s=limit_s)


def job_info(job_id: str, *, wait_s: float = 0.0) -> Request[JobInfo]:
    """A job's state; with `wait_s` once it is final, or after that time."""
    query: Query = {"wait": round(wait_s, 3)} if wait_s > 0 else {}
    path = f"/v1/jobs/{segment(job_id)}"
    return Request("GET", path, _json(JobInfo.parse), query=query, wait_s=wait_s, idle=wait_s > 0)


def job_states(ids: Sequence[str], *, wait_s: float = 0.0) -> Request[list[JobInfo]]:
    """The first of those jobs, and of the others those that are final, without their requests; less what the server
    does not know. With `wait_s` once the first is final, or after that time. May be repeated.
    """

    def parse(value: Any) -> list[JobInfo]:
        listed = _object(value).get("jobs")
        if not isinstance(listed, list):
            raise _errors.ProtocolError("the answer does not list jobs")
        return [JobInfo.parse(each) for each in listed]

    question: dict[str, Any] = {"ids": list(ids), "final": True}
    if wait_s > 0:
        question["wait"] = round(wait_s, 3)
    body = json_body(question)
    return Request("POST", "/v1/job-states", _json(parse), body=body, wait_s=wait_s, idle=wait_s > 0)


def cancel_job(job_id: str, *, limit_s: float | None = None) -> Request[JobInfo | None]:
    """Cancels a job that is not final yet."""
    return Request(
        "DELETE",
        f"/v1/jobs/{segment(job_id)}",
        lambda _headers: Whole(lambda data: JobInfo.parse(parse_json(data)) if data else None),
        limit_s=limit_s,
    )


def job_events(job_id: str, *, last_id: str | None = None) -> Request[None]:
    """A job's changes as server-sent events; the answer is read as it comes, not by the receiver. `last_id`: of the
    event that came last, if one did.
    """
    path = f"/v1/jobs/{segment(job_id)}/events"
    headers = {"Accept": "text/event-stream"} | ({} if last_id is None else {"Last-Event-ID": last_id})
    return Request("GET", path, _nothing, headers=headers, wait_s=LONG_POLL_S, digest="none", idle=True)


def one_shot(
    op: str, params: Mapping[str, Any], arrays: Mapping[str, AnyArray], *, timeout_s: float | None
) -> Request[AnyArray | dict[str, AnyArray]]:
    """A product whose operands go with the request and whose result is the answer, within `timeout_s` seconds."""
    path = "/v1/gemm" if op == "gemm" else "/v1/gemm-reduce"
    return Request(
        "POST",
        path,
        receive_arrays,
        query={} if timeout_s is None else {"timeout_s": timeout_s},
        headers={"Accept": f"{NPY}, {NPZ}"},
        body=MultipartBody(params, arrays),
        label=op,
        wait_s=ONE_SHOT_WAIT_S if timeout_s is None else timeout_s,
        result_nbytes=gemm_nbytes(params, arrays) if op == "gemm" else 0,
    )


def document(path: str) -> Request[Any]:
    """A JSON document such as /v1/usage."""
    return Request("GET", path, _json(lambda value: value))


def device_list(answer: Any) -> list[dict[str, Any]]:
    """The devices in the answer of /v1/devices. Raises ProtocolError."""
    devices = _object(answer).get("devices")
    if not isinstance(devices, list):
        raise _errors.ProtocolError("the answer lists no devices")
    return devices


def single_array(received: AnyArray | dict[str, AnyArray]) -> AnyArray:
    """Return the received array. Raises ProtocolError if there are several."""
    if isinstance(received, dict):
        raise _errors.ProtocolError("the answer holds several arrays where one was asked for")
    return received


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _errors.ProtocolError(f"the answer is no JSON object but a {type(value).__name__}")
    return value


def segment(identifier: str) -> str:
    """An id as a path segment. Raises NotFound for what can be no id: it must never reach another route."""
    if not isinstance(identifier, str) or not identifier.replace("_", "").replace("-", "").isalnum():
        raise _errors.NotFound(f"{identifier!r} is no id")
    return identifier

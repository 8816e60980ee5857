"""Every error the client raises, and how answers and httpx's exceptions become them.

::

    GemmserveError
    ├── ProgramError                a program or its result at the wrong time
    ├── TransportError              no answer: refused, broken, unresolvable (httpx's error is the cause)
    │   ├── TransportTimeout        ... or silent for too long                              (also TimeoutError)
    │   └── CorruptAnswer           ... or bytes that changed on their way: another digest than the server said
    ├── ProtocolError               an answer this version does not understand
    │   └── CrossedAnswer           ... or the answer to another request
    └── APIError                    the server's own words, by problem slug or by status
        ├── InvalidRequest          400, 411, 415, 422                                      (also ValueError)
        │   ├── ShapeMismatch
        │   ├── DtypeUnsupported                                                            (also TypeError)
        │   ├── ComputeUnsupported  .available
        │   ├── ParameterInvalid    .parameter
        │   ├── ConfigInfeasible
        │   ├── InvalidNpy
        │   └── DigestMismatch
        ├── Unauthorized            401
        ├── Forbidden               403
        ├── NotFound                404                                                     (also LookupError)
        ├── Gone                    410                                                     (also LookupError)
        ├── IdempotencyConflict     409, or 422 for another body under the same key
        ├── TooLarge                413
        ├── StoreFull               507
        ├── Overloaded              .retry_after
        │   ├── QueueFull           429
        │   ├── QuotaExceeded       429, or 507 of stored bytes: .quota .limit .used
        │   └── NotReady            503, draining too
        ├── JobFailed               .job, .problem
        ├── JobCancelled            .job
        ├── JobTimeout              .job; the deadline passed, here or there                (also TimeoutError)
        └── ServerError             any other 5xx
            ├── DeviceError
            └── WorkerCrashed

What can be checked before anything is sent (dtypes, shapes, finite scalars) raises the same classes with `status` None.
"""

# ruff: noqa: N818 (the names are the problem slugs and the public contract; httpx, too, has none with Error)

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


class GemmserveError(Exception):
    """The root of the tree: `detail` says in one sentence what happened."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class ProgramError(GemmserveError):
    """A program, or a result of one, was used at the wrong time: before it has run, after it did not succeed, twice."""


class TransportError(GemmserveError):
    """The request got no answer; `retriable` is False where another attempt cannot help.

    `unmet`: the server has never answered this client, and may not be there at all.
    """

    def __init__(self, detail: str, *, retriable: bool = True, unmet: bool = False) -> None:
        super().__init__(detail)
        self.retriable = retriable
        self.unmet = unmet


class TransportTimeout(TransportError, TimeoutError):
    """The server was silent for longer than the timeout."""


class CorruptAnswer(TransportError):
    """Bytes that changed on their way: they have another digest than the server said."""


class ProtocolError(GemmserveError):
    """The answer is not what version 1 of the protocol says: often some other server, or a proxy in between."""


class CrossedAnswer(ProtocolError):
    """An answer that belongs to another request: a connection is used by two sides, or a proxy mixes answers up.

    Nothing of it was used, and the request is not repeated: what mixes one answer up may do so with the next.
    """


class APIError(GemmserveError):
    """A problem in the server's words.

    `slug` is the stable name of the problem ("shape-mismatch"), `status` the HTTP status (None when the client found
    the mistake itself), `problem` the whole RFC 9457 object, `request_id` what to look for in the server's log,
    `retry_after` the seconds the server asks to wait, `job` the job it is about, where there is one.
    """

    default_slug: ClassVar[str] = "error"

    def __init__(
        self,
        detail: str,
        *,
        slug: str | None = None,
        status: int | None = None,
        problem: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        job: Any = None,
    ) -> None:
        super().__init__(detail)
        self.slug = slug or self.default_slug
        self.status = status
        self.problem: dict[str, Any] = dict(problem or {})
        self.request_id = request_id
        self.retry_after = retry_after
        self.job = job


class InvalidRequest(APIError, ValueError):
    """The request cannot be carried out as it stands."""

    default_slug = "invalid-request"


class ShapeMismatch(InvalidRequest):
    """The operands' shapes do not fit each other, or have fewer than two dimensions."""

    default_slug = "shape-mismatch"


class DtypeUnsupported(InvalidRequest, TypeError):
    """The dtype is not float16, float32, float64, complex64 or complex128."""

    default_slug = "dtype-unsupported"


class ComputeUnsupported(InvalidRequest):
    """The device does not form products this way; `available` names the ways it has."""

    default_slug = "compute-unsupported"

    @property
    def available(self) -> list[str]:
        """The compute modes of the device for this job."""
        return list(self.problem.get("available") or ())


class ParameterInvalid(InvalidRequest):
    """A parameter has no meaning here (NaN alpha, complex alpha on real data, max of complex...)."""

    default_slug = "parameter-invalid"

    @property
    def parameter(self) -> str | None:
        """The parameter's name, where the server gave it."""
        return self.problem.get("parameter")


class ConfigInfeasible(InvalidRequest):
    """The config breaks a limit of the device; the detail names the limit."""

    default_slug = "config-infeasible"


class InvalidNpy(InvalidRequest):
    """The bytes are no .npy array that the service reads."""

    default_slug = "invalid-npy"


class DigestMismatch(InvalidRequest):
    """The bytes that arrived are not the bytes that were sent."""

    default_slug = "digest-mismatch"


class Unauthorized(APIError):
    """The server wants an API key: none was sent, or one that is mistyped, unknown, expired or revoked."""

    default_slug = "unauthorized"


class Forbidden(APIError):
    """The key lacks a scope (named by `scope`), or the Host or Origin is not allowed to do this."""

    default_slug = "forbidden"

    @property
    def scope(self) -> str | None:
        """The scope that is missing: "read", "submit" or "admin"."""
        return self.problem.get("scope")


class NotFound(APIError, LookupError):
    """The array, job or route does not exist."""

    default_slug = "not-found"


class Gone(APIError, LookupError):
    """The array has expired."""

    default_slug = "gone"


class IdempotencyConflict(APIError):
    """The Idempotency-Key was used for another body, or its first request is still being taken in."""

    default_slug = "idempotency-conflict"


class TooLarge(APIError):
    """Larger than the server takes in one array."""

    default_slug = "too-large"


class StoreFull(APIError):
    """The server's store has no room; unexpired arrays are never evicted."""

    default_slug = "store-full"


class Overloaded(APIError):
    """Later, not now: `retry_after` is in seconds, or None."""

    default_slug = "overloaded"


class QueueFull(Overloaded):
    """The server's queue is full."""

    default_slug = "queue-full"


class QuotaExceeded(Overloaded):
    """A quota of the API key's owner is used up. `retry_after` is None where time heals nothing: of stored bytes."""

    default_slug = "quota-exceeded"

    @property
    def quota(self) -> str | None:
        """Name of the quota: "stored_bytes", "inflight_bytes", "queued_jobs" or "device_seconds_per_day"."""
        return self.problem.get("quota")

    @property
    def limit(self) -> float | None:
        """Size of the quota."""
        return self.problem.get("limit")

    @property
    def used(self) -> float | None:
        """Amount of the quota that is used."""
        return self.problem.get("used")


class NotReady(Overloaded):
    """The server has no worker ready yet, or is draining."""

    default_slug = "not-ready"


class JobFailed(APIError):
    """The job failed on the server: `job` is the job, `problem` its error; the cause is that error, typed."""

    default_slug = "job-failed"


class JobCancelled(APIError):
    """The job was cancelled."""

    default_slug = "cancelled"


class JobTimeout(APIError, TimeoutError):
    """The job's own deadline passed, or it was not done within the time you gave: `job.state` tells which."""

    default_slug = "timeout"


class ServerError(APIError):
    """The server failed, not the request."""

    default_slug = "internal-error"


class DeviceError(ServerError):
    """The device failed (or has too little memory: slug "out-of-device-memory")."""

    default_slug = "device-error"


class WorkerCrashed(ServerError):
    """The worker died at this job, as often as it was tried."""

    default_slug = "worker-crashed"


_CLASSES: Final[tuple[type[APIError], ...]] = (
    ShapeMismatch,
    DtypeUnsupported,
    ComputeUnsupported,
    ParameterInvalid,
    ConfigInfeasible,
    InvalidNpy,
    DigestMismatch,
    Unauthorized,
    Forbidden,
    NotFound,
    Gone,
    IdempotencyConflict,
    TooLarge,
    StoreFull,
    QueueFull,
    QuotaExceeded,
    NotReady,
    JobCancelled,
    JobTimeout,
    DeviceError,
    WorkerCrashed,
)

_BY_SLUG: Final = {cls.default_slug: cls for cls in _CLASSES} | {
    "draining": NotReady,
    "host-not-allowed": Forbidden,
    "idempotency-mismatch": IdempotencyConflict,
    "origin-not-allowed": Forbidden,
    "out-of-device-memory": DeviceError,
    "program-too-large": TooLarge,
}

_BY_STATUS: Final[dict[int, type[APIError]]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    410: Gone,
    411: InvalidRequest,
    413: TooLarge,
    415: InvalidRequest,
    422: InvalidRequest,
    429: Overloaded,
    431: InvalidRequest,
    503: NotReady,
    507: StoreFull,
}

REQUEST_ID_HEADER: Final = "X-Request-Id"


def from_problem(problem: Mapping[str, Any], *, job: Any = None) -> APIError:
    """The error that an RFC 9457 object stands for: by its slug, else by its status, else APIError."""
    status = problem.get("status")
    status = status if isinstance(status, int) else None
    # Of a problem of the server's own, or of one that is registered under a fragment.
    slug = str(problem.get("type") or "").rstrip("/").rpartition("/")[2]
    slug = "" if slug == "about:blank" else slug
    cls = _BY_SLUG.get(slug) or _by_status(status)
    detail = str(problem.get("detail") or problem.get("title") or f"HTTP status {status}")
    request_id = problem.get("request_id")
    return cls(
        detail,
        slug=slug or None,
        status=status,
        problem=problem,
        request_id=str(request_id) if request_id else None,
        retry_after=_seconds(problem.get("retry_after_s")),
        job=job,
    )


def _by_status(status: int | None) -> type[APIError]:
    if status is None:
        return APIError
    return _BY_STATUS.get(status) or (ServerError if status >= 500 else APIError)


def from_answer(status: int, headers: Mapping[str, str], body: bytes) -> GemmserveError:
    """The error that an answer of status 300 or more stands for; `body` need not be a problem (a proxy's page)."""
    if status < 400:
        where = headers.get("location") or "elsewhere"
        return ProtocolError(f"the server redirects to {where} (status {status}); give the client that URL")
    problem: dict[str, Any] = {}
    if "json" in (headers.get("content-type") or ""):
        try:
            decoded = json.loads(body)
        except ValueError:
            decoded = None
        problem = decoded if isinstance(decoded, dict) else {}
    if not problem:
        text = " ".join(body[:2000].decode("utf-8", "replace").split())[:200]
        said = f"HTTP status {status}" + (f": {text}" if text else "")
        if REQUEST_ID_HEADER.lower() not in {name.lower() for name in headers}:
            said += " (this is no answer of a gemmserve server: another one's, or a proxy's)"
        problem = {"detail": said}
    error = from_problem({**problem, "status": status})
    error.request_id = error.request_id or headers.get(REQUEST_ID_HEADER)
    error.retry_after = _seconds(headers.get("retry-after")) or error.retry_after
    return error


def _seconds(value: object) -> float | None:
    """A Retry-After in seconds. Its other form, an HTTP date, needs synchronised clocks and is not read."""
    try:
        seconds = float(str(value))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def from_httpx(error: Exception, url: str, *, answered: bool = False) -> GemmserveError:
    """The error that an exception of httpx stands for; the caller raises it `from` the original. `answered`: whether
    the server ever did.
    """
    import httpx

    said = str(error) or type(error).__name__
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return TransportError(
                f"cannot reach {url}: {said}; is `gemmserve serve` running there?", unmet=not answered
            )
        case httpx.TimeoutException():
            return TransportTimeout(f"{url} was silent for too long ({type(error).__name__})")
        case httpx.UnsupportedProtocol() | httpx.LocalProtocolError():
            return TransportError(f"the request to {url} cannot be sent: {said}", retriable=False)
        case httpx.TransportError():
            return TransportError(f"the exchange with {url} broke: {said}")
        case httpx.InvalidURL():
            return ParameterInvalid(f"{url!r} is not a URL: {said}")
        case _:
            return ProtocolError(f"{url}: {said}")


def httpx_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that httpx can raise while a request is made or an answer is read."""
    import httpx

    return (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, httpx.CookieConflict)


# Tracebacks name what people import.
for _class in list(vars().values()):
    if isinstance(_class, type) and issubclass(_class, GemmserveError):
        _class.__module__ = "gemmserve"

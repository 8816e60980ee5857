"""Every error the client raises, and how answers become them.

::

    GemmserveError
    ├── ProgramError                a program or its result at the wrong time
    ├── ClientClosed                a closed client, used again                             (also RuntimeError)
    ├── TransportError              no answer: refused, broken, unresolvable (the HTTP library's error is the cause)
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
        │   ├── SingularMatrix      .index                                  (also numpy.linalg.LinAlgError)
        │   └── NotPositiveDefinite .index                                  (also numpy.linalg.LinAlgError)
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

from numpy.linalg import LinAlgError

if TYPE_CHECKING:
    from collections.abc import Mapping


class DownloadWarning(UserWarning):
    """A large array is downloaded by numpy.asarray, or by what calls it; see `Client(warn_download=...)`."""


class GemmserveError(Exception):
    """The root of the tree: `detail` says in one sentence what happened."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class ProgramError(GemmserveError):
    """A program, or a result of one, was used at the wrong time: before it has run, after it did not succeed, twice."""


class ClientClosed(GemmserveError, RuntimeError):
    """A client, or a handle of one, was used after the client was closed."""


class TransportError(GemmserveError):
    """The request got no answer; `retriable` is False where another attempt cannot help.

    `unmet`: the server has never answered this client, and may not be there at all. `sent`: the server may have the
    request, and have done what it asks for.
    """

    def __init__(self, detail: str, *, retriable: bool = True, unmet: bool = False, sent: bool = True) -> None:
        super().__init__(detail)
        self.retriable = retriable
        self.unmet = unmet
        self.sent = sent


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


_BY_SLUG: Final[dict[str, type[APIError]]] = {}
"""Classes by the slugs of their problems; each enters itself."""


class APIError(GemmserveError):
    """A problem in the server's words.

    `slug` is the stable name of the problem ("shape-mismatch"), `status` the HTTP status (None when the client found
    the mistake itself), `problem` the whole RFC 9457 object, `request_id` what to look for in the server's log,
    `retry_after` the seconds the server asks to wait, `job` the job it is about, where there is one.
    """

    default_slug: ClassVar[str] = "error"

    def __init_subclass__(cls, *, slug: str = "") -> None:
        super().__init_subclass__()
        if slug:
            cls.default_slug = slug
            _BY_SLUG[slug] = cls

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


class InvalidRequest(APIError, ValueError, slug="invalid-request"):
    """The request cannot be carried out as it stands."""


class ShapeMismatch(InvalidRequest, slug="shape-mismatch"):
    """The operands' shapes do not fit each other, or have fewer than two dimensions."""


class DtypeUnsupported(InvalidRequest, TypeError, slug="dtype-unsupported"):
    """The dtype is not float16, float32, float64, complex64 or complex128."""


class ComputeUnsupported(InvalidRequest, slug="compute-unsupported"):
    """The device does not form products this way; `available` names the ways it has."""

    @property
    def available(self) -> list[str]:
        """The compute modes of the device for this job."""
        return list(self.problem.get("available") or ())


class ParameterInvalid(InvalidRequest, slug="parameter-invalid"):
    """A parameter has no meaning here (NaN alpha, complex alpha on real data, max of complex...)."""

    @property
    def parameter(self) -> str | None:
        """The parameter's name, where the server gave it."""
        return self.problem.get("parameter")


class ConfigInfeasible(InvalidRequest, slug="config-infeasible"):
    """The config breaks a limit of the device; the detail names the limit."""


class InvalidNpy(InvalidRequest, slug="invalid-npy"):
    """The bytes are no .npy array that the service reads."""


class DigestMismatch(InvalidRequest, slug="digest-mismatch"):
    """The bytes that arrived are not the bytes that were sent."""


class Unauthorized(APIError, slug="unauthorized"):
    """The server wants an API key: none was sent, or one that is mistyped, unknown, expired or revoked."""


class Forbidden(APIError, slug="forbidden"):
    """The key lacks a scope (named by `scope`), or the Host or Origin is not allowed to do this."""

    @property
    def scope(self) -> str | None:
        """The scope that is missing: "read", "submit" or "admin"."""
        return self.problem.get("scope")


class NotFound(APIError, LookupError, slug="not-found"):
    """The array, job or route does not exist."""


class Gone(APIError, LookupError, slug="gone"):
    """The array has expired."""


class IdempotencyConflict(APIError, slug="idempotency-conflict"):
    """The Idempotency-Key was used for another body, or its first request is still being taken in."""


class TooLarge(APIError, slug="too-large"):
    """Larger than the server takes in one array."""


class StoreFull(APIError, slug="store-full"):
    """The server's store has no room; unexpired arrays are never evicted."""


class Overloaded(APIError, slug="overloaded"):
    """Later, not now: `retry_after` is in seconds, or None."""


class QueueFull(Overloaded, slug="queue-full"):
    """The server's queue is full."""


class QuotaExceeded(Overloaded, slug="quota-exceeded"):
    """A quota of the API key's owner is used up. `retry_after` is None where time heals nothing: of stored bytes."""

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


class NotReady(Overloaded, slug="not-ready"):
    """The server has no worker ready yet, or is draining."""


class JobFailed(APIError, slug="job-failed"):
    """The job failed on the server: `job` is the job, `problem` its error; the cause is that error, typed."""


class _OfStack:
    """Base of errors that name one matrix of a stack."""

    problem: dict[str, Any]

    @property
    def index(self) -> tuple[int, ...]:
        """Place of one such matrix in its stack; empty where there is one matrix."""
        return tuple(self.problem.get("index") or ())


class SingularMatrix(JobFailed, _OfStack, LinAlgError, slug="singular-matrix"):
    """A pivot is exactly zero: a system with this matrix has no solution, or many."""


class NotPositiveDefinite(JobFailed, _OfStack, LinAlgError, slug="not-positive-definite"):
    """A pivot is not positive: the matrix has no Cholesky factor."""


class JobCancelled(APIError, slug="cancelled"):
    """The job was cancelled."""


class JobTimeout(APIError, TimeoutError, slug="timeout"):
    """The job's own deadline passed, or it was not done within the time you gave: `job.state` tells which."""


class ServerError(APIError, slug="internal-error"):
    """The server failed, not the request."""


class DeviceError(ServerError, slug="device-error"):
    """The device failed (or has too little memory: slug "out-of-device-memory")."""


class WorkerCrashed(ServerError, slug="worker-crashed"):
    """The worker died at this job, as often as it was tried."""


_BY_SLUG.update(
    {
        "draining": NotReady,
        "host-not-allowed": Forbidden,
        "idempotency-mismatch": IdempotencyConflict,
        "origin-not-allowed": Forbidden,
        "out-of-device-memory": DeviceError,
        "program-too-large": TooLarge,
    }
)

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


def numbered(error: APIError, number: int) -> APIError:
    """Make the error of one of several products name it by its number in what the caller passed, which the server, that
    has them in parts, does not know. Returns it.
    """
    problem, detail = error.problem, error.detail
    if isinstance(item := problem.get("item"), int):
        detail = detail.removeprefix(f"job {item}: ")
        if pointer := str(problem.pop("pointer", "")).removeprefix(f"/jobs/{item}"):
            problem["pointer"] = pointer
        fields = f"jobs.{item}."
        if isinstance(parameter := problem.get("parameter"), str):
            problem["parameter"] = parameter.removeprefix(fields)
        if listed := [each for each in problem.get("errors") or () if each["field"].startswith(fields)]:
            problem["errors"] = [{**each, "field": each["field"].removeprefix(fields)} for each in listed]
            detail = "; ".join(f"{each['field']}: {each['message']}" for each in problem["errors"])
    error.detail = f"product {number}: {detail}"
    error.args = (error.detail,)
    problem |= {"item": number, "detail": error.detail}
    return error


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
    if error.retry_after is None:  # the problem's is finer: the field has whole seconds
        error.retry_after = _seconds(headers.get("retry-after"))
    return error


def _seconds(value: object) -> float | None:
    """A Retry-After in seconds. Its other form, an HTTP date, needs synchronised clocks and is not read."""
    try:
        seconds = float(str(value))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


# Tracebacks name what people import.
for _class in list(vars().values()):
    if isinstance(_class, type) and issubclass(_class, GemmserveError):
        _class.__module__ = "gemmserve"

# ruff: noqa: N818 (the names are the problem slugs and the public contract)
"""Errors of the service, each with the slug, status and title of its problem (RFC 9457).

Errors of other layers (the kernels', the wire format's) are described by the same `describe`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from gemmserve.wire import NpyDtypeError, NpyError
from gemmserve_kernels.problem.errors import DeviceError, KernelError, ParameterInvalid
from gemmserve_service.schemas import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FIELD_OF_JOB: Final = re.compile(r"jobs\.(\d{1,9})(?:\.|$)")
"""A field of one of several jobs in a body, and its number there."""


class ServiceError(Exception):
    """Error that was not foreseen; the server's log says more."""

    # Base of the service's own errors, whose docstrings are what /problems says of them. `detail` is for the person who
    # sent the request; `slug`, `status` and `title` are given where a class begins, or are those of the class above.
    slug: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"

    def __init_subclass__(cls, *, slug: str | None = None, status: int | None = None, title: str | None = None) -> None:
        super().__init_subclass__()
        cls.slug, cls.status, cls.title = slug or cls.slug, status or cls.status, title or cls.title

    def __init__(self, detail: str, *, retry_after_s: float | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.extra = extra


class OtherCell(ServiceError, slug="other-cell", status=307, title="Another cell has it"):
    """The request is about what another cell made, or too large for the way by the router: Location is where to send
    it again, with its body. Only to a name that `GET /v1/cells` lists: it takes the API key along.
    """

    def __init__(self, detail: str, location: str) -> None:
        super().__init__(detail)
        self.location = location


class CellAway(ServiceError, slug="cell-away", status=503, title="A cell does not answer"):
    """An operand is in another cell, and that cell does not answer."""


class BodyLength(ServiceError, slug="body-length", status=400, title="The body's length does not match its header"):
    """The body holds more or fewer bytes than its header says."""


class BodyTooShort(BodyLength):
    """It is shorter: bytes are missing."""


class BodyTooLong(BodyLength):
    """It is longer: bytes are left over."""


class DigestMismatch(ServiceError, slug="digest-mismatch", status=400, title="The digest does not match the body"):
    """Content-Digest differs from what arrived."""


class InvalidNpy(ServiceError, slug="invalid-npy", status=400, title="Not a readable .npy array"):
    """Body that is no readable .npy."""


class InvalidRequest(ServiceError, slug="invalid-request", status=400, title="Malformed request"):
    """Malformed in a way that no other slug names."""


class InvalidParameters(ServiceError, slug=ParameterInvalid.slug, status=422, title="A parameter is invalid"):
    """A well-formed request with a missing, unknown or invalid field, part or parameter; `errors` names each."""

    def __init__(self, detail: str, errors: Sequence[Mapping[str, str]] = ()) -> None:
        # `parameter` is what the kernels' own ParameterInvalid carries: the first, where there are several.
        extra: dict[str, Any] = {"parameter": errors[0]["field"], "errors": list(errors)} if errors else {}
        if errors and (found := _FIELD_OF_JOB.match(errors[0]["field"])):
            extra |= {"item": int(found[1]), "pointer": f"/jobs/{found[1]}"}
        super().__init__(detail, **extra)


class MalformedCoding(InvalidRequest):
    """The body is not what its Content-Encoding says, or breaks off."""


class CompletedUpload(ServiceError, slug="completed-upload", status=400, title="Upload is completed"):
    """The upload is an array already, and takes no more parts; Location names the array."""


class Unauthorized(ServiceError, slug="unauthorized", status=401, title="A valid API key is needed"):
    """The server has API keys, and the request carries none, or one that is malformed, unknown, expired or revoked."""

    def __init__(self, detail: str, *, presented: bool = True) -> None:
        super().__init__(detail)
        self.presented = presented


class Forbidden(ServiceError, slug="forbidden", status=403, title="The API key does not permit this"):
    """The API key is valid and lacks a scope; `scope` names it."""


class NotFound(ServiceError, slug="not-found", status=404, title="Not found"):
    """Unknown id, one that was deleted, or one that belongs to another API key's owner."""


class IdempotencyConflict(
    ServiceError, slug="idempotency-conflict", status=409, title="A request with this Idempotency-Key is in flight"
):
    """The first request with this key is still being taken in."""


class JobCancelled(ServiceError, slug="cancelled", status=409, title="The job was cancelled"):
    """Cancelled before it finished."""


class UploadIncomplete(ServiceError, slug="upload-incomplete", status=409, title="The upload is not complete"):
    """Bytes are missing: `missing` lists where, as [start, end) of the body, the first hundred holes."""


class UploadSuperseded(
    ServiceError, slug="upload-superseded", status=409, title="A later request took this one's place"
):
    """Another request for the same bytes of this upload came, or it was completed or cancelled, while this one ran."""


class Gone(ServiceError, slug="gone", status=410, title="Expired"):
    """The array's time to live has passed."""


class ArrayLost(ServiceError, slug="array-lost", status=410, title="Array lost"):
    """A result was lost with its device before it was written, and could not be computed again."""


class ArrayCorrupt(ServiceError, slug="array-corrupt", status=500, title="Array corrupt"):
    """The bytes that came back from the tier are not those that went there, or the object is gone. None of
    them is shown.
    """


class LengthRequired(ServiceError, slug="length-required", status=411, title="Content-Length is required"):
    """Content-Length is needed here."""


class TooLarge(ServiceError, slug="too-large", status=413, title="Too large"):
    """One array larger than the server takes."""


class UnsupportedMediaType(ServiceError, slug="unsupported-media-type", status=415, title="Unsupported media type"):
    """A Content-Type that this route does not read."""


class UnsupportedCoding(UnsupportedMediaType):
    """Also a Content-Encoding that this route does not read; the Accept-Encoding of the answer says which it reads."""

    def __init__(self, detail: str, accepted: str) -> None:
        super().__init__(detail)
        self.accepted = accepted


class DescriptorRefused(ServiceError, slug="descriptor-refused", status=422, title="The shared memory cannot be used"):
    """Shared memory that the request names was not passed by this client, is no memfd, or is too small for its array.
    What is sent in the body instead is taken.
    """


class IdempotencyMismatch(
    ServiceError, slug="idempotency-mismatch", status=422, title="This Idempotency-Key belongs to another request"
):
    """The key was used for another body."""


class QueueFull(ServiceError, slug="queue-full", status=429, title="The queue is full"):
    """The queue takes no more jobs now; `retry_after_s` comes from the measured drain rate."""


class QuotaExceeded(ServiceError, slug="quota-exceeded", status=429, title="The quota is used up"):
    """A quota of the API key's owner is used up; `quota` names it, `limit` and `used` how far. 429: time heals it."""


class StorageQuotaExceeded(QuotaExceeded, status=507):
    """507: of stored bytes; arrays must go first."""


class WorkerCrashed(ServiceError, slug="worker-crashed", status=500, title="The worker died"):
    """Every attempt ended with the death of its worker."""


class NotReady(ServiceError, slug="not-ready", status=503, title="Not ready"):
    """No worker has answered a verified product, none gets on though jobs wait, or ends of jobs cannot be put on
    record: `reasons` says which. Work is refused for the first of these alone.
    """


class Draining(ServiceError, slug="draining", status=503, title="Shutting down"):
    """Shutting down: nothing new is admitted."""


class TierUnavailable(ServiceError, slug="tier-unavailable", status=503, title="The tier cannot be reached"):
    """An array whose bytes are in the tier cannot be read now, or none can go there to make room, or to be answered as
    replicated. Arrays that are in the store are served.
    """


class JobTimeout(ServiceError, slug="timeout", status=504, title="The deadline passed"):
    """The deadline passed, in the queue or while running."""


class StoreFull(ServiceError, slug="store-full", status=507, title="The store is full"):
    """The store has no room for the array. Unexpired arrays are never evicted to make some."""


class JobFailed(ServiceError):
    """A one-shot job that failed on the device; carries the worker's own slug, status and title."""

    def __init__(self, description: Description) -> None:
        super().__init__(description.detail, **description.extra)
        self.description = description


@dataclass(frozen=True)
class Description:
    """An error as problem details know it, without an exception object."""

    slug: str
    status: int
    title: str
    detail: str
    retry_after_s: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def problem(self) -> Problem:
        """The problem document: `type` is ``/problems/<slug>``; `retry_after_s` where the client may come back."""
        more = self.extra if self.retry_after_s is None else {"retry_after_s": self.retry_after_s, **self.extra}
        return Problem(type=f"/problems/{self.slug}", title=self.title, status=self.status, detail=self.detail, **more)


class ProgramTooLarge(KernelError):
    """A program needs more memory at one time than any device has."""

    slug: ClassVar[str] = "program-too-large"


class StepInvalid(KernelError):
    """One step of a program cannot be run; speaks with the slug and status of its cause, and names the step.

    `pointer`: the place in the request (RFC 6901); "" of a step whose data, once there, had no result.
    """

    def __init__(self, step: str, pointer: str, cause: KernelError | ServiceError) -> None:
        super().__init__(str(cause))
        self.step = step
        self.pointer = pointer
        self.cause = cause


class ItemInvalid(KernelError):
    """One of several jobs cannot be accepted; speaks with the slug and status of its cause, and names the job.

    `item`: its number in the request, from 0 on.
    """

    def __init__(self, item: int, cause: KernelError | ServiceError) -> None:
        super().__init__(str(cause))
        self.item = item
        self.cause = cause


_KERNEL_EXTRA = ("available", "index", "parameter")


def describe(error: BaseException) -> Description:
    """Slug, status, title and detail of any error; of one that nobody foresaw (`internal`) the detail stays here."""
    if isinstance(error, JobFailed):
        return error.description
    if isinstance(error, StepInvalid):
        found = describe(error.cause)
        extra = found.extra | {"step": error.step} | ({"pointer": error.pointer} if error.pointer else {})
        return replace(found, detail=f"step {error.step}: {found.detail}", extra=extra)
    if isinstance(error, ItemInvalid):
        found = describe(error.cause)
        pointer = f"/jobs/{error.item}{found.extra.get('pointer', '')}"
        extra = found.extra | {"item": error.item, "pointer": pointer}
        return replace(found, detail=f"job {error.item}: {found.detail}", extra=extra)
    if isinstance(error, ServiceError):
        return Description(error.slug, error.status, error.title, error.detail, error.retry_after_s, error.extra)
    if isinstance(error, KernelError):
        extra = {name: getattr(error, name) for name in _KERNEL_EXTRA if getattr(error, name, None) is not None}
        return Description(error.slug, 422, _title(error.slug), str(error), extra=extra)
    if isinstance(error, DeviceError):
        return Description(error.slug, 500, _title(error.slug), str(error))
    if isinstance(error, NpyDtypeError):
        return Description("dtype-unsupported", 422, _title("dtype-unsupported"), str(error))
    if isinstance(error, NpyError):
        return Description(InvalidNpy.slug, InvalidNpy.status, InvalidNpy.title, str(error))
    if isinstance(error, MemoryError):
        return Description("out-of-memory", 500, _title("out-of-memory"), "the worker ran out of host memory")
    return Description(
        ServiceError.slug, ServiceError.status, ServiceError.title, "an unexpected error; the server's log says more"
    )


def _title(slug: str) -> str:
    return slug.replace("-", " ").capitalize()

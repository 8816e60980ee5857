# ruff: noqa: N818 (the names are the problem slugs and the public contract)
"""Errors of the service, each with the slug, status and title of its problem (RFC 9457).

    ServiceError
    ├── BodyLength: BodyTooShort, BodyTooLong     400 body-length
    ├── DigestMismatch                            400 digest-mismatch
    ├── InvalidNpy                                400 invalid-npy
    ├── InvalidRequest                            400 invalid-request
    ├── CompletedUpload                           400 completed-upload
    ├── Unauthorized                              401 unauthorized
    ├── Forbidden                                 403 forbidden
    ├── NotFound                                  404 not-found
    ├── IdempotencyConflict                       409 idempotency-conflict
    ├── JobCancelled                              409 cancelled
    ├── UploadIncomplete                          409 upload-incomplete
    ├── UploadSuperseded                          409 upload-superseded
    ├── Gone                                      410 gone
    ├── LengthRequired                            411 length-required
    ├── TooLarge                                  413 too-large
    ├── UnsupportedMediaType                      415 unsupported-media-type
    ├── DescriptorRefused                         422 descriptor-refused
    ├── IdempotencyMismatch                       422 idempotency-mismatch
    ├── InvalidParameters                         422 parameter-invalid
    ├── QueueFull                                 429 queue-full
    ├── QuotaExceeded                             429 quota-exceeded
    │   └── StorageQuotaExceeded                  507 quota-exceeded
    ├── WorkerCrashed                             500 worker-crashed
    ├── NotReady, Draining                        503 not-ready, draining
    ├── JobTimeout                                504 timeout
    ├── StoreFull                                 507 store-full
    └── JobFailed                                 whatever the worker reported

Errors of other layers (the kernels', the wire format's) are described by the same `describe`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gemmserve.wire import NpyDtypeError, NpyError
from gemmserve_kernels.problem.errors import DeviceError, KernelError, ParameterInvalid
from gemmserve_service.schemas import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ServiceError(Exception):
    """Base of the service's own errors; `detail` is for the person who sent the request."""

    slug: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, retry_after_s: float | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.extra = extra


class BodyLength(ServiceError):
    """The body holds more or fewer bytes than its header says."""

    slug = "body-length"
    status = 400
    title = "The body's length does not match its header"


class BodyTooShort(BodyLength):
    """Bytes are missing."""


class BodyTooLong(BodyLength):
    """Bytes are left over."""


class DigestMismatch(ServiceError):
    """Content-Digest differs from what arrived."""

    slug = "digest-mismatch"
    status = 400
    title = "The digest does not match the body"


class InvalidNpy(ServiceError):
    """Body that is no readable .npy."""

    slug = "invalid-npy"
    status = 400
    title = "Not a readable .npy array"


class InvalidRequest(ServiceError):
    """Malformed in a way that no other slug names."""

    slug = "invalid-request"
    status = 400
    title = "Malformed request"


class InvalidParameters(ServiceError):
    """A well-formed request with a missing, unknown or invalid field, part or parameter; `errors` names each."""

    slug = ParameterInvalid.slug
    status = 422
    title = "A parameter is invalid"

    def __init__(self, detail: str, errors: Sequence[Mapping[str, str]] = ()) -> None:
        # `parameter` is what the kernels' own ParameterInvalid carries: the first, where there are several.
        extra: dict[str, Any] = {"parameter": errors[0]["field"], "errors": list(errors)} if errors else {}
        super().__init__(detail, **extra)


class MalformedCoding(InvalidRequest):
    """The body is not what its Content-Encoding says, or breaks off."""


class CompletedUpload(ServiceError):
    """The upload is an array already, and takes no more parts; Location names the array."""

    slug = "completed-upload"
    status = 400
    title = "Upload is completed"


class Unauthorized(ServiceError):
    """The server has API keys, and the request carries none, or one that is malformed, unknown, expired or revoked."""

    slug = "unauthorized"
    status = 401
    title = "A valid API key is needed"

    def __init__(self, detail: str, *, presented: bool = True) -> None:
        super().__init__(detail)
        self.presented = presented


class Forbidden(ServiceError):
    """The API key is valid and lacks a scope; `scope` names it."""

    slug = "forbidden"
    status = 403
    title = "The API key does not permit this"


class NotFound(ServiceError):
    """Unknown id, one that was deleted, or one that belongs to another API key's owner."""

    slug = "not-found"
    status = 404
    title = "Not found"


class IdempotencyConflict(ServiceError):
    """The first request with this key is still being taken in."""

    slug = "idempotency-conflict"
    status = 409
    title = "A request with this Idempotency-Key is in flight"


class JobCancelled(ServiceError):
    """Cancelled before it finished."""

    slug = "cancelled"
    status = 409
    title = "The job was cancelled"


class UploadIncomplete(ServiceError):
    """Bytes are missing: `missing` lists where, as [start, end) of the body, the first hundred holes."""

    slug = "upload-incomplete"
    status = 409
    title = "The upload is not complete"


class UploadSuperseded(ServiceError):
    """Another request for the same bytes of this upload came, or it was completed or cancelled, while this one ran."""

    slug = "upload-superseded"
    status = 409
    title = "A later request took this one's place"


class Gone(ServiceError):
    """The array's time to live has passed."""

    slug = "gone"
    status = 410
    title = "Expired"


class ArrayLost(ServiceError):
    """A result was lost with its device before it was written, and could not be computed again."""

    slug = "array-lost"
    status = 410
    title = "Array lost"


class LengthRequired(ServiceError):
    """Content-Length is needed here."""

    slug = "length-required"
    status = 411
    title = "Content-Length is required"


class TooLarge(ServiceError):
    """One array larger than the server takes."""

    slug = "too-large"
    status = 413
    title = "Too large"


class UnsupportedMediaType(ServiceError):
    """A Content-Type that this route does not read."""

    slug = "unsupported-media-type"
    status = 415
    title = "Unsupported media type"


class UnsupportedCoding(UnsupportedMediaType):
    """Also a Content-Encoding that this route does not read; the Accept-Encoding of the answer says which it reads."""

    def __init__(self, detail: str, accepted: str) -> None:
        super().__init__(detail)
        self.accepted = accepted


class DescriptorRefused(ServiceError):
    """Shared memory that the request names was not passed by this client, is no memfd, or is too small for its array.
    What is sent in the body instead is taken.
    """

    slug = "descriptor-refused"
    status = 422
    title = "The shared memory cannot be used"


class IdempotencyMismatch(ServiceError):
    """The key was used for another body."""

    slug = "idempotency-mismatch"
    status = 422
    title = "This Idempotency-Key belongs to another request"


class QueueFull(ServiceError):
    """The queue takes no more jobs now; `retry_after_s` comes from the measured drain rate."""

    slug = "queue-full"
    status = 429
    title = "The queue is full"


class QuotaExceeded(ServiceError):
    """A quota of the API key's owner is used up; `quota` names it, `limit` and `used` how far. 429: time heals it."""

    slug = "quota-exceeded"
    status = 429
    title = "The quota is used up"


class StorageQuotaExceeded(QuotaExceeded):
    """507: of stored bytes; arrays must go first."""

    status = 507


class WorkerCrashed(ServiceError):
    """Every attempt ended with the death of its worker."""

    slug = "worker-crashed"
    status = 500
    title = "The worker died"


class NotReady(ServiceError):
    """No worker has answered a verified product, none gets on though jobs wait, or ends of jobs cannot be put on
    record: `reasons` says which. Work is refused for the first of these alone.
    """

    slug = "not-ready"
    status = 503
    title = "Not ready"


class Draining(ServiceError):
    """Shutting down: nothing new is admitted."""

    slug = "draining"
    status = 503
    title = "Shutting down"


class JobTimeout(ServiceError):
    """The deadline passed, in the queue or while running."""

    slug = "timeout"
    status = 504
    title = "The deadline passed"


class StoreFull(ServiceError):
    """The store has no room for the array. Unexpired arrays are never evicted to make some."""

    slug = "store-full"
    status = 507
    title = "The store is full"


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
        """The problem document; `type` is ``/problems/<slug>``."""
        return Problem(
            type=f"/problems/{self.slug}", title=self.title, status=self.status, detail=self.detail, **self.extra
        )


class ProgramTooLarge(KernelError):
    """A program needs more memory at one time than any device has."""

    slug: ClassVar[str] = "program-too-large"


class StepInvalid(KernelError):
    """One step of a program cannot be run; speaks with the slug and status of its cause, and names the step.

    `pointer`: the place in the request (RFC 6901).
    """

    def __init__(self, step: str, pointer: str, cause: KernelError | ServiceError) -> None:
        super().__init__(str(cause))
        self.step = step
        self.pointer = pointer
        self.cause = cause


_KERNEL_EXTRA = ("available", "parameter")


def describe(error: BaseException) -> Description:
    """Slug, status, title and detail of any error; of one that nobody foresaw (`internal`) the detail stays here."""
    if isinstance(error, JobFailed):
        return error.description
    if isinstance(error, StepInvalid):
        found = describe(error.cause)
        extra = found.extra | {"step": error.step, "pointer": error.pointer}
        return replace(found, detail=f"step {error.step}: {found.detail}", extra=extra)
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

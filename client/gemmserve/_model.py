"""Arrays and jobs as the service describes them, as dataclasses. Unknown fields are ignored: servers may be newer."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from gemmserve import _errors
from gemmserve.wire import RESULT_DTYPES, parse_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

FINAL_STATES: Final = frozenset({"succeeded", "failed", "cancelled", "expired"})


@dataclass(frozen=True)
class ArrayInfo:
    """A stored array. `order` is its memory order; times are aware datetimes; `expires_at` None: kept until deleted;
    `name` None: it has none.
    """

    id: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    order: str = "C"
    sha256: str | None = None
    created_at: datetime | None = None
    expires_at: datetime | None = None
    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, fields: Any) -> ArrayInfo:
        """Return the array that the JSON object describes. Raises ProtocolError."""
        try:
            return cls(
                id=str(fields["id"]),
                dtype=parse_dtype(fields["dtype"], RESULT_DTYPES),
                shape=tuple(int(n) for n in fields["shape"]),
                nbytes=int(fields["nbytes"]),
                order=str(fields.get("order", "C")),
                sha256=fields.get("sha256"),
                created_at=_time(fields.get("created_at")),
                expires_at=_time(fields.get("expires_at")),
                name=fields.get("name"),
                labels=dict(fields.get("labels") or {}),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _errors.ProtocolError(f"the answer describes no array: {error!r}") from error


@dataclass(frozen=True)
class JobInfo:
    """A job at one moment. `timings` are seconds by phase; `compiling`: it runs, and waits for kernels that are being
    compiled; `estimated_s`: while it runs, the seconds that it may take from `started_at` on, roughly; `progress`: the
    share of it that is done, 0 to 1, None where it ended without success or the server does not say. `steps` what
    became of each step of a program that has succeeded (id, algorithm, kernel_s, residual). Where the result was
    checked, `residual` is its relative error, and `mismatch` that of a first result which was thrown away. `elements`
    counts elements of results by the way in which they were computed (planned, wide, plain); `wide_share` and
    `fallback_share` are the shares of the latter two, 0 to 1: what the data kept from the planned way. None where there
    is one way only. `fields` is the whole JSON object.
    """

    id: str
    state: str
    op: str = ""
    attempt: int = 0
    compiling: bool = False
    estimated_s: float | None = None
    progress: float | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    result: Mapping[str, str] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    algorithm: str | None = None
    residual: float | None = None
    mismatch: float | None = None
    elements: Mapping[str, int] | None = None
    wide_share: float | None = None
    fallback_share: float | None = None
    steps: Sequence[Mapping[str, Any]] = ()
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def final(self) -> bool:
        """Whether the state can no longer change."""
        return self.state in FINAL_STATES

    @property
    def single(self) -> bool:
        """Whether the result is one array rather than several by name: as in `gemm_reduce`, by how it was asked."""
        request = self.fields.get("request") or {}
        return len(self.result) == 1 and self.op != "program" and not isinstance(request.get("reduce"), list)

    @classmethod
    def parse(cls, fields: Any) -> JobInfo:
        """Return the job that the JSON object describes. Raises ProtocolError."""
        try:
            return cls(
                id=str(fields["id"]),
                state=str(fields["state"]),
                op=str(fields.get("op", "")),
                attempt=int(fields.get("attempt") or 0),
                compiling=bool(fields.get("compiling")),
                estimated_s=fields.get("estimated_s"),
                progress=fields.get("progress"),
                created_at=_time(fields.get("created_at")),
                started_at=_time(fields.get("started_at")),
                finished_at=_time(fields.get("finished_at")),
                result=dict(fields.get("result") or {}),
                error=fields.get("error"),
                timings=dict(fields.get("timings") or {}),
                algorithm=fields.get("algorithm"),
                residual=fields.get("residual"),
                mismatch=fields.get("mismatch"),
                elements=fields.get("elements"),
                wide_share=fields.get("wide_share"),
                fallback_share=fields.get("fallback_share"),
                steps=tuple(fields.get("steps") or ()),
                fields=dict(fields),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _errors.ProtocolError(f"the answer describes no job: {error!r}") from error


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)

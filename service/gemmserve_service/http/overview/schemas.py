"""Models of GET /v1/overview and of its stream's events. Times are seconds since 1970; unknown figures are null."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from gemmserve_service.schemas import DeviceLink  # noqa: TC001 (pydantic resolves it at run time)

Figures = list[float | None]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Reason(_Model):
    """Why the server is not ready, and what to do about it."""

    reason: str = Field(examples=["no worker has answered a verified product"])
    remedy: str


class Running(_Model):
    """A task that a device's worker has: of another owner without anything but its time."""

    id: str | None = Field(None, description="of the job; null for products of a single request", examples=["job_01…"])
    kind: str | None = Field(None, examples=["gemm"])
    what: str | None = Field(None, description="size and dtype", examples=["4096 x 4096 x 4096 complex64"])
    since: float = Field(description="when the worker was sent it; it may wait there for those before it")
    owner: str | None = None


class OverviewDevice(_Model):
    """A device, its memory, its sensors (as /v1/devices has them), and what it works on."""

    index: int = Field(description="place among the devices, from 0 on")
    id: str = Field(examples=["cuda:0"])
    name: str = Field(examples=["NVIDIA H200"])
    backend: str = Field(examples=["cuda"])
    state: str = Field(description="ready, starting (also after a crash), or away, as in /v1/devices")
    memory_bytes: int | None
    memory_used_bytes: int = Field(description="by this server's worker")
    resident_bytes: int | None = Field(description="of them, copies of arrays and what was prepared of them")
    utilisation: float | None = None
    memory_utilisation: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    clock_hertz: float | None = None
    health: list[str] = Field(description="what is wrong with it, in words")
    running: list[Running] = Field(description="oldest first, sixteen at most")
    link: DeviceLink | None = Field(None, description="as /v1/devices has it; null: a device of the server's own host")


class OwnerQueue(_Model):
    """Jobs of one owner, products of single requests among them."""

    owner: str | None = Field(description="name; null: all others together, or the server has no keys")
    queued: int
    running: int
    oldest: float | None = Field(description="when the oldest that waits was submitted; null: none waits")


class Residency(_Model):
    """Copies of arrays on all devices together."""

    bytes: int
    limit: int
    hits: int = Field(description="operands that were there, since the workers' start")
    misses: int


class Space(_Model):
    """Bytes in use, and how many there may be."""

    bytes: int
    limit: int | None = Field(description="null: no limit of its own")


class Memory(_Model):
    """Memory and disk."""

    resident: Residency
    arena: Space | None = Field(description="host memory for results on their way to files; null: there is none")
    store: Space = Field(description="stored arrays")
    tier: Space | None = Field(None, description="arrays in the tier below the store; null: there is none")


class FailureProblem(_Model):
    """The problem that ended a job: see /problems."""

    type: str = Field(examples=["/problems/timeout"])
    title: str
    status: int
    detail: str | None = None


class Failure(_Model):
    """A job that failed or expired since the server's start."""

    time: float
    job: str | None = Field(description="null for a product of a single request")
    owner: str | None
    kind: str = Field(examples=["gemm"])
    problem: FailureProblem
    remedy: str = Field(description="what to do about it")


class Series(_Model):
    """Lists of equal length, oldest first. Rates are a second's mean over five; times are seconds."""

    products: Figures = Field(description="products that workers were sent, a second")
    flops: Figures = Field(description="floating-point operations of jobs that succeeded, a second")
    bytes_in: Figures = Field(description="bytes of request bodies, counted when the request ends, a second")
    bytes_out: Figures = Field(description="bytes of answers' bodies, likewise")
    queued_p50: Figures = Field(
        description="median time in the queue of the jobs that ended; null where none did. Exact for up to 512 jobs in "
        "five seconds, of more a random sample of so many"
    )
    queued_p99: Figures
    computing_p50: Figures = Field(description="on the device: copies, kernels and checks")
    computing_p99: Figures
    total_p50: Figures = Field(description="queue, compilers and device together")
    total_p99: Figures
    utilisation: list[Figures] = Field(description="one list a device, in the order of `devices`")


class History(_Model):
    """Up to an hour, a point every five seconds."""

    step: int = Field(description="seconds from one point to the next", examples=[5])
    end: float = Field(description="time of the last point")
    series: Series


class Overview(_Model):
    """State of the server, as the caller may see it."""

    time: float
    version: str
    started: float
    state: str = Field(description="ready, not ready, draining")
    ready: bool
    reasons: list[Reason] = Field(description="empty where it is ready")
    devices: list[OverviewDevice]
    queue: list[OwnerQueue] = Field(description="owners with jobs that wait or run, those with most first")
    memory: Memory
    failures: list[Failure] = Field(description="the last twenty at most, newest first")
    history: History | None = Field(None, description="with `history=true`")


class PointSeries(_Model):
    """`Series`, one value each."""

    products: float | None
    flops: float | None
    bytes_in: float | None
    bytes_out: float | None
    queued_p50: float | None
    queued_p99: float | None
    computing_p50: float | None
    computing_p99: float | None
    total_p50: float | None
    total_p99: float | None
    utilisation: Figures


class Point(_Model):
    """A point of the history, when it is made."""

    time: float
    series: PointSeries

"""What is measured: cases, each with those who take turns in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

MIB = 1 << 20
ELEMENTS_96 = 4_194_304
"""Elements of a, c and d: 32 MiB each of complex64, 96 MiB through the socket."""


@dataclass(frozen=True)
class Entry:
    """Who takes part, and how.

    `server`: a name of servers.KINDS. `via`: "wire" (the load generator over TCP), "wire unix" (over the server's Unix
    socket), or a way of an SDK. `operation`: of exchanges.Work. `most`: exchanges a round at most, for the slow.
    """

    server: str
    operation: str
    via: str = "wire"
    most: int | None = None

    @property
    def who(self):
        """In tables; the operation belongs to it where a case has several."""
        return f"{self.server} ({self.operation})" + (f", {self.via}" if self.via != "wire" else "")


@dataclass(frozen=True)
class Case:
    """Entries that take turns on the same bytes.

    `clients`: connections. `rate`: exchanges a second of an open loop; None: a closed one. `seconds`: of each turn, at
    most; at least one exchange is done.
    """

    name: str
    title: str
    n: int
    entries: tuple[Entry, ...]
    clients: int = 1
    rate: float | None = None
    seconds: float = 2.0
    rounds: int = 7
    kind: str = "turns"
    options: dict = field(default_factory=dict)


SLOW = 1
"""Connections of rivals that take seconds for 96 MiB."""


def round_trip():
    return (
        Entry("gemmserve", "axpy"),
        Entry("gemmserve", "axpy", "wire unix"),
        Entry("tritonserver", "echo"),
        Entry("tritonserver", "axpy"),
        Entry("pytriton", "axpy", most=SLOW),
        Entry("litserve", "axpy", most=SLOW),
        Entry("bentoml", "axpy", most=SLOW),
        Entry("fastapi", "axpy", most=SLOW),
        Entry("asgi", "echo"),
        Entry("asgi, malloc", "echo"),
        Entry("recv_into, TCP", "echo"),
        Entry("recv_into, Unix", "echo"),
    )


def small():
    servers = ("gemmserve", "tritonserver", "pytriton", "litserve", "bentoml", "fastapi", "asgi", "recv_into, TCP")
    return tuple(Entry(server, "product") for server in servers)


def shared_memory():
    turns = (("gemmserve", "axpy"), ("tritonserver", "echo"), ("tritonserver", "axpy"))
    ways = ("sdk shm", "sdk shm in place")
    alike = (Entry(server, operation, via) for via in ways for server, operation in turns)
    return (*alike, Entry("gemmserve", "axpy", "sdk shm frozen"))


PHASE_BYTES = tuple(MIB // 16 * 4**i for i in range(7))
"""64 KiB to 256 MiB through the socket, a, c and d together."""
OPEN_RATES = (100.0, 200.0, 400.0, 800.0, 1200.0)


def suite():
    """The cases, what matters most first."""
    open_entries = tuple(Entry(server, "product") for server in ("gemmserve", "tritonserver", "litserve", "bentoml"))
    return [
        Case("round trip", "96 MiB round trip on the wire", ELEMENTS_96, round_trip(), seconds=3),
        Case("small 1", "64 x 64 complex64, one client", 64, small()),
        Case("small 16", "64 x 64 complex64, 16 clients", 64, small(), clients=16),
        Case(
            "sdk",
            "96 MiB round trip, NumPy in, NumPy out",
            ELEMENTS_96,
            (Entry("gemmserve", "axpy", "sdk"), Entry("tritonserver", "echo", "sdk"),
             Entry("tritonserver", "axpy", "sdk")),
            seconds=3,
        ),
        Case(
            "upload",
            "256 MiB to a resident array",
            32 * MIB,
            (Entry("gemmserve", "upload"), Entry("gemmserve", "upload", "wire unix"),
             Entry("gemmserve", "upload", "sdk", most=3), Entry("asgi", "upload"), Entry("asgi, malloc", "upload"),
             Entry("recv_into, TCP", "upload"), Entry("recv_into, Unix", "upload")),
            seconds=3,
        ),
        Case(
            "upload fresh",
            "64 MiB to a resident array, in space that was never used",
            8 * MIB,
            (Entry("gemmserve", "keep", most=2), Entry("recv_into, TCP", "upload", most=2)),
            rounds=5,
        ),
        Case(
            "shared memory",
            "96 MiB on one host by shared memory, NumPy in, NumPy out",
            ELEMENTS_96,
            shared_memory(),
            seconds=3,
        ),
        Case("batch wire", "64 x 64 complex64, one and 1,000 in a request", 64,
             (Entry("gemmserve", "product"), Entry("gemmserve", "batch"))),
        Case("batch resident", "64 x 64 complex64 on the server, one and 1,000 in a request", 64,
             (Entry("gemmserve", "job"), Entry("gemmserve", "batch resident"))),
        Case("jobs", "64 x 64 complex64 on the server, one job and 500 in a request", 64,
             (Entry("gemmserve", "job"), Entry("gemmserve", "jobs"))),
        *(
            Case(f"open {rate:.0f}", f"64 x 64 complex64 at {rate:.0f} a second", 64, open_entries, clients=64,
                 rate=rate, seconds=3, rounds=3)
            for rate in OPEN_RATES
        ),
        *(
            Case(f"phases {size}", f"{label(size)} through the socket", size // 24, (Entry("gemmserve", "axpy"),),
                 rounds=3)
            for size in PHASE_BYTES
        ),
        Case("transfers", "Streams of 256 MiB with transfer processes", 256 * MIB, (Entry("gemmserve", "upload"),),
             kind="transfers", rounds=5),
        Case("memory", "Anonymous memory of the front", 4 << 30, (Entry("gemmserve", "upload"),), kind="memory"),
    ]  # fmt: skip


def label(nbytes):
    """64 KiB, 96 MiB, 4 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


START_S, TURN_S = 5.0, 1.0
"""Seconds of a server's start, and of a turn beside what it is given: guesses from runs on two quiet processors."""


def expected_s(case):
    """Seconds that a case takes, roughly."""
    turns = len(case.entries) * case.rounds * (12 if case.kind == "transfers" else 1)
    return START_S * len({entry.server for entry in case.entries}) + turns * (case.seconds + TURN_S)


def quick(case):
    """A case that shows that all works, and nothing else."""
    rate = case.rate and case.rate / 10
    n = min(case.n, {"memory": 256 * MIB, "transfers": 16 * MIB}.get(case.kind, case.n))
    return replace(case, rounds=2, seconds=min(case.seconds, 0.5), rate=rate, n=n)

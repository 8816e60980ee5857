"""Sizes and counts of a load test: the full one, and a tiny one that shows that all works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Extents n of complex64 products n x n x n, counts and seconds.

    `result`, `results`: of jobs whose results are kept, and how many at most. `larges`: jobs beside small one-shots.
    `shared`: jobs of two owners, each of which asks for more than half of a device.
    `block`: the part of a larger product that a small one may have to wait for. `spread`: jobs on one and two devices.
    `streamed`: a product with bounded memory of the device, `budgets` the bounds, in bytes;
    `larger`: one that no device holds.
    `streams`: shapes (m, n, k) of which as many products as take `stream_s` follow each other, on operands that the
    server has prepared after `stream_before` of them.
    `clients` processes have `depth` jobs in flight each. `turn_s`: seconds of a closed or open loop. `keep_s`,
    `fetch_s`, `first_s`: seconds after which no further job is submitted, no further kind of product tried.
    """

    small: int = 64
    result: int = 4096
    results: int = 2000
    larges: tuple[int, ...] = (2048, 4096, 8192)
    shared: tuple[int, int] = (4096, 8192)
    block: int = 8192
    one_shot: int = 1024
    spread: int = 1024
    seen: tuple[int, ...] = (64, 1024)
    streamed: int = 32768
    budgets: tuple[int, ...] = (16_000_000_000, 8_000_000_000, 6_400_000_000)
    larger: int = 65536
    streams: tuple[tuple[int, int, int], ...] = ((3456, 4096, 4096), (8192, 8192, 8192))
    stream_s: float = 2.0
    stream_before: int = 16
    first: tuple[int, ...] = (64, 1024, 4096)
    transfer_bytes: int = 4 << 30
    open_rate: float = 50.0
    clients: int = 8
    depth: int = 8
    jobs: int = 2000
    repeats: int = 200
    turn_s: float = 4.0
    keep_s: float = 60.0
    fetch_s: float = 25.0
    first_s: float = 60.0

    @property
    def products(self) -> tuple[int, ...]:
        """Every extent whose kernel is timed by itself."""
        return tuple(
            sorted(
                {
                    self.small,
                    self.result,
                    *self.larges,
                    *self.shared,
                    self.block,
                    self.one_shot,
                    self.spread,
                    *self.seen,
                }
            )
        )


FULL = Sizes()
TINY = Sizes(
    small=8, result=48, results=12, larges=(96,), shared=(48, 96), block=48, one_shot=32, spread=32, seen=(8,),
    streamed=600, budgets=(1 << 30,), larger=900, streams=((40, 48, 56),),
    stream_s=0.01, stream_before=4, first=(8, 32), transfer_bytes=1 << 20, clients=2, depth=2, jobs=20,
    repeats=5, turn_s=0.3, keep_s=5.0, fetch_s=5.0, first_s=2.0,
)  # fmt: skip

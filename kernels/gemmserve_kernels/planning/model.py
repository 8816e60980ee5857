"""Model of a product on devices of one host or of several nodes: how long it takes, and what bounds it. Pure.

A device computes its share of the blocks while panels of operands come and windows of the result go. Panels of A and B
come in turns, so that a share x of the bytes opens x² of the blocks: with T_c the time of the products and T_u that of
the uploads the device waits max(head, T_u² / (4 T_c)) in all where T_u <= 2 T_c, and T_u - T_c otherwise; the head is
the first pair of panels. The last window goes to the host afterwards. The same holds for what comes from other nodes.
On one device, and where panels stream because memory is short, the way that a worker plans is followed from panel to
panel instead (`timeline`), with planes made in strips where it makes them so. What a link, the host's memory or the
network has to carry in all is a floor of the time.

Nodes hold operands and result in equal parts where they are `spread`; else the first node has them, sends each other
node what it needs, and takes the results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from gemmserve_kernels.algorithms.common.time_model import ITEMSIZE
from gemmserve_kernels.blocks.grid import SIDE, Grid, GridRule
from gemmserve_kernels.blocks.workspace import block_seconds
from gemmserve_kernels.planning.memory import Memory as DeviceMemory
from gemmserve_kernels.planning.memory import Share, least_bytes, planned_memory, worker_bytes, worker_plan
from gemmserve_kernels.planning.rates import Way, flops_of, product_plan, traffic
from gemmserve_kernels.planning.timeline import Pace, timeline
from gemmserve_kernels.problem.errors import ParameterInvalid
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gemmserve_kernels.planning.rates import Memory, Rates

_NARROWEST: Final = 64
"""Rows of a panel below which k is cut instead."""
_WIDE: Final = 2
"""Times an element's bytes that a partial sum over part of k takes: it is kept in double precision."""
_ROUNDING: Final = 1e-9
_MOST_FOLLOWED: Final = 32
"""Rows and columns of blocks up to which a worker's way is followed: for more the model is as good, and faster."""
SERVICE: Final = Pace()
"""Pace of the service (`gemmserve_service.scheduling.blocks`)."""
_BOUND_SHARE: Final = 0.15
"""Share of the time from which waiting is called what bounds a product."""


@dataclass(frozen=True)
class Product:
    """D = A B of contiguous operands: m, n, k at least 1, NumPy's name of the dtype, the compute mode."""

    m: int
    n: int
    k: int
    dtype: str = "complex64"
    compute: str = "auto"

    @property
    def flops(self) -> float:
        """Operations: 8 m n k of complex dtypes, 2 m n k of real ones."""
        return flops_of(self.dtype, self.m, self.n, self.k)

    @property
    def operand_bytes(self) -> int:
        """Bytes of A and B."""
        return (self.m + self.n) * self.k * ITEMSIZE[self.dtype]

    @property
    def result_bytes(self) -> int:
        """Bytes of D."""
        return self.m * self.n * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Hosts:
    """Devices and how they are reached.

    `devices`: of each node. `link`: bytes a second that a node sends, and receives, at once. `device_memory`: bytes of
    each device (None: all that it has). `memory`: where operands and result are: in memory that the driver knows
    ("pinned"), in the store's mappings ("pageable"), on the devices. `peers`: panels go up once for a host, and from
    device to device. `spread`: see the module.
    """

    devices: int = 1
    nodes: int = 1
    link: float | None = None
    device_memory: int | None = None
    memory: Memory = "pageable"
    peers: bool = False
    spread: bool = True

    def __post_init__(self) -> None:
        if self.devices < 1 or self.nodes < 1:
            raise ParameterInvalid(f"{self.nodes} nodes of {self.devices} devices", "devices")
        if self.nodes > 1 and not self.link:
            raise ParameterInvalid("several nodes need a link: bytes a second between them", "link")

    @property
    def count(self) -> int:
        """Devices of all nodes."""
        return self.devices * self.nodes


@dataclass(frozen=True)
class Cut:
    """Parts of m and n over nodes and over the devices of each, and of k over nodes (`layers`)."""

    node_rows: int = 1
    node_columns: int = 1
    rows: int = 1
    columns: int = 1
    layers: int = 1

    @property
    def down(self) -> int:
        """Devices along m."""
        return self.node_rows * self.rows

    @property
    def across(self) -> int:
        """Devices along n."""
        return self.node_columns * self.columns


@dataclass(frozen=True)
class Prediction:
    """Time, memory and transfers of a product, in seconds and bytes.

    `seconds` is at least `compute_s` + `start_s` + `uneven_s` + `end_s` (products; waiting for panels; devices that
    have no block left; the last window, and sums over layers) and every floor. `bound`: what it is due to. `copies_s`:
    of every panel that a device needs, once. `uploaded` and `downloaded`: of each device; `from_host`: of all devices
    of a node, out of its memory; `network`: received by a node. `waited_for`: why panels are waited for.
    """

    product: Product
    hosts: Hosts
    cut: Cut
    blocks: tuple[int, int]
    block_count: int
    k_parts: int
    algorithm: str
    compute_s: float
    start_s: float
    uneven_s: float
    end_s: float
    copies_s: float
    floors: dict[str, float]
    memory: DeviceMemory
    uploaded: int
    downloaded: int
    from_host: int
    network: int
    waited_for: str = "first panels"
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """From the first byte to the last."""
        return max(self.compute_s + self.start_s + self.uneven_s + self.end_s, *self.floors.values())

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.product.flops / self.seconds

    @property
    def busy(self) -> float:
        """Share of the time in which devices compute, but for blocks that do not go into equal shares: what copies
        leave.
        """
        return self.compute_s / max(self.seconds - self.uneven_s, self.compute_s)

    @property
    def bound(self) -> str:
        """Cause of the time: the floor that is reached, or the longest wait, or arithmetic."""
        name, floor = max(self.floors.items(), key=lambda each: each[1])
        if floor >= self.seconds:
            return name
        waits = {self.waited_for: self.start_s, "uneven shares": self.uneven_s, "last window": self.end_s}
        longest = max(waits, key=lambda each: waits[each])
        return longest if waits[longest] > _BOUND_SHARE * self.seconds else "arithmetic"


def predict(
    rates: Rates,
    product: Product,
    hosts: Hosts | None = None,
    *,
    cut: Cut | None = None,
    side: int = SIDE,
    pace: Pace = SERVICE,
) -> Prediction:
    """Return the prediction for a cut, by default the fastest that keeps k whole; `side`: of blocks; `pace`: in which
    workers are sent these.

    A product of fewer than 128 side³ operations is not cut: it runs on one device. Raises ParameterInvalid where the
    devices' memory is too small, or no rate is known.
    """
    hosts = hosts or Hosts()
    for extent in (product.m, product.n, product.k):
        if extent < 1:
            raise ParameterInvalid(f"a product of {product.m} x {product.n} x {product.k} has nothing to plan", "m")
    if product.flops < GridRule(side).min_flops:
        return _small(rates, product, hosts, side)
    if cut is not None:
        if cut.down * cut.across * cut.layers != hosts.count or cut.rows * cut.columns != hosts.devices:
            raise ParameterInvalid(f"{cut} is not one of {hosts.nodes} nodes of {hosts.devices} devices", "cut")
        return _blocks(rates, product, hosts, cut, side, pace)
    best = _fastest(rates, product, _some(hosts), side, pace)
    if best.hosts.count < hosts.count:
        more = f"{best.hosts.count} of {hosts.count} devices: with more it would take as long, or longer"
        best = replace(best, notes=(*best.notes, more))
    return best


def _fastest(rates: Rates, product: Product, choices: Iterable[Hosts], side: int, pace: Pace) -> Prediction:
    """Return the fastest of all cuts; of those that take as long the one of fewest devices, then with least to upload,
    then the one by rows.
    """
    found = [_blocks(rates, product, hosts, cut, side, pace) for hosts in choices for cut in cuts(hosts)]
    return min(found, key=lambda each: (round(each.seconds, 9), each.hosts.count, each.uploaded, each.cut.across))


def cuts(hosts: Hosts, *, layers: int = 1) -> Iterator[Cut]:
    """Yield the grids of nodes and of devices in each; `layers` parts of k, over nodes."""
    for node_rows in _divisors(hosts.nodes // layers):
        for rows in _divisors(hosts.devices):
            yield Cut(node_rows, hosts.nodes // layers // node_rows, rows, hosts.devices // rows, layers)


def speedup(rates: Rates, found: Prediction, *, side: int = SIDE) -> float:
    """Return how many times as fast as one device of one host, operands lying alike, with all of its memory."""
    alone = replace(found.hosts, devices=1, nodes=1, link=None, peers=False)
    return predict(rates, found.product, alone, side=side).seconds / found.seconds


@lru_cache(maxsize=256)
def block_sides(product: Product, side: int = SIDE) -> tuple[int, int]:
    """Return rows and columns of a block: they follow from the product alone (`blocks.grid`)."""
    dtype = np.dtype(product.dtype)
    a, b = Operand.contiguous((product.m, product.k), dtype), Operand.contiguous((product.k, product.n), dtype)
    grid = Grid.of(GemmProblem.build(a, b, compute=product.compute), GridRule(side))
    return (product.m, product.n) if grid is None else (grid.rows, grid.columns)


def _some(hosts: Hosts) -> Iterator[Hosts]:
    """Yield these hosts, one node of several, fewer devices of one node."""
    yield hosts
    one = replace(hosts, nodes=1, link=None)
    if hosts.nodes > 1:
        yield one
    yield from (replace(one, devices=count, peers=hosts.peers and count > 1) for count in range(1, hosts.devices))


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)


def _small(rates: Rates, product: Product, hosts: Hosts, side: int) -> Prediction:
    """Return the prediction of a product that is not cut, on one device; in blocks where that is too small for it."""
    one = replace(hosts, devices=1, nodes=1, link=None, peers=False)
    notes: tuple[str, ...] = ()
    if hosts.count > 1:
        notes = (f"less than 2^{math.log2(GridRule(side).min_flops):.0f} operations: not cut, one device has it",)
    algorithm, arithmetic = _algorithm(rates, product, product.m, product.n, product.k)
    share = Share(product.m, product.n, product.k, product.m, product.n, product.dtype, arithmetic)
    if least_bytes(share) > _budget(rates, hosts):
        return replace(_blocks(rates, product, one, Cut(), side, SERVICE), notes=notes)
    way = rates.way(hosts.memory, 1)
    copied = 0 if math.isinf(way.up) else 1
    up, down = copied * product.operand_bytes, copied * product.result_bytes
    return Prediction(
        product=product,
        hosts=one,
        cut=Cut(),
        blocks=(product.m, product.n),
        block_count=1,
        k_parts=1,
        algorithm=_named(algorithm, arithmetic),
        compute_s=rates.product_seconds(product.dtype, product.compute, product.m, product.n, product.k),
        start_s=up / way.up,
        uneven_s=0.0,
        end_s=down / way.down,
        copies_s=up / way.up,
        floors={"link": max(up / way.up, down / way.down)},
        memory=DeviceMemory(least_bytes(share), product.operand_bytes, None),
        uploaded=up,
        downloaded=down,
        from_host=up,
        network=0,
        notes=notes,
    )


def _blocks(rates: Rates, product: Product, hosts: Hosts, cut: Cut, side: int, pace: Pace) -> Prediction:
    """Return the prediction of a product that is cut into blocks, by that grid of nodes and devices."""
    share, k_parts, algorithm = _share(rates, product, hosts, cut, side)
    memory = planned_memory(share, rates.spec, product.compute, _budget(rates, hosts))
    block_s = k_parts * rates.product_seconds(
        product.dtype, product.compute, share.block_rows, share.block_columns, share.k
    )
    each = (
        product.flops
        / hosts.count
        / (k_parts * flops_of(product.dtype, share.block_rows, share.block_columns, share.k))
    )
    compute_s = each * block_s
    uneven_s = (math.ceil(each - _ROUNDING) - each) * block_s if hosts.count > 1 else 0.0
    links = _links(rates, hosts, cut, share, memory, k_parts)
    followed = _followed(rates, product, hosts, share, memory, block_s, pace) if k_parts == 1 else None
    network = _network(product, hosts, cut, share)
    waits = {
        "first panels": links.head_s + network.head_s,
        "link up": _waiting(links.first_s, compute_s),
        "network": _waiting(network.seconds, compute_s),
    }
    unhidden_s = links.floors["link up"] if memory.streams == "both" else 0.0
    if followed is not None:
        strips_s, waiting_s = followed
        compute_s, unhidden_s = compute_s + strips_s, 0.0
        waits |= {"first panels": links.head_s, "link up": max(0.0, waiting_s - links.tail_s)}
    waited_for = max(waits, key=lambda name: waits[name])
    return Prediction(
        product=product,
        hosts=hosts,
        cut=cut,
        blocks=(share.block_rows, share.block_columns),
        block_count=math.ceil(product.m / share.block_rows) * math.ceil(product.n / share.block_columns),
        k_parts=k_parts,
        algorithm=algorithm,
        compute_s=compute_s,
        start_s=waits[waited_for] + unhidden_s,
        uneven_s=max(uneven_s, 0.0),
        end_s=links.tail_s + network.tail_s,
        copies_s=links.first_s,
        floors=links.floors | network.floors,
        memory=memory,
        uploaded=links.uploaded,
        downloaded=links.downloaded,
        from_host=links.from_host,
        network=network.nbytes,
        waited_for="link up" if unhidden_s else waited_for,
        notes=_notes(product, share, k_parts, side),
    )


def _followed(
    rates: Rates, product: Product, hosts: Hosts, share: Share, memory: DeviceMemory, block_s: float, pace: Pace
) -> tuple[float, float] | None:
    """Return seconds that strips take beyond the products' own, and those for which a worker computes nothing, by its
    own plan; None where the model has to do.
    """
    way = rates.way(hosts.memory, hosts.devices)
    if hosts.memory == "pageable" and rates.stored is not None:
        way = Way(min(way.up, rates.stored.up), min(way.down, rates.stored.down))
    if math.isinf(way.up) or hosts.peers or (hosts.count > 1 and memory.streams is None):
        return None
    if max(share.grid) > _MOST_FOLLOWED:
        return None
    found = worker_plan(share, rates.spec, product.compute, _budget(rates, hosts))
    if found is None:
        return None
    grid, plan = found
    whole = grid.block_problem(0)
    strips_s = block_seconds(whole, rates.spec, plan.strips) - block_seconds(whole, rates.spec)
    part = [grid.flops(index) / grid.flops(0) for index in plan.order]
    blocks_s = [(block_s + strips_s) * each for each in part]
    both = rates.host_memory / (traffic(hosts.memory) * hosts.devices)
    pace = replace(pace, sent=min(pace.sent, plan.windows))
    seconds = timeline(plan.uploads, blocks_s, share.window_bytes, way, both=both, pace=pace)
    return strips_s * sum(part), seconds - sum(blocks_s)


def _notes(product: Product, share: Share, k_parts: int, side: int) -> tuple[str, ...]:
    sides = block_sides(product, side)
    if k_parts > 1:
        return (f"k is cut into {k_parts} parts: with all of it no panel of {_NARROWEST} rows fits",)
    if (share.block_rows, share.block_columns) != (min(sides[0], share.rows), min(sides[1], share.columns)):
        return (f"blocks of {sides[0]} x {sides[1]} do not fit",)
    return ()


def _share(rates: Rates, product: Product, hosts: Hosts, cut: Cut, side: int) -> tuple[Share, int, str]:
    """Return what a device computes, in blocks, and parts of k, as narrow as its memory makes them; the algorithm."""
    rows, columns = math.ceil(product.m / cut.down), math.ceil(product.n / cut.across)
    k = math.ceil(product.k / cut.layers)
    block_rows, block_columns = (
        min(edge, most) for edge, most in zip(block_sides(product, side), (rows, columns), strict=True)
    )
    budget = _budget(rates, hosts)
    k_parts = 1
    while True:
        depth = math.ceil(k / k_parts)
        algorithm, arithmetic = _algorithm(rates, product, block_rows, block_columns, depth)
        share = Share(rows, columns, depth, block_rows, block_columns, product.dtype, arithmetic)
        if least_bytes(share) <= budget or share.k == 1 or worker_bytes(share, rates.spec, product.compute) <= budget:
            return share, k_parts, _named(algorithm, arithmetic)
        if max(block_rows, block_columns) > _NARROWEST:
            block_rows, block_columns = (max(min(_NARROWEST, edge), edge // 2) for edge in (block_rows, block_columns))
        else:
            k_parts *= 2


@dataclass(frozen=True)
class _Links:
    """Work of a device's link: time of the first pair of panels, of every byte once, of the last window; floors."""

    head_s: float
    first_s: float
    tail_s: float
    floors: dict[str, float]
    uploaded: int
    downloaded: int
    from_host: int


def _links(rates: Rates, hosts: Hosts, cut: Cut, share: Share, memory: DeviceMemory, k_parts: int) -> _Links:
    way = rates.way(hosts.memory, hosts.devices)
    if math.isinf(way.up):
        return _Links(0.0, 0.0, 0.0, {"link up": 0.0}, 0, 0, 0)
    line = share.k * ITEMSIZE[share.dtype]
    head_a, head_b = share.block_rows * line, share.block_columns * line
    copied, uploaded = k_parts * share.copied_bytes, k_parts * memory.uploaded_bytes
    head_s, first_s = (head_a + head_b) / way.up, copied / way.up
    hosted = 1.0
    if hosts.peers and hosts.devices > 1:
        if rates.peer is None:
            raise ParameterInvalid("no rate between two devices is known", "probe")
        # Devices in a row of the grid share rows of A, those in a column columns of B: each brings its part.
        own = k_parts * (share.rows / cut.columns + share.columns / cut.rows) * line
        first = head_a / cut.columns + head_b / cut.rows
        hosted = own / copied
        head_s = first / way.up + (head_a + head_b - first) / rates.peer
        first_s = own / way.up + (copied - own) / rates.peer
    downloaded = share.result_bytes
    from_host = round(hosts.devices * hosted * uploaded)
    carried = traffic(hosts.memory) * (from_host + hosts.devices * downloaded)
    return _Links(
        head_s,
        first_s,
        share.window_bytes / way.down,
        {
            "link up": hosted * uploaded / way.up,
            "link down": downloaded / way.down,
            "host memory": carried / rates.host_memory,
        },
        round(uploaded),
        downloaded,
        from_host,
    )


@dataclass(frozen=True)
class _Network:
    """Work of a node's link, likewise; `nbytes`: received by a node."""

    head_s: float
    seconds: float
    tail_s: float
    floors: dict[str, float]
    nbytes: int


def _network(product: Product, hosts: Hosts, cut: Cut, share: Share) -> _Network:
    if hosts.nodes == 1 or hosts.link is None:
        return _Network(0.0, 0.0, 0.0, {}, 0)
    itemsize = ITEMSIZE[product.dtype]
    of_a = product.m * product.k * itemsize
    of_b = product.k * product.n * itemsize
    needed = of_a / (cut.node_rows * cut.layers) + of_b / (cut.node_columns * cut.layers)
    result = product.result_bytes / (cut.node_rows * cut.node_columns)
    sums_s = _WIDE * result * (cut.layers - 1) / cut.layers / hosts.link
    if hosts.spread:
        received = needed - (of_a + of_b) / hosts.nodes
        return _Network(0.0, received / hosts.link, sums_s, {"network": received / hosts.link}, round(received))
    others = hosts.nodes - 1
    panels = (cut.rows * share.block_rows + cut.columns * share.block_columns) * share.k * itemsize
    back = others * product.result_bytes / hosts.nodes
    last = others * hosts.devices * share.window_bytes
    return _Network(
        others * panels / hosts.link,
        others * needed / hosts.link,
        last / hosts.link + sums_s,
        {"network": max(others * needed, back) / hosts.link},
        round(needed),
    )


def _waiting(copies_s: float, compute_s: float) -> float:
    """Return how long products wait for panels in all: see the module."""
    if copies_s <= 2 * compute_s:
        return copies_s**2 / (4 * compute_s) if compute_s else 0.0
    return copies_s - compute_s


def _algorithm(rates: Rates, product: Product, m: int, n: int, k: int) -> tuple[str, str]:
    return product_plan(rates.spec, product.dtype, product.compute, m, n, k)


def _budget(rates: Rates, hosts: Hosts) -> int:
    return rates.spec.memory_bytes if hosts.device_memory is None else hosts.device_memory


def _named(algorithm: str, arithmetic: str) -> str:
    return algorithm if arithmetic == "plain" else f"{algorithm}, {arithmetic}"

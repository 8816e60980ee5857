"""Rates of a host that predictions are made from: products of its devices, their links, the host's memory.

They come from a document of `gemmserve probe`, or from those that lie in `hosts`, measured on known machines. Rates are
in bytes a second, times in seconds.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_kernels.dispatch.estimate import estimate
from gemmserve_kernels.dispatch.routes import plan_gemm
from gemmserve_kernels.problem.errors import ParameterInvalid
from gemmserve_kernels.problem.operand import Operand
from gemmserve_kernels.problem.problem import GemmProblem

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    Memory = Literal["pageable", "pinned", "device"]

FORMAT: Final = 1
"""Version of the document."""
DEFAULT: Final = "nvidia-h200-x2"
"""Host in `hosts` that is assumed where nothing was measured."""
RING_TRAFFIC: Final = 4
"""Bytes of the host's memory that move for a byte that goes through the ring of pinned slots: read, the line of the
slot that is fetched before it is written, written, and read by the link."""
COPY_TRAFFIC: Final = 3
"""The same of a copy: read, the line that is fetched before it is written, written."""
_NEIGHBOURS: Final = 4
_EXACT: Final = 1e-9


@dataclass(frozen=True)
class Way:
    """Bytes a second from the host to a device and back, of one device alone."""

    up: float
    down: float


@dataclass(frozen=True)
class MeasuredProduct:
    """One product as it was timed, the device being as warm as long work makes it."""

    dtype: str
    compute: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops(self) -> float:
        """Operations: 8 m n k of complex dtypes, 2 m n k of real ones."""
        return flops_of(self.dtype, self.m, self.n, self.k)


@dataclass(frozen=True)
class Rates:
    """Rates of one kind of host.

    `pinned`, `pageable`: by memory that the driver knows, and through the ring of pinned slots. `host_memory`: traffic
    of the host's memory, which all its devices share. `peer`: between two devices of the host, each way; None where
    that was not measured. `seen`: devices of the host that was measured. `stored`: through the ring, too, from and to
    parts of mapped files, both ways at once; None where that was not measured.
    """

    spec: DeviceSpec
    products: tuple[MeasuredProduct, ...]
    pinned: Way
    pageable: Way
    host_memory: float
    peer: float | None = None
    seen: int = 1
    about: str = ""
    stored: Way | None = None

    def way(self, memory: Memory, devices: int) -> Way:
        """Return the rates of each of so many devices of one host at once; infinite where operands need no copies."""
        if memory == "device" or self.spec.kind == "cpu":
            return Way(math.inf, math.inf)
        own = self.pinned if memory == "pinned" else self.pageable
        shared = self.host_memory / (traffic(memory) * devices)
        return Way(min(own.up, shared), min(own.down, shared))

    def product_seconds(self, dtype: str, compute: str, m: int, n: int, k: int) -> float:
        """Return the seconds of one product of operands that a device has.

        The kernels' own estimate, corrected by what was measured near that shape, as `dispatch.estimate` does. Raises
        ParameterInvalid where neither says anything, and what planning a product raises.
        """
        ratios = [
            (_distance((m, n, k), (each.m, each.n, each.k)), math.log(each.seconds / base))
            for each in self.products
            if (each.dtype, each.compute) == (dtype, compute)
            and (base := _base(self.spec, dtype, compute, each.m, each.n, each.k)) > 0
        ]
        here = _base(self.spec, dtype, compute, m, n, k)
        if not ratios and not _estimated(self.spec, dtype, compute, m, n, k):
            have = ", ".join(sorted({f"{each.dtype} {each.compute}" for each in self.products})) or "none"
            raise ParameterInvalid(
                f"no rate of {dtype} {compute} products on {self.spec.name}: there are {have}", "probe"
            )
        return here * math.exp(_mean(ratios))

    def document(self) -> dict[str, Any]:
        """Return what `rates_of` reads."""
        return {
            "format": FORMAT,
            "about": self.about,
            "devices": self.seen,
            "spec": {each.name: getattr(self.spec, each.name) for each in fields(DeviceSpec)},
            "products": [asdict(each) for each in self.products],
            "pinned": _written(self.pinned),
            "pageable": _written(self.pageable),
            "host_memory": self.host_memory,
            "peer": self.peer,
            "stored": None if self.stored is None else _written(self.stored),
        }


def flops_of(dtype: str, m: int, n: int, k: int) -> float:
    """Operations of a product: 8 m n k of complex dtypes, 2 m n k of real ones."""
    return (8.0 if dtype.startswith("complex") else 2.0) * m * n * k


def traffic(memory: Memory) -> int:
    """Return the bytes of the host's memory that move for each byte on a link."""
    return RING_TRAFFIC if memory == "pageable" else 1


@cache
def product_plan(spec: DeviceSpec, dtype: str, compute: str, m: int, n: int, k: int) -> tuple[str, str]:
    """Return the algorithm that multiplies contiguous operands on that device, and its arithmetic."""
    kind = np.dtype(dtype)
    problem = GemmProblem.build(Operand.contiguous((m, k), kind), Operand.contiguous((k, n), kind), compute=compute)
    chosen = plan_gemm(problem, spec)
    return chosen.algorithm, chosen.arithmetic


def rates_of(document: Any) -> Rates:
    """Return the rates of a document, as `Rates.document` and `gemmserve probe` make it. Raises ParameterInvalid."""
    try:
        _check_format(document["format"])
        spec = document["spec"]
        peer = document.get("peer")
        return Rates(
            DeviceSpec(**{**spec, "compute_modes": tuple(spec["compute_modes"])}),
            tuple(_product(each) for each in document["products"]),
            _way(document["pinned"]),
            _way(document["pageable"]),
            _rate(document["host_memory"]),
            None if peer is None else _rate(peer),
            int(document.get("devices", 1)),
            str(document.get("about", "")),
            None if document.get("stored") is None else _way(document["stored"]),
        )
    except ParameterInvalid:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ParameterInvalid(f"no rates of a host: {type(error).__name__}: {error}", "probe") from error


def read_rates(path: Path) -> Rates:
    """Return the rates of a file. Raises OSError, ParameterInvalid."""
    try:
        return rates_of(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ParameterInvalid(f"{path} holds no JSON: {error}", "probe") from error


@cache
def shipped(name: str = DEFAULT) -> Rates:
    """Return the rates of a host that lies in `hosts`. Raises ParameterInvalid, naming those that there are."""
    folder = resources.files("gemmserve_kernels.planning") / "hosts"
    found = folder / f"{name}.json"
    if not found.is_file():
        raise ParameterInvalid(f"no host {name!r}: there are {', '.join(shipped_hosts())}", "host")
    return rates_of(json.loads(found.read_text(encoding="utf-8")))


def shipped_hosts() -> list[str]:
    """Return the names of the hosts in `hosts`."""
    folder = resources.files("gemmserve_kernels.planning") / "hosts"
    return sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json"))


def _check_format(number: object) -> None:
    if number != FORMAT:
        raise ParameterInvalid(f"rates of format {number}; this version reads {FORMAT}", "probe")


def _product(found: dict[str, Any]) -> MeasuredProduct:
    m, n, k = (int(found[name]) for name in ("m", "n", "k"))
    if min(m, n, k) < 1:
        raise ValueError(f"a product of {m} x {n} x {k}")
    return MeasuredProduct(str(np.dtype(found["dtype"])), str(found["compute"]), m, n, k, _rate(found["seconds"]))


def _way(found: dict[str, Any] | None) -> Way:
    """None is a device that uses the host's memory."""
    return Way(math.inf, math.inf) if found is None else Way(_rate(found["up"]), _rate(found["down"]))


def _written(way: Way) -> dict[str, float] | None:
    return None if math.isinf(way.up) else asdict(way)


def _rate(found: Any) -> float:
    value = float(found)
    if not 0 < value < math.inf:
        raise ValueError(f"{found} is no rate")
    return value


def _estimated(spec: DeviceSpec, dtype: str, compute: str, m: int, n: int, k: int) -> bool:
    algorithm, arithmetic = product_plan(spec, dtype, compute, m, n, k)
    return math.isfinite(estimate(spec, algorithm, arithmetic, dtype, (1, m, n, k)))


def _base(spec: DeviceSpec, dtype: str, compute: str, m: int, n: int, k: int) -> float:
    """Seconds by the kernels' estimate; where that knows nothing (NumPy), by a rate of 1 Tflop/s, whose correction is
    the measured one.
    """
    algorithm, arithmetic = product_plan(spec, dtype, compute, m, n, k)
    found = estimate(spec, algorithm, arithmetic, dtype, (1, m, n, k))
    return found if math.isfinite(found) else flops_of(dtype, m, n, k) / 1e12


def _distance(here: tuple[int, ...], there: tuple[int, ...]) -> float:
    """Binary orders of magnitude between two shapes, or the transpose of one."""
    m, n, k = (math.log2(extent) for extent in here)
    other = [math.log2(extent) for extent in there]
    return min(math.dist((m, n, k), other), math.dist((n, m, k), other))


def _mean(found: Iterable[tuple[float, float]]) -> float:
    """Mean of values by their distances, weighed as `dispatch.estimate` weighs; 0 of none."""
    nearest = sorted(found)[:_NEIGHBOURS]
    if not nearest:
        return 0.0
    if nearest[0][0] < _EXACT:
        return nearest[0][1]
    weights = [distance**-4 for distance, _ in nearest]
    return sum(weight * value for weight, (_, value) in zip(weights, nearest, strict=True)) / sum(weights)

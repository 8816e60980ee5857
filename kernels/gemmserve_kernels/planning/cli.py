"""`gemmserve plan`: how long a product would take, on devices that need not be here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmserve_kernels.planning.model import Hosts, Product, predict, speedup
from gemmserve_kernels.planning.quantities import parse_bytes, parse_rate
from gemmserve_kernels.planning.rates import DEFAULT, read_rates, shipped, shipped_hosts
from gemmserve_kernels.planning.report import as_json, lines
from gemmserve_kernels.problem.errors import KernelError
from gemmserve_kernels.problem.operand import DTYPES
from gemmserve_kernels.problem.vocabulary import COMPUTE_MODES

if TYPE_CHECKING:
    from collections.abc import Callable


class PlanCommand:
    """Predicts; computes nothing."""

    name = "plan"
    help = "predict time, memory and transfers of a product on one or more devices, from measured rates"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the arguments."""
        for name in ("m", "n", "k"):
            parser.add_argument(f"--{name}", type=_count, required=True, help="extent of the product")
        parser.add_argument("--dtype", choices=[dtype.name for dtype in DTYPES], default="complex64")
        parser.add_argument("--compute", choices=COMPUTE_MODES, default="auto")
        where = parser.add_argument_group("where")
        where.add_argument("--devices", type=_count, default=1, metavar="N", help="of each node (default 1)")
        where.add_argument("--nodes", type=_count, default=1, metavar="N", help="default 1")
        where.add_argument(
            "--link", type=_of(parse_rate), metavar="RATE", help="of each node to the others: 100Gb/s, 12.5GB/s"
        )
        where.add_argument(
            "--device-memory", type=_of(parse_bytes), metavar="SIZE", help="of each device (default: all it has)"
        )
        where.add_argument(
            "--memory",
            choices=("pageable", "pinned", "device"),
            default="pageable",
            help="where operands and result are: in the store, in memory that the driver knows, on the devices",
        )
        where.add_argument("--peers", action="store_true", help="panels go from device to device within a host")
        where.add_argument(
            "--first-node", action="store_true", help="the first node has the operands, instead of each its part"
        )
        rates = parser.add_argument_group("rates")
        rates.add_argument("--probe", type=Path, metavar="FILE", help="what `gemmserve probe` wrote on that host")
        rates.add_argument(
            "--rates", choices=shipped_hosts(), default=DEFAULT, help=f"a host that was measured (default {DEFAULT})"
        )
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, args: argparse.Namespace, context: Any) -> int:
        """Prints the prediction; 1 where there is none."""
        try:
            rates = shipped(args.rates) if args.probe is None else read_rates(args.probe)
            product = Product(args.m, args.n, args.k, args.dtype, args.compute)
            hosts = Hosts(
                devices=args.devices,
                nodes=args.nodes,
                link=args.link,
                device_memory=args.device_memory,
                memory=args.memory,
                peers=args.peers,
                spread=not args.first_node,
            )
            found = predict(rates, product, hosts)
            times = speedup(rates, found)
        except KernelError as error:
            context.console.error(str(error))
            return 1
        if args.json:
            context.console.json(as_json(found, rates, times))
        else:
            for line in lines(found, rates, times):
                context.console.print(line)
        return 0


PLAN = PlanCommand()


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _of(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser whose ValueError argparse shows with its text."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed

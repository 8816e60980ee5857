"""`gemmserve bench gemm | gemm_reduce | accuracy`: a command object for the command line."""

from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve_kernels.bench.accuracy import MODES, accuracy
from gemmserve_kernels.bench.cases import INITS, Case
from gemmserve_kernels.bench.environment import environment
from gemmserve_kernels.bench.formats import FORMATS, accuracy_table, grade_table, measurement_table, to_csv, to_json
from gemmserve_kernels.bench.grades import MODES as GRADED
from gemmserve_kernels.bench.grades import grades, worst_of
from gemmserve_kernels.bench.kinds import KINDS
from gemmserve_kernels.bench.run import measure
from gemmserve_kernels.bench.targets import ServerTarget, open_target
from gemmserve_kernels.dispatch.gemm import gemm
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ComputeUnsupported, DeviceError, KernelError, ParameterInvalid
from gemmserve_kernels.problem.operand import DTYPES
from gemmserve_kernels.problem.vocabulary import (
    ALGORITHMS,
    AXES,
    COMPUTE_MODES,
    LAYOUTS,
    ORDERS,
    PRE_OPS,
    REDUCTIONS,
    ROUNDINGS,
    TRANS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gemmserve_kernels.bench.accuracy import AccuracyRow
    from gemmserve_kernels.bench.cases import Row
    from gemmserve_kernels.bench.grades import GradeRow
    from gemmserve_kernels.bench.targets import CpuTarget, GpuTarget
    from gemmserve_kernels.device.spec import DeviceSpec

_DTYPES = [dtype.name for dtype in DTYPES]


class BenchCommand:
    """Measures on this machine's device, or on a server."""

    name = "bench"
    help = "time and check products on this machine or on a server"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the subcommands; defaults from variables are the parser's affair."""
        kinds = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
        common = {"allow_abbrev": False}
        for op, text in (("gemm", "D = alpha op(A) op(B) + beta C"), ("gemm_reduce", "reductions of op(A) op(B)")):
            product = kinds.add_parser(op, help=text, description=f"Times {text} beside a rival.", **common)  # type: ignore[arg-type]
            _add_product(product, op)
            _add_output(product)
        table = kinds.add_parser(
            "accuracy",
            help="errors of the compute modes side by side",
            description="Errors of FP64, FP32, 1xTF32, 3xTF32 and 3xFP16 products against the exact one: kernels where "
            "the device has the mode, else NumPy models of it. With --elementwise the worst error of any element over "
            "(|A| |B|), in units of the unit roundoff, of every mode and kind of data beside the vendor's own.",
            **common,  # type: ignore[arg-type]
        )
        _add_accuracy(table)
        _add_output(table)

    def run(self, args: argparse.Namespace, context: Any) -> int:
        """Measures and prints; 1 where the device or the request is at fault."""
        where = f"the server {args.server}" if args.server else "this machine (--server URL: a server)"
        context.console.note(f"measuring {where}")  # at once: to open a device takes seconds
        try:
            rows, table, spec = _run_of(args)(args, context)
        except (KernelError, DeviceError) as error:
            context.console.error(str(error))
            return 1
        chosen = "json" if args.json else args.format
        text = to_json(rows, environment(spec)) if chosen == "json" else to_csv(rows)
        if args.output is not None:
            args.output.write_text(text + "\n", encoding="utf-8")
        if chosen == "table":
            context.console.table(*table)
        elif args.output is None:
            context.console.print(text)
        return 0


BENCH = BenchCommand()


def _add_product(parser: argparse.ArgumentParser, op: str) -> None:
    sizes = parser.add_argument_group("problem")
    for name, default in (("m", 1024), ("n", 1024), ("k", 1024), ("batch", 1)):
        sizes.add_argument(f"--{name}", type=_size, default=default, help=f"default {default}")
    sizes.add_argument("--dtype", choices=_DTYPES, default="complex64")
    sizes.add_argument("--compute", choices=COMPUTE_MODES, default="auto")
    sizes.add_argument("--trans-a", choices=TRANS, default="N", help="transpose, conjugate transpose, conjugate")
    sizes.add_argument("--trans-b", choices=TRANS, default="N")
    sizes.add_argument("--alpha", type=complex, default=1 + 0j, help="a Python number such as 2 or 1-0.5j")
    sizes.add_argument("--layout", choices=LAYOUTS, default="interleaved")
    if op == "gemm":
        sizes.add_argument("--beta", type=complex, default=0j, help="other than 0: a random C is read")
        sizes.add_argument("--order", choices=ORDERS, default="C", help="of the result")
    else:
        sizes.add_argument("--reduce", choices=REDUCTIONS, nargs="+", default=["sum"])
        sizes.add_argument("--axis", choices=AXES, nargs="+", default=["m"])
        sizes.add_argument("--pre-op", choices=PRE_OPS, default="identity")
        sizes.add_argument("--return-c", action="store_true", help="also return the product")
        sizes.add_argument("--atomic", action="store_true", help="permit sums whose order varies")
    sizes.add_argument("--init", choices=INITS, default="normal", help="the data (none: zeros, for time alone)")
    sizes.add_argument("--seed", type=int, default=0)
    tuning = parser.add_argument_group("algorithm")
    tuning.add_argument("--algorithm", choices=ALGORITHMS)
    tuning.add_argument("--block", type=_block, metavar="MxNxK", help="the tile of one block, for example 128x64x8")
    tuning.add_argument("--stages", type=_size, help="buffers of shared memory")
    how = parser.add_argument_group("measurement")
    how.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help="compare with an oracle")
    how.add_argument("--time", action=argparse.BooleanOptionalAction, default=True, help="measure times")
    how.add_argument("--rival", action=argparse.BooleanOptionalAction, default=True, help="run the rival beside")
    how.add_argument("--warmup", type=_count, default=3)
    how.add_argument("--iterations", type=_size, default=10)


def _add_accuracy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--m", type=_size, default=256)
    parser.add_argument("--n", type=_size, default=256)
    parser.add_argument("--k", type=_size, nargs="+", default=[256, 1024], help="one table for each")
    parser.add_argument("--dtype", choices=tuple(GRADED), nargs="+", help="default complex64; with --elementwise all")
    parser.add_argument("--init", choices=INITS[1:], nargs="+", default=["normal"])
    parser.add_argument("--seeds", type=_size, default=3, help="how many; errors are means over them")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    modes = tuple(dict.fromkeys((*MODES, *itertools.chain.from_iterable(GRADED.values()))))
    parser.add_argument("--modes", choices=modes, nargs="+", metavar="MODE", help=", ".join(modes))
    grade = parser.add_argument_group("elementwise")
    grade.add_argument("--elementwise", action="store_true", help="worst errors of elements, in u, beside the vendor's")
    grade.add_argument(
        "--kinds", choices=tuple(KINDS), nargs="+", metavar="KIND", help=f"of data, by default all: {', '.join(KINDS)}"
    )
    parser.add_argument("--big", choices=ROUNDINGS, default="toward_zero", help="3xTF32: rounding of the big parts")
    parser.add_argument("--small", choices=ROUNDINGS, default="half_ulp_truncate", help="of the small parts")
    parser.add_argument("--promote", type=_size, default=32, help="steps of k between promotions, in the models")


def _add_output(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where")
    where.add_argument("--device", default="auto", help="auto, cpu, cuda:0, rocm:0")
    where.add_argument("--server", metavar="URL", help="measure a server instead: jobs on arrays that are there")
    where.add_argument("--format", choices=FORMATS, default="table")
    where.add_argument("--json", action="store_true", help="the same as --format json")
    where.add_argument("--output", type=Path, metavar="FILE", help="write there: JSON with --format json, else CSV")


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative: {value}")
    return value


def _block(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"a tile is written 128x64x8, not {text!r}")
    m, n, k = map(int, match.groups())
    return m, n, k


def _config(args: argparse.Namespace) -> GemmConfig | None:
    m, n, k = args.block or (None, None, None)
    config = GemmConfig(algorithm=args.algorithm, block_m=m, block_n=n, block_k=k, stages=args.stages)
    return None if config == GemmConfig() else config


def _case(args: argparse.Namespace) -> Case:
    common = {
        name: getattr(args, name)
        for name in (
            "m",
            "n",
            "k",
            "batch",
            "dtype",
            "compute",
            "trans_a",
            "trans_b",
            "alpha",
            "layout",
            "init",
            "seed",
        )
    }
    if args.bench == "gemm":
        return Case(op="gemm", beta=args.beta, order=args.order, config=_config(args), **common)
    return Case(
        op="gemm_reduce",
        reduce=tuple(args.reduce),
        axis=tuple(args.axis),
        pre_op=args.pre_op,
        return_c=args.return_c,
        reproducible=not args.atomic,
        config=_config(args),
        **common,
    )


def _target(args: argparse.Namespace, context: Any) -> tuple[CpuTarget | GpuTarget | ServerTarget, DeviceSpec | None]:
    if args.server:
        return ServerTarget(context.connect(args.server)), None
    target = open_target(args.device)
    return target, target.spec


_Found = tuple[
    "Sequence[Row] | Sequence[AccuracyRow] | Sequence[GradeRow]", tuple[list[str], list[list[str]]], "DeviceSpec | None"
]


def _run_of(args: argparse.Namespace) -> Callable[[argparse.Namespace, Any], _Found]:
    if args.bench != "accuracy":
        return _measure
    return _elementwise if args.elementwise else _accuracy


def _measure(args: argparse.Namespace, context: Any) -> _Found:
    case = _case(args)
    case.problem()  # wrong arguments are told before anything is opened
    target, spec = _target(args, context)
    context.console.note(f"{args.bench} on {target.name}")
    iterations = args.iterations if args.time else 0
    rows = measure(
        case,
        target,
        warmup=args.warmup,
        iterations=iterations,
        verify=args.verify,
        rival=args.rival and not args.server,
    )
    return rows, measurement_table(rows), spec


def _accuracy(args: argparse.Namespace, context: Any) -> _Found:
    dtypes, modes = args.dtype or ["complex64"], args.modes or MODES
    if not {"float32", "complex64"} >= set(dtypes):
        raise ParameterInvalid("this table is of float32 and complex64; --elementwise has 64-bit data", "dtype")
    if not set(MODES) >= set(modes):
        raise ParameterInvalid(f"this table has {', '.join(MODES)}; --elementwise has the other modes", "modes")
    target, spec = _target(args, context)
    context.console.note(f"accuracy on {target.name}")
    rows = [
        row
        for dtype in dtypes
        for init in args.init
        for k in args.k
        for row in accuracy(
            _multiplier(target, context, args),
            m=args.m,
            n=args.n,
            k=k,
            dtype=dtype,
            init=init,
            seeds=range(args.seed, args.seed + args.seeds),
            modes=modes,
            big=args.big,
            small=args.small,
            promote=args.promote,
        )
    ]
    return rows, accuracy_table(rows), spec


def _elementwise(args: argparse.Namespace, context: Any) -> _Found:
    target, spec = _target(args, context)
    context.console.note(f"elementwise errors on {target.name}")
    xp, multiply = np, gemm
    if isinstance(target, ServerTarget):
        multiply = _multiplier(target, context, args)
    elif target.spec.kind != "cpu":
        import cupy as xp  # type: ignore[no-redef]
    rows: list[GradeRow] = []
    lacking: dict[str, str] = {}
    for dtype, k, kind in itertools.product(args.dtype or GRADED, args.k, args.kinds or KINDS):
        modes = [mode for mode in GRADED[dtype] if mode in (args.modes or GRADED[dtype])]
        found: list[GradeRow] = []
        for seed in range(args.seed, args.seed + args.seeds):
            here, skipped = grades(
                xp, kind, m=args.m, n=args.n, k=k, dtype=dtype, seed=seed, modes=modes, multiply=multiply
            )
            found += here
            lacking |= skipped
        rows += worst_of(found)
    for mode, reason in lacking.items():
        context.console.note(f"{mode} is passed over: {reason}")
    return rows, grade_table(rows), spec


def _multiplier(target: Any, context: Any, args: argparse.Namespace) -> Callable[..., Any]:
    """A product of NumPy arrays on the target, raising ComputeUnsupported for modes that it lacks."""
    if isinstance(target, ServerTarget):
        client = context.connect(args.server)

        def remote(a: Any, b: Any, *, compute: str) -> Any:
            try:
                return client.gemm(a, b, compute=compute)
            except Exception as error:
                # The SDK's own tree of errors has a class of the same name, and is not imported here.
                if type(error).__name__ == ComputeUnsupported.__name__:
                    raise ComputeUnsupported(str(error)) from error
                raise

        return remote
    if target.spec.kind == "cpu":
        return gemm
    import cupy

    return lambda a, b, *, compute: cupy.asnumpy(gemm(cupy.asarray(a), cupy.asarray(b), compute=compute))

"""gemm and reduce: operands are .npy files, "-" for stdin, or ids of arrays on the server."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from gemmserve._calls.params import Axis, Compute, Layout, Order, PreOp, Reduction, Trans
from gemmserve._handles.display import size_text
from gemmserve.cli._context import UsageError, add_connection
from gemmserve.cli._files import STANDARD, check_output, read_array, write_array, write_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve import Client
    from gemmserve.cli._context import Context

_ID: Final = re.compile(r"arr_[0-9a-z]{26}(?:_[1-9][0-9]{0,2})?")


def scalar(text: str) -> complex:
    """A real or complex number as Python writes it, `2`, `1e-3`, `1+2j`; `i` will do for `j`."""
    try:
        return complex(text.replace(" ", "").replace("i", "j"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number is written as 2, 1e-3 or 1+2j, not {text!r}") from None


def _config(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'a config is a JSON object, as {{"block_m": 128}}, not {text!r}')
    return value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help=".npy file, - for stdin, or the id of an array on the server")
    parser.add_argument("b", metavar="B", help="likewise")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="file to write, or - for stdout; without it the result of a product of remote arrays stays there",
    )
    parser.add_argument("--alpha", type=scalar, default=1, metavar="NUMBER", help="factor of the product, as in 1+2j")
    parser.add_argument("--trans-a", choices=get_args(Trans), default="N", help="N, T, C (conjugate transpose), R")
    parser.add_argument("--trans-b", choices=get_args(Trans), default="N", help="likewise")
    parser.add_argument("--layout", choices=get_args(Layout), default="interleaved", help="of complex operands")
    parser.add_argument("--compute", choices=get_args(Compute), default="auto", help="how products are formed")
    parser.add_argument("--config", type=_config, metavar="JSON", help='overrides, as in {"block_m": 128}')
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="cancel it after this time")
    add_connection(parser)


class _Gemm:
    name = "gemm"
    help = "D = alpha * op(A) * op(B) + beta * C"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        _add_common(parser)
        parser.add_argument("-c", metavar="C", help="the array that is added, times beta")
        parser.add_argument("--beta", type=scalar, metavar="NUMBER", help="factor of C (default: 1 with -c)")
        parser.add_argument("--order", choices=get_args(Order), default="C", help="memory order of the result")

    def run(self, args: argparse.Namespace, context: Context) -> int:
        options = {**_options(args), "beta": args.beta, "order": args.order}
        return _run("gemm", [args.a, args.b] + ([] if args.c is None else [args.c]), options, args.output, context)


class _Reduce:
    name = "reduce"
    help = "reduce op(A) * op(B) over an axis as it is formed"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        _add_common(parser)
        names, axes = ", ".join(get_args(Reduction)), ", ".join(get_args(Axis))
        parser.add_argument(
            "--reduce", type=_names, default=["sum"], metavar="NAMES", help=f"of {names}; several make a .npz"
        )
        parser.add_argument("--axis", type=_names, default=["m"], metavar="NAMES", help=f"of {axes}")
        parser.add_argument("--pre-op", choices=get_args(PreOp), default="identity", help="on the product's elements")
        parser.add_argument("--return-c", action="store_true", help="write the product too; makes a .npz")
        parser.add_argument("--not-reproducible", action="store_true", help="permit a combine whose order varies")

    def run(self, args: argparse.Namespace, context: Context) -> int:
        options = {
            **_options(args),
            "reduce": args.reduce[0] if len(args.reduce) == 1 else args.reduce,
            "axis": args.axis[0] if len(args.axis) == 1 else args.axis,
            "pre_op": args.pre_op,
            "return_c": args.return_c,
            "reproducible": not args.not_reproducible,
        }
        return _run("gemm_reduce", [args.a, args.b], options, args.output, context)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("alpha", "trans_a", "trans_b", "layout", "compute", "config", "timeout")
    return {name: getattr(args, name) for name in names}


def _run(op: str, paths: list[str], options: Mapping[str, Any], output: str | None, context: Context) -> int:
    if paths.count(STANDARD) > 1:
        raise UsageError("stdin can be read once")
    for path in paths:
        _check_operand(path)
    if output is None and not any(map(_ID.fullmatch, paths)):
        raise UsageError("-o says where the result goes (it can be left out when an operand is on the server)")
    check_output(output)
    client = context.connect()
    operands = [_operand(client, path) for path in paths]
    began = time.perf_counter()
    result: Any = getattr(client, op)(*operands, **options)
    if output is None:
        for name, remote in result.items() if isinstance(result, dict) else [("", result)]:
            context.console.print(f"{name} {remote.id}".strip())
        return 0
    if isinstance(result, dict):
        arrays = {name: _local(array) for name, array in result.items()}
        write_arrays(output, arrays)
    else:
        arrays = {"": _local(result)}
        write_array(output, arrays[""])
    seconds = time.perf_counter() - began
    for name, array in arrays.items():
        shape = "x".join(map(str, array.shape)) or "scalar"
        what = f"{output}{f'[{name}]' if name else ''}: {array.dtype.name} {shape}, {size_text(array.nbytes)}"
        context.console.note(f"{what}, {seconds:.3f} s")
    return 0


def _check_operand(path: str) -> None:
    """Raises UsageError for what looks like an id, and is neither an array's nor a file."""
    if _ID.fullmatch(path) or not path.startswith(("arr_", "job_")) or Path(path).exists():
        return
    if path.startswith("job_"):
        raise UsageError(f"{path} is no array: `gemmserve jobs show {path}` names the arrays that a job has made")
    raise UsageError(f"{path} is no id of an array, as `gemmserve ls` lists them, and there is no such file")


def _operand(client: Client, path: str) -> Any:
    return client.array(path) if _ID.fullmatch(path) else read_array(path)


def _local(result: Any) -> Any:
    """The result's elements; one that was only computed to be written does not stay on the server."""
    if not hasattr(result, "delete"):
        return result
    with result:
        return result.numpy()


GEMM, REDUCE = _Gemm(), _Reduce()

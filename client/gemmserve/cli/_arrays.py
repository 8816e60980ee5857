"""put, get, ls, rm: arrays that stay on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmserve.cli._context import UsageError, add_connection
from gemmserve.cli._files import STANDARD, check_output, read_array, write_array

if TYPE_CHECKING:
    import argparse

    from gemmserve import ArrayInfo
    from gemmserve.cli._context import Context


class _Put:
    name = "put"
    help = "upload .npy files; prints the id of each"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("files", nargs="+", metavar="FILE", help=".npy, or - for stdin")
        parser.add_argument("--ttl", type=float, metavar="SECONDS", help="life on the server (default: the server's)")
        parser.add_argument("--digest", action="store_true", help="send a SHA-256 for the server to check")
        parser.add_argument("--json", action="store_true", help="print what the server says of each array")
        add_connection(parser)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        if args.files.count(STANDARD) > 1:
            raise UsageError("stdin can be read once")
        client = context.connect()
        infos = []
        for file in args.files:
            remote = client.put(read_array(file), ttl_s=args.ttl, digest=args.digest)
            infos.append(array_fields(remote.info))
            if not args.json:
                context.console.print(remote.id)
        if args.json:
            context.console.json(infos)
        return 0


class _Get:
    name = "get"
    help = "download an array as .npy"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", help="the array's id")
        parser.add_argument("-o", "--output", required=True, metavar="FILE", help=".npy to write, or - for stdout")
        add_connection(parser)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        check_output(args.output)
        write_array(args.output, context.connect().get(args.id))
        return 0


class _Ls:
    name = "ls"
    help = "list the arrays on the server"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--limit", type=int, metavar="N", help="the newest N only")
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_connection(parser)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        infos = [remote.info for remote in context.connect().arrays(limit=args.limit)]
        if args.json:
            context.console.json([array_fields(info) for info in infos])
            return 0
        rows = [
            (info.id, info.dtype.name, "x".join(map(str, info.shape)) or "scalar", info.order, size_text(info.nbytes),
             when_text(info.created_at), when_text(info.expires_at) or "never")
            for info in infos
        ]  # fmt: skip
        context.console.table(("id", "dtype", "shape", "order", "size", "created", "expires"), rows)
        return 0


class _Rm:
    name = "rm"
    help = "delete arrays from the server"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("ids", nargs="+", metavar="ID", help="ids of arrays")
        add_connection(parser)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        client = context.connect()
        for array_id in args.ids:
            client.delete(array_id)
        return 0


def array_fields(info: ArrayInfo) -> dict[str, Any]:
    """An ArrayInfo for JSON."""
    times = {name: _iso(getattr(info, name)) for name in ("created_at", "expires_at")}
    return {**vars(info), "dtype": info.dtype.name, **times}


def _iso(time: Any) -> str | None:
    return None if time is None else time.isoformat()


def size_text(nbytes: int) -> str:
    """Bytes for people: 512 B, 3.2 MiB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def when_text(time: Any) -> str:
    """A time in the local zone, to the second."""
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


PUT, GET, LS, RM = _Put(), _Get(), _Ls(), _Rm()

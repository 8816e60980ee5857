"""put, get, ls, rm: arrays that stay on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmserve._handles.display import size_text
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
        parser.add_argument("--name", help="a name by which `ls --name` finds it")
        _add_labels(parser, "a label, any number of times")
        parser.add_argument("--digest", action="store_true", help="send a SHA-256 for the server to check")
        parser.add_argument("--json", action="store_true", help="print what the server says of each array")
        add_connection(parser)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        if args.files.count(STANDARD) > 1:
            raise UsageError("stdin can be read once")
        client = context.connect()
        infos = []
        for file in args.files:
            remote = client.put(
                read_array(file), ttl_s=args.ttl, digest=args.digest, name=args.name, labels=_labels(args.label)
            )
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
        parser.add_argument("id", nargs="?", help="the array's id")
        parser.add_argument("--name", help="the newest of that name instead")
        parser.add_argument("-o", "--output", required=True, metavar="FILE", help=".npy to write, or - for stdout")
        add_connection(parser)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        if (args.id is None) == (args.name is None):
            raise UsageError("name one array, by its id or by --name")
        check_output(args.output)
        client = context.connect()
        write_array(args.output, client.get(args.id) if args.name is None else client[args.name].numpy())
        return 0


class _Ls:
    name = "ls"
    help = "list the arrays on the server"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--limit", type=int, metavar="N", help="the newest N only")
        parser.add_argument("--all", action="store_true", help="everybody's; needs a key with the scope admin")
        parser.add_argument("--name", help="those of that name only")
        _add_labels(parser, "those with that label only; any number of times")
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_connection(parser)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        labels = _labels(args.label)
        found = context.connect().arrays(limit=args.limit, name=args.name, labels=labels, everybody=args.all)
        infos = [remote.info for remote in found]
        if args.json:
            context.console.json([array_fields(info) for info in infos])
            return 0
        rows = [
            (info.id, info.dtype.name, "x".join(map(str, info.shape)) or "scalar", info.order, size_text(info.nbytes),
             when_text(info.created_at), when_text(info.expires_at) or "never", info.name)
            for info in infos
        ]  # fmt: skip
        context.console.table(("id", "dtype", "shape", "order", "size", "created", "expires", "name"), rows)
        return 0


class _Rm:
    name = "rm"
    help = "delete arrays from the server"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("ids", nargs="*", metavar="ID", help="ids of arrays")
        parser.add_argument("--name", help="all of that name")
        _add_labels(parser, "all with that label; any number of times")
        parser.add_argument("--older-than", type=float, metavar="SECONDS", help="all made more than so long ago")
        parser.add_argument("--dry-run", action="store_true", help="delete nothing, print how many it would be")
        add_connection(parser)

    def run(self, args: argparse.Namespace, context: Context) -> int:
        labels = _labels(args.label)
        chosen = args.name is not None or bool(labels) or args.older_than is not None
        if chosen == bool(args.ids):
            raise UsageError("name arrays by their ids, or choose them by --name, --label and --older-than")
        client = context.connect()
        if args.ids:
            if args.dry_run:
                raise UsageError("--dry-run goes with --name, --label and --older-than")
            ids = dict.fromkeys(args.ids)
            absent = len(ids) - client.delete(*ids)
            if absent:
                context.console.error(f"{absent} of {len(ids)} were no arrays: deleted before, expired or unknown")
            return 1 if absent else 0
        count = client.delete(name=args.name, labels=labels, older_than_s=args.older_than, dry_run=args.dry_run)
        context.console.print(str(count))
        return 0


def _add_labels(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help=text)


def _labels(given: list[str]) -> dict[str, str]:
    """Labels of the command line. Raises UsageError."""
    labels: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or key in labels:
            raise UsageError(f"--label {text}: a label is KEY=VALUE, each key once")
        labels[key] = value
    return labels


def array_fields(info: ArrayInfo) -> dict[str, Any]:
    """An ArrayInfo for JSON."""
    times = {name: _iso(getattr(info, name)) for name in ("created_at", "expires_at")}
    return {**vars(info), "dtype": info.dtype.name, **times}


def _iso(time: Any) -> str | None:
    return None if time is None else time.isoformat()


def when_text(time: Any) -> str:
    """A time in the local zone, to the second."""
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


PUT, GET, LS, RM = _Put(), _Get(), _Ls(), _Rm()

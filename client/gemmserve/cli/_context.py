"""Context that every command is given: a connection on demand and a console."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from gemmserve.cli._environment import PREFIX

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from gemmserve import Client


class Command(Protocol):
    """One subcommand."""

    name: str
    help: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments; the parser gives every flag its environment variable."""
        ...

    def run(self, args: argparse.Namespace, context: Context) -> int:
        """Do the work and return the exit status. May raise GemmserveError, OSError, UsageError."""
        ...


class UsageError(Exception):
    """The arguments make no sense together: exit status 2."""


class Console:
    """Prints: results on stdout, everything else on stderr; rich where it is installed and someone watches."""

    def print(self, text: str) -> None:
        """One line on stdout, as it is."""
        print(text)

    def note(self, text: str) -> None:
        """One line on stderr."""
        print(text, file=sys.stderr)

    def error(self, text: str) -> None:
        """One line on stderr, whatever the text holds."""
        print(f"gemmserve: {' '.join(text.split())}", file=sys.stderr)

    def json(self, value: Any) -> None:
        """Indented JSON on stdout."""
        print(json.dumps(value, indent=2, default=str))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table on stdout; plain columns when stdout is no terminal, so that it can be cut and sorted."""
        cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
        if sys.stdout.isatty() and _rich_table(columns, cells):
            return
        for line in columns_text(columns, cells):
            print(line)


def columns_text(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a table in plain columns."""
    cells = [[name.upper() for name in columns], *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether rich was there to print it."""
    try:
        from rich.console import Console as RichConsole
        from rich.table import Table
    except ImportError:
        return False
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    RichConsole(markup=False, highlight=False).print(table)
    return True


class Context:
    """`connect` for a client of the server that the arguments or GEMMSERVE_SERVER name, `console` to print on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.console = Console()
        self._args = args
        self._open = ExitStack()

    def connect(self, url: str | None = None) -> Client:
        """A client of `url`, else of --server, else of GEMMSERVE_SERVER, else of this machine; closed at the end."""
        from gemmserve import Client

        server = url or self._setting("server")
        progress = not getattr(self._args, "no_progress", False)
        verify = self._setting("ca_file") or True
        return self._open.enter_context(
            Client(server, api_key=self._setting("api_key"), verify=verify, progress=progress)
        )

    def _setting(self, name: str) -> str | None:
        """Return a setting from the arguments; a command without that flag still honours its variable."""
        value = getattr(self._args, name, None)
        return str(value) if value else os.environ.get(PREFIX + name.upper()) or None

    def close(self) -> None:
        """Closes the clients."""
        self._open.close()


def add_connection(parser: argparse.ArgumentParser) -> None:
    """--server, --api-key, --ca-file and --no-progress."""
    group = parser.add_argument_group("connection")
    group.add_argument("--server", metavar="URL", help="the server (default http://127.0.0.1:8000)")
    group.add_argument("--api-key", metavar="KEY", help="the key; better in the variable, where `ps` does not show it")
    group.add_argument("--ca-file", metavar="FILE", help="trust the CA certificates of this PEM file, over https")
    group.add_argument("--no-progress", action="store_true", help="draw no progress bars")

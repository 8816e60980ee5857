"""The command line: `gemmserve COMMAND ...`.

Commands are objects (see `Command`). The client's own are below; those of the server and the kernels come from the
entry-point group "gemmserve.commands" and are imported only when asked for, so that the light installation neither has
nor loads what they need.

Exit status: 0 done, 1 failed (one line on stderr names the error), 2 wrong usage or a missing extra, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from gemmserve.cli._environment import EnvironmentParser, misspelt
from gemmserve.cli._plugins import MissingExtra, load_plugin, missing_extra, plugin_names

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from gemmserve.cli._context import Command

_OWN: Final = {
    "gemm": "_products:GEMM",
    "reduce": "_products:REDUCE",
    "put": "_arrays:PUT",
    "get": "_arrays:GET",
    "ls": "_arrays:LS",
    "rm": "_arrays:RM",
    "jobs": "_jobs:JOBS",
    "status": "_status:STATUS",
    "top": "_status:TOP",
    "completion": "_completion:COMPLETION",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` without the program's name, by default the process's. Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    try:
        parser, commands = parser_for(chosen, with_plugins=chosen not in _OWN and "--version" not in arguments)
        args = parser.parse_args(arguments)
    except SystemExit as stop:  # argparse: 0 after --help and --version, 2 after wrong usage
        return stop.code if isinstance(stop.code, int) else 2
    except MissingExtra as missing:
        print(f"gemmserve: {missing}", file=sys.stderr)
        return 2
    if args.version:
        from gemmserve import __version__

        print(f"gemmserve {__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 0
    for name, nearest in misspelt(parser).items():
        print(f"gemmserve: {name} is no variable that {args.command} reads; is {nearest} meant?", file=sys.stderr)
    return _run(commands[args.command], args)


def parser_for(chosen: str | None, *, with_plugins: bool) -> tuple[argparse.ArgumentParser, dict[str, Command]]:
    """The parser for an invocation, and its commands by name: with a plugin chosen, it alone is loaded; without a
    command everything, as for the overall help. Raises MissingExtra.
    """
    parser = EnvironmentParser(
        prog="gemmserve", description="Matrix products on a GPU somewhere else.", allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands: dict[str, Command] = {}
    plugins = plugin_names() if with_plugins else []
    for name in [chosen] if chosen in _OWN else _OWN:
        if chosen in plugins:
            choices.add_parser(name)  # a server that starts has no use for NumPy, which the client's commands load
            continue
        module, _, attribute = _OWN[name].partition(":")
        commands[name] = getattr(import_module(f"gemmserve.cli.{module}"), attribute)
    for name in plugins:
        try:
            if chosen in {None, name}:
                commands[name] = load_plugin(name)
            else:
                choices.add_parser(name)  # so that an unknown command is told every name
        except MissingExtra as missing:
            if chosen == name:
                raise
            choices.add_parser(name, help=str(missing))
    for name, command in commands.items():
        command.configure(choices.add_parser(name, help=command.help, description=command.help, allow_abbrev=False))
    return parser, commands


def _run(command: Command, args: argparse.Namespace) -> int:
    from gemmserve._errors import GemmserveError
    from gemmserve.cli._context import Context, UsageError

    context = Context(args)
    try:
        return command.run(args, context)
    except (UsageError, MissingExtra) as error:
        context.console.error(str(error))
        return 2
    except ModuleNotFoundError as error:  # a plugin that imports what it needs only when it runs
        missing = missing_extra(args.command, error)
        if missing is None:
            raise
        context.console.error(str(missing))
        return 2
    except GemmserveError as error:
        context.console.error(f"{type(error).__name__}: {error}")
        return 1
    except BrokenPipeError:
        # The reader of our output has left; keep the interpreter from complaining about it at exit (Python's manual,
        # note on SIGPIPE in the signal module).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        context.console.error(f"{type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        context.console.error("interrupted")
        return 130
    finally:
        context.close()

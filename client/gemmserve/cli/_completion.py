"""completion: scripts by which shells complete the command line, made by shtab (https://docs.iterative.ai/shtab)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gemmserve.cli._plugins import MissingExtra

if TYPE_CHECKING:
    import argparse

    from gemmserve.cli._context import Context

_SHELLS: Final = ("bash", "zsh", "tcsh", "fish")


class _Completion:
    name = "completion"
    help = "print a script that completes commands, flags and files in a shell"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("shell", choices=_SHELLS, help='as in: eval "$(gemmserve completion bash)"')

    def run(self, args: argparse.Namespace, context: Context) -> int:
        try:
            import shtab
        except ModuleNotFoundError as error:
            raise MissingExtra(self.name, "shtab", "cli") from error
        if args.shell not in shtab.SUPPORTED_SHELLS:
            context.console.error(f"shtab {shtab.__version__} does not know {args.shell}")
            return 1
        from gemmserve.cli import parser_for

        parser, _ = parser_for(None, with_plugins=True)
        _mark_files(parser, {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "A": shtab.FILE, "B": shtab.FILE})
        context.console.print(shtab.complete(parser, args.shell))
        return 0


def _mark_files(parser: argparse.ArgumentParser, kinds: dict[str, Any]) -> None:
    """Have arguments completed by files and folders where their metavar says that they are some."""
    for action in parser._actions:
        if isinstance(action.metavar, str) and action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]  # shtab's
        for child in action.choices.values() if isinstance(action.choices, dict) else ():
            _mark_files(child, kinds)


COMPLETION = _Completion()

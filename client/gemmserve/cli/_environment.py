"""An argparse parser whose every flag has an environment variable: `--data-dir` is also GEMMSERVE_DATA_DIR.

It holds for every command, plugins included, because subparsers are of their parent's class. A flag on the command
line wins over its variable, and the variable over the default. Lists are separated by commas; switches are 1 or 0.
"""

from __future__ import annotations

import argparse
import difflib
import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PREFIX: Final = "GEMMSERVE_"

_ALWAYS: Final = frozenset(
    {"SERVER", "API_KEY", "CA_FILE", "JOIN_TOKEN", "KERNEL_CACHE", "KERNEL_SEED", "HTTP_LIBRARY"}
)
"""Variables, without the prefix, that are read whatever the command."""
_NEAR: Final = 0.7
"""Least likeness of a misspelt name (difflib's ratio): PROT and PORT have 0.75; KEYS, a variable of
docker-compose.yml, and KEYS_FILE 0.62."""

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off", ""})


class EnvironmentParser(argparse.ArgumentParser):
    """Takes defaults from the environment when it parses, and names the variables in its help."""

    default_command: str | None = None
    """Subcommand that is meant where the arguments begin with none."""
    _described = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does; an ill-formed variable is an error of usage."""
        for action in self._actions:
            variable = variable_of(action)
            text = None if variable is None else os.environ.get(variable)
            if text is None:
                continue
            try:
                action.default = _value(action, text)
            except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
                self.error(f"{variable}={text!r}: {error}")
            action.required = False
        if args is not None and self.default_command is not None and not _begins_with(args, self):
            args = [self.default_command, *args]
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """The help, with the variable of every flag."""
        if not self._described:
            self._described = True
            for action in self._actions:
                variable = variable_of(action)
                if variable is not None and action.help is not argparse.SUPPRESS:
                    action.help = f"{action.help or ''} [{variable}]".strip()
        return super().format_help()


def _begins_with(args: Sequence[str], parser: argparse.ArgumentParser) -> bool:
    """Whether the first argument is a subcommand, or a flag of the parser itself."""
    own = {flag for action in parser._actions for flag in action.option_strings}
    return bool(args) and (not args[0].startswith("-") or args[0] in own)


def misspelt(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the variables of the environment that are near one that `parser` or a command below it reads, and read by
    none, each with that one. What resembles nothing is left alone: others may use the prefix.
    """
    known = _ALWAYS | {variable.removeprefix(PREFIX) for variable in _variables(parser)}
    given = {name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX)}
    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=_NEAR) for name in sorted(given - known)}
    return {PREFIX + name: PREFIX + found[0] for name, found in near.items() if found}


def _variables(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        variable = variable_of(action)
        if variable is not None:
            yield variable
        for child in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from _variables(child)


def variable_of(action: argparse.Action) -> str | None:
    """The environment variable of a flag; None for positional arguments, --help and --version."""
    if not action.option_strings or action.dest in {argparse.SUPPRESS, "help", "version"}:
        return None
    return PREFIX + action.dest.upper()


def _value(action: argparse.Action, text: str) -> Any:
    if action.nargs == 0:
        return _switch(action, text)
    several = action.nargs is not None and action.nargs != argparse.OPTIONAL
    several = several or isinstance(action, argparse._AppendAction)
    convert = action.type if callable(action.type) else str
    values = [convert(item.strip()) for item in text.split(",")] if several else [convert(text)]
    for value in values:
        if action.choices is not None and value not in action.choices:
            raise ValueError(f"choose from {', '.join(map(str, action.choices))}")
    return values if several else values[0]


def _switch(action: argparse.Action, text: str) -> Any:
    lowered = text.strip().lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError("a switch is 1 or 0")
    if isinstance(action, argparse.BooleanOptionalAction):
        return lowered in _TRUE
    return action.const if lowered in _TRUE else action.default

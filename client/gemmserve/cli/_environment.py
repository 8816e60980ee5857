"""An argparse parser whose every flag has an environment variable: `--data-dir` is also GEMMSERVE_DATA_DIR.

It holds for every command, plugins included, because subparsers are of their parent's class. A flag on the command
line wins over its variable, and the variable over the default. Lists are separated by commas; switches are 1 or 0.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFIX: Final = "GEMMSERVE_"

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off", ""})


class EnvironmentParser(argparse.ArgumentParser):
    """Takes defaults from the environment when it parses, and names the variables in its help."""

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

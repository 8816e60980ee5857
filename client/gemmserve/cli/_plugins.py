"""Commands of the server and the kernels, found by entry point: the client never imports them itself."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from gemmserve.cli._context import Command

GROUP: Final = "gemmserve.commands"


class MissingExtra(Exception):  # noqa: N818 (what it says, not that it is an error)
    """A command whose dependencies are not installed."""

    def __init__(self, command: str, module: str) -> None:
        super().__init__(f"{command} needs {module}, which is not installed: pip install 'gemmserve[server]'")


def plugin_names() -> list[str]:
    """The commands there are, loaded or not, by name."""
    return sorted(_plugins())


def load_plugin(name: str) -> Command:
    """The command of that name. Raises MissingExtra when something it imports is not installed."""
    try:
        return cast("Command", _plugins()[name].load())
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gemmserve"):
            raise  # ours: not an extra that is missing but a broken installation
        raise MissingExtra(name, error.name or str(error)) from error


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}

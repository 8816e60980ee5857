"""Commands of the server and the kernels, found by entry point: the client never imports them itself."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, cast

from gemmserve._install import pip_install

if TYPE_CHECKING:
    from gemmserve.cli._context import Command

GROUP: Final = "gemmserve.commands"


class MissingExtra(Exception):  # noqa: N818 (what it says, not that it is an error)
    """A command whose dependencies are not installed."""

    def __init__(self, command: str, module: str, extra: str = "server") -> None:
        super().__init__(f"{command} needs {module}, which is not installed: {pip_install(extra)}")


def plugin_names() -> list[str]:
    """The commands there are, loaded or not, by name."""
    return sorted(_plugins())


def load_plugin(name: str) -> Command:
    """The command of that name. Raises MissingExtra when something it imports is not installed."""
    try:
        return cast("Command", _plugins()[name].load())
    except ModuleNotFoundError as error:
        missing = missing_extra(name, error)
        if missing is None:
            raise
        raise missing from error


def missing_extra(command: str, error: ModuleNotFoundError) -> MissingExtra | None:
    """Return the error for a module that `command` did not find, which an extra installs; None for one of ours: no
    extra, but a broken installation.
    """
    ours = (error.name or "").startswith("gemmserve")
    return None if ours else MissingExtra(command, error.name or str(error))


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}

"""The schema's history: numbered SQL files, each applied once, in order, in a transaction of its own.

`sql/migrations/NNNN_name.sql` is step NNNN; the table `schema_history` says which steps a file has seen, and `PRAGMA
user_version` the highest of them. A step that is missing is applied whatever its number, so that steps of two lines of
work may meet. A crash in the middle leaves the steps before it: the next start goes on from there. Files that were
released are never edited.
"""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FILE: Final = re.compile(r"(\d{4})_(\w+)\.sql")


class DatabaseError(RuntimeError):
    """The database cannot be used: it is not open, or the file is none of ours."""


class SchemaTooNew(DatabaseError):  # noqa: N818 (says what is the case)
    """A newer version of the program made the file; this one would not understand it, and leaves it alone."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step: its number, its name, and its statements."""

    version: int
    name: str
    statements: tuple[str, ...]


@cache
def migrations() -> tuple[Migration, ...]:
    """Every step there is, in order. Raises ValueError for a file without a number or a number used twice."""
    found: dict[int, Migration] = {}
    for file in files("gemmserve_service.store.database").joinpath("sql", "migrations").iterdir():
        match = _FILE.fullmatch(file.name)
        if match is None:
            raise ValueError(f"{file.name} is not named NNNN_name.sql")
        version = int(match[1])
        if version in found:
            raise ValueError(f"{file.name} and {found[version].name} have the same number")
        found[version] = Migration(version, match[2], tuple(split(file.read_text("utf-8"))))
    return tuple(found[version] for version in sorted(found))


def migrate(connection: sqlite3.Connection, steps: Sequence[Migration] | None = None) -> list[int]:
    """Brings the database behind an autocommitting `connection` up to date; returns the steps applied.

    `steps`: all of `migrations()` by default. Raises SchemaTooNew; what SQLite raises leaves the steps before whole.
    """
    steps = migrations() if steps is None else steps
    seen = check(connection, steps)
    missing = [step for step in steps if step.version not in seen]
    for step in missing:
        _apply(connection, step)
    return [step.version for step in missing]


def check(connection: sqlite3.Connection, steps: Sequence[Migration] | None = None) -> set[int]:
    """Return the steps that the database has seen; nothing is written. Raises SchemaTooNew for one unknown."""
    steps = migrations() if steps is None else steps
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    seen = _history(connection, version)
    unknown = {version, *seen} - {0, *(step.version for step in steps)}
    if unknown:
        raise SchemaTooNew(
            f"the database has schema version {max(unknown)}, this program reads up to {steps[-1].version}: "
            "use the newer gemmserve, or another --data-dir"
        )
    return seen


def _history(connection: sqlite3.Connection, version: int) -> set[int]:
    """The steps that the database has seen. The first version kept no history: it was one step."""
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'schema_history'").fetchone() is None:
        return {version} if version else set()
    return {row[0] for row in connection.execute("SELECT version FROM schema_history")} | ({1} if version else set())


def _apply(connection: sqlite3.Connection, step: Migration) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in step.statements:
            connection.execute(statement)
        connection.execute(
            "CREATE TABLE IF NOT EXISTS schema_history (version INTEGER PRIMARY KEY, name TEXT NOT NULL)"
        )
        connection.execute("INSERT INTO schema_history VALUES (?, ?)", (step.version, step.name))
        (highest,) = connection.execute("SELECT max(version) FROM schema_history").fetchone()
        connection.execute(f"PRAGMA user_version = {highest}")  # part of the transaction, as the header's page is
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def split(script: str) -> Iterator[str]:
    """The statements of a script; `executescript` would commit before the first. Raises ValueError for half a one."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement.strip()
            statement = ""
    rest = [line for line in statement.splitlines() if line.strip() and not line.lstrip().startswith("--")]
    if rest:
        raise ValueError(f"a statement does not end: {rest[0]}")

"""SQLite in WAL mode behind one writer thread with group commit.

`await database.write(fn)` runs `fn(connection)` and returns its value once the transaction is committed. Whatever has
queued up meanwhile shares one transaction, so that a burst of submissions costs one commit; a function that raises is
rolled back alone. A write that nobody is in a hurry for may wait a little for the next one.

Transactions are the writer thread's. The event loop commits one itself where that takes less than to wake the thread
for it and to be woken by it, both of which compete for the interpreter: a few rows that go to the page cache, while the
thread has nothing to do. Whatever waits for the disk is the thread's: each commit with `durability=power`, else what
brings the log into the database, and the commit behind that. After one that took long all are, for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gemmserve_service.errors import StoreFull
from gemmserve_service.store.database.migrations import DatabaseError, SchemaTooNew, check, migrate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

T = TypeVar("T")


class Connection(sqlite3.Connection):
    """Connection to the file."""

    apart = False
    """Whether each write of the transaction is undone alone where it fails, and not all of them."""
    stuck = False
    """Whether its log could not be brought into the file when that was tried last."""


Told = Callable[[Any, BaseException | None], object]
"""Callback for a write's value, or for why it failed."""
Write = tuple[Callable[[Connection], Any], "asyncio.Future[Any] | Told"]
Outcome = tuple["asyncio.Future[Any] | Told", Any, BaseException | None]

_MAX_IN_ONE_COMMIT: Final = 256  # bounds how long the first of a burst waits; no measurement behind the figure
_MAX_LOG_BYTES: Final = 32 << 20
"""Bytes of the log above which the thread brings it into the database, for which it waits for the disk several times,
and whoever writes waits for the thread. A short job's commit writes a dozen pages, mostly the same as the one before:
eight times SQLite's default, this is after every 700th such commit and not after every 80th, and most of what is
brought was written over meanwhile."""
_LOG_BYTES_OF_A_ROW: Final = 16 << 12
"""Bytes of the log that a row takes at most: the pages that it changes in a table of four levels and three indexes,
where each is split or merged with its neighbours."""
_LOOK_EVERY: Final = 1 << 20
"""Bytes after which a log of about `_MAX_LOG_BYTES` is looked at again."""
_MAX_ROWS_HERE: Final = 64
"""Rows that the event loop writes itself: half a millisecond."""
_SLOW_S: Final = 0.02
"""Seconds of a commit after which the disk is taken for one that others keep busy."""
_CALM_S: Final = 2.0
"""Seconds after such a commit in which all are the thread's."""
_LOCKED_S: Final = 10.0
"""Seconds for which the thread waits for another program that has locked the file."""
_LOCKED_RETRY_S: Final = 0.01
_CACHE_KIB: Final = 8192  # of pages; with SQLite's 2,000 a short job's commit read pages again
_ROWS_AT_ONCE: Final = (64, 8, 1)  # SQLite before 3.32 takes 999 parameters
_PARAMETER: Final = re.compile(r":(\w+)")
_NULL: Final = math.nan
"""Value that SQLite binds as NULL. For each None Python's module looks for an adapter first, which takes longer than to
bind all else of a row."""
_NAME: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)

log = logging.getLogger(__name__)


def load_sql(name: str) -> dict[str, str]:
    """The statements of ``sql/<name>.sql`` by the names in their ``-- name:`` lines."""
    text = files("gemmserve_service.store.database").joinpath("sql", f"{name}.sql").read_text("utf-8")
    _, *parts = _NAME.split(text)
    return dict(zip(parts[::2], (body.strip() for body in parts[1::2]), strict=True))


def insert_rows(db: sqlite3.Connection, statement: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows by a statement that ends with the values of one: many by each call.

    During a call the interpreter is free for other threads; with one a row it had to be had back after each of them.
    """
    done = 0
    while (left := len(rows) - done) > 0:
        count = 1 if left == 1 else next(count for count in _ROWS_AT_ONCE if count <= left)
        text, names = _for_rows(statement, count)
        db.execute(text, [bound for row in rows[done : done + count] for bound in _bound(row, names)])
        done += count


def change_rows(db: sqlite3.Connection, statement: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Run a statement with named parameters for each row; return how many rows of the table it has changed in all."""
    text, names = _in_order(statement)
    return db.executemany(text, [_bound(row, names) for row in rows]).rowcount


def _bound(row: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """The row's values of those names, as they are bound."""
    return [_NULL if (value := row[name]) is None else value for name in names]


@lru_cache(64)
def _in_order(statement: str) -> tuple[str, list[str]]:
    """The statement with placeholders without names, which take longer to find, and the names in their order."""
    return _PARAMETER.sub("?", statement), _PARAMETER.findall(statement)


@lru_cache(64)
def _for_rows(statement: str, count: int) -> tuple[str, list[str]]:
    """The statement for so many rows, and the names of the columns of one in the order of its placeholders."""
    head, values, one = statement.rpartition("VALUES ")
    names = _PARAMETER.findall(one)
    return f"{head}{values}{', '.join([_PARAMETER.sub('?', one)] * count)}", names


class Database:
    """One file, one writer thread, one reader thread."""

    def __init__(self, path: Path, *, durability: str = "process") -> None:
        self.path = path
        self._log = f"{path}-wal"
        self._synchronous = "NORMAL" if durability == "process" else "FULL"
        self._queue: queue.SimpleQueue[tuple[float, list[Write]] | None] = queue.SimpleQueue()
        self._held: list[Write] = []
        """Those that wait for others to share their transaction with."""
        self._timer: asyncio.Handle | None = None
        self._due = math.inf
        """Time at which they are begun (the event loop's clock)."""
        self._before: list[Callable[[], object]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Connection | None = None
        """Connection that writes: the thread's while that has something to do, else the event loop's."""
        self._rows = 0.0
        """Rows that those in `_held` write."""
        self._begun = 0
        """Batches that the thread has and has not told of."""
        self._log_bytes = 0
        """Size of the log when it was looked at last."""
        self._log_more = 0
        """Bytes by which commits have made it longer since, at most."""
        self._calm_at = 0.0
        """Time from which on the event loop may commit (time.monotonic)."""
        self.on_full: Callable[[], object] = lambda: None
        """Called in the event loop where the disk had no room for a write: what can be spared may go, for the next."""
        self._thread: threading.Thread | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._read_connection: sqlite3.Connection | None = None

    def check(self) -> None:
        """Looks whether the file, if there is one, can be read by this program. Raises SchemaTooNew.

        Whatever else is wrong with it is for `start` to say.
        """
        if not self.path.exists():
            return
        with contextlib.suppress(sqlite3.Error), contextlib.closing(self._connect()) as connection:
            try:
                check(connection)
            except SchemaTooNew as error:
                raise SchemaTooNew(f"{self.path}: {error}") from None

    async def start(self) -> None:
        """Opens the file, bringing its schema up to date. Raises DatabaseError, SchemaTooNew."""
        self._loop = asyncio.get_running_loop()
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="gemmserve-read")
        connection = self._connection = await self._loop.run_in_executor(self._reader, self._open)
        self._log_bytes = self._size_of_log()
        self._read_connection = await self._loop.run_in_executor(self._reader, self._connect)
        self._thread = threading.Thread(target=self._run, args=(connection,), name="gemmserve-write", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Commits what is queued and closes; may be called again, or without start."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self.begin()
            self._queue.put(None)
            await asyncio.to_thread(thread.join)
            self._connection = None
        reader, self._reader = self._reader, None
        if reader is not None:
            connection, self._read_connection = self._read_connection, None
            if connection is not None:
                await asyncio.get_running_loop().run_in_executor(reader, connection.close)
            reader.shutdown()

    @property
    def is_open(self) -> bool:
        """Whether writes are taken."""
        return self._thread is not None

    async def write(self, fn: Callable[[Connection], T]) -> T:
        """Runs `fn` in a transaction; durable when this returns. Raises what `fn` raised, or StoreFull.

        `fn` may be called again, after a rollback, where it raised or another write of its transaction did.
        """
        # Shielded: a caller that goes away must not leave the outcome of a commit unknown to the others' futures.
        return await asyncio.shield(self.write_soon(fn))

    def write_soon(
        self, fn: Callable[[Connection], T], *, within_s: float = 0.0, rows: float = math.inf
    ) -> asyncio.Future[T]:
        """Like `write`, for those who need not wait; writes are applied in the order of the calls.

        `within_s`: it is begun after so many seconds at the latest, sooner with any write after it. `rows`: how many it
        writes, if it finds them by their keys and does nothing else; a text of 4 KiB counts as one. Raises
        DatabaseError.
        """
        loop = self._open_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._held.append((fn, future))
        self._rows += rows
        self._begin_within(loop, within_s)
        return future

    def write_then(
        self, fn: Callable[[Connection], Any], told: Told, *, within_s: float = 0.0, rows: float = math.inf
    ) -> None:
        """Like `write_soon`; `told(value, error)` is called in the event loop once it is known what came of it, after
        the callbacks of the futures of the same transaction. For what is done many times a millisecond: a future for
        each, and a turn of the loop for its callback, are half of what a short job's end takes.
        """
        loop = self._open_loop()
        self._held.append((fn, told))
        self._rows += rows
        self._begin_within(loop, within_s)

    def check_open(self) -> None:
        """Raise DatabaseError where writes are not taken."""
        self._open_loop()

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._thread is None:
            raise DatabaseError("the database is not open")
        return self._loop

    def may_grow(self, write: asyncio.Future[Any] | Told, *, within_s: float = 0.0, rows: float = math.inf) -> bool:
        """Whether a write, by its future or callback, waits yet and is the last one, so that more can be done by it, as
        if that came now: so many `rows`.

        It is begun after `within_s` at the latest then.
        """
        if self._loop is None or not self._held or self._held[-1][1] is not write:
            return False
        self._rows += rows
        self._begin_within(self._loop, within_s)
        return True

    def _begin_within(self, loop: asyncio.AbstractEventLoop, within_s: float) -> None:
        due = loop.time() + within_s if within_s > 0 else -math.inf
        if due < self._due:
            if self._timer is not None:
                self._timer.cancel()
            # Not before this turn of the loop ends: the thread would take the interpreter from what is left of it.
            self._timer = loop.call_later(within_s, self.begin) if within_s > 0 else loop.call_soon(self.begin)
            self._due = due

    def begin_soon(self) -> None:
        """Begin them at the end of this turn of the event loop: what comes until then shares the transaction."""
        if self._held and self._loop is not None:
            self._begin_within(self._loop, 0.0)

    def before_begin(self, callback: Callable[[], object]) -> None:
        """`callback()` runs when writes are about to begin; what it writes is part of their transaction."""
        self._before.append(callback)

    def begin(self) -> None:
        """Begin the writes that wait for others to share their transaction with."""
        if self._held:
            for callback in self._before:
                callback()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._due = math.inf
        if self._held:
            held, self._held = self._held, []
            rows, self._rows = self._rows, 0.0
            if rows > _MAX_ROWS_HERE or not self._may_commit() or not self._committed(held, rows):
                self._give(rows, held)

    def _may_commit(self) -> bool:
        """Whether the event loop may commit something brief: it goes to the page cache, and the thread has nothing."""
        return (
            self._synchronous == "NORMAL"
            and not self._begun
            and 0
            < self._log_bytes
            <= _MAX_LOG_BYTES  # else it waits for the disk: with a new log, or a new round of it
            and time.monotonic() >= self._calm_at
        )

    def _committed(self, held: list[Write], rows: float) -> bool:
        """Commit writes in the event loop; return False where anything is in the way: the thread sees to that."""
        assert self._loop is not None
        assert self._connection is not None
        began = time.monotonic()
        outcomes = _commit_at_once(self._connection, held)
        # Near the limit the log is looked at, and not after each of several hundred commits a second: once it has been
        # that long, its size says nothing of when it is brought into the database next.
        self._log_more += _LOG_BYTES_OF_A_ROW * (1 + int(rows))
        near = self._log_bytes + self._log_more > _MAX_LOG_BYTES and self._log_more > _LOOK_EVERY
        self._note(time.monotonic() - began, self._size_of_log() if near else None)
        if outcomes is not None:
            _resolve(self._loop, outcomes)
            if self._log_bytes > _MAX_LOG_BYTES:
                self._give(0, [])
        return outcomes is not None

    def _give(self, rows: float, held: list[Write]) -> None:
        """Have the thread commit writes, and then bring the log into the database if it is long."""
        self._begun += 1
        self._queue.put((rows, held))

    def _note(self, seconds: float, log_bytes: int | None) -> None:
        """Note how long a commit took, and how long the log is after it; None: that was not looked at."""
        if log_bytes is not None:
            self._log_bytes, self._log_more = log_bytes, 0
        if seconds > _SLOW_S:
            self._calm_at = time.monotonic() + _CALM_S

    def _size_of_log(self) -> int:
        try:
            return os.stat(self._log).st_size  # noqa: PTH116 (a string)
        except OSError:
            return 0

    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Runs `fn` on the reader's connection, which sees every commit that was answered.

        And every write that has waited for others until now.
        """
        if self._held:
            last = self.write_soon(lambda _: None, rows=0)
            self.begin()
            await asyncio.wait((last,))
        connection = self._read_connection
        if self._loop is None or self._reader is None or connection is None:
            raise DatabaseError("the database is not open")
        return await self._loop.run_in_executor(self._reader, fn, connection)

    def _connect(self) -> Connection:
        connection = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=10, factory=Connection
        )
        connection.row_factory = sqlite3.Row
        try:
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # of any commit, the event loop's too
            connection.execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")  # of a log that begins anew
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _open(self) -> Connection:
        try:
            connection = self._connect()
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise DatabaseError(f"{self.path} cannot be opened: {error}") from error
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Brings the schema up to date, or makes it. Raises SchemaTooNew."""
        connection.execute("PRAGMA journal_mode = WAL")
        try:
            applied = migrate(connection)
        except SchemaTooNew as error:
            raise SchemaTooNew(f"{self.path}: {error}") from None
        if applied:
            log.info("%s: schema brought to version %d", self.path.name, applied[-1])
        connection.execute("PRAGMA busy_timeout = 0")  # the event loop waits for nobody; the thread does, by `_begin`

    def _run(self, connection: Connection) -> None:
        open_ = True
        while open_:
            batch: list[Write] = []
            rows, taken = 0.0, 0
            item = self._queue.get()
            while item is not None:
                rows += item[0]
                batch += item[1]
                taken += 1
                if len(batch) >= _MAX_IN_ONE_COMMIT:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            else:
                open_ = False
            began = time.monotonic()
            outcomes = _commit(connection, batch) if batch else []
            seconds = (
                time.monotonic() - began if rows <= _MAX_ROWS_HERE else 0.0
            )  # what is long says nothing of the disk
            size = self._size_of_log()
            if size > _MAX_LOG_BYTES and open_:
                self._publish(outcomes, 0, seconds, size)
                outcomes = []
                _check_point(connection)
            if taken:
                self._publish(outcomes, taken, seconds, size)
        connection.close()

    def _publish(self, outcomes: list[Outcome], batches: int, seconds: float, log_bytes: int) -> None:
        """Tell the event loop what came of writes, and that so many batches are done with."""
        if self._loop is None or self._loop.is_closed():
            return

        def told(loop: asyncio.AbstractEventLoop) -> None:
            self._begun -= batches
            self._note(seconds, log_bytes)
            if any(isinstance(error, StoreFull) for _, _, error in outcomes):
                self.on_full()
            _resolve(loop, outcomes)

        self._loop.call_soon_threadsafe(told, self._loop)


def _check_point(connection: Connection) -> None:
    """Bring the log into the database, as far as no reader stands in the way."""
    try:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    except sqlite3.Error as error:  # the disk is full, say: the log grows until there is room
        if not connection.stuck:  # that is tried with each commit
            log.warning("the database's log could not be brought into it: %s", error)
        connection.stuck = True
    else:
        connection.stuck = False


def _begin(connection: sqlite3.Connection) -> None:
    """Begin a transaction. Waits for another program that has the file locked."""
    until = time.monotonic() + _LOCKED_S
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                raise
            time.sleep(_LOCKED_RETRY_S)
        else:
            return


def _commit_at_once(connection: Connection, batch: list[Write]) -> list[Outcome] | None:
    """One transaction for the whole batch. None: nothing has happened, for something raised or somebody has locked the
    file.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        outcomes: list[Outcome] = [(told, _applied(fn, connection), None) for fn, told in batch]
        connection.execute("COMMIT")
    except Exception:  # the thread runs them again, and says what is wrong
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        return None
    return outcomes


def _commit(connection: Connection, batch: list[Write]) -> list[Outcome]:
    """One transaction for the whole batch. Where a function raises, all run again, each with a savepoint, which it
    loses alone: that hardly ever happens, and savepoints are half of a short write.
    """
    outcomes: list[Outcome] = []
    try:
        _begin(connection)
        outcomes = [(told, _applied(fn, connection), None) for fn, told in batch]
        connection.execute("COMMIT")
    except Exception as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if len(batch) == 1:
            return [(batch[0][1], None, _translate(error))]
        return _commit_apart(connection, batch)
    return outcomes


def _applied(fn: Callable[[Connection], T], connection: Connection) -> T | None:
    """Return what a write gives; None in the place of a cursor, which ends here: in the event loop's thread it would
    reset its statement, which is the connection's, while this thread runs that again for other rows.
    """
    value = fn(connection)
    return None if isinstance(value, sqlite3.Cursor) else value


def _commit_apart(connection: Connection, batch: list[Write]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    connection.apart = True
    try:
        _begin(connection)
        for fn, told in batch:
            connection.execute("SAVEPOINT one")
            try:
                outcomes.append((told, _applied(fn, connection), None))
            except Exception as error:
                if not connection.in_transaction:
                    raise  # SQLite gave up the whole transaction, as it does when the disk is full
                connection.execute("ROLLBACK TO one")
                outcomes.append((told, None, _translate(error)))
            connection.execute("RELEASE one")
        connection.execute("COMMIT")
    except Exception as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        return [(told, None, _translate(error)) for _, told in batch]
    finally:
        connection.apart = False
    return outcomes


def _translate(error: BaseException) -> BaseException:
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return StoreFull("the disk that holds the database is full")
    return error


def _resolve(loop: asyncio.AbstractEventLoop, outcomes: list[Outcome]) -> None:
    for told, value, error in outcomes:
        if not isinstance(told, asyncio.Future):
            loop.call_soon(told, value, error)  # behind the callbacks of the futures before it
        elif told.done():
            continue
        elif error is None:
            told.set_result(value)
        else:
            told.set_exception(error)

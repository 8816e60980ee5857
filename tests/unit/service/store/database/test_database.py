"""Writes: what one that returned promises, what an error costs the others, and which thread commits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import sqlite3
import threading
import time

import pytest

from gemmserve_service.errors import StoreFull
from gemmserve_service.store.database import database as database_module
from gemmserve_service.store.database.database import Database, change_rows, insert_rows, load_sql
from gemmserve_service.store.database.migrations import DatabaseError

INSERT = "INSERT INTO tier_garbage (id) VALUES (?)"
COUNT = "SELECT count(*) FROM tier_garbage"


def count(db):
    return db.execute(COUNT).fetchone()[0]


async def test_a_write_that_returned_is_there_for_another_connection(database):
    await database.write(lambda db: db.execute(INSERT, ("k",)))
    with sqlite3.connect(database.path) as other:
        assert other.execute(COUNT).fetchone() == (1,)
    assert await database.read(count) == 1


@pytest.mark.parametrize("count", [1, 3, 9])
async def test_rows_are_inserted_and_changed_with_what_is_nothing_as_null(count):
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE t (id TEXT PRIMARY KEY, a TEXT, b REAL, c BLOB NOT NULL)")
        rows = [{"id": str(n), "a": None, "b": n / 2, "c": b"c"} for n in range(count)]
        insert_rows(db, "INSERT INTO t (id, a, b, c) VALUES (:id, :a, :b, :c)", rows)
        assert db.execute("SELECT * FROM t").fetchall() == [tuple(row.values()) for row in rows]
        changed = [{"b": None, "a": "x", "id": str(n)} for n in range(count + 1)]
        assert change_rows(db, "UPDATE t SET a = :a, b = coalesce(:b, b) WHERE id = :id", changed) == count
        assert change_rows(db, "UPDATE t SET b = :b WHERE id = :id", changed) == count
        assert db.execute("SELECT DISTINCT a, b, typeof(b) FROM t").fetchall() == [("x", None, "null")]
        with pytest.raises(sqlite3.IntegrityError):
            insert_rows(db, "INSERT INTO t (id, c) VALUES (:id, :c)", [{"id": "y", "c": None}])


async def test_a_burst_shares_commits_and_a_bad_write_loses_itself_alone(database):
    statements = []
    await database.write(lambda db: db.set_trace_callback(statements.append))
    statements.clear()
    held = threading.Event()
    database.write_soon(lambda _: held.wait(60))  # until all of them have come
    writes = [database.write_soon(lambda db, key=f"k{i}": db.execute(INSERT, (key,))) for i in range(50)]
    writes.append(database.write_soon(lambda db: db.execute("INSERT INTO nowhere VALUES (1)")))
    writes.append(database.write_soon(lambda db: db.execute(INSERT, ("k3",))))  # taken already
    writes += [database.write_soon(lambda db, key=f"k{i}": db.execute(INSERT, (key,))) for i in range(50, 100)]
    held.set()
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [type(error) for error in errors] == [sqlite3.OperationalError, sqlite3.IntegrityError]
    assert await database.read(count) == 100
    assert statements.count("COMMIT") <= 2, "that of the write that held the others, and theirs"


async def test_writes_are_applied_in_the_order_of_the_calls(database):
    order = []
    futures = [database.write_soon(lambda _, i=i: order.append(i)) for i in range(1000)]
    await asyncio.gather(*futures)
    assert order == list(range(1000))


async def test_what_may_wait_goes_with_the_next_write_and_before_it(database):
    statements, order = [], []
    await database.write(lambda db: db.set_trace_callback(statements.append))
    statements.clear()
    held = [database.write_soon(lambda _, i=i: order.append(i), within_s=3600) for i in range(3)]
    await asyncio.sleep(0)
    assert statements == []
    await database.write(lambda _: order.append("next"))
    assert order == [0, 1, 2, "next"]
    assert all(future.done() for future in held)
    assert statements.count("COMMIT") == 1


async def test_what_may_wait_does_not_wait_for_ever(database):
    late = database.write_soon(lambda db: db.execute(INSERT, ("late",)), within_s=3600)
    soon = database.write_soon(lambda db: db.execute(INSERT, ("soon",)), within_s=0.01)
    await asyncio.wait_for(soon, 60)  # the shorter time counts for those before it, too
    assert late.done()
    assert database._timer is None


async def test_a_reader_finds_what_may_wait(database):
    held = database.write_soon(lambda db: db.execute(INSERT, ("k",)), within_s=3600)
    assert await database.read(count) == 1
    assert held.done()


async def test_stop_commits_what_may_wait(database):
    held = database.write_soon(lambda db: db.execute(INSERT, ("k",)), within_s=3600)
    await database.stop()
    await held
    with sqlite3.connect(database.path) as other:
        assert other.execute(COUNT).fetchone() == (1,)


@pytest.mark.parametrize("rows", [1, math.inf])
@pytest.mark.parametrize("company", [0, 2])
async def test_a_write_that_fails_half_way_leaves_nothing(database, company, rows):
    def half(db):
        db.execute(INSERT, ("half",))
        raise ValueError("no more")

    others = [
        database.write_soon(lambda db, i=i: db.execute(INSERT, (f"k{i}",)), within_s=3600, rows=rows)
        for i in range(company)
    ]
    with pytest.raises(ValueError, match="no more"):
        await database.write_soon(half, rows=rows)
    await asyncio.gather(*others)
    assert await database.read(count) == company


async def test_a_caller_that_goes_away_takes_nothing_back(database):
    task = asyncio.create_task(database.write(lambda db: db.execute(INSERT, ("k",))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await database.write(lambda _: None)
    assert await database.read(count) == 1


async def test_stop_commits_what_is_queued(database):
    for i in range(600):  # more than one commit holds
        database.write_soon(lambda db, key=f"k{i}": db.execute(INSERT, (key,)))
    await database.stop()
    with sqlite3.connect(database.path) as other:
        assert other.execute(COUNT).fetchone() == (600,)
    with pytest.raises(DatabaseError, match="not open"):
        await database.write(count)
    with pytest.raises(DatabaseError, match="not open"):
        await database.read(count)
    await database.stop()


@pytest.mark.parametrize("rows", [1, math.inf])
async def test_a_full_disk_is_a_store_full_and_nothing_of_it_stays(database, rows):
    pages = await database.write(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
    await database.write(lambda db: db.execute(f"PRAGMA max_page_count = {pages + 2}"))
    with pytest.raises(StoreFull):
        await database.write_soon(lambda db: db.execute(INSERT, ("x" * 100_000,)), rows=rows)
    await database.write_soon(lambda db: db.execute(INSERT, ("small",)), rows=rows)
    assert await database.read(count) == 1


async def test_what_is_no_database_is_refused(tmp_path):
    path = tmp_path / "db.sqlite"
    path.write_bytes(b"these are not the pages of a database" * 100)
    database = Database(path)
    with pytest.raises(DatabaseError, match="cannot be opened"):
        await database.start()
    await database.stop()


@pytest.mark.parametrize(("durability", "level"), [("process", 1), ("power", 2)])
async def test_durability_sets_what_a_commit_waits_for(tmp_path, durability, level):
    database = Database(tmp_path / "db.sqlite", durability=durability)
    await database.start()
    try:
        assert await database.write(lambda db: db.execute("PRAGMA synchronous").fetchone()[0]) == level
        assert await database.write(lambda db: db.execute("PRAGMA journal_mode").fetchone()[0]) == "wal"
    finally:
        await database.stop()


async def test_every_statement_compiles(database):
    for name in ("arrays", "jobs"):
        for statement in load_sql(name).values():

            def explain(db, statement=statement):
                names = {word.strip(":,()") for word in statement.replace("(", " ").split() if word.startswith(":")}
                db.execute("EXPLAIN " + statement, dict.fromkeys(names))

            await database.read(explain)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 63, 64, 65, 1000])
async def test_many_rows_by_few_statements(database, count):
    rows = [{"id": f"k{i}", "x": 1 / (i + 1), "void": None} for i in range(count)]
    statements = []

    def write(db):
        db.execute("CREATE TABLE numbers (id, x, kind, void)")
        db.set_trace_callback(statements.append)
        insert_rows(db, "INSERT INTO numbers (id, x, kind, void)\nVALUES (:id, :x, 'fixed', :void)", rows)
        db.set_trace_callback(None)

    await database.write(write)
    found = await database.read(lambda db: db.execute("SELECT * FROM numbers").fetchall())
    assert [tuple(row) for row in found] == [(row["id"], row["x"], "fixed", None) for row in rows]
    assert len(statements) == count // 64 + count % 64 // 8 + count % 8


async def test_cursors_end_in_the_thread_that_made_them(database):
    """One that ended elsewhere would reset a statement that runs: SQLite calls that misuse."""
    rows = [(f"k{i}",) for i in range(3)]
    delete = "DELETE FROM tier_garbage WHERE id = ?"
    assert await database.write(lambda db: db.executemany(INSERT, rows)) is None
    found = await asyncio.gather(
        database.write_soon(lambda db: db.execute(delete, ("k0",))),
        database.write_soon(lambda db: db.execute(delete, ("k1",)).rowcount),
        database.write_soon(lambda db: db.execute("INSERT INTO nowhere VALUES (1)")),
        database.write_soon(lambda db: db.executemany(delete, rows)),
        return_exceptions=True,
    )
    assert [found[0], found[1], found[3]] == [None, 1, None]
    assert not any(isinstance(each, sqlite3.Cursor) for each in gc.get_objects())


async def test_who_wants_no_future_is_told_behind_those_who_have_one(database):
    order = []
    future = database.write_soon(lambda db: db.execute(INSERT, ("a",)), within_s=3600)
    future.add_done_callback(lambda _: order.append("future"))
    database.write_then(lambda _: 7, lambda *told: order.append(told), within_s=3600)
    database.write_then(lambda db: db.execute(INSERT, ("a",)), lambda *told: order.append(told), within_s=3600)
    assert await database.read(count) == 1
    await asyncio.sleep(0)
    assert order[:2] == ["future", (7, None)]
    assert order[2][0] is None
    assert isinstance(order[2][1], sqlite3.IntegrityError)


@pytest.fixture
def threads(database):
    """Writes of one row, and who commits them."""

    class Threads:
        def __init__(self):
            self.count = 0

        async def write(self, rows=1):
            """Whether the event loop's own thread commits the next one."""
            self.count += 1
            key = f"t{self.count}"
            return await database.write_soon(
                lambda db: db.execute(INSERT, (key,)).rowcount == 1 and threading.get_ident() == here, rows=rows
            )

    here = threading.get_ident()
    return Threads()


async def test_a_few_rows_are_committed_by_the_event_loop_and_many_by_the_thread(database, threads):
    assert [await threads.write(rows) for rows in (1, 64, 65, math.inf, 0)] == [True, True, False, False, True]
    future = database.write_soon(lambda _: threading.current_thread() is threading.main_thread(), rows=40)
    assert not await threads.write(40), "more than the event loop takes, both together"
    assert await future is False
    with sqlite3.connect(database.path) as other:
        assert other.execute(COUNT).fetchone() == (threads.count,)


async def test_what_comes_behind_the_thread_s_is_the_thread_s_too(database, threads):
    held, order = threading.Event(), []
    database.write_soon(lambda _: held.wait(60))
    await asyncio.sleep(0.01)
    writes = []
    for number in range(3):
        writes.append(database.write_soon(lambda _, number=number: order.append(number), rows=1))
        await asyncio.sleep(0.01)
    assert order == []
    held.set()
    await asyncio.gather(*writes)
    assert order == [0, 1, 2]
    assert await threads.write()


@pytest.mark.parametrize("durability", ["power", "replicated"])
async def test_a_commit_that_waits_for_the_disk_is_the_thread_s(tmp_path, durability):
    database = Database(tmp_path / "db.sqlite", durability=durability)
    await database.start()
    try:
        for _ in range(3):
            assert await database.write_soon(lambda _: threading.get_ident(), rows=1) != threading.get_ident()
    finally:
        await database.stop()


async def test_a_log_that_has_been_long_is_not_looked_at_after_every_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(database_module, "_MAX_LOG_BYTES", 1 << 16)
    monkeypatch.setattr(database_module, "_LOOK_EVERY", 20 * database_module._LOG_BYTES_OF_A_ROW)
    database = Database(tmp_path / "db.sqlite")
    await database.start()
    try:
        looks, size_of = [], database._size_of_log
        # As it is after it has been longer: a file that stays as long as it may be.
        monkeypatch.setattr(database, "_size_of_log", lambda: looks.append(size_of()) or 1 << 16)
        for number in range(100):
            await database.write_soon(lambda db, number=number: db.execute(INSERT, (f"k{number}",)), rows=1)
        assert 100 // 20 <= len(looks) <= 20
    finally:
        await database.stop()


async def test_the_log_goes_to_the_database_by_the_thread_and_begins_anew_there(tmp_path, monkeypatch):
    """Both wait for the disk. SQLite's own number of pages would have every eightieth end of a short job do that."""
    assert database_module._MAX_LOG_BYTES == 32 << 20
    limit = 1 << 16
    monkeypatch.setattr(database_module, "_MAX_LOG_BYTES", limit)
    points = []
    check_point = database_module._check_point
    monkeypatch.setattr(
        database_module, "_check_point", lambda db: (points.append(threading.get_ident()), check_point(db))
    )
    database = Database(tmp_path / "db.sqlite")
    log = tmp_path / "db.sqlite-wal"
    await database.start()
    try:
        here, sizes, rounds, before = threading.get_ident(), [], 0, b""
        for number in range(200):
            by = await database.write_soon(
                lambda db, number=number: db.execute(INSERT, (f"k{number}",)) and threading.get_ident(), rows=1
            )
            await database.write(lambda _: None)  # nothing, behind what the thread does now
            sizes.append(log.stat().st_size)
            head = log.read_bytes()[:32]
            if before and head != before:  # the log's header, of which the disk is waited for
                rounds += 1
                assert by != here
            before = head
        assert rounds >= 3
        assert len(points) >= rounds
        assert here not in points
        assert limit < max(sizes[1:]) < 2 * limit, "the first is that of the migrations"
        assert await database.read(count) == 200
    finally:
        await database.stop()


def test_a_log_that_cannot_go_to_the_database_is_told_of_once(caplog):
    class OnDisk:
        stuck = False
        full = True

        def execute(self, _):
            if self.full:
                raise sqlite3.OperationalError("database or disk is full")
            return self

        def fetchall(self):
            return []

    connection = OnDisk()
    for count in (1, 2):
        for _ in range(5):
            database_module._check_point(connection)
        assert caplog.text.count("could not be brought into it") == count
        connection.full = False
        database_module._check_point(connection)
        connection.full = True


async def test_after_a_commit_that_took_long_the_thread_commits_for_a_while(threads, monkeypatch):
    monkeypatch.setattr(database_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(database_module, "_CALM_S", 3600.0)
    assert [await threads.write() for _ in range(3)] == [True, False, False]


async def test_the_event_loop_tries_again_after_a_while(database, threads, monkeypatch):
    monkeypatch.setattr(database_module, "_SLOW_S", 0.0)
    monkeypatch.setattr(database_module, "_CALM_S", 0.01)
    assert await threads.write()
    await asyncio.sleep(0.02)
    assert await threads.write()


async def test_the_event_loop_does_not_wait_for_another_program_that_has_locked_the_file(
    database, threads, monkeypatch
):
    monkeypatch.setattr(database_module, "_CALM_S", 0.0)
    with contextlib.closing(sqlite3.connect(database.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        write = asyncio.ensure_future(threads.write())
        began = time.monotonic()
        await asyncio.sleep(0.05)
        assert time.monotonic() - began < 5, "a lock is waited for for ten seconds"
        assert not write.done()
        other.execute("COMMIT")
    assert await write is False
    assert await threads.write()


async def test_a_file_that_stays_locked_is_an_error(database, threads, monkeypatch):
    monkeypatch.setattr(database_module, "_LOCKED_S", 0.05)
    monkeypatch.setattr(database_module, "_CALM_S", 0.0)
    with contextlib.closing(sqlite3.connect(database.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            await threads.write()
        other.execute("COMMIT")
    assert await threads.write()

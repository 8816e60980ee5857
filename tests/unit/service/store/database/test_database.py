"""The writer thread: what a write that returned promises, and what an error costs the others."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading

import pytest

from gemmserve_service.errors import StoreFull
from gemmserve_service.store.database.database import Database, insert_rows, load_sql
from gemmserve_service.store.database.migrations import DatabaseError

INSERT = "INSERT INTO idempotency (owner, key, digest, job_id, created_at) VALUES ('', ?, 'd', 'j', 0)"
COUNT = "SELECT count(*) FROM idempotency"


def count(db):
    return db.execute(COUNT).fetchone()[0]


async def test_a_write_that_returned_is_there_for_another_connection(database):
    await database.write(lambda db: db.execute(INSERT, ("k",)))
    with sqlite3.connect(database.path) as other:
        assert other.execute(COUNT).fetchone() == (1,)
    assert await database.read(count) == 1


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


@pytest.mark.parametrize("company", [0, 2])
async def test_a_write_that_fails_half_way_leaves_nothing(database, company):
    def half(db):
        db.execute(INSERT, ("half",))
        raise ValueError("no more")

    others = [
        database.write_soon(lambda db, i=i: db.execute(INSERT, (f"k{i}",)), within_s=3600) for i in range(company)
    ]
    with pytest.raises(ValueError, match="no more"):
        await database.write(half)
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


async def test_a_full_disk_is_a_store_full_and_nothing_of_it_stays(database):
    pages = await database.write(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
    await database.write(lambda db: db.execute(f"PRAGMA max_page_count = {pages + 2}"))
    with pytest.raises(StoreFull):
        await database.write(lambda db: db.execute(INSERT, ("x" * 100_000,)))
    await database.write(lambda db: db.execute(INSERT, ("small",)))
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
    delete = "DELETE FROM idempotency WHERE key = ?"
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


async def test_many_commits_are_brought_into_the_database_together(database):
    """SQLite's own number of pages makes every eightieth end of a short job wait for the disk."""
    assert await database.write(lambda db: db.execute("PRAGMA wal_autocheckpoint").fetchone()[0]) == 8192

"""The schema's history: every database that a released version made is brought up to date with all that is in it."""

from __future__ import annotations

import json
import sqlite3
import time

import numpy as np
import pytest
from inline_executor import InlineExecutor

from gemmserve_service.jobs.core import Core
from gemmserve_service.schemas import GemmJob, JobState
from gemmserve_service.store.database.database import Database
from gemmserve_service.store.database.migrations import (
    Migration,
    SchemaTooNew,
    migrate,
    migrations,
    split,
)

ARRAY, JOB, DONE = ("arr_" + "a" * 26), ("job_" + "b" * 26), ("job_" + "a" * 26)
A = np.arange(16.0).reshape(4, 4)


def connect(path):
    connection = sqlite3.connect(path, isolation_level=None)
    connection.row_factory = sqlite3.Row
    return connection


def version_of(connection):
    return connection.execute("PRAGMA user_version").fetchone()[0]


def columns(connection, table):
    return {row["name"] for row in connection.execute(f"PRAGMA table_info({table})")}


@pytest.fixture
def version_1(settings):
    """A data directory as the first version left it: an array, a job that waits and one that is done, a key."""
    (settings.data_dir / "extents").mkdir(parents=True)
    (settings.data_dir / "extents" / "pages").write_bytes(A.tobytes().ljust(4096, b"\0"))
    request = GemmJob(op="gemm", a=ARRAY, b=ARRAY, alpha=2).model_dump_json()
    now = time.time()
    connection = connect(settings.data_dir / "gemmserve.sqlite")
    for statement in migrations()[0].statements:  # as that version did: it kept no history
        connection.execute(statement)
    connection.execute("PRAGMA user_version = 1")
    assert version_of(connection) == 1
    assert "owner" not in columns(connection, "jobs")
    connection.execute(
        "INSERT INTO arrays VALUES (?, 'float64', '[4, 4]', 'C', 128, NULL, ?, NULL, 'pages', 'live')", (ARRAY, now)
    )
    insert = (
        "INSERT INTO jobs (id, op, state, request, created_at, finished_at, result) VALUES (?, 'gemm', ?, ?, ?, ?, ?)"
    )
    connection.execute(insert, (JOB, "queued", request, now, None, None))
    connection.execute(insert, (DONE, "succeeded", request, now, now, json.dumps({"d": ARRAY})))
    connection.execute("INSERT INTO idempotency VALUES ('k', 'd', ?, ?)", (DONE, now))
    connection.close()
    return settings


async def test_a_database_of_version_1_goes_on_with_all_its_rows(version_1, fetch):
    core = Core(version_1, InlineExecutor())
    await core.start()
    try:
        waiting = await core.jobs.wait(JOB, 60)
        assert waiting.state == JobState.SUCCEEDED
        np.testing.assert_array_equal(fetch(core.store, waiting.result["d"]), 2 * A @ A)
        done = await core.jobs.get(DONE)
        assert (done.state, done.result, done.owner) == (JobState.SUCCEEDED, {"d": ARRAY}, "")
        assert (await core.store.info(ARRAY)).owner == ""
        assert core.jobs._keys.jobs_of("", "k", "d") == [DONE]
        assert await core.database.read(version_of) == migrations()[-1].version
    finally:
        await core.stop()


async def test_a_newer_database_is_refused_by_name_and_left_alone(tmp_path):
    path = tmp_path / "db.sqlite"
    with connect(path) as newer:
        newer.execute(f"PRAGMA user_version = {migrations()[-1].version + 1}")
        newer.execute("CREATE TABLE of_the_future (x)")
    before = path.read_bytes()
    database = Database(path)
    with pytest.raises(SchemaTooNew, match=f"db.sqlite.*version {migrations()[-1].version + 1}.*newer gemmserve"):
        await database.start()
    assert not database.is_open
    await database.stop()
    with connect(path) as newer:
        assert version_of(newer) == migrations()[-1].version + 1
        assert newer.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 1
    assert len(path.read_bytes()) == len(before)


def test_a_look_at_a_database_tells_only_of_a_newer_one(tmp_path):
    path = tmp_path / "db.sqlite"
    Database(path).check()
    assert not path.exists()
    with connect(path) as older:
        older.execute("PRAGMA user_version = 1")
    Database(path).check()
    with connect(path) as same:
        assert version_of(same) == 1
        same.execute("PRAGMA user_version = 1000")
    with pytest.raises(SchemaTooNew, match=r"db.sqlite.*version 1000.*newer gemmserve"):
        Database(path).check()
    path.write_bytes(b"no database at all" * 100)
    Database(path).check()


def test_programs_of_the_time_before_beta_was_1_by_default_mean_what_they_meant():
    connection = connect(":memory:")
    migrate(connection, [step for step in migrations() if step.version < 150])
    gemm = {"op": "gemm", "a": ARRAY, "b": ARRAY}
    steps = [
        gemm | {"id": f"x{number}"} | more
        for number, more in enumerate([{}, {"c": ARRAY}, {"c": ARRAY, "beta": [2, 1]}, {"c": None}, {"alpha": 0.1}])
    ] + [{"id": "h", "op": "herk", "a": ARRAY, "c": "$x0"}]
    program = {"op": "program", "steps": steps, "verify": True}
    product = gemm | {"c": ARRAY, "beta": 0}
    insert = "INSERT INTO jobs (id, op, state, request, created_at) VALUES (?, ?, 'queued', ?, 0)"
    connection.execute(insert, (JOB, "program", json.dumps(program)))
    connection.execute(insert, (DONE, "gemm", json.dumps(product)))
    migrate(connection)
    found = dict(connection.execute("SELECT id, request FROM jobs").fetchall())
    assert json.loads(found[DONE]) == product
    steps[1]["beta"] = 0
    assert json.loads(found[JOB]) == program


def test_jobs_of_a_database_with_more_indexes_are_in_those_that_there_are_now():
    connection = connect(":memory:")
    migrate(connection, [step for step in migrations() if step.version < 250])
    insert = "INSERT INTO jobs (id, op, state, request, created_at, owner) VALUES (?, 'gemm', ?, '{}', 0, ?)"
    jobs = [("job_1", "succeeded", ""), ("job_2", "failed", ""), ("job_3", "succeeded", "a"), ("job_4", "queued", "a")]
    connection.executemany(insert, jobs)
    migrate(connection)
    indexes = connection.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = 'jobs'")
    assert {row["name"] for row in indexes} - {"sqlite_autoindex_jobs_1"} == {"jobs_not_succeeded", "jobs_of_owners"}
    for index, condition, found in (
        ("jobs_not_succeeded", "state <> 'succeeded'", ["job_2", "job_4"]),
        ("jobs_of_owners", "owner <> ''", ["job_3", "job_4"]),
    ):
        rows = connection.execute(f"SELECT id FROM jobs INDEXED BY {index} WHERE {condition} ORDER BY id")
        assert [row["id"] for row in rows] == found


def test_a_step_that_fails_leaves_the_version_before_it_whole():
    connection = connect(":memory:")
    good = Migration(1, "good", ("CREATE TABLE one (x)",))
    bad = Migration(2, "bad", ("CREATE TABLE two (x)", "INSERT INTO nowhere VALUES (1)"))
    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        migrate(connection, [good, bad])
    assert version_of(connection) == 1
    assert not connection.in_transaction
    assert columns(connection, "one")
    assert not columns(connection, "two")
    mended = Migration(2, "mended", ("CREATE TABLE two (x)",))
    assert migrate(connection, [good, mended]) == [2]
    assert migrate(connection, [good, mended]) == []


def test_a_step_that_another_line_of_work_brought_later_is_applied_all_the_same():
    connection = connect(":memory:")
    first, third = Migration(1, "first", ("CREATE TABLE one (x)",)), Migration(3, "third", ("CREATE TABLE three (x)",))
    second = Migration(2, "second", ("CREATE TABLE two (x)",))
    assert migrate(connection, [first, third]) == [1, 3]
    assert migrate(connection, [first, second, third]) == [2]
    assert version_of(connection) == 3
    assert columns(connection, "two")
    with pytest.raises(SchemaTooNew, match="version 2"):
        migrate(connection, [first, third])


def test_steps_are_numbered_in_order_and_all_of_them_run():
    steps = migrations()
    assert [step.version for step in steps[:2]] == [1, 2]
    assert [step.version for step in steps] == sorted({step.version for step in steps})
    connection = connect(":memory:")
    assert migrate(connection) == [step.version for step in steps]
    assert "owner" in columns(connection, "arrays") & columns(connection, "jobs") & columns(connection, "idempotency")


@pytest.mark.parametrize("name", ["shared_files", "places_later"])
def test_a_program_that_does_not_know_what_rows_may_name_now_refuses_the_database(name):
    connection = connect(":memory:")
    migrate(connection)
    (step,) = [step for step in migrations() if step.name == name]
    before = [each for each in migrations() if each.version < step.version]
    with pytest.raises(SchemaTooNew, match=f"this program reads up to {before[-1].version}"):
        migrate(connection, before)


def test_keys_lie_in_the_order_in_which_they_came():
    connection = connect(":memory:")
    steps = migrations()
    (step,) = [step for step in steps if step.name == "keys_in_order"]
    migrate(connection, [each for each in steps if each.version < step.version])
    for key, moment in (("b", 1), ("c", 3), ("a", 2)):
        connection.execute("INSERT INTO idempotency VALUES ('', ?, 'd', 'j', ?)", (key, moment))
    migrate(connection)
    connection.execute("INSERT INTO idempotency VALUES ('', 'a', 'd', 'k', 4)")
    assert [row[0] for row in connection.execute("SELECT key FROM idempotency")] == ["b", "a", "c", "a"]


def test_scripts_are_cut_into_statements():
    script = "-- a; comment\nCREATE TABLE a (x);\nCREATE TRIGGER t AFTER INSERT ON a BEGIN\n  SELECT 1;\nEND;\n-- end\n"
    first, second = split(script)
    assert first.endswith("CREATE TABLE a (x);")
    assert second.startswith("CREATE TRIGGER")
    assert second.endswith("END;")
    with pytest.raises(ValueError, match="does not end"):
        list(split("CREATE TABLE a (x)\n"))

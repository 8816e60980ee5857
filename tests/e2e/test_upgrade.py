"""Today's server on data directories that earlier versions left, and on one of a later version.

tests/support/old_data_directory.py makes them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tarfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from live_server import LiveServer

from gemmserve import Client, Unauthorized
from gemmserve_service.store.database.migrations import migrations

if TYPE_CHECKING:
    import httpx

FOLDER = Path(__file__).parent / "old_data"
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in FOLDER.iterdir())
LONG_S = 120


def unpack(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The data directory, as if it had been left a moment ago, and what is expected of it."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    expected = json.loads((folder / "expected.json").read_text())
    since = time.time() - expected["made_at"]
    with closing(sqlite3.connect(folder / "data" / "gemmserve.sqlite")) as database, database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for _, column, *_ in database.execute(f"PRAGMA table_info({table})").fetchall():
                if column.endswith("_at"):
                    database.execute(f"UPDATE {table} SET {column} = {column} + ?", (since,))
    for path in folder.rglob("*"):
        os.utime(path)
    return folder / "data", expected


def array_of(listed: dict[str, Any]) -> np.ndarray:
    array = (np.asarray(listed["real"]) + 1j * np.asarray(listed["imag"])).reshape(listed["shape"])
    dtype = np.dtype(listed["dtype"])
    return array.astype(dtype) if dtype.kind == "c" else array.real.astype(dtype)


def assert_same(array: np.ndarray, listed: dict[str, Any]) -> None:
    np.testing.assert_array_equal(array, array_of(listed), strict=True)


def go_on_with(upload: str, expected: dict[str, Any], http: httpx.Client) -> None:
    whole = array_of(expected["array"]).tobytes()
    body = {"Content-Type": "application/octet-stream"}
    refused = http.post(f"/v1/uploads/{upload}/complete")
    assert (refused.status_code, refused.json()["missing"]) == (409, expected["missing"])
    for start, end in expected["missing"]:
        sent = http.put(f"/v1/uploads/{upload}/parts/{start}", headers=body, content=whole[start:end])
        assert sent.status_code == 204, sent.text
    completed = http.post(f"/v1/uploads/{upload}/complete")
    assert completed.status_code == 201, completed.text
    read = http.get(f"{completed.headers['Location']}/data", headers={"Accept": "application/octet-stream"})
    assert read.content == whole


@pytest.mark.parametrize("name", NAMES)
def test_what_an_earlier_version_left_is_all_there_and_goes_on(tmp_path, name) -> None:
    data_dir, expected = unpack(name, tmp_path)
    states = {job["state"] for job in expected["jobs"].values()}
    assert states == {"succeeded", "cancelled", "waiting"}
    key = expected["keys"][0] if expected["keys"] else None
    with LiveServer(data_dir=data_dir) as server, Client(server.url, api_key=key) as client:
        for array_id, listed in expected["arrays"].items():
            assert_same(client.array(array_id).numpy(), listed)
        for job_id, left in expected["jobs"].items():
            job = client.job(job_id)
            if left["state"] == "cancelled":
                assert job.state == "cancelled"
                continue
            job.wait(LONG_S)
            assert (job.state, job.info.error) == ("succeeded", None)
            assert set(job.info.result) == set(left["results"])
            for result, listed in left["results"].items():
                assert_same(client.array(job.info.result[result]).numpy(), listed)
        with server.http() as http:
            http.headers.update({"Authorization": f"Bearer {key}"} if key else {})
            for job_id, left in expected["jobs"].items():  # a client that never saw the answer
                again = http.post("/v1/jobs", json=left["request"], headers={"Idempotency-Key": left["key"]})
                if left["request"]["op"] == "program":  # what was sent means something else now: see migration 150
                    assert again.json()["type"].endswith("/idempotency-mismatch")
                else:
                    assert again.json().get("id") == job_id, (left["key"], again.text)
            for upload, left in expected["uploads"].items():
                go_on_with(upload, left, http)
        if key:
            with Client(server.url) as stranger, pytest.raises(Unauthorized):
                next(iter(stranger.arrays()))
    with closing(sqlite3.connect(data_dir / "gemmserve.sqlite")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (migrations()[-1].version,)


def test_there_is_a_directory_from_before_migrations_and_one_with_everything() -> None:
    assert {"schema-1", "schema-100", "schema-130"} <= set(NAMES)


def test_a_directory_that_a_later_version_has_used_is_refused_and_left_alone(tmp_path) -> None:
    data_dir, _ = unpack("schema-130", tmp_path)
    database = data_dir / "gemmserve.sqlite"
    with LiveServer(data_dir=data_dir):
        pass
    later = migrations()[-1].version + 10
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("INSERT INTO schema_history VALUES (?, 'later')", (later,))
        connection.execute(f"PRAGMA user_version = {later}")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    files = {path: path.read_bytes() for path in [database, *sorted((data_dir / "extents").iterdir())]}
    with pytest.raises(RuntimeError, match="the server ended with status") as ended, LiveServer(data_dir=data_dir):
        pass
    reason = f"schema version {later}, this program reads up to {later - 10}: use the newer gemmserve, or another"
    assert reason in str(ended.value)
    assert "Traceback" not in str(ended.value)
    assert "starting it again" not in str(ended.value)
    assert {path: path.read_bytes() for path in [database, *sorted((data_dir / "extents").iterdir())]} == files

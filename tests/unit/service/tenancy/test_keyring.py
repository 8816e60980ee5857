"""The key file: whole at every moment, changed by one at a time, and never a way to fall open."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading

import pytest

from gemmserve_service.tenancy import keyring as module
from gemmserve_service.tenancy.api_keys import Quota, Scope, matches
from gemmserve_service.tenancy.keyring import (
    FILE,
    KeyringError,
    KeyringWatch,
    UnknownKey,
    change_owner,
    create_key,
    read_keyring,
    revoke_key,
)


def test_no_keys_no_lock_on_the_door(tmp_path):
    assert not read_keyring(tmp_path).closed
    assert not read_keyring(tmp_path / "not there").closed


def test_a_key_comes_back(tmp_path):
    key_id, text = create_key(tmp_path, "alice", scopes=[Scope.READ], expires_at=9e9, weight=2)
    keyring = read_keyring(tmp_path)
    assert keyring.closed
    record = keyring.keys[key_id]
    assert matches(text, record)
    assert (record.name, record.owner, record.scopes, record.expires_at) == ("alice", key_id, {Scope.READ}, 9e9)
    assert (keyring.weight(key_id), keyring.weight("nobody"), keyring.weight("")) == (2, 1, 1)


def test_the_secret_is_nowhere_on_the_disk(tmp_path):
    _, text = create_key(tmp_path, "alice")
    for path in tmp_path.iterdir():
        assert text.split("_")[2].encode() not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_second_key_of_an_owner_shares_its_things(tmp_path):
    first, _ = create_key(tmp_path, "alice", quota=Quota(queued_jobs=3))
    second, _ = create_key(tmp_path, "alice's reader", scopes=[Scope.READ], owner=first)
    keyring = read_keyring(tmp_path)
    assert keyring.keys[second].owner == first
    assert keyring.quota(first) == Quota(queued_jobs=3)
    assert list(keyring.owners) == [first]
    with pytest.raises(UnknownKey):
        create_key(tmp_path, "x", owner=second)


def test_revoked_for_good_and_still_closed(tmp_path):
    key_id, _ = create_key(tmp_path, "alice")
    once = revoke_key(tmp_path, key_id)
    assert revoke_key(tmp_path, key_id) == once
    assert read_keyring(tmp_path).keys[key_id].state() == "revoked"
    assert read_keyring(tmp_path).closed
    with pytest.raises(UnknownKey):
        revoke_key(tmp_path, "nobody")


def test_an_owner_s_limits_change_one_by_one(tmp_path):
    owner, _ = create_key(tmp_path, "alice", quota=Quota(queued_jobs=3, stored_bytes=5))
    change_owner(tmp_path, owner, weight=4, quota={"stored_bytes": None, "inflight_bytes": 7})
    keyring = read_keyring(tmp_path)
    assert keyring.quota(owner) == Quota(queued_jobs=3, inflight_bytes=7)
    assert keyring.weight(owner) == 4


def test_many_hands_lose_no_key(tmp_path):
    """Threads and processes at the same time; each key that was shown is there."""
    script = (
        "import sys; from pathlib import Path; from gemmserve_service.tenancy.keyring import create_key\n"
        "for _ in range(10): print(create_key(Path(sys.argv[1]), 'p')[0])"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    made = []
    threads = [
        threading.Thread(target=lambda: made.extend(create_key(tmp_path, "t")[0] for _ in range(10))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes:
        made += process.communicate()[0].split()
    assert len(made) == 60
    assert set(read_keyring(tmp_path).keys) == set(made)


def test_a_crash_while_writing_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    key_id, _ = create_key(tmp_path, "alice")

    def crash(_fd):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(module.os, "fsync", crash)
    with pytest.raises(OSError, match="space"):
        create_key(tmp_path, "bob")
    monkeypatch.undo()
    assert list(read_keyring(tmp_path).keys) == [key_id]
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2}', '{"keys": {"a": {}}}', '{"keys": {}, "owners": {}, "more": 1}']
)
def test_a_file_that_makes_no_sense_is_an_error(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(KeyringError, match=FILE):
        read_keyring(tmp_path)


async def test_the_watch_sees_changes_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    watch = KeyringWatch(tmp_path)
    changes = []
    watch.on_change.append(lambda before, after: changes.append((set(before.keys), set(after.keys))))
    await watch.start()
    try:
        assert not watch.current.closed
        key_id, _ = create_key(tmp_path, "alice")
        async with asyncio.timeout(60):
            while not watch.current.closed:  # noqa: ASYNC110 (the watch has no event for it)
                await asyncio.sleep(0.01)
        assert changes == [(set(), {key_id})]
        revoke_key(tmp_path, key_id)
        async with asyncio.timeout(60):
            while watch.current.keys[key_id].state() != "revoked":  # noqa: ASYNC110 (the watch has no event for it)
                await asyncio.sleep(0.01)
    finally:
        await watch.stop()


@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: path.write_text("{")])
async def test_a_server_that_had_keys_does_not_fall_open(tmp_path, spoil):
    key_id, _ = create_key(tmp_path, "alice")
    watch = KeyringWatch(tmp_path)
    await watch.start()
    try:
        spoil(tmp_path / FILE)
        watch.refresh()
        assert watch.current.closed
        assert key_id in watch.current.keys
    finally:
        await watch.stop()


async def test_keys_that_could_not_be_read_are_read_again(tmp_path, monkeypatch, caplog):
    """Though their file does not change any more: it was another user's for a moment, say."""
    watch = KeyringWatch(tmp_path)
    await watch.start()
    try:
        key_id, _ = create_key(tmp_path, "alice")
        with monkeypatch.context() as patch:

            def refused(*_):
                raise KeyringError("cannot be read: Permission denied")

            patch.setattr(module, "read_keyring", refused)
            for _ in range(3):
                watch.refresh()
        assert not watch.current.closed
        assert caplog.text.count("stay in force") == 1, "which is said once"
        watch.refresh()
        assert key_id in watch.current.keys
    finally:
        await watch.stop()


async def test_a_file_that_makes_no_sense_stops_the_start(tmp_path):
    (tmp_path / FILE).write_text("{")
    with pytest.raises(KeyringError):
        await KeyringWatch(tmp_path).start()


def test_the_file_is_json_for_people(tmp_path):
    key_id, _ = create_key(tmp_path, "alice")
    assert json.loads((tmp_path / FILE).read_text())["keys"][key_id]["name"] == "alice"

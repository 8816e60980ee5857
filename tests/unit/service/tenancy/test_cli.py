"""`gemmserve keys`: what is shown, once; and arguments that make no sense."""

from __future__ import annotations

import json
import os
import re
import time

import pytest

from gemmserve.cli import main
from gemmserve_service.tenancy.api_keys import Quota, Scope, matches
from gemmserve_service.tenancy.keyring import FILE, read_keyring


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("GEMMSERVE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def keys(tmp_path, capsys):
    """keys("create", "alice") -> status, stdout, stderr; on a data directory of the test's own."""

    def run(*arguments):
        status = main(["keys", *arguments, "--data-dir", str(tmp_path)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_create_prints_the_key_alone_on_stdout(keys, tmp_path):
    status, out, err = keys("create", "alice")
    assert status == 0
    assert re.fullmatch(r"gs_[0-9a-z]{10}_[0-9A-Za-z]{49}\n", out)
    key_id = out.split("_")[1]
    assert key_id in err
    assert "not shown again" in err
    assert out.strip() not in err
    record = read_keyring(tmp_path).keys[key_id]
    assert matches(out.strip(), record)
    assert (record.name, record.scopes, record.expires_at) == ("alice", {Scope.READ, Scope.SUBMIT}, None)


def test_create_with_everything(keys, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.8e9)
    status, out, _ = keys(
        "create", "--name", "bob", "--scopes", "read, admin", "--expires-in", "90d", "--weight", "2.5",
        "--quota-stored-bytes", "1.5G", "--quota-inflight-bytes", "1000", "--quota-queued-jobs", "7",
        "--quota-device-seconds", "3600", "--json",
    )  # fmt: skip
    assert status == 0
    shown = json.loads(out)
    keyring = read_keyring(tmp_path)
    record = keyring.keys[shown["id"]]
    assert matches(shown["key"], record)
    assert record.scopes == {Scope.READ, Scope.ADMIN}
    assert (record.created_at, record.expires_at) == (1.8e9, 1.8e9 + 90 * 86_400)
    assert keyring.weight(record.owner) == 2.5
    assert keyring.quota(record.owner) == Quota(
        stored_bytes=3 << 29, inflight_bytes=1000, queued_jobs=7, device_seconds_per_day=3600
    )


def test_list_shows_everything_but_the_secret(keys):
    key = keys("create", "alice", "--quota-queued-jobs", "7")[1].strip()
    _, out, _ = keys("list")
    assert re.search(rf"{key.split('_')[1]} +alice +valid +read,submit .*queued_jobs=7", out)
    listed = json.loads(keys("list", "--json")[1])
    assert listed[0]["state"] == "valid"
    for text in (out, json.dumps(listed)):
        assert key.split("_")[2] not in text
        assert "sha256" not in text


def test_list_of_none(keys):
    status, out, _ = keys("list")
    assert status == 0
    assert len(out.splitlines()) == 1


def test_revoke(keys):
    ids = [keys("create", name)[1].split("_")[1] for name in ("alice", "bob")]
    assert keys("revoke", *ids)[0] == 0
    assert keys("list")[1].count("revoked") == 2
    status, _, err = keys("revoke", "nobody")
    assert (status, err) == (1, "gemmserve: no key nobody; `gemmserve keys list` shows the ids\n")
    key = keys("create", "carol")[1].strip()
    assert key not in keys("revoke", key)[2]


def test_set(keys, tmp_path):
    owner = keys("create", "alice", "--quota-queued-jobs", "7")[1].split("_")[1]
    assert keys("set", owner, "--quota-stored-bytes", "10M", "--quota-queued-jobs", "none", "--weight", "3")[0] == 0
    keyring = read_keyring(tmp_path)
    assert (keyring.quota(owner), keyring.weight(owner)) == (Quota(stored_bytes=10 << 20), 3)
    assert keys("set", "nobody", "--weight", "1")[0] == 1


def test_a_second_key_of_an_owner(keys, tmp_path):
    owner = keys("create", "alice", "--quota-queued-jobs", "7", "--quota-stored-bytes", "5")[1].split("_")[1]
    status, out, _ = keys("create", "alice's reader", "--owner", owner, "--scopes", "read", "--quota-queued-jobs", "9")
    assert status == 0
    keyring = read_keyring(tmp_path)
    assert keyring.keys[out.split("_")[1]].owner == owner
    assert keyring.quota(owner) == Quota(queued_jobs=9, stored_bytes=5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "x", "--scopes", "write"], "choose from read, submit, admin"),
        (["create", "x", "--scopes", ""], "choose from"),
        (["create", "x", "--expires-in", "soon"], "'soon' is no time"),
        (["create", "x", "--expires-in", "0d"], "is no time"),
        (["create", "x", "--weight", "0"], "is not a number above 0"),
        (["create", "x", "--weight", "nan"], "is not a number above 0"),
        (["create", "x", "--quota-stored-bytes", "much"], "is no number of bytes"),
        (["create", "x", "--quota-queued-jobs", "-1"], "queued_jobs: must be at least 0, not -1"),
        (["create", "x", "--name", "y"], "two names"),
        (["create", "x", "--owner", "nobody"], "no owner nobody"),
    ],
)
def test_what_makes_no_sense_makes_no_key(keys, tmp_path, arguments, said):
    status, out, err = keys(*arguments)
    assert status in {1, 2}
    assert said in err
    assert len(err.splitlines()) == 1
    assert out == ""
    assert not (tmp_path / FILE).exists()


def test_the_variable_of_the_data_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GEMMSERVE_DATA_DIR", str(tmp_path / "there"))
    assert main(["keys", "create", "alice"]) == 0
    assert len(read_keyring(tmp_path / "there").keys) == 1


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_keys_alone_lists(keys, flags):
    keys("create", "alice")
    assert keys(*flags) == keys("list", *flags)
    assert "alice" in keys(*flags)[1]

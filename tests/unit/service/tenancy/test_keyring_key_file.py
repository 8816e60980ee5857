"""Keys from a container's secret: read whole or not at all, never a way to fall open."""

from __future__ import annotations

import asyncio

import pytest

from gemmserve.cli import main
from gemmserve_service.processes.supervisor import check_keys
from gemmserve_service.runtime.start_error import StartError
from gemmserve_service.settings import Settings
from gemmserve_service.tenancy.api_keys import Scope, matches, new_key
from gemmserve_service.tenancy.keyring import (
    KeyringError,
    KeyringWatch,
    create_key,
    read_key_file,
    read_keyring,
    revoke_key,
)


@pytest.fixture
def key_file(tmp_path):
    """key_file("line", ...) -> the path of a file of these lines."""

    def write(*lines):
        path = tmp_path / "secret"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


def test_a_key_its_name_and_its_scopes(key_file):
    (first, text), (second, other) = new_key(), new_key()
    found = read_key_file(key_file("# whose keys", "", f"{text} lab # of the lab", f"  {other}\tboard read"))
    assert set(found) == {first, second}
    assert matches(text, found[first])
    assert (found[first].name, found[first].scopes) == ("lab", {Scope.READ, Scope.SUBMIT})
    assert (found[second].name, found[second].owner, found[second].scopes) == ("board", second, {Scope.READ})
    assert read_key_file(key_file(other))[second].name == "unnamed"


def test_an_empty_secret_has_no_keys(key_file, tmp_path):
    assert read_key_file(key_file()) == {}
    assert not read_keyring(tmp_path, key_file()).closed


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text[:-1], "63 characters"),
        (lambda text: text[:20] + ("a" if text[20] != "a" else "b") + text[21:], "checksum"),
        (lambda text: f"{text} lab root", "unknown scopes"),
        (lambda text: f"{text} lab read too many", "more than a key"),
    ],
)
def test_a_line_that_makes_no_sense_is_named_and_not_quoted(key_file, tmp_path, spoil, said):
    _, text = new_key()
    with pytest.raises(KeyringError, match=f"line 2: .*{said}") as caught:
        read_key_file(key_file("# keys", spoil(text)))
    assert text[20:40] not in str(caught.value)
    with pytest.raises(KeyringError, match="line 2"):
        read_keyring(tmp_path, tmp_path / "secret")


def test_what_is_no_key_file(tmp_path, key_file):
    with pytest.raises(KeyringError, match="cannot be read: No such file"):
        read_key_file(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(KeyringError, match="not UTF-8"):
        read_key_file(tmp_path / "bytes")
    with pytest.raises(KeyringError, match="larger than"):
        read_key_file(key_file("#" * (1 << 20)))
    _, text = new_key()
    with pytest.raises(KeyringError, match="second key"):
        read_key_file(key_file(text, text))


def test_what_gemmserve_keys_says_of_a_key_wins(tmp_path, key_file):
    key_id, text = create_key(tmp_path, "lab")
    path = key_file(f"{text} other")
    assert read_keyring(tmp_path, path).keys[key_id].name == "lab"
    revoke_key(tmp_path, key_id)
    assert read_keyring(tmp_path, path).keys[key_id].state() == "revoked"


def test_changing_stored_keys_leaves_the_secret_out_of_them(tmp_path, key_file):
    given, text = new_key()
    path = key_file(text)
    made, _ = create_key(tmp_path, "lab")
    assert set(read_keyring(tmp_path, path).keys) == {given, made}
    assert set(read_keyring(tmp_path).keys) == {made}


def test_a_key_in_a_secret_opens_the_door_to_others(tmp_path, key_file):
    _, text = new_key()
    check_keys(Settings(host="0.0.0.0", data_dir=tmp_path, keys_file=key_file(text)))
    with pytest.raises(StartError, match="no API keys"):
        check_keys(Settings(host="0.0.0.0", data_dir=tmp_path, keys_file=key_file("# none")))


async def test_a_replaced_secret_holds_and_what_left_it_has_ended(tmp_path, key_file):
    (first, text), (second, other) = new_key(), new_key()
    path = key_file(text)
    watch = KeyringWatch(tmp_path, path)
    await watch.start()
    try:
        heard = asyncio.Event()
        watch.on_change.append(lambda before, after: heard.set())
        key_file(other, "# grown")
        await asyncio.wait_for(heard.wait(), 60)
        assert watch.current.keys[second].state() == "valid"
        assert watch.current.keys[first].state() == "revoked"
        heard.clear()
        key_file()
        await asyncio.wait_for(heard.wait(), 60)
        assert watch.current.closed, "an emptied secret must not open the server"
        assert {record.state() for record in watch.current.keys.values()} == {"revoked"}
        key_file(text, "# again")
        path.unlink()
        watch.refresh()
        assert watch.current.closed
    finally:
        await watch.stop()


def test_they_are_listed(tmp_path, key_file, capsys):
    key_id, text = new_key()
    path = key_file(f"{text} lab")
    assert main(["keys", "list", "--data-dir", str(tmp_path), "--keys-file", str(path)]) == 0
    shown = capsys.readouterr().out
    assert key_id in shown
    assert text not in shown

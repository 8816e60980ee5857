"""Which keys may join, and how a link's secret is known again."""

from __future__ import annotations

import time

import pytest

from gemmserve_service.executor.joined.tokens import FILE, LinkSecrets, TokenRefused, still_joined, token_key
from gemmserve_service.tenancy.api_keys import Scope
from gemmserve_service.tenancy.keyring import Keyring, create_key, read_keyring, revoke_key


def test_without_keys_anybody_joins_where_that_is_open(tmp_path):
    assert token_key(Keyring(), None, open_without_keys=True) == ""
    assert still_joined(Keyring(), "")
    with pytest.raises(TokenRefused):
        token_key(Keyring(), None, open_without_keys=False)


def test_a_key_of_the_scope_worker_joins(tmp_path):
    key_id, text = create_key(tmp_path, "node", scopes=[Scope.WORKER])
    keyring = read_keyring(tmp_path)
    assert token_key(keyring, text, open_without_keys=True) == key_id
    assert still_joined(keyring, key_id)
    assert not still_joined(keyring, "")  # who joined while there were no keys


@pytest.mark.parametrize("scopes", [[Scope.READ, Scope.SUBMIT], [Scope.ADMIN]])
def test_no_other_key_joins(tmp_path, scopes):
    key_id, text = create_key(tmp_path, "user", scopes=scopes)
    keyring = read_keyring(tmp_path)
    with pytest.raises(TokenRefused, match="scope"):
        token_key(keyring, text, open_without_keys=True)
    assert not still_joined(keyring, key_id)


def test_one_that_was_revoked_or_has_expired_joins_no_more(tmp_path):
    revoked = create_key(tmp_path, "revoked", scopes=[Scope.WORKER])
    expired = create_key(tmp_path, "expired", scopes=[Scope.WORKER], expires_at=time.time() - 1)
    revoke_key(tmp_path, revoked[0])
    keyring = read_keyring(tmp_path)
    for key_id, text in (revoked, expired):
        with pytest.raises(TokenRefused):
            token_key(keyring, text, open_without_keys=True)
        assert not still_joined(keyring, key_id)


@pytest.mark.parametrize("token", [None, "", "gs_", "é", "gs_" + "0" * 60])
def test_nonsense_is_refused_and_not_quoted(tmp_path, token):
    create_key(tmp_path, "node", scopes=[Scope.WORKER])
    with pytest.raises(TokenRefused) as refused:
        token_key(read_keyring(tmp_path), token, open_without_keys=True)
    assert not token or token not in str(refused.value)


def test_another_servers_token_is_unknown(tmp_path):
    create_key(tmp_path, "node", scopes=[Scope.WORKER])
    (tmp_path / "other").mkdir()
    _, text = create_key(tmp_path / "other", "node", scopes=[Scope.WORKER])
    with pytest.raises(TokenRefused, match="not known"):
        token_key(read_keyring(tmp_path), text, open_without_keys=True)


def test_a_secret_is_known_by_the_next_front_too(tmp_path):
    secrets = LinkSecrets(tmp_path)
    secret = secrets.new()
    again = LinkSecrets(tmp_path)
    assert again.made(secret)
    assert again.server == secrets.server
    assert secrets.new() != secret
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def test_no_other_is(tmp_path):
    secrets = LinkSecrets(tmp_path)
    secret = secrets.new()
    (tmp_path / "other").mkdir()
    other = LinkSecrets(tmp_path / "other")
    assert other.server != secrets.server
    wrong = "1" if secret[-1] == "0" else "0"
    for text in ("", "0" * 32, secret[:-1], secret[:-1] + wrong, secret + "0", "é" * 32, other.new()):
        assert not secrets.made(text)


def test_a_file_that_holds_no_key_is_no_key(tmp_path):
    (tmp_path / FILE).write_bytes(b"short")
    with pytest.raises(ValueError, match="no key"):
        LinkSecrets(tmp_path)

"""Who a request comes from, and what it needs."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError

from gemmserve_service.errors import Forbidden, Unauthorized
from gemmserve_service.tenancy.api_keys import KeyRecord, Scope
from gemmserve_service.tenancy.identity import ANYONE, NOBODY, SCRAPER, Caller, identify, needed_scope
from gemmserve_service.tenancy.keyring import Keyring, create_key, read_keyring, revoke_key


@pytest.fixture
def keys(tmp_path):
    """keys("alice", scopes=...) -> (text, id); `keys.ring` is the keyring."""

    def make(name, **fields):
        key_id, text = create_key(tmp_path, name, **fields)
        make.ring = read_keyring(tmp_path)
        return text, key_id

    make.folder = tmp_path
    return make


def test_without_keys_everybody_may_everything():
    assert identify(Keyring(), ["nonsense"], []) is ANYONE
    assert all(ANYONE.may(scope) for scope in Scope)
    assert ANYONE.view(everybody=True) == ""


def test_the_key_in_either_header(keys):
    text, key_id = keys("alice")
    for headers in (([f"Bearer {text}"], []), ([f"bearer  {text} "], []), ([], [text]), ([f"Bearer {text}"], [text])):
        caller = identify(keys.ring, *headers)
        assert (caller.key_id, caller.owner, caller.name) == (key_id, key_id, "alice")


def test_what_is_no_key(keys):
    text, _ = keys("alice")
    other, _ = keys("bob")
    for authorization, api_key in [
        ([], []),
        (["Basic YWxpY2U6eA=="], []),
        (["Bearer"], []),
        (["Bearer x"], []),
        ([f"Bearer {text}x"], []),
        ([f"Bearer {text}"], [other]),
        ([f"Bearer {text}", f"Bearer {other}"], []),
        ([], ["", text]),
    ]:
        with pytest.raises(Unauthorized) as caught:
            identify(keys.ring, authorization, api_key)
        assert text not in str(caught.value)


def test_a_key_of_another_server_is_unknown(keys, tmp_path_factory):
    keys("alice")
    _, stranger = create_key(tmp_path_factory.mktemp("other"), "alice")
    with pytest.raises(Unauthorized, match="not known"):
        identify(keys.ring, [f"Bearer {stranger}"], [])


def test_the_right_id_with_another_secret_is_unknown_and_learns_nothing(keys):
    """Also of an expired key: only who knows the secret is told that it has expired."""
    text, key_id = keys("alice", expires_at=time.time() - 1)
    with pytest.raises(Unauthorized, match="expired"):
        identify(keys.ring, [f"Bearer {text}"], [])
    from gemmserve_service.tenancy.api_keys import _checksum, new_key

    body = f"gs_{key_id}_" + new_key()[1].split("_")[2][:43]
    with pytest.raises(Unauthorized, match="not known"):
        identify(keys.ring, [f"Bearer {body}{_checksum(body)}"], [])


def test_revoked(keys):
    text, key_id = keys("alice")
    revoke_key(keys.folder, key_id)
    with pytest.raises(Unauthorized, match="revoked"):
        identify(read_keyring(keys.folder), [f"Bearer {text}"], [])


def test_nobody_is_not_everybody():
    """The owner "" stands for everybody's things: who comes without a key must never have it."""
    for caller in (NOBODY, SCRAPER):
        assert caller.view(everybody=False) not in {"", ANYONE.owner}
        assert not caller.may(Scope.SUBMIT)
        with pytest.raises(Forbidden):
            caller.view(everybody=True)


@pytest.mark.parametrize("owner", ["", "-", "x", "0123456789 "])
def test_no_key_stands_for_everybody(keys, owner):
    keys("alice")
    (record,) = keys.ring.keys.values()
    with pytest.raises(ValidationError):
        KeyRecord.model_validate(record.model_dump() | {"owner": owner})


def test_scopes():
    reader = Caller("k", "o", "n", frozenset({Scope.READ}))
    assert reader.may(Scope.READ)
    assert not reader.may(Scope.SUBMIT)
    with pytest.raises(Forbidden, match="submit"):
        reader.need(Scope.SUBMIT)
    assert reader.view(everybody=False) == "o"
    with pytest.raises(Forbidden, match="admin"):
        reader.view(everybody=True)
    admin = Caller("k", "o", "n", frozenset({Scope.ADMIN}))
    assert all(admin.may(scope) for scope in Scope)
    assert (admin.view(everybody=False), admin.view(everybody=True)) == ("o", "")


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/healthz", None),
        ("HEAD", "/readyz", None),
        ("GET", "/problems/gone", None),
        ("GET", "/metrics", Scope.READ),
        ("GET", "/v1/arrays", Scope.READ),
        ("HEAD", "/v1/arrays/x/data", Scope.READ),
        ("POST", "/v1/jobs", Scope.SUBMIT),
        ("DELETE", "/v1/jobs/x", Scope.SUBMIT),
        ("OPTIONS", "/v1/jobs", Scope.SUBMIT),
        ("POST", "/healthz", Scope.SUBMIT),
        ("GET", "/problemsx", Scope.READ),
        ("GET", "/anything else", Scope.READ),
        ("BREW", "/v1/arrays", Scope.SUBMIT),
    ],
)
def test_what_a_request_needs(method, path, scope):
    assert needed_scope(method, path) is scope

"""The form of an API key: recognisable, checked, and never kept."""

from __future__ import annotations

import hashlib
import hmac
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_service.tenancy import api_keys
from gemmserve_service.tenancy.api_keys import KeyMalformed, KeyRecord, Scope, digest_of, key_id_of, matches, new_key


def record_of(text, **fields):
    return KeyRecord(
        **{
            "name": "n",
            "owner": "0123456789",
            "sha256": digest_of(text),
            "scopes": frozenset({Scope.READ}),
            "created_at": 0.0,
            **fields,
        }
    )


def test_a_key_is_recognised_by_a_scanner_s_pattern():
    key_id, text = new_key()
    assert re.fullmatch(r"gs_[0-9a-z]{10}_[0-9A-Za-z]{49}", text)
    assert key_id_of(text) == key_id


def test_the_secret_has_256_random_bits():
    keys = [new_key()[1] for _ in range(300)]
    secrets = [text.split("_")[2][:43] for text in keys]
    assert len(set(secrets)) == len(secrets)
    # Each of the 42 lower digits takes every one of its 62 values: 300 draws miss one with probability 0.8 %.
    for place in range(1, 43):
        assert len({secret[place] for secret in secrets}) > 50, place
    assert 62**43 > 2**256


@given(st.integers(0, 62), st.sampled_from("0Zz"))
def test_any_wrong_character_is_told_from_a_wrong_key(place, character):
    _, text = new_key()
    wrong = text[:place] + character + text[place + 1 :]
    if wrong != text:
        with pytest.raises(KeyMalformed):
            key_id_of(wrong)


@pytest.mark.parametrize("cut", [0, 3, 30, 62])
def test_a_cut_key_is_malformed(cut):
    with pytest.raises(KeyMalformed):
        key_id_of(new_key()[1][:cut])


@given(st.text(max_size=80))
def test_arbitrary_text_is_malformed_and_not_quoted(text):
    with pytest.raises(KeyMalformed) as caught:
        key_id_of(text)
    assert len(text) < 12 or text not in str(caught.value)


def test_what_is_kept_is_the_sha256():
    _, text = new_key()
    record = record_of(text)
    assert record.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert text.split("_")[2] not in record.model_dump_json()


def test_only_the_key_matches():
    _, text = new_key()
    _, other = new_key()
    assert matches(text, record_of(text))
    assert not matches(other, record_of(text))
    assert not matches(text, None)


def test_digests_are_compared_in_constant_time_also_for_no_record(monkeypatch):
    """Known or not, the same comparison of two digests of the same length is made."""
    seen = []
    monkeypatch.setattr(
        api_keys.hmac, "compare_digest", lambda a, b: seen.append((len(a), len(b))) or hmac_compare(a, b)
    )
    _, text = new_key()
    matches(text, record_of(text))
    matches(text, None)
    assert seen == [(64, 64), (64, 64)]


hmac_compare = hmac.compare_digest


def test_states():
    _, text = new_key()
    assert record_of(text).state(5.0) == "valid"
    assert record_of(text, expires_at=4.0).state(5.0) == "expired"
    assert record_of(text, expires_at=5.0).state(5.0) == "expired"
    assert record_of(text, expires_at=9.0, revoked_at=1.0).state(5.0) == "revoked"

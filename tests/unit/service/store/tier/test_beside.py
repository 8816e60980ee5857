"""Records beside objects say an array again, and what makes no sense is none."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import numpy as np
import pytest

from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.store.tier.beside import read_record, record_of
from gemmserve_service.store.tier.objects import CHUNK

A = np.arange(12.0).reshape(3, 4)
DIGEST = hashlib.sha256(A.tobytes())


@pytest.fixture
def info():
    return ArrayInfo(
        id="arr_01jd2w7m4h8k3n5p6q9r0s1t2v",
        dtype="float64",
        shape=A.shape,
        order="C",
        nbytes=A.nbytes,
        sha256=None,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
        expires_at=datetime(2026, 1, 3, tzinfo=UTC),
        owner="alice",
        name="a",
        labels={"run": "7"},
    )


@pytest.fixture
def record(info):
    return record_of(info) | {"chunk": CHUNK, "sha256": [DIGEST.hexdigest()]}


def test_an_array_is_read_as_it_was_written(record, info):
    assert read_record(record) == (info, DIGEST.digest())


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float33"},
        {"shape": [3, 5]},
        {"nbytes": A.nbytes + 1},
        {"created_at": 1e300},
        {"created_at": "yesterday"},
        {"chunk": CHUNK + 1},
        {"sha256": []},
        {"sha256": ["xyz"]},
        {"sha256": 7},
        {"labels": None, "owner": None},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_none(record, change):
    assert read_record(record | change) is None


@pytest.mark.parametrize("name", ["id", "dtype", "shape", "sha256", "expires_at", "owner"])
def test_what_lacks_something_is_none(record, name):
    del record[name]
    assert read_record(record) is None

"""Objects of the tier, in a folder and in a stand-in for S3: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import sys

import pytest
from s3_stand_in import BUCKET, S3StandIn

from gemmserve_service.errors import ArrayCorrupt, TierUnavailable

pytest.importorskip("obstore", reason="the extra tier is not installed")

from gemmserve_service.store.tier.cold import TierUnusableError
from gemmserve_service.store.tier.objects import CHUNK, Objects

A, B = "arr_01hzzzzzzzzzzzzzzzzzzzzzza", "arr_01hzzzzzzzzzzzzzzzzzzzzzzb"
RECORD = {"id": A, "dtype": "float32"}


@pytest.fixture(params=["folder", "s3"])
def objects(request, tmp_path, monkeypatch):
    """Objects, and how to damage one."""
    if request.param == "folder":
        found = Objects((tmp_path / "tier").as_uri())
        found.claim("one", adopt=False)
        found.folder, found.damage = tmp_path / "tier", lambda name, change: _rewrite(tmp_path / "tier" / name, change)
        yield found
        return
    with S3StandIn() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        found = Objects(f"s3://{BUCKET}/some/prefix")
        found.claim("one", adopt=False)

        def damage(name, change):
            key = f"some/prefix/{name}"
            s3.objects[key] = change(s3.objects[key])

        found.damage, found.s3 = damage, s3
        yield found


def _rewrite(path, change):
    path.write_bytes(change(path.read_bytes()))


def read(objects, array_id, digests, nbytes):
    return b"".join(objects.read(array_id, digests, nbytes, number) for number in range(-(-nbytes // CHUNK)))


@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_what_goes_in_comes_out(objects, nbytes):
    data = (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
    digests = objects.put(A, memoryview(data), RECORD)
    assert len(digests) == 32 * -(-nbytes // CHUNK)
    assert read(objects, A, digests, nbytes) == data
    assert objects.record(A)["dtype"] == "float32"
    assert set().union(*objects.ids()) == {A}


def test_an_array_of_no_bytes_has_a_record_alone(objects):
    assert objects.put(A, memoryview(b""), RECORD) == b""
    assert objects.record(A)["sha256"] == []


def test_a_changed_byte_is_noticed_in_its_chunk_alone(objects):
    data = bytes(CHUNK + 100)
    digests = objects.put(A, memoryview(data), RECORD)
    objects.damage(f"arrays/{A}", lambda found: found[:-1] + b"\1")
    assert objects.read(A, digests, len(data), 0) == data[:CHUNK]
    with pytest.raises(ArrayCorrupt, match="not those"):
        objects.read(A, digests, len(data), 1)


def test_an_object_that_is_cut_short_or_gone_is_corrupt(objects):
    digests = objects.put(A, memoryview(b"abcdef"), RECORD)
    objects.damage(f"arrays/{A}", lambda found: found[:3])
    with pytest.raises(ArrayCorrupt):
        objects.read(A, digests, 6, 0)
    objects.delete(A)
    with pytest.raises(ArrayCorrupt, match="no longer"):
        objects.read(A, digests, 6, 0)


def test_deleted_twice_and_records_that_make_no_sense(objects):
    for array_id in (A, B):
        objects.put(array_id, memoryview(b"abc"), RECORD)
    objects.damage(f"arrays/{B}.json", lambda _: b"{")
    assert objects.record(B) is None
    objects.delete(A)
    objects.delete(A)
    assert objects.record(A) is None
    assert set().union(*objects.ids()) == {B}


def test_one_data_directory_has_it(objects):
    objects.claim("one", adopt=False)
    objects.claim("one", adopt=False)
    with pytest.raises(TierUnusableError, match="another data directory"):
        objects.claim("other", adopt=False)
    objects.claim("other", adopt=True)
    with pytest.raises(TierUnusableError):
        objects.claim("one", adopt=False)


def test_a_write_that_is_given_up_leaves_nothing(objects):
    asked = iter([False, True])
    with pytest.raises(TierUnavailable):
        objects.put(A, memoryview(bytes(3 * CHUNK)), RECORD, lambda: next(asked))
    assert set().union(*objects.ids()) == set()


def test_refusals_are_told_without_what_the_library_has_inside(monkeypatch):
    with S3StandIn() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        objects = Objects(f"s3://{BUCKET}/some/prefix")
        s3.down = True
        with pytest.raises(TierUnavailable) as caught:
            objects.put(A, memoryview(b"abc"), RECORD)
    assert caught.value.retry_after_s > 0
    assert "no-secret-of-anybody" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_addresses_of_no_use(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierUnusableError):
        Objects((tmp_path / "file").as_uri())


def test_without_the_library_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TierUnusableError, match=r"gemmserve\[tier\]"):
        Objects((tmp_path / "tier").as_uri())

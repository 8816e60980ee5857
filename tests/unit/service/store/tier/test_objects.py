"""Objects of the tier, in a folder and in a stand-in for S3: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

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
    """Objects of a data directory, and how to damage, place and lose them."""
    if request.param == "folder":
        found = Objects((tmp_path / "tier").as_uri())
        found.claim("one", adopt=False)
        folder = tmp_path / "tier"
        found.damage = lambda name, change: _rewrite(folder / name, change)
        found.place = lambda name, data: _write(folder / name, data)
        found.lose = lambda: shutil.rmtree(folder)
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

        found.damage, found.lose = damage, s3.objects.clear
        found.place = lambda name, data: s3.objects.update({f"some/prefix/{name}": data})
        yield found


@pytest.fixture
def folder(tmp_path):
    """Objects of a data directory in `folder.path`, a folder that may be another file system's."""
    found = Objects((tmp_path / "a folder").as_uri())
    found.claim("one", adopt=False)
    found.path = tmp_path / "a folder"
    return found


def _rewrite(path, change):
    path.write_bytes(change(path.read_bytes()))


def _write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


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


def test_an_object_that_ends_before_a_chunk_is_corrupt(objects):
    digests = objects.put(A, memoryview(bytes(CHUNK + 100)), RECORD)
    objects.damage(f"arrays/{A}", lambda found: found[:CHUNK])
    assert objects.read(A, digests, CHUNK + 100, 0) == bytes(CHUNK)
    with pytest.raises(ArrayCorrupt, match="not those"):
        objects.read(A, digests, CHUNK + 100, 1)


def test_a_tier_that_is_gone_as_a_whole_has_lost_no_array(objects):
    digests = objects.put(A, memoryview(b"abcdef"), RECORD)
    objects.lose()
    with pytest.raises(TierUnavailable, match="not mounted"):
        objects.read(A, digests, 6, 0)


def test_nothing_is_written_where_a_file_system_is_no_longer_mounted(folder):
    shutil.rmtree(folder.path)
    folder.path.mkdir()
    with pytest.raises(TierUnavailable, match="not mounted"):
        folder.put(A, memoryview(b"abcdef"), RECORD)
    assert list(folder.path.iterdir()) == []


def test_a_folder_that_keeps_less_than_it_was_given(folder, monkeypatch):
    library = folder._obstore

    def put(store, name, data, **options):
        library.put(store, name, data if name.endswith(".json") else bytes(data)[:4], **options)

    others = {name: getattr(library, name) for name in dir(library) if name[0] != "_"}
    monkeypatch.setattr(folder, "_obstore", SimpleNamespace(**others | {"put": put}))
    with pytest.raises(TierUnavailable, match="4 of the 6 bytes"):
        folder.put(A, memoryview(b"abcdef"), RECORD)


def test_objects_of_other_names_are_somebody_elses(objects):
    for name in ("notes.txt", "arr_notes", f"{A}.npy", f"{A}_0", f"copy/{A}", f"{A}_7", f"{B}.json"):
        objects.place(f"arrays/{name}", b"abc")
    assert set().union(*objects.ids()) == {f"{A}_7", B}


def test_what_a_killed_write_to_a_folder_left_goes_when_it_is_claimed(folder):
    arrays, during = folder.path / "arrays", set()

    def stopped():
        during.update(path.name for path in arrays.iterdir() if arrays.is_dir())
        return False

    arrays.mkdir()
    folder.put(A, memoryview(bytes(3 * CHUNK)), RECORD, stopped)
    (staged,) = during  # named as the library does it
    for name in (staged, f"{B}.json#12", "notes#1"):
        (arrays / name).write_bytes(b"ab")
    folder.claim("one", adopt=False)
    assert {path.name for path in arrays.iterdir()} == {A, f"{A}.json", "notes#1"}


def test_deleted_twice_and_records_that_make_no_sense(objects):
    for array_id in (A, B):
        objects.put(array_id, memoryview(b"abc"), RECORD)
    objects.damage(f"arrays/{B}.json", lambda _: b"{")
    assert objects.record(B) is None
    objects.damage(f"arrays/{B}.json", lambda _: b"[" * 100_000)
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


def test_an_owner_that_cannot_be_read_is_another(objects):
    for content in (b"", b"{", b"[]", b"[" * 100_000):
        objects.place("server.json", content)
        assert objects.owner() == ""
        with pytest.raises(TierUnusableError, match="another data directory"):
            objects.claim("one", adopt=False)


def test_a_tier_without_an_owner_is_taken_only_if_nothing_can_be_lost(objects):
    objects.lose()
    with pytest.raises(TierUnusableError, match="mounted"):
        objects.claim("one", adopt=False, used=True)
    objects.place("arrays/notes.txt", b"an operator's")
    objects.place(f"arrays/{A}", b"abc")
    with pytest.raises(TierUnusableError, match="whose they are"):
        objects.claim("one", adopt=False)
    assert objects.owner() is None
    objects.claim("one", adopt=True, used=True)
    objects.claim("one", adopt=False, used=True)
    assert objects.owner() == "one"
    assert set().union(*objects.ids()) == {A}


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

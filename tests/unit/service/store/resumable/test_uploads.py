"""Uploads in parts that outlive their process, and parts that come too late."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3

import pytest
from inline_executor import InlineExecutor
from upload_parts import A, Body, raw

from gemmserve_service.errors import DigestMismatch, NotFound, StoreFull, UploadSuperseded
from gemmserve_service.jobs.core import Core
from gemmserve_service.store.declared import Declared
from gemmserve_service.store.record import Tags, npy_header
from gemmserve_service.store.resumable import uploads

NPY = npy_header(A.dtype.name, A.shape, "C") + raw(A)


async def test_what_was_acknowledged_survives_the_process(settings):
    """A core stopped without a word to its uploads, and another on the same folder."""
    data = raw(A)
    core = Core(settings, InlineExecutor())
    await core.start()
    declared = Declared(A.dtype, A.shape, "C", A.nbytes)
    tags = Tags("weights", {"run": "7"})
    one = await core.uploads.create("", "application/octet-stream", declared, ttl_s=None, tags=tags)
    done = await core.uploads.create("", "application/octet-stream", declared, ttl_s=None)
    await core.uploads.receive(one, Body(data[1000:]), 1000, 2000, None)
    await core.uploads.receive(done, Body(data), 0, len(data), None)
    info = await core.uploads.complete(done, None)
    await core.stop()

    core = Core(settings, InlineExecutor())
    await core.start()
    try:
        assert core.store.used_bytes == 2 * A.nbytes
        again = core.uploads.get(one.id, "")
        assert list(again.received) == [(1000, 3000)]
        for start, end in again.received.missing(len(data)):
            await core.uploads.receive(again, Body(data[start:]), start, end - start, None)
        made = await core.uploads.complete(again, hashlib.sha256(data).digest())
        assert Tags(made.name, made.labels) == tags
        with core.store.pin(made.id) as pinned:
            assert bytes(pinned.view) == data
        assert (await core.uploads.complete(core.uploads.get(done.id, ""), None)).id == info.id
        await core.uploads.cancel(again)
        assert core.store.used_bytes == 2 * A.nbytes
    finally:
        await core.stop()


async def test_bytes_that_a_broken_repetition_has_overwritten_are_not_on_record(settings):
    """A part that came is sent again with a digest, for it to be checked, and the process is killed meanwhile."""
    data, half = raw(A), A.nbytes // 2
    written, never = asyncio.Event(), asyncio.Event()

    class Breaking(Body):
        async def fill(self, view, advance, place=None):
            view[:100] = b"x" * 100
            advance(100)
            written.set()
            await never.wait()

    core = Core(settings, InlineExecutor())
    await core.start()
    declared = Declared(A.dtype, A.shape, "C", A.nbytes)
    upload = await core.uploads.create("", "application/octet-stream", declared, ttl_s=None)
    await core.uploads.receive(upload, Body(data), 0, half, None)
    again = asyncio.ensure_future(
        core.uploads.receive(upload, Breaking(b""), 0, 1000, hashlib.sha256(data[:1000]).digest())
    )
    await written.wait()
    await core.uploads.receive(upload, Body(data[half:]), half, len(data) - half, None)
    assert not core.uploads.get(upload.id, "").received.missing(len(data))
    await core.database.stop()
    again.cancel()
    await asyncio.wait([again])

    core = Core(settings, InlineExecutor())
    await core.start()
    try:
        assert list(core.uploads.get(upload.id, "").received) == [(1000, len(data))]
    finally:
        await core.stop()


async def test_space_that_a_row_still_names_serves_nobody_else(settings, monkeypatch):
    """The digest is wrong, the disk too full for the row to go, and then the process is killed."""
    data = raw(A)
    core = Core(settings, InlineExecutor())
    await core.start()
    declared = Declared(A.dtype, A.shape, "C", A.nbytes)
    upload = await core.uploads.create("alice", "application/octet-stream", declared, ttl_s=None)
    await core.uploads.receive(upload, Body(data), 0, len(data), None)
    with monkeypatch.context() as patch:

        async def full(_):
            raise StoreFull("the disk is full")

        patch.setattr(core.database, "write", full)
        with pytest.raises(DigestMismatch):
            await core.uploads.complete(upload, hashlib.sha256(b"other").digest())
    others = core.store.allocate(A.dtype, A.shape, "C", ttl_s=None, owner="bob")
    others.write(b"secret" * 100)
    await core.database.stop()

    core = Core(settings, InlineExecutor())
    await core.start()
    try:
        with pytest.raises(NotFound):
            core.uploads.get(upload.id, "alice")
        assert core.store.used_bytes == 0
    finally:
        await core.stop()


async def test_a_part_that_comes_while_its_upload_is_given_up_is_refused(make_settings, monkeypatch):
    """Not taken in by an upload whose space goes a moment later."""
    core = Core(make_settings(upload_idle_s=0.5), InlineExecutor())
    await core.start()
    write = core.database.write
    removing, go = asyncio.Event(), asyncio.Event()

    async def slow(fn):
        if getattr(fn, "func", None) is uploads._remove:
            removing.set()
            await go.wait()
        return await write(fn)

    monkeypatch.setattr(core.database, "write", slow)
    upload = await core.uploads.create("", "application/x-npy", None, ttl_s=None)
    async with asyncio.timeout(60):
        await removing.wait()
        part = asyncio.ensure_future(core.uploads.receive(upload, Body(NPY), 0, len(NPY), None))
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(NotFound):
            await part
    assert core.store.used_bytes == 0
    await core.stop()


async def test_an_upload_that_could_not_be_given_up_is_given_up_in_the_next_round(make_settings, monkeypatch):
    core = Core(make_settings(upload_idle_s=0.2), InlineExecutor())
    await core.start()
    write, refused = core.database.write, []

    async def fails(fn):
        if getattr(fn, "func", None) is uploads._remove and len(refused) < 2:
            refused.append(StoreFull("the disk is full") if refused else sqlite3.OperationalError("disk I/O error"))
            raise refused[-1]
        return await write(fn)

    monkeypatch.setattr(core.database, "write", fails)
    upload = await core.uploads.create("", "application/x-npy", None, ttl_s=None)
    async with asyncio.timeout(60):
        while upload.id in core.uploads._uploads:  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.01)
    assert len(refused) == 2
    await core.stop()


async def test_a_part_that_is_superseded_before_it_runs_does_not_run():
    part, ran = uploads.Part(0, 10, unchecked=False), []

    async def work():
        ran.append(True)

    asyncio.get_running_loop().call_later(0.01, part.over.set)
    await part.supersede()
    with pytest.raises(UploadSuperseded):
        await part.run(work())
    assert not ran

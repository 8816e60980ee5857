"""The store and the ledger in step: after any sequence of uploads, failures, deletions, pins and restarts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import numpy as np
import pytest

from gemmserve_service.errors import QuotaExceeded
from gemmserve_service.settings import Settings
from gemmserve_service.store.array_store import ArrayStore
from gemmserve_service.store.database.database import Database
from gemmserve_service.store.quotas import Quotas
from gemmserve_service.tenancy.api_keys import Quota

OWNERS = ["0000000001", "0000000002", "0000000003"]
LIMIT = Quota(stored_bytes=12_000, inflight_bytes=9_000)


class Model:
    """A store, and what it must hold by the model's own count."""

    def __init__(self, folder, seed):
        self.settings = Settings(data_dir=folder)
        self.chance = random.Random(seed)
        self.reserved = []
        self.scratch = []
        self.pins = []
        self.stored = {}  # id -> (owner, nbytes), hidden ones too while somebody holds them
        self.refused = 0

    async def start(self):
        self.database = Database(self.settings.data_dir / "db.sqlite")
        await self.database.start()
        self.quotas = Quotas(lambda _: LIMIT, self.database)
        self.store = ArrayStore(self.settings, self.database, self.quotas)
        await self.store.start()
        self.store.finish_recovery()

    async def stop(self):
        await self.store.stop()
        await self.database.stop()

    async def restart(self):
        """As a kill would: reservations and pins are gone, what was committed stays."""
        await self.stop()
        self.reserved, self.scratch, self.pins = [], [], []
        await self.start()
        self.stored = {key: value for key, value in self.stored.items() if key in self.visible()}

    def visible(self):
        return {record.info.id for record in self.store._catalog if record.state == "live"}

    async def step(self):
        action = self.chance.choice(
            [self.reserve] * 4 + [self.commit] * 3 + [self.abort, self.delete, self.delete, self.pin, self.unpin]
            + [self.one_shot] * 2 + [self.end_one_shot] * 2
        )  # fmt: skip
        await action()

    async def reserve(self):
        owner, count = self.chance.choice(OWNERS), self.chance.choice([0, 1, 100, 1000])
        try:
            upload = self.store.allocate(np.dtype("f8"), (count,), "C", ttl_s=None, owner=owner)
        except QuotaExceeded:
            self.refused += 1
            assert self.quotas.stored_bytes(owner) + 8 * count > LIMIT.stored_bytes
        else:
            self.reserved.append(upload)

    async def commit(self):
        if self.reserved:
            upload = self.reserved.pop(self.chance.randrange(len(self.reserved)))
            short = self.chance.random() < 0.3 and upload.nbytes
            upload.write(bytes(upload.nbytes - bool(short)))
            if short:
                with pytest.raises(Exception, match="ended after"):
                    await upload.commit()
            else:
                info = await upload.commit()
                self.stored[info.id] = (info.owner, info.nbytes)

    async def abort(self):
        if self.reserved:
            upload = self.reserved.pop()
            self.chance.choice([upload.abort, upload.discard])()
            upload.abort()  # again, as the callers do

    async def delete(self):
        alive = sorted(self.visible() & self.stored.keys())
        if alive:
            array_id = self.chance.choice(alive)
            await self.store.delete(array_id, owner=self.stored[array_id][0])
            if not any(pinned.info.id == array_id for pinned in self.pins):
                del self.stored[array_id]

    async def pin(self):
        alive = sorted(self.visible() & self.stored.keys())
        if alive:
            self.pins.append(self.store.pin(self.chance.choice(alive)))

    async def unpin(self):
        if self.pins:
            pinned = self.pins.pop(self.chance.randrange(len(self.pins)))
            array_id = pinned.info.id
            pinned.release()
            if array_id not in self.visible() and not any(other.info.id == array_id for other in self.pins):
                self.stored.pop(array_id, None)

    async def one_shot(self):
        owner, count = self.chance.choice(OWNERS), self.chance.choice([1, 100, 1000])
        try:
            upload = self.store.allocate(np.dtype("f8"), (count,), "C", ttl_s=None, scratch=True, owner=owner)
        except QuotaExceeded:
            self.refused += 1
            assert self.quotas.inflight_bytes(owner) + 8 * count > LIMIT.inflight_bytes
        else:
            self.scratch.append((owner, upload.nbytes, upload))

    async def end_one_shot(self):
        if self.scratch:
            _, nbytes, upload = self.scratch.pop(self.chance.randrange(len(self.scratch)))
            if self.chance.random() < 0.5:
                upload.abort()
            else:
                upload.write(bytes(nbytes))
                await upload.commit()
                self.store.pin_upload(upload).release()

    def check(self):
        stored, scratch = Counter(), Counter()
        for owner, nbytes in self.stored.values():
            stored[owner] += nbytes
        for upload in self.reserved:
            stored[upload.spec.owner] += upload.nbytes
        for owner, nbytes, _ in self.scratch:
            scratch[owner] += nbytes
        for owner in OWNERS:
            assert self.quotas.stored_bytes(owner) == stored[owner]
            assert self.quotas.scratch_bytes(owner) == scratch[owner]
            assert stored[owner] <= LIMIT.stored_bytes
            assert scratch[owner] <= LIMIT.inflight_bytes
        assert self.quotas.stored_bytes("") == stored.total() == self.store.used_bytes


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_forgotten_or_counted_twice(tmp_path, seed):
    model = Model(tmp_path, seed)
    await model.start()
    try:
        for index in range(600):
            await model.step()
            model.check()
            if index % 133 == 132:
                await model.restart()
                model.check()
        assert model.refused > 5, "the quotas were hardly met"
    finally:
        await asyncio.sleep(0)
        await model.stop()

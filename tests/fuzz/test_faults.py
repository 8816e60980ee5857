"""Two tenants on bad lines to one server: every answer is right or an error that says so, and nobody sees the other's.

New faults in every run, from a seed that is printed. Everything travels with digests, so that no flipped bit passes.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
import traceback
from collections import Counter
from typing import TYPE_CHECKING

import live_server
import numpy as np
import pytest
from faulty_proxy import KINDS, Faults, FaultyProxy
from live_server import LiveServer

import gemmserve
from gemmserve import Client, RetryPolicy
from gemmserve._calls import arrays as array_flows
from gemmserve._transfer import parts as _parts
from gemmserve_service.tenancy.keyring import create_key

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 40.0
"""At least; longer, up to `MOST_S`, until every kind of fault has happened and enough has come through."""
MOST_S = 90.0
ENOUGH = 20
"""Results of each tenant that have to be right."""
THREADS = 3
RETRY = RetryPolicy(base_s=0.01, cap_s=0.1, total_s=5)
FAULTS = Faults(cut=0.01, delay=0.05, double=0.01, flip=0.01, split=0.05, close=0.2)
WANTED = {f"{kind} {way}" for kind in KINDS for way in ("up", "down")}
"""Faults that have to happen."""


class Tenant:
    """One owner's work: whole numbers, all of whose products are multiples of `mark`, and of no other's."""

    def __init__(self, name: str, mark: int, url: str, key: str) -> None:
        self.name = name
        self.mark = mark
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url = url
        self._key = key

    def client(self, url: str | None = None, retry: RetryPolicy = RETRY) -> Client:
        return Client(url or self._url, api_key=self._key, retry=retry, timeout=5, digests="always", progress=False)

    def matrices(self, chance: random.Random, *, large: bool = False) -> tuple[np.ndarray, np.ndarray]:
        m, k, n = (chance.choice((200, 300) if large else (3, 8, 40)) for _ in range(3))
        rng = np.random.default_rng(chance.randrange(1 << 32))
        a, b = rng.integers(1, 9, (m, k)).astype(np.float64), rng.integers(1, 9, (k, n)).astype(np.float64)
        return a * self.mark, b

    def check(self, what: str, got: np.ndarray, expected: np.ndarray) -> None:
        if not np.array_equal(got, expected):
            whose = "another's" if np.any(np.asarray(got) % self.mark) else "its own"
            self.wrong.append(f"{self.name}: {what}: {got.shape} for {expected.shape}, of {whose} numbers")
            if got.shape == expected.shape:
                where = np.argwhere(np.atleast_1d(got != expected)).tolist()
                self.wrong[-1] += f": {len(where)} of {got.size}, at {where[:40]}: {got} for {expected}"
        self.seen["right"] += 1

    def work(self, seed: int, over: threading.Event) -> None:
        """One thread's."""
        chance = random.Random(seed)
        with self.client() as client:
            while not over.is_set():
                act = chance.choice((self.product, self.reduction, self.stored, self.parts, self.program, self.many))
                try:
                    act(client, chance)
                except gemmserve.GemmserveError as error:
                    self.seen[type(error).__name__] += 1
                except BaseException:
                    self.wrong.append(f"{self.name}: {act.__name__}: {traceback.format_exc()}")
                    return

    def product(self, client: Client, chance: random.Random) -> None:
        a, b = self.matrices(chance, large=chance.random() < 0.3)
        self.check("product", client.gemm(a, b), a @ b)

    def reduction(self, client: Client, chance: random.Random) -> None:
        a, b = self.matrices(chance)
        found = client.gemm_reduce(a, b, reduce=["sum", "max"])
        self.check("sum", found["sum"], (a @ b).sum(0))
        self.check("max", found["max"], (a @ b).max(0))

    def stored(self, client: Client, chance: random.Random) -> None:
        a, b = self.matrices(chance)
        with client.put(a, ttl_s=300) as ra:
            job = client.submit("gemm", ra, b, ttl_s=300)
            states = [info.state for info in job.events()] if chance.random() < 0.5 else [job.wait(20).state]
            if states[-1] == "succeeded":
                self.check("result", job.result().numpy(), a @ b)
            self.check("operand", ra.numpy(), a)

    def parts(self, client: Client, chance: random.Random) -> None:
        a, _ = self.matrices(chance, large=True)
        with client.put(a, ttl_s=300) as ra:
            self.check("in parts", ra.numpy(), a)

    def program(self, client: Client, chance: random.Random) -> None:
        a, b = self.matrices(chance)
        with client.program(timeout=20, ttl_s=300) as program:
            x = program.gemm(a, b)
            y = program.gemm(x.T, a)
        self.check("program", y.numpy(), (a @ b).T @ a)

    def many(self, client: Client, chance: random.Random) -> None:
        pairs = [self.matrices(chance) for _ in range(4)]
        for found, (a, b) in zip(client.gemm_many(*map(list, zip(*pairs, strict=True))), pairs, strict=True):
            self.check("of many", found, a @ b)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of some hundred KB go as those of some hundred MB do."""
    monkeypatch.setattr(array_flows, "PARTS_FROM", 1 << 17)
    for module in (array_flows, _parts):
        monkeypatch.setattr(module, "PART", 1 << 16)


@pytest.mark.slow
@pytest.mark.usefixtures("small_parts")
def test_right_or_an_error_and_never_another_s(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    data = tmp_path / "data"
    keys = [create_key(data, name)[1] for name in ("alice", "bob")]
    # Bodies that stand still because a segment was lost for good are given up soon, as are connections.
    environment = {"GEMMSERVE_MIN_BODY_RATE": "1000", "GEMMSERVE_HEAD_TIMEOUT_S": "5", "GEMMSERVE_KEEP_ALIVE_S": "5"}
    with LiveServer(data_dir=data, environment=environment) as server:
        with FaultyProxy(server.url, FAULTS, chance.randrange(1 << 32)) as proxy:
            tenants = [
                Tenant(name, mark, proxy.url, key)
                for name, mark, key in zip(("alice", "bob"), (101, 103), keys, strict=True)
            ]
            over = threading.Event()
            threads = [
                threading.Thread(target=tenant.work, args=(chance.randrange(1 << 32), over))
                for tenant in tenants
                for _ in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            begun = time.monotonic()
            while (spent := time.monotonic() - begun) < MOST_S and any(thread.is_alive() for thread in threads):
                seen_all = proxy.did.keys() >= WANTED and all(tenant.seen["right"] > ENOUGH for tenant in tenants)
                if spent > SECONDS and seen_all:
                    break
                time.sleep(0.1)
            over.set()
            for thread in threads:
                thread.join(180)
                assert not thread.is_alive(), f"a call does not end; seed {seed}"
        print({tenant.name: dict(tenant.seen) for tenant in tenants}, dict(proxy.did), proxy.connections)
        for tenant in tenants:
            assert not tenant.wrong, f"seed {seed}: " + "\n".join(tenant.wrong[:5])
            assert tenant.seen["right"] > ENOUGH, f"seed {seed}: hardly anything came through: {tenant.seen}"
        assert proxy.did.keys() >= WANTED
        # The server is none the worse for it, and each has its own.
        lists = []
        for tenant in tenants:
            with tenant.client(server.url, RetryPolicy()) as client:
                a, b = tenant.matrices(chance)
                np.testing.assert_array_equal(client.gemm(a, b), a @ b)
                lists.append({array.id for array in client.arrays()})
                live_server.until(lambda client=client: not client.usage()["quotas"]["inflight_bytes"]["used"])
        assert not lists[0] & lists[1]
    found = server.text.find("unexpected error")
    assert found < 0, f"seed {seed}:\n{server.text[found : found + 6000]}"

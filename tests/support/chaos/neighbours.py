"""Neighbours with a key of their own and much work: what they cost a client with little.

Attacks on connections and bodies are `make attacks` (tools/attacks.py).
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import httpx
import numpy as np

from chaos.load import Client
from chaos.victim import Victim

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 48


def create_key(victim: Victim, name: str) -> str:
    made = subprocess.run(
        [sys.executable, "-m", "gemmserve.cli", "keys", "create", name, "--json"],
        env=victim.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(made.stdout)["key"]


class Citizen:
    """The well-behaved client: a small job, awaited, its result fetched, again and again."""

    def __init__(self, url: str, key: str) -> None:
        self.client = Client(url, key=key, give_up_s=0)
        rng = np.random.default_rng(3)
        self.array = (rng.standard_normal((SIZE, SIZE)) + 1j * rng.standard_normal((SIZE, SIZE))).astype("complex64")
        self.operand = Client(url, key=key).put(self.array)
        self.expected = self.array @ self.array

    def once(self) -> float:
        """Seconds of one round; raises AssertionError for anything but the right answer."""
        began = time.perf_counter()
        answer = self.client.http.post(
            "/v1/jobs", json={"op": "gemm", "a": self.operand, "b": self.operand}, headers={"Prefer": "wait=30"}
        )
        assert answer.status_code == 200, answer.text
        found = self.client.fetch(answer.json()["result"]["d"], "complex64", self.expected.shape)
        seconds = time.perf_counter() - began
        assert np.allclose(found, self.expected, rtol=1e-4, atol=1e-4)
        return seconds

    def measure(self, for_s: float) -> dict:
        """Milliseconds over so many seconds of rounds, a short pause between two."""
        times, refused = [], []
        ends = time.monotonic() + for_s
        while time.monotonic() < ends:
            try:
                times.append(self.once())
            except (AssertionError, httpx.HTTPError) as error:
                refused.append(str(error)[:200])
            time.sleep(0.01)
        p50, p99 = np.percentile(times, [50, 99]) * 1e3 if times else (float("nan"),) * 2
        return {"rounds": len(times), "p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "refused": refused[:5]}


# -- neighbours: each a function of (url, key) that goes on until its process is ended -----------------------------


def tiny_jobs(url: str, key: str) -> None:
    """Ten thousand jobs of 16 x 16, as fast as they are taken; then some more as they go."""
    client = Client(url, key=key, give_up_s=1e9)
    operand = client.put(np.eye(16))
    while True:
        client.submit(op="gemm", a=operand, b=operand)


def large_jobs(url: str, key: str) -> None:
    """Products of half a teraflop, two at a time."""
    client = Client(url, key=key, give_up_s=1e9)
    operand = client.put(np.ones((4096, 4096), "complex64"))
    while True:
        first = client.submit(op="gemm", a=operand, b=operand)
        client.submit(op="gemm", a=operand, b=operand)
        client.wait(first, 600)


NEIGHBOURS = {"tiny jobs without end": tiny_jobs, "large jobs": large_jobs}


def neighbours(folder: Path, *, for_s: float) -> dict:
    """The citizen alone, then beside each neighbour."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, dict] = {}
    with Victim(folder) as victim:
        keys = {name: create_key(victim, name) for name in ("citizen", "neighbour")}
        citizen = Citizen(victim.url, keys["citizen"])
        citizen.measure(2.0)  # warm
        quiet = citizen.measure(for_s)
        for name, work in NEIGHBOURS.items():
            neighbour = context.Process(target=work, args=(victim.url, keys["neighbour"]), daemon=True)
            neighbour.start()
            try:
                time.sleep(min(3.0, for_s))
                found[name] = citizen.measure(for_s)
                found[name]["times_quiet_p99"] = round(found[name]["p99_ms"] / quiet["p99_ms"], 2)
            finally:
                neighbour.kill()
                neighbour.join()
            calm = Client(victim.url, key=keys["neighbour"])
            for state in ("queued", "running"):  # the next one begins on an empty queue
                for each in calm.send("GET", "/v1/jobs", params={"state": state, "limit": 1000}).json()["items"]:
                    calm.send("DELETE", f"/v1/jobs/{each['id']}")
        quiet_again = citizen.measure(for_s)
    return {
        "ok": all(not each["refused"] for each in (quiet, quiet_again, *found.values())),
        "quiet": quiet,
        "quiet_afterwards": quiet_again,
        "beside": found,
    }

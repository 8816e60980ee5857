"""Hostile clients beside a well-behaved one: what each costs it, as the 99th percentile of its requests."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import resource
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

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


# -- attackers: each a function of (url, key) that goes on until its process is ended ------------------------------


def _head(url: str, key: str, length: int) -> bytes:
    return (
        f"POST /v1/arrays?dtype=float16&shape={length // 2} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/octet-stream\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def _connect(url: str) -> socket.socket:
    return socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=10)


def byte_a_second(url: str, key: str) -> None:
    """A hundred uploads that send one byte a second."""
    open_: list[socket.socket] = []
    while True:
        for connection in list(open_):
            try:
                connection.send(b"x")
            except OSError:
                open_.remove(connection)
        while len(open_) < 100:
            with contextlib.suppress(OSError):
                open_.append(_connect(url))
                open_[-1].send(_head(url, key, 1 << 20))
        time.sleep(1)


def hang_up_mid_body(url: str, key: str) -> None:
    """Uploads of 8 MiB that break off after one."""
    while True:
        with contextlib.suppress(OSError), _connect(url) as connection:
            connection.sendall(_head(url, key, 8 << 20) + bytes(1 << 20))
        time.sleep(0.02)


def hang_up_mid_download(url: str, key: str) -> None:
    """Downloads of 8 MiB that break off after 64 KiB."""
    array_id = Client(url, key=key).put(np.zeros(1 << 20))
    request = (
        f"GET /v1/arrays/{array_id}/data HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Authorization: Bearer {key}\r\nAccept: application/octet-stream\r\n\r\n"
    ).encode()
    while True:
        with contextlib.suppress(OSError), _connect(url) as connection:
            connection.sendall(request)
            connection.recv(1 << 16)
        time.sleep(0.02)


def thousand_connections(url: str, key: str) -> None:
    """A thousand connections that say nothing, opened again as they are closed."""
    del key
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    open_: list[socket.socket] = []
    while True:
        while len(open_) < 1000:
            try:
                open_.append(_connect(url))
            except OSError:
                break
        alive = []
        for connection in open_:
            connection.setblocking(False)
            try:
                if connection.recv(1) == b"":
                    connection.close()
                    continue
            except BlockingIOError:
                pass
            except OSError:
                continue
            alive.append(connection)
        open_ = alive
        time.sleep(0.5)


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


ATTACKS = {
    "a byte a second": byte_a_second,
    "hanging up in the middle of a body": hang_up_mid_body,
    "hanging up in the middle of a download": hang_up_mid_download,
    "a thousand connections": thousand_connections,
    "tiny jobs without end": tiny_jobs,
    "large jobs": large_jobs,
}


def under_attack(folder: Path, *, for_s: float, only: tuple[str, ...] = ()) -> dict:
    """The citizen alone, then beside each attacker; the attacker has a key of its own."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, dict] = {}
    with Victim(folder) as victim:
        keys = {name: create_key(victim, name) for name in ("citizen", "attacker")}
        citizen = Citizen(victim.url, keys["citizen"])
        citizen.measure(2.0)  # warm
        quiet = citizen.measure(for_s)
        for name, attack in ATTACKS.items():
            if only and name not in only:
                continue
            attacker = context.Process(target=attack, args=(victim.url, keys["attacker"]), daemon=True)
            attacker.start()
            try:
                time.sleep(min(3.0, for_s))
                found[name] = citizen.measure(for_s)
                found[name]["times_quiet_p99"] = round(found[name]["p99_ms"] / quiet["p99_ms"], 2)
            finally:
                attacker.kill()
                attacker.join()
            calm = Client(victim.url, key=keys["attacker"])
            for state in ("queued", "running"):  # the next attack begins on an empty queue
                for each in calm.send("GET", "/v1/jobs", params={"state": state, "limit": 1000}).json()["items"]:
                    calm.send("DELETE", f"/v1/jobs/{each['id']}")
        quiet_again = citizen.measure(for_s)
    return {
        "ok": all(not each["refused"] for each in (quiet, quiet_again, *found.values())),
        "quiet": quiet,
        "quiet_afterwards": quiet_again,
        "attacks": found,
    }

"""What a well-behaved client notices while others attack the server: `make attacks`, or `python tools/attacks.py`.

Starts a server with keys on this machine's CPU, measures a client's requests in peace, then during each attack, and
prints the median and the 99th percentile of its times in milliseconds, with what the attackers got. Attackers run in a
process of their own at a bounded rate, so that what is measured is the server's attention and not a fight for the
processor. Then each of the longest bodies is sent alone, and /livez asked meanwhile. Exit status 1 if a request of the
well-behaved client failed, anything stayed held after an attack, or /livez took more than 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]

import long_bodies  # noqa: E402 (of the tests)
import request_shapes  # noqa: E402

CONNECTIONS = 1000
MOST_LIVEZ_MS = 100
"""What a request of the greatest length that a route takes may delay others by."""
FILES = 2200
"""That the server may open; the tiny arrays of half a minute are more."""
ARRAY = np.random.default_rng(0).standard_normal((128, 128))


@dataclass(frozen=True)
class Aim:
    """Whom the attackers attack, and with which key."""

    host: str
    port: int
    key: str
    array: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection with a small receive buffer."""
        return await asyncio.open_connection(self.host, self.port, limit=1 << 12)

    def head(self, method: str, path: str, *more: str) -> bytes:
        """A request's line and headers."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", f"Authorization: Bearer {self.key}", *more]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def upload_head(self, nbytes: int) -> bytes:
        """Return the head of an upload of that many bytes."""
        length = f"Content-Length: {nbytes}"
        path = f"/v1/arrays?dtype=float64&shape={nbytes // 8}&ttl_s=60"
        return self.head("POST", path, "Content-Type: application/octet-stream", length)


async def trickle(aim: Aim, first: bytes, every_s: float) -> str:
    """Sends `first`, then a byte now and then; returns what the server said in the end."""
    reader, writer = await aim.connect()
    try:
        writer.write(first)
        answer = asyncio.ensure_future(reader.readline())
        while not answer.done():
            writer.write(b"x")
            await writer.drain()
            await asyncio.wait([answer], timeout=every_s)
        return " ".join(answer.result().decode("latin-1").split()[1:2]) or "closed"
    except OSError:
        return "closed"
    finally:
        writer.close()


async def byte_a_second(aim: Aim) -> str:
    """An upload of a megabyte, a byte a second."""
    return await trickle(aim, aim.upload_head(1 << 20), 1.0)


async def slow_head(aim: Aim) -> str:
    """A head that never ends, a byte a second."""
    return await trickle(aim, b"GET /v1/arrays HTTP/1.1\r\nX-Slow: ", 1.0)


async def idle(aim: Aim) -> str:
    """A connection that is opened and left alone."""
    reader, writer = await aim.connect()
    try:
        await reader.read(1)
    except OSError:
        pass
    finally:
        writer.close()
    return "closed"


async def hang_up_in_a_body(aim: Aim) -> str:
    """Half of an upload of 8 MiB."""
    _, writer = await aim.connect()
    with contextlib.suppress(OSError):
        writer.write(aim.upload_head(8 << 20) + bytes(1 << 20))
        await asyncio.sleep(0.05)
    writer.transport.abort()
    return "hung up"


async def hang_up_in_a_download(aim: Aim) -> str:
    """A kilobyte of a download."""
    reader, writer = await aim.connect()
    with contextlib.suppress(OSError):
        writer.write(aim.head("GET", f"/v1/arrays/{aim.array}/data"))
        await reader.read(1000)
    writer.transport.abort()
    return "hung up"


async def stalled_reader(aim: Aim) -> str:
    """A download that is asked for and never read."""
    _, writer = await aim.connect()
    with contextlib.suppress(OSError):
        writer.write(aim.head("GET", f"/v1/arrays/{aim.array}/data"))
        await asyncio.sleep(5)
    writer.transport.abort()
    return "hung up"


async def large_head(aim: Aim) -> str:
    """A head of a megabyte."""
    reader, writer = await aim.connect()
    try:
        writer.write(b"GET / HTTP/1.1\r\nX-Large: " + b"x" * (1 << 20))
        return " ".join((await reader.readline()).decode("latin-1").split()[1:2]) or "closed"
    except OSError:
        return "closed"
    finally:
        writer.close()


async def wrong_key(aim: Aim) -> str:
    """A request with a key of the right form that nobody made."""
    reader, writer = await aim.connect()
    try:
        wrong = aim.key[:-10] + "0" * 10
        writer.write(f"GET /v1/arrays HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {wrong}\r\n\r\n".encode())
        return " ".join((await reader.readline()).decode("latin-1").split()[1:2]) or "closed"
    except OSError:
        return "closed"
    finally:
        writer.close()


async def once_only(aim: Aim, data: bytes) -> str:
    """Sends a whole request; returns the status of its answer."""
    reader, writer = await aim.connect()
    try:
        writer.write(data)
        return " ".join((await reader.readline()).decode("latin-1").split()[1:2]) or "closed"
    except OSError:
        return "closed"
    finally:
        writer.close()


def form(**parts: bytes) -> tuple[bytes, str]:
    """A body of multipart/form-data, and its Content-Type."""
    lines = b"".join(
        f'--part\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + part + b"\r\n"
        for name, part in parts.items()
    )
    return lines + b"--part--\r\n", "multipart/form-data; boundary=part"


def empty(*shape: int) -> bytes:
    """The .npy file of an array without elements."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue()


async def little_that_makes_much(aim: Aim, path: str, patience_s: float, **parts: bytes) -> str:
    """A product of operands without elements; nobody reads more than the head of its result."""
    reader, writer = await aim.connect()
    try:
        body, content_type = form(**parts)
        lengths = f"Content-Type: {content_type}", f"Content-Length: {len(body)}"
        writer.write(aim.head("POST", path, *lengths) + body)
        async with asyncio.timeout(patience_s):
            return " ".join((await reader.readline()).decode("latin-1").split()[1:2]) or "closed"
    except TimeoutError:
        return "hung up"
    except OSError:
        return "closed"
    finally:
        writer.transport.abort()


async def endless_reduction(aim: Aim) -> str:
    """2^40 rows of nothing, reduced."""
    params = json.dumps({"reduce": "sum", "axis": "m"}).encode()
    return await little_that_makes_much(aim, "/v1/gemm-reduce", 10, params=params, a=empty(1 << 40, 0), b=empty(0, 4))


async def large_nothing(aim: Aim) -> str:
    """A quarter of a gigabyte of zeros, and a client that hangs up soon."""
    return await little_that_makes_much(aim, "/v1/gemm", 0.5, a=empty(8192, 0), b=empty(0, 8192))


async def tiny_array(aim: Aim) -> str:
    """A stored array of eight bytes, which stays for twenty-five seconds."""
    reader, writer = await aim.connect()
    try:
        path = "/v1/arrays?dtype=float64&shape=1&ttl_s=25"
        lengths = "Content-Type: application/octet-stream", "Content-Length: 8", "Connection: close"
        writer.write(aim.head("POST", path, *lengths) + bytes(8))
        return " ".join((await reader.readline()).decode("latin-1").split()[1:2]) or "closed"
    except OSError:
        return "closed"
    finally:
        writer.close()


@cache
def long_requests(key: str) -> list[bytes]:
    """Return requests of `long_bodies`, one each, of the attacker."""
    return [long_bodies.request(name, "127.0.0.1", f"Authorization: Bearer {key}") for name in long_bodies.BODIES]


@cache
def doubtful_requests(key: str) -> list[bytes]:
    """Return requests of `request_shapes`, one each, of the attacker."""
    field = f"Authorization: Bearer {key}\r\nContent-Type: application/json".encode()
    return [shape.data.replace(b"Content-Type: application/json", field) for shape in request_shapes.SHAPES]


_NUMBERS = itertools.count()


async def long_body(aim: Aim) -> str:
    """A body of the greatest length that its route takes, of what costs a parser most."""
    requests = long_requests(aim.key)
    return await once_only(aim, requests[next(_NUMBERS) % len(requests)])


async def doubtful_request(aim: Aim) -> str:
    """A request at whose length proxies and servers have disagreed."""
    requests = doubtful_requests(aim.key)
    return await once_only(aim, requests[next(_NUMBERS) % len(requests)])


# How many at a time, and how many are begun a second at most.
ATTACKS: dict[str, tuple[Callable[[Aim], Awaitable[str]], int, float]] = {
    "byte-a-second": (byte_a_second, 200, 100),
    "slow-head": (slow_head, CONNECTIONS, 500),
    "idle": (idle, CONNECTIONS, 500),
    "hang-up-in-a-body": (hang_up_in_a_body, 8, 20),
    "hang-up-in-a-download": (hang_up_in_a_download, 8, 50),
    "stalled-reader": (stalled_reader, 50, 50),
    "large-head": (large_head, 8, 20),
    "wrong-key": (wrong_key, 8, 50),
    "long-body": (long_body, 1, 2),
    "doubtful-request": (doubtful_request, 8, 50),
    "endless-reduction": (endless_reduction, 8, 20),
    "large-nothing": (large_nothing, 2, 2),
    "tiny-arrays": (tiny_array, 16, 120),  # half of what a core stores
}


async def attack(name: str, aim: Aim) -> None:
    """Until standard input ends; prints how often each outcome came, as JSON."""
    once, width, rate = ATTACKS[name]
    outcomes: Counter[str] = Counter()
    running: set[asyncio.Task[None]] = set()

    async def one() -> None:
        try:
            outcomes[await once(aim)] += 1
        except OSError as error:
            outcomes[type(error).__name__] += 1

    async def begin() -> None:
        while True:
            if len(running) < width:
                task = asyncio.create_task(one())
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(1 / rate)

    beginning = asyncio.create_task(begin())
    await asyncio.to_thread(sys.stdin.read)
    beginning.cancel()
    outcomes["still at it"] = len(running)
    print(json.dumps(outcomes), flush=True)
    os._exit(0)


class WellBehaved:
    """A client that looks, multiplies, uploads and downloads small things, one after the other."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False)
        file = io.BytesIO()
        np.save(file, ARRAY)
        self._file = file.getvalue()
        self.failures: Counter[str] = Counter()
        self.kept = self._put()

    def _put(self) -> str:
        headers = {"Content-Type": "application/x-npy"}
        answer = self._http.post("/v1/arrays", content=self._file, headers=headers)
        answer.raise_for_status()
        return str(answer.json()["id"])

    def usage(self) -> dict:
        """What is held for its owner."""
        return dict(self._http.get("/v1/usage", params={"all": True}).json())

    def measure(self, seconds: float) -> list[float]:
        """Milliseconds of each round of five requests."""
        times: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.perf_counter()
            try:
                array = self._put()
                self._http.get(f"/v1/arrays/{array}").raise_for_status()
                self._http.get(f"/v1/arrays/{array}/data").raise_for_status()
                files = {"a": self._file, "b": self._file}
                self._http.post("/v1/gemm", files=files).raise_for_status()
                self._http.delete(f"/v1/arrays/{array}").raise_for_status()
            except httpx.HTTPError as error:
                self.failures[str(getattr(getattr(error, "response", None), "status_code", type(error).__name__))] += 1
            times.append((time.perf_counter() - began) * 1e3)
            time.sleep(0.01)
        return times


def stall(url: str, data: bytes) -> float:
    """Milliseconds that /livez takes at most while one such request is answered; the least of three tries, since this
    machine has other things to do besides.
    """
    address = urlsplit(url)
    return min(_stall(url, (str(address.hostname), address.port or 80), data) for _ in range(3))


def _stall(url: str, address: tuple[str, int], data: bytes) -> float:
    def send() -> None:
        with socket.create_connection(address, timeout=120) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(data)
            connection.recv(1 << 16)

    slowest = 0.0
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as http, ThreadPoolExecutor(1) as pool:
        http.get("/livez")
        sending = pool.submit(send)
        while not sending.done():
            began = time.perf_counter()
            http.get("/livez").raise_for_status()
            slowest = max(slowest, time.perf_counter() - began)
        sending.result()
    return slowest * 1e3


def percentiles(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {"rounds": len(times), "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}


def create(data_dir: Path, *arguments: str) -> str:
    """A key."""
    command = [sys.executable, "-m", "gemmserve.cli", "keys", "create", *arguments, "--data-dir", str(data_dir)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def settled(client: WellBehaved, held: int) -> bool:
    """Whether all that attackers held is free again within half a minute."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        usage = client.usage()
        if usage["quotas"]["inflight_bytes"]["used"] == 0 and usage["store_bytes"] <= held:
            return True
        time.sleep(0.2)
    return False


def run(options: argparse.Namespace) -> int:
    """All of it. Returns the exit status."""
    from local_server import LocalServer

    # Little enough that things which take a descriptor each are noticed, and enough for a thousand connections.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard), min(FILES, hard)))
    with LocalServer("--log-level", "error", environment={"GEMMSERVE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}) as server:
        admin = create(server.data_dir, "good", "--scopes", "admin")
        evil = create(server.data_dir, "evil", "--quota-inflight-bytes", "1G", "--quota-stored-bytes", "2G")
        time.sleep(1)
        client = WellBehaved(server.url, admin)
        large = {"dtype": "float64", "shape": str(4 << 20)}
        headers = {"Content-Type": "application/octet-stream", "Authorization": f"Bearer {evil}"}
        stored = httpx.post(
            f"{server.url}/v1/arrays", params=large, content=bytes(32 << 20), headers=headers, timeout=60
        )
        held = client.usage()["store_bytes"]
        client.measure(2)
        results = {"quiet": percentiles(client.measure(options.seconds))}
        show("quiet", results["quiet"], results["quiet"], {})
        failed = False
        for name in options.attacks or ATTACKS:
            address = urlsplit(server.url)
            aim = [address.hostname, str(address.port), evil, stored.json()["id"]]
            attackers = subprocess.Popen(
                [sys.executable, __file__, "--attack", name, *aim],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            time.sleep(3)  # they are in full swing
            client.failures.clear()
            found = percentiles(client.measure(options.seconds))
            outcomes = json.loads(attackers.communicate()[0])
            freed = settled(client, held)
            results[name] = {**found, "attackers": outcomes, "failed": dict(client.failures), "freed": freed}
            failed |= bool(client.failures) or not freed
            show(name, results[name], results["quiet"], outcomes)
        if not options.attacks or "long-body" in options.attacks:
            stalls = {
                name: round(stall(server.url, data), 1)
                for name, data in zip(long_bodies.BODIES, long_requests(evil), strict=True)
            }
            results["livez_ms"] = stalls
            for name, longest in stalls.items():
                print(f"{name:40} /livez {longest:7.1f} ms at most", flush=True)
            failed |= max(stalls.values()) > MOST_LIVEZ_MS
        again = percentiles(client.measure(options.seconds))
        results["quiet again"] = again
        show("quiet again", again, results["quiet"], {})
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return 1 if failed else 0


def show(name: str, found: dict, quiet: dict, outcomes: dict) -> None:
    """One line of the table."""
    ratio = found["p99_ms"] / quiet["p99_ms"]
    trouble = "" if found.get("freed", True) else " NOT FREED"
    if found.get("failed"):
        trouble += f" FAILED {found['failed']}"
    print(
        f"{name:24} p50 {found['p50_ms']:8.2f} ms   p99 {found['p99_ms']:8.2f} ms   {ratio:5.2f} x quiet   "
        f"{outcomes or ''}{trouble}",
        flush=True,
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", choices=[[], *ATTACKS], help="default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--attack", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        name, host, port, key, array = options.attack
        asyncio.run(attack(name, Aim(host, int(port), key, array)))
        return 0
    return run(options)


if __name__ == "__main__":
    raise SystemExit(main())

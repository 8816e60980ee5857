"""Faults of joined workers under load: processes killed on either side, and links that are cut and mended."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import networks
from stalling_proxy import StallingProxy

from chaos.load import Load
from chaos.victim import Victim

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("worker", "agent", "front", "link", "supervisor")
NODES = ("left", "right")
UPLOADS = {"left": (), "right": ("--result-inline", "0")}
"""Options of a node's agent: one sends its results with the answers, the other by exchanges of their own."""
SIDE = 320
"""Rows and columns of the products: 800 KB, which may go with the answer."""
PATIENCE_S = "2"
"""Silence after which either side takes the other for dead: less than the shortest cut, by far."""


class Link(Protocol):
    """Link of a node."""

    def cut(self) -> None:
        """Loses or holds whatever is sent."""

    def mend(self) -> None:
        """Ends that."""


class Cuts:
    """Links that are cut for a while, each at most once at a time, while other faults go on."""

    def __init__(self, links: dict[str, Link], rng: random.Random, cut_s: tuple[float, float]) -> None:
        self._links, self._rng, self._cut_s = links, rng, cut_s
        self._timers: dict[str, threading.Timer] = {}
        self.seconds: list[float] = []

    def cut(self) -> None:
        """Cuts one of those that are whole, or waits for one."""
        while not (whole := [name for name in self._links if name not in self._timers]):
            time.sleep(0.05)
        name, seconds = self._rng.choice(whole), self._rng.uniform(*self._cut_s)
        self._links[name].cut()
        self.seconds.append(seconds)
        timer = self._timers[name] = threading.Timer(seconds, self._mend, (name,))
        timer.daemon = True
        timer.start()

    def _mend(self, name: str) -> None:
        self._links[name].mend()
        del self._timers[name]

    def wait(self) -> None:
        """Returns when all are whole."""
        for timer in list(self._timers.values()):
            timer.join()


def worker_token(data_dir: Path, scope: str) -> str:
    """A key of that scope, made before there is a server."""
    command = [sys.executable, "-m", "gemmserve.cli", "keys", "create", "--scope", scope, "--data-dir", str(data_dir)]
    return subprocess.run(
        [*command, scope.replace(",", "-")], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def joined(
    folder: Path,
    *,
    jobs: int,
    over_s: float,
    pause_s: tuple[float, float],
    cut_s: tuple[float, float],
    seed: int = 1,
    bits_per_s: float | None = None,
) -> dict:
    """Kills of workers, agents, front and supervisor, and cuts of links, again and again while jobs come in, each kind
    at least once; then each accepted job is checked.

    Two nodes of a processor each. With `bits_per_s` they are network namespaces behind links of that rate, the server
    asks for tokens, and a link that is cut loses every frame; else they are this machine, and a link that is cut stands
    still: what was on its way arrives when it is mended.
    """
    rng = random.Random(seed)
    faults: dict[str, list[float]] = {kind: [] for kind in KINDS}
    stack = ExitStack()
    with stack:
        links: dict[str, Link] = {}
        key = None
        settings = {"GEMMSERVE_MAX_ATTEMPTS": "50", "GEMMSERVE_HEARTBEAT_TIMEOUT_S": PATIENCE_S}
        if bits_per_s is not None:
            if (reason := networks.missing()) is not None:
                return {"ok": True, "skipped": reason}
            data_dir = folder / "data"
            key, token = worker_token(data_dir, "read,submit"), worker_token(data_dir, "worker")
            victim = Victim(folder, GEMMSERVE_JOIN_INSECURE="1", **settings)
            nodes = [stack.enter_context(networks.Network(bits_per_s=bits_per_s)) for _ in NODES]
            workers = victim.join("0.0.0.0")
            for name, node in zip(NODES, nodes, strict=True):
                links[name] = node
                url = f"http://{node.here}:{workers.port}"
                workers.add("cpu", name, url=url, node=node, arguments=UPLOADS[name], GEMMSERVE_JOIN_TOKEN=token)
        else:
            victim = Victim(folder, **settings)
            workers = victim.join()
            for name in NODES:
                proxy = stack.enter_context(StallingProxy(workers.port))
                links[name] = proxy
                workers.add("cpu", name, url=proxy.url, arguments=UPLOADS[name])
        cuts = Cuts(links, rng, cut_s)
        with victim:
            load = Load(victim.url, count=jobs, over_s=over_s, key=key, size=SIDE)
            began = time.monotonic()
            load.start()
            order: list[str] = []
            while load.running:
                time.sleep(rng.uniform(*pause_s))
                order = order or rng.sample(KINDS, len(KINDS))  # each kind as often as the others
                kind = order.pop()
                if kind == "link":
                    cuts.cut()
                    faults[kind].append(cuts.seconds[-1])
                else:
                    faults[kind].append(victim.kill_and_recover(kind))
                if all(faults.values()):
                    load.enough()
            cuts.wait()
            account = load.settle()
            seconds = time.monotonic() - began
            proxies = [link for link in links.values() if isinstance(link, StallingProxy)]
            refused = sum(proxy.statuses("/internal/results/").count(409) for proxy in proxies)
            status = victim.stop()
    return {
        "ok": not (account.lost or account.wrong or account.failed or load.errors)
        and account.accepted == load.begun >= jobs
        and status == 0,
        "faults": {kind: len(times) for kind, times in faults.items()},
        "jobs": account.fields() | {"not_accepted": load.errors},
        "seconds": round(seconds, 1),
        "links": "namespaces" if bits_per_s is not None else "proxies",
        "cut_s": [round(each, 1) for each in cuts.seconds],
        "stale_results_refused": refused,
        "time_to_ready_s": {
            kind: {"median": round(statistics.median(times), 2), "worst": round(max(times), 2)}
            for kind, times in faults.items()
            if times and kind != "link"
        },
        "exit_status": status,
    }

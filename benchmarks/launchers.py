"""What Ray costs beside our own processes while nothing is to be done, and how soon work goes on after losses.

    PYTHONPATH=tests/support python -m benchmarks.launchers        writes docs/benchmarks/launchers.json

Two nodes of Ray's on this machine with a worker on the processors each (`ray_cluster`). Processor time is user and
system over `--seconds`; memory is the proportional set size (pages that several processes share count in parts). A
loss: jobs of 256 x 256 x 256 float32 one after the other from one client; seconds from the signal to the end of the
first job that was begun when all that the killed processes had started was gone, and, where both actors are killed,
to the first order of the bridge's to an actor that is new and to the first worker that has joined. `load` is the
machine's before anything of this was started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
from live_server import LiveServer
from ray_cluster import RayCluster, free_port

from gemmserve import Client

REPORT = Path(__file__).parents[1] / "docs" / "benchmarks" / "launchers.json"
KINDS = {
    "Ray's head: tables": "gcs/gcs_server",
    "Ray's head: autoscaler's monitor": "_private/monitor\\.py",
    "Ray's raylets": "raylet/raylet ",
    "Ray's agents and log monitors": "ray::DashboardAgent|ray::RuntimeEnvAgent|log_monitor\\.py|dashboard",
    "Ray's actors": "^ray::WorkerActor",
    "Ray's spare workers": "^ray::IDLE",
    "the bridge": "processes\\.ray\\.bridge",
    "our agents": "gemmserve\\.cli worker",
    "our workers": "gemmserve_service\\.executor\\.worker",
    "the front": "processes\\.front",
}


def kind_of(process):
    """The name of what a process is for, or None."""
    line = " ".join(process.cmdline())
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, line)), None)


def spent(processes):
    """Processor seconds by process."""
    return {each.pid: sum(each.cpu_times()[:2]) for each in processes}


def idle(processes, seconds):
    """Processor share and memory by kind."""
    before, began = spent(processes), time.monotonic()
    time.sleep(seconds)
    after, lasted = spent(processes), time.monotonic() - began
    rows = {}
    for each in processes:
        if (kind := kind_of(each)) is not None:
            row = rows.setdefault(kind, {"processes": 0, "cpu_share": 0.0, "bytes": 0})
            row["processes"] += 1
            row["cpu_share"] += (after[each.pid] - before[each.pid]) / lasted
            row["bytes"] += each.memory_full_info().pss
    return rows


class Load:
    """Jobs one after the other; (begin, end) of each."""

    def __init__(self, url):
        self.jobs, self.wrong, self._over = [], 0, threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,))
        self._thread.start()

    def _run(self, url):
        a = (np.arange(256 * 256, dtype=np.float32).reshape(256, 256) % 7) - 3
        with Client(url, timeout=600) as client:
            ra = client.put(a)
            while not self._over.is_set():
                began = time.monotonic()
                product = ra @ ra
                self.wrong += not np.array_equal(product.numpy(), a @ a)
                self.jobs.append((began, time.monotonic()))
                product.delete()

    def after(self, moment):
        """Seconds until the first job's end that began after it."""
        while not self.jobs or self.jobs[-1][0] < moment:
            time.sleep(0.01)
        return next(end for began, end in self.jobs if began >= moment) - moment

    def stop(self):
        """Ends it."""
        self._over.set()
        self._thread.join()


def wait_for(condition):
    """Polls."""
    while not condition():
        time.sleep(0.01)


def lives(process):
    """Return whether a process still runs: a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def lose(load, processes):
    """Kills them; seconds after which work goes on without what they had started."""
    with_them = [each for process in processes for each in (process, *process.children(recursive=True))]
    moment = time.monotonic()
    for process in processes:
        process.kill()
    wait_for(lambda: not any(map(lives, with_them)))
    gone = time.monotonic()
    return gone - moment + load.after(gone)


def first(text, pattern, moment):
    """Seconds from a moment (Unix time) to the first line of a log that matches."""
    line = next(line for line in text.splitlines() if re.search(pattern, line))
    return datetime.strptime(line.split()[0], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp() - moment


def measure(arguments, folder):
    """All of it."""
    port = free_port()
    with RayCluster(nodes=2) as cluster:
        flags = ["--executor", "ray", "--ray-address", cluster.address, "--ray-device", "cpu", "--ray-min-workers", "2"]
        flags += ["--ray-max-workers", "2", "--join-port", str(port), "--ray-join-url", f"http://127.0.0.1:{port}"]
        environment = {**cluster.environment, "GEMMSERVE_DEVICE": "auto"}
        with LiveServer(*flags, data_dir=Path(folder), environment=environment) as server:
            server.wait_ready()
            agents = lambda: {each.pid for each in cluster.processes("gemmserve.cli worker")}  # noqa: E731
            wait_for(lambda: len(agents()) == 2)
            time.sleep(10)
            rows = idle([*cluster.processes(), *server.processes()], arguments.seconds)
            load, losses = Load(server.url), {"one actor of two": [], "both actors": [], "one node of two": []}
            phases = {"ordered": [], "joined": []}
            time.sleep(2)
            for _ in range(arguments.rounds):
                for name, count in (("one actor of two", 1), ("both actors", 2)):
                    before = agents()
                    actors = cluster.actors()[:count]
                    said, moment = len(server.text), time.time()
                    losses[name].append(lose(load, actors))
                    if count == 2:
                        text = server.text[said:]
                        phases["ordered"].append(first(text, r"ray worker \d: empty on", moment))
                        phases["joined"].append(first(text, r"worker ray-\d/cpu is ready", moment))
                    wait_for(lambda: len(agents() - before) >= count and len(agents()) == 2)  # noqa: B023
                    time.sleep(4)
            (head,) = cluster.processes("gcs/gcs_server")
            cluster.stop_head()
            stopped = time.monotonic()
            statuses = []
            with server.http() as http:
                while time.monotonic() - stopped < arguments.head_s:
                    statuses.append(http.get("/readyz").status_code)
                    time.sleep(0.5)
            told = len(re.findall("bridge to Ray at", server.text))
            cluster.continue_head()
            continued = time.monotonic()
            wait_for(lambda: len(re.findall("bridge to Ray at", server.text)) > told)
            back = time.monotonic() - continued
            during = sum(stopped < end < continued for _, end in load.jobs)
            for _ in range(arguments.nodes):
                losses["one node of two"].append(lose(load, [cluster.node_of(cluster.actors()[0])]))
                cluster.add_node()
                wait_for(lambda: len(agents()) == 2)
                time.sleep(4)
            load.stop()
            assert head.is_running()
            assert not load.wrong, f"{load.wrong} results are wrong"
            ready = {"looks": len(statuses), "ready": sum(status == 200 for status in statuses)}
    return {
        "idle": rows,
        "seconds": arguments.seconds,
        "losses_s": losses,
        "both_actors_s": phases,
        "head": {"gone_s": continued - stopped, "readyz": ready, "jobs_meanwhile": during, "bridge_back_s": back},
        "jobs": len(load.jobs),
    }


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=3, help="nodes that are killed, one after the other")
    parser.add_argument("--head-s", type=float, default=30.0)
    arguments = parser.parse_args()
    import ray

    load = psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, folder)
    found["environment"] = {"python": sys.version.split()[0], "cpus": psutil.cpu_count(), "ray": ray.__version__,
                            "load": round(load, 1)}  # fmt: skip
    REPORT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

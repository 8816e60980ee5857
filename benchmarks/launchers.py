"""What Ray costs beside our own processes while nothing is to be done, and how soon work goes on after losses.

    PYTHONPATH=tests/support python -m benchmarks.launchers        writes docs/benchmarks/launchers.json

Two nodes of Ray's on this machine with a worker on the processors each (`ray_cluster`). Processor time is user and
system over `--seconds`; memory is the proportional set size (pages that several processes share count in parts). A
loss: jobs of 256 x 256 x 256 float32 one after the other from one client; seconds from the signal to the end of the
first job that was begun when all that the killed processes had started was gone; where both actors are killed,
to the first order of the bridge's to an actor that is new and to the first worker that has joined. `load` is the
machine's before anything of this was started. Head: its tables' process is stopped (SIGSTOP) for `--head-s` seconds
while such jobs go on and `/readyz` is looked at twice a second; then seconds until the bridge has found it. Cut: the
node that has the jobs is another host, by a link of its own (a network namespace; needs root), which loses every frame
from a moment on without a word; seconds to the end of the first job that was begun after it.
`--only` measures one part and leaves the others in the report as they are; each has its environment.
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

import networks
import numpy as np
import psutil
from live_server import LiveServer
from ray_cluster import RayCluster, free_port

from gemmserve import Client
from gemmserve_service.settings import Settings

REPORT = Path(__file__).parents[1] / "docs" / "benchmarks" / "launchers.json"
PARTS = ("idle", "head", "losses", "cut_s")
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


def kill_actors(server, cluster, load, rounds, agents):
    """Seconds without work after each kill, and of both actors' the parts."""
    losses, phases = {"one actor of two": [], "both actors": []}, {"ordered": [], "joined": []}
    for _ in range(rounds):
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
    return losses, phases


def kill_nodes(cluster, load, count, agents):
    """Seconds without work after each kill of a node."""
    losses = []
    for _ in range(count):
        losses.append(lose(load, [cluster.node_of(cluster.actors()[0])]))
        cluster.add_node()
        wait_for(lambda: len(agents()) == 2)
        time.sleep(4)
    return losses


def ready_devices(server):
    """How many workers have joined."""
    with server.http() as http:
        return sum(device["state"] == "ready" for device in http.get("/v1/devices").json()["devices"])


def cut_node(folder):
    """Seconds without work after the link of the node was cut that has the jobs, for its worker joined first."""
    with networks.Network(bits_per_s=1e9) as network, RayCluster(nodes=0) as cluster:
        cluster.add_node(network)
        anybody = ["--join-host", "0.0.0.0", "--join-insecure", "--allow-unauthenticated"]
        with serving(cluster, folder, cluster.ip, *anybody) as server:
            wait_for(lambda: ready_devices(server) == 1)
            cluster.add_node()
            wait_for(lambda: ready_devices(server) == 2)
            load = Load(server.url)
            time.sleep(3)
            network.cut()
            seconds = load.after(time.monotonic())
            load.stop()
            network.mend()
        assert not load.wrong, f"{load.wrong} results are wrong"
    return seconds


def stop_head(server, cluster, load, seconds):
    """What goes on while the head is gone, and how soon the bridge is back."""
    (head,) = cluster.processes("gcs/gcs_server")
    cluster.stop_head()
    stopped = time.monotonic()
    statuses = []
    with server.http() as http:
        while time.monotonic() - stopped < seconds:
            statuses.append(http.get("/readyz").status_code)
            time.sleep(0.5)
    told = len(re.findall("bridge to Ray at", server.text))
    cluster.continue_head()
    continued = time.monotonic()
    wait_for(lambda: len(re.findall("bridge to Ray at", server.text)) > told)
    back = time.monotonic() - continued
    load.after(time.monotonic())
    assert head.is_running()
    gaps = [end - begin for begin, end in load.jobs if stopped < end < continued]
    ready = {"looks": len(statuses), "ready": sum(status == 200 for status in statuses)}
    return {
        "gone_s": continued - stopped,
        "readyz": ready,
        "jobs_meanwhile": len(gaps),
        "longest_job_s": max(gaps),
        "bridge_back_s": back,
    }


def serving(cluster, folder, address, *further):
    """A server with two of Ray's workers, which join by that address of this machine's; as patient as by default."""
    port = free_port()
    flags = ["--executor", "ray", "--ray-address", cluster.address, "--ray-device", "cpu", "--ray-min-workers", "2"]
    flags += ["--ray-max-workers", "2", "--join-port", str(port), "--ray-join-url", f"http://{address}:{port}"]
    environment = {**cluster.environment, "GEMMSERVE_DEVICE": "auto"}
    for name in ("GEMMSERVE_HEARTBEAT_TIMEOUT_S", "GEMMSERVE_JOIN_SILENCE_S"):
        setting = name.removeprefix("GEMMSERVE_").lower()
        environment[name] = str(Settings.model_fields[setting].default)
    return LiveServer(*flags, *further, data_dir=Path(folder), environment=environment)


def measure(arguments, folder, parts):
    """The parts: cuts each with a cluster and a server of their own, all others in one server's life."""
    found = {}
    if "cut_s" in parts:
        rounds = range(arguments.cuts if networks.missing() is None else 0)
        found["cut_s"] = [cut_node(Path(folder) / str(number)) for number in rounds]
    if parts == ("cut_s",):
        return found
    with RayCluster(nodes=2) as cluster, serving(cluster, Path(folder) / "data", "127.0.0.1") as server:
        server.wait_ready()
        agents = lambda: {each.pid for each in cluster.processes("gemmserve.cli worker")}  # noqa: E731
        wait_for(lambda: len(agents()) == 2)
        time.sleep(10)
        if "idle" in parts:
            found["idle"] = idle([*cluster.processes(), *server.processes()], arguments.seconds)
            found["seconds"] = arguments.seconds
        load = Load(server.url)
        time.sleep(2)
        if "head" in parts:
            found["head"] = stop_head(server, cluster, load, arguments.head_s)
        if "losses" in parts:
            found["losses_s"], found["both_actors_s"] = kill_actors(server, cluster, load, arguments.rounds, agents)
            found["losses_s"]["one node of two"] = kill_nodes(cluster, load, arguments.nodes, agents)
        load.stop()
        assert not load.wrong, f"{load.wrong} results are wrong"
    return found


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=3, help="nodes that are killed, one after the other")
    parser.add_argument("--cuts", type=int, default=3, help="nodes whose links are cut, likewise")
    parser.add_argument("--head-s", type=float, default=180.0)
    parser.add_argument("--only", choices=PARTS, help="leaves the report's other parts as they are")
    arguments = parser.parse_args()
    import ray

    load = psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(arguments, folder, PARTS if arguments.only is None else (arguments.only,))
    environment = {"python": sys.version.split()[0], "cpus": psutil.cpu_count(), "ray": ray.__version__,
                   "load": round(load, 1)}  # fmt: skip
    found = {} if arguments.only is None else json.loads(REPORT.read_text())
    found |= measured
    found["environment"] = found.get("environment", {}) | {
        part: environment for part in PARTS if arguments.only in {None, part}
    }
    REPORT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

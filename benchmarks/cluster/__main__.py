"""Joined workers on this machine's processors: `python -m benchmarks.cluster` writes docs/benchmarks/cluster.json.

Three measurements, each beside what it is compared with, in turns in the same run:

- overhead: the time from a job's submission to its end, of small products whose operands are at the worker already; on
  a server with a worker of its own, and on one whose worker has joined over TCP (loopback). By the size of the result;
  and processor time a job of the fronts and the agent, as the kernel's scheduler counts it. After each round of jobs as
  many bytes as a result has go over loopback by `sendall` and `recv_into`, nothing else (`bare.py`).
- operands: a joined worker in a network namespace, over a veth. A job whose operand is new beside one whose operand is
  there: the difference is the operand's way, in seconds and in processor time of front and agent. The same bytes
  between the same namespaces by `sendall` and `recv_into`, nothing else (`bare.py`).
- jobs: how many a second one joined worker computes, and two. Nodes, server and load share this machine's processors,
  so that two are worth more than one only as far as there are processors.

Needs root, for the namespace; without it `operands` says why it is missing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
from benchmarks.service.results import digest, write

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "examples")]

import networks  # noqa: E402 (of the tests)
from chaos.joined import worker_token  # noqa: E402
from live_server import LiveServer  # noqa: E402

OUTPUT = ROOT / "docs" / "benchmarks" / "cluster.json"
SMALL = (16, 64, 256)
ROWS, COLUMNS = 16_384, 4096  # of an operand of 256 MiB, which is multiplied by one vector
JOBS_N = 512
BARE_TIMES = 50  # after each round of jobs
PAIRS = 6  # of servers
AGENT = "--join"
BARE = Path(__file__).with_name("bare.py")
FRONT = "gemmserve_service.processes.front"


class Connection:
    """One connection to a server."""

    def __init__(self, url, key=None):
        self._http = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, method, path, body=None, **headers):
        """Return the answer's JSON. Raises RuntimeError for a refusal."""
        self._http.request(method, path, body, {**self._headers, **headers})
        answer = self._http.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]!r}")
        return json.loads(text) if text else None

    def put(self, array):
        """Store an array; return its id."""
        shape = ",".join(map(str, array.shape))
        kind = {"Content-Type": "application/octet-stream"}
        return self.ask("POST", f"/v1/arrays?dtype={array.dtype.name}&shape={shape}", array.data.cast("B"), **kind)[
            "id"
        ]

    def run(self, a, b):
        """Multiply, and wait; return the job."""
        body = json.dumps({"op": "gemm", "a": a, "b": b})
        job = self.ask("POST", "/v1/jobs", body, **{"Content-Type": "application/json", "Prefer": "wait=60"})
        if job["state"] != "succeeded":
            raise RuntimeError(f"a job has not succeeded: {job}")
        return job

    def delete(self, array):
        """Delete an array."""
        self.ask("DELETE", f"/v1/arrays/{array}")


def timed(call):
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def quantiles(values):
    """Return what is reported of times."""
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p90": ordered[int(0.9 * len(ordered))], "count": len(ordered)}


def ran(processes):
    """Return the seconds for which a processor ran these processes' threads."""
    stats = [file for each in processes for file in Path(f"/proc/{each.pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in stats) / 1e9


def fronts_and_agents(server):
    """Return processes by what they are for: `front`, and `agent` where a worker has joined."""
    found = {"front": [each for each in server.processes() if FRONT in each.cmdline()]}
    if server.joined is not None:
        found["agent"] = [psutil.Process(agent.process.pid) for agent in server.joined.agents]
    return found


def overhead(rounds, jobs):
    """Return times of small jobs on a worker of the server's own and on a joined one, and their difference, for each
    size of SMALL: every job of one beside a job of the other, so that what else the machine does befalls both. Of
    several pairs of servers, since two that were started alike differ by a tenth of a millisecond.
    """
    pairs = [pair_of_servers(max(rounds // 2, 1), jobs) for _ in range(PAIRS)]
    rows = []
    for n, *found in zip(SMALL, *pairs, strict=True):
        more = [each for pair in found for each in pair["more"]]
        rows.append(
            {
                "shape": [n, n],
                "result_bytes": n * n * np.dtype(np.complex64).itemsize,
                **{who: quantiles([each for pair in found for each in pair[who]]) for who in ("local", "joined")},
                "cpu_s": {
                    name: {who: statistics.median(pair["cpu_s"][name][who] for pair in found) for who in processes}
                    for name, processes in found[0]["cpu_s"].items()
                },
                "bare": quantiles([each for pair in found for each in pair["bare"]]),
                "more_p50_s": statistics.median(more),
                "more_least_s": min(more),
                "more_most_s": max(more),
            }
        )
    return rows


def pair_of_servers(rounds, jobs):
    """Return what one pair of servers takes, for each size of SMALL: times by who, of all rounds but the first, in
    which kernels are planned and memory is new; the difference of the medians of each of these, and processor time a
    job.
    """
    found = []
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(LiveServer("--device", "cpu", joins=joins))
            for name, joins in random.sample([("local", None), ("joined", ["node"])], 2)
        }
        connections = {name: Connection(server.url) for name, server in servers.items()}
        processes = {name: fronts_and_agents(server) for name, server in servers.items()}
        for n in SMALL:
            array = np.random.default_rng(0).standard_normal((n, n, 2), np.float32).view(np.complex64)[..., 0]
            ids = {name: (each.put(array), each.put(array)) for name, each in connections.items()}
            send = stack.enter_context(bare_receiver("127.0.0.1", array.nbytes))
            times = {"local": [], "joined": [], "bare": [], "more": []}
            for number in range(rounds + 1):
                if number == 1:
                    before = {name: {who: ran(of) for who, of in each.items()} for name, each in processes.items()}
                turn = {name: [] for name in connections}
                for _ in range(jobs):
                    for name in random.sample(list(connections), len(connections)):
                        turn[name].append(timed(lambda: connections[name].run(*ids[name])))  # noqa: B023 (called here)
                if number:
                    times["bare"] += [send(array.data.cast("B"))[0] for _ in range(BARE_TIMES)]
                    times["more"].append(statistics.median(turn["joined"]) - statistics.median(turn["local"]))
                    for name, values in turn.items():
                        times[name] += values
            cpu = {
                name: {who: (ran(of) - before[name][who]) / (rounds * jobs) for who, of in each.items()}
                for name, each in processes.items()
            }
            found.append({**times, "cpu_s": cpu})
    return found


@contextmanager
def bare_receiver(host, nbytes, node=None):
    """Yield a function that sends bytes to `bare.py`, on a node if one is given, and returns what that prints."""
    with socket.create_server((host, 0)) as listener:
        command = [sys.executable, str(BARE), host, str(listener.getsockname()[1]), str(nbytes)]
        command = command if node is None else node.command(command)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
            other, _ = listener.accept()
            with other:
                other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

                def send(data):
                    other.sendall(b"!")
                    other.sendall(data)
                    return json.loads(receiver.stdout.readline())

                yield send
                other.shutdown(socket.SHUT_WR)
            receiver.wait()


def spent(server):
    """Return seconds of processor time of the server's front and of the node's agent, without the worker."""
    total = 0.0
    for process in server.processes():
        command = process.cmdline()
        if AGENT in command or FRONT in command or "gemmserve_service.executor.agent" in command:
            times = process.cpu_times()
            total += times.user + times.system
    return total


def operands(rounds, bits_per_s):
    """Return the rate at which new operands come to a joined worker, beside bare sockets; and processor time a GiB."""
    if (reason := networks.missing()) is not None:
        return {"skipped": reason}
    with ExitStack() as stack:
        node = stack.enter_context(networks.Network(bits_per_s=bits_per_s))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key, token = worker_token(folder, "read,submit"), worker_token(folder, "worker")
        server = LiveServer(
            data_dir=folder, joins=[], environment={"GEMMSERVE_JOIN_INSECURE": "1"}, join_host=node.here
        )
        server.joined.add("cpu", "node", node=node, GEMMSERVE_JOIN_TOKEN=token)
        stack.enter_context(server)
        connection = Connection(server.url, key)
        vector = connection.put(np.ones((COLUMNS, 1), np.float32))
        matrix = np.random.default_rng(1).standard_normal((ROWS, COLUMNS), np.float32)
        bare = stack.enter_context(bare_receiver(node.here, matrix.nbytes, node))
        rows = []
        for number in range(rounds + 1):
            row = {}
            for what in random.sample(["ours", "bare"], 2):
                if what == "bare":
                    began = time.process_time()
                    seconds, cpu = bare(matrix.data.cast("B"))
                    row["bare"] = {"seconds": seconds, "cpu_s": cpu + time.process_time() - began}
                    continue
                matrix[0, 0] = number
                array = connection.put(matrix)
                runs = []
                for _ in range(3):  # new; there; there
                    before = spent(server)
                    runs.append((timed(lambda: connection.run(array, vector)), before))  # noqa: B023 (called here)
                    runs[-1] = (runs[-1][0], spent(server) - runs[-1][1])
                there = runs[1:]
                row["ours"] = {
                    "seconds": runs[0][0] - min(seconds for seconds, _ in there),
                    "cpu_s": runs[0][1] - min(cpu for _, cpu in there),
                }
                connection.delete(array)
            if number:  # the first one's memory is new to everybody
                rows.append(row)
    gib = matrix.nbytes / 2**30
    return {
        "bytes": matrix.nbytes,
        "link_bits_per_s": bits_per_s,
        **{
            who: {
                "bytes_per_s": matrix.nbytes / statistics.median(row[who]["seconds"] for row in rows),
                "cpu_s_per_gib": statistics.median(row[who]["cpu_s"] for row in rows) / gib,
            }
            for who in ("bare", "ours")
        },
        "of_bare": statistics.median(row["bare"]["seconds"] / row["ours"]["seconds"] for row in rows),
        "rows": rows,
    }


def jobs_a_second(rounds, count):
    """Return jobs a second on one and on two joined workers, and of a server's own worker."""
    array = np.random.default_rng(0).standard_normal((JOBS_N, JOBS_N, 2), np.float32).view(np.complex64)[..., 0]
    rates = {"local": [], "one": [], "two": []}
    nodes = {"local": None, "one": ["left"], "two": ["left", "right"]}
    with ExitStack() as stack:
        servers = {}
        for name in rates:
            server = stack.enter_context(LiveServer("--device", "cpu", joins=nodes[name]))
            connection = Connection(server.url)
            servers[name] = connection, [connection.put(array), connection.put(array)]
        for number in range(rounds + 1):
            for name in random.sample(list(rates), len(rates)):
                connection, (a, b) = servers[name]
                body = json.dumps({"jobs": [{"op": "gemm", "a": a, "b": b}] * count})

                def run(connection=connection, body=body):
                    kind = {"Content-Type": "application/json"}
                    for job in connection.ask("POST", "/v1/jobs", body, **kind)["jobs"][::-1]:
                        while (info := connection.ask("GET", f"/v1/jobs/{job['id']}?wait=60"))["state"] != "succeeded":
                            if info["state"] not in {"queued", "running"}:
                                raise RuntimeError(f"a job has not succeeded: {info}")

                seconds = timed(run)
                if number:
                    rates[name].append(count / seconds)
    return {name: statistics.median(found) for name, found in rates.items()} | {"shape": [JOBS_N, JOBS_N]}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=200, help="of each round")
    parser.add_argument("--link", type=float, action="append", help="bits/s of a link in `operands`; default: 1e9, 8e9")
    parser.add_argument("--only", action="append", choices=["overhead", "operands", "jobs"], default=[])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    random.seed(0)
    found = json.loads(args.output.read_text()) if args.only and args.output.exists() else {}
    found["environment"] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "rounds": args.rounds,
        "jobs": args.jobs,
        "pairs": PAIRS,
        "load": round(os.getloadavg()[0], 1),
    }
    found["sources"] = digest()
    for name, measure in (
        ("overhead", lambda: overhead(args.rounds, args.jobs)),
        ("operands", lambda: [operands(args.rounds, link) for link in args.link or (1e9, 8e9)]),
        ("jobs", lambda: jobs_a_second(max(args.rounds // 2, 1), args.jobs)),
    ):
        if not args.only or name in args.only:
            found[name] = measure()
            for each in found[name] if isinstance(found[name], list) else [found[name]]:
                print(name, json.dumps({key: value for key, value in each.items() if key != "rows"}, indent=1))
            write(args.output, found)


if __name__ == "__main__":
    main()

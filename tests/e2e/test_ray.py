"""`gemmserve serve --executor ray` with two nodes of Ray's on this machine: losses of actors, nodes and the head."""

from __future__ import annotations

import importlib.util
import re
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from chaos.joined import worker_token
from live_server import LiveServer

from gemmserve import Client

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

from ray_cluster import RayCluster, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
_LONG_S = 120.0


def until(condition, server):
    deadline = time.monotonic() + _LONG_S
    while not condition():
        assert time.monotonic() < deadline, server.text
        time.sleep(0.05)


def agents(cluster):
    """Processes of the worker command, whose parents are actors."""
    return {each.pid for each in cluster.processes("gemmserve.cli worker")}


def goes_on(ended, server):
    """Waits for three more jobs, the first of which may have been under way."""
    count = len(ended)
    until(lambda: len(ended) > count + 3, server)


@contextmanager
def jobs(server, key):
    """Jobs one after the other, all of which have to be right; yields the moments at which they ended."""
    a = (np.arange(256 * 256, dtype=np.float32).reshape(256, 256) % 7) - 3
    ended, wrong, over = [], [], threading.Event()

    def run():
        with Client(server.url, api_key=key, timeout=_LONG_S) as client:
            ra = client.put(a)
            while not over.is_set():
                product = ra @ ra
                if not np.array_equal(product.numpy(), a @ a):
                    wrong.append(time.monotonic())
                product.delete()
                ended.append(time.monotonic())

    failures = []

    def guarded():
        try:
            run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield ended
    finally:
        over.set()
        thread.join(_LONG_S)
    assert not failures
    assert not wrong


def test_losses(tmp_path):
    """One test, since a cluster takes ten seconds: kill -9 of all actors, of a node, the head stopped, and the end.
    Workers have a token, without which they could not join, and nobody else sees it.
    """
    port = free_port()
    token, key = worker_token(tmp_path / "data", "worker"), worker_token(tmp_path / "data", "read,submit")
    (tmp_path / "token").write_text(token)
    with RayCluster(nodes=2) as cluster:
        flags = ["--executor", "ray", "--ray-address", cluster.address, "--ray-device", "cpu", "--ray-min-workers", "2"]
        flags += ["--ray-max-workers", "2", "--join-port", str(port), "--ray-join-url", f"http://127.0.0.1:{port}"]
        flags += ["--ray-token-file", str(tmp_path / "token")]
        environment = {**cluster.environment, "GEMMSERVE_DEVICE": "auto"}
        server = LiveServer(*flags, data_dir=tmp_path / "data", environment=environment)
        with server:
            server.wait_ready()
            until(lambda: len(agents(cluster)) == 2, server)
            assert not server.workers(), "a local one beside Ray's"
            with jobs(server, key) as ended:
                # Actors and, with them, what they had started.
                before = agents(cluster)
                for actor in cluster.actors():
                    actor.kill()
                until(lambda: len(agents(cluster) - before) == 2, server)
                assert not before & agents(cluster)
                goes_on(ended, server)
                # A node: its actor waits for another one, the other serves.
                lost, kept = cluster.actors()
                cluster.node_of(lost).kill()
                until(lambda: cluster.actors() == [kept], server)
                goes_on(ended, server)
                cluster.add_node()
                until(lambda: len(cluster.actors()) == 2, server)
                # The head: nobody serves less, the bridge ends and waits, the next one finds what there is.
                bridges = len(re.findall("bridge to Ray at", server.text))
                serving = {each.pid for each in cluster.actors()}
                cluster.stop_head()
                until(lambda: "bridge to Ray ended" in server.text, server)
                goes_on(ended, server)
                with server.http() as http:
                    assert http.get("/readyz").status_code == 200
                cluster.continue_head()
                until(lambda: len(re.findall("bridge to Ray at", server.text)) > bridges, server)
                goes_on(ended, server)
                assert {each.pid for each in cluster.actors()} == serving
                assert agents(cluster)
                assert not cluster.processes(re.escape(token)), "on a command line"
        assert token not in server.text
        logs = cluster.logs()
        assert "WorkerActor" in logs
        assert token not in logs
        until(lambda: not cluster.actors(), server)

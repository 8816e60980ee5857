"""Transfer processes that stand still or die at the worst moment: what their connections and other owners see."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading

import httpx
import pytest
from raw_connection import closed, until, upload_head
from standing import stand_still
from transfer_processes import TransferProcesses
from transfers import BARE, F64, MIB, OCTETS, A, download, metric, read_answer, store, transferred_by

from gemmserve_service.store.extents.extents import Place
from gemmserve_service.tenancy.keyring import create_key


@pytest.fixture
def served(serve):
    """served(count, **settings) -> the app with so many transfer processes."""
    return lambda count=1, **fields: transferred_by(TransferProcesses, serve, count, **fields)


def test_kill_9_in_the_middle_of_an_upload(served):
    with served() as (live, processes):
        stand_still(processes.pids[0])
        with live.connect() as connection:
            connection.sendall(upload_head(64 * MIB) + bytes(1000))
            until(lambda: processes.transfers.under_way)
            os.kill(processes.pids[0], signal.SIGKILL)
            assert closed(connection)
        until(lambda: live.tasks == 0)
        assert (live.core.store.used_bytes, live.core.store.count) == (0, 0)
        before = dict(processes.transfers.transferred_bytes)
        with live.http() as http:  # the front does it meanwhile
            assert http.get(f"/v1/arrays/{store(live)}/data").status_code == 200
        assert processes.transfers.transferred_bytes == before
        processes.start("0")
        until(lambda: processes.ready)
        until(lambda: store(live) and processes.transfers.transferred_bytes["in"])
        assert metric(live, "gemmserve_transfer_process_restarts_total") == 1


def test_kill_9_in_the_middle_of_a_download(served):
    with served(2) as (live, processes):
        array_id = store(live)
        for pid in processes.pids:
            stand_still(pid)
        request = download(array_id)
        with live.connect() as first, live.connect() as second:
            first.sendall(request)
            until(lambda: processes.transfers.under_way == 1)
            (broken,) = [link for link in processes.transfers._links if link.jobs]
            second.sendall(request)
            until(lambda: processes.transfers.under_way == 2)
            os.kill(processes.pids[int(broken.name)], signal.SIGKILL)
            while first.recv(MIB):  # what had come before; then the end, though more was promised
                pass
            os.kill(processes.pids[1 - int(broken.name)], signal.SIGCONT)
            with second.makefile("rb") as file:
                assert read_answer(file)[1].endswith(A.tobytes())
        until(lambda: live.tasks == 0)


class Two:
    """Two owners of an app, one of whom has begun a part that a process standing still is to receive."""

    def __init__(self, live, processes, settings):
        self.live, self.processes = live, processes
        self.clients = []
        for name in ("alice", "bob"):
            _, text = create_key(settings.data_dir, name)
            self.clients.append({"Authorization": f"Bearer {text}"})
        live.call(live.core.keyring.refresh)
        self.alice, self.bob = (
            httpx.Client(base_url=live.url, headers=one, timeout=600, trust_env=False) for one in self.clients
        )
        self.url = self.alice.post("/v1/uploads", params=F64, headers=OCTETS).headers["location"]
        for pid in processes.pids:
            stand_still(pid)
        self.connection = live.connect()
        head = (
            f"PUT {self.url}/parts/0 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
            f"Authorization: {self.clients[0]['Authorization']}\r\nContent-Length: {A.nbytes}\r\n\r\n"
        )
        self.connection.sendall(head.encode())
        until(lambda: processes.transfers.under_way)
        self.connection.sendall(b"\xff" * (1 << 16))  # wait where the process will find them
        (link,) = [link for link in processes.transfers._links if link.jobs]
        self.stopped = int(link.name)
        for number, pid in enumerate(processes.pids):
            if number != self.stopped:
                os.kill(pid, signal.SIGCONT)

    def go_on(self):
        os.kill(self.processes.pids[self.stopped], signal.SIGCONT)

    def close(self):
        for one in (self.alice, self.bob, self.connection):
            one.close()

    def in_thread(self, work):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(work()))
        thread.start()
        return thread, answers

    def bobs(self):
        """An array of bob's, and its bytes as they are now."""
        answer = self.bob.post("/v1/arrays", params=F64, headers=OCTETS, content=A.tobytes())
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def read(self, client, array_id):
        return client.get(f"/v1/arrays/{array_id}/data", headers=BARE).content


@pytest.fixture
def two(served, settings):
    with contextlib.contextmanager(lambda: _two(served, settings))() as found:
        yield found


def _two(served, settings):
    with served(2) as (live, processes):
        pair = Two(live, processes, settings)
        try:
            yield pair
        finally:
            pair.close()


def test_a_stale_move_never_reaches_another_owner_s_array(two):
    """The worst moment: the process has its order and wakes up when nobody wants the bytes any more."""
    thread, answers = two.in_thread(lambda: two.alice.delete(two.url).status_code)
    until(lambda: next(iter(two.live.core.uploads._uploads.values())).gone)
    ids = [two.bobs() for _ in range(3)]
    two.go_on()
    thread.join(60)
    assert answers == [204]
    ids += [two.bobs() for _ in range(3)]  # one of them where alice's was
    assert all(two.read(two.bob, array_id) == A.tobytes() for array_id in ids)


def test_a_later_part_waits_until_the_earlier_one_writes_no_more(two):
    part = A.tobytes()
    thread, answers = two.in_thread(
        lambda: two.alice.put(f"{two.url}/parts/0", content=part, headers=OCTETS).status_code
    )
    (record,) = two.live.core.uploads._uploads.values()
    until(record.lock.locked)
    two.go_on()
    thread.join(60)
    assert answers == [204]
    array_id = two.alice.post(f"{two.url}/complete").json()["id"]
    assert two.read(two.alice, array_id) == part


def test_a_transfer_process_that_never_wakes_up_is_killed(served, settings):
    with served(2, silence_s=1.0) as (live, processes):
        two = Two(live, processes, settings)
        assert two.alice.delete(two.url).status_code == 204
        assert closed(two.connection)
        assert processes.transfers.killed
        for pid in processes.pids:  # before the second is taken for dead, too: bob's go by the front
            os.kill(pid, signal.SIGKILL)
        until(lambda: processes.ready == 0)
        ids = [two.bobs() for _ in range(3)]
        assert all(two.read(two.bob, array_id) == A.tobytes() for array_id in ids)
        two.close()


def test_what_came_before_a_hangup_stays(served):
    with served() as (live, processes), live.http() as http:
        url = http.post("/v1/uploads", params=F64, headers=OCTETS).headers["location"]
        stand_still(processes.pids[0])
        with live.connect() as connection:
            head = (
                f"PUT {url}/parts/0 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
                f"Content-Length: {4 * MIB}\r\n\r\n"
            )
            connection.sendall(head.encode())
            until(lambda: processes.transfers.under_way)
            connection.sendall(A.tobytes()[:100_000])
        os.kill(processes.pids[0], signal.SIGCONT)  # it finds these bytes and the end of the connection at once
        until(lambda: live.tasks == 0)
        assert http.get(url).json()["received"] == [[0, 100_000]]


def test_nonsense_behind_a_download_does_not_come_into_its_middle(served):
    with served() as (live, processes):
        array_id = store(live)
        stand_still(processes.pids[0])
        with live.connect() as connection:
            connection.sendall(download(array_id))
            until(lambda: processes.transfers.under_way)
            connection.sendall(b"\x00 nonsense\r\n\r\n")
            refused = 'gemmserve_http_refused_connections_total{problem="invalid-request"}'
            until(lambda: metric(live, refused))
            os.kill(processes.pids[0], signal.SIGCONT)
            with connection.makefile("rb") as file:
                assert read_answer(file)[1].endswith(A.tobytes())
                assert file.readline().startswith(b"HTTP/1.1 400 ")
        until(lambda: live.tasks == 0)


def test_a_transfer_process_hears_of_the_extents_that_it_had_alone_and_of_any_number(served):
    with served() as (live, processes):
        (link,) = processes.transfers._links
        names = [f"x{number}" for number in range(5000)]
        stand_still(processes.pids[0])
        live.call(lambda: [processes.transfers.forget(name) for name in names])
        assert not link._unsent
        live.call(lambda: link._known.update(names))
        live.call(lambda: [processes.transfers.forget(name) for name in names])
        assert link._unsent  # more than the socket takes
        assert not link._known
        os.kill(processes.pids[0], signal.SIGCONT)
        until(lambda: not link._unsent)
        assert processes.transfers.killed == 0
        until(lambda: store(live) and processes.transfers.transferred_bytes["in"])


def test_an_extent_is_not_free_while_a_transfer_process_has_it(served):
    """The next array has another extent, whether the asker of the transfer still wants it or not."""
    with served() as (live, processes):
        stand_still(processes.pids[0])
        near, far = socket.socketpair()
        near.setblocking(False)
        far.sendall(b"stale")
        pool = live.core.store._files
        seen = {}

        def begin():
            extent = seen["extent"] = pool.take(A.nbytes)
            place = Place(extent, 100)
            transfer = processes.transfers.transfer(
                "in", near.fileno(), place, 5, 600.0, lambda end: seen.update(end=end)
            )
            seen["task"] = live.core_loop.create_task(transfer)

        def cancel_and_take_another():
            seen["task"].cancel()
            pool.give(seen["extent"])
            seen["next"] = pool.take(A.nbytes)

        live.call(begin)
        until(lambda: processes.transfers.under_way)
        live.call(cancel_and_take_another)
        assert seen["next"] is not seen["extent"]
        assert not seen["task"].done(), "it is over when the process has let go"
        os.kill(processes.pids[0], signal.SIGCONT)
        until(seen["task"].done)
        assert seen["task"].cancelled()
        assert seen["end"].end in {"stopped", "done"}
        live.call(lambda: seen.update(later=pool.take(A.nbytes)))
        assert seen["later"] is seen["extent"]
        live.call(lambda: [pool.give(seen[name]) for name in ("next", "later")])
        near.close()
        far.close()

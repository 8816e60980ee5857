"""Whose a session is, and what is left when it or its client ends."""

from __future__ import annotations

import os
import threading

import httpx
import pytest
from memory_peer import GROW, NEEDS_MEMFD, SHRINK, WRITE, A, B, array_of, head, memory, open_memory, refused

from gemmserve.wire import DATA_HEADER, NPY_HEADER, RESULT_HEADER, SESSION_HEADER
from gemmserve_service.tenancy.api_keys import Quota
from gemmserve_service.tenancy.keyring import create_key

pytestmark = NEEDS_MEMFD


def test_a_session_is_known_by_its_secret_alone(app, peers):
    one, other = peers(app), peers(app)
    assert one.secret != other.secret
    assert len(one.secret) == 64
    number = one.share(memory(A))
    assert refused(other.gemm(shared={"a": (A, number)}, plain={"b": B}), "no descriptor")
    assert refused(other.gemm(shared={"a": (A, number)}, plain={"b": B}, secret="0" * 64), "no such session")
    array_of(one.gemm(shared={"a": (A, number)}, plain={"b": B}))


def test_memory_without_a_session(app, peer):
    body = b'--X\r\nContent-Disposition: form-data; name="a"\r\nContent-Type: %s\r\n%s: 1\r\n\r\n' % (
        NPY_HEADER.encode(), DATA_HEADER.encode(),
    ) + head(A) + b"\r\n--X--\r\n"  # fmt: skip
    answer = peer.http.post("/v1/gemm", content=body, headers={"Content-Type": "multipart/form-data; boundary=X"})
    assert refused(answer, SESSION_HEADER)


def test_keys_hold_here_as_everywhere(make, peers, tmp_path):
    keys = {}
    for name in ("alice", "bob"):
        _, keys[name] = create_key(tmp_path / "data", name)
    app = make()
    nobody = peers(app)
    assert nobody.welcome["kind"] == "refused"
    assert nobody.welcome["problem"]["type"] == "/problems/unauthorized"
    assert nobody.ended()
    wrong = peers(app, keys["alice"][:-1] + "x")
    assert wrong.welcome["problem"]["type"] == "/problems/unauthorized"
    alice, bob = peers(app, keys["alice"]), peers(app, keys["bob"])
    number = alice.share(memory(A))
    # Bob has come by Alice's secret: it is of no use with his key.
    assert refused(bob.gemm(shared={"a": (A, number)}, plain={"b": B}, secret=alice.secret), "no such session")
    array_of(alice.gemm(shared={"a": (A, number)}, plain={"b": B}))
    anonymous = httpx.Client(transport=httpx.HTTPTransport(uds=str(app.path)), base_url="http://localhost")
    assert anonymous.get("/v1/arrays").status_code == 401
    anonymous.close()


def test_the_quota_of_bytes_in_flight_counts_shared_operands(make, peers, tmp_path):
    _, key = create_key(tmp_path / "data", "alice", quota=Quota(inflight_bytes=A.nbytes))
    app = make()
    alice = peers(app, key)
    numbers = [alice.share(memory(A, seals=SHRINK | GROW | WRITE)) for _ in range(2)]
    answer = alice.gemm(shared={"a": (A, numbers[0]), "b": (A, numbers[1])})
    assert (answer.status_code, answer.json()["type"]) == (429, "/problems/quota-exceeded")
    app.until(lambda: app.core.quotas.inflight_bytes(key.split("_")[1]) == 0)


def test_a_client_that_goes_between_passing_and_asking(app, peers):
    peer = peers(app)
    for _ in range(5):
        peer.share(memory(A))
    app.until(lambda: app.descriptors.held == 5)
    peer.socket.close()
    app.until(lambda: app.descriptors.held == 0)
    assert refused(peer.gemm(shared={"a": (A, 1)}, plain={"b": B}), "no such session")


def test_a_session_that_ends_during_its_request_harms_nobody(app, peer):
    app.executor.hold = True
    fd = memory(nbytes=A.nbytes)
    numbers = peer.share(memory(A, seals=SHRINK | GROW | WRITE)), peer.share(fd, close=False)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(peer.gemm(shared={"a": (A, numbers[0])}, plain={"b": B}, result=numbers[1]))
    )
    thread.start()
    app.until(lambda: app.executor.held)
    app.end_sessions()
    app.executor.release()
    thread.join(60)
    assert answers[0].headers["content-type"] == NPY_HEADER
    assert os.pread(fd, A.nbytes, 0) == (A * 2).tobytes()
    os.close(fd)


def test_hanging_up_gives_the_memory_back(app, peer):
    app.executor.hold = True
    number = peer.share(memory(A, seals=SHRINK | GROW | WRITE))
    with peer.gemm_by_hand(shared={"a": (A, number)}, plain={"b": B}):
        app.until(lambda: app.executor.held)
    app.until(lambda: app.core.scheduler.queued + len(app.core.scheduler._wanted()) == 0)
    app.executor.release()
    app.until(lambda: app.core.store.scratch_bytes == 0)


@pytest.mark.parametrize("there", [True, False])
def test_room_for_a_result_that_an_upload_has_no_use_for_is_closed(app, peer, there):
    before = open_memory()
    for _ in range(10):
        data = peer.share(memory(A)) if there else 999
        headers = {
            "Content-Type": NPY_HEADER,
            SESSION_HEADER: peer.secret,
            RESULT_HEADER: str(peer.share(memory(nbytes=A.nbytes))),
            DATA_HEADER: str(data),
        }
        answer = peer.http.post("/v1/arrays", content=head(A), headers=headers)
        assert answer.status_code == (201 if there else 422), answer.text
    app.until(lambda: open_memory() <= before)

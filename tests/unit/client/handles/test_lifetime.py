"""Arrays that go with the last handle on them: views, copies, jobs, pickles, forks, and the interpreter's end."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time

import httpx
import numpy as np
import pytest
from fake_service import FakeService, serving

import gemmserve
from gemmserve import AsyncClient, Client
from gemmserve._calls import arrays as array_flows
from gemmserve._handles.lifetime import AutoDelete


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def owning(service):
    """A client whose arrays go with their handles."""
    with serving(service) as url, Client(url, auto_delete=True) as client:
        yield client


def settled(service, count: int, within_s: float = 30.0) -> bool:
    """Whether the service comes to have so many arrays."""
    gc.collect()
    until = time.monotonic() + within_s
    while len(service.arrays) != count and time.monotonic() < until:
        time.sleep(0.01)
    return len(service.arrays) == count


def test_it_is_asked_for(client, service):
    client.put(np.eye(2))
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "gemmserve-delete"]
    assert len(service.arrays) == 1


def test_the_last_view_counts(owning, service):
    remote = owning.put(np.eye(2))
    other = owning.put(np.eye(3))
    view = remote.T
    copied = copy.copy(view)
    del remote, other
    assert settled(service, 1)
    del view
    assert copied.numpy().shape == (2, 2)
    del copied
    assert settled(service, 0)


def test_views_of_any_kind_hold_their_array_and_copies_go(owning, service, monkeypatch):
    monkeypatch.setattr(array_flows, "SMALL_SPAN", 0)
    a = np.arange(12.0).reshape(3, 4)
    column = owning.put(a)[:, 1]
    gc.collect()
    np.testing.assert_array_equal(column.numpy(), a[:, 1])  # gathered in a copy, which goes
    turned = owning.put(a).T.reshape(-1)  # a copy on the server, and the array that it was made of goes
    assert settled(service, 2)
    np.testing.assert_array_equal(turned.numpy(), a.T.ravel())
    x = np.linalg.multi_dot([owning.put(a), owning.put(a.T), a[:, 0][:3]])
    assert settled(service, 3)
    np.testing.assert_array_equal(x.numpy(), a @ a.T @ a[:, 0])
    del column, turned, x
    assert settled(service, 0)


def test_views_and_sums_of_the_real_server(app_url):
    array = np.arange(12.0).reshape(3, 4)
    with Client(app_url) as other, Client(app_url, auto_delete=True) as client:
        before = {found.id for found in other.arrays()}
        view = client.put(array)[1:, ::2].T
        total = view + view @ view
        expected = array[1:, ::2].T
        np.testing.assert_array_equal(total.numpy(), expected + expected @ expected)
        gc.collect()
        until = time.monotonic() + 30
        while (made := {found.id for found in other.arrays()} - before) != {view.id, total.id}:
            assert time.monotonic() < until, "the product goes when the sum is made"
            time.sleep(0.01)
        assert made == {view.id, total.id}


def test_many_go_by_one_exchange(owning, service):
    handles = [owning.put(np.eye(2)) for _ in range(50)]
    service.requests.clear()
    handles.clear()
    assert settled(service, 0)
    assert len([call for call in service.calls if call == "POST /v1/deletions"]) < 10


def test_results_go_and_operands_stay_while_they_are_needed(owning, service):
    ra = owning.put(np.eye(2))
    product = (owning.put(np.eye(2)) @ ra) @ ra
    assert settled(service, 2)
    np.testing.assert_array_equal(product.numpy(), np.eye(2))
    del product
    assert settled(service, 1)
    several = owning.gemm_reduce(ra, ra, reduce=["sum", "absmax"])
    kept = several["sum"]
    del several
    assert settled(service, 2)
    del kept
    assert settled(service, 1)


def test_a_job_holds_its_results(owning, service):
    ra = owning.put(np.eye(2))
    job = owning.submit("gemm", ra, ra)
    job.result()
    gc.collect()
    assert job.result().numpy().shape == (2, 2)
    assert job.result() is job.result()
    del job
    assert settled(service, 1)


def test_programs(owning, service):
    with owning.program() as program:
        x = program.gemm(owning.put(np.eye(2)), np.eye(2))
        y = x @ x
        program.keep(x)
    assert settled(service, 2), "the operand is there until the program has run"
    np.testing.assert_array_equal((x.numpy(), y.numpy()), (np.eye(2), np.eye(2)))
    del x, y, program
    assert settled(service, 0)


def test_what_was_made_elsewhere_or_has_a_name_stays(owning, service):
    named = owning.put(np.eye(2), name="weights")
    kept = owning.put(np.eye(2)).keep()
    with Client(owning.url) as other:
        array_id = other.put(np.eye(2)).id
    found = [owning.array(array_id), owning["weights"], *owning.arrays()]
    product = owning.submit("gemm", named, named, name="product").wait()
    result = product.result()
    count = len(service.arrays)
    del named, kept, found, product, result
    ends = owning.put(np.eye(2))
    del ends
    assert settled(service, count)


def test_handles_by_id_share_the_lifetime_of_what_the_client_made(owning, service):
    remote = owning.put(np.eye(2))
    again = owning.array(remote.id)
    del remote
    owning.put(np.eye(3))
    assert settled(service, 1)
    assert again.numpy().shape == (2, 2)
    del again
    assert settled(service, 0)


def test_what_was_deleted_is_not_deleted_again(owning, service):
    first, second = owning.put(np.eye(2)), owning.put(np.eye(2))
    first.delete()
    owning.delete(second.id)
    assert "deleted" in repr(second)
    service.requests.clear()
    del first, second
    gc.collect()
    owning.close()
    assert "POST /v1/deletions" not in service.calls


def test_what_is_pickled_stays(owning, service):
    remote, other = owning.put(np.eye(2)), owning.put(np.eye(2))
    job = owning.submit("gemm", other, other).wait()
    job.result()
    arrived = pickle.loads(pickle.dumps(remote))
    again = pickle.loads(pickle.dumps(job))
    del remote, other, job
    owning.close()
    assert len(service.arrays) == 2
    assert arrived.numpy().shape == again.result().numpy().shape == (2, 2)
    assert arrived._client._auto_delete is not None, "the option goes along"
    arrived._client.close()


def test_closing_deletes_what_handles_still_hold(owning, service):
    handles = [owning.put(np.eye(2)) for _ in range(3)]
    owning.close()
    assert not service.arrays
    assert "deleted" in repr(handles[0])


def test_a_client_that_goes_with_its_handles(service):
    with serving(service) as url:

        def work():
            client = Client(url, auto_delete=True)
            return client.put(np.eye(2)).shape

        assert work() == (2, 2)
        assert settled(service, 0)


def test_a_server_that_is_gone_harms_nobody(service):
    with serving(service) as url:
        client = Client(url, auto_delete=True, retry=gemmserve.RetryPolicy(attempts=1))
        remote = client.put(np.eye(2))
        thread = client._auto_delete._thread
    del remote
    gc.collect()
    client.close()
    thread.join(30)
    assert not thread.is_alive()


async def test_awaited(service):
    with serving(service) as url:
        async with AsyncClient(url, auto_delete=True) as client:
            remote = await client.put(np.eye(2))
            product = await (remote @ remote)
            del remote
            assert settled(service, 1)
            job = await client.submit("gemm", product, product)
            await job.result()
            assert len(service.arrays) == 2
        assert not service.arrays, "closing deletes what is left"


def test_an_awaited_client_with_a_transport_of_its_own():
    with pytest.raises(gemmserve.ParameterInvalid, match="transport"):
        AsyncClient(transport=httpx.MockTransport(FakeService()), auto_delete=True)


def test_two_threads_share_one_lifetime():
    sent = []
    auto = AutoDelete(lambda: (sent.extend, lambda: None))
    barrier = threading.Barrier(8)
    found = []

    def ask():
        barrier.wait()
        found.append(auto.lifetime("arr_1", made=True))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    found.clear()
    gc.collect()
    auto.end(30)
    assert sent == ["arr_1"]


def test_the_end_waits_for_a_while_only():
    gate = threading.Event()
    auto = AutoDelete(lambda: (lambda _: gate.wait(60), lambda: None))
    held = auto.lifetime("arr_1", made=True)
    thread = auto._thread
    auto.end(0.0)
    assert held.deleted
    assert thread.is_alive()
    gate.set()
    thread.join(30)
    assert not thread.is_alive()


def run(script: str, url: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GEMMSERVE_SERVER": url}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)


def test_the_interpreter_s_end_deletes_what_is_left(service):
    with serving(service) as url:
        done = run(
            """
            import numpy as np
            from gemmserve import Client
            client = Client(auto_delete=True)
            held = [client.put(np.eye(2)) for _ in range(3)]
            """,
            url,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert not service.arrays


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_deletes_its_own_alone(service):
    with serving(service) as url:
        done = run(
            """
            import gc, os, sys
            import numpy as np
            from gemmserve import Client
            client = Client(auto_delete=True)
            held = client.put(np.eye(2), labels={"of": "parent"})
            pid = os.fork()
            if not pid:
                del held
                own = client.put(np.eye(3), labels={"of": "child"})
                del own
                gc.collect()
                client.close()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            print([found.info.labels["of"] for found in client.arrays()])
            """,
            url,
        )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "['parent']\n")
    assert not service.arrays

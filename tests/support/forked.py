"""What a client's children do with it, after it was used: `python forked.py URL SCENARIO` prints one line of JSON.

Run in a process of its own, for a fork copies all that there is. Every scenario counts its children's answers: right,
wrong, and errors by name. Operands are whole numbers, so a product has one right answer, and each child has its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import json
import multiprocessing
import os
import sys
import threading
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve import AsyncClient, Client

if TYPE_CHECKING:
    from collections.abc import Callable

CHILDREN = 24
ROUNDS = 4


def matrices(number: int) -> tuple[np.ndarray, np.ndarray]:
    """A child's own: their product is `number` + 1 times what other children's is."""
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, (40, 40)).astype(np.float32) for _ in range(2))
    return a * (number + 1), b


def verdict(got: Any, expected: np.ndarray) -> str:
    return "right" if np.array_equal(got, expected) else "wrong"


def multiply(client: Client, number: int) -> list[str]:
    a, b = matrices(number)
    return [verdict(client.gemm(a, b), a @ b) for _ in range(ROUNDS)]


def fetch(handles: list[Any], number: int) -> list[str]:
    """Its own array among those that the parent put."""
    return [verdict(handles[number].numpy(), matrices(number)[0]) for _ in range(ROUNDS)]


def told(work: Callable[[], list[str]]) -> list[str]:
    """What came of it, errors by their class."""
    try:
        return work()
    except BaseException as error:
        traceback.print_exc()
        return [type(error).__name__]


def in_children(work: Callable[[int], list[str]], fork: Callable[[], int] = os.fork) -> Counter[str]:
    """What `work(number)` says in so many children, all at once, and in the parent besides."""
    reading, writing = os.pipe()
    begin_reading, begin = os.pipe()
    children = []
    for number in range(CHILDREN):
        child = fork()
        if not child:
            os.close(begin)
            os.read(begin_reading, 1)  # until the parent closes it
            os.write(writing, json.dumps(told(lambda number=number: work(number))).encode() + b"\n")
            os._exit(0)
        children.append(child)
    os.close(writing)
    os.close(begin)
    seen: Counter[str] = Counter(told(lambda: work(CHILDREN)))
    with os.fdopen(reading) as lines:
        for line in lines:
            seen.update(json.loads(line))
    for child in children:
        os.waitpid(child, 0)
    return seen


def products(url: str) -> Counter[str]:
    """Children of a client that has just been used multiply."""
    with Client(url) as client:
        multiply(client, 0)
        return in_children(lambda number: multiply(client, number))


def products_past_python(url: str) -> Counter[str]:
    """The same where the fork is a C library's, of which Python's hooks know nothing."""
    fork = ctypes.PyDLL(None).fork
    with Client(url) as client:
        multiply(client, 0)
        return in_children(lambda number: multiply(client, number), fork)


def arrays(url: str) -> Counter[str]:
    """Children fetch what the parent has put, each its own."""
    with Client(url) as client:
        handles = [client.put(matrices(number)[0]) for number in range(CHILDREN + 1)]
        return in_children(lambda number: fetch(handles, number))


def busy_parent(url: str) -> Counter[str]:
    """Forks while threads of the parent use the client: their locks and answers are not the children's."""
    with Client(url) as client:
        multiply(client, 0)  # and imports what it needs: no child may find a module half imported by a thread
        stop = threading.Event()
        seen: Counter[str] = Counter()

        def work() -> None:
            while not stop.is_set():
                seen.update(told(lambda: multiply(client, 99)))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            found = in_children(lambda number: multiply(client, number))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        return found + Counter({f"{name} in a thread": count for name, count in seen.items() if name != "right"})


def events(url: str) -> Counter[str]:
    """A child goes on with a stream of events that the parent had begun, and so does the parent."""
    with Client(url) as client:
        a = client.put(matrices(0)[0])
        stream = client.submit("gemm", a, a).events()
        states = [next(stream).state]
        found = in_children(lambda _: ["right" if [info.state for info in stream][-1:] == ["succeeded"] else "wrong"])
        return found if states[0] in {"queued", "running"} else Counter(right=(CHILDREN + 1))


def awaited(url: str) -> Counter[str]:
    """Return what an AsyncClient found: each child runs an event loop of its own."""
    client = AsyncClient(url)

    async def work(number: int) -> list[str]:
        a, b = matrices(number)
        many = await asyncio.gather(*[client.gemm(a, b) for _ in range(ROUNDS)])
        return [verdict(each, a @ b) for each in many]

    asyncio.run(work(0))
    return in_children(lambda number: asyncio.run(work(number)))


def awaited_while_running(url: str) -> Counter[str]:
    """The parent's loop runs when it forks, and goes on."""
    client = AsyncClient(url)

    async def work(number: int) -> list[str]:
        a, b = matrices(number)
        return [verdict(await client.gemm(a, b), a @ b) for _ in range(ROUNDS)]

    async def parent() -> Counter[str]:
        await work(0)
        found: Counter[str] = Counter()
        children = []
        for number in range(CHILDREN):
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                os.write(writing, json.dumps(told(lambda number=number: asyncio.run(work(number)))).encode())
                os._exit(0)
            os.close(writing)
            children.append((child, reading))
        found.update(await work(CHILDREN))
        for child, reading in children:
            with os.fdopen(reading) as lines:
                found.update(json.loads(await asyncio.to_thread(lines.read)))
            await asyncio.to_thread(os.waitpid, child, 0)
        found.update(await work(CHILDREN))
        return found

    return asyncio.run(parent())


def descriptors(url: str) -> Counter[str]:
    """Children hold no connection of the parent's: when the parent closes, the server sees it."""
    with Client(url) as client:
        multiply(client, 0)
        (http,) = [http for http, _ in client._io.pool()._free]
        fd = client._io.pool()._sockets[http][0]
        inode = os.fstat(fd).st_ino
        return in_children(
            lambda number: ["right" if (os.fstat(fd).st_ino == inode) == (number == CHILDREN) else "wrong"]
        )


def iterators(url: str) -> Counter[str]:
    """A child that ends within the products of a `map` leaves them to its parent, which gets all of them."""
    rng = np.random.default_rng(3)
    a = rng.integers(-8, 9, (1200, 1200)).astype(np.float32)  # so that the others are not done when the child ends
    count = 24
    with Client(url) as client:
        ra = client.put(a)
        results = client.map([{"op": "gemm", "a": ra, "b": ra}] * count, in_flight=16)
        found = Counter(told(lambda: [verdict(next(results).numpy(), a @ a)]))
        child = os.fork()
        if not child:
            results.close()
            os._exit(0)
        os.waitpid(child, 0)
        found.update(told(lambda: [verdict(each.numpy(), a @ a) for each in results]))
        return found + Counter({"missing": count - found.total()})


def pool_work(client: Client, number: int) -> list[str]:
    return told(lambda: multiply(client, number))


def pool_fetch(handle: Any, number: int) -> list[str]:
    return told(
        lambda: [verdict(handle.numpy(), matrices(number)[0]), verdict((handle.T).numpy(), matrices(number)[0].T)]
    )


def pool_error(client: Client, _: int) -> list[str]:
    client.array("arr_00000000000000000000000000")
    return ["wrong"]


def executor(url: str, method: str) -> Counter[str]:
    """concurrent.futures over multiprocessing: clients and handles are pickled, errors come back typed."""
    context = multiprocessing.get_context(method)
    found: Counter[str] = Counter()
    with Client(url) as client, concurrent.futures.ProcessPoolExecutor(3, mp_context=context) as pool:
        multiply(client, 0)
        handles = [client.put(matrices(number)[0]) for number in range(6)]
        for each in [pool.submit(pool_work, client, number) for number in range(6)]:
            found.update(each.result())
        for each in [pool.submit(pool_fetch, handle, number) for number, handle in enumerate(handles)]:
            found.update(each.result())
        error = pool.submit(pool_error, client, 0).exception()
        found.update(["right" if type(error).__name__ == "NotFound" and error.status == 404 else repr(error)])
        found.update(multiply(client, 1))
    return found


def joblib(url: str) -> Counter[str]:
    """joblib's processes, which pickle by cloudpickle."""
    from joblib import Parallel, delayed

    found: Counter[str] = Counter()
    with Client(url) as client:
        handles = [client.put(matrices(number)[0]) for number in range(6)]
        for each in Parallel(n_jobs=2)(delayed(pool_work)(client, number) for number in range(6)):
            found.update(each)
        for each in Parallel(n_jobs=2)(delayed(pool_fetch)(handle, number) for number, handle in enumerate(handles)):
            found.update(each)
    return found


def shared_memory(url: str) -> Counter[str]:
    """To a server on a Unix socket: neither its session nor the memory of results is the children's."""
    big = 400
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, (big, big)).astype(np.float32) for _ in range(2))

    with Client(url) as client:
        first = client.gemm(a, b)
        expected = a @ b

        def work(number: int) -> list[str]:
            mine = a * (number + 1)
            said = [verdict(client.gemm(mine, b), mine @ b) for _ in range(ROUNDS)]
            said.append(verdict(first, expected))
            first[:] = number  # a child's own, by now
            said.append(verdict(first, np.full_like(first, number)))
            first[:] = expected
            return said

        found = in_children(work)
        found.update([verdict(first, expected)])
        return found


SCENARIOS = {
    "products": products,
    "products past Python": products_past_python,
    "arrays": arrays,
    "busy parent": busy_parent,
    "events": events,
    "awaited": awaited,
    "awaited while running": awaited_while_running,
    "descriptors": descriptors,
    "iterators": iterators,
    "fork": lambda url: executor(url, "fork"),
    "forkserver": lambda url: executor(url, "forkserver"),
    "spawn": lambda url: executor(url, "spawn"),
    "joblib": joblib,
    "shared memory": shared_memory,
}

if __name__ == "__main__":
    # Functions are found by other processes under the module's name.
    import forked

    print(json.dumps(forked.SCENARIOS[sys.argv[2]](sys.argv[1])), flush=True)

"""Arrays in memory that can be passed on: whose it is, when it serves again, and that what is frozen stays so."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import pickle
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from gemmserve._local import memory
from gemmserve._local.memory import Block, Pool, empty, find, freeze

pytestmark = pytest.mark.skipif(not memory.supported(), reason="memfds with seals are Linux's")

DTYPE = np.dtype(np.float32)


@pytest.fixture
def pool():
    pool = Pool()
    yield pool
    pool.close()


def descriptors_of(inodes) -> int:
    """How many descriptors of those memfds this process has open; other threads may open and close others."""
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # closed meanwhile
            path = f"/proc/self/fd/{name}"
            count += os.readlink(path).startswith("/memfd:") and os.stat(path).st_ino in inodes  # noqa: PTH115, PTH116
    return count


def content(block, count, dtype=DTYPE):
    """What another process would read."""
    return np.frombuffer(os.pread(block.fd, count * dtype.itemsize, 0), dtype)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float16", "complex128"])
def test_an_array_like_numpys(pool, order, dtype) -> None:
    array = empty((30, 20), np.dtype(dtype), order, pool)
    assert (array.shape, array.dtype) == ((30, 20), np.dtype(dtype))
    assert array.flags.f_contiguous == (order == "F")
    assert array.flags.writeable
    assert array.flags.aligned
    array[:] = np.arange(600).reshape(30, 20)
    block, offset = find(array)
    assert offset == 0
    assert np.array_equal(content(block, 600, np.dtype(dtype)), array.ravel(order))
    assert np.array_equal(pickle.loads(pickle.dumps(array)), array)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_empty_shapes(pool, shape) -> None:
    array = empty(shape, DTYPE, "C", pool)
    assert array.shape == shape
    assert find(array) is None
    assert freeze(array, pool).shape == shape


def test_views_are_found_where_they_are(pool) -> None:
    array = empty((8, 16), DTYPE, "C", pool)
    block, _ = find(array)
    assert find(array[2:4]) == (block, 2 * 16 * 4)
    assert find(array[3:4].reshape(16)) == (block, 3 * 16 * 4)
    assert find(array.T) == (block, 0)
    assert find(array[:, ::2]) is None, "not contiguous"
    assert find(array.view(">f4")) is None, "big-endian"
    assert find(array.copy()) is None
    assert find(np.ones(3)) is None
    assert find(np.frombuffer(mmap.mmap(-1, 4096), np.uint8)) is None


def test_memory_serves_again_when_every_view_is_gone(pool) -> None:
    array = empty((64, 64), DTYPE, "C", pool)
    view = array[1:2]
    fd = find(array)[0].fd
    del array
    assert pool.kept_bytes == 0
    assert view.shape == (1, 64)
    del view
    assert pool.kept_bytes == 64 * 64 * 4
    again = empty((64, 63), DTYPE, "C", pool)
    assert find(again)[0].fd == fd
    assert pool.kept_bytes == 0


def test_much_larger_memory_is_not_wasted_on_small_arrays(pool) -> None:
    del_me = empty((1 << 20,), DTYPE, "C", pool)
    del del_me
    small = empty((1 << 10,), DTYPE, "C", pool)
    assert find(small)[0].capacity == 1 << 12


def test_no_more_is_kept_than_allowed() -> None:
    pool = Pool(kept=3 << 12)
    arrays = [empty((1 << 10,), DTYPE, "C", pool) for _ in range(5)]
    memory = {os.fstat(find(array)[0].fd).st_ino for array in arrays}
    assert descriptors_of(memory) == 5
    del arrays
    assert pool.kept_bytes == 3 << 12
    assert descriptors_of(memory) == 3
    pool.close()
    assert pool.kept_bytes == 0


def test_what_is_spare_is_limited_and_what_is_asked_for_is_not() -> None:
    pool = Pool(limit=16 << 12)
    assert pool.spare(17 << 12) is None
    held = [pool.spare(4 << 12) for _ in range(4)]
    assert None not in held
    assert pool.spare(1) is None
    asked = [empty((4096,), DTYPE, "C", pool) for _ in range(4)]
    assert all(find(each) for each in asked)
    assert pool.spare(1) is None
    held.pop()  # gone without having been given back
    again = pool.spare(4 << 12)
    assert again is not None
    address = again.address
    pool.give(again)
    del again
    assert pool.spare(4 << 12).address == address
    del held, asked
    pool.close()


@pytest.mark.parametrize("held", [0, 3, 4])
@pytest.mark.parametrize("pages", [1, 4, 5, 16, 17])
def test_there_is_room_for_what_it_would_have_to_spare(held, pages) -> None:
    pool = Pool(limit=16 << 12)
    used = [pool.spare(4 << 12) for _ in range(4)]
    for block in used[held:]:
        pool.give(block)
    del used[held:]
    block = None
    said = pool.has_room(pages << 12)
    assert said == (pool.spare(pages << 12) is not None) == (pages <= 16 - 4 * held)


def test_what_cannot_fit_leaves_what_waits() -> None:
    pool = Pool(limit=32 << 12)
    held = [pool.spare(4 << 12) for _ in range(8)]
    for block in held[4:]:
        pool.give(block)
    del held[4:], block
    assert pool.spare(24 << 12) is None
    assert pool.kept_bytes == 16 << 12


def test_much_that_comes_back_goes_though_nobody_asks() -> None:
    pool = Pool(kept=16 << 12)
    arrays = [empty((pages << 10,), DTYPE, "C", pool) for pages in (1, 16) for _ in range(16)]
    inodes = {os.fstat(find(array)[0].fd).st_ino for array in arrays}
    while arrays:
        arrays.pop(0)
    assert descriptors_of(inodes) == 1


def test_what_somebody_asked_for_is_not_on_the_clients_account() -> None:
    pool = Pool(limit=4 << 12)
    pool.give(pool.spare(4 << 12))
    asked = pool.take(4 << 12)
    assert pool.spare(4 << 12) is not None, "of which there is none yet"
    pool.give(asked)
    del asked
    held = pool.spare(4 << 12)
    assert held is not None
    assert not pool.has_room(1), "now it is"


def test_room_is_of_whole_pages() -> None:
    pool = Pool(limit=(4 << 12) + 100)
    assert not pool.has_room((4 << 12) + 50)
    assert pool.spare((4 << 12) + 50) is None


@pytest.mark.parametrize("what", ["filled", "given back"])
def test_others_do_not_wait_while_pages_are(pool, what, monkeypatch) -> None:
    """An event loop, for one, asks whether there is room meanwhile."""
    libc = memory._libc()
    stands, goes = threading.Event(), threading.Event()

    def stand(call):
        def standing(*arguments):
            if threading.current_thread() is thread:
                stands.set()
                assert goes.wait(60)
            return call(*arguments)

        return standing

    pool.kept = 3 << 12
    pool.give(pool.spare(3 << 12))
    pool.give(pool.spare(1 << 12))
    slow = {"filled": "madvise", "given back": "munmap"}[what]
    calls = {name: getattr(libc, name) for name in ("mmap", "munmap", "madvise")}
    thread = threading.Thread(target=lambda: pool.spare(8 << 12))
    monkeypatch.setattr(memory, "_libc", lambda: SimpleNamespace(**{**calls, slow: stand(calls[slow])}))
    thread.start()
    assert stands.wait(60)
    assert not pool._lock.locked()
    assert pool.has_room(1 << 12)
    assert pool.spare(1 << 12) is not None
    assert pool.kept_bytes == 0
    goes.set()
    thread.join()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM])
def test_pages_that_cannot_be_filled_at_once(monkeypatch, code) -> None:
    libc = memory._libc()

    def madvise(*_):
        ctypes.set_errno(code)
        return -1

    fake = SimpleNamespace(mmap=libc.mmap, munmap=libc.munmap, madvise=madvise)
    monkeypatch.setattr(memory, "_libc", lambda: fake)
    if code == errno.EINVAL:  # Linux before 5.14
        block = Block(5 << 12)
        assert os.fstat(block.fd).st_blocks * 512 == 5 << 12
        return
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(OSError, match="madvise"):
        Block(5 << 12)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= opened  # noqa: PTH208


def test_givers_and_askers_do_not_meet_an_empty_queue() -> None:
    pool = Pool(kept=0)
    failures, stop = [], threading.Event()
    before = sys.getswitchinterval()

    def go(work) -> None:
        while not stop.is_set():
            try:
                work()
            except Exception as error:
                failures.append(error)

    threads = [
        threading.Thread(target=go, args=(work,))
        for work in (*[lambda: pool.give(pool.take(1))] * 3, lambda: pool.kept_bytes, lambda: pool.has_room(1))
    ]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        stop.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert failures == []


def test_many_arrays_do_not_take_all_descriptors() -> None:
    pool = Pool()
    held = [pool.spare(1) for _ in range(memory.MAX_BLOCKS)]
    assert None not in held
    assert not pool.has_room(1)
    assert pool.spare(1) is None
    asked = [empty((1024,), DTYPE, "C", pool) for _ in range(4)]
    pool.give(held.pop())
    assert pool.has_room(1 << 20)
    larger = pool.spare(1 << 20)
    assert larger is not None, "what waits makes way"
    del asked
    assert pool.kept_bytes == 0, "all that there may be are in use"
    del larger


def test_what_waits_makes_way_for_another_size() -> None:
    pool = Pool(limit=16 << 12)
    for block in [pool.spare(4 << 12) for _ in range(4)]:
        pool.give(block)
    del block
    assert pool.kept_bytes == 16 << 12
    assert pool.spare(1 << 12).capacity == 1 << 12
    assert pool.kept_bytes == 12 << 12


def test_less_is_kept_than_may_be_in_use() -> None:
    pool = Pool(limit=16 << 12, kept=8 << 12)
    held = [pool.spare(4 << 12) for _ in range(4)]
    assert None not in held
    for block in held:
        pool.give(block)
    del block, held
    assert pool.kept_bytes == 8 << 12
    assert len(pool._own) == 2
    first, second = (pool.spare(8 << 12) for _ in range(2))
    pool.give(first)
    assert pool.kept_bytes == 8 << 12, "the larger one, which came last"
    assert pool.spare(8 << 12) is first
    del first, second


def test_arrays_outlive_a_closed_pool() -> None:
    pool = Pool()
    array = empty((100,), DTYPE, "C", pool)
    array[:] = 7
    pool.close()
    del pool
    assert np.all(array == 7)
    del array


def test_frozen_memory_cannot_be_changed_by_anybody(pool) -> None:
    frozen = freeze(np.arange(1000, dtype=DTYPE), pool)
    block, _ = find(frozen)
    assert np.array_equal(frozen, np.arange(1000))
    with pytest.raises(ValueError, match="read-only"):
        frozen[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        frozen.flags.writeable = True
    fd = os.open(f"/proc/self/fd/{block.fd}", os.O_RDWR)
    for change in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, 1 << 20),
        lambda: mmap.mmap(fd, 4096),
    ):
        with pytest.raises(PermissionError):
            change()
    os.close(fd)
    assert freeze(frozen, pool) is frozen
    assert freeze(frozen[3:5], pool).tolist() == [3, 4]
    assert find(frozen[4:]) == (block, 16)


@pytest.mark.parametrize("layout", ["C", "F", "strided", "big-endian", "0-d"])
def test_freezing_copies_ordinary_arrays(pool, layout) -> None:
    base = np.random.default_rng(0).standard_normal((20, 30)).astype(DTYPE)
    array = {
        "C": base, "F": np.asfortranarray(base), "strided": base[::2, ::-1], "big-endian": base.astype(">f4"),
        "0-d": base[0, 0],
    }[layout]  # fmt: skip
    array = np.asarray(array)
    frozen = freeze(array, pool)
    np.testing.assert_array_equal(frozen, array)
    assert frozen.dtype == DTYPE
    assert frozen.flags.f_contiguous == (layout in {"F", "0-d"})
    if array.flags.writeable and layout != "0-d":
        array[...] = 0
        assert frozen.any()


def test_freezing_takes_over_what_can_be_passed_on(pool) -> None:
    array = empty((1000,), DTYPE, "C", pool)
    array[:] = 5
    view = array[10:]
    block, _ = find(array)
    inode = os.fstat(block.fd).st_ino
    frozen = freeze(array, pool)
    assert os.fstat(find(frozen)[0].fd).st_ino == inode, "the same memory"
    assert np.all(array == 5)
    array[0], view[0] = 1, 2  # a private copy from here on
    assert np.all(frozen == 5)
    assert np.all(content(find(frozen)[0], 1000) == 5)
    assert (array[0], array[10]) == (1, 2)
    assert find(array) is find(view) is None, "what is written there is not seen through the descriptor"
    del array, view, frozen, block
    assert pool.kept_bytes == 0, "sealed memory serves nothing else"


def test_freezing_an_array_that_does_not_begin_its_memory_copies(pool) -> None:
    array = empty((2, 1000), DTYPE, "C", pool)
    array[:] = 5
    frozen = freeze(array[1], pool)
    array[:] = 6
    assert np.all(frozen == 5)
    assert find(array) is not None


def test_memory_that_another_process_may_look_at_does_not_serve_again(pool) -> None:
    array = empty((1000,), DTYPE, "C", pool)
    array[:] = 5
    memory._forking()
    memory._forked()
    del array
    assert pool.kept_bytes == 0


def test_a_fork_is_noticed() -> None:
    before = memory._forks
    pid = os.fork()
    if pid == 0:
        os._exit(0 if memory._forks == before + 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert memory._forks == before + 1


def test_what_waited_when_a_process_forked_serves_nobody(pool) -> None:
    array = empty((1000,), DTYPE, "C", pool)
    del array
    assert pool.kept_bytes
    memory._forking()
    memory._forked()
    assert pool.kept_bytes == 0


def test_finalizers_may_run_while_the_pool_is_busy(pool) -> None:
    array = empty((1000,), DTYPE, "C", pool)
    with pool._lock:
        del array  # its finalizer runs here, in the thread that has the lock
    assert pool.kept_bytes


def test_many_threads(pool) -> None:
    failures = []

    def work(number: int) -> None:
        for turn in range(200):
            array = empty((256,), DTYPE, "C", pool)
            array[:] = number * 1000 + turn
            if not np.all(array == number * 1000 + turn):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_no_more_memory(pool, monkeypatch) -> None:
    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(memory.os, "memfd_create", refuse)
    with pytest.raises(OSError, match="Too many"):
        Block(4096)
    gc.collect()  # a half-made block has nothing to close

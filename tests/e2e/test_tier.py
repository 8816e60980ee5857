"""The real server with a tier: more arrays than it keeps, over S3's protocol, and killed in the middle of it."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest
from live_server import LiveServer, until
from s3_stand_in import BUCKET, S3StandIn

import gemmserve

pytest.importorskip("obstore", reason="the extra tier is not installed")

SIDE = 256
NBYTES = SIDE * SIDE * 8
ARRAYS = 12


def matrix(seed):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((SIDE, SIDE)) + 1j * rng.standard_normal((SIDE, SIDE))).astype("c8")


def environment(s3, **further):
    return {
        **s3.environment,
        "GEMMSERVE_TIER": f"s3://{BUCKET}/prefix",
        "GEMMSERVE_MAX_STORE_BYTES": str(4 * NBYTES),
        "GEMMSERVE_RECYCLE_BYTES": "0",
        **further,
    }


def test_three_times_what_the_store_holds(tmp_path):
    with S3StandIn() as s3, LiveServer(data_dir=tmp_path / "data", environment=environment(s3)) as server:
        with gemmserve.Client(server.url) as client:
            handles = [client.put(matrix(seed)) for seed in range(ARRAYS)]
            products = [client.gemm(a, b) for a, b in zip(handles, reversed(handles), strict=True)]
            for seed, (handle, product) in enumerate(zip(handles, products, strict=True)):
                np.testing.assert_array_equal(handle.numpy(), matrix(seed))
                a, b = matrix(seed).astype("c16"), matrix(ARRAYS - 1 - seed).astype("c16")
                bound = 2 * (SIDE + 2) * np.finfo("f4").eps * (np.abs(a) @ np.abs(b))
                assert (np.abs(product.numpy() - a @ b) <= bound).all()
            usage = client.usage()
        assert s3.objects
        assert s3.environment["AWS_SECRET_ACCESS_KEY"] not in server.text
    assert usage is not None


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["process", "replicated"])
def test_killed_at_any_moment_nothing_is_lost(tmp_path, durability):
    with (
        S3StandIn() as s3,
        LiveServer(data_dir=tmp_path / "data", environment=environment(s3, GEMMSERVE_DURABILITY=durability)) as server,
    ):
        kept: dict[str, int] = {}
        stop = threading.Event()

        def store() -> None:
            seed = 0
            with gemmserve.Client(server.url) as client:
                while not stop.is_set():
                    try:
                        kept[client.put(matrix(seed)).id] = seed
                        first = next(iter(kept))
                        np.testing.assert_array_equal(client.array(first).numpy(), matrix(kept[first]))
                    except gemmserve.GemmserveError:
                        stop.wait(0.05)
                    seed += 1

        thread = threading.Thread(target=store)
        thread.start()
        try:
            for _ in range(2):
                before = len(kept)
                until(lambda before=before: len(kept) >= before + 6 or not thread.is_alive())
                front = server.front()
                front.send_signal(signal.SIGKILL)
                front.wait(60)
        finally:
            stop.set()
            thread.join(120)
        with gemmserve.Client(server.url) as client:
            for array_id, seed in kept.items():
                np.testing.assert_array_equal(client.array(array_id).numpy(), matrix(seed))
    assert len(kept) >= 12

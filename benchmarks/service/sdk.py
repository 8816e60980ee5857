"""Our client's driver. `via`: "sdk" (TCP), "sdk shm" (the Unix socket, arrays by shared memory), "sdk shm in place"
(the same with operands in memory that the client gave: it copies nothing), "sdk shm frozen" (operands that were frozen:
nobody copies them)."""

from __future__ import annotations

from urllib.parse import quote

import numpy as np
from benchmarks.service import driver, exchanges

from gemmserve import Client


def client(via, command):
    """A client, or LookupError where it has no such way."""
    if via == "sdk":
        host, port = command["address"]
        return Client(f"http://{host}:{port}", progress=False)
    try:
        return Client(f"http+unix://{quote(command['path'], safe='')}", progress=False)
    except Exception as error:
        raise LookupError(f"not available: {error}") from None


def run(command):
    """{durations_ns}. Raises LookupError, GemmserveError, AssertionError."""
    work = exchanges.Work(command["operation"], command["n"])
    with client(command["via"], command) as connected:
        measured = upload if work.operation == "upload" else product
        call, check, after = measured(connected, work, command)
        return {"durations_ns": driver.timed(call, check, command["seconds"], command.get("most"), after)}


def product(connected, work, command):
    """NumPy in, NumPy out."""
    arrays = exchanges.operands(work)
    given = [arrays[name] for name in "abc" if name in arrays]
    if command["via"] in PLACES:
        given = [placed(connected, array, PLACES[command["via"]]) for array in given]
    options = {"beta": 1} if "c" in arrays else {}

    def call():
        return connected.gemm(*given, **options)

    def check(result):
        assert np.array_equal(result, arrays["d"])

    return call, check, None


def upload(connected, work, _command):
    """An array to the server; deleted before the next one."""
    array = np.resize(exchanges.operands(work)["a"], work.n)

    def call():
        return connected.put(array)

    def check(remote):
        assert np.array_equal(remote.numpy(), array)

    def after(remote):
        remote.delete()

    return call, check, after


PLACES = {"sdk shm in place": "empty", "sdk shm frozen": "freeze"}
"""What the client makes the operands with."""


def placed(connected, array, name):
    """The same in memory of the client's. Raises LookupError."""
    if not hasattr(connected, name):
        raise LookupError(f"not available: the client has no {name}")
    if name == "freeze":
        return connected.freeze(array)
    copy = connected.empty(array.shape, array.dtype)
    copy[...] = array
    return copy


if __name__ == "__main__":
    driver.serve(run)

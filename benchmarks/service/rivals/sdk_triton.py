"""tritonclient's driver, for the wheel's environment. `via`: "sdk" (bytes in the body), "sdk shm" (system shared
memory: operands are copied into regions that are registered once, the result is a view of another one), "sdk shm in
place" (the same with operands that lie there already)."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import driver
import numpy as np
from tritonclient import http
from tritonclient.utils import shared_memory

NAMES = {"echo": "AC", "axpy": "ABC", "product": "AB"}


def operands(operation, n):
    """As benchmarks/service/exchanges.py makes them."""
    rng = np.random.default_rng(n)

    def integers(*shape):
        return rng.integers(-8, 9, (*shape, 2), np.int8).astype(np.float32).view(np.complex64)[..., 0]

    if operation == "product":
        a, b = integers(n, n), integers(n, n)
        return {"A": a, "B": b}, a @ b
    a, c = integers(n, 1), integers(n, 1)
    if operation == "echo":
        return {"A": a, "C": c}, a
    b = np.full((1, 1), 2 - 1j, np.complex64)
    return {"A": a, "B": b, "C": c}, a * b[0, 0] + c


def pairs(array, operation):
    """Complex numbers as pairs of FP32."""
    return array.view(np.float32).reshape((*array.shape, 2) if operation == "product" else -1)


def over_the_body(client, operation, arrays, d):
    def call():
        inputs = []
        for name, array in arrays.items():
            data = pairs(array, operation)
            inputs.append(http.InferInput(name, list(data.shape), "FP32"))
            inputs[-1].set_data_from_numpy(data, binary_data=True)
        outputs = [http.InferRequestedOutput("D", binary_data=True)]
        result = client.infer(operation, inputs, outputs=outputs).as_numpy("D")
        return result.reshape(-1).view(np.complex64).reshape(d.shape)

    return call


def over_shared_memory(client, operation, arrays, d, *, copying):
    regions, inputs = [], []
    for name, nbytes in [*((name, array.nbytes) for name, array in arrays.items()), ("D", d.nbytes)]:
        key = f"/gemmserve-bench-{os.getpid()}-{name}"
        region = shared_memory.create_shared_memory_region(name, key, nbytes)
        client.register_system_shared_memory(name, key, nbytes)
        regions.append(region)
        if name == "D":
            break
        inputs.append(http.InferInput(name, list(pairs(arrays[name], operation).shape), "FP32"))
        inputs[-1].set_shared_memory(name, nbytes)
    output = http.InferRequestedOutput("D")
    output.set_shared_memory("D", d.nbytes)
    shape = list(pairs(d, operation).shape)

    def fill():
        for region, array in zip(regions, arrays.values(), strict=False):
            shared_memory.set_shared_memory_region(region, [pairs(array, operation)])

    def call():
        if copying:
            fill()
        client.infer(operation, inputs, outputs=[output])
        result = shared_memory.get_contents_as_numpy(regions[-1], np.float32, shape)
        return result.reshape(-1).view(np.complex64).reshape(d.shape)

    def tidy_up():
        client.unregister_system_shared_memory()
        for region in regions:
            shared_memory.destroy_shared_memory_region(region)

    fill()
    return call, tidy_up


def run(command):
    operation = command["operation"]
    host, port = command["address"]
    arrays, d = operands(operation, command["n"])
    client = http.InferenceServerClient(f"{host}:{port}", connection_timeout=300, network_timeout=300)

    def check(result):
        assert np.array_equal(result, d)

    try:
        if command["via"] == "sdk":
            call = over_the_body(client, operation, arrays, d)
            return {"durations_ns": driver.timed(call, check, command["seconds"], command.get("most"))}
        call, tidy_up = over_shared_memory(client, operation, arrays, d, copying=command["via"] == "sdk shm")
        try:
            return {"durations_ns": driver.timed(call, check, command["seconds"], command.get("most"))}
        finally:
            tidy_up()
    finally:
        client.close()


if __name__ == "__main__":
    driver.serve(run)

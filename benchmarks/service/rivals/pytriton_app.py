"""PyTriton: the same models as functions in this process. `python pytriton_app.py PORT FOLDER`."""

import sys

import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def single(function):
    """Without batches: requests come one at a time."""

    def call(requests):
        return [{"D": function(**{name: request[name] for name in request})} for request in requests]

    return call


def echo(A, C):  # noqa: ARG001 (models get every input)
    return A


def axpy(A, B, C):
    a, b, c = (each.view(np.complex64) for each in (A, B, C))
    d = a * b[0]
    d += c
    return d.view(np.float32)


def product(A, B):
    a, b = (each.view(np.complex64)[..., 0] for each in (A, B))
    return (a @ b)[..., None].view(np.float32)


if __name__ == "__main__":
    port = int(sys.argv[1])
    config = TritonConfig(
        http_port=port,
        http_address="127.0.0.1",
        allow_grpc=True,
        grpc_address="127.0.0.1",
        grpc_port=port + 1,
        allow_metrics=False,
    )
    with Triton(config=config, workspace=sys.argv[2]) as triton:
        for function, names in ((echo, "AC"), (axpy, "ABC"), (product, "AB")):
            shape = (-1, -1, 2) if function is product else (-1,)
            triton.bind(
                model_name=function.__name__,
                infer_func=single(function),
                inputs=[Tensor(name=name, dtype=np.float32, shape=shape) for name in names],
                outputs=[Tensor(name="D", dtype=np.float32, shape=shape)],
                config=ModelConfig(batching=False),
            )
        triton.serve()

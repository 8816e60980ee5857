"""The bias gradient of a layer in front of a linear map: a product that is only ever summed.

With z = x + bias and y = z W, the gradient of the loss in the bias is the sum over the batch and over the tokens of
dL/dy W^T. The sum runs over the rows of every product and over the batch, inside the kernel: dL/dy W^T itself is never
stored. The truth uses linearity, in float64: sum first, then one small product.

    python examples/bias_gradient.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import sys

import numpy as np
from truth import check, gamma

from gemmserve import Client


def main(client: Client, batch: int = 32, tokens: int = 128, width: int = 256, outputs: int = 384) -> np.ndarray:
    """Returns the bias gradient, shape (width,). Raises TruthError when it is wrong."""
    rng = np.random.default_rng(5)
    grad_y = rng.standard_normal((batch, tokens, outputs)).astype(np.float32)
    weight = (rng.standard_normal((width, outputs)) / np.sqrt(outputs)).astype(np.float32)

    gradient = client.gemm_reduce(grad_y, weight, trans_b="T", reduce="sum", axis=["m", "batch"])

    print(f"bias gradient: {batch} x {tokens} tokens, {outputs} -> {width}; sum over m and batch")
    truth = np.einsum("bto->o", grad_y.astype(np.float64)) @ weight.T.astype(np.float64)
    # Relative to the sum of magnitudes, entry by entry; the terms are outputs * tokens * batch products.
    magnitudes = np.einsum("bto->o", np.abs(grad_y, dtype=np.float64)) @ np.abs(weight.T)
    check(
        "entries, relative to their terms",
        float(np.max(np.abs(gradient - truth) / magnitudes)),
        gamma(outputs + batch * tokens, "float32"),
    )
    return gradient


if __name__ == "__main__":
    with Client(*sys.argv[1:2]) as connected:
        main(connected)

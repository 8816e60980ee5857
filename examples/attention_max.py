"""Attention with a maximum instead of a softmax: every query takes the value of its best key.

Scores are q k^T / sqrt(width); `max` and `argmax` over the keys come out of one pass, and the matrix of scores is
never stored. The truth is NumPy in float64.

    python examples/attention_max.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import sys

import numpy as np
from truth import check, gamma

from gemmserve import Client


def main(client: Client, heads: int = 8, queries: int = 256, keys: int = 512, width: int = 64) -> np.ndarray:
    """Returns the attended values, shape (heads, queries, width). Raises TruthError when a score or choice is wrong."""
    rng = np.random.default_rng(13)
    q, k, v = (rng.standard_normal((heads, rows, width)).astype(np.float32) for rows in (queries, keys, keys))

    best = client.gemm_reduce(q, k, trans_b="T", alpha=width**-0.5, reduce=["max", "argmax"], axis="n")
    attended = np.take_along_axis(v, best["argmax"][..., None], axis=1)

    print(f"attention with a max: {heads} heads, {queries} queries, {keys} keys, width {width}")
    scores = q.astype(np.float64) @ k.swapaxes(1, 2) / np.sqrt(width)
    magnitudes = np.abs(q, dtype=np.float64) @ np.abs(k).swapaxes(1, 2) / np.sqrt(width)
    bound = gamma(width, "float32") * float(magnitudes.max())
    check("best scores", float(np.abs(best["max"] - scores.max(-1)).max()), bound)
    # Where two keys score the same within rounding, either is right: what the choice lost must be rounding.
    chosen = np.take_along_axis(scores, best["argmax"][..., None], axis=-1)[..., 0]
    check("score lost by the chosen key", float((scores.max(-1) - chosen).max()), 2 * bound)
    return attended


if __name__ == "__main__":
    with Client(*sys.argv[1:2]) as connected:
        main(connected)

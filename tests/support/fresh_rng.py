"""A random generator with another seed at every call, for what has to hold for whatever is drawn."""

from __future__ import annotations

import secrets

import numpy as np


def fresh_rng() -> np.random.Generator:
    """Return a generator, and print how to have the same one again: pytest shows it of a test that failed."""
    seed = secrets.randbits(64)
    print(f"np.random.default_rng({seed})")
    return np.random.default_rng(seed)

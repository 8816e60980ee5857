import numpy as np

from cupy._array import ndarray


class Generator:
    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def standard_normal(self, size=None, dtype=np.float64, out=None):
        return _on_device(self._rng.standard_normal(size, dtype))

    def random(self, size=None, dtype=np.float64, out=None):
        return _on_device(self._rng.random(size, dtype))

    def integers(self, low, high=None, size=None, dtype=np.int64, endpoint=False):
        return _on_device(self._rng.integers(low, high, size, dtype, endpoint))


def _on_device(values):
    made = ndarray(values.shape, values.dtype)
    made._n[...] = values
    return made


def default_rng(seed=None):
    return Generator(seed)


def standard_normal(size=None, dtype=float):
    return _on_device(np.random.default_rng().standard_normal(size, dtype))

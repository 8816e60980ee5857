import numpy as np

from cupy._array import plain, wrap


def norm(x, ord=None, axis=None, keepdims=False):
    return wrap(np.linalg.norm(plain(x), ord, axis, keepdims))


def solve(a, b):
    """Solve stacks with equal leading axes alone, as CuPy does; a singular matrix is noticed only if asked for."""
    assert a.shape[:-1] == b.shape[:-1]
    return wrap(_checked(np.linalg.solve, plain(a), plain(b)))


def cholesky(a):
    return wrap(_checked(np.linalg.cholesky, plain(a)))


def _checked(function, *arrays):
    import cupyx

    try:
        return function(*arrays)
    except np.linalg.LinAlgError:
        if cupyx.state == "raise":
            raise
        return np.full(arrays[-1].shape, np.nan, arrays[-1].dtype)

"""An interpreter of a contraction's plan, on NumPy arrays: each step as the server's documentation has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemmserve._contraction.equation import symbol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmserve._contraction.plan import Plan
    from gemmserve._handles.view import View

    Array = np.ndarray[Any, Any]


def run(plan: Plan, operands: Sequence[Array]) -> Array:
    """Return the result; `operands` in memory are what the plan was told, or are laid as it wants them."""
    values: list[Array] = [
        np.ascontiguousarray(x.transpose(plan.laid[number].axes).astype(plan.laid[number].dtype)).reshape(-1)
        if number in plan.laid
        else x
        for number, x in enumerate(operands)
    ]
    for step in plan.steps:
        found = {name: seen(values[source], view) for name, (source, view) in step.operands.items()}
        made = apply(step.op, found, step.axes, step.dtype)
        assert made.dtype == step.dtype
        assert made.shape == step.shape
        values.append(np.ascontiguousarray(made).reshape(-1))
    source, view = plan.result
    return seen(values[source], view)


def apply(op: str, operands: dict[str, Array], axes: Sequence[int], dtype: Any) -> Array:
    a, b = operands["a"], operands.get("b")
    if op == "sum":
        return np.asarray(a.sum(tuple(axes)))
    if op == "add":
        return a.astype(dtype)
    assert b is not None
    if op == "multiply":
        return np.asarray(a * b)
    assert op == "gemm"
    assert min(a.ndim, b.ndim) >= 2
    return np.asarray(a @ b)


def seen(base: Array, view: View) -> Array:
    """The view's elements of a flat base; every one that it reaches is inside."""
    assert len(view.shape) == len(view.strides) <= 32
    flat = base.reshape(-1)
    if all(view.shape):
        reach = [(size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)]
        assert view.offset + sum(min(each, 0) for each in reach) >= 0
        assert view.offset + sum(max(each, 0) for each in reach) < flat.size
        array = np.lib.stride_tricks.as_strided(
            flat[view.offset :], view.shape, [stride * flat.itemsize for stride in view.strides]
        )
    else:
        array = np.empty(view.shape, flat.dtype)
    if view.part is not None:
        array = getattr(array, view.part)
    return array.conj() if view.conj else array


def ring(count: int, *, seed: int) -> tuple[list[str], dict[str, int]]:
    """Return the terms of a closed network of so many operands, each with a label of its neighbours and up to two that
    join it to others; and the sizes of all labels.
    """
    rng = np.random.default_rng(seed)
    terms = [[f"{n}", f"{(n + 1) % count}"] if count > 1 else ["0"] for n in range(count)]
    for chord in range(count // 2):
        a, b = rng.choice(count, 2, replace=False)
        terms[a].append(f"chord{chord}")
        terms[b].append(f"chord{chord}")
    names = {label: symbol(n) for n, label in enumerate(dict.fromkeys(label for term in terms for label in term))}
    found = ["".join(dict.fromkeys(names[label] for label in term)) for term in terms]
    return found, {label: int(rng.integers(2, 6)) for label in names.values()}

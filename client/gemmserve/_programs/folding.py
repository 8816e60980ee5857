"""Scaled sums of products, `2 * (a @ b) + 3 * c`, as one gemm with alpha and beta. Pure: steps in, steps out.

A value is folded into the step that uses it where no other does and it is not kept, where it has shape, dtype and order
of that step's result, and where no factor is zero: 0 * x is NaN for some x, and a gemm does not look.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from gemmserve.wire import decode_scalar, encode_scalar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gemmserve._handles.view import Base

    Step = dict[str, Any]
    Bases = Mapping[str, Mapping[str, Base | None]]

_OPERANDS: Final = ("a", "b", "c")


def folded(
    steps: Sequence[Step], kept: Collection[str], made: Mapping[str, Base | None], operands: Bases
) -> list[Step]:
    """Return the steps with the same results, fewer where products are scaled or summed.

    `kept`: results that become arrays though steps use them; `made` and `operands`: what is known of results, by name,
    and of steps' operands, by step and name.
    """
    used = Counter(name for step in steps for name in _references(step))
    bases = {step: dict(seen) for step, seen in operands.items()}
    found: dict[str, Step] = {}

    def only_here(operand: Any, user: Step) -> Step | None:
        """Return the step whose result that is, where no other step sees it and it could stand for the user's."""
        if not isinstance(operand, str) or not operand.startswith("$"):
            return None
        name = operand[1:]
        alike = made.get(name) is not None and made[name] == made[user["id"]]
        return found.get(name) if alike and used[operand] == 1 and name not in kept else None

    for step in steps:
        current = step
        if step["op"] == "add" and "gamma" not in step and "dtype" not in step and "order" not in step:
            current = _with_inner(step, only_here, found, bases)
        found[current["id"]] = current
    return list(found.values())


def _references(step: Step) -> list[str]:
    given = [step[operand] for operand in _OPERANDS if operand in step]
    return [each if isinstance(each, str) else each["id"] for each in given]


def _with_inner(step: Step, only_here: Any, found: dict[str, Step], bases: dict[str, dict[str, Any]]) -> Step:
    """An addition with what it adds folded into it, or itself into a product; what is folded leaves `found`."""
    step = dict(step)
    for operand, factor in (("a", "alpha"), ("b", "beta")):
        inner = only_here(step.get(operand), step)
        plain = inner is not None and inner["op"] == "add" and not {"b", "gamma", "dtype", "order"} & inner.keys()
        scale = _times(step.get(factor, 1), inner.get("alpha", 1)) if plain else None
        if scale is not None:
            step[operand], step[factor] = inner["a"], scale
            bases[step["id"]][operand] = bases[inner["id"]]["a"]
            del found[inner["id"]]
    for operand, factor, other, scale in (("a", "alpha", "b", "beta"), ("b", "beta", "a", "alpha")):
        product = only_here(step.get(operand), step)
        if product is None or product["op"] != "gemm" or product.get("layout", "interleaved") != "interleaved":
            continue
        alpha = _times(step.get(factor, 1), product.get("alpha", 1))
        if alpha is None:
            continue
        if other not in step:
            merged = {**product, "alpha": alpha}
            if "c" in product:
                beta = _times(step.get(factor, 1), product.get("beta", 1))  # as every gemm with a c
                if beta is None:
                    continue
                merged["beta"] = beta
        else:
            seen, beta = bases[step["id"]][other], _times(step.get(scale, 1), 1)
            if "c" in product or beta is None or seen is None or len(seen.shape) < 2:
                continue
            merged = {**product, "alpha": alpha, "c": step[other], "beta": beta}
        del found[product["id"]]
        return {**merged, "id": step["id"]}
    return step


def _times(one: Any, other: Any) -> Any:
    """Return the product of two factors as JSON; None where it is zero, or a float32 would not be that number."""
    number = complex(decode_scalar(one)) * complex(decode_scalar(other))
    normal = all(not part or 2.0**-126 <= abs(part) < 2.0**127 for part in (number.real, number.imag))
    return encode_scalar(number) if number and normal else None

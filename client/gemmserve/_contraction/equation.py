"""Equations of `einsum`, as NumPy reads them: which axis of which operand has which label, and how long each label is.

Labels are single characters, those of the caller's equation replaced by "a", "b", ... in the order in which they come,
so that optimizers of paths (opt_einsum, cotengra) may be asked with them.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmserve import _errors

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

ELLIPSIS: Final = "..."
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Equation:
    """A contraction of operands whose shapes are known."""

    inputs: tuple[str, ...]
    """The labels of each operand's axes, one character an axis; a label that comes twice is a diagonal."""
    output: str
    sizes: Mapping[str, int]
    """Length of each label. An axis of length 1 of a longer label broadcasts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return tuple(self.sizes[label] for label in self.output)


def split(arguments: Sequence[Any]) -> tuple[str | list[list[Hashable]], list[Any]]:
    """Return (equation, operands) of einsum's arguments, of which the equation comes first or in interleaved lists.

    The second form, `einsum(a, [0, 1], b, [1, 2], [0, 2])`, gives a list of label lists, the output's last if there is
    one. Raises ParameterInvalid.
    """
    if not arguments:
        raise _invalid("einsum takes an equation and its operands")
    if isinstance(arguments[0], str):
        return arguments[0], list(arguments[1:])
    operands, lists = list(arguments[0::2]), list(arguments[1::2])
    output = [operands.pop()] if len(operands) > len(lists) else []
    try:
        return [list(each) for each in (*lists, *output)], operands
    except TypeError:
        raise _invalid("einsum takes an equation and operands, or operands each followed by a list of labels") from None


def parse(equation: str | Sequence[Sequence[Hashable]], shapes: Sequence[Sequence[int]]) -> Equation:
    """Return the equation of operands of these shapes. Raises ParameterInvalid, ShapeMismatch."""
    terms, output = _read(equation) if isinstance(equation, str) else _read_lists(equation, len(shapes))
    if len(terms) != len(shapes) or not shapes:
        raise _invalid(f"the equation names {len(terms)} operands, and {len(shapes)} are given")
    full = [_expanded(number, term, len(shape)) for number, (term, shape) in enumerate(zip(terms, shapes, strict=True))]
    dots = max((label for term in full for label in term if isinstance(label, _Dot)), default=None)
    # NumPy's rule for the output that is not given: the broadcast axes, then labels that come once, sorted.
    broadcast = [] if dots is None else [_Dot(depth) for depth in range(dots.depth, 0, -1)]
    if output is None:
        counts = Counter(label for term in full for label in term if not isinstance(label, _Dot))
        try:
            result: list[Any] = broadcast + sorted(label for label, count in counts.items() if count == 1)
        except TypeError:
            raise _invalid("the labels have no order between them: the output has to be given") from None
    elif ELLIPSIS in output:
        at = output.index(ELLIPSIS)
        result = [*output[:at], *broadcast, *output[at + 1 :]]
    elif broadcast:
        raise _invalid(
            f"an operand has {len(broadcast)} more axes than labels, and the output has no ellipsis for them"
        )
    else:
        result = list(output)
    return _labelled(full, result, shapes)


def of_tensordot(a: Sequence[int], b: Sequence[int], axes: Any) -> list[list[int]]:
    """Return the labels of numpy.tensordot for operands of these shapes: those of a, of b, and of the result.

    `axes`: how many of a's last and b's first axes are summed, or two sequences of axes, in pairs. Raises
    ParameterInvalid, ShapeMismatch.
    """
    wrong = _errors.ParameterInvalid(
        f"axes is a number of axes, or two sequences of axes of a ({len(a)} dimensions) and of b ({len(b)}), not "
        f"{axes!r:.200}",
        problem={"parameter": "axes"},
    )
    try:
        if isinstance(axes, int):
            one, other = [*range(-axes, 0)], [*range(axes)]
        else:
            one, other = ([each] if isinstance(each, int) else [*map(operator.index, each)] for each in axes)
        mine = [range(len(a))[axis] for axis in one]
        others = [range(len(b))[axis] for axis in other]
    except (TypeError, ValueError, IndexError):
        raise wrong from None
    negative = isinstance(axes, int) and axes < 0
    if negative or len(mine) != len(others) or len({*mine}) < len(mine) or len({*others}) < len(others):
        raise wrong
    for p, q in zip(mine, others, strict=True):
        if a[p] != b[q]:
            raise _errors.ShapeMismatch(f"axis {p} of a has {a[p]} elements, and axis {q} of b {b[q]}")
    left = [*range(len(a))]
    right = [mine[others.index(axis)] if axis in others else len(a) + axis for axis in range(len(b))]
    result = [label for label in left if label not in mine] + [label for label in right if label >= len(a)]
    return [left, right, result]


@dataclass(frozen=True, order=True)
class _Dot:
    """An axis that an ellipsis stands for, counted from the last: broadcasting aligns them there."""

    depth: int


def _read(equation: str) -> tuple[list[list[Any]], list[Any] | None]:
    text = "".join(equation.split())
    inputs, arrow, output = text.partition("->")
    terms = [_characters(term) for term in inputs.split(",")]
    return terms, _characters(output) if arrow else None


def _characters(term: str) -> list[Any]:
    labels: list[Any] = list(term.replace(ELLIPSIS, "\0"))
    for wrong in (".", ",", "-", ">"):
        if wrong in labels:
            raise _invalid(f"{wrong!r} is no label in {term!r}")
    return [ELLIPSIS if label == "\0" else label for label in labels]


def _read_lists(lists: Sequence[Sequence[Hashable]], operands: int) -> tuple[list[list[Any]], list[Any] | None]:
    terms = [[ELLIPSIS if label is Ellipsis else label for label in each] for each in lists]
    return (terms[:-1], terms[-1]) if len(terms) == operands + 1 else (terms, None)


def _expanded(number: int, term: list[Any], ndim: int) -> list[Any]:
    """The labels of an operand's axes, those of its ellipsis as _Dot. Raises ParameterInvalid, ShapeMismatch."""
    if term.count(ELLIPSIS) > 1:
        raise _invalid(f"operand {number} has more than one ellipsis")
    more = ndim - (len(term) - term.count(ELLIPSIS))
    if more < 0 or (more > 0 and ELLIPSIS not in term):
        raise _errors.ShapeMismatch(
            f"operand {number} has {ndim} dimensions and {len(term) - term.count(ELLIPSIS)} labels"
        )
    if ELLIPSIS not in term:
        return term
    at = term.index(ELLIPSIS)
    return [*term[:at], *(_Dot(depth) for depth in range(more, 0, -1)), *term[at + 1 :]]


def _labelled(full: list[list[Any]], result: list[Any], shapes: Sequence[Sequence[int]]) -> Equation:
    """The equation in labels of one character each."""
    names: dict[Any, str] = {}
    sizes: dict[str, int] = {}
    inputs = []
    for number, (term, shape) in enumerate(zip(full, shapes, strict=True)):
        own: dict[str, int] = {}
        for given, size in zip(term, shape, strict=True):
            label = names.setdefault(given, symbol(len(names)))
            shown = "the ellipsis" if isinstance(given, _Dot) else repr(given)
            if own.setdefault(label, size) != size:
                raise _errors.ShapeMismatch(f"{shown} of operand {number} is an axis of {own[label]} and one of {size}")
            known = sizes.get(label, 1)
            if size != 1 and known not in {1, size}:
                raise _errors.ShapeMismatch(f"{shown} has {known} elements, and {size} in operand {number}")
            sizes[label] = size if known == 1 else known
        inputs.append("".join(names[given] for given in term))
    for given, count in Counter(result).items():
        if count > 1 or given not in names:
            what = "comes twice in the output" if count > 1 else "is a label of the output and of no operand"
            raise _invalid(f"{given!r} {what}")
    return Equation(tuple(inputs), "".join(names[given] for given in result), sizes)


def symbol(number: int) -> str:
    """Return the label of that number: a letter, then a character from U+00C0 on that is no surrogate."""
    if number < len(_LETTERS):
        return _LETTERS[number]
    code = number - len(_LETTERS) + 0xC0
    return chr(code if code < 0xD800 else code + 0x800)


def _invalid(message: str) -> _errors.ParameterInvalid:
    return _errors.ParameterInvalid(message, problem={"parameter": "equation"})

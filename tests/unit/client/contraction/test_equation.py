"""Equations as NumPy reads them, and the refusals of those that it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from gemmserve import ParameterInvalid, ShapeMismatch
from gemmserve._contraction.equation import parse, split, symbol


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("ij,jk", [(2, 3), (3, 4)], ("ab,bc", "ac")),
        ("ba", [(2, 3)], ("ab", "ba")),
        ("ii", [(2, 2)], ("aa", "")),
        (" i j , j -> i ", [(2, 3), (3,)], ("ab,b", "a")),
        ("...ij,...jk", [(7, 2, 3), (3, 4)], ("abc,cd", "abd")),
        ("i...j->j...", [(2, 3, 4, 5)], ("abcd", "dbc")),
        ("...i,i->...", [(2,), (2,)], ("a,a", "")),
        (",ij", [(), (2, 2)], (",ab", "ab")),
        ([[0, 1], [1, 2]], [(2, 3), (3, 4)], ("ab,bc", "ac")),
        ([[1, 0]], [(2, 3)], ("ab", "ba")),
        ([["x", ...], [..., "x"]], [(2, 3)], ("ab", "ba")),
        ("äß,ßü->üä", [(2, 3), (3, 4)], ("ab,bc", "ca")),
    ],
)
def test_labels_of_axes_and_output(equation, shapes, expected) -> None:
    parsed = parse(equation, shapes)
    assert (",".join(parsed.inputs), parsed.output) == expected


def test_an_axis_of_one_element_broadcasts() -> None:
    parsed = parse("ij,jk->ijk", [(2, 1), (3, 1)])
    assert parsed.shape == (2, 3, 1)
    assert parse("...,...", [(2, 1), (3,)]).shape == (2, 3)


@pytest.mark.parametrize(
    ("equation", "shapes", "error", "words"),
    [
        ("ij,jk", [(2, 3)], ParameterInvalid, "names 2 operands, and 1"),
        ("", [], ParameterInvalid, "names 1 operands, and 0"),
        ("ij", [(2,)], ShapeMismatch, "operand 0 has 1 dimensions and 2 labels"),
        ("i", [(2, 3)], ShapeMismatch, "operand 0 has 2 dimensions and 1 label"),
        ("ij,jk", [(2, 3), (4, 5)], ShapeMismatch, "'j' has 3 elements, and 4 in operand 1"),
        ("ii", [(1, 3)], ShapeMismatch, "'i' of operand 0 is an axis of 1 and one of 3"),
        ("...,...", [(2,), (3,)], ShapeMismatch, "the ellipsis has 2 elements, and 3"),
        ("i->j", [(2,)], ParameterInvalid, "'j' is a label of the output and of no operand"),
        ("ij->ii", [(2, 2)], ParameterInvalid, "'i' comes twice in the output"),
        ("...i->i", [(3, 2)], ParameterInvalid, "1 more axes"),
        ("...i...", [(3, 2)], ParameterInvalid, "more than one ellipsis"),
        ("i.j", [(3, 2)], ParameterInvalid, r"'\.' is no label"),
        ("i->->i", [(3,)], ParameterInvalid, "'-' is no label"),
        ([["x", 0]], [(3, 2)], ParameterInvalid, "no order between them"),
    ],
)
def test_what_is_refused(equation, shapes, error, words) -> None:
    with pytest.raises(error, match=words):
        parse(equation, shapes)
    if isinstance(equation, str) and shapes:
        with pytest.raises(ValueError):
            np.einsum(equation, *(np.ones(shape) for shape in shapes))


def test_both_forms_of_arguments() -> None:
    a, b = np.ones((2, 3)), np.ones((3, 4))
    assert split(["ij,jk", a, b])[0] == "ij,jk"
    assert split([a, [0, 1], b, [1, 2]])[0] == [[0, 1], [1, 2]]
    equation, operands = split([a, [0, 1], b, (1, 2), [0, 2]])
    assert equation == [[0, 1], [1, 2], [0, 2]]
    assert operands[0] is a
    assert operands[1] is b
    for wrong in ([], [a, 5]):
        with pytest.raises(ParameterInvalid):
            split(wrong)


def test_labels_are_distinct_characters() -> None:
    labels = [symbol(number) for number in range(60_000)]
    assert len({*labels}) == len(labels)
    assert all(len(label) == 1 and label.encode() for label in labels)

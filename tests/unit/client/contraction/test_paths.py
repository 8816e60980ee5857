"""Orders of contraction: trees, the best one of few operands, a good one of many, and those that others give."""

from __future__ import annotations

import math
import sys
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from contraction_steps import ring

from gemmserve import ParameterInvalid
from gemmserve._contraction import paths


def cost(terms, output, sizes, pairs) -> float:
    """The sum that orders are compared by: multiplications, and elements written."""
    labels = [frozenset(term) for term in terms] + paths.kept_after(terms, output, pairs)
    volume = lambda kept: math.prod(sizes[label] for label in kept)
    return sum(
        volume(labels[a] | labels[b]) + paths.MOVED * volume(made)
        for (a, b), made in zip(pairs, labels[len(terms) :], strict=True)
    )


def every_order(count):
    def extend(pairs, left):
        if len(left) == 1:
            yield pairs
        for a, b in combinations(left, 2):
            yield from extend([*pairs, (a, b)], [*(each for each in left if each not in {a, b}), count + len(pairs)])

    return extend([], list(range(count)))


def is_tree(pairs, count) -> bool:
    used = [number for pair in pairs for number in pair]
    return len(pairs) == count - 1 and sorted(used) == list(range(2 * count - 2))


@pytest.mark.parametrize("optimize", [True, False, "optimal", "greedy", "auto"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 12])
def test_every_order_is_a_tree(optimize, count) -> None:
    terms, sizes = ring(count, seed=count)
    assert is_tree(paths.find(terms, "", sizes, optimize), count)


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_five_operands_is_that_of_all_orders(seed) -> None:
    terms, sizes = ring(5, seed=seed)
    output = "".join(sorted({*terms[0]}))[:1]
    best = min(cost(terms, output, sizes, pairs) for pairs in every_order(5))
    assert cost(terms, output, sizes, paths.find(terms, output, sizes, True)) == best


def test_greedy_contracts_a_chain_without_growing() -> None:
    terms = [chr(0x4E00 + i) + chr(0x4E01 + i) for i in range(300)]
    sizes = dict.fromkeys("".join(terms), 4)
    pairs = paths.find(terms, terms[0][0] + terms[-1][1], sizes, "greedy")
    assert is_tree(pairs, 300)
    assert max(map(len, paths.kept_after(terms, terms[0][0] + terms[-1][1], pairs))) == 2


def test_operands_that_share_nothing_come_last() -> None:
    pairs = paths.find(["ab", "b", "cd", "d", "", ""], "ac", dict.fromkeys("abcd", 3), "greedy")
    assert is_tree(pairs, 6)
    assert {tuple(sorted(pair)) for pair in pairs[:2]} == {(0, 1), (2, 3)}


def test_what_a_result_keeps() -> None:
    # b is in three operands and stays until the last of them; c in the output.
    assert paths.kept_after(["ab", "bc", "bd"], "c", [(0, 1), (3, 2)]) == [{"b", "c"}, {"c"}]


def test_paths_of_numpy_and_of_callables() -> None:
    terms, sizes = ring(6, seed=1)
    arrays = [np.ones([sizes[label] for label in term]) for term in terms]
    path, _ = np.einsum_path(",".join(terms) + "->", *arrays, optimize="greedy")
    pairs = paths.find(terms, "", sizes, path)
    assert is_tree(pairs, 6)
    assert paths.find(terms, "", sizes, path[1:]) == pairs

    class Tree:
        def get_path(self):
            return path[1:]

    assert paths.find(terms, "", sizes, Tree()) == pairs
    asked = []

    def optimizer(inputs, output, size_dict, memory_limit):
        asked.append((inputs, output, size_dict, memory_limit))
        return path[1:]

    assert paths.find(terms, "", sizes, optimizer) == pairs
    assert asked == [([frozenset(term) for term in terms], frozenset(), sizes, None)]


def test_more_than_two_at_once_are_taken_as_they_come() -> None:
    assert paths.find(["ab", "bc", "cd", "de"], "ae", dict.fromkeys("abcde", 2), [(3, 0, 1), (0, 1)]) == [
        (0, 1), (4, 3), (2, 5)
    ]  # fmt: skip
    assert paths.find(["ab"], "a", {"a": 2, "b": 2}, [(0,)]) == []


@pytest.mark.parametrize(
    "wrong", [[(0, 1)], [(0, 3), (0, 1)], [(0, 0), (0, 1)], [(-1, 0), (0, 1)], [()], 5, [("a", "b")], "nonsense", None]
)
def test_what_is_no_path(wrong) -> None:
    with pytest.raises(ParameterInvalid) as raised:
        paths.find(["ab", "bc", "cd"], "ad", dict.fromkeys("abcd", 2), wrong)
    assert raised.value.parameter == "optimize"


def test_paths_of_cotengra() -> None:
    cotengra = pytest.importorskip("cotengra")
    terms, sizes = ring(12, seed=3)
    pairs = paths.find(terms, "", sizes, "greedy")
    assert is_tree(paths.find(terms, "", sizes, True), 12)
    tree = cotengra.array_contract_tree([tuple(term) for term in terms], (), sizes)
    assert is_tree(paths.find(terms, "", sizes, tree), 12)
    assert cost(terms, "", sizes, paths.find(terms, "", sizes, tree)) <= 2 * cost(terms, "", sizes, pairs)


def as_numpy(pairs, count):
    """A path of positions among the operands that are left, as numpy.einsum_path gives it."""
    left, path = list(range(count)), []
    for number, pair in enumerate(pairs, count):
        path.append(tuple(sorted(left.index(each) for each in pair)))
        left = [*(each for each in left if each not in pair), number]
    return path


def test_an_installed_library_s_order_is_taken_where_it_is_cheaper(monkeypatch) -> None:
    terms, sizes = ring(12, seed=6)
    greedy, optimal = (paths.find(terms, "", sizes, name) for name in ("greedy", "optimal"))
    library = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "cotengra", library)
    bad = [(0, 6), *[(0, 1)] * 10]  # begins with two that share nothing
    for path, wanted in ((bad, greedy), (as_numpy(optimal, 12), optimal)):
        library.array_contract_path = lambda *_, path=path, **__: path
        for optimize in (True, "auto"):
            found = paths.find(terms, "", sizes, optimize)
            assert cost(terms, "", sizes, found) == cost(terms, "", sizes, wanted)
        theirs = paths.find(terms, "", sizes, "its own")
        assert theirs == paths.find(terms, "", sizes, path)
    assert cost(terms, "", sizes, optimal) < cost(terms, "", sizes, greedy)


def test_paths_of_opt_einsum(monkeypatch) -> None:
    opt_einsum = pytest.importorskip("opt_einsum")
    terms, sizes = ring(12, seed=4)
    assert is_tree(paths.find(terms, "", sizes, opt_einsum.RandomGreedy(max_repeats=4)), 12)
    monkeypatch.setitem(__import__("sys").modules, "cotengra", None)
    assert is_tree(paths.find(terms, "", sizes, True), 12)
    assert is_tree(paths.find(terms, "", sizes, "random-greedy"), 12)
    monkeypatch.setitem(__import__("sys").modules, "opt_einsum", None)
    assert paths.find(terms, "", sizes, True) == paths.find(terms, "", sizes, "greedy")

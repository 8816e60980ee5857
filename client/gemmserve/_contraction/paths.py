"""The order in which operands are contracted, two by two: ours, or a library's where that is cheaper.

Optimal orders are found by dynamic programming over subsets (Pfeifer, Haegeman, Verstraete, Phys. Rev. E 90, 033315,
2014), those of more operands by greedy choice of the pair whose product is smallest beside them, repeated with random
disturbance (Gray, Kourtis, Quantum 5, 410, 2021).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gemmserve import _errors

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

Pairs: TypeAlias = "list[tuple[int, int]]"
"""Numbers of the two operands of each contraction; operands come first, then each contraction has the next number."""

OPTIMAL: Final = 8
"""Most operands whose best order is sought unasked: 3^8 / 2 splits of subsets take 20 ms."""

FEASIBLE: Final = 13
"""Most operands whose best order is sought on request, by this module: a second."""

TRIALS: Final = 16
"""Greedy orders that are compared; 200 tensors take 10 ms each."""

MOVED: Final = 16
"""Multiplications in the time in which one element is read or written, for a GPU's matrix units beside its memory."""


def find(inputs: Sequence[Collection[str]], output: Collection[str], sizes: Mapping[str, int], optimize: Any) -> Pairs:
    """Return the pairs, one fewer than there are operands.

    `optimize`: True or "auto" (the best of up to eight operands; of more greedy, or that of cotengra or opt_einsum
    where one is installed and its order is cheaper), "optimal", "greedy", False (as they come), the name of an
    optimizer of cotengra's or opt_einsum's, a path as numpy.einsum_path gives it, a tree with a `get_path` method, or
    an optimizer that is called as opt_einsum calls it. Raises ParameterInvalid.
    """
    count = len(inputs)
    if isinstance(optimize, str | bool):
        if optimize is False:
            return _left_to_right(range(count), count)
        if count <= (FEASIBLE if optimize == "optimal" else OPTIMAL if optimize in {True, "auto"} else 2):
            return _optimal(inputs, output, sizes)
        if optimize == "greedy":
            return _greedy(inputs, output, sizes)
        theirs = _installed(inputs, output, sizes, "auto" if optimize is True else optimize)
        if theirs is not None and optimize not in {True, "auto"}:
            return theirs
        ours = _greedy(inputs, output, sizes)
        if theirs is None:
            return ours
        return min(ours, theirs, key=lambda pairs: _cost(inputs, output, sizes, pairs))
    if hasattr(optimize, "get_path"):
        return _pairs(optimize.get_path(), count)
    if callable(optimize):
        return _pairs(optimize([frozenset(each) for each in inputs], frozenset(output), dict(sizes), None), count)
    return _pairs(optimize, count)


def kept_after(inputs: Sequence[Collection[str]], output: Collection[str], pairs: Pairs) -> list[frozenset[str]]:
    """Return the labels of each contraction's result: those of its operands that the output or a later one has."""
    terms = [frozenset(each) for each in inputs]
    left = Counter(label for term in terms for label in term) + Counter(output)
    for a, b in pairs:
        left.subtract(terms[a])
        left.subtract(terms[b])
        terms.append(frozenset(label for label in terms[a] | terms[b] if left[label]))
        left.update(terms[-1])
    return terms[len(inputs) :]


def _installed(
    inputs: Sequence[Collection[str]], output: Collection[str], sizes: Mapping[str, int], name: str
) -> Pairs | None:
    """The order by the optimizer of that name; None of "auto" where neither library is installed.

    Raises ParameterInvalid where there is no such optimizer.
    """
    try:
        import cotengra
    except ImportError:
        pass
    else:
        try:
            path = cotengra.array_contract_path(
                [tuple(each) for each in inputs], tuple(output), dict(sizes), optimize=name
            )
        except (KeyError, ValueError):
            if name == "auto":
                raise
        else:
            return _pairs(path, len(inputs))
    try:
        from opt_einsum import paths
    except ImportError:
        pass
    else:
        try:
            optimizer = paths.get_path_fn(name)
        except KeyError:
            optimizer = None
        if optimizer is not None:
            terms = [frozenset(each) for each in inputs]
            return _pairs(optimizer(terms, frozenset(output), dict(sizes), None), len(inputs))
    if name == "auto":
        return None
    raise _errors.ParameterInvalid(
        f'optimize is True, False, "auto", "optimal", "greedy", the name of an optimizer of cotengra or opt_einsum if '
        f"they are installed, a path or an optimizer, not {name!r}",
        problem={"parameter": "optimize"},
    )


def _pairs(path: Any, count: int) -> Pairs:
    """Pairs of a path whose numbers are positions among the operands left, results at the end, as NumPy counts them.

    Where it contracts more than two at once, they are taken as they come. Raises ParameterInvalid.
    """
    wrong = _errors.ParameterInvalid(
        f"a path is a sequence of tuples of positions that ends with one operand, not {path!r:.200}",
        problem={"parameter": "optimize"},
    )
    left = list(range(count))
    pairs: Pairs = []
    try:
        steps = [tuple(map(int, each)) for each in path if each != "einsum_path"]
    except (TypeError, ValueError):
        raise wrong from None
    for step in steps:
        if len(set(step)) != len(step) or not step or any(not 0 <= position < len(left) for position in step):
            raise wrong
        chosen = [left[position] for position in sorted(step)]
        left = [each for each in left if each not in chosen]
        more = _left_to_right(chosen, count + len(pairs))
        pairs += more
        left.append(count + len(pairs) - 1 if more else chosen[0])
    if len(left) != 1:
        raise wrong
    return pairs


def _left_to_right(operands: Iterable[int], following: int) -> Pairs:
    """The operands one after the other; `following`: the number of the first result."""
    first, *rest = operands
    pairs: Pairs = []
    for each in rest:
        pairs.append((first, each))
        first = following + len(pairs) - 1
    return pairs


def _optimal(inputs: Sequence[Collection[str]], output: Collection[str], sizes: Mapping[str, int]) -> Pairs:
    """The order of least cost, over all trees: that of a subset is the best split of it."""
    count = len(inputs)
    everywhere = frozenset(output)
    terms = [frozenset(each) for each in inputs]
    everything = (1 << count) - 1
    labels = {0: frozenset[str]()}
    for subset in range(1, everything + 1):
        low = subset & -subset
        labels[subset] = labels[subset ^ low] | terms[low.bit_length() - 1]
    # What a subset's result keeps: labels that the others or the output have.
    kept = {subset: labels[subset] & (labels[everything ^ subset] | everywhere) for subset in labels}
    volume = {subset: _volume(kept[subset], sizes) for subset in labels}
    best: dict[int, tuple[float, int]] = {1 << each: (0.0, 0) for each in range(count)}
    for subset in range(1, everything + 1):
        if subset in best:
            continue
        low = subset & -subset
        found = (math.inf, 0)
        part = (subset - 1) & subset
        while part:
            if part & low:  # each split once
                rest = subset ^ part
                cost = best[part][0] + best[rest][0]
                if cost < found[0]:
                    cost += _volume(kept[part] | kept[rest], sizes) + MOVED * volume[subset]
                    if cost < found[0] or not found[1]:
                        found = cost, part
            part = (part - 1) & subset
        best[subset] = found
    pairs: Pairs = []

    def number(subset: int) -> int:
        part = best[subset][1]
        if not part:
            return subset.bit_length() - 1
        pairs.append((number(part), number(subset ^ part)))
        return count + len(pairs) - 1

    number(everything)
    return pairs


def _greedy(inputs: Sequence[Collection[str]], output: Collection[str], sizes: Mapping[str, int]) -> Pairs:
    """The cheapest of several greedy orders; the same one each time."""
    shuffle = random.Random(0)  # noqa: S311 (no secret)
    found = []
    for trial in range(TRIALS):
        heat = 0.0 if trial == 0 else 0.1 * 2.0 ** (trial % 6)
        pairs = _greedy_once(inputs, output, sizes, heat, shuffle)
        found.append((_cost(inputs, output, sizes, pairs), trial, pairs))
    return min(found)[2]


def _cost(inputs: Sequence[Collection[str]], output: Collection[str], sizes: Mapping[str, int], pairs: Pairs) -> float:
    """Multiplications of an order, and `MOVED` for each element of a result."""
    terms = [frozenset(each) for each in inputs] + kept_after(inputs, output, pairs)
    return sum(
        _volume(terms[a] | terms[b], sizes) + MOVED * _volume(made, sizes)
        for (a, b), made in zip(pairs, terms[len(inputs) :], strict=True)
    )


def _greedy_once(
    inputs: Sequence[Collection[str]],
    output: Collection[str],
    sizes: Mapping[str, int],
    heat: float,
    shuffle: random.Random,
) -> Pairs:
    """An order that always takes the pair with the best score; what shares no label comes last, small ones first."""
    terms = {number: frozenset(each) for number, each in enumerate(inputs)}
    holders: dict[str, set[int]] = defaultdict(set)
    for number, term in terms.items():
        for label in term:
            holders[label].add(number)
    wanted = frozenset(output)
    length = {label: float(max(sizes[label], 1)) for label in holders}
    volume = {number: _volume(term, length) for number, term in terms.items()}

    def gone(a: int, b: int) -> list[str]:
        return [label for label in terms[a] & terms[b] if label not in wanted and len(holders[label]) == 2]

    def score(a: int, b: int) -> float:
        grown = volume[a] * volume[b]
        for label in terms[a] & terms[b]:
            grown /= length[label]
        for label in gone(a, b):
            grown /= length[label]
        grown -= volume[a] + volume[b]
        # Orders of magnitude decide, so the disturbance is one of the logarithm.
        noise = heat * math.log(1.0 - shuffle.random()) if heat else 0.0
        return math.copysign(math.log1p(abs(grown)), grown) - noise

    heap = [
        (score(a, b), a, b)
        for a, b in sorted({pair for each in holders.values() for pair in combinations(sorted(each), 2)})
    ]
    heapq.heapify(heap)
    pairs: Pairs = []
    following = len(terms)

    def contract(a: int, b: int) -> None:
        nonlocal following
        made = (terms[a] | terms[b]).difference(gone(a, b))
        pairs.append((a, b))
        for number in (a, b):
            for label in terms.pop(number):
                holders[label].discard(number)
        terms[following], volume[following] = made, _volume(made, length)
        neighbours = sorted({number for label in made for number in holders[label]})
        for label in made:
            holders[label].add(following)
        for number in neighbours:
            heapq.heappush(heap, (score(number, following), number, following))
        following += 1

    while heap:
        _, a, b = heapq.heappop(heap)
        if a in terms and b in terms:
            contract(a, b)
    apart = [(volume[number], number) for number in terms]
    heapq.heapify(apart)
    while len(apart) > 1:
        contract(heapq.heappop(apart)[1], heapq.heappop(apart)[1])
        heapq.heappush(apart, (volume[following - 1], following - 1))
    return pairs


def _volume(labels: Iterable[str], sizes: Mapping[str, float]) -> float:
    return math.prod([sizes[label] for label in labels], start=1.0)

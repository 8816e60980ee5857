"""What a device keeps of arrays, and what goes when room is needed."""

from __future__ import annotations

import random
import threading

import pytest

from gemmserve_service.executor.worker.memory.residency import Residency


class Keeper(Residency):
    """Remembers what was made."""

    def __init__(self, budget):
        super().__init__(budget)
        self.made = []

    def take(self, array, nbytes, **options):
        def load():
            self.made.append((array, options.get("form")))
            return object()

        return self.get(array, nbytes, load, **options)


def test_what_is_kept_is_not_made_again():
    keeper = Keeper(100)
    first = keeper.take("a", 40)
    assert keeper.take("a", 40) is first
    assert (keeper.hits, keeper.misses, keeper.used) == (1, 1, 40)
    assert keeper.holds("a")
    assert not keeper.holds("a", "planes")
    keeper.clear()
    assert (keeper.used, keeper.holds("a")) == (0, False)
    assert keeper.take("a", 40) is not first


def test_copies_are_used_together_or_not_at_all():
    keeper = Keeper(100)
    values = [keeper.take(array, 40) for array in ("a", "b")]
    assert keeper.use(["a", "c"]) is None
    assert (keeper.hits, keeper.uses("a")) == (0, 1), "nothing has happened"
    assert keeper.use(["a", "b", "a"]) == [values[0], values[1], values[0]]
    assert (keeper.hits, keeper.misses, keeper.uses("a"), keeper.uses("b")) == (3, 2, 3, 2)
    assert keeper.use([]) == []
    keeper.use(["b", "b", "b"])
    keeper.take("c", 40)
    assert keeper.holds("b"), "what is used stays"
    assert not keeper.holds("a")
    keeper.forget("b")
    assert keeper.use(["b"]) is None


def test_forms_are_used_in_the_place_of_their_copies():
    keeper = Keeper(1000)
    a, b = (keeper.take(array, 40) for array in ("a", "b"))
    planes = keeper.take("a", 40, form="planes")
    hits = keeper.hits
    assert keeper.use(["a", "b"], ["planes", "rows"], again=3) == [planes, b]
    assert keeper.hits == hits + 3
    assert (keeper.uses("a"), keeper.uses("a", "planes"), keeper.uses("b")) == (2, 2, 2)
    assert keeper.use(["a", "b"], ["planes", "rows"], again=3) is None, "the third use of b wants its rows"
    assert (keeper.uses("a"), keeper.uses("b")) == (2, 2)
    assert keeper.use(["a", "b", "b"], [None, None]) == [a, b, b]
    rows = keeper.take("b", 40, form="rows")
    assert keeper.use(["a", "b"], ["planes", "rows"], again=3) == [planes, rows]


def test_nothing_is_kept_without_a_name_or_past_the_budget():
    keeper = Keeper(100)
    keeper.take("a", 60)
    for _ in range(2):
        keeper.take(None, 10)
        keeper.take("huge", 101)
    assert keeper.made == [("a", None), (None, None), ("huge", None), (None, None), ("huge", None)]
    assert (keeper.used, keeper.holds("a"), keeper.misses) == (60, True, 3)


def test_of_equals_the_one_that_was_used_least_goes():
    keeper = Keeper(100)
    keeper.take("a", 40)
    keeper.take("b", 40)
    keeper.take("a", 40)
    keeper.take("c", 40)
    assert [keeper.holds(name) for name in "abc"] == [True, False, True]


def test_what_is_dear_for_its_size_stays():
    keeper = Keeper(100)
    keeper.take("planes", 50, cost_s=2.0)
    keeper.take("copy", 50, cost_s=1.0)
    keeper.take("new", 50, cost_s=1.0)
    assert [keeper.holds(name) for name in ("planes", "copy", "new")] == [True, False, True]


def test_what_was_dear_and_popular_goes_in_the_end():
    keeper = Keeper(100)
    for _ in range(10):
        keeper.take("old", 50, cost_s=5.0)
    for number in range(300):
        keeper.take(f"new {number}", 50, cost_s=1.0)
    assert not keeper.holds("old")


def test_forms_of_an_array_go_with_it():
    keeper = Keeper(100)
    keeper.take("a", 30)
    keeper.take("a", 20, form=("a", "N"))
    keeper.take("b", 30)
    assert (keeper.used, keeper.holds("a", ("a", "N"))) == (80, True)
    keeper.forget("a")
    keeper.forget("a")
    assert (keeper.used, keeper.holds("a"), keeper.holds("a", ("a", "N")), keeper.holds("b")) == (
        30,
        False,
        False,
        True,
    )
    keeper.take("a", 60)  # the heap still knows the old ones
    keeper.take("c", 60)
    assert keeper.used == 60


def test_a_guess_is_set_right():
    keeper = Keeper(100)
    keeper.take("a", 10)
    keeper.take("a", 50, form="planes", measure=lambda value: 5)
    keeper.take("b", 50, measure=lambda value: 80)
    assert keeper.used == 95
    assert [keeper.uses(*key) for key in (("a", "planes"), ("a",), ("c",), (None,))] == [1, 1, 0, 0]
    keeper.take("b", 50)
    assert keeper.uses("b") == 2
    keeper.forget("b")
    assert keeper.used == 15


def test_no_form_is_kept_without_its_copy():
    keeper = Keeper(100)
    keeper.take("a", 40)
    keeper.take("a", 20, form="planes", cost_s=100.0)
    keeper.take("b", 80)
    assert (keeper.used, keeper.holds("a"), keeper.holds("a", "planes")) == (80, False, False)
    keeper.take("a", 20, form="planes")
    assert (keeper.used, keeper.holds("a", "planes"), keeper.holds("b")) == (80, False, True)


def test_what_cannot_be_made_is_not_kept():
    def fail():
        raise MemoryError

    keeper = Keeper(100)
    with pytest.raises(MemoryError):
        keeper.get("a", 10, fail)
    assert (keeper.used, keeper.holds("a")) == (0, False)


def test_the_books_are_right_whatever_happens():
    chance = random.Random(1)
    keeper = Keeper(1000)
    sizes = {str(number): chance.randrange(1, 400) for number in range(30)}
    for _ in range(3000):
        name = chance.choice(list(sizes))
        if chance.random() < 0.1:
            keeper.forget(name)
        else:
            keeper.take(name, sizes[name], cost_s=chance.random())
        assert keeper.used == sum(sizes[name] for name in sizes if keeper.holds(name)) <= 1000


def test_two_that_want_the_same_at_once_get_one():
    keeper = Residency(100)
    both = threading.Barrier(2)
    got = []

    def load():
        both.wait(60)
        return object()

    threads = [threading.Thread(target=lambda: got.append(keeper.get("a", 40, load))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got[0] is got[1]
    assert (keeper.used, keeper.misses) == (40, 2)


def test_what_is_dropped_while_another_is_made():
    keeper = Residency(100)

    def load():
        keeper.clear()
        return object()

    keeper.get("a", 40, object)
    keeper.get("b", 50, load)
    assert (keeper.used, keeper.holds("a"), keeper.holds("b")) == (50, False, True)

"""The parsers of what strangers send, over the saved corpus and a bounded number of inputs (`make fuzz`: many more)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz_targets import TARGETS, mutated, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The headers of .npy files are Python literals: some escapes are deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore:.*invalid escape sequence")

CORPUS = Path(__file__).parents[3] / "fuzz" / "corpus"
MUTATIONS = {"npy": 3000, "multipart": 1500, "json": 2000, "headers": 3000, "requests": 1500}


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_taken(name):
    for data in seeds(name):
        TARGETS[name](data)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_corpus(path):
    """What parsers trip over, and whatever went wrong here once."""
    TARGETS[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_mutations(name):
    """The same ones on every run: a failure here is a failure of the change at hand."""
    chance = random.Random(f"gemmserve {name}")
    pool = seeds(name)
    for _ in range(MUTATIONS[name]):
        data = mutated(chance.choice(pool), chance)
        try:
            TARGETS[name](data)
        except BaseException:
            print(f"{name}: {data!r}")
            raise
        if len(data) < 4000 and chance.random() < 0.05:
            pool.append(data)


@pytest.mark.parametrize("name", TARGETS)
def test_arbitrary_bytes(name):
    @given(st.binary(max_size=300))
    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def run(data):
        TARGETS[name](data)

    run()

"""Overrides of the algorithm and its tile as keys of plans."""

from __future__ import annotations

import pickle
from dataclasses import replace

from gemmserve_kernels import GemmConfig


def test_equal_configs_have_one_hash():
    one, other = GemmConfig(algorithm="simt", stages=2), GemmConfig(algorithm="simt", stages=2)
    assert {one: "plan"}[other] == "plan"
    assert hash(one) == hash(other)
    assert replace(one, stages=3) not in {one: "plan"}
    assert hash(replace(one, stages=3)) != hash(one)


def test_hashes_stay_in_their_process():
    """Those of strings are others elsewhere."""
    config = GemmConfig(algorithm="simt")
    fresh = pickle.dumps(config)
    hash(config)
    assert pickle.dumps(config) == fresh
    assert pickle.loads(fresh) == config

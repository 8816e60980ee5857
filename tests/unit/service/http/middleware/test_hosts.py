"""Which names are this machine's."""

from __future__ import annotations

import pytest

from gemmserve_service.http.middleware.hosts import HostRule

LOOPBACK = [
    "localhost",
    "localhost:8000",
    "LOCALHOST.",
    "127.0.0.1",
    "127.9.9.9:1",
    "[::1]",
    "[::1]:8000",
    "app.localhost",
]
FOREIGN = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.5",
    "",
    "a b",
    "127.0.0.1:x",
    "[::2]",
]


@pytest.fixture
def rule(make_settings):
    return lambda **fields: HostRule(make_settings(**fields))


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_is_answered(rule, host):
    assert rule().host(host)
    assert rule().origin(f"http://{host}")


@pytest.mark.parametrize("host", FOREIGN)
def test_others_are_not(rule, host):
    assert not rule().host(host)
    assert not rule().origin(f"http://{host}")


def test_null_origin_is_not_answered(rule):
    assert not rule().origin("null")
    assert not rule().origin("http://[")


def test_names_of_the_settings(rule):
    assert rule(allowed_hosts=["gpu.lab"]).host("gpu.lab:8000")
    assert rule(allowed_hosts=["gpu.lab"]).origin("https://GPU.lab")
    assert rule(allowed_hosts=["*"]).host("anything.example")
    assert rule(allowed_hosts=["*"]).origin("null")


def test_every_interface_means_every_address(rule):
    everywhere = rule(host="0.0.0.0", allow_unauthenticated=True)
    assert everywhere.host("10.0.0.5:8000")
    assert not everywhere.host("evil.example")


def test_memory_is_bounded(rule):
    checker = rule()
    for index in range(1000):
        checker.host(f"h{index}.example")
    assert len(checker._accepted) <= 64

"""The cache of what tests compile."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build_cache
import pytest


def test_an_entry_is_made_once_even_by_many(tmp_path):
    made = []

    def make(out):
        made.append(out)
        out.write_text("entry")

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build_cache.once(tmp_path / "one.so", make), range(4)))
    assert paths == {tmp_path / "one.so"}
    assert [path.read_text() for path in paths] == ["entry"]
    assert len(made) == 1
    assert not list(tmp_path.glob("build-*"))


def test_a_failure_leaves_nothing_and_the_next_try_succeeds(tmp_path):
    def fail(out):
        out.write_text("half of it")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        build_cache.once(tmp_path / "one.so", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["one.lock"]
    assert build_cache.once(tmp_path / "one.so", lambda out: out.write_text("all")).read_text() == "all"


def test_what_nobody_has_asked_for_in_days_goes_when_something_is_made(tmp_path):
    old, used, made = (build_cache.once(tmp_path / name, Path.touch) for name in ("old.so", "used.so", "made.so"))
    long_ago = time.time() - build_cache.KEPT_S - 60
    for path in (old, used):
        os.utime(path, (long_ago, long_ago))
    build_cache.once(used, Path.touch)
    build_cache._forget_old.cache_clear()
    build_cache.once(tmp_path / "new.so", Path.touch)
    assert {path.name for path in tmp_path.glob("*.so")} == {used.name, made.name, "new.so"}


def test_a_cache_that_others_can_write_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(build_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    directory = build_cache.cache_directory.__wrapped__()
    assert directory.parent == tmp_path
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)
    with pytest.raises(PermissionError, match="not this user's alone"):
        build_cache.cache_directory.__wrapped__()

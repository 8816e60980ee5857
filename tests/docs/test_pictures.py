"""Pictures of the pages: each is there, small, shown by a page, and drawn from what the page computes."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING

import pytest
from doc_blocks import ROOT, pages

if TYPE_CHECKING:
    from types import ModuleType

MOST_BYTES = 150_000
"""Bytes that one picture may have: what a page may weigh on a slow line."""


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_shown_and_every_shown_one_is_there() -> None:
    shown = {
        (path.parent / found[1]).resolve()
        for path in pages()
        for found in re.finditer(r"!\[[^\]]+\]\(([^):]*pictures/[^)]+)\)", path.read_text())
    }
    assert shown == {path.resolve() for path in (ROOT / "docs" / "pictures").iterdir()}


def test_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs" / "pictures").iterdir()}
    assert not {name: size for name, size in sizes.items() if size > MOST_BYTES}


def test_every_drawn_picture_is_its_guide_s(pictures: ModuleType) -> None:
    for name in pictures.DRAWN:
        assert f"](../pictures/{name}.svg)" in (ROOT / "docs" / "guides" / f"{name}.md").read_text()


def test_blocks_keep_their_lines(pictures: ModuleType, tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\na = 1\n```\n\n```sh\nls\n```\n\n```python\nb = a / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile(pictures.blocks(page), str(page), "exec"), {})
    assert raised.traceback[-1].lineno + 1 == 12


def test_blocks_that_need_what_is_missing_are_left_out(pictures: ModuleType, tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- needs: no_such_module -->\n```python\nimport no_such_module\n```\n")
    assert not pictures.blocks(page).strip()

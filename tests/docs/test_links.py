"""Links between the repository's Markdown files lead to files and to headings that are there."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest
from doc_blocks import ROOT
from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from pathlib import Path

INDEX = ROOT / "docs" / "index.md"


def markdown() -> list[Path]:
    """Every Markdown file of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.split() if listed.returncode == 0 else [str(path) for path in ROOT.glob("*/*.md")]
    return sorted(path for name in names if (path := ROOT / name).exists())


def slug(title: str, taken: set[str]) -> str:
    """A heading's anchor as GitHub makes it: small letters, no punctuation, a number where it is there already."""
    plain = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
    found, number = plain, 0
    while found in taken:
        number += 1
        found = f"{plain}-{number}"
    return found


@cache
def read(path: Path) -> tuple[set[str], list[str]]:
    """(Anchors, targets of links and pictures) of a file."""
    anchors: set[str] = set()
    targets: list[str] = []
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(path.read_text())
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open":
            parts = [child.content for child in following.children if child.type in {"text", "code_inline"}]
            anchors.add(slug("".join(parts), anchors))
        for child in token.children or []:
            targets += [child.attrs[name] for name in ("href", "src") if name in child.attrs]
    return anchors, targets


@pytest.mark.parametrize("path", markdown(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path) -> None:
    for target in read(path)[1]:
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = unquote(target).partition("#")
        found = path.parent / file if file else path
        assert found.exists(), f"{path.name} links to {target}"
        assert found.resolve().is_relative_to(ROOT), f"{path.name} links out of the repository: {target}"
        if anchor:
            assert anchor in read(found.resolve())[0], f"{path.name} links to {target}: no such heading"


def test_anchors_are_githubs() -> None:
    taken: set[str] = set()
    for title in ("NumPy's functions", "`gemm`: D = alpha op(A)", "Jobs", "Jobs"):
        taken.add(slug(title, taken))
    assert taken == {"numpys-functions", "gemm-d--alpha-opa", "jobs", "jobs-1"}


def test_every_page_is_reachable_from_the_index() -> None:
    linked = {(INDEX.parent / target.partition("#")[0]).resolve() for target in read(INDEX)[1]}
    pages = {path for path in markdown() if INDEX.parent in path.parents} - {INDEX}
    assert not sorted(str(path.relative_to(ROOT)) for path in pages - linked)

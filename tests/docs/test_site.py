"""The documentation site builds without a warning and without a network; nothing in it points nowhere."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from doc_blocks import ROOT
from sphinx.util.inventory import InventoryFile

import gemmserve
import gemmserve_kernels

if TYPE_CHECKING:
    from pathlib import Path


class Page(HTMLParser):
    """Identifiers and relative targets of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.identifiers: set[str] = set()
        self.targets: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.identifiers |= {given[name] for name in ("id", "name") if given.get(name)}
        self.targets += [given[name] for name in ("href", "src") if given.get(name)]


def dangling(site: Path) -> list[str]:
    """What pages of the site link to that is not there."""
    pages = {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}
    found = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[file].identifiers if parts.fragment and file in pages else {parts.fragment}
            if not file.exists() or parts.fragment not in anchors:
                found.append(f"{path.relative_to(site)}: {target}")
    return found


def test_the_site_builds_and_is_whole(tmp_path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", site]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert dangling(site) == []
    with (site / "objects.inv").open("rb") as file:
        documented = {name for names in InventoryFile.load(file, "", str.__add__).values() for name in names}
    public = {f"gemmserve.{name}" for name in gemmserve.__all__ if name != "__version__"}
    public |= {f"gemmserve_kernels.{name}" for name in gemmserve_kernels.__all__}
    assert public <= documented, sorted(public - documented)


def test_dangling_targets_are_found(tmp_path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="#here"></a><a href="#there"></a><a href="b.html"></a>')
    assert dangling(tmp_path) == ["a.html: #there", "a.html: b.html"]

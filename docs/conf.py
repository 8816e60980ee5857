"""Settings of Sphinx: `make docs` builds the site into build/docs, and takes warnings for errors.

The source folder is the repository's root (`sphinx-build -c docs . build/docs`), so that README.md, CONTRIBUTING.md and
CHANGELOG.md are pages and links read the same on the site and on a forge. Nothing is fetched: the names of NumPy's and
CuPy's that pages link to are listed in docs/inventories.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(ROOT / package) for package in ("client", "kernels", "service")
]  # the checkout's, whatever is installed
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_FORGE = _PROJECT["urls"]["Documentation"]

project = "gemmserve"
author = "gemmserve's authors"
project_copyright = "gemmserve's authors, Apache-2.0"
version = release = _PROJECT["version"]
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "numpydoc"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md", "benchmarks/*.md", "benchmarks/device/*.md", "examples/*.md"]
exclude_patterns = ["build", "dist", "out", ".*", "client", "service", "kernels", "tests", "tools", "deploy", "**/_*"]
nitpicky = True
nitpick_ignore_regex = [("py:class", r".*\._OfStack")]  # what two errors have in common

myst_enable_extensions = ["colon_fence", "dollarmath", "fieldlist"]
myst_heading_anchors = 5

intersphinx_mapping = {
    "numpy": ("https://numpy.org/doc/stable/", str(ROOT / "docs" / "inventories" / "numpy.inv")),
    "cupy": ("https://docs.cupy.dev/en/stable/", str(ROOT / "docs" / "inventories" / "cupy.inv")),
}

autodoc_typehints = "none"  # they are in the signatures' text; pages stay readable
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "pydata_sphinx_theme"
html_title = "gemmserve"
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_additional_pages = {"index": "to_docs.html"}
html_sidebars = {"**": ["sections.html"]}
smartquotes = False  # "" in a docstring is an empty string
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "navbar_center": [],
    "icon_links": [{"name": "Source", "url": _FORGE, "icon": "fa-solid fa-code-branch"}],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}

_LINK = re.compile(r"(?<!!)(\[[^\]]*\])\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def _link_to_the_forge(app: Sphinx, page: str, source: list[str]) -> None:
    """Give links to what is no page (code, JSON, folders) the forge's address."""

    def target(found: re.Match[str]) -> str:
        path = (Path(app.srcdir) / page).parent / found[2]
        name = path.resolve().relative_to(ROOT).as_posix()
        if not path.exists() or (name.endswith(".md") and name.removesuffix(".md") in app.project.docnames):
            return found[0]
        return f"{found[1]}({_FORGE}/{'tree' if path.is_dir() else 'blob'}/main/{name})"

    source[0] = _LINK.sub(target, source[0])


def _add_toctrees(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the index's sections, and the pages that they link to, the site's navigation; all of docs/guides too."""
    if page != app.config.root_doc:
        return
    text = source[0]
    unlinked = [f"guides/{guide.name}" for guide in sorted((ROOT / "docs" / "guides").glob("*.md"))]
    unlinked = [guide for guide in unlinked if f"({guide})" not in text]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        # Several READMEs are called as their folder or the project is: the link's words say more.
        entries = [
            f"{words[1].upper()}{words[2:-1]} <{target.removesuffix('.md')}>"
            if target.endswith("README.md")
            else target
            for words, target, _ in _LINK.findall(section)
        ]
        entries += unlinked if title == "Guides" else []
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(entries) + "\n```\n"


def _to_restructured_text(
    _app: Sphinx, _kind: str, _name: str, _found: object, _options: object, lines: list[str]
) -> None:
    """Docstrings are plain text with `code` in single backticks; their indented lines are code too."""
    code = False
    for number, line in enumerate(lines):
        before = lines[number - 1] if number else ""
        if not line.startswith("    "):
            code = code and not line.strip()
        elif not code and not before.strip():
            lines[number - 1] = "::\n"
            code = True
        if not code:
            parts = re.split(r"(`[^`]+`)", line)
            lines[number] = "".join(
                f"`{part}`" if part.startswith("`") else re.sub(r"([*|\\]|(?<=\w)_\b)", r"\\\1", part) for part in parts
            )
    lines[:] = "\n".join(lines).splitlines()


def setup(app: Sphinx) -> None:
    """Sphinx calls this once it has read the settings."""
    app.connect("source-read", _add_toctrees)
    app.connect("source-read", _link_to_the_forge)
    app.connect("autodoc-process-docstring", _to_restructured_text, priority=400)

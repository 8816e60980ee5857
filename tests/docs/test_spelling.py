"""Spelling of what people read: Markdown, docstrings and messages, by codespell's list of common errors.

Words that it takes for errors and that are none stand in docs/spelling.txt, one a line, in small letters.
"""

from __future__ import annotations

import subprocess
import sys

from doc_blocks import ROOT

FOLDERS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "examples", "client", "kernels", "service"]


def codespell(*arguments: str) -> str:
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words", "docs/spelling.txt", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_nothing_is_misspelt() -> None:
    assert not codespell("--skip", "*.json,*.svg,*.png,*.inv,*.pyc,*/vendor/*", *FOLDERS)


def test_an_error_is_found(tmp_path) -> None:
    (tmp_path / "page.md").write_text("This recieves arrays.\n")
    assert "recieves ==> receives" in codespell(str(tmp_path))

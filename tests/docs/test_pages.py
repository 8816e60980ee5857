"""Every block of the documentation runs, or says why it cannot."""

from __future__ import annotations

import re
import warnings

import pytest
from doc_blocks import NOT_RUN, ROOT, Page, SybilFailure, commands, listing, pages, same

from gemmserve import Client


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run(path, server, tmp_path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    with Page(path, server.url, folder) as page:
        if missing := page.missing():
            pytest.skip(f"not on this machine: {', '.join(missing)}")
        page.run()
    with Client(server.url) as client:
        client.delete(older_than_s=0)
    for skipped in page.skipped:
        warnings.warn(f"{path.relative_to(ROOT)}, {skipped}", stacklevel=1)


def test_blocks_that_are_not_run_are_listed() -> None:
    assert listing() == NOT_RUN.read_text(), "python tests/support/doc_blocks.py --write"


def test_what_a_server_says_of_a_refusal_is_kept() -> None:
    """It is in the body, which curl's -f throws away: --fail-with-body does not."""
    for path in pages():
        assert not re.findall(r"\bcurl (?:\S+ )*-f .*", path.read_text()), path


def run(text: str, tmp_path) -> Page:
    """A page with that text, run without a server."""
    path, folder = tmp_path / "page.md", tmp_path / "folder"
    path.write_text(text)
    folder.mkdir()
    with Page(path, "http://127.0.0.1:9", folder) as page:
        page.run()
    return page


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert False\n```\n",
        "```python\n>>> 1 + 1\n3\n```\n",
        "```sh\nfalse\n```\n",
        "```console\n$ echo a\nb\n```\n",
        "```console\n$ false\n```\n",
        "```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```\n",
        "```sh\necho 1\n```\n\n<!-- output -->\n```text\n2\n```\n",
        "```json\n{1: 2}\n```\n",
        "```\nan unknown drawing\n```\n",
        "```cobol\nSTOP RUN.\n```\n",
        "```text\n$ gemmserve serve\n```\n",
        "<!-- not run: -->\n```sh\ntrue\n```\n",
        "<!-- not run: for the sake of it -->\n```sh\nif\n```\n",
        "<!-- setup: python\nassert False\n-->\n",
    ],
)
def test_a_wrong_block_fails(text, tmp_path) -> None:
    with pytest.raises((SybilFailure, AssertionError, ValueError)):
        run(text, tmp_path)


def test_names_and_variables_go_from_block_to_block(tmp_path) -> None:
    text = """
<!-- setup: python
one = 1
-->
```python
import asyncio
two = one + 1
await asyncio.sleep(0)
```
```python
>>> two + 1
3
```
```sh
seen="a b"
echo $seen > file
```
```console
$ cat file; \\
  echo "$seen"
a b
a...
$ false || echo 127.0.0.1:8000
127.0.0.1:8000
```
<!-- needs: no_such_module -->
```python
assert False
```
"""
    assert len(run(text, tmp_path).skipped) == 1


def test_commands_of_a_session() -> None:
    assert commands("$ a \\\n  b\nc\n$ d\n> e\n\nf") == [("a \\\n  b", "c"), ("d\ne", "\nf")]


def test_ellipses_match_lines() -> None:
    assert same("a\n...\nd ...", "a  \nb\nc\nd e\n")
    assert not same("a\n...\nd", "a\nb\n")

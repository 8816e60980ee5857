"""Markup of descriptions: paragraphs, ``` blocks and `code`, as docstrings and the OpenAPI document have them."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def prose(text: str) -> str:
    """Return HTML of paragraphs and blocks."""
    blocks = []
    for index, part in enumerate(re.split(r"```\n?(.*?)```", text, flags=re.DOTALL)):
        if index % 2:
            blocks.append(f"<pre>{escape(part)}</pre>")
        else:
            blocks += [f"<p>{inline(paragraph)}</p>" for paragraph in part.split("\n\n") if paragraph.strip()]
    return "".join(blocks)


def inline(text: str) -> str:
    """Return HTML of one paragraph's text."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text.strip()))


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already, the first of each row being its head; "" without rows."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

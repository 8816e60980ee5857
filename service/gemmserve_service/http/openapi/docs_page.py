"""/docs: the OpenAPI document as one page of plain HTML.

Self-contained on purpose: machines with a GPU are often cut off from the networks that viewers load their scripts from.
"""

from __future__ import annotations

import json
import re
from html import escape
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"

_STYLE: Final = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre, code { font: 0.875rem/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; padding: 0.75rem; border: 1px solid #8884; border-radius: 4px; white-space: pre-wrap; }
details { border-top: 1px solid #8884; padding: 0.5rem 0; }
summary { cursor: pointer; }
summary code { font-weight: 600; margin-right: 0.75rem; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0; }
td { border-top: 1px solid #8883; padding: 0.25rem 0.75rem 0.25rem 0; vertical-align: top; }
td:first-child { white-space: nowrap; }
"""


def render(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    info = document["info"]
    sections = "".join(_section(tag, document) for tag in document["tags"])
    models = "".join(_model(name, schema) for name, schema in sorted(document["components"]["schemas"].items()))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>{_prose(info['description'])}"
        f'<p>Machine-readable: <a href="openapi.json">openapi.json</a>.</p>{sections}<h2>Models</h2>{models}</html>'
    )


def _section(tag: dict[str, str], document: dict[str, Any]) -> str:
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if tag["name"] in operation.get("tags", ())
    )
    return f"<h2>{escape(tag['name'])}</h2>{_prose(tag['description'])}{operations}"


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code>{escape(operation['summary'])}</summary>"
        f"{_prose(operation.get('description', ''))}{_parameters(operation)}{_body(operation)}{_responses(operation)}"
        "</details>"
    )


def _parameters(operation: dict[str, Any]) -> str:
    rows = [
        (f"<code>{escape(parameter['name'])}</code> in {parameter['in']}", escape(parameter.get("description", "")))
        for parameter in operation.get("parameters", ())
    ]
    return f"<h4>Parameters</h4>{_table(rows)}" if rows else ""


def _body(operation: dict[str, Any]) -> str:
    body = operation.get("requestBody")
    if body is None:
        return ""
    rows = [(f"<code>{escape(kind)}</code>", "".join(_examples(media))) for kind, media in body["content"].items()]
    return f"<h4>Body</h4>{_prose(body.get('description', ''))}{_table(rows)}"


def _examples(media: dict[str, Any]) -> Iterator[str]:
    named = media.get("examples") or ({"": {"value": media["example"]}} if "example" in media else {})
    for name, example in named.items():
        yield f"{escape(name)}<pre>{escape(json.dumps(example['value']))}</pre>"
    for name in _references(media.get("schema")):
        yield f'<a href="#{name}">{name}</a> '


def _responses(operation: dict[str, Any]) -> str:
    rows = []
    for status, response in sorted(operation["responses"].items()):
        kinds = " ".join(f"<code>{escape(kind)}</code>" for kind in response.get("content", {}))
        headers = "".join(
            f"<br><code>{escape(name)}</code>: {escape(header['description'])}"
            for name, header in response.get("headers", {}).items()
        )
        models = " ".join(
            f'<a href="#{name}">{name}</a>' for name in sorted(set(_references(response.get("content", {}))))
        )
        rows.append((f"{escape(status)}", f"{_prose(response['description'])}{kinds} {models}{headers}"))
    return f"<h4>Answers</h4>{_table(rows)}"


def _model(name: str, schema: dict[str, Any]) -> str:
    text = json.dumps(schema, indent=2)
    return f'<details id="{name}"><summary><code>{name}</code></summary><pre>{escape(text)}</pre></details>'


def _references(node: Any) -> Iterator[str]:
    """Names of the models that a schema refers to."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].rpartition("/")[2]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _table(rows: list[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><td>{left}<td>{right}" for left, right in rows) + "</table>"


def _prose(text: str) -> str:
    """Paragraphs, ``` blocks and `code` of the descriptions."""
    parts = re.split(r"```\n?(.*?)```", text, flags=re.DOTALL)
    blocks = []
    for index, part in enumerate(parts):
        if index % 2:
            blocks.append(f"<pre>{escape(part)}</pre>")
        else:
            blocks += [f"<p>{_inline(paragraph)}</p>" for paragraph in part.split("\n\n") if paragraph.strip()]
    return "".join(blocks)


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text.strip()))

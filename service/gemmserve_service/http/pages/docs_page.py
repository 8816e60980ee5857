"""/docs: the OpenAPI document as a page. Texts, tables and samples are HTML of the server's; scripts add the search,
the tabs of samples and the forms to try an operation with.

Self-contained on purpose: machines with a GPU are often cut off from the networks that viewers load their scripts from.
"""

from __future__ import annotations

import json
import re
from html import escape
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.http.pages import frame
from gemmserve_service.http.pages.markup import inline, prose, table

if TYPE_CHECKING:
    from collections.abc import Iterator

Document = dict[str, Any]

_BOUNDS: Final = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} elements",
    "maxItems": "at most {} elements",
    "maxProperties": "at most {} members",
    "pattern": "as {}",
}


def render(document: Document, *, side: bool = False, keys: bool = False) -> str:
    """Return the page of an OpenAPI document.

    side: on the port of the metrics, where there is nothing to try. keys: whether the server has API keys.
    """
    info = document["info"]
    tags = [(tag, list(_operations(document, tag["name"]))) for tag in document["tags"]]
    contents = "".join(_contents(tag, operations) for tag, operations in tags)
    sections = "".join(_section(tag, operations, side=side) for tag, operations in tags)
    models = "".join(_model(name, schema) for name, schema in sorted(document["components"]["schemas"].items()))
    body = (
        '<div class="columns"><nav class="contents" aria-label="Operations"><div id="find"></div>'
        f'<ul>{contents}<li><a class="group" href="#models">Models</a></li></ul></nav>'
        f'<div id="operations"><h1>HTTP API</h1><div class="intro">{prose(info["description"])}'
        '<p>For programs: <a href="openapi.json">openapi.json</a> (OpenAPI 3.1, with these samples in it).</p></div>'
        f'{sections}<section aria-labelledby="models"><h2 id="models">Models</h2>{models}</section></div></div>'
    )
    return frame.document(
        "gemmserve: API",
        body,
        version=info["version"],
        here="docs",
        styles=("docs.css",),
        scripts=("docs.js",),
        data={"keys": str(keys).lower()},
        session=not side,
        side=side,
    )


def operation_id(method: str, path: str) -> str:
    """Return the anchor of an operation: "op-get-v1-arrays-array_id"."""
    return "op-" + re.sub(r"\W+", "-", f"{method.lower()}{path}").strip("-")


def _operations(document: Document, tag: str) -> Iterator[tuple[str, str, Document]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if tag in operation.get("tags", ()):
                yield method.upper(), path, operation


def _contents(tag: Document, operations: list[tuple[str, str, Document]]) -> str:
    entries = "".join(
        f'<li data-for="{operation_id(method, path)}"><a href="#{operation_id(method, path)}">'
        f"{escape(operation['summary'])}</a></li>"
        for method, path, operation in operations
    )
    return (
        f'<li><a class="group" href="#tag-{tag["name"]}">{escape(tag["name"]).capitalize()}</a><ul>{entries}</ul></li>'
    )


def _section(tag: Document, operations: list[tuple[str, str, Document]], *, side: bool) -> str:
    listed = "".join(_operation(*each, side=side) for each in operations)
    name = f"tag-{tag['name']}"
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(tag["name"]).capitalize()}</h2>'
        f"{prose(tag['description'])}{listed}</section>"
    )


def _operation(method: str, path: str, operation: Document, *, side: bool) -> str:
    name = operation_id(method, path)
    attempt = "" if side else '<div class="try"></div>'
    # The anchor is inside, so that browsers open the element when they follow it; without scripts too.
    return (
        f'<details class="operation" data-method="{method}" data-path="{escape(path)}"><summary><h3>'
        f'<span class="method {method.lower()}">{method}</span> <code>{escape(path)}</code> '
        f'<span class="what">{escape(operation["summary"])}</span></h3></summary><div class="inside" id="{name}">'
        f"{prose(operation.get('description', ''))}{_samples(operation, name)}{attempt}"
        f"{_parameters(operation)}{_body(operation)}{_answers(operation)}{_problems(operation, side=side)}"
        f'<p><a href="#{name}">Link to this operation</a></p></div></details>'
    )


def _samples(operation: Document, name: str) -> str:
    blocks = "".join(
        f'<div class="sample" id="{name}-{index}" data-label="{escape(sample["label"])}"><h4>{escape(sample["label"])}'
        f"</h4><pre>{escape(sample['source'].strip())}</pre></div>"
        for index, sample in enumerate(operation.get("x-codeSamples", ()))
    )
    return f'<div class="samples">{blocks}</div>' if blocks else ""


def _parameters(operation: Document) -> str:
    rows = [
        (
            _named(parameter["name"], parameter["schema"], where=parameter["in"], required=parameter.get("required")),
            inline(parameter.get("description", "")),
        )
        for parameter in operation.get("parameters", ())
    ]
    return _titled("Parameters", table("Parameters", ("Name", "Meaning"), rows))


def _body(operation: Document) -> str:
    body = operation.get("requestBody")
    if body is None:
        return ""
    kinds = "".join(
        f"<h5><code>{escape(kind)}</code></h5>{_form(media)}{''.join(_examples(media))}"
        for kind, media in body["content"].items()
    )
    return f"<h4>Body</h4>{prose(body.get('description', ''))}{kinds}"


def _form(media: Document) -> str:
    """Parts of a form, or the models of JSON."""
    schema = media.get("schema", {})
    if "encoding" in media:
        return table("Parts", ("Part", "Meaning"), list(_properties(schema)))
    models = " or ".join(_link(name) for name in dict.fromkeys(_references(schema)))
    return f"<p>{models}</p>" if models else ""


def _examples(media: Document) -> Iterator[str]:
    named = media.get("examples") or ({"example": {"value": media["example"]}} if "example" in media else {})
    for name, example in named.items():
        yield f"<p>{escape(name)}:</p><pre>{escape(json.dumps(example['value']))}</pre>"


def _answers(operation: Document) -> str:
    rows = []
    for status, response in sorted(operation["responses"].items()):
        if int(status) >= 400:
            continue
        kinds = " ".join(f"<code>{escape(kind)}</code>" for kind in response.get("content", {}))
        models = " or ".join(_link(name) for name in dict.fromkeys(_references(response.get("content", {}))))
        headers = "".join(
            f"<li><code>{escape(name)}</code>: {inline(header['description'])}</li>"
            for name, header in response.get("headers", {}).items()
        )
        what = " ".join(part for part in (kinds, models) if part)
        lines = [inline(response["description"]), *([what] if what else ())]
        listed = f'<ul class="plain">{headers}</ul>' if headers else ""
        rows.append((escape(status), "<br>".join(lines) + listed))
    return _titled("Answers", table("Answers", ("Status", "What"), rows))


def _problems(operation: Document, *, side: bool) -> str:
    rows = []
    for status, response in sorted(operation["responses"].items()):
        slugs = [slug for media in response.get("content", {}).values() for slug in media.get("examples", ())]
        if int(status) >= 400 and slugs:
            # The port of the metrics has no page of the problems.
            form = "<code>{0}</code>" if side else '<a href="problems#{0}"><code>{0}</code></a>'
            rows.append((escape(status), " ".join(map(form.format, slugs))))
    return _titled("Problems", table("Problems", ("Status", "Types"), rows))


def _titled(title: str, text: str) -> str:
    return f"<h4>{title}</h4>{text}" if text else ""


def _model(name: str, schema: Document) -> str:
    rows = list(_properties(schema))
    what = table(name, ("Field", "Meaning"), rows) if rows else f"<p>{type_text(schema)}</p>"
    return (
        f'<details class="model"><summary><h3><code>{name}</code></h3></summary><div class="inside" id="model-{name}">'
        f"{prose(schema.get('description', ''))}{what}</div></details>"
    )


def _properties(schema: Document) -> Iterator[tuple[str, str]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield _named(name, field, required=name in required), inline(field.get("description", ""))


def _named(name: str, schema: Document, *, where: str = "", required: bool | None = False) -> str:
    """HTML of a name and, below it, where it stands and what it may be."""
    about = f"{where}: {type_text(schema).removesuffix(' or null')}" if where else type_text(schema)
    return f'<code>{escape(name)}</code>{" <b>required</b>" if required else ""}<span class="about">{about}</span>'


def type_text(schema: Document) -> str:
    """HTML of what values a schema admits, in words."""
    text = _kind(schema)
    bounds = [words.format(_value(schema[key])) for key, words in _BOUNDS.items() if key in schema]
    if schema.get("default") is not None:
        bounds.append(f"default {_value(schema['default'])}")
    return f"{text}, {', '.join(bounds)}" if bounds else text


def _kind(schema: Document) -> str:
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    if "const" in schema:
        return _value(schema["const"])
    if "enum" in schema:
        return " | ".join(_value(value) for value in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(type_text(option) for option in schema[key]))
    kind = schema.get("type", "anything")
    if kind == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(type_text(item) for item in schema['prefixItems'])}]"
        return f"array of {type_text(schema['items'])}" if "items" in schema else "array"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {type_text(schema['additionalProperties'])}"
    if schema.get("format") == "binary":
        return "bytes"
    return escape(" or ".join(kind) if isinstance(kind, list) else kind)


def _value(value: Any) -> str:
    return f"<code>{escape(json.dumps(value))}</code>"


def _link(model: str) -> str:
    return f'<a href="#model-{model}">{model}</a>'


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

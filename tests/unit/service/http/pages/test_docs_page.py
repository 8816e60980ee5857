"""The page at /docs: whole without scripts, its anchors and links lead somewhere, kept where nothing has changed."""

from __future__ import annotations

import gzip
import re

import httpx
import pytest

from gemmserve_service.http.middleware.access import SidePort
from gemmserve_service.http.openapi.code_samples import code_samples
from gemmserve_service.http.pages import docs_page
from gemmserve_service.http.problems import catalogue

MOST_BYTES = 60 << 10


@pytest.fixture
async def text(client):
    return (await client.get("/docs")).text


async def test_every_operation_has_its_place_and_samples(text):
    for (method, path), samples in code_samples().items():
        anchor = docs_page.operation_id(method, path)
        assert text.count(f'id="{anchor}"') == 1
        assert f'<a href="#{anchor}">' in text
        assert len(re.findall(rf'id="{anchor}-\d"', text)) == len(samples)


async def test_anchors_are_of_one_element_each(text):
    anchors = re.findall(r'\sid="([^"]+)"', text)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(anchors)


async def test_problems_are_explained(text):
    assert set(re.findall(r'href="problems#([^"]+)"', text)) <= set(catalogue())
    assert 'href="problems#shape-mismatch"' in text


async def test_every_link_leads_somewhere(client, text):
    for path in set(re.findall(r'href="([^"#]+)', text)):
        assert (await client.get(f"/{path}")).status_code == 200, path


async def test_it_is_compressed_and_kept(client):
    async with client.stream("GET", "/docs", headers={"Accept-Encoding": "gzip"}) as answer:
        sent = b"".join([piece async for piece in answer.aiter_raw()])
    assert len(sent) < MOST_BYTES
    assert gzip.decompress(sent) == (await client.get("/docs", headers={"Accept-Encoding": "identity"})).content
    again = await client.get("/docs", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == answer.headers["content-security-policy"]


async def test_it_knows_whether_keys_are_wanted(client, make_key, text):
    assert 'data-keys="false"' in text
    make_key()
    assert 'data-keys="true"' in (await client.get("/docs")).text


async def test_nothing_is_tried_on_the_side_port(app, text):
    assert '<div class="try">' in text
    transport = httpx.ASGITransport(app=SidePort(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as side:
        there = (await side.get("/docs")).text
    assert '<div class="try">' not in there
    assert 'href="problems' not in there


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 9}, "integer, at least <code>1</code>, at most <code>9</code>"),
        ({"enum": ["C", "F"]}, "<code>&quot;C&quot;</code> | <code>&quot;F&quot;</code>"),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "number or null"),
        ({"type": "array", "items": {"type": "string"}}, "array of string"),
        ({"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}]}, "[number, number]"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "object of string"),
        ({"$ref": "#/components/schemas/Problem"}, '<a href="#model-Problem">Problem</a>'),
        ({"type": "string", "format": "binary"}, "bytes"),
        ({"type": ["string", "null"], "pattern": "^<a>"}, "string or null, as <code>&quot;^&lt;a&gt;&quot;</code>"),
        ({}, "anything"),
    ],
)  # fmt: skip
def test_types_in_words(schema, words):
    assert docs_page.type_text(schema) == words

"""/problems: JSON for programs, a page for people; the address in a problem's `type` leads to both."""

from __future__ import annotations

import re
from html import escape

import pytest

from gemmserve_service.http.pages.markup import inline
from gemmserve_service.http.problems import catalogue
from gemmserve_service.remedies import remedy

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
PROGRAMS = [None, "*/*", "application/json", "application/json, text/html", "application/json, text/html;q=0.9"]


@pytest.mark.parametrize("accept", PROGRAMS)
async def test_programs_get_json(client, accept):
    headers = {} if accept is None else {"Accept": accept}
    answer = await client.get("/problems", headers=headers)
    assert answer.json() == catalogue()
    assert answer.headers["vary"] == "Accept"
    assert (await client.get("/problems/timeout", headers=headers)).json() == catalogue()["timeout"]


async def test_people_get_a_page(client):
    answer = await client.get("/problems", headers={"Accept": BROWSER})
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["vary"] == "Accept"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    sections = dict(re.findall(r'<section class="card entry" id="([\w-]+)"(.*?)</section>', answer.text))
    assert set(sections) == set(catalogue())
    for slug, entry in catalogue().items():
        assert f">{entry['status']}<" in sections[slug]
        assert escape(entry["title"]) in sections[slug]
        assert inline(remedy(slug)) in sections[slug]
        assert f'<a href="#{slug}">' in answer.text
    assert ">429<" in sections["quota-exceeded"]
    assert ">507<" in sections["quota-exceeded"]


async def test_the_type_leads_people_to_its_place(client):
    problem = (await client.get("/v1/arrays/arr_00000000000000000000000000")).json()
    answer = await client.get(problem["type"], headers={"Accept": BROWSER})
    assert answer.status_code == 303
    # Relative to /problems/not-found, so that a proxy may add a prefix.
    assert answer.headers["location"] == "../problems#not-found"
    assert answer.headers["vary"] == "Accept"


@pytest.mark.parametrize("accept", [*PROGRAMS, BROWSER])
async def test_an_unknown_type_is_a_problem_itself(client, accept):
    answer = await client.get("/problems/no-such", headers={} if accept is None else {"Accept": accept})
    assert answer.status_code == 404
    assert answer.json()["type"] == "/problems/not-found"

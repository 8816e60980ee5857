"""The page at / in a browser, on the real server: what a script did is found there, with and without a mouse."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import numpy as np
import pytest
from browser import accessibility
from live_server import LiveServer, until

from gemmserve import Client

HOSTILE = '<img src=x onerror="document.title=1">'
VIEWS = [{"width": 1280}, {"width": 360, "height": 740, "dark": True}]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with LiveServer(data_dir=tmp_path_factory.mktemp("page")) as live:
        yield live


@pytest.fixture(scope="module")
def operands(served):
    """Two arrays on the server, and their product, made by a job: (client's arrays, handles)."""
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((24, 24)) + 1j * rng.standard_normal((24, 24)) for _ in range(2))
    with Client(served.url) as client:
        handles = client.put(a, name="steering"), client.put(b, name="field", labels={"note": HOSTILE})
        d = client.gemm(*handles)
        d.numpy()
        yield (a, b), (*handles, d)


@pytest.fixture
def home(served, open_page, operands):
    """home(**options of open_page) -> the page, once it has heard from the server's stream."""

    def open_(**options):
        page = open_page(served.url, **options)
        page.get_by_text("Live", exact=True).wait_for()
        return page

    return open_


def overview(**fields):
    """An overview that looks like a real one, for what a server cannot be made to say."""
    now = time.time()
    end = now // 60 * 60 - 30  # its three points are in one minute
    series = {name: [1.0, None, 3.0] for name in ("products", "flops", "bytes_in", "bytes_out")}
    series |= {f"{phase}_{p}": [0.01, None, 0.02] for phase in ("queued", "computing", "total") for p in ("p50", "p99")}
    device = {
        "index": 0, "id": "cuda:0", "name": "Device", "backend": "cuda", "state": "ready", "memory_bytes": 2**37,
        "memory_used_bytes": 2**36, "resident_bytes": 0, "utilisation": 0.5, "memory_utilisation": 0.1,
        "power_watts": 699.0, "power_limit_watts": 700.0, "temperature_celsius": 88.0, "clock_hertz": 1e9, "health": [],
        "running": [{"id": None, "kind": None, "what": None, "since": now, "owner": None}],
    }  # fmt: skip
    document = {
        "time": now, "version": "1", "started": now - 100, "state": "ready", "ready": True, "reasons": [],
        "devices": [device], "queue": [], "failures": [],
        "memory": {
            "resident": {"bytes": 1, "limit": 2, "hits": 3, "misses": 1}, "arena": None,
            "store": {"bytes": 1, "limit": None},
        },
        "history": {"step": 5, "end": end, "series": {**series, "utilisation": [[0.5, None, 0.6]]}},
    }  # fmt: skip
    return {**document, **fields}


def stored(served):
    """Ids of the server's arrays."""
    with Client(served.url) as client:
        return {array.id for array in client.arrays()}


def stand_in(page, document):
    """From now on the page hears that; its stream says nothing."""
    page.route("**/v1/overview?history=true", lambda route: route.fulfill(json=document))
    page.route("**/v1/overview/stream", lambda _: None)
    page.reload()


def test_what_a_script_did_is_found(home, operands) -> None:
    _, (a, _, d) = operands
    page = home()
    assert not page.get_by_text("need scripts").is_visible()
    page.locator("#jobs table").wait_for()
    link = page.locator("#jobs tr", has_text="succeeded").first.get_by_role("link")
    job_id = link.inner_text()
    link.click()
    job = page.get_by_role("dialog", name="Job")
    assert "computing" in job.locator(".phases").get_attribute("aria-label")
    page.wait_for_url(f"**/#{job_id}")
    job.get_by_role("link", name=d.id).click()
    array = page.get_by_role("dialog", name="Array")
    array.get_by_role("img", name=re.compile(r"^\|x\| of 24 . 24, from")).wait_for()
    until(lambda: page.get_by_role("dialog").count() == 1)
    array.get_by_label("Show").select_option("phase of x")
    array.get_by_role("img", name=re.compile("^phase of x of 24 . 24, from -3.14 to 3.14$")).wait_for()
    with page.expect_download() as download:
        array.get_by_role("button", name="Download .npy").click()
    np.testing.assert_array_equal(np.load(download.value.path()), d.numpy())
    page.keyboard.press("Escape")
    until(lambda: page.get_by_role("dialog").count() == 0)
    until(lambda: page.evaluate("location.hash") == "")
    page.locator("#arrays").get_by_role("link", name=re.compile("^.*steering")).locator("canvas").wait_for()
    page.get_by_label("Name").fill("teer")
    until(lambda: page.locator("#arrays li").count() == 1)
    page.evaluate("id => { location.hash = id }", a.id)
    page.get_by_role("dialog", name="Array").get_by_text("steering", exact=True).wait_for()


def test_the_form_multiplies_files(home, tmp_path, operands) -> None:
    (a, b), _ = operands
    np.save(tmp_path / "a.npy", np.asfortranarray(a.astype(np.complex64)))
    np.save(tmp_path / "b.npy", b.astype(np.complex64))
    page = home()
    form = page.locator("#multiply")
    form.get_by_role("group", name="A").get_by_label(".npy file").set_input_files(tmp_path / "a.npy")
    form.get_by_role("group", name="B").get_by_label(".npy file").set_input_files(tmp_path / "b.npy")
    form.get_by_role("group", name="B").get_by_label("taken").select_option("conjugate transposed")
    form.get_by_role("button", name="Multiply").click()
    picture = form.get_by_role("img", name=re.compile(r"^\|x\| of 24 . 24"))
    picture.wait_for()
    with page.expect_download() as download:
        form.get_by_role("button", name="Download .npy").click()
    found = np.load(download.value.path())
    np.testing.assert_allclose(found, a @ b.conj().T, rtol=1e-4, atol=1e-4)
    # The largest element has the colour at the upper end of viridis.
    pixels = picture.evaluate(
        "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
    )
    pixels = np.reshape(pixels, (24, 24, 4))
    assert pixels[np.unravel_index(np.abs(found).argmax(), found.shape)].tolist() == [253, 231, 37, 255]
    assert pixels[np.unravel_index(np.abs(found).argmin(), found.shape)].tolist() == [68, 1, 84, 255]


def test_the_form_takes_names_and_ids_and_says_what_is_wrong(home, served, operands, tmp_path) -> None:
    (a, b), (handle, *_) = operands
    page = home()
    before = stored(served)
    form = page.locator("#multiply")
    first, second = (form.get_by_role("group", name=name).get_by_label("or an array of the server") for name in "AB")
    submit = form.get_by_role("button", name="Multiply")
    submit.click()
    form.get_by_text("A is missing").wait_for()
    first.fill(handle.id)
    second.fill("nothing-of-that-name")
    submit.click()
    form.get_by_text("No array is called nothing-of-that-name").wait_for()
    np.save(tmp_path / "c.npy", np.ones((3, 3)))
    form.get_by_role("group", name="B").get_by_label(".npy file").set_input_files(tmp_path / "c.npy")
    assert second.input_value() == "", "one or the other"
    submit.click()
    problem = form.get_by_role("alert")
    problem.get_by_role("link", name="What to do").wait_for()
    assert problem.get_by_role("link").get_attribute("href").endswith("/problems/shape-mismatch")
    assert any("422" in line for line in page.complaints), "Chromium tells of a refused request"
    page.complaints.clear()
    until(lambda: stored(served) == before)  # the file that did not fit is gone
    second.fill("field")
    submit.click()
    form.get_by_text("Stored for an hour as").wait_for()
    with page.expect_download() as download:
        form.get_by_role("button", name="Download .npy").click()
    np.testing.assert_allclose(np.load(download.value.path()), a @ b, rtol=1e-10)


def test_an_example_needs_no_files(home) -> None:
    page = home()
    page.get_by_role("button", name="Fill in an example").click()
    page.keyboard.press("Enter")
    page.get_by_role("img", name=re.compile(r"^\|x\| of 192 . 192")).wait_for()


def test_names_of_others_stay_text(home, operands) -> None:
    page = home()
    page.goto(f"{page.url}#{operands[1][1].id}")
    page.get_by_role("dialog", name="Array").get_by_text(f"note={HOSTILE}").wait_for()
    problem = {"type": f"/problems/{HOSTILE}", "title": HOSTILE, "status": 500, "detail": HOSTILE}
    document = overview(
        state=HOSTILE, ready=False, version=HOSTILE, reasons=[{"reason": HOSTILE, "remedy": HOSTILE}],
        queue=[{"owner": HOSTILE, "queued": 1, "running": 1, "oldest": 1.0}],
        failures=[
            {"time": 1.0, "job": HOSTILE, "owner": HOSTILE, "kind": HOSTILE, "problem": problem, "remedy": HOSTILE}
        ],
    )  # fmt: skip
    device = document["devices"][0]
    device |= {"id": HOSTILE, "name": HOSTILE, "state": HOSTILE, "health": [HOSTILE]}
    device["running"][0] |= {"id": f"job_{HOSTILE}", "what": HOSTILE, "owner": HOSTILE}
    stand_in(page, document)
    page.locator("#failures table").wait_for()
    assert page.locator("main img").count() == 0
    assert page.locator("#failures").inner_text().count(HOSTILE) == 5
    assert page.locator("#devices").inner_text().count(HOSTILE) == 5
    assert page.title() == "gemmserve"


def test_a_server_that_is_not_ready_says_why_and_what_to_do(home) -> None:
    page = home()
    reasons = [{"reason": "no worker has answered", "remedy": "Run `gemmserve doctor`."}]
    stand_in(page, overview(state="not ready", ready=False, reasons=reasons))
    page.locator("#state").get_by_text("not ready", exact=True).wait_for()
    assert page.locator(".reasons").inner_text() == "no worker has answered: Run gemmserve doctor."


def test_without_scripts_there_are_tables(served, open_page) -> None:
    page = open_page(served.url, java_script_enabled=False)
    assert page.get_by_role("table").count() >= 1
    assert page.locator("#devices").get_by_role("cell", name="ready").is_visible()
    assert page.get_by_text("need scripts").is_visible()
    assert not page.get_by_role("heading", name="Multiply").is_visible()


def test_it_goes_on_when_the_stream_breaks(home) -> None:
    page = home()
    streams = []
    page.on("request", lambda request: streams.append(request.url) if "/stream" in request.url else None)
    page.route(
        "**/v1/overview/stream", lambda route: route.fulfill(status=200, content_type="text/event-stream", body="")
    )
    page.reload()
    page.get_by_text("Connecting again…").wait_for()
    page.unroute("**/v1/overview/stream")
    page.get_by_text("Live", exact=True).wait_for()
    assert len(streams) > 1


def test_a_server_that_does_not_answer_is_not_called_ready(home) -> None:
    page = home()
    page.route(
        "**/v1/overview/stream", lambda route: route.fulfill(status=200, content_type="text/event-stream", body="")
    )
    page.reload()
    page.get_by_text("Connecting again…").wait_for()
    page.route("**/v1/overview?history=true", lambda route: route.abort())
    page.locator("#state").get_by_text("not reachable", exact=True).wait_for()
    assert "as it was at" in page.locator("#state").inner_text()
    assert page.locator("#devices table").is_visible()
    assert accessibility(page, "#state") == []
    page.unroute("**/v1/overview?history=true")
    page.unroute("**/v1/overview/stream")
    page.locator("#state").get_by_text("ready", exact=True).wait_for()
    page.get_by_text("Live", exact=True).wait_for()
    assert all("ERR_FAILED" in line for line in page.complaints)
    page.complaints.clear()


def test_a_page_that_nobody_looks_at_hears_nothing(home) -> None:
    page = home()
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/v1/overview/stream")):
        page.evaluate(
            """() => { Object.defineProperty(document, "hidden", { value: true, configurable: true });
                       document.dispatchEvent(new Event("visibilitychange")); }"""
        )
    with page.expect_request("**/v1/overview/stream"):
        page.evaluate("() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); }")


def test_charts_open_by_keyboard_and_say_the_same_in_a_table(home) -> None:
    page = home()
    stand_in(page, overview())
    tile = page.locator("a.tile", has_text="Time of a product")
    assert "p50 20 ms" in tile.inner_text()
    assert "at most 20 ms" in tile.inner_text()
    tile.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Time of a product")
    dialog.locator(".uplot canvas").wait_for()
    dialog.get_by_role("button", name="5 min", exact=True).press("Enter")
    assert dialog.get_by_role("button", name="5 min", exact=True).get_attribute("aria-pressed") == "true"
    dialog.get_by_text("As a table").click()
    assert "15 ms" in dialog.get_by_role("table", name="Time of a product").inner_text(), "mean of 10 and 20"
    for _ in range(12):  # the page behind is out of reach
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent").startswith("Time of a product")


def test_focus_survives_what_is_drawn_anew(home, served) -> None:
    page = home()
    tile = page.locator("a.tile").first
    tile.wait_for()
    tile.focus()
    page.evaluate("document.activeElement.seen = true")
    text = page.locator("#memory").inner_text()
    with Client(served.url) as client, client.put(np.ones(2**20)):
        until(lambda: page.locator("#memory").inner_text() != text)
    assert page.evaluate("document.activeElement.seen")


def test_the_first_key_leads_past_the_bar(home) -> None:
    page = home()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


@pytest.mark.parametrize("view", VIEWS, ids=["light", "narrow-dark"])
def test_nothing_is_out_of_reach(home, view) -> None:
    page = home(**view, reduced_motion="reduce")
    reasons = [{"reason": "no worker has answered", "remedy": "Wait, or run `gemmserve doctor`."}]
    problem = {"type": "/problems/timeout", "title": "The deadline passed", "status": 504, "detail": "2 s"}
    failure = {"time": 1.0, "job": "job_1", "owner": "a", "kind": "gemm", "problem": problem, "remedy": "Wait."}
    document = overview(state="not ready", ready=False, reasons=reasons, failures=[failure])
    document["devices"][0]["health"] = ["throttled: the power limit is reached"]
    stand_in(page, document)
    page.get_by_role("button", name="Fill in an example").click()
    page.get_by_role("button", name="Multiply").click()
    page.locator("#multiply .picture").wait_for()
    page.locator("#jobs a").first.wait_for()
    assert accessibility(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    for link in (page.locator("a.tile").first, page.locator("#jobs a").first, page.locator("#arrays a").first):
        link.click()
        page.get_by_role("dialog").locator(".uplot, .phases, .picture").wait_for()
        assert accessibility(page, "dialog") == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.keyboard.press("Escape")


def test_the_first_look_costs_little(served, open_page) -> None:
    """HTML, CSS and scripts as they go over the wire, and no library of charts before one is opened."""
    page = open_page("about:blank")
    requests = []
    page.on("requestfinished", lambda request: requests.append(request))  # noqa: PLW0108 (Playwright marks it)
    page.goto(served.url)
    page.get_by_text("Live", exact=True).wait_for()
    sizes = {request.url: request.sizes() for request in requests if "/v1/" not in request.url}
    assert len(sizes) > 10
    assert not [url for url in sizes if "uplot" in url]
    total = sum(size["responseBodySize"] + size["responseHeadersSize"] for size in sizes.values())
    assert total < 60_000, sizes


@pytest.fixture
def keyed(tmp_path):
    """A server with keys."""
    keys(tmp_path / "data", "create", "somebody")
    with LiveServer(data_dir=tmp_path / "data") as live:
        yield live


def test_sign_in_and_what_becomes_of_a_key(keyed, open_page) -> None:
    key = keys(keyed.data_dir, "create", "alice").strip()
    other = keys(keyed.data_dir, "create", "bob").strip()
    for text in (key, other):
        until(lambda text=text: answers(keyed, text))
    page = open_page(keyed.url)
    asked = []
    page.on("request", lambda request: asked.append(request))  # noqa: PLW0108 (Playwright marks it)
    assert page.get_by_text("ready", exact=True).is_visible()
    assert not page.get_by_role("heading", name="Devices").is_visible()
    assert accessibility(page) == []
    page.locator("#welcome").get_by_role("button", name="Sign in").click()
    dialog = page.get_by_role("dialog", name="Sign in with an API key")
    assert page.evaluate("document.activeElement.id") == "sign-in-key"
    assert accessibility(page) == []
    for wrong in ("nonsense", "gs_x y", "é", key[:-1] + ("0" if key[-1] != "0" else "1")):
        dialog.get_by_label("API key").fill(wrong)
        page.keyboard.press("Enter")
        until(lambda: dialog.get_by_role("alert").is_visible() and page.locator("#sign-in-key:focus").count())
        until(lambda: not dialog.get_by_role("button", name="Sign in").is_disabled())
    assert "checksum" in dialog.get_by_role("alert").inner_text()
    dialog.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")
    page.locator("#devices table").wait_for()
    page.get_by_text("Live", exact=True).wait_for()
    page.get_by_role("heading", name="Multiply").wait_for()
    # In memory alone: nothing that outlives the page has it, no address, no cookie.
    kept = page.evaluate("JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie, location.href])")
    secret = key.split("_")[-1]
    assert secret not in kept
    assert page.context.cookies() == []
    assert not [request.url for request in asked if secret in request.url]
    assert secret not in page.content()
    # A key that is revoked: what it showed is gone, and the page says why it asks.
    page.complaints.clear()
    keys(keyed.data_dir, "revoke", key.split("_")[1])
    dialog.get_by_text("revoked").wait_for()
    assert page.locator("#devices table").count() == 0
    dialog.get_by_label("API key").fill(other)
    page.keyboard.press("Enter")
    page.locator("#devices table").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_text("Sign in with one to see").wait_for()
    assert page.locator("#devices table").count() == 0
    assert all("401" in line for line in page.complaints)
    page.complaints.clear()
    page.reload()
    assert page.locator("#welcome").is_visible()


def test_the_state_is_followed_before_anybody_signs_in(keyed, open_page) -> None:
    page = open_page(keyed.url)
    page.clock.install()
    page.reload()
    page.locator("#welcome").wait_for()
    page.route(f"{keyed.url}/", lambda route: route.abort())
    page.clock.fast_forward(11_000)
    page.locator("#state").get_by_text("not reachable", exact=True).wait_for()
    page.unroute(f"{keyed.url}/")
    page.clock.fast_forward(11_000)
    page.locator("#state").get_by_text("ready", exact=True).wait_for()
    assert page.locator("#welcome").is_visible()
    assert all("ERR_FAILED" in line for line in page.complaints)
    page.complaints.clear()


def keys(data_dir, *arguments: str) -> str:
    command = [sys.executable, "-m", "gemmserve.cli", "keys", *arguments, "--data-dir", str(data_dir)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def answers(server, key: str) -> bool:
    with server.http() as http:
        return http.get("/v1/usage", headers={"Authorization": f"Bearer {key}"}).status_code == 200

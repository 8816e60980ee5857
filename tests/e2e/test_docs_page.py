"""/docs and /problems in a browser: operations are found, read, and tried with files, JSON, mistakes and a key."""

from __future__ import annotations

import re

import numpy as np
import pytest
from browser import accessibility
from live_server import LiveServer

from gemmserve_service.tenancy.keyring import create_key

GEMM = "#op-post-v1-gemm"
ARRAYS = "#op-post-v1-arrays"
JOBS = "#op-post-v1-jobs"
ID = re.compile(r"(arr|job)_[0-9a-z]{26}")


@pytest.fixture
def files(tmp_path):
    """Two .npy files that fit each other, of small whole numbers: what is shown is exact."""
    a = np.arange(12).reshape(3, 4) + 1j
    b = np.arange(8).reshape(4, 2) - 2j
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for path, array in zip(paths, (a, b), strict=True):
        np.save(path, array.astype(np.complex64))
    return paths, (a @ b).astype(np.complex64)


def open_form(page, anchor):
    """The form of an operation, opened by its address."""
    page.goto(page.url.partition("#")[0] + anchor)
    page.locator(f"{anchor} .try > button").click()
    form = page.locator(f"{anchor} form")
    form.wait_for()
    return form


def send(form):
    """Send it, and wait for the end of its answer; return the status."""
    form.get_by_role("button", name="Send").click()
    form.locator("button.primary:not([disabled])").wait_for()
    pill = form.locator(".answer .pill")
    return int(pill.inner_text().split()[0])


def test_two_files_are_multiplied(server, open_page, files, tmp_path) -> None:
    (a, b), d = files
    page = open_page(f"{server.url}/docs")
    form = open_form(page, GEMM)
    form.get_by_label("a (required)").set_input_files(a)
    form.get_by_label("b (required)").set_input_files(b)
    form.get_by_label("params").fill("")
    assert send(form) == 200
    assert form.locator("caption").inner_text() == "complex64, 3 \N{MULTIPLICATION SIGN} 2, C order"
    shown = [complex(text) for text in form.locator("table.elements td").all_inner_texts()]
    np.testing.assert_array_equal(np.array(shown).reshape(3, 2), d)
    with page.expect_download() as download:
        form.get_by_role("link", name="Save d.npy").click()
    download.value.save_as(tmp_path / "saved.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "saved.npy"), d)
    form.get_by_text("Header fields").click()
    assert form.get_by_role("row", name="gemm-algorithm numpy").count() == 1


def test_json_of_stored_arrays(server, open_page) -> None:
    """Example arrays are uploaded, the example job finds them, and is followed to its end."""
    page = open_page(f"{server.url}/docs")
    form = open_form(page, ARRAYS)
    form.get_by_role("button", name="Use an example").click()
    form.get_by_label("name", exact=True).fill("fourier")
    array_ids = []
    for _ in range(2):  # other tests' arrays are there, too, of other shapes
        assert send(form) == 201
        array_ids.append(ID.search(form.locator(".answer pre").inner_text())[0])
    form = open_form(page, JOBS)
    example = form.get_by_label("JSON (required)").input_value()
    assert all(array_id in example for array_id in array_ids), "the example is of arrays that are there"
    form.get_by_label("Prefer").fill("wait=60")
    assert send(form) == 200
    answer = form.locator(".answer pre").inner_text()
    assert '"state": "succeeded"' in answer
    job_id = re.search(r"job_[0-9a-z]{26}", answer)[0]
    form = open_form(page, "#op-get-v1-jobs-job_id-events")
    assert form.get_by_label("job_id").input_value() == job_id
    assert send(form) == 200
    assert "event: job" in form.locator(".answer pre").inner_text()


def test_several_results_are_shown(server, open_page) -> None:
    page = open_page(f"{server.url}/docs")
    form = open_form(page, "#op-post-v1-gemm-reduce")
    for button in form.get_by_role("button", name="Use an example").all():
        button.click()
    assert send(form) == 200
    captions = form.locator("caption").all_inner_texts()
    assert captions == ["sumsq: float32, 4, C order", "absmax: float32, 4, C order"]
    # The square of the DFT matrix is 4 times a permutation.
    assert form.locator("table.elements td").all_inner_texts() == ["16"] * 4 + ["4"] * 4


def test_a_mistake_is_explained(server, open_page, files) -> None:
    (a, b), _ = files
    page = open_page(f"{server.url}/docs")
    form = open_form(page, GEMM)
    form.get_by_role("button", name="Send").click()
    assert "a: choose a file" in form.locator(".error").inner_text()
    assert form.get_by_label("a (required)").evaluate("field => field === document.activeElement")
    form.get_by_label("params").fill("{")
    form.get_by_label("a (required)").set_input_files(b)
    form.get_by_label("b (required)").set_input_files(a)
    form.get_by_role("button", name="Send").click()
    assert "params is no JSON" in form.locator(".error").first.inner_text()
    form.get_by_label("params").fill('{"trans_b": "N"}')
    assert send(form) == 422
    page.complaints.clear()  # Chromium's of the status
    assert form.locator(".answer .error strong").inner_text() == "Shape mismatch"
    with page.expect_navigation():
        form.get_by_role("link", name="What to do").click()
    assert page.url == f"{server.url}/problems#shape-mismatch"
    assert page.locator("section:target h2").inner_text() == "shape-mismatch 422"


def test_a_key_is_asked_for_and_kept(tmp_path, open_page) -> None:
    """The key is asked for once, refused if it is wrong, sent with every request after, and nowhere in storage."""
    _, key = create_key(tmp_path / "data", "browser")
    with LiveServer(data_dir=tmp_path / "data") as server:
        page = open_page(f"{server.url}/docs")
        form = open_form(page, "#op-get-v1-usage")
        form.get_by_role("button", name="Send").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("API key").fill("gs_wrong")
        dialog.get_by_role("button", name="Sign in").click()
        dialog.get_by_role("alert").filter(has_text=re.compile(".")).wait_for()
        dialog.get_by_label("API key").fill(key)
        dialog.get_by_role("button", name="Sign in").click()
        form.locator(".answer pre").wait_for()
        assert '"quotas"' in form.locator(".answer pre").inner_text()
        form = open_form(page, "#op-get-v1-devices")
        assert send(form) == 200
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        assert all("401" in line for line in page.complaints)
        page.complaints.clear()
        page.get_by_role("button", name="Sign out").click()
        form.get_by_role("button", name="Send").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        form.locator(".answer .error").wait_for()
        assert form.locator(".answer .pill").inner_text().startswith("401")
        page.complaints.clear()


def test_operations_are_found(server, open_page) -> None:
    page = open_page(f"{server.url}/docs")
    search = page.get_by_role("searchbox")
    page.keyboard.press("/")
    assert search.evaluate("field => field === document.activeElement")
    search.fill("upload PART")
    shown = [each for each in page.locator("details.operation").all() if each.is_visible()]
    assert {each.get_attribute("data-path") for each in shown} == {
        "/v1/uploads", "/v1/uploads/{upload_id}/parts/{offset}", "/v1/uploads/{upload_id}/complete"
    }  # fmt: skip
    assert page.get_by_role("link", name="Devices").count() == 0
    # An address leads to what the search has hidden.
    page.evaluate("location.hash = 'op-get-v1-devices'")
    page.locator("#op-get-v1-devices").wait_for()
    assert search.input_value() == ""
    page.locator("details.operation > summary").first.click()
    assert page.evaluate("location.href").endswith(ARRAYS)


def test_samples_are_tabs(server, open_page) -> None:
    page = open_page(f"{server.url}/docs{GEMM}", permissions=["clipboard-read", "clipboard-write"])
    tabs = page.locator(f"{GEMM} [role=tab]")
    assert tabs.all_inner_texts() == ["Python", "curl", "Command line"]
    panel = page.locator(f"{GEMM} [role=tabpanel]:visible")
    assert "client.gemm(" in panel.inner_text()
    tabs.first.focus()
    page.keyboard.press("ArrowRight")
    assert tabs.nth(1).get_attribute("aria-selected") == "true"
    assert panel.count() == 1
    panel.get_by_role("button", name="Copy").click()
    panel.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == panel.locator("pre").inner_text()
    assert panel.locator("pre").inner_text().startswith("curl ")
    # The same for every operation.
    page.goto(f"{server.url}/docs{ARRAYS}")
    assert page.locator(f"{ARRAYS} [role=tab][aria-selected=true]").inner_text() == "curl"
    assert server.url in page.locator(".intro pre").inner_text()


def test_it_is_read_without_scripts(server, open_page) -> None:
    page = open_page(f"{server.url}/docs{GEMM}", java_script_enabled=False)
    inside = page.locator(GEMM)
    assert inside.is_visible(), "the address opens the operation"
    for text in ("client.gemm(", "curl --fail-with-body", "gemmserve gemm a.npy b.npy"):
        assert inside.get_by_text(text).is_visible()
    assert page.get_by_role("searchbox").count() == 0
    assert page.get_by_role("button").count() == 0


@pytest.mark.parametrize("width", [320, 768, 1280])
@pytest.mark.parametrize("path", [f"/docs{GEMM}", "/problems"])
def test_nothing_is_wider_than_the_screen(server, open_page, path, width) -> None:
    page = open_page(f"{server.url}{path}", width=width)
    if path != "/problems":
        open_form(page, GEMM)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("width", "dark", "within"), [(1280, False, "html"), (360, True, "details[open]")])
def test_axe_finds_nothing(server, open_page, width, dark, within) -> None:
    """Operations and a model open, with an answer and a mistake: contrast, labels, names, order of headings."""
    page = open_page(f"{server.url}/docs#model-GemmJob", width=width, dark=dark)
    form = open_form(page, "#op-post-v1-gemm-reduce")
    for button in form.get_by_role("button", name="Use an example").all():
        button.click()
    assert send(form) == 200
    form = open_form(page, JOBS)
    form.get_by_label("JSON (required)").fill("{}")
    assert send(form) == 422
    page.complaints.clear()  # Chromium's of the status
    assert accessibility(page, within) == []
    page.goto(f"{server.url}/problems")
    assert accessibility(page) == []

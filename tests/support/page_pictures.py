"""Pictures of the page for the documentation: `python tests/support/page_pictures.py docs/pictures`, in two minutes.

Everything in them is real: a server on this machine's processor, a load of two minutes, a browser that looks.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from browser import EXECUTABLE
from live_server import LiveServer
from playwright.sync_api import sync_playwright

from gemmserve import Client, GemmserveError

LOAD_S = 120


def steering(n: int) -> np.ndarray:
    """Responses of a line of n sensors to n directions, complex64."""
    return np.exp(1j * np.pi * np.outer(np.linspace(-1, 1, n), np.arange(n))).astype(np.complex64)


def load(url: str, until: float) -> None:
    """Jobs of several sizes, more of them and fewer again; now and then one that fails."""
    rng = np.random.default_rng(1)
    with Client(url) as client:
        a = client.put(steering(384), name="steering")
        b = client.put((steering(384) + rng.standard_normal((384, 384))).astype(np.complex64), name="snapshots")
        client.put(np.cov(rng.standard_normal((96, 400))).astype(np.float32), name="covariance")
        client.put(np.tril(rng.standard_normal((200, 200))), name="factor")
        singular = client.put(np.ones((64, 64)))
        try:
            np.linalg.solve(singular, singular).numpy()
        except GemmserveError as error:
            print("as it should be:", error)
        (a.H @ b).numpy()
        began = time.monotonic()
        while time.monotonic() < until:
            client.gemm(a, b).delete()
            time.sleep(0.06 + 0.05 * np.sin((time.monotonic() - began) / 9))


def main(folder: Path) -> None:
    """Make them all."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as data,
        LiveServer(data_dir=Path(data)) as server,
        sync_playwright() as playwright,
    ):
        worker = threading.Thread(target=load, args=(server.url, time.monotonic() + LOAD_S))
        worker.start()
        time.sleep(LOAD_S - 20)
        browser = playwright.chromium.launch(executable_path=EXECUTABLE)

        def look(**options):
            page = browser.new_context(**options).new_page()
            page.goto(server.url)
            page.get_by_text("Live", exact=True).wait_for()
            page.locator("#jobs table").wait_for()
            return page

        page = look(viewport={"width": 1120, "height": 980})
        page.screenshot(path=folder / "page-overview.png")
        page.locator("#jobs a").first.click()
        page.locator("dialog .phases").wait_for()
        page.locator("dialog").screenshot(path=folder / "page-job.png")
        page = look(viewport={"width": 1120, "height": 860}, color_scheme="dark")
        page.get_by_role("button", name="Fill in an example").click()
        page.get_by_role("button", name="Multiply").click()
        page.locator("#multiply .picture").wait_for()
        page.locator("#multiply").locator("xpath=..").screenshot(path=folder / "page-multiply.png")
        page.locator("#arrays").scroll_into_view_if_needed()
        page.locator("#arrays canvas").last.wait_for()
        page.locator("#arrays").locator("xpath=..").screenshot(path=folder / "page-arrays.png")
        page = look(viewport={"width": 360, "height": 720})
        page.screenshot(path=folder / "page-phone.png")
        browser.close()
        worker.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Headless Chromium for tests that look at pages: what it finds wrong by itself fails the test.

Tests of a browser are plain functions, in modules without coroutines: Playwright's loop runs in their thread.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

EXECUTABLE = shutil.which("chromium-headless-shell") or "/usr/bin/chromium-headless-shell"

_ALLOWANCE_MS = 60_000
"""Longer than anything takes on a machine that is busy with something else."""


def missing() -> str | None:
    """Why there is no browser here, or None."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return None if Path(EXECUTABLE).exists() else "chromium-headless-shell is not installed"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser, once for a module of tests; they are skipped where there is none."""
    if reason := missing():
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium) -> Iterator[Any]:
    """open_page(url, width=1280, dark=False, ...) -> Playwright's page with nothing in its storage.

    Errors of scripts, violations of the Content-Security-Policy and lines that a page writes to the console as errors
    are in `page.complaints`, and fail the test at its end unless it takes them out. `options`: of `new_context`.
    """
    with contextlib.ExitStack() as stack:
        pages = []

        def open_(url: str, *, width: int = 1280, height: int = 900, dark: bool = False, **options: Any) -> Any:
            context = chromium.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", **options
            )
            stack.callback(context.close)
            context.set_default_timeout(_ALLOWANCE_MS)
            page = context.new_page()
            page.complaints = []
            # Chromium tells of violations of the policy, and of files that it could not load, on the console as well.
            page.on("console", lambda line: line.type == "error" and page.complaints.append(line.text))
            page.on("pageerror", lambda error: page.complaints.append(str(error)))
            page.goto(url)
            pages.append(page)
            return page

        yield open_
        for page in pages:
            assert page.complaints == []


_AXE = Path(__file__).parent / "vendor" / "axe.min.js"


def accessibility(page: Any, within: str = "html") -> list[str]:
    """What axe-core finds wrong with the page, or a part of it, as it is now: contrast, labels, names, focus order."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_AXE.read_text())  # not as a script of the page: its policy would refuse it, and so it should
    found = page.evaluate(
        """within => axe.run(within, {
            runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
            rules: { "focus-order-semantics": { enabled: true } },
        })""",
        within,
    )
    return [
        f"{violation['id']}: {node['html'][:200]} ({node['failureSummary'][:300]})"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]

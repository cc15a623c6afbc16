"""Headless Chromium on the deployed gateway's page, and the actions of its user."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from scripted import KEY

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
TIMEOUT_MS = 30_000
expect.set_options(timeout=TIMEOUT_MS)
Opened = Callable[..., Page]
"""Opens a view of the page in a new browser context: ``opened(view="ask", key=KEY, **context_options)``."""


@contextmanager
def chromium() -> Iterator[Browser]:
    path = os.environ.get("PIXELIS_CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("no Chromium: install chromium or name it in PIXELIS_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def views(browser: Browser, url: str) -> Iterator[Opened]:
    """Open views of the page at ``url`` with the key. Console errors and warnings fail the test."""
    messages: list[str] = []
    contexts: list[BrowserContext] = []

    def opened(view: str = "ask", key: str = KEY, **options: Any) -> Page:
        options = {"viewport": {"width": 1200, "height": 800}, "reduced_motion": "reduce", **options}
        context = browser.new_context(base_url=url, **options)
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        page = context.new_page()
        page.clock.install()
        page.add_init_script(f"sessionStorage.setItem('pixelis-key', '{key}')")
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on(
            "console",
            lambda message: messages.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.goto(f"/#/{view}")
        page.wait_for_selector(f"#{view}:not([hidden])")
        return page

    yield opened
    for context in contexts:
        context.close()
    # Intended refusals, and reading pixels in tests
    expected = ("Failed to load resource", "Canvas2D: Multiple readback")
    assert [message for message in messages if not message.startswith(expected)] == []


def picture(width: int = 72, height: int = 48) -> dict[str, Any]:
    cells, buffer = np.random.default_rng(1).integers(0, 255, (height // 8, width // 8, 3)), io.BytesIO()
    Image.fromarray(cells.astype(np.uint8).repeat(8, 0).repeat(8, 1)).save(buffer, "PNG")
    return {"name": "own.png", "mimeType": "image/png", "buffer": buffer.getvalue()}


def ask(page: Page, question: str, **size: int) -> None:
    page.set_input_files("#choose", picture(**size))
    page.wait_for_selector("#stage:not([hidden])")
    page.fill("#question", question)
    page.keyboard.press("Enter")


def fits(page: Page) -> bool:
    return page.evaluate(
        "document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth"
    )

"""A headless Chromium before the deployed gateway, and what a person does there."""

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

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
PATIENCE_MS = 30_000
expect.set_options(timeout=PATIENCE_MS)
Opened = Callable[..., Page]
"""Opens a view of the page in a context of its own: ``opened(view="ask", key=KEY, **options of the context)``."""


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
    """Views of the page at ``url``, with the key; what the console said against them fails the test."""
    complaints: list[str] = []
    contexts: list[BrowserContext] = []

    def opened(view: str = "ask", key: str = KEY, **options: Any) -> Page:
        options = {"viewport": {"width": 1200, "height": 800}, "reduced_motion": "reduce", **options}
        context = browser.new_context(base_url=url, **options)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.clock.install()
        page.add_init_script(f"sessionStorage.setItem('pixelis-key', '{key}')")
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(f"/#/{view}")
        page.wait_for_selector(f"#{view}:not([hidden])")
        return page

    yield opened
    for context in contexts:
        context.close()
    known = ("Failed to load resource", "Canvas2D: Multiple readback")  # refusals on purpose, and our own look at the pixels
    assert [said for said in complaints if not said.startswith(known)] == []


def picture(width: int = 72, height: int = 48) -> dict[str, Any]:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 255, (height // 8, width // 8, 3)).astype(np.uint8).repeat(8, 0).repeat(8, 1)
    Image.fromarray(pixels).save(buffer, "PNG")
    return {"name": "own.png", "mimeType": "image/png", "buffer": buffer.getvalue()}


def ask(page: Page, question: str, **size: int) -> None:
    page.set_input_files("#choose", picture(**size))
    page.wait_for_selector("#stage:not([hidden])")
    page.fill("#question", question)
    page.keyboard.press("Enter")


def fits(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth")

"""The Memory view of the deployed gateway's page in headless Chromium."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from browser_helpers import Opened
from PIL import Image
from playwright.sync_api import expect
from scripted import Deployed

pytestmark = pytest.mark.slow


def squares(seed: int) -> dict[str, Any]:
    """A PNG file of 4 x 4 random cells."""
    cells, buffer = np.random.default_rng(seed).integers(0, 256, (4, 4, 3)).astype(np.uint8), io.BytesIO()
    Image.fromarray(cells.repeat(24, 0).repeat(24, 1)).save(buffer, "PNG")
    return {"name": "squares.png", "mimeType": "image/png", "buffer": buffer.getvalue()}


def put(deployed: Deployed, question: str, seed: int) -> str:
    url = "data:image/png;base64," + base64.b64encode(squares(seed)["buffer"]).decode()
    return deployed.ask(question, image=url).json()["experience_id"]


@pytest.fixture(scope="module")
def stored(deployed: Deployed) -> list[str]:
    questions = "say 7,7,7,8 gnu <b>one</b>", "say 8 gnu two", "say none gnu"
    names = [put(deployed, question, i) for i, question in enumerate(questions)]
    with deployed.client() as client:
        wrong = {"experience_id": names[1], "correct": False}
        assert client.post("/v1/feedback", json=wrong).status_code == 200
    return names


def test_stored_answers_are_found_by_words_and_by_picture(opened: Opened, stored: list[str]) -> None:
    page = opened("memory")
    cards = page.locator(".experience")
    expect(cards.first.locator(".question")).to_have_text("say none gnu")  # the newest
    expect(cards.first).to_contain_text("No answer")
    page.get_by_label("Words in the question or the answer").fill("7 gnu")
    page.keyboard.press("Enter")
    expect(page.locator("#memory-note")).to_have_text("1 result, the most similar first.")
    expect(cards).to_have_count(1)
    expect(cards.locator(".question")).to_have_text("say 7,7,7,8 gnu <b>one</b>")
    expect(cards.locator(".answered")).to_have_text("7")
    expect(cards).to_contain_text("75 % confident · ")
    expect(cards.locator(".pill")).to_have_text("not learnt from")
    assert cards.locator(".seen img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 8
    page.fill("#words", "aardvark")
    page.keyboard.press("Enter")
    expect(page.locator("#memory-note")).to_have_text(
        "No stored question or answer has the words “aardvark”."
    )
    page.fill("#words", "gnu")
    with page.expect_request("**/v1/experiences/search") as sent:
        page.set_input_files("#search-choose", squares(1))
    assert sent.value.post_data_json["text"] == "gnu"
    assert sent.value.post_data_json["image"].startswith("data:image/png;base64,")
    expect(cards.locator(".question")).to_have_count(3)
    expect(cards.first.locator(".question")).to_have_text("say 8 gnu two")
    expect(cards.first).to_contain_text("a user marked it as wrong")
    page.get_by_role("button", name="Remove the picture").click()
    expect(page.locator("#search-picture")).to_be_hidden()
    page.get_by_role("button", name="Show the newest").click()
    expect(page.locator("#memory-note")).to_contain_text("The newest")
    assert page.input_value("#words") == ""
    assert page.title() == "Pixelis · Memory"


@pytest.mark.long
def test_a_card_says_whether_the_model_has_learnt_from_it(opened: Opened, stored: list[str]) -> None:
    page = opened("ask")

    def experience(status: str) -> dict[str, Any]:
        verdict = {"answer": status, "confidence": 0.9, "votes": []}
        question = {"question": "q", "media": []}
        own = {"id": status, "question": question, "verdict": verdict, "status": status}
        return {**own, "policy_version": 3}

    reply = {"data": [experience(s) for s in ("processed", "failed", "pending")]}
    page.route("**/v1/experiences?*", lambda route: route.fulfill(json=reply))
    page.click("nav a[href='#/memory']")
    marks = page.locator(".experience .pill")
    expect(marks).to_have_text(
        ["learnt from", "taken back with the version that answered", "not learnt from"]
    )

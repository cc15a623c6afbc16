"""The same question answered with and without operations, side by side, on the deployed gateway's page."""

from __future__ import annotations

from typing import Any

import pytest
from browser_helpers import Opened, ask
from playwright.sync_api import expect
from scripted import Deployed

pytestmark = pytest.mark.slow


def test_both_ways_are_really_asked_and_nothing_is_stored(deployed: Deployed, opened: Opened) -> None:
    page = opened()
    ask(page, "say 7,7,7,8 tamarin")
    expect(page.locator("#answer .final")).to_have_text("7")
    sent: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda request: sent.append(request.post_data_json) if request.url.endswith("/v1/agent") else None,
    )
    before = deployed.counters()["rollouts"]
    page.get_by_role("button", name="Compare ways to answer").click()  # the question answered last
    arms = page.locator(".arm")
    expect(arms.locator(".final")).to_have_text(["7", "7"])
    assert deployed.counters()["rollouts"] == before + 2
    assert [body["operations"] for body in sent] == [False, True]
    assert len({body["seed"] for body in sent}) == 1
    for body in sent:
        assert (body["question"], body["samples"], body["learn"], body["remember"]) == (
            "say 7,7,7,8 tamarin",
            4,
            False,
            False,
        )
        assert "history" not in body
    expect(arms.nth(0)).to_contain_text("0 operations")
    expect(arms.nth(1)).to_contain_text("1 operation ·")
    expect(arms.nth(1)).to_contain_text("3 of 4 samples")
    expect(arms.nth(2)).to_contain_text("Version 0 answers, the policy as it was trained")
    expect(page.locator("#comparison [role=status]")).to_have_text(
        "Both were answered by version 0, with 4 samples each and the same random seed. "
        "The memory has no vote, and nothing of this is stored or learnt from."
    )
    with deployed.client() as client:
        assert len(client.post("/v1/experiences/search", json={"text": "tamarin"}).json()["data"]) == 1
    page.fill("#question", "recall")
    page.get_by_role("button", name="Compare ways to answer").click()
    # A follow-up question goes with its conversation
    expect(arms.locator(".final")).to_have_text(["7 1 of 1", "7 1 of 1"])
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#comparison")).to_be_empty()

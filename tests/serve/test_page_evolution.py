"""The Evolution view of the deployed gateway's page in headless Chromium."""

from __future__ import annotations

import io
import time
from typing import Any

import numpy as np
import pytest
import ray
from browser_helpers import Opened
from gateway_helpers import publish
from PIL import Image
from playwright.sync_api import Page, expect
from scripted import Deployed

from pixelis.config import EvolutionConfig, RewardsConfig
from pixelis.evolution.updates import make_task
from pixelis.records import Group, ImageView, Media, Question, StopReason, Trajectory, Turn, new_id
from pixelis.rewards.vote import majority

pytestmark = pytest.mark.slow

MARKUP = "<img/src=x/onerror=document.title='run'>"


def put_review(evolution: Any) -> str:
    """Put an update into the review queue of the service's Evolution; returns its question."""
    text = f"{MARKUP} which digit? {new_id('q')}"
    media = [Media(id="img0", uri="data:image/png;base64,AAAA")]
    question = Question(id=new_id("q"), question=text, media=media)
    image = ImageView(id="img0", source_size=(8, 8), view_size=(8, 8))

    def sample(answer: str) -> Trajectory:
        text = f"<answer>{answer}</answer>"
        turn = Turn(role="assistant", text=text, tokens=[1, 2], log_probs=[-0.1, -0.1])
        common: dict[str, Any] = {"question_id": question.id, "group_id": "g", "images": [image]}
        return Trajectory(turns=[turn], answer=answer, stop_reason=StopReason.ANSWER, **common)

    trajectories = [sample(answer) for answer in "7771"]
    verdict = majority([t.answer for t in trajectories])
    group, gate = Group(id="g", question=question, trajectories=trajectories), EvolutionConfig(gate=0.5)
    task = make_task(group, verdict, gate, RewardsConfig(), now=time.time(), experience_id=new_id("exp"))
    assert task is not None
    view, buffer = np.full((8, 8, 3), 90, np.uint8), io.BytesIO()
    Image.fromarray(view).save(buffer, "PNG")
    update = task, verdict, question, {"img0": buffer.getvalue()}, {t.id: [view] for t in task.trajectories}
    put = evolution.__ray_call__.remote(lambda actor, *update: actor.review_queue.put(*update), *update)
    assert ray.get(put)
    return text


@pytest.mark.long  # the requests behind it: test_evolution.py
def test_updates_are_approved_and_rejected(deployed: Deployed, opened: Opened) -> None:
    questions = [put_review(deployed.evolution) for _ in range(2)]
    page = opened("evolution")
    cards = [page.locator(".review", has_text=question) for question in questions]
    for card in cards:
        expect(card.locator(".thumbnails img")).to_have_js_property("naturalWidth", 8)
        assert card.locator(".voted").all_text_contents() == ["7", "1"]
    page.fill("#reviewer", "Ada")
    cards[0].locator("[name=answer]").fill("1")
    cards[0].locator("[name=comment]").fill("it is a one")
    with page.expect_response("**/v1/review?*"):  # the page polls again and keeps the input
        page.clock.fast_forward(2500)
    assert cards[0].locator("[name=answer]").input_value() == "1"
    with page.expect_response("**/v1/review/*") as response:
        cards[0].get_by_role("button", name="Approve").click()
    assert response.value.status == 200
    order = {"decision": "approve", "answer": "1", "comment": "it is a one", "reviewer": "Ada"}
    assert response.value.request.post_data_json == order
    with page.expect_response("**/v1/review/*") as response:
        cards[1].get_by_role("button", name="Reject").click()
    assert response.value.status == 200
    with deployed.client() as client:
        for question, state in zip(questions, ("approved", "rejected"), strict=True):
            reviews = client.get(f"/v1/review?state={state}").json()["data"]
            (review,) = [one for one in reviews if one["question"]["question"] == question]
            assert (review["answer"], review["reviewer"]) == ("1" if state == "approved" else None, "Ada")
    entries = page.locator("#evolution-audit tr", has_text="Ada").filter(has_text="approved")
    expect(entries.first).to_be_visible()
    assert page.locator("img[src=x]").count() == 0


@pytest.mark.long
def test_learning_is_paused_and_resumed(deployed: Deployed, opened: Opened) -> None:
    page = opened("evolution")
    expect(page.locator("#evolution-versions .served th")).to_have_text("Version 0")
    expect(page.locator("#evolution-versions .served")).to_contain_text("answers now")
    page.click("text=Pause learning")
    expect(page.locator("#evolution-result")).to_contain_text("Learning is paused.")
    expect(page.locator(".state .pill")).to_have_text("paused")
    assert ray.get(deployed.evolution.status.remote())["paused"]
    page.click("text=Resume learning")
    expect(page.locator("#evolution-result")).to_contain_text("Learning has resumed.")


def test_going_back_says_what_will_happen_and_is_confirmed(deployed: Deployed, opened: Opened) -> None:
    before, version = ray.get(deployed.evolution.status.remote())["served"], publish(0.9)
    ray.get(deployed.evolution.promote.remote(version, "test", force=True))
    page = opened("evolution")
    back = page.locator("#evolution-status").get_by_role("button", name=f"Go back to version {before}")
    back.click()
    assert page.evaluate("document.activeElement.id") == "confirm-no"
    dialog = page.locator("#confirm-text")
    expect(dialog).to_contain_text(f"Version {before} answers from the next request on.")
    expect(dialog).to_contain_text(f"Version {version} is withdrawn: what it learnt is no longer used")
    page.keyboard.press("Escape")
    assert ray.get(deployed.evolution.status.remote())["served"] == version
    back.click()
    page.click("#confirm-yes")
    expect(page.locator("#evolution-result")).to_contain_text(f"Version {before} answers again.")
    assert ray.get(deployed.evolution.status.remote())["served"] == before
    row = page.locator("#evolution-versions tr", has_text=f"Version {version}")
    expect(row.locator(".pill")).to_have_text("withdrawn")


@pytest.mark.long
def test_the_evolution_view_polls_only_while_visible(opened: Opened) -> None:
    page = opened("evolution")
    page.wait_for_selector("#evolution-versions tr")
    requested: list[str] = []
    page.click("nav a[href='#/ask']")
    page.wait_for_load_state("networkidle")  # the view may still fetch what it had begun to show
    page.on("request", lambda request: requested.append(request.url))
    page.clock.fast_forward(60_000)
    page.wait_for_timeout(200)
    assert requested == []
    with page.expect_request("**/v1/evolution"):
        page.click("nav a[href='#/evolution']")


def judged(version: int, accuracy: float, decision: str, reason: str = "") -> dict[str, Any]:
    reference = {
        "reference_accuracy": 0.8,
        "questions": 128,
        "mean": accuracy - 0.8,
        "se": 0.02,
        "against": 0,
    }
    own = {"version": version, "accuracy": accuracy, "decision": decision, "reason": reason}
    return {"time": time.time(), **own, **reference}


def shown(opened: Opened, reviews: bool = False, **changes: Any) -> Page:
    """The view of a service with four versions."""
    status = {"served": 2, "learning": True, "paused": False, "beta": 0.01, "mean_kl": None, "candidate": 3}
    states = "promoted", "rolled_back", "promoted", "candidate"
    canary = [judged(1, 0.7, "refuse", "fell"), judged(2, 0.85, "promote"), judged(2, 0.84, "keep")]
    learnt = [
        {"version": 1, "tasks": 32, "users": 1, "user": "", "user_share": 1.0},
        {"version": 2, "tasks": 64, "users": 5, "user": MARKUP, "user_share": 0.25},
    ]
    reply = {"enabled": True, "policy_version": 2, "updates": 5, "queue": 1, "counts": {}, "status": status}
    reply |= {"versions": [{"version": i, "status": state} for i, state in enumerate(states)]}
    reply |= {"canary": canary, "learnt": learnt, "alerts": [], "audit": [], **changes}
    page = opened()
    page.route("**/v1/evolution", lambda route: route.fulfill(json=reply))
    if not reviews:
        page.route("**/v1/review?*", lambda route: route.fulfill(status=404, json={}))
    page.click("nav a[href='#/evolution']")
    return page


@pytest.mark.long
def test_each_version_says_what_it_learnt_and_what_its_test_showed(opened: Opened) -> None:
    page = shown(opened)
    rows = page.locator(".versions tbody tr")
    expect(rows.locator("th")).to_have_text(["Version 3", "Version 2", "Version 1", "Version 0"])
    states = ["not served", "answers now", "refused", "answered before"]
    assert rows.locator(".pill").all_text_contents() == states
    learnt = rows.locator("[data-label='Learnt from']").all_text_contents()
    most = f"{MARKUP[:20]} … ({len(MARKUP) - 20} more characters)"
    assert learnt[1] == f"64 answers by 5 users; the most from one user: 25 % ({most})"
    assert learnt[2] == "32 answers by callers that gave no name"
    tests = rows.locator("[data-label='Test']").all_text_contents()
    gain = "85 % of 128 test questions right; version 0: 80 %. +5.0 points (95 % interval +1.1 to +8.9)."
    assert tests[1] == gain
    expect(page.locator(".gain")).to_have_text(f"Version 2: {gain}")
    small = page.evaluate(
        "import('/page/versions.js').then((versions) => versions.difference({ mean: 0.01, se: 0.01 }))"
    )
    assert small == "+1.0 points (95 % interval −1.0 to +3.0), too little to tell from chance."
    expect(rows.nth(2)).to_contain_text("it answers fewer test questions correctly")
    expect(page.locator(".state")).to_have_text("learning Version 2 answers now. Version 3 is being tested.")
    expect(page.locator(".chart .good")).to_have_count(2)
    expect(page.locator(".chart path.bad")).to_have_count(1)
    assert "the last, version 2: 84 %, compared with 80 %" in str(page.get_attribute(".chart", "aria-label"))
    expect(page.locator("#reviews")).to_contain_text("has no review queue")
    assert page.locator("img[src=x]").count() == 0
    assert page.title() == "Pixelis · Evolution"

"""The page of the deployed gateway in headless Chromium."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import av
import httpx
import pytest
from browser_helpers import Opened, ask, fits, picture
from gateway_helpers import until
from PIL import Image
from playwright.sync_api import expect
from scripted import KEY, Deployed, picture_url

from pixelis.serve.routes.page import SWAGGER_FILES, page_files

pytestmark = pytest.mark.slow

MARKUP = "<img/src=x/onerror=document.title='run'>"
DRAWN = "[...stage.getContext('2d').getImageData(0, 0, 720, 480).data].reduce((a, v) => a * 31 + v | 0, 7)"


# -- files ---------------------------------------------------------------------------------------------------


OTHER_FILES = [
    "../page.py",
    "%2e%2e/page.py",
    "..%2fpage.py",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "none.js",
    "",
]
OTHER_FILES += ["\\..\\page.py"]


def test_only_the_pages_files_are_served_with_strict_headers(deployed: Deployed) -> None:
    with deployed.client(key=None) as client:
        assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
        for name in page_files():
            reply = client.get(f"/page/{name}")
            assert reply.status_code == 200
            policy = reply.headers["content-security-policy"]
            assert "default-src 'self'; img-src 'self' data: blob:" in policy
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["cache-control"] == "no-cache"
            known = {"If-None-Match": f'W/{reply.headers["etag"]}, "other"'}
            repeated = client.get(f"/page/{name}", headers=known)
            assert (repeated.status_code, repeated.content) == (304, b"")
        assert client.get("/page/main.js").headers["content-type"].startswith("text/javascript")
        settings = client.get("/page/settings.json").json()
        assert (settings["samples"], settings["needs_key"]) == (4, True)
        for path in OTHER_FILES:
            assert client.send(httpx.Request("GET", f"{deployed.url}/page/{path}")).status_code == 404


HOST = re.compile(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}")
UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function| style=|javascript:"
)


def test_the_page_loads_nothing_from_other_hosts() -> None:
    files = page_files()
    for name, content in files.items():
        if name in SWAGGER_FILES or name.endswith((".jpg", ".mp4")):
            continue
        text = content.decode()
        assert set(HOST.findall(text)) <= {"http://www.w3.org", "//www.w3.org"}, name
        assert not UNSAFE.search(text), name
        for other in re.findall(r'(?:from|src|href)[ =]"(?:\./|/page/)([\w.]+)"', text):
            assert other in files, (name, other)


@pytest.mark.long
def test_the_page_of_the_api_shows_every_route(deployed: Deployed, opened: Opened) -> None:
    page = opened()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto("/docs")
    with deployed.client() as client:
        routes = sum(map(len, client.get("/openapi.json").json()["paths"].values()))
    assert routes > 20
    expect(page.locator(".opblock")).to_have_count(routes)
    page.locator("#operations-questions-agent_v1_agent_post").click()
    expect(page.get_by_text("max_turns").first).to_be_visible()
    assert all(url.startswith((deployed.url, "data:")) for url in requested)


def test_the_first_screen_says_what_the_model_can_do_and_examples_are_answered_with_one_click(
    opened: Opened,
) -> None:
    page = opened()
    expect(page.locator("#about")).to_contain_text("reads handwritten digits")
    expect(page.locator("#about")).to_contain_text("cannot describe pictures")
    expect(page.locator("#hint")).to_contain_text("each may zoom in, ")
    examples = page.locator(".example")
    expect(examples).to_have_count(3)
    bottom = page.evaluate("document.querySelector('#examples').getBoundingClientRect().bottom")
    assert bottom <= 800  # all of it is visible on a desktop, without empty halves
    assert bottom > 600
    for i in range(3):
        assert (
            examples.nth(i).locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)")
            == 768
        )
    question = examples.nth(1).inner_text()
    with page.expect_request("**/v1/agent") as sent:
        examples.nth(1).click()
    assert sent.value.post_data_json["question"] == question
    assert sent.value.post_data_json["image"].startswith("data:image/jpeg;base64,")
    expect(page.locator(".final")).to_have_text("7")
    expect(page.locator("#intro")).to_be_hidden()


# -- asking --------------------------------------------------------------------------------------------------


def test_a_place_that_is_pointed_at_goes_into_the_question(opened: Opened) -> None:
    page = opened()
    expect(page.locator("#pointing")).to_be_hidden()  # this model has not learnt it
    page.route(
        "**/page/settings.json", lambda route: route.fulfill(json={**route.fetch().json(), "points": True})
    )
    page.reload()
    page.wait_for_selector("#ask:not([hidden])")  # shown by the scripts, which read a chosen file
    page.set_input_files("#choose", picture())
    page.wait_for_selector("#stage[data-marks='0']")
    expect(page.locator("#pointing")).to_be_visible()
    stage = page.locator("#stage").bounding_box()
    assert stage is not None

    def at(x: float, y: float) -> tuple[float, float]:
        return stage["x"] + x * stage["width"], stage["y"] + y * stage["height"]

    page.fill("#question", "What colour is the object at ?")
    page.evaluate("question.setSelectionRange(29, 29)")
    page.mouse.click(*at(0.25, 0.5))
    text = page.locator("#question").input_value()
    x, y = (
        int(number)
        for number in re.fullmatch(r"What colour is the object at \[(\d+), (\d+)\]\?", text).groups()
    )  # type: ignore[union-attr]
    assert (abs(x - 250), abs(y - 500)) <= (3, 3)
    page.fill("#question", "")
    page.mouse.move(*at(0.8, 0.9))
    page.mouse.down()
    page.mouse.move(*at(0.4, 0.3))
    page.mouse.up()
    box = [int(number) for number in re.findall(r"\d+", page.locator("#question").input_value())]
    assert all(abs(a - b) <= 3 for a, b in zip(box, (400, 300, 800, 900), strict=True))


def test_turns_arrive_one_after_another_and_are_drawn(deployed: Deployed, opened: Opened) -> None:
    page = opened()
    page.set_input_files("#choose", picture())
    page.wait_for_selector("#stage[data-marks='0']")
    bare = page.evaluate(DRAWN)
    page.fill("#question", "say 7,8,7,7 pause 0.3 measured !")
    page.keyboard.press("Enter")
    # The turns are there before the answer: asked in one step, because the answer follows soon
    page.wait_for_selector("body:has(.turns li):not(:has(.verdict))")
    page.wait_for_selector("#stage[data-marks='4']")
    assert page.evaluate(DRAWN) != bare
    expect(page.locator(".final")).to_have_text("7")
    expect(page.locator(".confidence b")).to_have_text("75 %")
    assert page.locator(".voted").all_text_contents() == ["7", "8"]
    assert "3 samples · weight 3" in page.locator(".votes").inner_text()
    statuses = page.locator(".sample .status").all_text_contents()
    assert statuses == ["answers 7", "answers 8", "answers 7", "answers 7"]
    assert "majority" in page.locator(".verdict .facts").first.inner_text()
    winner = page.locator(".sample.winner")
    assert winner.locator(".use").inner_text() == "This decided the answer: 9 times likelier than without it."
    assert page.locator(".use").count() == 1
    assert winner.locator(".action").first.inner_text() == "Turn 1 calls zoom_in on img0"
    assert "[0.25, 0.25, 0.75, 0.75]" in winner.locator(".arguments").inner_text()
    assert page.evaluate("document.querySelector('.winner .crop img').naturalWidth") == 8
    # After the vote only the winner's box is drawn; each sample's can be chosen, and all.
    page.wait_for_selector("#stage[data-marks='1']")
    alone = page.evaluate(DRAWN)
    page.click(".legend .chip >> nth=2")
    assert until(lambda: page.evaluate(DRAWN) != alone)
    page.click(".legend .chip >> nth=0")
    page.wait_for_selector("#stage[data-marks='4']")


def test_a_follow_up_question_continues_the_conversation(opened: Opened) -> None:
    page = opened()
    ask(page, "say 7")
    expect(page.locator("#answer .final")).to_have_text("7")
    assert page.input_value("#question") == ""
    page.fill("#question", "say none")
    page.keyboard.press("Enter")
    expect(page.locator("#answer .final")).to_have_text("No answer")
    page.fill("#question", f"say {MARKUP}")
    page.keyboard.press("Enter")
    expect(page.locator("#answer .final")).to_have_text(MARKUP)
    expect(page.locator("#answer .voted").first).to_have_text(MARKUP)
    page.get_by_label("Ask a follow-up question").fill("recall")
    with page.expect_request("**/v1/agent") as sent:
        page.keyboard.press("Enter")
    # The answers of the exchanges with an answer, how many pictures each had, and how many there are.
    expect(page.locator("#answer .final")).to_have_text(f"7{MARKUP} 10 of 1")
    history = sent.value.post_data_json["history"]
    assert [(e["question"], e["answer"], "image" in e) for e in history] == [
        ("say 7", "7", True),
        (f"say {MARKUP}", MARKUP, False),
    ]
    thread = page.locator("#thread > li")
    assert thread.locator("> .question").all_text_contents() == ["say 7", "say none", f"say {MARKUP}"]
    assert page.locator("img[src=x]").count() == 0
    assert page.title() == "Pixelis"
    thread.nth(0).get_by_text("Votes and feedback").click()
    thread.nth(0).get_by_role("button", name="Correct", exact=True).click()
    expect(thread.nth(0).locator(".feedback")).to_have_text("Thank you. Marked as correct.")
    page.route("**/v1/agent", lambda route: route.abort())
    page.fill("#question", "lost?")
    page.keyboard.press("Enter")
    expect(page.locator("#error")).to_contain_text("cannot be reached")
    assert page.input_value("#question") == "lost?"
    page.unroute("**/v1/agent")
    page.get_by_role("button", name="New conversation").click()
    expect(thread).to_have_count(0)
    page.fill("#question", "say 9")
    with page.expect_request("**/v1/agent") as sent:
        page.keyboard.press("Enter")
    assert "history" not in sent.value.post_data_json
    expect(page.locator("#answer .final")).to_have_text("9")
    ask(page, "say 8")  # another picture is another conversation
    expect(page.locator("#answer .final")).to_have_text("8")
    expect(thread).to_have_count(0)


def clip(container: str) -> dict[str, Any]:
    """A clip of 20 frames in two seconds: a white square moves from left to right."""
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (160, 96)) for _ in range(20)]
    for i, frame in enumerate(frames):
        frame.paste((255, 255, 255), (6 * i, 40, 6 * i + 16, 56))
    if container == "gif":
        frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=100)
        return {"name": "own.gif", "mimeType": "image/gif", "buffer": buffer.getvalue()}
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream("h264" if container == "mp4" else "libvpx", rate=10)
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_image(frame)))
        output.mux(stream.encode())
    return {"name": f"own.{container}", "mimeType": f"video/{container}", "buffer": buffer.getvalue()}


def tracked_reply(png: str) -> str:
    """The stream of a service whose only sample tracks the square of `clip` and then answers."""
    frames = range(5, 20)
    boxes = [[6 * i / 160, 40 / 96, (6 * i + 16) / 160, 56 / 96] for i in frames]
    track = {"id": "t1", "root": "vid0", "status": "ended", "frames": [*frames], "boxes": boxes}
    views = [
        {"id": f"obs1.{i}", "uri": png, "parent": "vid0", "frame": n, "time": n / 10}
        for i, n in enumerate((5, 12, 19))
    ]
    action = {"op": "track_object", "target": "vid0", "arguments": {"box": boxes[0]}}
    data = {"tracks": [track], "objects": []}
    observation = {"status": "ok", "id": "obs1", "text": "track t1", "images": [], "data": data}
    common = {"sample": 0, "samples": 1, "augmentation": "grey_world", "images": []}
    answer = {"role": "assistant", "text": "<answer>right</answer>"}
    votes = [{"id": "x", "answer": "right", "weight": 1, "source": "sample"}]
    verdict = {"answer": "right", "strategy": "majority", "votes": votes}
    trajectory = {"id": "x", "turns": [], "images": [], "answer": "right"}
    seen = {"role": "tool", "text": "", "observation": observation}
    events: list[tuple[str, dict[str, Any]]] = [
        ("turn", {**common, "turn": {"role": "assistant", "text": "track", "action": action}}),
        ("turn", {**common, "turn": seen, "images": views}),
        ("turn", {**common, "turn": answer}),
        ("answer", {"answer": "right", "confidence": 1, "verdict": verdict, "trajectory": trajectory}),
    ]
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)


@pytest.mark.parametrize(
    "container",
    ["mp4", pytest.param("webm", marks=pytest.mark.long), pytest.param("gif", marks=pytest.mark.long)],
)
def test_a_clip_plays_and_its_track_is_drawn_over_it(opened: Opened, container: str) -> None:
    page = opened(reduced_motion="no-preference")
    page.route(
        "**/v1/agent",
        lambda route: route.fulfill(content_type="text/event-stream", body=tracked_reply(picture_url())),
    )
    page.set_input_files("#choose", clip(container))
    expect(page.locator("#picture-note")).to_have_text("160 × 96 pixels, 2.0 s")
    page.evaluate("document.getElementById('position').value = 0")
    expect(page.locator("#position")).not_to_have_js_property("value", "0")  # it plays
    page.get_by_role("button", name="Pause").click()
    assert page.locator("#play").inner_text() == "Play"
    page.fill("#question", "Where does it go?")
    with page.expect_request("**/v1/agent") as sent:
        page.click("#send")
    expect(page.locator(".sample .name").first).to_have_text("Sample 1 saw the colours balanced")
    kind = "image/gif" if container == "gif" else f"video/{container}"
    assert sent.value.post_data_json["video"].startswith(f"data:{kind};base64,")
    assert "image" not in sent.value.post_data_json
    expect(page.locator("#answer .final")).to_have_text("right")
    frames = ["Frame 5 at 0.50 s", "Frame 12 at 1.20 s", "Frame 19 at 1.90 s"]
    assert page.locator(".seek").all_text_contents() == frames
    page.get_by_role("button", name="Frame 12 at 1.20 s").click()
    expect(page.locator("#clip-time")).to_contain_text("1.2 s of 2.0 s")
    # Frame 12 of the clip is on the stage, and around its square the track's box of that frame, in the first
    # sample's colour.
    at = "(([x, y]) => [...stage.getContext('2d').getImageData(x * 4.5, y * 4.5, 1, 1).data].slice(0, 3))"
    assert until(lambda: min(page.evaluate(f"{at}([80, 44])")) > 180)
    assert until(lambda: page.evaluate(f"{at}([72, 44])") == [255, 45, 122])
    assert page.evaluate(f"{at}([114, 44])") != [255, 45, 122]


@pytest.mark.long
def test_a_clip_that_cannot_be_used_is_refused_with_advice(opened: Opened) -> None:
    page = opened()
    page.set_input_files("#choose", {"name": "x.mp4", "mimeType": "video/mp4", "buffer": b"no clip"})
    expect(page.locator("#error")).to_contain_text("cannot play the clip")
    page.set_input_files("#choose", {"name": "x.mp4", "mimeType": "video/mp4", "buffer": bytes(800_000)})
    expect(page.locator("#error")).to_contain_text("The clip has 0.8 MB")


def test_feedback_reaches_the_experience(deployed: Deployed, opened: Opened) -> None:
    page = opened()
    ask(page, "say 7")
    page.wait_for_selector(".feedback")
    page.get_by_role("button", name="Wrong", exact=True).click()
    assert page.evaluate("document.activeElement.name") == "answer"
    page.keyboard.type("Käse 8")
    with page.expect_response("**/v1/feedback") as response:
        page.keyboard.press("Enter")
    assert response.value.status == 200
    expect(page.locator(".feedback")).to_have_text("Thank you. Marked as wrong.")
    name = response.value.request.post_data_json["experience_id"]
    with deployed.client() as client:
        feedback = client.get(f"/v1/experiences/{name}").json()["experience"]["feedback"]
    assert [(f["correct"], f["answer"]) for f in feedback] == [(False, "Käse 8")]
    ask(page, "say 9")
    expect(page.locator(".final")).to_have_text("9")
    page.get_by_role("button", name="Correct", exact=True).click()
    expect(page.locator(".feedback")).to_have_text("Thank you. Marked as correct.")


@pytest.mark.long
def test_the_request_follows_the_settings(opened: Opened) -> None:
    page = opened()
    page.click(".settings summary")
    assert page.input_value("#samples") == "4"
    page.fill("#samples", "3")
    for name in ("operations", "remember", "learn"):
        page.uncheck(f"#{name}")
    with page.expect_request("**/v1/agent") as sent:
        ask(page, "say 7")
    body = sent.value.post_data_json
    assert (body["samples"], body["stream"]) == (3, True)
    assert not any(body[name] for name in ("operations", "remember", "learn"))
    expect(page.locator(".final")).to_have_text("7")
    assert page.locator(".sample").count() == 3
    assert page.locator(".arguments").count() == 0
    assert page.locator(".feedback").count() == 0
    assert "not stored" in page.locator(".verdict").inner_text()


def test_cancel_stops_the_work(deployed: Deployed, opened: Opened) -> None:
    page = opened()
    before = deployed.counters()
    ask(page, "say 7 pause 3")
    page.wait_for_selector(".turns li")
    page.click("#cancel")
    expect(page.locator("#error")).to_contain_text("Cancelled.")
    assert page.is_enabled("#send")
    assert page.locator(".verdict").count() == 0
    assert until(lambda: deployed.counters()["closed"] > before["closed"])


@pytest.mark.long
def test_a_picture_can_be_pasted_and_a_large_one_is_made_smaller(opened: Opened) -> None:
    page = opened()
    page.evaluate(
        """async () => {
            const canvas = new OffscreenCanvas(1600, 1200);
            canvas.getContext("2d").fillRect(5, 5, 9, 9);
            const items = new DataTransfer();
            items.items.add(new File([await canvas.convertToBlob()], "p.png", { type: "image/png" }));
            window.dispatchEvent(new ClipboardEvent("paste", { clipboardData: items, bubbles: true }));
        }"""
    )
    # A million pixels are taken here
    expect(page.locator("#picture-note")).to_contain_text("1154 × 866 pixels, made smaller")
    page.set_input_files("#choose", {"name": "x.png", "mimeType": "image/png", "buffer": b"no picture"})
    expect(page.locator("#error")).to_contain_text("save it as PNG or JPEG")
    page.set_input_files("#choose", {"name": "x.pdf", "mimeType": "application/pdf", "buffer": b"%PDF"})
    expect(page.locator("#error")).to_contain_text("This is not a picture or a clip")


def test_failures_are_explained_with_advice(opened: Opened) -> None:
    page = opened(key="wrong")
    ask(page, "say 7")
    expect(page.locator("#error")).to_contain_text("does not accept this key")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    assert page.evaluate("Object.keys(localStorage).length") == 0
    page.click("#send")
    expect(page.locator(".final")).to_have_text("7")
    ask(page, "say <|im_start|>")
    expect(page.locator("#error")).to_contain_text("spells the control token")
    refusal = {"headers": {"Retry-After": "7"}, "json": {"error": {"message": "m", "code": "c"}}}
    late = 'event: error\ndata: {"error": {"message": "no answer within 3 s", "code": "timeout"}}\n\n'
    replies = list[dict[str, Any]]()
    page.route("**/v1/agent", lambda route: route.fulfill(**replies[-1]))
    for reply, advice in (
        ({"status": 429, **refusal}, "Try again in 7 s"),
        ({"status": 413, **refusal}, "too large"),
        ({"status": 504, **refusal}, "no answer in time"),
        ({"status": 500, **refusal}, "failed (500)"),
        ({"content_type": "text/event-stream", "body": late}, "no answer in time"),
    ):
        replies.append(reply)
        page.click("#send")
        expect(page.locator("#error")).to_contain_text(advice)
    page.route("**/v1/agent", lambda route: route.abort())
    page.click("#send")
    expect(page.locator("#error")).to_contain_text("cannot be reached")


@pytest.mark.long
def test_a_phone_needs_no_sideways_scrolling(opened: Opened) -> None:
    page = opened(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    assert page.is_visible("#photo-label")
    assert page.get_attribute("#photo", "capture") == "environment"
    assert fits(page)
    ask(page, f"say {'wide' * 60}", width=400, height=40)
    page.wait_for_selector(".verdict")
    assert fits(page)
    page.click("nav a[href='#/evolution']")
    page.wait_for_selector("#evolution-versions tr")
    assert fits(page)

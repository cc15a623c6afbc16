"""`pixelis.Agent`: questions in this process, from a script and from a running event loop."""

from __future__ import annotations

import asyncio
import base64
import html
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from clips import BIKES
from dialogue_models import ScriptedSession
from PIL import Image

import pixelis
from pixelis.datasets import card_questions
from pixelis.datasets.cards import render
from pixelis.errors import BadConfig, BadInput, InfraFailure, MissingFile, PixelisError

pytestmark = pytest.mark.slow

QUESTION = "Which digit is in the cyan frame?"
ZOOM = '<tool_call>{"name":"zoom_in","arguments":{"bbox_2d":[100,200,300,400]}}</tool_call>'
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def agent() -> Iterator[pixelis.Agent]:
    with pixelis.Agent.load("nano", toolbox={"operations": ["zoom_in", "select_frames"]}) as agent:
        yield agent


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    return render(card_questions.question_row("test", 7, 0)["media"][0]["uri"])


@pytest.fixture
def scripted(agent: pixelis.Agent, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the policy say these turns, a list for each sample."""

    def script(*samples: list[str]) -> None:
        remaining = iter(samples)

        async def open(prefix_key: str) -> ScriptedSession:
            return ScriptedSession(agent.renderer, next(remaining))

        monkeypatch.setattr(agent.engine, "open", open)

    return script


def test_a_picture_may_be_a_path_a_url_a_pillow_image_or_an_array(
    agent: pixelis.Agent, picture: np.ndarray, tmp_path: Path
) -> None:
    path = tmp_path / "card.png"
    Image.fromarray(picture).save(path)
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    answers = [
        agent.ask(QUESTION, images=[source]) for source in (path, str(path), url, Image.open(path), picture)
    ]
    tokens = [answer.trajectory.token_ids() for answer in answers]
    assert all(own == tokens[0] for own in tokens)
    assert answers[0].confidence is None
    assert np.array_equal(answers[0].pictures["img0"], picture)
    assert answers[0].trajectory.images[0].view_size == (64, 64)


def test_it_answers_in_a_running_loop_and_several_questions_as_a_batch(
    agent: pixelis.Agent, picture: np.ndarray
) -> None:
    alone = agent.ask(QUESTION, images=[picture])

    async def notebook() -> list[pixelis.Answer]:
        inside = agent.ask(QUESTION, images=[picture])
        batch = [agent.aask(QUESTION, images=[picture]), agent.aask("Is there a car?", images=[picture])]
        return [inside, *await asyncio.gather(*batch)]

    inside, first, second = asyncio.run(notebook())
    assert alone.trajectory.token_ids() == inside.trajectory.token_ids() == first.trajectory.token_ids()
    assert QUESTION in first.trajectory.turns[0].text
    assert "car" in second.trajectory.turns[0].text


def test_samples_vote_and_a_notebook_shows_the_crop_but_runs_nothing(
    agent: pixelis.Agent, picture: np.ndarray, scripted: Callable[..., None]
) -> None:
    scripted([ZOOM, "<answer>7</answer>"], ["<answer>3</answer>"], ["<answer>7</answer>"], [HOSTILE])
    answer = agent.ask(f"Which digit? {HOSTILE}", images=[picture], samples=4)
    assert (answer.answer, answer.confidence) == ("7", pytest.approx(0.5))
    assert [sample.answer for sample in answer.samples] == ["7", "3", "7", None]
    assert list(answer.crops) == ["obs1"]
    assert list(answer.pictures) == ["img0", "obs1"]
    (observation,) = answer.trajectory.observations
    assert observation.images[0].box == pytest.approx((0.1, 0.2, 0.3, 0.4), abs=1e-3)
    assert observation.seconds > 0
    shown = answer._repr_html_()
    assert shown.startswith("<iframe sandbox ")
    assert "<script" not in shown
    document = html.unescape(shown)
    assert HOSTILE not in document
    assert html.escape(HOSTILE) in document
    assert document.count("data:image/") >= 2
    assert "trajectory" not in repr(answer)


def test_an_operation_that_takes_too_long_is_reported_to_the_policy(
    picture: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"toolbox.operations": ["zoom_in"], "toolbox.timeout_s": 1e-9}
    with pixelis.Agent.load("nano", **keys) as agent:

        async def open(prefix_key: str) -> ScriptedSession:
            return ScriptedSession(agent.renderer, [ZOOM, "<answer>7</answer>"])

        monkeypatch.setattr(agent.engine, "open", open)
        answer = agent.ask(QUESTION, images=[picture])
        monkeypatch.undo()
    assert (answer.answer, answer.crops) == ("7", {})
    assert answer.trajectory.observations[0].code == "timeout"
    with pytest.raises(InfraFailure, match="shut down"):
        agent.ask(QUESTION)
    agent.close()


def test_a_clip_is_shown_by_its_frames(agent: pixelis.Agent) -> None:
    answer = agent.ask("What happens?", videos=[BIKES])
    assert answer.question.media[0].kind == "video"
    assert next(iter(answer.pictures)) == "vid0.0"
    assert "data:image/" in answer._repr_html_()


def test_what_cannot_be_used_is_named(agent: pixelis.Agent, picture: np.ndarray, tmp_path: Path) -> None:
    cases: list[tuple[type[PixelisError], dict, str]] = [
        (BadInput, {"images": [picture, tmp_path / "none.png"]}, r"images\[1\]: "),
        (BadInput, {"images": [picture.astype(np.float32)]}, r"images\[0\]: no picture: Cannot handle.*f4"),
        (BadInput, {"images": [3]}, r"images\[0\]: no picture: 'int'"),
        (BadInput, {"images": "card.png"}, "images is no list"),
        (BadInput, {"samples": 0}, "samples=0"),
    ]
    for kind, options, message in cases:
        with pytest.raises(kind, match=message):
            agent.ask(QUESTION, **options)
    with pytest.raises(BadInput, match="do not fit"):
        agent.ask(QUESTION * 200)
    assert agent.ask(QUESTION).trajectory.turns, "the agent goes on after errors"


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    for kind, options, message in (
        (MissingFile, {"model": tmp_path}, "no model in"),
        (MissingFile, {"adapter": tmp_path}, "no adapter in"),
        (BadConfig, {"dialogue": {"max_turn": 3}}, "did you mean `dialogue.max_turns`"),
        (BadConfig, {"toolbox.operations": ["zoom"]}, "there is no operation 'zoom'"),
    ):
        with pytest.raises(kind, match=message) as caught:
            pixelis.Agent.load(**options)
        assert caught.value.fix

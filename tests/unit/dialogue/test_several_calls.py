"""Turns with several calls: which count, what the policy is shown, what is learnt, and demonstrations with
such turns.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_policy
from dialogue_models import ScriptedSession, renderer
from PIL import Image
from pydantic import ValidationError

from pixelis.config import DialogueConfig, parse
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.formats import read_records
from pixelis.dialogue.agent import Episode, Limits, run_episode
from pixelis.dialogue.dialects import DIALECTS
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import OperationError
from pixelis.evaluation.metrics import operation_counts
from pixelis.operations import OPERATIONS, Scene, execute, select
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.scale import Scale
from pixelis.records import Action, Demonstration, ImageView, Question, StopReason, Trajectory
from pixelis.rewards import formats
from pixelis.rewards.terms import calls, ends_in_error

PICTURE = np.random.default_rng(1).integers(0, 256, (560, 1120, 3), dtype=np.uint8)
VIEW = ImageView(id="img0", source_size=(1120, 560), view_size=(1120, 560))
SCALE = Scale.of("pixels", [VIEW], slack=28)
LEFT, RIGHT = ([0, 0, 560, 560], [560, 0, 1120, 560])
TOOLS = {"qwen": "zoom_in", "deepeyes": "image_zoom_in_tool"}
LIMITS = Limits(3, 600, 8000, 4)


def written(dialect: str, *boxes: list[int], think: str = "t") -> str:
    each = [
        f'<tool_call>{{"name":"{TOOLS[dialect]}","arguments":{{"bbox_2d":{list(box)}}}}}</tool_call>'
        for box in boxes
    ]
    return f"<think>{think}</think>" + "\n".join(each)


def zoom(left: float, right: float) -> Action:
    return Action(op="zoom_in", arguments={"box": [left, 0.0, right, 1.0]})


@pytest.mark.parametrize("dialect", TOOLS)
def test_calls_count_in_order_up_to_the_limit(dialect: str) -> None:
    d = DIALECTS[dialect]
    two = d.parse(written(dialect, LEFT, RIGHT), OPERATIONS, SCALE, max_calls=2)
    assert [a.arguments["box"] for a in (two.action, *two.further_actions)] == [
        [0, 0, 0.5, 1],
        [0.5, 0, 1, 1],
    ]
    three = d.parse(written(dialect, LEFT, RIGHT, [0, 0, 1120, 560]), OPERATIONS, SCALE, max_calls=2)
    if dialect == "deepeyes":  # its environment with several calls drops those beyond the limit
        assert (three.action, three.further_actions) == (two.action, two.further_actions)
    else:
        assert (three.action, three.error.code) == (None, "limit")
    # One call that cannot be read refuses the whole turn, and an answer comes before any call in DeepEyes.
    broken = d.parse(written(dialect, LEFT, [1, 2]), OPERATIONS, SCALE, max_calls=2)
    assert (broken.action, broken.further_actions, broken.error is not None) == (None, (), True)
    answered = d.parse(written(dialect, LEFT, RIGHT) + "<answer>7</answer>", OPERATIONS, SCALE, max_calls=2)
    assert answered.answer == ("7" if dialect == "deepeyes" else None)
    assert (answered.error is None) == (dialect == "deepeyes")
    one = d.parse(written(dialect, LEFT, RIGHT), OPERATIONS, SCALE)
    assert (one.action is not None) == (dialect == "deepeyes")
    assert one.further_actions == ()


@pytest.mark.parametrize("dialect", TOOLS)
def test_several_calls_read_back_as_written(dialect: str) -> None:
    d, actions = DIALECTS[dialect], [zoom(0.0, 0.5), zoom(0.25, 0.75), zoom(0.5, 1.0)]
    text = "".join(d.render(actions, SCALE, "t"))
    reply = d.parse(text, OPERATIONS, SCALE, max_calls=3)
    assert [a.arguments["box"] for a in (reply.action, *reply.further_actions)] == [
        a.arguments["box"] for a in actions
    ]
    assert d.well_formed(text, 3)
    assert not d.well_formed(text)
    assert not d.well_formed(text, 2)
    assert not d.well_formed(text + "<answer>7</answer>", 3)


@pytest.mark.parametrize("dialect", ["mini_o3", "pixel_reasoner", "plain"])
def test_other_dialects_have_one_call_a_turn(dialect: str) -> None:
    with pytest.raises(ValidationError, match="max_calls must be 1"):
        DialogueConfig(dialect=dialect, max_calls=2)  # type: ignore[arg-type]


class RealTools:
    """The registry's operations on one picture; the region that ``fails`` crashes."""

    def __init__(self, fails: list[float] | None = None):
        self.fails = fails

    async def execute(self, action: Action, images: list[ImageView], objects: dict):
        if action.arguments["box"] == self.fails:
            raise RuntimeError("broken")
        budget = PixelBudget(28 * 28 * 4, 28 * 28 * 4)
        return execute(action, Scene({"img0": PICTURE}, images, budget=budget, multiple=28))


def play(
    dialect: str, *lines: str, tools: RealTools | None = None, limits: Limits = LIMITS
) -> tuple[Episode, Renderer]:
    base = renderer("large")
    config = DialogueConfig(dialect=dialect, max_calls=2)  # type: ignore[arg-type]
    r = Renderer(base.tokenizer, base.spec, config, select(["zoom_in"]))
    session, question = ScriptedSession(r, lines), Question(id="q", question="Which digit?", answers=["7"])
    episode = asyncio.run(
        run_episode(
            session, r, question, [VIEW], [PICTURE], tools or RealTools(), limits, SamplingParams(), "g", 1
        )
    )
    assert Trajectory.model_validate_json(episode.trajectory.model_dump_json()) == episode.trajectory
    return episode, r


@pytest.mark.parametrize("dialect", TOOLS)
def test_an_episode_executes_all_calls_and_shows_their_results_in_one_turn(dialect: str) -> None:
    episode, r = play(dialect, written(dialect, LEFT, RIGHT), "<think>t</think><answer>7</answer>")
    t = episode.trajectory
    assert (t.stop_reason, t.answer, t.policy_turns, t.operations_ok) == (StopReason.ANSWER, "7", 2, 2)
    assert [turn.role for turn in t.turns] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [view.id for view in t.images] == ["img0", "obs1", "obs2"]
    assert [view.box for view in t.images[1:]] == [(0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)]
    assert [list(a.arguments["box"]) for a in t.actions] == [[0, 0, 0.5, 1], [0.5, 0, 1, 1]]
    assert "up to 2 functions per turn" in t.turns[0].text
    # One turn of the chat: a response each, one opener, one closer, and the instructions once.
    shown = r.tokenizer.decode(
        [token for turn in t.turns[3:5] for token in turn.tokens], skip_special_tokens=False
    )
    assert shown.startswith("\n<|im_start|>user\n<tool_response>")
    assert shown.count("<|im_start|>") == 2
    assert shown.count("<|im_end|>") == 1
    assert shown.count("<tool_response>") == shown.count("</tool_response>\n<tool_response>") + 1 == 2
    assert shown.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert shown.count("Think first") == (1 if dialect == "deepeyes" else 0)
    # Only what the policy wrote is learnt, each token with its log-probability.
    mask, values = np.asarray(t.loss_mask()), np.asarray(t.behaviour_log_probs())
    learnt = r.tokenizer.decode(np.asarray(t.token_ids())[mask == 1].tolist(), skip_special_tokens=False)
    assert learnt == f"{written(dialect, LEFT, RIGHT)}<|im_end|><think>t</think><answer>7</answer><|im_end|>"
    assert ((values != 0) == (mask == 1)).all()
    assert operation_counts(t) == (2, 0)
    assert (calls(t, "requested"), calls(t, "executed"), ends_in_error(t), formats.dialect(t)) == (
        2,
        2,
        False,
        1.0,
    )


@pytest.mark.parametrize("dialect", TOOLS)
def test_a_call_that_fails_leaves_the_others_of_its_turn(dialect: str) -> None:
    episode, _ = play(
        dialect, written(dialect, LEFT, RIGHT), "no call", tools=RealTools([0.5, 0.0, 1.0, 1.0])
    )
    t = episode.trajectory
    assert [o.status for o in t.observations] == ["ok", "error"]
    assert [view.id for view in t.images] == ["img0", "obs1"]
    assert (operation_counts(t), ends_in_error(t)) == ((2, 1), True)
    # Images that do not fit end the episode before any result of the turn.
    crowded, _ = play(dialect, written(dialect, LEFT, RIGHT), limits=Limits(3, 600, 8000, 2))
    assert crowded.trajectory.stop_reason is StopReason.OVER_IMAGES
    assert [view.id for view in crowded.trajectory.images] == ["img0"]


@pytest.mark.parametrize("dialect", TOOLS)
def test_demonstrations_with_several_calls_are_played_as_an_episode_would_be(
    dialect: str, tmp_path: Path
) -> None:
    Image.fromarray(PICTURE[:, :560]).save(tmp_path / "picture.png")
    pixels = {"min_pixels": 280 * 280, "max_pixels": 280 * 280}
    dialogue = {"dialect": dialect, "max_calls": 2, "max_context": 4096, "input": pixels, "crop": pixels}
    config = parse(
        {
            "policy": {"model": str(tiny_policy.folder("qwen2_5_vl"))},
            "dialogue": dialogue,
            "learner": {"row_tokens": 4096},
        }
    )
    player = Player(config, config.policy.model)
    first = {"think": "t", "op": "zoom_in", "box": [0, 0, 0.5, 1]}
    further = [{"op": "zoom_in", "arguments": {"box": [0.5, 0, 1, 1]}}]
    row = {
        "id": "q",
        "question": "Which?",
        "media": [{"id": "img0", "uri": str(tmp_path / "picture.png")}],
        "answers": ["7"],
    }
    d = Demonstration.model_validate(
        {**row, "turns": [{**first, "further": further}, {"think": "t", "answer": "7"}]}
    )
    assert Demonstration.model_validate_json(d.model_dump_json()) == d
    t, views = player.play(d)
    assert [turn.role for turn in t.turns if turn.role != "system"] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert [view.id for view in t.images] == ["img0", "obs1", "obs2"]
    assert len(views) == 3
    read, _ = player.renderer.read(t.turns[-4].tokens, [0.0] * len(t.turns[-4].tokens), t.images[:1])
    assert read.actions == t.turns[-4].actions
    assert len(read.actions) == 2
    count = [o.images[0].id for o in t.observations]
    again = [player.renderer.observation(o, 1 + i, i, 2).tokens for i, o in enumerate(t.observations)]
    assert (count, again) == (["obs1", "obs2"], [turn.tokens for turn in t.turns if turn.role == "tool"])
    with pytest.raises(ValidationError, match="further"):
        Demonstration.model_validate({**row, "turns": [{"answer": "7", "further": further}]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, width in enumerate((560, 280, 280, 280)):
        Image.fromarray(PICTURE[:280, :width]).save(tmp_path / f"{i}.png")
    return tmp_path


def chat(dialect: str, *boxes: list[int], results: int | None = None, more: str = "") -> dict:
    """A row of a system's chat: a turn with these calls, its results and a call on the last image or an
    answer.
    """
    count = len(boxes) if results is None else results
    shown = "\n".join(["<tool_response><image></tool_response>"] * count)
    messages = [("user", "<image>Which?"), ("assistant", written(dialect, *boxes)), ("user", shown)]
    messages += [("assistant", more), ("user", "<tool_response><image></tool_response>")] if more else []
    messages.append(("assistant", "<think>t</think><answer>7</answer>"))
    images = [f"{i}.png" for i in range(1 + count + bool(more))]
    return {
        "id": "c",
        "messages": [{"role": role, "content": text} for role, text in messages],
        "images": images,
    }


def read(folder: Path, row: dict) -> Demonstration | BadRow:
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (record,) = read_records(str(folder / "rows.jsonl"))
    assert isinstance(record, Demonstration | BadRow)
    return record


def playing(dialect: str, max_calls: int) -> Player:
    pixels = {"min_pixels": 560 * 280, "max_pixels": 560 * 280}
    dialogue = {
        "dialect": dialect,
        "max_calls": max_calls,
        "max_context": 4096,
        "input": pixels,
        "crop": pixels,
    }
    model = str(tiny_policy.folder("qwen2_5_vl"))
    return Player(
        parse({"policy": {"model": model}, "dialogue": dialogue, "learner": {"row_tokens": 4096}}), model
    )


NORMAL = {
    "deepeyes": ([0, 0, 280, 280], [280, 0, 560, 280]),
    "qwen": ([0, 0, 500, 1000], [500, 0, 1000, 1000]),
}
"""The left and right half of the picture in the units of a row: pixels, and 0..1000."""


@pytest.mark.parametrize("dialect", TOOLS)
def test_a_row_with_several_calls_in_a_turn_is_read_played_and_written_back(
    folder: Path, dialect: str
) -> None:
    later = '<think>t</think><tool_call>{"name":"zoom_in","arguments":{"bbox_2d":[0,0,1000,500],"target":"obs2"}}</tool_call>'
    row = chat(dialect, *NORMAL[dialect], more=later if dialect == "qwen" else "")
    d = read(folder, row)
    assert isinstance(d, Demonstration)
    boxes = [
        call.arguments["box"]
        for call in (Action(op="zoom_in", arguments=d.turns[0].arguments), *d.turns[0].further)
    ]
    assert boxes == [[0, 0, 0.5, 1], [0.5, 0, 1, 1]]
    assert [turn.target for turn in d.turns] == ["img0", *(["obs2"] if dialect == "qwen" else []), None]
    assert all(turn.learn for turn in d.turns)
    t, views = playing(dialect, 2).play(d)
    assert [view.id for view in t.images] == [
        "img0",
        "obs1",
        "obs2",
        *(["obs3"] if dialect == "qwen" else []),
    ]
    assert [view.box for view in t.images[1:3]] == [(0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)]
    assert len(views) == len(t.images)
    with pytest.raises(OperationError, match=r"dialogue\.max_calls"):
        playing(dialect, 1).play(d)


@pytest.mark.parametrize("dialect", TOOLS)
def test_calls_of_a_row_of_which_only_one_was_executed(folder: Path, dialect: str) -> None:
    d = read(folder, chat(dialect, *NORMAL[dialect], results=1))
    assert isinstance(d, Demonstration)
    assert d.turns[0].further == []
    if dialect == "qwen":  # our own dialect refuses such a turn
        assert (d.turns[0].op, d.turns[0].learn) == (None, False)
        return
    assert d.turns[0].arguments["box"] == [0.5, 0, 1, 1]
    t, _ = playing(dialect, 1).play(d)
    assert [view.box for view in t.images[1:]] == [(0.5, 0.0, 1.0, 1.0)]
    with pytest.raises(OperationError, match=r"set dialogue\.max_calls=1"):
        playing(dialect, 2).play(d)


def test_rows_whose_results_do_not_fit_their_calls_are_refused_by_name(folder: Path) -> None:
    row = chat("deepeyes", *NORMAL["deepeyes"])
    failed = "<tool_response><image></tool_response>\n<tool_response>Error: too small</tool_response>"
    three = chat("deepeyes", *NORMAL["deepeyes"], results=3)
    for text, images in ((failed, row["images"][:2]), (three["messages"][2]["content"], three["images"])):
        messages = [*row["messages"][:2], {"role": "user", "content": text}, row["messages"][3]]
        bad = read(folder, {**row, "messages": messages, "images": images})
        assert isinstance(bad, BadRow)
        assert (bad.column, bad.code) == ("messages.2", "result_count")

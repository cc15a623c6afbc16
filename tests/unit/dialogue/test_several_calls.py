"""Turns with several calls: which count, what the policy is shown, and demonstrations with such turns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import playing
import pytest
import tiny_policy
from dialogue_models import ScriptedSession, renderer
from PIL import Image
from playing import RealTools
from pydantic import ValidationError

from pixelis.config import DialogueConfig, parse
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.formats import read_records
from pixelis.dialogue.agent import Episode, Limits
from pixelis.dialogue.dialects import DIALECTS
from pixelis.dialogue.render import Renderer
from pixelis.errors import OperationError
from pixelis.evaluation.metrics import operation_counts
from pixelis.operations import OPERATIONS, select
from pixelis.operations.scale import Scale
from pixelis.records import Action, Demonstration, ImageView, Question, Step, StopReason
from pixelis.rewards import formats
from pixelis.rewards.terms import calls, ends_in_error

PICTURE = np.random.default_rng(1).integers(0, 256, (560, 1120, 3), dtype=np.uint8)
VIEW = ImageView(id="img0", source_size=(1120, 560), view_size=(1120, 560))
SCALE = Scale.of("pixels", [VIEW], slack=28)
LEFT, RIGHT = ([0, 0, 560, 560], [560, 0, 1120, 560])
LEFT_HALF, RIGHT_HALF = HALVES = [[0, 0, 0.5, 1], [0.5, 0, 1, 1]]
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
    assert [a.arguments["box"] for a in (two.action, *two.further_actions)] == HALVES
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


@pytest.mark.parametrize("dialect", [*TOOLS, "qwen_zoom", "qwen_zoom_xml"])
def test_several_calls_read_back_as_written(dialect: str) -> None:
    d, actions = DIALECTS[dialect], [zoom(0.0, 0.5), zoom(0.25, 0.75), zoom(0.5, 1.0)]
    text = "".join(d.render(actions, SCALE, "t"))
    reply = d.parse(text, OPERATIONS, SCALE, max_calls=3)
    assert [a.arguments for a in (reply.action, *reply.further_actions)] == [a.arguments for a in actions]
    assert d.well_formed(text, 3)
    assert not d.well_formed(text, 2)
    assert not d.well_formed(text + "<answer>7</answer>", 3)


@pytest.mark.parametrize("dialect", ["mini_o3", "pixel_reasoner", "plain"])
def test_other_dialects_have_one_call_a_turn(dialect: str) -> None:
    with pytest.raises(ValidationError, match="max_calls must be 1"):
        DialogueConfig(dialect=dialect, max_calls=2)  # type: ignore[arg-type]


class CrashingTools(RealTools):
    """Crashes on the right half."""

    async def execute(self, action: Action, images: list[ImageView], objects: dict):
        if action.arguments["box"] == HALVES[1]:
            raise RuntimeError("broken")
        return await super().execute(action, images, objects)


def play(dialect: str, *lines: str, tools=RealTools, limits: Limits = LIMITS) -> tuple[Episode, Renderer]:
    base = renderer("large")
    config = DialogueConfig(dialect=dialect, max_calls=2)  # type: ignore[arg-type]
    r = Renderer(base.tokenizer, base.spec, config, select(["zoom_in"]))
    question = Question(id="q", question="Which digit?", answers=["7"])
    media = tools({"img0": PICTURE}, r)
    return playing.run(ScriptedSession(r, lines), question, [VIEW], [PICTURE], media, limits), r


@pytest.mark.parametrize("dialect", TOOLS)
def test_an_episode_executes_all_calls_and_shows_their_results_in_one_turn(dialect: str) -> None:
    episode, r = play(dialect, written(dialect, LEFT, RIGHT), "<think>t</think><answer>7</answer>")
    t = episode.trajectory
    assert (t.stop_reason, t.answer, t.policy_turns, t.operations_ok) == (StopReason.ANSWER, "7", 2, 2)
    assert [turn.role for turn in t.turns] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [(view.id, view.box) for view in t.images[1:]] == [
        ("obs1", tuple(LEFT_HALF)),
        ("obs2", tuple(RIGHT_HALF)),
    ]
    assert [list(a.arguments["box"]) for a in t.actions] == HALVES
    assert "up to 2 functions per turn" in t.turns[0].text
    # One turn of the chat: a response each, one opener, one closer, and the instructions once.
    shown = r.tokenizer.decode([*t.turns[3].tokens, *t.turns[4].tokens], skip_special_tokens=False)
    assert shown.startswith("\n<|im_start|>user\n<tool_response>")
    assert (shown.count("<|im_start|>"), shown.count("<|im_end|>")) == (2, 1)
    assert shown.count("<tool_response>") == shown.count("</tool_response>\n<tool_response>") + 1 == 2
    assert shown.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert shown.count("Think first") == (1 if dialect == "deepeyes" else 0)
    # Only what the policy wrote is learnt, each token with its log-probability.
    mask, values = np.asarray(t.loss_mask()), np.asarray(t.behaviour_log_probs())
    learnt = r.tokenizer.decode(np.asarray(t.token_ids())[mask == 1].tolist(), skip_special_tokens=False)
    assert learnt == f"{written(dialect, LEFT, RIGHT)}<|im_end|><think>t</think><answer>7</answer><|im_end|>"
    assert ((values != 0) == (mask == 1)).all()
    assert (operation_counts(t), formats.dialect(t)) == ((2, 0), 1.0)
    assert (calls(t, "requested"), calls(t, "executed"), ends_in_error(t)) == (2, 2, False)


@pytest.mark.parametrize("dialect", TOOLS)
def test_a_call_that_fails_leaves_the_others_of_its_turn(dialect: str) -> None:
    t = play(dialect, written(dialect, LEFT, RIGHT), "no call", tools=CrashingTools)[0].trajectory
    assert [o.status for o in t.observations] == ["ok", "error"]
    assert [view.id for view in t.images] == ["img0", "obs1"]
    assert (operation_counts(t), ends_in_error(t)) == ((2, 1), True)
    # Images that do not fit end the episode before any result of the turn.
    crowded = play(dialect, written(dialect, LEFT, RIGHT), limits=Limits(3, 600, 8000, 2))[0].trajectory
    assert crowded.stop_reason is StopReason.OVER_IMAGES
    assert [view.id for view in crowded.images] == ["img0"]


def player(dialect: str, max_calls: int) -> Player:
    pixels = {"min_pixels": 560 * 280, "max_pixels": 560 * 280}
    dialogue = {
        "dialect": dialect,
        "max_calls": max_calls,
        "max_context": 4096,
        "input": pixels,
        "crop": pixels,
    }
    model = str(tiny_policy.folder("qwen2_5_vl"))
    settings = {"policy": {"model": model}, "dialogue": dialogue, "learner": {"row_tokens": 4096}}
    return Player(parse(settings), model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, width in enumerate((560, 280, 280, 280)):
        Image.fromarray(PICTURE[:280, :width]).save(tmp_path / f"{i}.png")
    return tmp_path


def chat(dialect: str, *boxes: list[int], results: int | None = None, more: str = "") -> dict:
    """A row of a system's chat: a turn with these calls, its results, and ``more`` or an answer."""
    count = len(boxes) if results is None else results
    shown = "<tool_response><image></tool_response>"
    texts = ["<image>Which?", written(dialect, *boxes), "\n".join([shown] * count)]
    texts += [*([more, shown] if more else []), "<think>t</think><answer>7</answer>"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"id": "c", "messages": messages, "images": [f"{i}.png" for i in range(1 + count + bool(more))]}


def read(folder: Path, row: dict) -> Demonstration | BadRow:
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (record,) = read_records(str(folder / "rows.jsonl"))
    assert isinstance(record, Demonstration | BadRow)
    return record


NORMAL = {
    "deepeyes": ([0, 0, 280, 280], [280, 0, 560, 280]),
    "qwen": ([0, 0, 500, 1000], [500, 0, 1000, 1000]),
}
"""The left and right half of the picture in the units of a row: pixels, and 0..1000."""


@pytest.mark.parametrize("dialect", TOOLS)
def test_a_row_with_several_calls_in_a_turn_is_read_and_played_as_an_episode(
    folder: Path, dialect: str
) -> None:
    later = '<think>t</think><tool_call>{"name":"zoom_in","arguments":{"bbox_2d":[0,0,1000,500],"target":"obs2"}}</tool_call>'
    again = dialect == "qwen"  # DeepEyes names no target
    d = read(folder, chat(dialect, *NORMAL[dialect], more=later if again else ""))
    assert isinstance(d, Demonstration)
    assert Demonstration.model_validate_json(d.model_dump_json()).turns == d.turns
    first = d.turns[0]
    assert [first.arguments["box"], *(call.arguments["box"] for call in first.further)] == HALVES
    assert [turn.target for turn in d.turns] == ["img0", *["obs2"] * again, None]
    assert all(turn.learn for turn in d.turns)
    p = player(dialect, 2)
    t, views = p.play(d)
    assert [view.id for view in t.images] == ["img0", "obs1", "obs2", *["obs3"] * again]
    assert [list(view.box) for view in t.images[1:3]] == HALVES
    assert len(views) == len(t.images)
    said = next(turn for turn in t.turns if turn.is_policy)
    assert p.renderer.read(said.tokens, [0.0] * len(said.tokens), t.images[:1])[0].actions == said.actions
    shown = [turn.tokens for turn in t.turns if turn.role == "tool"]
    assert [p.renderer.observation(o, 1 + i, i, 2).tokens for i, o in enumerate(t.observations[:2])] == shown[
        :2
    ]
    with pytest.raises(OperationError, match=r"dialogue\.max_calls"):
        player(dialect, 1).play(d)
    with pytest.raises(ValidationError, match="further"):
        Step(answer="7", further=first.further)


@pytest.mark.parametrize("dialect", TOOLS)
def test_calls_of_a_row_of_which_only_one_was_executed(folder: Path, dialect: str) -> None:
    d = read(folder, chat(dialect, *NORMAL[dialect], results=1))
    assert isinstance(d, Demonstration)
    assert d.turns[0].further == []
    if dialect == "qwen":  # our own dialect refuses such a turn
        assert (d.turns[0].op, d.turns[0].learn) == (None, False)
        return
    assert d.turns[0].arguments["box"] == [0.5, 0, 1, 1]
    t, _ = player(dialect, 1).play(d)
    assert [view.box for view in t.images[1:]] == [(0.5, 0.0, 1.0, 1.0)]
    with pytest.raises(OperationError, match=r"set dialogue\.max_calls=1"):
        player(dialect, 2).play(d)


def test_rows_whose_results_do_not_fit_their_calls_are_refused_by_name(folder: Path) -> None:
    row = chat("deepeyes", *NORMAL["deepeyes"])
    failed = "<tool_response><image></tool_response>\n<tool_response>Error: too small</tool_response>"
    three = chat("deepeyes", *NORMAL["deepeyes"], results=3)
    for text, images in ((failed, row["images"][:2]), (three["messages"][2]["content"], three["images"])):
        messages = [*row["messages"][:2], {"role": "user", "content": text}, row["messages"][3]]
        bad = read(folder, {**row, "messages": messages, "images": images})
        assert isinstance(bad, BadRow)
        assert (bad.column, bad.code) == ("messages.2", "result_count")

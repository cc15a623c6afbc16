"""Whole episodes with a scripted engine and the real operations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import playing
import pytest
from dialogue_models import ScriptedSession, image_view, pixels, renderer
from playing import RealTools

from pixelis.config import DialogueConfig
from pixelis.dialogue.agent import Episode, Limits, run_episode
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import Completion, SamplingParams
from pixelis.errors import DeadlineExceeded, InfraFailure
from pixelis.operations.pixel_budget import PixelBudget, fit
from pixelis.records import ImageView, Observation, Question, StopReason, Trajectory, Turn

PICTURE = np.random.default_rng(1).integers(0, 256, (800, 1000, 3), dtype=np.uint8)
QUESTION = Question(id="q", question="Which digit?", answers=["7"])
LIMITS = Limits(max_turns=4, max_turn_tokens=64, max_context=512, max_images=4)
ANSWER = "<answer>7</answer>"
NANO = "nano"
SAMPLING = SamplingParams(seed=5)


def call(box: Sequence[int] = (200, 200, 600, 600), target: str = "") -> str:
    where = f',"target":"{target}"' if target else ""
    return f'<tool_call>{{"name":"zoom_in","arguments":{{"bbox_2d":[{",".join(map(str, box))}]{where}}}}}</tool_call>'


class Failing:
    """Tools that always do the same wrong thing."""

    def __init__(self, result):
        self.result = result

    async def execute(self, action, images, objects):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def play(
    lines, tools="real", limits=LIMITS, name=NANO, sampling=SAMPLING, images=None
) -> tuple[Episode, ScriptedSession]:
    r = renderer(name)
    session = ScriptedSession(r, lines)
    images = [image_view(name)] if images is None else images
    views = [PICTURE[: i.view_size[1], : i.view_size[0]] for i in images]
    tools = RealTools({"img0": PICTURE}, r) if tools == "real" else tools
    told: list[tuple[Turn, list[np.ndarray]]] = []
    episode = playing.run(
        session, QUESTION, images, views, tools, limits, sampling, on_turn=lambda *turn: told.append(turn)
    )
    # Whoever watches is told every turn after the prompt with its views; but none that the engine broke.
    after = [turn for turn in episode.trajectory.turns if turn.role in ("assistant", "tool")]
    broken = episode.trajectory.stop_reason is StopReason.ERROR
    assert [turn for turn, _ in told] == (after[: len(told)] if broken else after)
    assert [v.shape for _, added in told for v in added] == [v.shape for v in episode.views[len(images) :]]
    return episode, session


def sound(episode: Episode, limits: Limits = LIMITS, name: str = NANO) -> Trajectory:
    """What must hold for every episode, however it ended."""
    t, spec = episode.trajectory, renderer(name).spec
    assert Trajectory.model_validate_json(t.model_dump_json()) == t
    assert [v.shape for v in episode.views] == [(i.view_size[1], i.view_size[0], 3) for i in t.images]
    tokens = t.token_ids()
    assert tokens.count(spec.image_token) == sum(spec.image_tokens(*v.shape[:2]) for v in episode.views)
    assert len(tokens) <= limits.max_context
    assert [i for turn in t.turns for i in turn.images] == [i.id for i in t.images]
    assert (t.answer is not None) == (t.stop_reason is StopReason.ANSWER)
    return t


@pytest.mark.parametrize("name", ["nano", "large"])
def test_zoom_twice_then_answer(name: str):
    limits = Limits(4, 200, 4000, 4)
    w, h = (1000, 1000) if name == "nano" else image_view(name).view_size
    first, second = call([0, 0, w // 2, h // 2]), call([w // 2, h // 2, w, h], "obs1")
    episode, session = play([first, second, ANSWER], limits=limits, name=name)
    t = sound(episode, limits, name)
    assert (t.stop_reason, t.answer, t.policy_version, t.group_id) == (StopReason.ANSWER, "7", 3, "g")
    expected = [("img0", (0.0, 0.0, 0.5, 0.5)), ("obs1", (0.5, 0.5, 1.0, 1.0))]
    assert [(i.parent, i.box) for i in t.images[1:]] == expected
    told = [turn for turn in t.turns if turn.role == "tool"]
    assert [turn.text for turn in told] == ["obs1 = zoom_in(img0)", "obs2 = zoom_in(obs1)"]
    step = renderer(name).spec.multiple
    budget = PixelBudget(step * step * 16, step * step * 16)
    np.testing.assert_array_equal(episode.views[1], fit(PICTURE[:400, :500], budget, step))
    np.testing.assert_array_equal(episode.views[2], fit(PICTURE[200:400, 250:500], budget, step))
    # The engine hears the whole prompt once, then only what is new.
    prompt = [turn for turn in t.turns[:2] if turn.role in ("system", "user")]
    assert session.calls[0][0] == [token for turn in prompt for token in turn.tokens]
    assert [tokens for tokens, *_ in session.calls[1:]] == [turn.tokens for turn in told]
    assert [views for _, views, _ in session.calls] == [1, 1, 1]
    assert t.operations_ok == 2
    assert session.closed >= 1


def test_a_turn_that_its_call_ends_is_closed_in_front_of_the_observation():
    """Mini-o3's generation ends with `</grounding>`: the end of the turn is not sampled, and not learnt."""
    base = renderer(NANO)
    r = Renderer(base.tokenizer, base.spec, DialogueConfig(dialect="mini_o3"), list(base.operations.values()))
    text = '<think>t</think><grounding>{"bbox_2d": [0, 0, 0.5, 0.5], "source": "original_image"}</grounding>'
    said = r.tokenizer.encode(text, add_special_tokens=False)
    session, view, tools = (
        ScriptedSession(r, [said, ANSWER]),
        image_view(NANO),
        RealTools({"img0": PICTURE}, r),
    )
    t = playing.run(session, QUESTION, [view], [pixels(view)], tools, Limits(4, 200, 4000, 4)).trajectory
    assert (t.stop_reason, t.answer, t.operations_ok) == (StopReason.ANSWER, "7", 1)
    assert [sampling.stop for *_, sampling in session.calls] == ["</grounding>"] * 2
    assert session.calls[1][0][0] == r.spec.stop
    first, seen, _ = t.turns[-3:]
    assert (first.tokens, seen.tokens) == (said, session.calls[1][0])
    assert r.dialect.well_formed(first.text)


def test_a_refused_call_takes_no_id_and_says_why():
    episode, _ = play([call([300, 300, 302, 302]), call([9, 9, 9, 9]), call(), ANSWER])
    t = sound(episode)
    expected = [("error", "too_small", None), ("error", "bad_box", None), ("ok", None, "obs1")]
    assert [(o.status, o.code, o.id) for o in t.observations] == expected
    assert t.turns[2].text.startswith("error too_small: ")
    assert [turn.error for turn in t.turns if turn.is_policy] == [None, "bad_box", None, None]
    assert t.answer == "7"


@pytest.mark.parametrize(
    ("lines", "limits", "stop"),
    [
        (["just talk"], LIMITS, StopReason.NO_ACTION),
        (["<answer>7"], LIMITS, StopReason.NO_ACTION),
        ([ANSWER * 30], LIMITS, StopReason.LENGTH),
        ([call()], Limits(1, 64, 512, 4), StopReason.OVER_TURN),
        ([call(), "<tool_call>broken</tool_call>"], Limits(2, 64, 512, 4), StopReason.OVER_TURN),
        ([call(), call()], Limits(4, 64, 512, 2), StopReason.OVER_IMAGES),
        ([call(), call(), call()], Limits(4, 64, 120, 4), StopReason.OVER_CONTEXT),
        ([ANSWER], Limits(4, 64, 16, 4), StopReason.OVER_CONTEXT),
        ([ANSWER], Limits(4, 64, 512, 0), StopReason.OVER_IMAGES),
    ],
)
def test_stop_reasons(lines, limits, stop):
    episode, session = play(lines, limits=limits)
    assert sound(episode, limits).stop_reason is stop
    assert episode.trajectory.unscored is None
    assert session.closed >= 1


def test_an_observation_that_would_not_fit_is_left_out_whole():
    full, _ = play([call(), ANSWER])
    used = len(full.trajectory.token_ids()) - len(full.trajectory.turns[-1].tokens)
    for room, appended in ((used, False), (used + 1, True)):
        limits = Limits(4, 64, room, 4)
        episode, session = play([call(), ANSWER], limits=limits)
        t = sound(episode, limits)
        assert t.stop_reason is StopReason.OVER_CONTEXT
        assert len(t.images) == 1 + appended
        assert [s.max_tokens for *_, s in session.calls][1:] == ([1] if appended else [])


def test_without_tools_a_call_is_an_unknown_operation():
    episode, _ = play([call(), ANSWER], tools=None)
    t = sound(episode)
    assert [(o.status, o.code) for o in t.observations] == [("error", "unknown_op")]
    assert t.answer == "7"
    assert "Tools" not in play([ANSWER], tools=None, name="large")[0].trajectory.turns[0].text


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (ValueError("boom"), "crashed"),
        (DeadlineExceeded("slow"), "timeout"),
        ((Observation(status="ok", images=[ImageView(id="", view_size=(64, 64))]), []), "crashed"),
        (None, "crashed"),
    ],
)
def test_a_failing_tool_is_an_observation_and_the_episode_goes_on(result, code):
    episode, _ = play([call(), ANSWER], Failing(result))
    t = sound(episode)
    assert [(o.status, o.code, o.id) for o in t.observations] == [("error", code, None)]
    assert (t.stop_reason, t.answer) == (StopReason.ANSWER, "7")


def test_an_operation_with_text_or_several_pictures_keeps_one_id():
    view = ImageView(id="", parent="img0", view_size=(64, 64))
    pair = (Observation(status="ok", text="two parts", images=[view, view]), [pixels(view), pixels(view)])
    episode, _ = play([call(), ANSWER], Failing(pair))
    t = sound(episode)
    assert t.observations[0].id == "obs1"
    assert [i.id for i in t.images] == ["img0", "obs1.0", "obs1.1"]
    assert t.turns[2].text == "obs1 = zoom_in(img0)\ntwo parts"
    episode, _ = play([call(), call(), ANSWER], Failing((Observation(status="ok", text="words"), [])))
    assert [o.id for o in sound(episode).observations] == ["obs1", "obs2"]


SPEC = renderer(NANO).spec
GOOD = renderer(NANO).assistant("7").tokens


@pytest.mark.parametrize(
    ("line", "stop", "cause"),
    [
        (RuntimeError("CUDA error"), StopReason.ERROR, "crashed"),
        (InfraFailure("engine gone", code="engine_gone"), StopReason.ERROR, "engine_gone"),
        (TimeoutError(), StopReason.DEADLINE, "deadline_exceeded"),
        ([GOOD[0], SPEC.image_token, *GOOD[1:]], StopReason.ERROR, "bad_token"),
        ([GOOD[0], SPEC.pad, *GOOD[1:]], StopReason.ERROR, "bad_token"),
        (Completion(GOOD, [0.0], "stop"), StopReason.ERROR, "bad_completion"),
        (Completion(GOOD, [float("-inf")] * len(GOOD), "stop"), StopReason.ERROR, "bad_completion"),
        (Completion(GOOD[:-1], [0.0] * (len(GOOD) - 1), "stop"), StopReason.ERROR, "bad_completion"),
        (Completion([9] * 65, [0.0] * 65, "length"), StopReason.ERROR, "bad_completion"),
    ],
)
def test_a_failing_engine_is_a_stop_reason(line, stop, cause):
    episode, session = play([call(), line])
    t = sound(episode)
    assert (t.stop_reason, t.unscored, t.answer) == (stop, cause, None)
    assert [i.id for i in t.images] == ["img0", "obs1"]
    assert session.closed >= 1


def test_views_that_do_not_match_their_description_never_reach_training():
    view = image_view(NANO)
    session = ScriptedSession(renderer(NANO), [ANSWER])
    episode = playing.run(session, QUESTION, [view], [pixels(view)[:16]], None, LIMITS)
    assert (episode.trajectory.stop_reason, episode.trajectory.unscored) == (StopReason.ERROR, "bad_views")
    assert (episode.trajectory.turns, episode.views) == ([], [])


def test_cancellation_passes_and_closes_the_session():
    class Slow(ScriptedSession):
        async def generate(self, tokens, views, sampling, on_tokens=None):
            await asyncio.sleep(60)

    async def cancelled():
        session, view = Slow(renderer(NANO), []), image_view(NANO)
        fixed = (None, LIMITS, SamplingParams(), "g", 0)
        run = run_episode(session, renderer(NANO), QUESTION, [view], [pixels(view)], *fixed)
        task = asyncio.create_task(run)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return session.closed

    assert asyncio.run(cancelled()) == 1


def test_the_engine_gets_the_callers_sampling_with_the_room_of_the_turn():
    asked = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=1, seed=11)
    _, session = play([call(), ANSWER], sampling=asked)
    given = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64, seed=11)
    assert [s for *_, s in session.calls] == [given] * 2

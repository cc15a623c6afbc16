"""Episodes of a real engine: interrupted at each call and resumed, they are those of our own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import tiny_policy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import RealTools

from pixelis import config
from pixelis.dialogue.agent import Episode, Limits, Outcome, run_episode
from pixelis.dialogue.dialects import Reply
from pixelis.dialogue.dialects.qwen import Qwen
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.resumption import Resume, Said
from pixelis.dialogue.session import SamplingParams, Start
from pixelis.engines.hf import HfEngine
from pixelis.operations import select
from pixelis.operations.environment import PARENT
from pixelis.operations.function import function_operation
from pixelis.operations.operation import Operation
from pixelis.operations.scale import Scale
from pixelis.policy.log_probs import banned_mask
from pixelis.policy.samples import from_trajectory
from pixelis.records import Action, Function, ImageView, Observation, Question, StopReason, Trajectory

PICTURE = np.random.default_rng(1).integers(0, 256, (800, 1000, 3), dtype=np.uint8)
VIEW = ImageView(id="img0", source_size=(1000, 800), view_size=(64, 64))
LIMITS = Limits(max_turns=6, max_turn_tokens=60, max_context=600, max_images=12)
FUNCTIONS = [Function(name=name) for name in ("look", "ask", "turn")]
ZOOM = Action(op="zoom_in", target="img0", arguments={"box": [0.1, 0.2, 0.6, 0.7]})


class WordsAreCalls(Qwen):
    """What a random model says, a few letters a turn, as calls of one or two tools, sometimes as an answer."""

    def parse(
        self, text: str, operations: Mapping[str, type[Operation]], scale: Scale, max_calls: int = 1
    ) -> Reply:
        said = text.encode()
        if len(said) % 7 == 3:
            return Reply(answer=text)
        calls = [Action(op=f.name, target="", arguments={"said": text}) for f in FUNCTIONS] + [ZOOM]
        first, second = calls[len(said) % 4], calls[sum(said) % 4]
        return Reply(action=first, further_actions=(second,) if len(said) % 2 else ())


def reply(action: Action) -> Outcome:
    """What the client's tool returns: text, and for some calls a picture of its own size."""
    said = action.arguments["said"]
    rng = np.random.default_rng(len(said))
    sizes = [(32, 32), (48, 32)][: len(said) % 3]
    views = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in sizes]
    images = [ImageView(id="", parent=PARENT, source_size=size, view_size=size) for size in sizes]
    return Observation(status="ok", text=f"{action.op} of {said}", images=images), views


class OwnLoop(RealTools):
    """Runs the functions in the loop, as operations."""

    async def execute(self, action: Action, images: list[ImageView], objects: dict) -> Outcome:
        if action.op == "zoom_in":
            return await super().execute(action, images, objects)
        observation, views = reply(action)
        return observation.model_copy(update={"data": {"client": True}}), views


@pytest.fixture(scope="module")
def engine() -> HfEngine:
    folder: Path = tiny_policy.folder("qwen3_vl")
    engine = HfEngine(folder, tiny_policy.policy(), config.EngineConfig(name="hf"), seed=7)
    letters = engine.tokenizer.encode("abcdefgh", add_special_tokens=False)
    others = [t for t in range(engine.spec.vocab) if t not in (*letters, engine.spec.stop)]
    engine._decoder.banned = banned_mask(frozenset(others), engine.spec.vocab, torch.device("cpu"))
    return engine


def loop(engine: HfEngine, functions: list[Function]) -> tuple[Renderer, OwnLoop, Question]:
    """The parts of an episode in which the client runs these functions, and we the others."""
    names = [f.name for f in functions]
    own = [function_operation(f) for f in FUNCTIONS if f.name not in names]
    r = Renderer(
        engine.tokenizer, engine.spec, config.DialogueConfig(max_calls=2), [*select(["zoom_in"]), *own]
    )
    r.dialect = WordsAreCalls()
    question = Question(id="q", question="?", functions=functions)
    return r, OwnLoop({"img0": PICTURE}, r), question


async def play(engine: HfEngine, functions: list[Function], seed: int, ordinal: int, keeps: bool) -> Episode:
    """An episode to its end, in as many completions as the client's functions are called."""
    r, tools, question = loop(engine, functions)
    episode, said = Episode(Trajectory(id=f"traj_{seed}", question_id="q")), list[Said]()
    while True:
        start = Start.after(episode.trajectory, ordinal) if episode.trajectory.turns else Start(ordinal)
        if not keeps:
            engine._kept.clear()
        session = await engine.open("g", start)
        fixed = (tools, LIMITS, SamplingParams(1.0, 0.95, seed=seed), "g", 0)
        resume = Resume(episode, said)
        episode = await run_episode(
            session, r, question, [VIEW], [PICTURE[:64, :64]], *fixed, f"traj_{seed}", resume=resume
        )
        if episode.trajectory.stop_reason is not StopReason.CALL:
            return episode
        calls = [a for a in episode.trajectory.turns[-1].actions if a.op in {f.name for f in functions}]
        said = [Said([reply(call) for call in calls])]


def same(own: Trajectory, other: Trajectory) -> None:
    assert own.token_ids() == other.token_ids()
    assert own.loss_mask() == other.loss_mask()
    assert own.behaviour_log_probs() == pytest.approx(other.behaviour_log_probs(), abs=1e-4)
    different = {"seconds", "turns"}
    assert own.model_dump(exclude=different) == other.model_dump(exclude=different)
    for a, b in zip(own.turns, other.turns, strict=True):
        assert a.model_dump(exclude={"log_probs"}) == b.model_dump(exclude={"log_probs"})


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(0, 3), st.sets(st.sampled_from(range(3)), min_size=1), st.booleans()
)
def test_an_interrupted_episode_is_that_of_our_own_loop(
    engine: HfEngine, seed: int, ordinal: int, theirs: set[int], keeps: bool
) -> None:
    """Token by token, whichever functions are the client's, and whether or not the engine kept its turns."""

    async def both() -> tuple[Episode, Episode]:
        functions = [FUNCTIONS[i] for i in sorted(theirs)]
        own = await play(engine, [], seed, ordinal, keeps)
        return own, await play(engine, functions, seed, ordinal, keeps)

    own, interrupted = asyncio.run(both())
    same(own.trajectory, interrupted.trajectory)
    for a, b in zip(own.views, interrupted.views, strict=True):
        np.testing.assert_array_equal(a, b)
    sample = from_trajectory(interrupted.trajectory, interrupted.views, 1.0)
    assert sample.mask.sum() == interrupted.trajectory.learnt_tokens


def test_such_episodes_have_calls_of_both_sides_and_pictures(engine: HfEngine) -> None:
    """What the property above meets."""

    async def several() -> list[Trajectory]:
        return [(await play(engine, FUNCTIONS[:2], seed, 0, True)).trajectory for seed in range(8)]

    played = asyncio.run(several())
    assert {t.stop_reason for t in played} >= {StopReason.ANSWER, StopReason.OVER_TURN}
    mixed = [{a.op for a in turn.actions} for t in played for turn in t.turns]
    assert any(len(ops) == 2 and "look" in ops for ops in mixed)
    assert sum(len(t.images) for t in played) > 16
    assert len({tuple(t.token_ids()) for t in played}) == 8

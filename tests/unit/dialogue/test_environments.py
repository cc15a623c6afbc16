"""Environments in an episode: what the policy is shown, how the episode ends, and what it earns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import playing
import pytest
from dialogue_models import ScriptedSession, nano_folder, renderer

from pixelis import config
from pixelis.actors.toolbox import Call, Toolbox
from pixelis.config import DialogueConfig, ToolboxConfig, parse
from pixelis.datasets.demonstration_checks import check_demonstration
from pixelis.datasets.demonstrations import Player
from pixelis.dialogue.agent import Episode, Limits
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadConfig, BadInput, DataFailure, InfraFailure, OperationError
from pixelis.operations import OPERATIONS
from pixelis.operations.environment import select_environments
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.records import Action, Demonstration, Group, Question, StopReason
from pixelis.rewards.terms import score_group

ROOT = Path(__file__).resolve().parents[3]
WALK = f"{ROOT}/docs/examples/grid_walk.py:GridWalk"
WALKS = select_environments(ToolboxConfig(environments=[WALK]))
QUESTION = Question(id="q", question="Walk.", environment="grid_walk", scorer="exact")


class Tools:
    """An environment of the toolbox actor's class in this process, without the actor."""

    def __init__(self, question: Question = QUESTION):
        toolbox = Toolbox.__ray_metadata__.modified_class
        self.box = object.__new__(toolbox)
        self.box.config = parse({"toolbox": {"environments": [WALK]}})
        self.box.environments, self.box.episodes = WALKS, {}
        self.box.crop, self.box.multiple = PixelBudget(64 * 64, 64 * 64), renderer("nano").spec.multiple
        self.question = question

    async def reset(self):
        call = Call(Action(op="reset"), [], {}, episode="e", question=self.question)
        return self.box._execute_in_environment(call, {})[0]

    async def execute(self, action, images, objects):
        return self.box._execute_in_environment(Call(action, images, objects, episode="e"), {})[0]


def move(*directions: str) -> str:
    return "\n".join(
        f'<tool_call>{{"name":"move","arguments":{{"direction":"{d}"}}}}</tool_call>' for d in directions
    )


def walks(question: Question = QUESTION) -> tuple[list[str], list[str]]:
    """The way to the goal of a question, and directions into the border from its start."""
    tools = Tools(question)
    asyncio.run(tools.reset())
    walk = tools.box.episodes["e"]
    (row, column), goal = walk.place, walk.goal
    rows, columns = goal[0] - row, goal[1] - column
    way = ["down" if rows > 0 else "up"] * abs(rows) + ["right" if columns > 0 else "left"] * abs(columns)
    at_border = {"up": row == 0, "down": row == 3, "left": column == 0, "right": column == 3}
    return way, [direction for direction, at in at_border.items() if at]


def asked(steps: int, border: bool = False) -> Question:
    """A question whose goal is so many steps away, and which may start at the border."""
    questions = (QUESTION.model_copy(update={"id": f"q{n}"}) for n in range(99))
    return next(q for q in questions if len(walks(q)[0]) == steps and (not border or walks(q)[1]))


def rendering(max_calls: int = 1) -> Renderer:
    base = renderer("nano")
    dialogue = DialogueConfig(max_calls=max_calls)
    return Renderer(
        base.tokenizer,
        base.spec,
        dialogue,
        [OPERATIONS["zoom_in"]],
        WALKS,
    )


def play(
    *lines: str, tools: Tools | None = None, max_calls: int = 1, question: Question = QUESTION
) -> Episode:
    session = ScriptedSession(rendering(max_calls), lines)
    return playing.run(session, question, [], [], tools or Tools(question), Limits(10, 300, 4000, 12))


def test_an_episode_walks_to_the_goal_which_ends_and_rewards_it() -> None:
    steps, _ = walks()
    episode = play(*map(move, steps))
    t = episode.trajectory
    assert (t.stop_reason, t.answer) == (StopReason.DONE, None)
    assert t.operations_ok == t.policy_turns == len(steps)
    assert t.turns[0].role == "user"
    assert t.turns[0].text.endswith("Walk.\nMove the blue square to the red one.")
    assert [view.id for view in t.images] == ["img0", *(f"obs{n + 1}" for n in range(len(steps)))]
    assert [o.data["reward"] for o in t.observations] == [0.0] * (len(steps) - 1) + [1.0]
    assert t.observations[-1].data["moves"] == len(steps)
    # The pictures react: blue moves, at the goal no red is left.
    blue = [tuple(np.argwhere((view == (30, 60, 220)).all(-1))[0]) for view in episode.views]
    assert len(set(blue)) == len(blue)
    assert (episode.views[0] == (220, 30, 30)).all(-1).any()
    assert not (episode.views[-1] == (220, 30, 30)).all(-1).any()
    assert {action.target for action in t.actions} == {""}
    lost = play("no call").trajectory
    group = Group(id="g", question=QUESTION, trajectories=[t, lost])
    weights = config.RewardWeightsConfig(accuracy=0.0, environment=2.0)
    scored = score_group(group, config.RewardsConfig(weights=weights))
    assert [(s.reward, s.unscored) for s in scored.trajectories] == [(2.0, None), (0.0, None)]


def test_a_refused_move_is_shown_and_changes_nothing() -> None:
    question = asked(2, border=True)
    steps, border = walks(question)
    t = play(move(border[0]), *map(move, steps), question=question).trajectory
    assert t.observations[0].code == "border"
    assert (t.stop_reason, t.operations_ok) == (StopReason.DONE, 2)
    zoom = '<tool_call>{"name":"zoom_in","arguments":{"bbox_2d":[0,0,500,500]}}</tool_call>'
    assert play(zoom, "no call").trajectory.observations[0].code == "unknown_op"


def test_calls_after_the_end_are_not_executed() -> None:
    question = asked(1)
    t = play(move(*walks(question)[0], "up"), max_calls=2, question=question).trajectory
    assert (t.stop_reason, len(t.turns[1].actions), len(t.observations)) == (StopReason.DONE, 2, 1)


def test_an_environment_that_fails_ends_its_episode_without_a_reward() -> None:
    class Broken(Tools):
        async def execute(self, action, images, objects):
            raise InfraFailure("gone", code="environment_lost")

    t = play(move("up"), tools=Broken()).trajectory
    assert (t.stop_reason, t.unscored) == (StopReason.ERROR, "environment_lost")


def test_episodes_of_a_question_start_alike() -> None:
    first, second = (asyncio.run(Tools().reset())[1][0] for _ in range(2))
    other = asyncio.run(Tools(QUESTION.model_copy(update={"id": "another"})).reset())[1][0]
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pathlib:Path"], r"toolbox\.environments: .*is no Environment"),
        (["FOLDER/absent.py:Walk"], "no file"),
        ([WALK, WALK], "two environments are called"),
        (["FOLDER/half.py:Half"], "lacks actions"),
    ],
)
def test_classes_that_cannot_be_used_are_named(names: list[str], message: str, tmp_path: Path) -> None:
    half = "from pixelis.operations import Environment\nclass Half(Environment):\n    name = 'half'\n"
    (tmp_path / "half.py").write_text(half)
    environments = [name.replace("FOLDER", str(tmp_path)) for name in names]
    with pytest.raises(BadConfig, match=message):
        select_environments(ToolboxConfig(environments=environments))


def test_only_the_actions_of_its_environment_are_offered() -> None:
    with pytest.raises(BadInput, match="grid_walk") as error:
        rendering().prompt(QUESTION.model_copy(update={"environment": "gridwalk"}), [])
    assert error.value.code == "unknown_environment"
    base, walk = renderer("large"), WALKS
    with pytest.raises(BadConfig, match="no form for move"):
        Renderer(base.tokenizer, base.spec, DialogueConfig(dialect="deepeyes"), [], walk)
    large = Renderer(base.tokenizer, base.spec, DialogueConfig(), [OPERATIONS["zoom_in"]], walk)
    system = large.prompt(QUESTION, [])[0].text
    assert '"move"' in system
    assert '"target"' not in system
    assert "zoom_in" not in system


def demonstration(*turns: dict, question: Question = QUESTION) -> Demonstration:
    return Demonstration.model_validate({**question.model_dump(), "turns": turns})


def player(**dialogue: object) -> Player:
    toolbox, dialogue = {"operations": [], "environments": [WALK]}, {"max_context": 4000, **dialogue}
    settings = {"toolbox": toolbox, "dialogue": dialogue, "learner": {"row_tokens": 4000}}
    return Player(parse(settings), str(nano_folder()))


def test_a_demonstration_is_played_in_its_environment_as_an_episode_would_be() -> None:
    steps, _ = walks()
    taught, views = player(max_turns=10).play(demonstration(*({"op": "move", "direction": d} for d in steps)))
    episode = play(*map(move, steps))
    assert (taught.stop_reason, taught.answer) == (StopReason.DONE, None)
    assert taught.loss_mask() == episode.trajectory.loss_mask()
    assert taught.token_ids() == episode.trajectory.token_ids()
    assert [view.id for view in taught.images] == [view.id for view in episode.trajectory.images]
    for view, expected in zip(views, episode.views, strict=True):
        np.testing.assert_array_equal(view, expected)
    further = [{"op": "move", "arguments": {"direction": steps[1]}}]
    first = {"op": "move", "direction": steps[0], "further": further}
    both = demonstration(first, *({"op": "move", "direction": d} for d in steps[2:]))
    several, _ = player(max_turns=10, max_calls=2).play(both)
    assert several.observations[-1].data == taught.observations[-1].data


def test_demonstrations_that_do_not_fit_their_environment_are_dropped_by_name() -> None:
    question = asked(2, border=True)
    steps, border = walks(question)
    p, walk = player(max_turns=10), [{"op": "move", "direction": d} for d in steps]
    wrong, answer = {"op": "move", "direction": border[0]}, {"answer": "done"}
    masked, _ = p.play(demonstration({**wrong, "learn": False}, *walk, question=question))
    assert [o.status for o in masked.observations] == ["error", "ok", "ok"]
    assert not masked.turns[1].learn
    for turns, code in (
        ((wrong, *walk), "border"),
        (walk[:-1], "no_answer"),
        ((*walk, answer), "after_end"),
        ((*walk, walk[0]), "after_end"),
    ):
        with pytest.raises(DataFailure) as error:
            p.play(demonstration(*turns, question=question))
        assert error.value.code == code
    answered, _ = p.play(demonstration(*walk[:-1], answer, question=question))
    assert (answered.stop_reason, answered.answer) == (StopReason.ANSWER, "done")


def test_demonstrations_in_environments_are_checked_before_they_are_played() -> None:
    environments, zoom = (
        WALKS,
        {"zoom_in": OPERATIONS["zoom_in"]},
    )
    right = demonstration({"op": "move", "direction": "up"})
    assert check_demonstration(right, "rows", zoom, environments) is None
    for row, problem in (
        (demonstration({"op": "zoom_in", "box": [0, 0, 1, 1]}), ("turns.0.op", "unknown_op")),
        (demonstration({"op": "move", "direction": "north"}), ("turns.0.arguments", "bad_arguments")),
        (right.model_copy(update={"environment": "maze"}), ("environment", "unknown_environment")),
        (right.model_copy(update={"environment": None}), ("turns.0.op", "unknown_op")),
    ):
        bad = check_demonstration(row, "rows", zoom, environments)
        assert (bad.column, bad.code) == problem


def test_the_corpus_of_the_search_recipe_answers_its_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (environment,) = select_environments(config.load("docs/examples/search_corpus.yaml").toolbox).values()
    rows = (ROOT / "docs/examples/search_corpus.jsonl").read_text(encoding="utf-8").splitlines()
    queries = (
        "service samples request memory searches",
        "export merge adapter model",
        "job stop three seconds Ray",
    )
    queries += (
        "verdict task confidence evolution.gate reason",
        "shard SQLite record",
        "synthesize makes demonstrations from packaged pictures and clips, stages follow",
    )
    for query, question in zip(queries, map(Question.model_validate_json, rows), strict=True):
        episode = environment()
        assert "passages" in episode.reset(question, {}, 0).text
        result = episode.execute(Action(op="search", arguments={"query": query}))
        assert any(answer in result.text for answer in question.answers or []), question.question
    with pytest.raises(OperationError, match="try others"):
        episode.execute(Action(op="search", arguments={"query": "xylophone"}))

"""The table of presets: each by hand on several trajectories, and how a preset meets the keys around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from test_rewards import A, T

from pixelis import config
from pixelis.config import RewardsConfig
from pixelis.config.presets.rewards import REWARD_PRESETS
from pixelis.errors import BadConfig
from pixelis.policy.advantages import batch_advantages
from pixelis.records import (
    Action,
    Annotations,
    Group,
    ImageView,
    Media,
    Observation,
    Question,
    Region,
    StopReason,
    Trajectory,
    Turn,
)
from pixelis.rewards.grader import Grader
from pixelis.rewards.terms import score_group

CALL = '<tool_call>{"name":"zoom_in","arguments":{}}</tool_call>'


def said(answer: str | None, *calls: str, last: str | None = None, tokens: int = 0) -> Trajectory:
    """An episode with calls that are ``ok`` or ``error``, and an answer, each after a thought."""
    turns = [Turn(role="user", text="?")]
    for status in calls:
        turns.append(Turn(role="assistant", text=T + CALL, action=Action(op="zoom_in")))
        turns.append(Turn(role="tool", observation=Observation(status=status)))
    text = T + f"<answer>{answer}</answer>" if last is None else last
    turns.append(Turn(role="assistant", text=text, tokens=[1] * tokens))
    stop = StopReason.ANSWER if answer is not None else StopReason.NO_ACTION
    return Trajectory(question_id="q", group_id="g", turns=turns, answer=answer, stop_reason=stop)


def rewards(preset: str | RewardsConfig, *trajectories: Trajectory, **question) -> list[float | None]:
    settings = preset if isinstance(preset, RewardsConfig) else RewardsConfig(preset=preset)
    row = Question(**{"id": "q", "question": "?", "answers": ["7"], **question})
    group = Group(id="g", question=row, trajectories=list(trajectories))
    return [t.reward for t in score_group(group, settings).trajectories]


RIGHT, WRONG = said("7"), said("1")
BARE = said("7", last=A)
VIDEO = {"media": [Media(id="vid0", uri="clip.mp4", kind="video")]}


def test_pr_paper():
    # acc + 0.5 * max(0.3 - RaPR, 0) * [call] + 0.05 * min(1 - n, 0), RaPR = 1/8 and n of executed calls
    seven = [RIGHT, *[WRONG] * 5, said("7", "error")]
    assert rewards("pr-paper", said("7", "ok"), *seven) == pytest.approx([1.0875, 1.0, *[0.0] * 5, 1.0])
    assert rewards("pr-paper", said("1", "ok", "ok", "ok", "error"), *seven)[0] == pytest.approx(0.0875 - 0.1)
    # RaPR = 3/8 is above 0.3: no bonus
    many = [said("7", "ok"), said("1", "ok", "ok"), said("7", "ok"), *seven[:5]]
    assert rewards("pr-paper", *many)[:3] == pytest.approx([1.0, -0.05, 1.0])


def test_pr_repo():
    # [n >= 1] * (max(0.3 - RaPR, 0) / k / RaPR * 0.25 - 0.05 * (n - 1)), n of requested calls; RaPR = 1/8
    def said_in_a_box(answer: str, *calls: str) -> Trajectory:
        return said(answer, *calls, last=T + rf"\boxed{{{answer}}}")

    seven = [said_in_a_box("7"), *[said_in_a_box("1")] * 6]
    bonus = (0.3 - 0.125) / 2 / 0.125 * 0.25
    assert bonus == pytest.approx(0.175)
    assert rewards("pr-repo", said_in_a_box("7", "ok"), *seven) == pytest.approx([1.175, 1.0, *[0.0] * 6])
    assert rewards("pr-repo", said_in_a_box("7", "ok"), *seven, **VIDEO)[0] == pytest.approx(1.0 + 0.7 / 3)
    # Right, but never repaired
    assert rewards("pr-repo", said_in_a_box("7", "error"), *seven)[0] == pytest.approx(0.175)
    assert rewards("pr-repo", said_in_a_box("7", "error", "ok"), *seven)[0] == pytest.approx(
        1.0 + 0.175 - 0.05
    )
    assert rewards("pr-repo", said_in_a_box("1", "ok", "error", "error"), *seven)[0] == pytest.approx(
        0.175 - 0.1
    )


@pytest.mark.parametrize("preset", ["rr-count", "rr-geo", "r1v"])
def test_accuracy_and_format(preset):
    assert rewards(preset, RIGHT, WRONG, BARE, said(None, last="words")) == [2.0, 1.0, 1.0, 0.0]


TRUTH = "change_size(1, small) change_color(2, red)"
HALF = "change_size(1, large) change_color(2, red)"
SEQUENCE = {"scorer": "func_seq", "answers": [TRUTH]}


def test_rr_trance():
    answers = [TRUTH, HALF, "change_size(1, small) change_size(1, small)", "none"]
    actual = rewards("rr-trance", *map(said, answers), **SEQUENCE)
    assert actual == pytest.approx([2.0, 1.75, 1.25, 1.0])


def test_rr_caption():
    full = f"<summary>s</summary><caption>c</caption>{T}<answer>{TRUTH}</answer>"
    # The sequence counts in full only: one wrong value is .5, not .75.
    episodes = [said(TRUTH, last=full), said(HALF, last=full), said(TRUTH)]
    assert rewards("rr-caption", *episodes, **SEQUENCE) == [2.0, 1.5, 1.0]


def test_rr_long():
    long = T.replace("so", "First, a. Next, b. Step 1: c." + "." * 50) + A
    episodes = [RIGHT, said("7", last=long)]
    assert rewards("rr-long", *episodes) == [2.0, 3.0]
    with_length = RewardsConfig(preset="rr-long", length_start=0)
    assert rewards(with_length, *episodes) == pytest.approx([2.0 + 0.05 * 0.5, 3.0 - 0.05 * 0.5])
    grader = Grader(RewardsConfig(preset="rr-long"))
    group = Group(id="g", question=Question(id="q", question="?", answers=["7"]), trajectories=episodes)
    late = [[t.reward for t in grader.score(group, step=step).trajectories] for step in (799, 800)]
    assert late == [[2.0, 3.0], pytest.approx([2.025, 2.975])]


def test_mini_o3():
    episodes = [RIGHT, said("7", "ok"), said("1", "ok"), said(None, "ok", last=T + CALL)]
    assert rewards("mini-o3", *episodes) == [1.0, 1.0, 0.0, 0.0]
    # (1 - 0.1 * [call]) * acc + format
    assert rewards("mini-o3-default", *episodes, BARE) == pytest.approx([2.0, 1.9, 1.0, 0.0, 1.0])


def test_mini_o3_leaves_out_episodes_over_a_limit():
    over = said(None, "ok", last=T + CALL).model_copy(update={"stop_reason": StopReason.OVER_TURN})
    settings = config.load(None, ["rewards.preset=mini-o3", "rft.algorithm=mini_o3"])
    assert "over_turn" in settings.rft.advantage.exclude
    included = [t for t in (RIGHT, WRONG, over) if t.stop_reason.value not in settings.rft.advantage.exclude]
    assert batch_advantages([rewards("mini-o3", *included)], settings.rft.advantage)[0] == pytest.approx(
        [0.7071, -0.7071], abs=1e-4
    )


def test_deepeyes_paper():
    # acc + format (0 or -1) + [acc > 0] * tool
    broken = said("7", last="<think>" + T + A)
    episodes = [RIGHT, said("7", "ok"), said("1", "ok"), said("7", "error"), broken]
    assert rewards("deepeyes-paper", *episodes) == [1, 2, 0, 1, 0]


def test_deepeyes_repo():
    broken = [said("7", last="<think>" + T + A), said("1", last="<think>")]
    episodes = [RIGHT, said("7", "ok"), said("1", "ok"), *broken]
    assert rewards("deepeyes-repo", *episodes) == pytest.approx([0.8, 2.0, 0.0, 0.6, -0.2])
    # math: 1.2 * acc + 0.4 * format, one box after the thought, nothing else is an answer, no tool bonus
    boxed = said("7", "ok", last=T + r"\boxed{7}")
    assert rewards("deepeyes-repo", boxed, RIGHT, WRONG, task="math") == pytest.approx([1.2, -0.4, -0.4])
    # answers of 1000 characters are wrong and badly formed
    assert rewards("deepeyes-repo", said("7" * 1000, "ok"), answers=["7" * 1000]) == pytest.approx([-0.2])


def test_chain_of_focus_repo():
    zoomed, lost, bad = said("7", "ok"), said("1", "ok"), said("1", last=f"so {A}")
    # Right without a call 1.0, with one 0.8 where another is right without; their code pays 0.5 for a wrong one with a call
    episodes = [RIGHT, zoomed, said("7", "error"), lost, WRONG, bad]
    assert rewards("chain-of-focus", *episodes) == pytest.approx([1.0, 0.8, 0.8, 0.0, 0.0, 0.0])
    assert rewards("chain-of-focus", zoomed, lost, WRONG) == pytest.approx([1.0, 0.0, 0.0])


def test_pyvision_rl():
    # acc + 0.1 * calls with a right answer; a call that fails is none
    episodes = [RIGHT, said("7", "ok"), said("7", "ok", "ok", "error", "ok"), said("1", "ok", "ok"), WRONG]
    assert rewards("pyvision-rl", *episodes) == pytest.approx([1.0, 1.1, 1.3, 0.0, 0.0])
    assert rewards("pyvision-rl", said("7" * 1000, "ok"), answers=["7" * 1000]) == [0.0]


def test_pyvision_rl_counts_episodes_without_room_and_does_not_learn_them():
    settings = config.load(None, ["rewards.preset=pyvision-rl", "rft.algorithm=pyvision_rl"]).rft
    assert settings.advantage.count_excluded
    stops = {stop.value for stop in StopReason} - set(settings.advantage.exclude)
    assert stops == {"answer", "no_action", "call", "done", "length", "over_turn", "deadline", "error"}
    assert batch_advantages([[1.3, 1.0, 0.0, 0.0]], settings.advantage)[0] == pytest.approx(
        [0.725, 0.425, -0.575, -0.575]
    )


def looked(answer: str, *views: ImageView) -> Trajectory:
    """An episode whose calls showed these views."""
    episode = said(answer, *["ok"] * len(views))
    for turn, view in zip(episode.turns[2::2], views, strict=True):
        turn.observation = Observation(status="ok", images=[view])
    return episode.model_copy(update={"images": [ImageView(id="img0"), *views]})


def test_treevgr():
    # acc + format + half of recall and precision of the views in IoU, the latter for right answers alone
    left, right = ((0.0, 0.0, 0.5, 0.5), (0.5, 0.5, 1.0, 1.0))
    cup, pen = (ImageView(id=f"obs{i}", parent="img0", box=box) for i, box in enumerate((left, right)))
    whole = ImageView(id="obs1", parent="img0", box=(0.0, 0.0, 1.0, 1.0))
    half = ImageView(id="obs1", parent="obs0", box=(0.0, 0.0, 1.0, 0.5))
    made = ImageView(id="obs1", parent="made", box=left)
    episodes = [
        looked("7", cup, pen),
        looked("7", cup),
        looked("7", cup, whole),  # the whole picture has an IoU of 0.25 with either
        looked("7", cup, half),  # of the crop: an IoU of 0.5 with the cup
        looked("7", cup, made),
        looked("7"),
        looked("1", cup, pen),
    ]
    regions = [Region(id="a", label="cup", box=left), Region(id="b", label="pen", box=right)]
    expected = [3.0, 2.75, 2.625, 2.625, 2.75, 2.0, 1.0]
    assert rewards("treevgr", *episodes, annotations=Annotations(regions=regions)) == pytest.approx(expected)
    elsewhere = [region.model_copy(update={"media": "img1"}) for region in regions]
    assert rewards("treevgr", episodes[0], annotations=Annotations(regions=elsewhere)) == [2.0]
    assert rewards("treevgr", *episodes) == [None] * 7  # no regions


def test_easyr1():
    episodes = [said("7", last=T + r"so \boxed{7}"), RIGHT, said("1", last=T + r"\boxed{1}")]
    assert rewards("easyr1-math", *episodes) == pytest.approx([1.0, 0.9, 0.1])
    assert rewards("easyr1-r1v", RIGHT, WRONG, BARE) == pytest.approx([1.0, 0.5, 0.5])


def test_easyr1_dapo():
    # +1 or -1, and 0 up to 16384 tokens, then down to -1 at 20480
    lengths = [100, 16384, 18432, 20480, 30000]
    assert rewards("easyr1-dapo", *[said("7", tokens=n) for n in lengths]) == pytest.approx([1, 1, 0.5, 0, 0])
    assert rewards("easyr1-dapo", WRONG, said("1", tokens=18432)) == pytest.approx([-1.0, -1.5])


def test_pixelis_arms_add_penalties_to_raw_terms_until_statistics_are_known():
    turns = said("7", "ok").turns
    read = [Turn(role="assistant", text=CALL, action=Action(op="read_text")), turns[2]]
    sensible = said("7").model_copy(update={"turns": [*turns[:3], *read, *turns[3:]]})
    # zoom -> read is a good pair, and so is a thought after reading: mean of 0.2 and 0.2
    episodes = [sensible, WRONG, said("7", "ok", "ok"), said(None)]
    # zoom -> zoom repeated: mean of -0.5 and -0.3; no answer costs 0.1
    for preset, coherence in (("pixelis-base", 0.0), ("pixelis-coherence", 0.1)):
        expected = [1 + coherence * 0.2, 0.0, 1 - coherence * 0.4, -0.1]
        assert rewards(preset, *episodes) == pytest.approx(expected)
    for preset in ("pixelis-curiosity", "pixelis-full"):
        assert rewards(preset, *episodes) == [None] * 4  # no embedder provides states


# -- how a preset is resolved


@pytest.mark.parametrize("name", sorted(REWARD_PRESETS))
def test_every_preset_resolves_and_comes_back_equal(name):
    resolved = config.load(None, [f"rewards.preset={name}"])
    for part, value in REWARD_PRESETS[name].items():
        shown = resolved.rewards.model_dump(mode="json")[part]
        for key, expected in value.items() if isinstance(value, dict) and part != "tasks" else ():
            assert shown[key] == expected
    assert config.parse(yaml.safe_load(resolved.to_yaml())) == resolved


def test_explicit_keys_win_over_the_preset_in_any_order():
    keys = ["rewards.preset=pr-paper", "rewards.curiosity.alpha=2", "rewards.weights.format=0.25"]
    for overrides in (keys, keys[::-1]):
        resolved = config.load(None, overrides).rewards
        assert (resolved.curiosity.alpha, resolved.curiosity.beta) == (2.0, 0.05)
        weights = resolved.weights
        assert (weights.format, weights.curiosity_bonus, weights.curiosity) == (0.25, 1.0, 0.0)


def test_a_preset_replaces_the_weights_of_the_files_below_it(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("rewards: {weights: {curiosity: 1}, cpus: 0.5, own: [a.b:c]}\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\nrewards: {preset: r1v, weights: {format: 0.5}}\n")
    top = config.load(tmp_path / "top.yaml")
    for resolved in (top, config.load(tmp_path / "base.yaml", ["rewards.preset=r1v"])):
        assert resolved.rewards.weights.curiosity == 0.0
        assert (resolved.rewards.cpus, resolved.rewards.own) == (0.5, {})
    assert top.rewards.weights.format == 0.5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rewards.preset=pr-papr"], "did you mean `pr-paper`"),
        (["rewards.preset=zzz"], "one of pr-paper"),
        (["rewards.own=[sin]"], "package.module:function"),
        (["rewards.normalise.terms=[accurcy]"], "did you mean `accuracy`"),
        (["rewards.normalise.terms=[tool_misuse]"], "must not be normalised"),
        (["rewards.overlong.buffer=99999"], "above max_tokens"),
        (["rewards.preset=pixelis", "rewards.workers=2"], "workers=1"),  # running state lives in one scorer
    ],
)
def test_mistakes_are_named(overrides, message):
    with pytest.raises(BadConfig) as caught:
        config.load(None, overrides)
    assert message in str(caught.value)

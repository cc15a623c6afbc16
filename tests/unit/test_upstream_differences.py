r"""Where scores differ from those measured with the systems' code; equal ones were defects of ours."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image
from scored_episodes import episode, group
from votes import NOW, QUESTION, samples, voting

from pixelis.config import RewardsConfig
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.dialects import DIALECTS
from pixelis.evolution.updates import agreeing, make_task
from pixelis.jobs import ttrl
from pixelis.operations.scale import Scale
from pixelis.records import Question, StopReason, Turn
from pixelis.rewards.equality import Equality, classes
from pixelis.rewards.scorers import SCORERS, Case
from pixelis.rewards.services import Services
from pixelis.rewards.terms import score_group
from pixelis.rewards.vote import vote

CAT = ("dog", "cat", "cow")


@pytest.fixture(scope="module")
def services():
    services = Services(RewardsConfig(timeout_s=20.0))
    yield services
    services.close()


buffer = io.BytesIO()
Image.new("RGB", (2, 2)).save(buffer, "PNG")
PIXEL = buffer.getvalue()

# fmt: off
ANSWERS = [
    # scorer           answer                   truth              upstream  ours  reason
    ("math",           "7",                     r"\$7",                   1,    1, "currency in truths is read"),
    ("math",           r"\$36",                 "$36",                    1,    1, "an escaped currency sign"),
    ("math",           "36",                    r"\$36.00",               1,    1, "a missing unit fits any"),
    ("math",           "5",                     "5 cm",                   1,    1, "units in truths are read"),
    ("math",           r"5\text{ cm}",          "5 centimeters",          1,    1, "names of the same unit"),
    ("math",           "5 m",                   "5 cm",                   1,    0, "another unit is wrong"),
    ("math",           r"5\text{ cm}^2",        "5 cm",                   1,    0, "another power of a unit is wrong"),
    ("math",           "not A",                 "A",                      0,    0, "a denied letter"),
    ("math",           r"\text{A}",             "A",                      1,    1, "LaTeX text is text"),
    ("math",           "1e3",                   "1000",                   1,    1, "scientific notation"),
    ("math",           "1 1/2",                 "1.5",                    1,    1, "a mixed number"),
    ("math",           "3 : 4",                 "3:4",                    1,    1, "a ratio with blanks"),
    ("math",           "3/4",                   "3:4",                    1,    1, "a ratio is a fraction"),
    ("math",           "1, 2",                  "1,2",                    1,    1, "a list with blanks"),
    ("math",           "12",                    "1,2",                    0,    0, "a list is no number"),
    ("math",           "50%",                   r"50\%",                  1,    1, "an escaped percent sign"),
    ("math",           "50",                    "50%",                    1,    1, "percent without its sign"),
    ("math",           "0.5",                   "50%",                    1,    1, "percent as a fraction"),
    ("math",           r"\frac{1}{0}",          "7",                      0,    0, "an answer without a value is wrong"),
    ("math",           "７",                     "7",                      0,    1, "full-width digits are digits"),
    ("math",           "9" * 5000,              "7",                      0,    0, "a number beyond the parser is wrong"),
    ("math",           "The answer is 7.",      "7",                      1,    1, "a number in prose"),
    ("exact",          "7 apples",              "7",                      0,    0, "counts are exact inside the tags"),
    ("exact",          "7.0",                   "7",                      0,    0, "counts are exact inside the tags"),
    ("exact",          "Yes.",                  "Yes",                    1,    1, "a full stop after a word"),
    ("mc_letter",      r"\text{A}",             "A",                      1,    1, "a letter in LaTeX"),
    ("mc_letter",      r"\boxed{\text{A}}",     "A",                      1,    1, "a letter in a box"),
    ("mc_letter",      "$A$",                   "A",                      1,    1, "a letter in LaTeX"),
    ("mc_letter",      "[A]",                   "A",                      1,    1, "a letter in brackets"),
    ("mc_letter",      "not A",                 "A",                      0,    0, "a denied letter"),
    ("mc_letter",      "B. cat",                "B",                      0,    1, "kept: a letter with its text"),
    ("mc_letter",      "(B)",                   "B",                      0,    1, "kept: a letter in parentheses"),
    ("mc_letter",      "cat",                   "B",                      0,    1, "kept: the text of the option"),
    ("numeric_band",   "5 m",                   "5 cm",                   1,    0, "another unit is wrong"),
    ("numeric_band",   r"\$102",                "100",                    1,    1, "currency is read"),
    ("pixel_reasoner", "7",                     "7",                      1,    1, "a plain number"),
    ("pixel_reasoner", "blue and red",          "red, blue",              1,    1, "every piece of a truth occurs"),
    ("pixel_reasoner", "red",                   "red, blue",              0,    0, "a piece is missing"),
    ("pixel_reasoner", "12, 21",                "1, 2",                   1,    0, "pieces are whole words"),
    ("pixel_reasoner", "45",                    "45%",                    1,    1, "percent without its sign"),
    ("pixel_reasoner", r"\dfrac{3}{4}",         "3:4",                    1,    1, "a ratio"),
    ("pixel_reasoner", "5 minutes",             "5",                      1,    1, "a unit beside a bare truth"),
    ("judge",          r"\text{red}",           "Red",                    1,    1, "no judge is needed for LaTeX text"),
]
# fmt: on


@pytest.mark.parametrize(("scorer", "answer", "truth", "upstream", "ours", "reason"), ANSWERS)
def test_answers(services, scorer, answer, truth, upstream, ours, reason):
    options = CAT if scorer == "mc_letter" else ()
    assert SCORERS[scorer](Case(answer, (truth,), "?", options), services) == ours, reason


BAD_ANSWERS = [r"\frac{1}{0}", r"x+\frac{1}{", "9" * 5000]


def test_an_answer_that_cannot_be_parsed_is_wrong_and_counted_and_a_broken_truth_unscored(services):
    before = services.counts.total()
    answered = group(*[episode(a) for a in BAD_ANSWERS], answers=["x+1"], scorer="math")
    scored = score_group(answered, RewardsConfig(), services=services)
    assert [(t.reward, t.unscored) for t in scored.trajectories] == [(0.0, None)] * len(BAD_ANSWERS)
    assert services.counts.total() - before == len(BAD_ANSWERS)
    broken = group(episode("x+1"), answers=[r"x+\frac{1}{"], scorer="math")
    scored = score_group(broken, RewardsConfig(), services=services)
    assert [(t.reward, t.unscored) for t in scored.trajectories] == [(None, "truth_unparsable")]


BOXED = [
    # answer of the row          truth                 answer    upstream  ours (117 of 216 rows were 0)
    ([r"\boxed{7}"],             ["7"],                "7",            1, 1),
    (r"\boxed{\frac{1}{2}}",     [r"\frac{1}{2}"],     "0.5",          1, 1),
    (r"$\boxed{3:4}$",           ["3:4"],              "3 : 4",        1, 1),
    ([r"\boxed{A}"],             ["A"],                r"\text{A}",    1, 1),
    ([r"\boxed{red}", "blue"],   ["red", "blue"],      "Blue",         1, 1),
    (r"\boxed{25\%}",            [r"25\%"],            "25",           1, 1),
    (r"\boxed{1} or \boxed{2}",  [r"\boxed{1} or \boxed{2}"], "3",     0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("written", "truths", "answer", "upstream", "ours"), BOXED)
@pytest.mark.parametrize("virl39k", [False, True])
def test_boxed_truths_of_pixel_reasoner_and_virl39k(
    services, tmp_path, virl39k, written, truths, answer, upstream, ours
):
    row = {"qid": "vstar-1", "question": "What?", "answer": written}
    of_virl39k = {"source": "x", "category": "y", "PassRate_7BBase": 0.5}
    row |= of_virl39k if virl39k else {"image": ["a.png"], "is_video": False}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "a.png").write_bytes(PIXEL)
    (question,) = read_questions(str(tmp_path / "rows.jsonl"), epochs=1)
    assert question.answers == truths
    answered = group(episode(answer)).model_copy(update={"question": question})
    (scored,) = score_group(answered, RewardsConfig(), services=services).trajectories
    assert scored.reward == ours


VOTES = [
    # scorer      answers                                        upstream's classes  ours  (by text before)
    ("math",      ["1/2", r"\frac{1}{2}", r"\frac12", "3", "3"],   [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]),
    ("math",      ["7", "7.0", "7.00", "8", "8"],                  [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]),
    ("math",      ["$7$", "7", "5"],                               [0, 0, 1],       [0, 0, 1]),
    ("math",      ["5 cm", "5", "6"],                              [0, 0, 1],       [0, 0, 1]),
    ("math",      [r"50\%", "50%", "5"],                           [0, 0, 1],       [0, 0, 1]),
    ("math",      ["x=5", "5", "6"],                               [0, 0, 1],       [0, 0, 1]),
    ("math",      ["(1, 2)", "(1,2)", "(2,1)"],                    [0, 0, 1],       [0, 0, 1]),
    ("math",      [r"\text{A}", "A", "B"],                         [0, 0, 1],       [0, 0, 1]),
    ("math",      ["x+1", "1+x", "2x"],                            [0, 0, 1],       [0, 0, 1]),
    ("mc_letter", [r"\text{A}", "A", "dog", "(B)", "cat"],         [0, 0, 1, 2, 3], [0, 0, 0, 1, 1]),
    ("exact",     ["Cat", "cat.", "7", "7.0"],                     [0, 0, 1, 2],    [0, 0, 1, 2]),
    ("judge",     [r"\text{red}", "Red", "7.0", "7", "crimson"],   None,            [0, 0, 1, 1, 2]),
    ("iou",       ["[0,0,1,1]", "[0, 0, 1, 1]", "here"],           None,            [0, 0, 1]),
]  # fmt: skip


def numbered(names: list[str | None]) -> list[int]:
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names]


@pytest.mark.long  # tests/unit/rewards/test_worker_pool.py: an endless formula costs its sample
@pytest.mark.slow
def test_an_answer_whose_comparison_never_ends_votes_alone() -> None:
    services = Services(RewardsConfig(timeout_s=2.0))
    try:
        check_votes(services, "math", ["7", "9^{9^{9^{9}}}", "7.0"], [0, 1, 0])
    finally:
        services.close()


@pytest.mark.parametrize(("scorer", "answers", "upstream", "ours"), VOTES)
def test_votes_are_grouped_by_the_rewards_equality_in_rewards_ttrl_and_evolution(
    services, scorer, answers, upstream, ours
):
    check_votes(services, scorer, answers, ours)


def check_votes(services, scorer, answers, ours):
    meta = {"options": list(CAT)} if scorer == "mc_letter" else {}
    question = QUESTION.model_copy(update={"scorer": scorer, "meta": meta, "answers": None})
    same = Equality(question, scorer, services)
    assert numbered(classes(answers, same)) == ours
    winners, rewards = ours.count(0), RewardsConfig(preset="ttrl")
    voted = group(*[episode(a) for a in answers], answers=None, scorer=scorer, meta=meta)
    scored = score_group(voted, rewards, services=services)
    if scorer != "iou":  # partial credit
        assert [t.reward for t in scored.trajectories] == [float(c == 0) for c in ours]
    assert ttrl.votes([scored], rewards)[0] == {"q": winners / len(ours)}
    verdict = vote(samples(*[(a, 0.9) for a in answers]), [], voting(), question, NOW, same)
    assert (verdict.answer, verdict.confidence) == (answers[0], winners / len(ours))
    assert [v.elected for v in verdict.votes] == [c == 0 for c in ours]


def test_an_update_task_learns_every_spelling_of_the_elected_answer(services):
    question = Question(id="q", question="?", scorer="math")
    served = group(*[episode(a) for a in ("1/2", r"\frac{1}{2}", "0.5", "3")])
    served.question = question
    verdict = vote(served.trajectories, [], voting(), question, NOW, Equality(question, "math", services))
    settings = voting().model_copy(update={"gate": 0.6})
    task = make_task(served, verdict, settings, RewardsConfig())
    assert [t.reward for t in task.trajectories] == [1.0, 1.0, 1.0, 0.0]
    assert agreeing(task.trajectories, task.pseudo_label) == task.trajectories[:3]


UNTAGGED = [
    # preset         text                                      truth  scorer            upstream  ours
    ("r1v",          "The answer is 7.",                       "7",   "math",           1, 1),
    ("rr-count",     "The answer is 7.",                       "7",   "math",           1, 1),
    ("rr-count",     "7",                                      "7",   "math",           1, 1),
    ("pr-repo",      "The answer is 7.",                       "7",   "pixel_reasoner", 1, 1),
    ("pr-paper",     r"so \boxed{7}",                          "7",   "pixel_reasoner", 1, 1),
    ("r1v",          "Answer: (B) cat",                        "B",   "mc_letter",      1, 1),
    ("r1v",          "It is 8.",                               "7",   "math",           0, 0),
    # Kept: nothing inside the thought
    ("r1v",          "<think>7 is the answer",                 "7",   "math",           1, 0),
    ("easyr1-r1v",   r"<think>so</think>\boxed{7}",            "7",   "math",           0, 0),
    ("easyr1-r1v",   "<think>so</think><answer>7</answer>",    "7",   "math",           1, 1),
    # Strict by default
    (None,           "The answer is 7.",                       "7",   "math",           None, 0),
    (None,           r"<think>so</think>\boxed{7}",            "7",   "math",           None, 1),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "text", "truth", "scorer", "upstream", "ours"), UNTAGGED)
def test_untagged_answers(services, preset, text, truth, scorer, upstream, ours):
    reply = DIALECTS["plain"].parse(text, {}, Scale("unit", {}))
    stop = StopReason.ANSWER if reply.answer is not None else StopReason.NO_ACTION
    said = episode(reply.answer, stop=stop)
    said.turns = [Turn(role="assistant", text=text)]
    settings = RewardsConfig(preset=preset) if preset else RewardsConfig()
    scored = score_group(group(said, answers=[truth], scorer=scorer), settings, services=services)
    assert scored.trajectories[0].rewards["accuracy"] == ours


def test_a_direct_answer_of_r1_v_earns_all_without_its_format(services):
    """R1-V's direct-answer runs: no thought is asked for, and the format has no weight."""
    said = episode(None, stop=StopReason.NO_ACTION, dialect="plain")
    said.turns = [Turn(role="assistant", text="7")]
    answered = group(said, answers=["7"], scorer="math")
    direct, thought = (
        score_group(answered, RewardsConfig(preset="r1v", **more), services=services).trajectories[0]
        for more in ({"weights": {"format": 0}}, {})
    )
    assert direct.reward == 1.0
    assert (thought.rewards["format"], thought.reward) == (0.0, 1.0)


PRESETS = [
    # preset        scorer of the row  answer      truth    upstream  ours
    ("rr-count",    "math",            "7.0",      "7",     0, 0.0),
    ("rr-count",    "math",            "7 apples", "7",     0, 0.0),
    ("rr-geo",      "math",            "104",      "100",   None, 1.0),  # the paper's band
    ("rr-repo", "math",            "104",      "100",   0, 0.0),
    ("rr-repo", "math",            "100",      "100",   1, 1.0),
    ("rr-geo",      "mc_letter",       "(A)",      "A",     0, 1.0),  # kept: letters in parentheses
]  # fmt: skip


@pytest.mark.parametrize(("preset", "scorer", "answer", "truth", "upstream", "ours"), PRESETS)
def test_scorers_of_the_presets_of_reason_rft(services, preset, scorer, answer, truth, upstream, ours):
    settings = RewardsConfig(preset=preset)
    scored = score_group(group(episode(answer), answers=[truth], scorer=scorer), settings, services=services)
    assert scored.trajectories[0].rewards["accuracy"] == ours


AS_THEIRS = [
    # preset         reply                                                truth            theirs
    ("r1v-repo",      "<think>5 red, 7 blue</think><answer>5</answer>",   "5",             1),
    ("r1v-repo",      r"<answer>$\frac{14}{2}$</answer>",                 "7",             1),
    ("r1v-repo",      "<answer>seven</answer>",                           "7",             0),
    ("r1v-repo",      "<answer>Main\nSt</answer>",                        "Main\nSt",      0),
    ("rr-repo", "<answer>7.0</answer>",                             "7",             0),
    ("rr-repo", "<answer>1</answer><answer>7</answer>",             "7",             0),
    ("rr-repo", "The answer is 7.",                                 "7",             1),
    ("rr-repo",   "<answer>104</answer>",                             "100",           0),
    ("pr-repo",       r"so \boxed{7}",                                    "7",             1),
    ("pr-repo",       "<answer>7</answer>",                               "7",             1),
    ("pr-repo",       "The answer is 7.",                                 "7",             1),
    ("pr-repo",       r"<think>\boxed{7}</think> It is 8.",               "7",             1),
    ("pr-repo",       r"\boxed{50%}",                                     "50%",           1),
    ("pr-repo",       r"\boxed{The siege of Krishnapur and Troubles}",    "troubles, the siege of krishnapur", 1),
    ("pr-repo",       r"\boxed{catalogue}",                               "cat, dog",      0),
    ("pr-repo",       "I do not know.",                                   "7",            -1),
    ("pr-repo",       "",                                                 "7",            -1),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "reply", "truth", "theirs"), AS_THEIRS)
def test_a_preset_named_repo_scores_as_the_code_of_its_system(services, preset, reply, truth, theirs):
    said = episode(None, stop=StopReason.NO_ACTION, dialect="plain")
    said.turns = [Turn(role="assistant", text=reply)]
    scored = score_group(
        group(said, answers=[truth], scorer="math"), RewardsConfig(preset=preset), services=services
    )
    assert scored.trajectories[0].rewards["accuracy"] == theirs


def test_a_tolerance_of_reason_rft_is_that_of_its_code(services):
    for answer, truth, theirs in (("104", "100", 1), ("110", "100", 0.75), ("121", "100", 0), ("0", "0", 0)):
        case = Case(f"<answer>{answer}</answer>", (truth,))
        assert SCORERS["reason_rft_band_repo"](case, services) == pytest.approx(theirs)


def test_a_task_has_a_scorer_of_its_own():
    settings = RewardsConfig(tasks={"chart": {"scorer": "exact"}}, scorers={"math": "numeric_band"})
    for task, reward in (("chart", 0.0), ("qa", 1.0)):
        answered = group(episode("104"), answers=["100"], scorer="math", task=task)
        assert score_group(answered, settings).trajectories[0].reward == reward

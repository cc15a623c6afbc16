"""Answers as people's models write them, scored as `pixelis evaluate evaluate.answers=FILE` does."""

from __future__ import annotations

import pytest

from pixelis.config import RewardsConfig
from pixelis.evaluation.foreign_answers import episodes
from pixelis.records import Question, StopReason, Trajectory, Turn
from pixelis.rewards.extraction import untagged
from pixelis.rewards.services import Services
from pixelis.rewards.terms import score_group

ANIMALS = "Which one?\nA. a cat\nB. a dog\nC. a cow\nD. a hen"
TEN = "Which one?\n" + "\n".join(f"{chr(65 + i)}. item {i}" for i in range(10))
BOLD = "Which one?\n**A.** a cat\n**B.** a dog\n**C.** a cow"
PLAIN = "Which one?"


@pytest.fixture(scope="module")
def services():
    services = Services(RewardsConfig(timeout_s=20.0))
    yield services
    services.close()


# fmt: off
ANSWERS = [
    # question, truth,      scorer,            text,                           score
    # parts of a whole
    (PLAIN,   "3:15",            "math",           "4:20",                           0),
    (PLAIN,   "10:10",           "math",           "10:10",                          1),
    (PLAIN,   "3:15 pm",         "math",           "15:15",                          1),
    (PLAIN,   "2:3",             "math",           "4:6",                            1),
    (PLAIN,   "1:2:3",           "math",           "1:4:9",                          0),
    (PLAIN,   "4",               "math",           r"4\sqrt(2)",                     0),
    (PLAIN,   "4",               "math",           "4sqrt(2)",                       0),
    (PLAIN,   r"4\sqrt{2}",      "math",           r"4\sqrt(2)",                     1),
    (PLAIN,   "1 + 1/e",         "math",           "1 - 1/e",                        0),
    (PLAIN,   r"3.2\times10^{-19}", "math",        r"1.6\times10^{-19}",             0),
    (PLAIN,   "$a +3z = 0$",     "math",           "$0$",                            0),
    (PLAIN,   "$7 = 11a+c$",     "math",           "$11a+c$",                        0),
    (PLAIN,   "$(3,1)$",         "math",           "${1,3}$",                        0),
    (PLAIN,   "1.22",            "math",           "1,22",                           1),
    # text is no algebra
    (PLAIN,   "BADC",            "math",           "ABCD",                           0),
    (PLAIN,   "BADC",            "math",           "B, A, D, C",                     1),
    (PLAIN,   "BADC",            "math",           "B → A → C → D",                  0),
    (PLAIN,   "eat",             "math",           "tea",                            0),
    (PLAIN,   "A3B",             "math",           "B3A",                            0),
    # cleaning
    (ANIMALS, "B",               "mc_letter",      "**B**",                          1),
    (ANIMALS, "B",               "mc_letter",      "**B. a dog**",                   1),
    (BOLD,    "B",               "mc_letter",      "a dog",                          1),
    (PLAIN,   "7",               "count",          "**7**",                          1),
    (PLAIN,   "Main St",         "anls",           "`Main St`",                      1),
    (PLAIN,   "5 cm",            "math",           "**5 cm**",                       1),
    (PLAIN,   "[0, 0, 1, 1]",    "iou",            "`[0, 0, 1, 1]`",                 1),
    (PLAIN,   "change_size(1, small)", "func_seq", "change_size（1，small）",        1),
    (PLAIN,   "49",              "math",           "7²",                             1),
    (PLAIN,   "7",               "math",           "7²",                             0),
    (PLAIN,   "12",              "count",          "１２",                           1),
    (ANIMALS, "B",               "mc_letter",      "（B）",                          1),
    (ANIMALS, "B",               "mc_letter",      "B。",                            1),
    (ANIMALS, "B",               "mc_letter",      "B、a dog",                       1),
    (ANIMALS, "B",               "mc_letter",      "Ｂ",                             1),
    # kinds of values
    (PLAIN,   "2½",              "math",           "2.5",                            1),
    (PLAIN,   "½",               "math",           "12",                             0),
    (PLAIN,   "2 1/3",           "math",           "7/3",                            1),
    (PLAIN,   "45%",             "math",           "45 percent",                     1),
    (PLAIN,   r"\dfrac{6}{8}",   "math",           "3/4",                            1),
    (PLAIN,   "3/4",             "math",           "4/3",                            0),
    (PLAIN,   "-1234",           "math",           "-1,234",                         1),
    (PLAIN,   "1234",            "math",           "-1234",                          0),
    (PLAIN,   "2^{10}",          "math",           "1024",                           1),
    (PLAIN,   "3x+4",            "math",           "4 + 3x",                         1),
    (PLAIN,   "x = 7",           "math",           "7",                              1),
    (PLAIN,   "x = 7",           "math",           "x > 7",                          0),
    (PLAIN,   r"\{1, 2\}",       "math",           r"\{2, 1\}",                      1),
    (PLAIN,   "5 cubes",         "math",           "6 cubes",                        0),
    # roots and their decimals
    (PLAIN,   r"\sqrt{17}",      "math",           "4.123106",                       1),
    (PLAIN,   r"\sqrt{17}",      "math",           "4.123",                          1),
    (PLAIN,   r"\sqrt{17}",      "math",           "4.12",                           0),
    (PLAIN,   r"36\pi",          "math",           "113.097336",                     1),
    # choices
    (TEN,     "J",               "mc_letter",      "J. item 9",                      1),
    (TEN,     "J",               "mc_letter",      "item 9",                         1),
    (TEN,     "J",               "mc_letter",      "The answer is J.",               1),
    (TEN,     "J",               "mc_letter",      "I. item 8",                      0),
    (ANIMALS, "D",               "mc_letter",      "A, B, C or D",                   0),
    (ANIMALS, "A",               "mc_letter",      "(A) or (B)",                     0),
    (ANIMALS, "B",               "mc_letter",      "A/B",                            0),
    (ANIMALS, "B",               "mc_letter",      "None of the above",              0),
    (ANIMALS, "B",               "mc_letter",      "A, B",                           0),
    (ANIMALS, "A, C",            "mc_letter",      "CA",                             1),
    (ANIMALS, "AC",              "mc_letter",      "(A) and (C)",                    1),
    (ANIMALS, "AC",              "mc_letter",      "A, B, C",                        0),
    (ANIMALS, "AC",              "mc_letter",      "A",                              0),
    (ANIMALS, "B",               "mc_letter",      "B. a cow",                       0),
    (ANIMALS, "B",               "mc_letter",      "Option B",                       1),
    (PLAIN,   "CA",              "math",           "AC",                             0),
]
# fmt: on


@pytest.mark.parametrize(("question", "truth", "scorer", "text", "score"), ANSWERS)
def test_answers(services, question, truth, scorer, text, score):
    asked = Question(id="q", question=question, answers=[truth], scorer=scorer)
    (group,) = episodes([{"id": "q", "pred": f"<think>x</think><answer>{text}</answer>"}], [asked])
    scored = score_group(group, RewardsConfig(extractor="whole"), services=services)
    assert scored.trajectories[0].rewards["accuracy"] == score


UNTAGGED = [
    (r"So it is \boxed{7}.", "7"),
    (r"so \boxed{\frac{1}{2}", r"\frac{1}{2}"),
    ("First I look.\nThe answer is 7.", "7"),
    ("Answer: a dog", "a dog"),
    ("I looked closely.\nso 7", "7"),
    ("seven", "seven"),
    ("There are 7 cats", "7"),
    ("3:15", "3:15"),
    ("So it is B", "B"),
    ("It is a dog.", "a dog"),
    ("I looked at the picture and I am not sure what it shows.", None),
    ("Let me zoom in on the upper part of the picture", None),
    ("There are 7 cats and 3 dogs", None),
    ("I can see that there are probably 7 of them here", None),
    ("a dog or a cat", None),
    ("7\nBut let me check the left side first.", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "answer"), UNTAGGED)
def test_prose_without_an_answer_is_none(text, answer):
    def episode(stop: StopReason) -> Trajectory:
        return Trajectory(question_id="q", turns=[Turn(role="assistant", text=text)], stop_reason=stop)

    assert untagged(episode(StopReason.NO_ACTION), ("a cat", "a dog", "a cow", "a hen")) == answer
    assert untagged(episode(StopReason.LENGTH), ("a cat", "a dog", "a cow", "a hen")) is None


def test_rollouts_that_never_answered_do_not_elect_the_label_of_ttrl(services):
    texts = ["I would look at the upper part.", "I would look at the upper part.", "The answer is 7."]
    asked = Question(id="q", question="How many?", scorer="math")
    rollouts = episodes([{"id": "q", "pred": text} for text in texts], [asked])
    (scored,) = [score_group(group, RewardsConfig(preset="ttrl"), services=services) for group in rollouts]
    assert [t.reward for t in scored.trajectories] == [0.0, 0.0, 1.0]

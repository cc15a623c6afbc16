"""Options of a source that change questions: shuffled ones keep their answer, typing errors spare what is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelis.datasets.formats import read_records
from pixelis.datasets.question_changes import misspell, shuffle_options
from pixelis.errors import BadInput
from pixelis.records import Demonstration, Question
from pixelis.rewards.scorers import letter

TEXTS = ["red", "vitamin A", "12 B", "none of these"]
QUESTION = "Which?\n" + "\n".join(f"{sign}. {text}" for sign, text in zip("ABCD", TEXTS, strict=True))
SPELLINGS = [
    "{}", " {} ", "({})", "{}.", "({}).", "[{}]", "{}: it is", "\\boxed{{{}}}", "It is ({})",
    "<answer>{}</answer>",
]  # fmt: skip


def texts(question: Question) -> list[str]:
    return [line.partition(". ")[2] for line in question.question.splitlines()[1:]]


@given(
    seed=st.integers(0, 1000),
    right=st.integers(0, 3),
    spelling=st.sampled_from([*SPELLINGS, "{}. text", "text", "lower"]),
)
def test_the_option_that_a_truth_names_stays_right(seed: int, right: int, spelling: str) -> None:
    sign = "ABCD"[right]
    forms = {"text": TEXTS[right], "{}. text": f"{sign}. {TEXTS[right]}", "lower": sign.lower()}
    truth = forms.get(spelling) or spelling.format(sign)
    question = Question(id="q", question=QUESTION, answers=[truth], scorer="mc_letter")
    assert letter(truth, TEXTS) == sign
    shuffled = shuffle_options(question, seed)
    (answer,) = shuffled.answers or []
    named = letter(answer, texts(shuffled))
    assert named is not None
    assert texts(shuffled)["ABCD".index(named)] == TEXTS[right]


@given(seed=st.integers(0, 1000), scorer=st.sampled_from(["math", "exact", "judge"]))
def test_other_scorers_keep_the_spelling_and_answers_that_name_no_letter(seed: int, scorer: str) -> None:
    answers = ["B. vitamin A", "(B)", "vitamin A", "12 B", "It is a dog", "E", "Bees"]
    shuffled = shuffle_options(Question(id="q", question=QUESTION, answers=answers, scorer=scorer), seed)
    new = "ABCD"[texts(shuffled).index("vitamin A")]
    assert shuffled.answers == [f"{new}. vitamin A", f"({new})", *answers[2:]]


def test_demonstrations_are_not_shuffled(tmp_path: Path) -> None:
    turns = [{"think": "It is red, so A.", "answer": "A"}]
    row = {"id": "d", "question": QUESTION, "answers": ["A"], "scorer": "mc_letter", "turns": turns}
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row), encoding="utf-8")
    (record,) = read_records(f"{source}?shuffle_options=5")
    assert isinstance(record, Demonstration)
    assert record.model_dump() == Demonstration.model_validate(row).model_dump()
    with pytest.raises(BadInput, match="shuffle_options"):
        list(read_records(f"{source}?shuffle_options=5", Demonstration))
    assert len(list(read_records(f"{source}?shuffle_options=", Demonstration))) == 1


ASKED = "Which colour has the object at [600, 860] of img0?"


@given(share=st.floats(0.01, 1))
def test_typing_errors_spare_numbers_short_words_and_options(share: float) -> None:
    question = Question(id="q", question=f"{ASKED}\n{QUESTION}", answers=["vitamin A"], scorer="mc_letter")
    first, again = (misspell(question, share).question for _ in range(2))
    assert first == again
    assert re.search(r".* has the .* at \[600, 860\] of img0\?", first)
    assert first.endswith(QUESTION.partition("?")[2])


def test_a_tenth_of_the_letters_is_mistyped(tmp_path: Path) -> None:
    rows = [{"id": str(n), "question": "words " * 200, "answers": ["1"]} for n in range(2)]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    texts = [r.question for r in read_records(f"{source}?typos=0.1") if isinstance(r, Question)]
    assert len(set(texts)) == 2
    for text in texts:  # of 200 words of five letters, 41 % have an error
        assert 0.3 < sum(word != "words" for word in text.split()) / 200 < 0.5
    with pytest.raises(BadInput, match="typos"):
        list(read_records(f"{source}?typos=2"))

"""Options of multiple-choice questions as lines ``A. text`` or ``(A) text``: found in the text, and shuffled by a seed.

DeepEyes asks V* with the right option first in every question; a policy that always answers A would be right.
"""

from __future__ import annotations

import hashlib
import re

import numpy as np

from pixelis.errors import BadInput
from pixelis.records import Demonstration, Question
from pixelis.rewards.scorers import letter, option_lines

_NAMED = re.compile(r"(\s*[(\[]?)([A-Za-z])(?=[)\]]|[.:](?:\s|$)|\s*$)")
"""An answer that begins with the letter of an option: ``A``, ``(A).``, ``A. text``."""


def shuffle_options(question: Question, seed: int) -> Question:
    """The question with its options in another order, and its answers by their new letters, spelt as before.

    The order depends on the seed and the question's id; ``meta.option_order`` holds the old position of each option, so that
    answers can be compared between orders. A question without lines of options stays as it is, and so does a demonstration,
    whose turns name the letters.
    """
    lines = option_lines(question.question)
    if not lines or isinstance(question, Demonstration):
        return question
    key = int.from_bytes(hashlib.sha256(f"{seed}:{question.id}".encode()).digest()[:8])
    order = np.random.default_rng(key).permutation(len(lines)).tolist()
    text, end = [], 0
    for line, old in zip(lines, order, strict=True):
        text += [question.question[end : line.start(4)], lines[old][4]]
        end = line.end(4)
    text.append(question.question[end:])
    letters = {chr(ord("A") + old): chr(ord("A") + new) for new, old in enumerate(order)}
    texts = [line[4] for line in lines]

    def moved(answer: str) -> str:
        signs = letter(answer, texts) if question.scorer == "mc_letter" else None
        if (named := _NAMED.match(answer)) and named[2].upper() in letters and len(signs or "A") == 1:
            return named[1] + letters[named[2].upper()] + answer[named.end() :]
        return "".join(sorted(letters[sign] for sign in signs)) if signs else answer

    answers = [moved(answer) for answer in question.answers or []]
    meta = {**question.meta, "option_order": order}
    if isinstance(options := meta.get("options"), list) and len(options) == len(order):
        meta["options"] = [options[old] for old in order]
    update = {"question": "".join(text), "answers": answers if question.answers is not None else None, "meta": meta}
    return question.model_copy(update=update)


def option_seed(text: str | None) -> int | None:
    """The seed of a source's ``shuffle_options``, None without; BadInput for anything but a whole number."""
    if text is None or text == "":
        return None
    if not text.isdecimal():
        raise BadInput(f"shuffle_options={text} is not a whole number of at least 0", fix="write a seed, e.g. shuffle_options=1")
    return int(text)

"""Options of every source that change its questions: another scorer, shuffled options, typing errors, a prompt
template, and the share of demonstrations that answer at once.

A template is Jinja, as EasyR1's `format_prompt`, sandboxed. It receives `content`, `task`, `id` and `kind`
(`choice` or `open`), never an answer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pixelis.datasets.source_options import share_option, whole_option
from pixelis.errors import BadInput, MissingFile
from pixelis.records import Demonstration, Question
from pixelis.rewards.scorers import find_scorer, letter, option_lines

OPTIONS = ("scorer", "prompt", "shuffle_options", "direct", "typos")
PROMPTS = {
    "reason_rft": "{{ content }}\n"
    "{% if kind == 'choice' %}Choose one of the options and answer with its letter alone."
    "{% elif 'trance' in task or 'trance' in id or 'transformation' in id %}Answer with the sequence of "
    "functions alone."
    "{% else %}Answer with a number alone.{% endif %}",
}
"""Templates that ship with Pixelis."""
_OPTION = re.compile(r"(?<![A-Za-z])\(?([AB])[.):]\s*\S")
_WORD = re.compile(r"[^\W\d_]{4,}")
_NAMED = re.compile(r"(\s*[(\[]?)([A-Za-z])(?=[)\]]|[.:](?:\s|$)|\s*$)")
"""An answer that begins with the letter of an option: ``A``, ``(A).``, ``A. text``."""


def question_changes(source: str, options: Mapping[str, str | None]) -> Callable[[Question], Question]:
    """The change that `OPTIONS` of a source make to each question. MissingFile, BadInput."""
    scorer, template, order, direct, typos = (options.get(name) for name in OPTIONS)
    seed = whole_option(source, {"shuffle_options": order}, "shuffle_options", 0) if order else None
    prompt = PromptTemplate(template) if template else None
    share = share_option(source, {"direct": direct}, "direct") if direct else 0.0
    errors = share_option(source, {"typos": typos}, "typos") if typos else 0.0
    if scorer:
        find_scorer(scorer)

    def change(question: Question) -> Question:
        if scorer:
            question = question.model_copy(update={"scorer": scorer})
        if seed is not None:
            question = shuffle_options(question, seed)
        if isinstance(question, Demonstration) and _draw("direct", question.id).random() < share:
            question = question.model_copy(update={"turns": question.turns[-1:]})
        if errors:
            question = misspell(question, errors)
        return question if prompt is None else prompt.apply(question)

    return change


class PromptTemplate:
    """A compiled template. MissingFile, BadInput."""

    def __init__(self, name: str):
        self.name, path = name, Path(name)
        if name not in PROMPTS and not path.is_file():
            fix = f"name a file, or one of {', '.join(PROMPTS)}"
            raise MissingFile(f"there is no prompt template {name}", fix=fix)
        text = PROMPTS.get(name) or path.read_text(encoding="utf-8")
        # The result is text for a model, not HTML: nothing is to be escaped.
        environment = ImmutableSandboxedEnvironment(autoescape=False, undefined=jinja2.StrictUndefined)
        try:
            self.template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise BadInput(f"{name}, line {error.lineno}: {error.message}", code="bad_template") from None

    def apply(self, question: Question) -> Question:
        kind = "choice" if {"A", "B"} <= set(_OPTION.findall(question.question)) else "open"
        known = {"content": question.question, "task": question.task, "id": question.id, "kind": kind}
        try:
            text = self.template.render(**known).strip()
        except jinja2.TemplateError as error:
            fix = f"a template may use {', '.join(known)}"
            raise BadInput(f"{self.name}: {error.message}", code="bad_template", fix=fix) from None
        if not text:
            raise BadInput(f"{self.name} renders no text for {question.id}", code="bad_template")
        return question.model_copy(update={"question": text})


def shuffle_options(question: Question, seed: int) -> Question:
    """The question with its option lines in another order, and answers by their new letters.

    The order depends on the seed and the id; ``meta.option_order`` holds the old position of each option.
    Demonstrations stay as they are, because their turns name the letters.
    """
    lines = option_lines(question.question)
    if not lines or isinstance(question, Demonstration):
        return question
    order = _draw(str(seed), question.id).permutation(len(lines)).tolist()
    text, end, texts = "", 0, [line[4] for line in lines]
    for line, old in zip(lines, order, strict=True):
        text += question.question[end : line.start(4)] + texts[old]
        end = line.end(4)
    text += question.question[end:]
    letters = {chr(ord("A") + old): chr(ord("A") + new) for new, old in enumerate(order)}

    def moved(answer: str) -> str:
        signs = letter(answer, texts) if question.scorer == "mc_letter" else None
        if (named := _NAMED.match(answer)) and named[2].upper() in letters and len(signs or "A") == 1:
            return named[1] + letters[named[2].upper()] + answer[named.end() :]
        return "".join(sorted(letters[sign] for sign in signs)) if signs else answer

    answers = None if question.answers is None else [moved(answer) for answer in question.answers]
    meta = {**question.meta, "option_order": order}
    if isinstance(options := meta.get("options"), list) and len(options) == len(order):
        meta["options"] = [options[old] for old in order]
    return question.model_copy(update={"question": text, "answers": answers, "meta": meta})


def misspell(question: Question, share: float) -> Question:
    """The question with this share of letters swapped with the one before, left out, added or replaced.

    Words of up to three letters, numbers, signs and options stay. Equal ids have equal errors. Source of the four
    kinds: the robustness tests of Pixelis.
    """
    rng, options = _draw("typos", question.id), option_lines(question.question)
    end = options[0].start() if options else len(question.question)

    def typed(word: re.Match[str]) -> str:
        text = ""
        for sign in word[0]:
            other = chr(ord("a") + rng.integers(26))
            variants = [text[:-1] + sign + text[-1:], text, text + sign + other, text + other]
            text = variants[rng.integers(4)] if rng.random() < share else text + sign
        return text

    text = _WORD.sub(typed, question.question[:end]) + question.question[end:]
    return question.model_copy(update={"question": text})


def _draw(purpose: str, id: str) -> np.random.Generator:
    """The random numbers of a question for one purpose."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(f"{purpose}:{id}".encode()).digest()[:8]))

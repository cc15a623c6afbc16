"""Options of a source that change its questions, and prompt templates: `rows.jsonl?prompt=math.jinja`, what is asked around the
text of each question.

A template is Jinja as EasyR1's `format_prompt`: it receives `content`, the question's text, and also `task` and `kind`, which is
`choice` for a question that lists options and else `open`. It runs in Jinja's sandbox. It never sees an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pixelis.datasets.choices import option_seed, shuffle_options
from pixelis.errors import BadInput, MissingFile
from pixelis.records import Question
from pixelis.rewards.scorers import find_scorer

OPTIONS = ("scorer", "prompt", "shuffle_options")
"""Options of every source of questions: the scorer of all, a template around each, the seed of the order of their options."""

PROMPTS = {
    "reason_rft": "{{ content }}\n"
    "{% if kind == 'choice' %}Choose one of the options and answer with its letter alone."
    "{% elif 'trance' in task or 'trance' in id or 'transformation' in id %}Answer with the sequence of functions alone."
    "{% else %}Answer with a number alone.{% endif %}",
}
"""Templates that ship with Pixelis, by name: `reason_rft` asks by the type of the question."""
_OPTION = re.compile(r"(?<![A-Za-z])\(?([AB])[.):]\s*\S")


class PromptTemplate:
    """A compiled template; MissingFile or BadInput for one that cannot be used."""

    def __init__(self, name: str):
        self.name, path = name, Path(name)
        if name not in PROMPTS and not path.is_file():
            raise MissingFile(f"there is no prompt template {name}", fix=f"name a file, or one of {', '.join(PROMPTS)}")
        text = PROMPTS.get(name) or path.read_text(encoding="utf-8")
        # The result is text for a model, not HTML: nothing is to be escaped.
        environment = ImmutableSandboxedEnvironment(autoescape=False, undefined=jinja2.StrictUndefined)
        try:
            self.template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise BadInput(f"{name}, line {error.lineno}: {error.message}", code="bad_template") from None

    def apply(self, question: Question) -> Question:
        """The question with the rendered text; BadInput for a template that fails or renders no text."""
        known = {"content": question.question, "task": question.task, "id": question.id, "kind": kind(question.question)}
        try:
            text = self.template.render(**known).strip()
        except jinja2.TemplateError as error:
            fix = f"a template may use {', '.join(known)}"
            raise BadInput(f"{self.name}: {error.message}", code="bad_template", fix=fix) from None
        if not text:
            raise BadInput(f"{self.name} renders no text for {question.id}", code="bad_template")
        return question.model_copy(update={"question": text})


def question_changes(options: Mapping[str, str]) -> Callable[[Question], Question]:
    """The change that `OPTIONS` of a source make to each question; MissingFile or BadInput for a value that cannot be used."""
    seed, name, scorer = option_seed(options.get("shuffle_options")), options.get("prompt"), options.get("scorer")
    prompt = PromptTemplate(name) if name else None
    if scorer:
        find_scorer(scorer)

    def change(question: Question) -> Question:
        if scorer:
            question = question.model_copy(update={"scorer": scorer})
        if seed is not None:
            question = shuffle_options(question, seed)
        return question if prompt is None else prompt.apply(question)

    return change


def kind(text: str) -> str:
    """`choice` for a text that lists the options A and B, else `open`."""
    return "choice" if {"A", "B"} <= set(_OPTION.findall(text)) else "open"

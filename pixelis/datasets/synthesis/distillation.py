"""Reasoning of another model as demonstrations: replies ``<think>..</think><answer>..</answer>``, kept when a rule says right.

Rows bring replies along, or the model is asked with what is annotated written out as text, as R1-V did with CLEVR scenes for
DeepSeek-R1 (https://github.com/Deep-Agent/R1-V).
"""

from __future__ import annotations

import re
from pathlib import Path

from pixelis.config import RewardsConfig
from pixelis.config.synthesis import DistillationConfig
from pixelis.datasets.synthesis.chat import ask, chat_client
from pixelis.datasets.synthesis.checking import is_right
from pixelis.errors import BadInput, DataFailure
from pixelis.records import Annotations, Demonstration, Provenance, Question, Step

FORM = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
SYSTEM = (
    "You cannot see the picture, but you get a list of what is in it, with places as left, top, right, bottom from 0 to 1000. "
    "Answer the question as if you saw the picture and never mention the list. Reply with your reasoning inside "
    "<think>...</think> and then the final answer, as short as possible, inside <answer>...</answer>."
)


class Distiller:
    """Turns replies into demonstrations without operations. A model is asked only for rows that bring none; BadConfig then."""

    def __init__(self, settings: DistillationConfig, rewards: RewardsConfig | None = None, cache: str | Path | None = None):
        self.settings, self.rewards = settings, rewards
        self.client = chat_client(settings, "synthesis.distillation", cache) if settings.url else None

    def distil(self, question: Question, draw: int = 0) -> Demonstration:
        """The demonstration in reply number ``draw`` of the question.

        DataFailure ``bad_format``, ``too_short``, ``too_long``, ``wrong_answer``, ``no_response`` (there are not so many),
        ``no_truth``, ``no_annotations``, or a ``chat_...`` code; BadInput when a row's replies are no text.
        """
        think, answer = read_reply(self._reply(question, draw), self.settings)
        if not is_right(question, answer, self.rewards):
            raise DataFailure(f"{question.id}: the answer {answer[:60]!r} is wrong", code="wrong_answer")
        asked = self.settings.responses not in question.meta
        source = Provenance(
            source="", original_id=question.id, method="distillation", writer=self.settings.model if asked else None
        )
        values = {name: getattr(question, name) for name in Question.model_fields}
        meta = {key: value for key, value in question.meta.items() if key != self.settings.responses}
        turns = [Step(think=think, answer=answer)]
        fields = {"id": f"{question.id}-distillation-{draw}", "meta": meta, "turns": turns, "provenance": source}
        return Demonstration(**{**values, **fields})

    def close(self) -> None:
        """Close the client."""
        if self.client is not None:
            self.client.close()

    def _reply(self, question: Question, draw: int) -> str:
        name = self.settings.responses
        if name in question.meta:
            given = question.meta[name]
            replies = [given] if isinstance(given, str) else given
            if not isinstance(replies, list) or not all(isinstance(reply, str) for reply in replies):
                raise BadInput(f"{question.id}: meta.{name} is no text and no list of texts")
            if draw >= len(replies):
                raise DataFailure(f"{question.id} has {len(replies)} replies", code="no_response")
            return replies[draw]
        if self.client is None:
            raise BadInput(
                f"{question.id} has no meta.{name} and no model is configured",
                fix="set synthesis.distillation.url and .model, or name the column that holds replies",
            )
        if question.annotations is None:
            raise DataFailure(f"{question.id} has no annotations to write out", code="no_annotations")
        asked = f"{described(question.annotations)}\n\nQuestion: {question.question}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
        return ask(self.client, self.settings, messages, _any, draw)


def _any(text: str) -> str:
    return text


def read_reply(text: str, settings: DistillationConfig) -> tuple[str, str]:
    """(thought, answer) of a well-formed reply whose thought has a fair length; DataFailure says what is wrong with it."""
    match = FORM.fullmatch(text)
    if match is None or any(tag in match[1] + match[2] for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        raise DataFailure("the reply is not <think>..</think><answer>..</answer>", code="bad_format")
    think, answer = match[1].strip(), match[2].strip()
    if not answer:
        raise DataFailure("the answer is empty", code="bad_format")
    if len(think) < settings.min_chars:
        raise DataFailure(f"a thought of {len(think)} characters", code="too_short")
    if len(think) > settings.max_chars:
        raise DataFailure(f"a thought of {len(think)} characters", code="too_long")
    return think, answer


def described(known: Annotations) -> str:
    """Annotations as lines of text, places 0..1000."""
    named = {region.id: region.label for region in known.regions}
    lines = []
    for region in known.regions:
        place = [round(1000 * v) for v in region.box]
        more = "".join(f", {key} {value}" for key, value in region.attributes.items())
        frame = "" if region.frame is None else f" in frame {region.frame}"
        lines.append(f"- {region.label} at {place}{frame}{more}")
    for line in known.lines:
        lines.append(f'- the text "{line.text}"' + (f" at {[round(1000 * v) for v in line.box]}" if line.box else ""))
    lines += [f"- from {event.start:g} s to {event.end:g} s: {event.text}" for event in known.events]
    lines += [f"- {named.get(r.subject, r.subject)} {r.predicate} {named.get(r.object, r.object)}" for r in known.relations]
    return "\n".join([*lines, *(f"- {caption}" for caption in known.captions)])

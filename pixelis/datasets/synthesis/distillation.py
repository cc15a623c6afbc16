"""Demonstrations from right replies ``<think>..</think><answer>..</answer>`` of another model.

The replies come with the rows, or from a model that reads the annotations, as in R1-V
(https://github.com/Deep-Agent/R1-V).
"""

from __future__ import annotations

import re
from pathlib import Path

from pixelis.config import RewardsConfig
from pixelis.config.synthesis import TeacherConfig
from pixelis.datasets.synthesis.checking import is_right
from pixelis.errors import BadInput, DataFailure
from pixelis.records import Annotations, Demonstration, Provenance, Question, Step
from pixelis.rewards.llm_client import LlmClient

MIN_CHARS, MAX_CHARS = 20, 4000
"""Length of a thought in characters."""
FORM = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
SYSTEM = """\
You cannot see the picture, but you get a list of what is in it, with places as left, top, right, bottom from 0 to 1000. \
Answer the question as if you saw the picture and never mention the list. Reply with your reasoning inside \
<think>...</think> and then the final answer, as short as possible, inside <answer>...</answer>."""


class Distiller:
    def __init__(
        self,
        settings: TeacherConfig,
        rewards: RewardsConfig | None = None,
        cache: str | Path | None = None,
    ):
        self.settings, self.rewards = settings, rewards
        self.client = None
        if settings.url:
            self.client = LlmClient(
                settings, "synthesis.teacher", cache, calls_per_minute=settings.calls_per_minute
            )

    def distil(self, question: Question, draw: int = 0) -> Demonstration:
        think, answer = read_reply(self._reply(question, draw))
        if not is_right(question, answer, self.rewards):
            raise DataFailure(f"{question.id}: the answer {answer[:60]!r} is wrong", code="wrong_answer")
        writer = self.settings.model if self.settings.responses not in question.meta else None
        provenance = Provenance(source="", original_id=question.id, method="distillation", writer=writer)
        meta = {key: value for key, value in question.meta.items() if key != self.settings.responses}
        turns, id = [Step(think=think, answer=answer)], f"{question.id}-distillation-{draw}"
        return Demonstration.of(question, turns=turns, id=id, meta=meta, provenance=provenance)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()

    def _reply(self, question: Question, draw: int) -> str:
        name = self.settings.responses
        if name in question.meta:
            replies = question.meta[name]
            replies = [replies] if isinstance(replies, str) else replies
            if not isinstance(replies, list) or not all(isinstance(reply, str) for reply in replies):
                raise BadInput(f"{question.id}: meta.{name} is neither text nor a list of texts")
            if draw >= len(replies):
                raise DataFailure(f"{question.id} has {len(replies)} replies", code="no_response")
            return replies[draw]
        if self.client is None:
            raise BadInput(
                f"{question.id} has no meta.{name} and no model is configured",
                fix="set synthesis.teacher.url and .model, or set responses to the column with replies",
            )
        if question.annotations is None:
            raise DataFailure(f"{question.id} has no annotations for the model", code="no_annotations")
        prompt = f"{describe_annotations(question.annotations)}\n\nQuestion: {question.question}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        s = self.settings
        return self.client.ask(messages, str, draw, temperature=s.temperature, max_tokens=s.max_tokens)


def read_reply(text: str) -> tuple[str, str]:
    match = FORM.fullmatch(text)
    if match is None or any(
        tag in match[1] + match[2] for tag in ("<think>", "</think>", "<answer>", "</answer>")
    ):
        raise DataFailure("the reply is not <think>..</think><answer>..</answer>", code="bad_format")
    think, answer = match[1].strip(), match[2].strip()
    if not answer:
        raise DataFailure("the answer is empty", code="bad_format")
    if not MIN_CHARS <= len(think) <= MAX_CHARS:
        code = "too_short" if len(think) < MIN_CHARS else "too_long"
        raise DataFailure(f"a thought of {len(think)} characters", code=code)
    return think, answer


def describe_annotations(annotations: Annotations) -> str:
    """Annotations as lines of text with coordinates 0..1000."""
    labels = {region.id: region.label for region in annotations.regions}
    lines = []
    for region in annotations.regions:
        box = [round(1000 * v) for v in region.box]
        attributes = "".join(f", {key} {value}" for key, value in region.attributes.items())
        frame = "" if region.frame is None else f" in frame {region.frame}"
        lines.append(f"- {region.label} at {box}{frame}{attributes}")
    for line in annotations.lines:
        place = f" at {[round(1000 * v) for v in line.box]}" if line.box else ""
        lines.append(f'- the text "{line.text}"{place}')
    lines += [f"- from {event.start:g} s to {event.end:g} s: {event.text}" for event in annotations.events]
    lines += [
        f"- {labels.get(r.subject, r.subject)} {r.predicate} {labels.get(r.object, r.object)}"
        for r in annotations.relations
    ]
    return "\n".join([*lines, *(f"- {caption}" for caption in annotations.captions)])

"""Builds one sample from a source's row, a task and a kind; the same inputs always give the same sample."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pixelis.config import DialogueConfig, RewardsConfig, ToolboxConfig
from pixelis.config.synthesis import SynthesisConfig
from pixelis.datasets.synthesis.checking import SAMPLE_WEIGHTS, is_right
from pixelis.datasets.synthesis.corrections import make_correction
from pixelis.datasets.synthesis.distillation import Distiller
from pixelis.datasets.synthesis.evidence import with_expected_calls
from pixelis.datasets.synthesis.executor import Executor, sample_id
from pixelis.datasets.synthesis.imitation import Imitator
from pixelis.datasets.synthesis.llm_rewriter import LlmRewriter
from pixelis.datasets.synthesis.negatives import make_negative
from pixelis.datasets.synthesis.tasks import TASKS, check_operations
from pixelis.errors import DataFailure, PixelisError
from pixelis.records import Demonstration, Question, SampleKind

log = logging.getLogger(__name__)

CACHED_GOLDEN = 16
"""Number of golden demonstrations that stay in memory: the mistakes of a row are made soon after it."""


@dataclass(frozen=True)
class Attempt:
    """One sample to build: ``row`` counts from 0, ``draw`` counts the earlier passes over the source."""

    task: str
    kind: SampleKind
    source: str
    row: int
    draw: int = 0

    @property
    def quota(self) -> str:
        return f"{self.task}/{self.kind}/{self.source}"


class SampleBuilder:
    """Builds samples by the configured method; ``folder`` caches the replies of models.

    BadConfig for unknown operations, and for a model without url, name or key.
    """

    def __init__(
        self,
        settings: SynthesisConfig,
        seed: int,
        toolbox: ToolboxConfig | None = None,
        dialogue: DialogueConfig | None = None,
        rewards: RewardsConfig | None = None,
        examples: Sequence[Demonstration] = (),
        folder: str | Path | None = None,
    ):
        self.settings, self.seed, self.rewards = settings, seed, rewards
        self.executor = Executor(toolbox, dialogue)
        if settings.method == "templates":
            check_operations(
                (name for name, task in settings.tasks.items() if task.enabled), self.executor.operations
            )
        self._golden: OrderedDict[tuple[str, str, int, int], Demonstration | PixelisError] = OrderedDict()
        cache = Path(folder) / "replies.sqlite" if folder is not None else None
        self.rewriter = LlmRewriter(settings.writer, cache) if settings.writer.url else None
        self.imitator = self.distiller = None
        if settings.method == "imitation":
            self.imitator = Imitator(settings.teacher, self.executor, examples, dialogue, rewards, cache)
        if settings.method == "distillation":
            self.distiller = Distiller(settings.teacher, rewards, cache)

    def build(self, attempt: Attempt, question: Question) -> Demonstration:
        """The sample of an attempt, which depends only on seed, source, row, task and kind.

        DataFailure or BadInput says why there is none.
        """
        try:
            sample = golden = self._cached_golden(attempt, question)
            if attempt.kind != "golden":
                rng, session = self._rng(attempt, golden, attempt.kind), self.executor.open(golden)
                if attempt.kind == "self_correction":
                    sample = make_correction(golden, session, rng, self.settings.corrections)
                else:
                    sample = make_negative(attempt.kind, golden, session, rng, self.rewards)
                sample = sample.model_copy(update={"id": sample_id(golden.id, attempt.kind)})
            if self.rewriter is not None:
                sample = self.rewriter.rewrite(sample)
        except PixelisError:
            raise
        except Exception as error:  # a broken row or task costs one sample, not the run
            log.exception("%s of %s row %d crashed", attempt.task, attempt.source, attempt.row)
            raise DataFailure(f"{question.id}: {type(error).__name__}: {error}", code="crashed") from error
        return sample.model_copy(update={"weight": SAMPLE_WEIGHTS.get(sample.kind, 1.0)})

    def close(self) -> None:
        for client in (self.rewriter, self.imitator, self.distiller):
            if client is not None:
                client.close()

    def _cached_golden(self, attempt: Attempt, question: Question) -> Demonstration:
        key = (attempt.task, attempt.source, attempt.row, attempt.draw)
        if key not in self._golden:
            try:
                self._golden[key] = self._build_golden(attempt, question)
            except PixelisError as error:
                self._golden[key] = error
            if len(self._golden) > CACHED_GOLDEN:
                self._golden.popitem(last=False)
        result = self._golden[key]
        if isinstance(result, PixelisError):
            raise result
        return result

    def _build_golden(self, attempt: Attempt, question: Question) -> Demonstration:
        if self.imitator is not None:
            golden = self.imitator.play(question, attempt.draw)
        elif self.distiller is not None:
            golden = self.distiller.distil(question, attempt.draw)
        else:
            rng = self._rng(attempt, question, "golden")
            golden = TASKS[attempt.task].make(question, rng, self.executor, self.settings.thoughts)
            golden = with_expected_calls(golden)
        if not is_right(golden, golden.final, self.rewards):
            raise DataFailure(f"{question.id}: the answer {golden.final!r} is not right", code="not_right")
        provenance = golden.provenance
        assert provenance is not None
        source = provenance.source or self.settings.datasources[attempt.source].path
        turns = [turn.model_dump_json() for turn in golden.turns]
        update = {
            "id": sample_id(attempt.task, attempt.source, question.id, golden.conversation, turns),
            "provenance": provenance.model_copy(update={"source": source}),
            "task": golden.task if self.settings.method == "templates" else attempt.task,
        }
        return golden.model_copy(update=update)

    def _rng(self, attempt: Attempt, question: Question, kind: str) -> np.random.Generator:
        parts = (self.seed, attempt.source, question.id, attempt.row, attempt.draw, attempt.task, kind)
        text = "\x1f".join(map(str, parts))
        return np.random.default_rng(list(hashlib.sha256(text.encode()).digest()))


def content_key(sample: Demonstration) -> str:
    """Equal for samples of equal content: kind, media, conversation, answer and calls."""
    calls = [(turn.op, turn.target, turn.arguments) for turn in sample.turns if turn.op is not None]
    media = [
        (item.uri or item.frames, item.spans) if item.spans else item.uri or item.frames
        for item in sample.media
    ]
    think = sample.turns[-1].think if not calls else ""
    return sample_id(sample.kind, media, sample.conversation, sample.final, calls, think)

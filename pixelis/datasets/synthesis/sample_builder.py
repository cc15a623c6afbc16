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
from pixelis.datasets.synthesis.checking import is_right
from pixelis.datasets.synthesis.corrections import WAYS, make_correction
from pixelis.datasets.synthesis.distillation import Distiller
from pixelis.datasets.synthesis.executor import Executor, sample_name
from pixelis.datasets.synthesis.imitation import Imitator
from pixelis.datasets.synthesis.llm_rewriter import ThoughtWriter
from pixelis.datasets.synthesis.negatives import make_mistake
from pixelis.datasets.synthesis.tasks import TASKS
from pixelis.errors import DataFailure, PixelisError
from pixelis.records import Demonstration, Provenance, Question, SampleKind

log = logging.getLogger(__name__)

REMEMBERED = 16
"""Golden demonstrations that stay in memory: the mistakes of a row are made soon after it."""


@dataclass(frozen=True)
class Attempt:
    """What to make: ``row`` counts from 0 in the source, ``draw`` how often the source has been gone through before."""

    task: str
    kind: SampleKind
    source: str
    row: int
    draw: int = 0

    @property
    def quota(self) -> str:
        """What a target is counted for."""
        return f"{self.task}/{self.kind}/{self.source}"


class Maker:
    """Makes samples by the configured method; holds the studio, what was made last, and clients of models.

    ``shown`` are the demonstrations that imitation shows. ``folder`` is where replies of models are kept. BadConfig for
    operations that do not exist, and for a model without url, name or key.
    """

    def __init__(
        self,
        settings: SynthesisConfig,
        seed: int,
        toolbox: ToolboxConfig | None = None,
        dialogue: DialogueConfig | None = None,
        rewards: RewardsConfig | None = None,
        shown: Sequence[Demonstration] = (),
        folder: str | Path | None = None,
    ):
        self.settings, self.seed, self.rewards = settings, seed, rewards
        self.executor = Executor(toolbox, dialogue)
        self.golden: OrderedDict[tuple[str, str, int, int], Demonstration | PixelisError] = OrderedDict()
        cache = Path(folder) / "replies.sqlite" if folder is not None else None
        self.writer = ThoughtWriter(settings.writer, cache) if settings.writer.url else None
        self.imitator = self.distiller = None
        if settings.method == "imitation":
            self.imitator = Imitator(settings.imitation, self.executor, shown, dialogue, rewards, cache)
        if settings.method == "distillation":
            self.distiller = Distiller(settings.distillation, rewards, cache)

    def make(self, attempt: Attempt, question: Question) -> Demonstration:
        """The sample of an attempt. DataFailure (or BadInput for media that cannot be read) names why there is none.

        Random choices depend on the seed, the source, the row's id, the task and the kind alone; ids too.
        """
        try:
            golden = self._golden(attempt, question)
            made = golden if attempt.kind == "golden" else self._changed(attempt, golden)
            if self.writer is not None:
                made = self.writer.write(made)
        except PixelisError:
            raise
        except Exception as error:  # a broken row or task must cost one sample, not those beside it
            log.exception("%s of %s row %d crashed", attempt.task, attempt.source, attempt.row)
            raise DataFailure(f"{question.id}: {type(error).__name__}: {error}", code="crashed") from error
        if made.kind in ("golden", "self_correction") and not is_right(made, made.final, self.rewards):
            raise DataFailure(f"{question.id}: the answer {made.final!r} is not right", code="not_right")
        weight = {"trap_perceptual": "trap", "trap_logical": "trap", "self_correction": "self_correction"}.get(made.kind)
        update: dict = {"weight": getattr(self.settings.weights, weight) if weight else 1.0}
        if not self.settings.keep_annotations:
            update["annotations"] = None
        return made.model_copy(update=update)

    def close(self) -> None:
        """Close the clients."""
        for client in (self.writer, self.imitator, self.distiller):
            if client is not None:
                client.close()

    def _golden(self, attempt: Attempt, question: Question) -> Demonstration:
        key = (attempt.task, attempt.source, attempt.row, attempt.draw)
        if key not in self.golden:
            try:
                self.golden[key] = self._made(attempt, question)
            except PixelisError as error:
                self.golden[key] = error
            if len(self.golden) > REMEMBERED:
                self.golden.popitem(last=False)
        result = self.golden[key]
        if isinstance(result, PixelisError):
            raise result
        return result

    def _made(self, attempt: Attempt, question: Question) -> Demonstration:
        if self.imitator is not None:
            made = self.imitator.play(question, attempt.draw)
        elif self.distiller is not None:
            made = self.distiller.distil(question, attempt.draw)
        else:
            rng = self._rng(attempt, question, "golden")
            made = TASKS[attempt.task].make(question, rng, self.executor, self.settings.thoughts)
        source = made.provenance or Provenance(source="", original_id=question.id, method=self.settings.method)
        named = self.settings.datasources[attempt.source].path
        provenance = source.model_copy(update={"source": source.source or named})
        sample_id = sample_name(
            attempt.task, attempt.source, question.id, made.question, [s.model_dump_json() for s in made.turns]
        )
        task = made.task if self.settings.method == "templates" else attempt.task
        return made.model_copy(update={"id": sample_id, "provenance": provenance, "task": task})

    def _changed(self, attempt: Attempt, golden: Demonstration) -> Demonstration:
        rng = self._rng(attempt, golden, attempt.kind)
        session = self.executor.open(golden)
        if attempt.kind == "self_correction":
            ways = self.settings.corrections or list(WAYS)
            made = make_correction(golden, session, rng, ways, self.rewards, self.settings.most_iou)
        else:
            made = make_mistake(attempt.kind, golden, session, rng, self.rewards)
        return made.model_copy(update={"id": sample_name(golden.id, attempt.kind)})

    def _rng(self, attempt: Attempt, question: Question, kind: str) -> np.random.Generator:
        parts = [str(part) for part in (self.seed, attempt.source, question.id, attempt.row, attempt.draw, attempt.task, kind)]
        return np.random.default_rng(list(hashlib.sha256("\x1f".join(parts).encode()).digest()))


def content_key(made: Demonstration) -> str:
    """The same for samples that say the same: kind, media, question, answer and calls."""
    calls = [(turn.op, turn.target, turn.arguments) for turn in made.turns if turn.op is not None]
    media = [item.uri or item.frames for item in made.media]
    think = made.turns[-1].think if not calls else ""
    return sample_name(made.kind, media, made.question, made.final, calls, think)

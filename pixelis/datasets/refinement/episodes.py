"""The policy's episodes on the remaining questions, stored so that they are played once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pixelis.config import Config
from pixelis.datasets.refinement import filters
from pixelis.datasets.refinement.sets import write_rows
from pixelis.files import write_json
from pixelis.records import Group, Question

RELEVANT_SECTIONS = {"policy", "dialogue", "toolbox", "engine", "evaluate", "rewards"}
"""Sections of the configuration that affect episodes: if one changes, the episodes are played again."""


class Episodes:
    """The questions to play, in ``source``, and the stored scores by arm, with operations or without."""

    def __init__(self, config: Config, folder: Path, questions: Sequence[Question]):
        s, self.folder, self.count = config.refinement.pass_rate, folder, len(questions)
        self.arms = {"looking": True, **({"glance": False} if s.utility else {})}
        self.source = folder / "questions.jsonl"
        write_rows(self.source, questions)
        settings = [config.model_dump(mode="json", include=RELEVANT_SECTIONS), config.run.seed, s.episodes]
        self.identity = hashlib.sha256(
            self.source.read_bytes() + json.dumps(settings, sort_keys=True).encode()
        ).hexdigest()
        sampling = config.evaluate.sampling.model_copy(update={"temperature": 1.0})
        self.config = config.model_copy(
            update={"evaluate": config.evaluate.model_copy(update={"sampling": sampling})}
        )

    def missing(self) -> list[str]:
        return [arm for arm in self.arms if self._stored(arm).get("identity") != self.identity]

    def store(self, arm: str, groups: Iterable[Group]) -> None:
        rows = [
            [g.question.id, self.arms[arm], t.rewards.get("accuracy")] for g in groups for t in g.trajectories
        ]
        write_json(self._file(arm), {"identity": self.identity, "rows": rows})

    def outcomes(self) -> dict[str, filters.Outcomes]:
        return filters.group_outcomes(tuple(row) for arm in self.arms for row in self._stored(arm)["rows"])

    def _file(self, arm: str) -> Path:
        return self.folder / f"episodes-{arm}.json"

    def _stored(self, arm: str) -> dict[str, Any]:
        try:
            return json.loads(self._file(arm).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

"""The policy's episodes on the remaining questions, stored so that they are played once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
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
    """The questions to play, in ``sources``, and the stored scores by arm, with operations or without.

    ``samples`` of each question and arm. ``glance``: also without operations, after the question with its ``hint``.
    ``whole``: the episodes are stored too.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        questions: Sequence[Question],
        samples: int,
        glance: bool,
        hint: str = "",
        whole: bool = False,
    ):
        self.folder, self.count, self.samples, self.whole = folder, len(questions), samples, whole
        self.arms = {"looking": True, **({"glance": False} if glance else {})}
        source = folder / "questions.jsonl"
        write_rows(source, questions)
        self.sources = dict.fromkeys(self.arms, source)
        settings = [config.model_dump(mode="json", include=RELEVANT_SECTIONS), config.run.seed, samples]
        if hint:
            self.sources["glance"] = folder / "questions-glance.jsonl"
            hinted = (q.model_copy(update={"question": f"{q.question} {hint}"}) for q in questions)
            write_rows(self.sources["glance"], hinted)
            settings.append(hint)
        self.identity = hashlib.sha256(
            source.read_bytes() + json.dumps(settings, sort_keys=True).encode()
        ).hexdigest()
        sampling = config.evaluate.sampling.model_copy(update={"temperature": 1.0})
        self.config = config.model_copy(
            update={"evaluate": config.evaluate.model_copy(update={"sampling": sampling})}
        )

    def missing(self) -> list[str]:
        """Arms without stored scores for these questions and settings."""
        return [arm for arm in self.arms if self._stored(arm).get("identity") != self.identity]

    def store(self, arm: str, groups: Sequence[Group]) -> None:
        if self.whole:
            write_rows(self._trajectories(arm), groups)
        rows = [
            [g.question.id, self.arms[arm], t.rewards.get("accuracy")] for g in groups for t in g.trajectories
        ]
        write_json(self._file(arm), {"identity": self.identity, "rows": rows})

    def outcomes(self) -> dict[str, filters.Outcomes]:
        return filters.group_outcomes(tuple(row) for arm in self.arms for row in self._stored(arm)["rows"])

    def groups(self, arm: str) -> Iterator[Group]:
        """The stored episodes of an arm, in the order of the questions."""
        with self._trajectories(arm).open("rb") as lines:
            yield from map(Group.model_validate_json, lines)

    def _trajectories(self, arm: str) -> Path:
        return self.folder / f"trajectories-{arm}.jsonl"

    def _file(self, arm: str) -> Path:
        return self.folder / f"episodes-{arm}.json"

    def _stored(self, arm: str) -> dict[str, Any]:
        try:
            return json.loads(self._file(arm).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

"""The Scorer actor: rewards of whole groups."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from pixelis.actors.cluster import use_reserved_gpus
from pixelis.config import Config
from pixelis.errors import BadInput
from pixelis.files import replacing
from pixelis.records import Group, Question, Trajectory, Turn
from pixelis.rewards.grader import Advance, Grader
from pixelis.telemetry.metrics import count

CONCURRENT_GROUPS = 16
"""Groups scored concurrently: most of the time they wait for the judge or for worker processes."""


@ray.remote(max_restarts=-1, max_task_retries=2, max_concurrency=CONCURRENT_GROUPS)
class Scorer:
    """Scores complete groups, because some terms depend on the whole group.

    ``run.dir/scorers`` has the state of the rewards after every step, and a journal of the groups scored
    since, so that a restarted actor continues exactly.
    """

    def __init__(self, config: Config, index: int = 0):
        use_reserved_gpus()
        self.config = config
        self.grader = Grader(config.rewards, config.run.dir, config.run.seed)
        self.initial = self.grader.state() if config.rewards.stateful else b""
        self.stateful, self.lock = config.rewards.stateful, threading.Lock()
        self.file = Path(config.run.dir) / "scorers" / f"{index}.safetensors"
        self.journal = self.file.with_suffix(".jsonl")
        if self.stateful and self.file.is_file():
            with contextlib.suppress(BadInput):  # the state of other rewards; a new run calls load
                self.grader.load(self.file.read_bytes())
                for row in _read_journal(self.journal):
                    # Else its step is in the state already
                    if row.get("after", self.grader.step) == self.grader.step:
                        self.grader.observe(Group.model_validate(row["group"]), row["states"])

    def health(self) -> str:
        return "ok"

    def score(
        self,
        group: Group,
        step: int | None = None,
        states: dict[str, Sequence[Sequence[float]]] | None = None,
        truths: Sequence[str] | None = None,
    ) -> Group:
        started = time.monotonic()
        scored = self.grader.score(group, step, states, truths)
        count("scorer/groups")
        count("scorer/seconds", time.monotonic() - started)
        for cause, episodes in Counter(t.unscored for t in scored.trajectories if t.unscored).items():
            count("scorer/unscored", episodes, {"cause": cause})
        if self.stateful and step is not None:
            observed = _journal_group(scored).model_dump(mode="json", exclude_defaults=True)
            with self.lock:
                # Else a step ended meanwhile, and its state has the group
                if scored.id in self.grader.scored:
                    line = json.dumps({"after": self.grader.step, "group": observed, "states": states})
                    self.journal.parent.mkdir(parents=True, exist_ok=True)
                    private = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                    with open(private, "a", encoding="utf-8") as lines:
                        lines.write(line + "\n")
        return scored

    def accuracy(self, group: Group, answers: Sequence[str], scorer: str) -> dict[str, float]:
        return self.grader.accuracy(group, answers, scorer)

    def advance(self, step: int, is_last: bool = False) -> Advance:
        with self.lock:
            advance = self.grader.advance(step, is_last)
            self._save()
        return advance

    def state(self) -> bytes:
        return self.grader.state()

    def load(self, state: bytes | None) -> None:
        with self.lock:
            if self.stateful:
                self.grader.load(state or self.initial)
            self._save()

    def _save(self) -> None:
        if self.stateful:
            with replacing(self.file) as file:
                file.write(self.grader.state())
            self.journal.unlink(missing_ok=True)

    def counts(self) -> dict[str, int]:
        return dict(self.grader.services.counts)


def _journal_group(group: Group) -> Group:
    """What ``Grader.observe`` reads of a scored group. Text of callers stays out of the journal."""
    trajectories = [
        Trajectory(
            id=t.id,
            question_id=t.question_id,
            group_id=t.group_id,
            answer=t.answer,
            rewards=t.rewards,
            turns=[Turn(role="assistant", action=turn.action) for turn in t.turns if turn.is_policy],
        )
        for t in group.trajectories
    ]
    return Group(
        id=group.id, question=Question(id=group.question.id, question="-"), trajectories=trajectories
    )


def _read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Cuts an incomplete last line off the file."""
    if not path.is_file():
        return
    content = path.read_bytes()
    if (end := content.rfind(b"\n") + 1) < len(content):
        os.truncate(path, end)
    for line in content[:end].splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)

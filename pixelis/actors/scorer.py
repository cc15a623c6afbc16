"""The Scorer actor: reward terms of whole groups."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import ray

from pixelis.config import Config
from pixelis.errors import BadInput
from pixelis.records import Group
from pixelis.rewards.grader import Advance, Grader

GROUPS_AT_ONCE = 16
"""Groups that one actor scores beside each other: most of the time they wait for a judge or for processes of formulas."""


@ray.remote(max_restarts=-1, max_task_retries=2, max_concurrency=GROUPS_AT_ONCE)
class Scorer:
    """Scores complete groups, because some terms look at the whole group.

    What later scores depend on (statistics, curriculum, dynamics model) is written to ``run.dir/scorers`` after every step, and
    the groups scored since are written beside it: a restarted scorer goes on as if it had not ended.
    """

    def __init__(self, config: Config, index: int = 0):
        self.config = config
        self.grader = Grader(config.rewards, config.run.dir, config.run.seed)
        self.fresh = self.grader.state() if config.rewards.stateful else b""
        self.stateful, self.writing = config.rewards.stateful, threading.Lock()
        self.file = Path(config.run.dir) / "scorers" / f"{index}.safetensors"
        self.journal = self.file.with_suffix(".jsonl")
        if self.stateful and self.file.is_file():
            with contextlib.suppress(BadInput):  # of other rewards: whoever begins a run sets the state
                self.grader.load(self.file.read_bytes())
                for line in self.journal.read_text(encoding="utf-8").splitlines() if self.journal.is_file() else ():
                    with contextlib.suppress(ValueError):  # torn by the end of the process: that group is scored again
                        row = json.loads(line)
                        self.grader.observe(Group.model_validate(row["group"]), row["states"])

    def health(self) -> str:
        """Answers when alive."""
        return "ok"

    def score(self, group: Group, step: int | None = None, states: dict[str, Sequence[Sequence[float]]] | None = None) -> Group:
        """The group with raw terms, total reward or the cause it is unscored on each trajectory; see ``Grader.score``."""
        scored = self.grader.score(group, step, states=states)
        if self.stateful and step is not None:
            bare = {"trajectories": {"__all__": {"turns": {"__all__": {"tokens", "log_probs"}}}}}
            line = json.dumps({"group": scored.model_dump(mode="json", exclude=bare), "states": states})
            with self.writing, self.journal.open("a", encoding="utf-8") as lines:
                lines.write(line + "\n")
        return scored

    def advance(self, step: int) -> Advance:
        """Training step ``step`` is over; tells the name of the boundary that it crossed, and metrics."""
        with self.writing:
            advance = self.grader.advance(step)
            self._keep()
        return advance

    def state(self) -> bytes:
        """What later scores depend on, for a checkpoint: a safetensors file."""
        return self.grader.state()

    def load(self, state: bytes | None) -> None:
        """Go on from the state of a checkpoint; None: from the beginning."""
        with self.writing:
            if self.stateful:
                self.grader.load(state or self.fresh)
            self._keep()

    def _keep(self) -> None:
        if self.stateful:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            aside = self.file.with_suffix(".aside")
            aside.write_bytes(self.grader.state())
            os.replace(aside, self.file)
            self.journal.unlink(missing_ok=True)

    def counts(self) -> dict[str, int]:
        """Causes and statuses so far, by name."""
        return dict(self.grader.services.counts)

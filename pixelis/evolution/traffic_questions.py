"""Canary questions from the traffic: confident, diverse requests that are held out from learning."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.config import CanaryConfig
from pixelis.evolution.canary import Decision, Scores, compare
from pixelis.evolution.privacy import is_redacted
from pixelis.evolution.shares import Source
from pixelis.files import replacing
from pixelis.records import Question, UpdateTask

log = logging.getLogger(__name__)
MIN_CONFIDENCE = 0.85
MIN_QUESTIONS = 8
"""With fewer questions candidates are not judged by them."""


@dataclass(frozen=True, slots=True)
class TrafficQuestion:
    """A question with its elected answer and its uint8 pictures by media id."""

    question: Question
    pictures: dict[str, np.ndarray]
    source: Source
    experience_id: str
    created_at: float


class TrafficQuestions:
    """The newest ``canary.traffic`` questions: one of each group of near-identical ones, few of one user.

    Each is a file in ``folder``; None stores none.
    """

    def __init__(self, config: CanaryConfig, folder: Path | None = None):
        self.config, self.folder = config, folder
        self.items: list[TrafficQuestion] = []
        self.lock = threading.Lock()

    def load(self, group: Callable[[str, np.ndarray | None], str]) -> None:
        """Read the stored questions; ``group`` names the group of a question and its first picture."""
        items = []
        for file in sorted(
            self.folder.glob("*.npz") if self.folder else (), key=lambda file: file.stat().st_mtime_ns
        ):
            try:
                item = _read(file)
            except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
                log.warning("a question of the canary, %s, cannot be read: %s", file, error)
                continue
            name = group(item.question.question, next(iter(item.pictures.values()), None))
            items.append(replace(item, source=Source(item.source.user, name)))
        self.items = items[-self.config.traffic :] if self.config.traffic else []

    def save(self) -> None:
        if self.folder is None:
            return
        try:
            with self.lock:
                self.folder.mkdir(parents=True, exist_ok=True)
                current = {
                    f"{hashlib.sha256(item.question.id.encode()).hexdigest()[:32]}.npz": item
                    for item in self.items
                }
                stored = {file.name for file in self.folder.glob("*.npz")}
                for name in stored - current.keys():
                    (self.folder / name).unlink()
                for name in current.keys() - stored:
                    _write(self.folder / name, current[name])
        except OSError as error:
            log.warning("the canary's questions of the traffic are not stored: %s", error)

    def wants(self, task: UpdateTask, question: Question, source: Source, user_cap: float) -> bool:
        """Whether to take this task, which then must not be learnt from.

        ``user_cap`` is the share of the questions that one user may have.
        """
        limit = self.config.traffic
        fraction = int.from_bytes(hashlib.sha256(f"traffic {task.id}".encode()).digest()[:8], "big") / 2**64
        if not limit or task.confidence < MIN_CONFIDENCE or fraction >= self.config.traffic_share:
            return False
        users = Counter(item.source.user for item in self.items)
        if users[source.user] >= math.ceil(user_cap * limit) or any(
            item.source.question == source.question for item in self.items
        ):
            return False
        # A redacted question is not the one that was answered.
        return not is_redacted(question.conversation + task.pseudo_label)

    def add(
        self, task: UpdateTask, question: Question, source: Source, pictures: Mapping[str, np.ndarray]
    ) -> None:
        shapes = {id: picture.shape for id, picture in pictures.items()}
        media = [
            m.model_copy(update={"height": shapes[m.id][0], "width": shapes[m.id][1]}) for m in question.media
        ]
        canary_question = question.model_copy(
            update={"id": task.id, "media": media, "answers": [task.pseudo_label]}
        )
        item = TrafficQuestion(canary_question, dict(pictures), source, task.experience_id, task.created_at)
        self.items = [*self.items, item][-self.config.traffic :]

    def forget(self, experience_ids: Sequence[str]) -> int:
        return self._keep(lambda item: item.experience_id not in experience_ids)

    def expire(self, before: float) -> int:
        return self._keep(lambda item: item.created_at >= before)

    def _keep(self, condition: Callable[[TrafficQuestion], bool]) -> int:
        before = len(self.items)
        self.items = [item for item in self.items if condition(item)]
        return before - len(self.items)


def judge_traffic(candidate: Scores, served: Scores, config: CanaryConfig, against: int) -> Decision:
    """Compare a candidate with the served version on traffic questions.

    Their answers are votes, not truths: only a significant fall refuses the candidate.
    """
    return compare(candidate, served, config.model_copy(update={"tolerance": 1.0}), against)


def _write(path: Path, item: TrafficQuestion) -> None:
    record = {
        "question": item.question.model_dump(mode="json"),
        "user": item.source.user,
        "experience_id": item.experience_id,
        "created_at": item.created_at,
        "pictures": list(item.pictures),
    }
    arrays: dict[str, Any] = {
        f"picture_{index}": picture for index, picture in enumerate(item.pictures.values())
    }
    with replacing(path, permissions=0o600) as file:
        np.savez_compressed(file, record=np.frombuffer(json.dumps(record).encode(), np.uint8), **arrays)


def _read(path: Path) -> TrafficQuestion:
    with np.load(path, allow_pickle=False) as arrays:
        record = json.loads(arrays["record"].tobytes())
        pictures = {name: arrays[f"picture_{index}"] for index, name in enumerate(record["pictures"])}
    return TrafficQuestion(
        Question.model_validate(record["question"]),
        pictures,
        Source(record["user"], ""),
        record["experience_id"],
        float(record.get("created_at", path.stat().st_mtime)),
    )

"""Caps how much of an update, and of a candidate, one user or one question in many copies may decide.

Whoever sends most of the traffic would otherwise elect most of the labels.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image
from rapidfuzz import fuzz

from pixelis.config import EvolutionConfig

SIDE = 16
MAX_PICTURE_DIFFERENCE = 5.0
"""Mean difference of grey values (0..255) of near-identical reduced pictures.

Noise, JPEG, shifts and crops of a few pixels stay below 3; different pictures of the embedded model's world
differ by 8 or more.
"""
MIN_TEXT_RATIO = 85.0
"""Similarity (0..100, rapidfuzz) of two questions from which they are near-identical."""
MAX_QUESTIONS = 1000
MAX_USERS = 100_000
WINDOW_S = 86_400.0
"""Seconds for which a user counts after the last accepted task."""


class Source(NamedTuple):
    """A task's user (a pseudonym, empty for callers without a name) and its question's group of copies."""

    user: str
    question: str


class NearQuestions:
    """The last MAX_QUESTIONS groups of near-identical questions: similar text about a similar picture."""

    def __init__(self) -> None:
        self.groups: OrderedDict[str, tuple[str, Float[np.ndarray, SIDE * SIDE]]] = OrderedDict()
        self.count = 0

    def group(self, text: str, picture: UInt8[np.ndarray, "height width 3"] | None) -> str:
        # The text without case, punctuation, blanks and invisible characters.
        words = re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", text).casefold())
        look = np.full(SIDE * SIDE, -1e3, np.float32)
        if picture is not None and picture.size:
            reduced = Image.fromarray(picture).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
            look = np.asarray(reduced, np.float32).ravel()
        if self.groups:
            looks = np.stack([known for _, known in self.groups.values()])
            names = list(self.groups)
            for place in np.flatnonzero(np.abs(looks - look).mean(axis=1) <= MAX_PICTURE_DIFFERENCE):
                name = names[place]
                if fuzz.ratio(words, self.groups[name][0]) >= MIN_TEXT_RATIO:
                    self.groups.move_to_end(name)
                    return name
        self.count += 1
        name = f"question-{self.count}"
        self.groups[name] = (words, look)
        if len(self.groups) > MAX_QUESTIONS:
            self.groups.popitem(last=False)
        return name


@dataclass(frozen=True, slots=True)
class LargestShares:
    """Shares (0..1) of the user and of the question with the most of ``tasks``."""

    tasks: int
    users: int
    user: str
    user_share: float
    question_share: float

    @classmethod
    def of(cls, sources: Sequence[Source]) -> LargestShares:
        users, questions = Counter(s.user for s in sources), Counter(s.question for s in sources)
        (user, most), n = (users.most_common(1) or [("", 0)])[0], max(len(sources), 1)
        return cls(len(sources), len(users), user, most / n, max(questions.values(), default=0) / n)


class Shares:
    """Chooses batches in which no user and no question exceeds its share of the batch or the candidate.

    With n users in the last WINDOW_S seconds each may have 1/n. A cap c allows ceil(c x tasks); the
    candidate's covers the batches since the users' cap last changed. A batch is taken only if the users in
    the window could still fill the candidate's other batches.
    """

    def __init__(self, config: EvolutionConfig):
        self.config = config
        self.seen: OrderedDict[str, float] = OrderedDict()
        self.candidate: list[Source] = []
        self.counted: list[Source] = []
        self.batches = 0
        self.cap = 1.0

    def note(self, user: str, now: float) -> None:
        """Count an accepted task of ``user``; ``now`` is in seconds of any clock."""
        self.seen[user] = now
        self.seen.move_to_end(user)
        if len(self.seen) > MAX_USERS:
            self.seen.popitem(last=False)

    def users(self, now: float) -> int:
        while self.seen and next(iter(self.seen.values())) < now - WINDOW_S:
            self.seen.popitem(last=False)
        return len(self.seen)

    def user_cap(self, now: float) -> float:
        return max(self.config.max_share_per_user, 1 / max(self.users(now), 1))

    def stats(self, now: float) -> dict[str, float]:
        return {"users": self.users(now), "user_cap": self.user_cap(now)}

    def choose(self, waiting: Sequence[Source], least: int, most: int, now: float) -> list[int]:
        """Indices of the largest batch of ``least`` to ``most`` waiting tasks within the caps."""
        cap = self.user_cap(now)
        if cap != self.cap:
            self.cap, self.counted = cap, []
        counts = Counter(source.user for source in self.counted)
        oldest, before, ranks = list(range(len(waiting))), counts.copy(), list[int]()
        # The tasks that a user has before each of its tasks, in the candidate and in the queue
        for user, _ in waiting:
            ranks.append(before[user])
            before[user] += 1
        in_turn = sorted(oldest, key=ranks.__getitem__)
        for size in range(min(most, len(waiting)), max(least, 1) - 1, -1):
            for order in (oldest, in_turn):
                chosen = self._fill(waiting, order, size)
                if len(chosen) == size and self._completable(
                    counts + Counter(waiting[i].user for i in chosen), size
                ):
                    return sorted(chosen)
        return []

    def _completable(self, counts: Counter[str], size: int) -> bool:
        """Whether the users in the window could fill the candidate's other batches, given its ``counts``."""
        others = self.config.canary.every - self.batches % self.config.canary.every - 1
        in_batch = most_tasks(self.cap, size)
        for n in range(1, others + 1):
            in_candidate = most_tasks(self.cap, counts.total() + n * size)
            if sum(min(n * in_batch, in_candidate - counts[user]) for user in self.seen) < n * size:
                return False
        return True

    def _fill(self, waiting: Sequence[Source], order: Sequence[int], size: int) -> list[int]:
        users = _Cap(self.cap, size, Counter(source.user for source in self.counted))
        questions = _Cap(
            self.config.max_share_per_question, size, Counter(source.question for source in self.candidate)
        )
        chosen: list[int] = []
        for index in order:
            user, question = waiting[index]
            if len(chosen) == size:
                break
            if users.admits(user) and questions.admits(question):
                chosen.append(index)
                users.counts[user] += 1
                questions.counts[question] += 1
        return chosen

    def learnt(self, batch: Sequence[Source]) -> None:
        self.candidate += batch
        self.counted += batch
        self.batches += 1

    def state(self, now: float, wall: float) -> dict[str, Any]:
        """The state as JSON values; ``wall``: seconds since the epoch at ``now``."""
        seen = {user: now - at for user, at in self.seen.items()}
        batches = {
            "candidate": self.candidate,
            "counted": self.counted,
            "batches": self.batches,
            "cap": self.cap,
        }
        return {"saved_at": wall, "seen_ago_s": seen, **batches}

    def restore(self, state: Mapping[str, Any], now: float, wall: float) -> None:
        """Continue from the ``state`` of an earlier process: a restart frees no user of a cap."""
        away = max(0.0, wall - state["saved_at"])
        self.seen = OrderedDict((user, now - ago - away) for user, ago in state["seen_ago_s"].items())
        # Groups of questions are numbered anew.
        self.candidate, self.counted = (
            [Source(user, f"earlier {question.removeprefix('earlier ')}") for user, question in state[name]]
            for name in ("candidate", "counted")
        )
        self.batches, self.cap = state["batches"], state["cap"]

    def published(self) -> LargestShares:
        """The shares of the candidate that was published; the next batch belongs to the next one."""
        shares = LargestShares.of(self.candidate)
        self.candidate, self.counted, self.batches = [], [], 0
        return shares


class _Cap:
    """A cap on the tasks of a name in a batch of ``size`` and in the candidate with its ``earlier`` ones."""

    def __init__(self, share: float, size: int, earlier: Counter[str]):
        self.in_batch, self.in_candidate = most_tasks(share, size), most_tasks(share, earlier.total() + size)
        self.earlier, self.counts = earlier, Counter[str]()

    def admits(self, name: str) -> bool:
        return self.counts[name] < min(self.in_batch, self.in_candidate - self.earlier[name])


def most_tasks(share: float, tasks: int) -> int:
    """The number of ``tasks`` that a share (0..1) of them allows, rounded up."""
    return math.ceil(share * tasks - 1e-9)


def most_abundant(waiting: Sequence[Source]) -> int:
    """What a full queue gives up: index of the oldest task of the busiest user's commonest question."""
    users = Counter(source.user for source in waiting)
    questions = Counter(waiting)
    return max(range(len(waiting)), key=lambda i: (users[waiting[i].user], questions[waiting[i]], -i))

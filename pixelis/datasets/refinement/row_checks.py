"""The stages of refinement that concern one row alone, in any process: rules, media, observations, quality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from pixelis.config import Config
from pixelis.datasets.refinement import quality
from pixelis.datasets.refinement.media_hashes import MediaHashes
from pixelis.datasets.synthesis.executor import Executor
from pixelis.errors import PixelisError
from pixelis.operations import Operation, select
from pixelis.records import Demonstration, Media
from pixelis.rewards.services import Services

HASHES = "pictures.jsonl"
THREADS = 4


@dataclass(frozen=True)
class CheckedRow:
    """A demonstration with observations and quality, and the hashes of its media.

    looks: 64 bits of each appearance, if compared; dropped: the cause; unreadable: code and message.
    """

    demonstration: Demonstration
    contents: list[str] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    dropped: str | None = None
    unreadable: tuple[str, str] | None = None

    def to_json(self) -> str:
        values = [self.contents, self.looks, self.dropped, self.unreadable]
        return json.dumps([self.demonstration.model_dump_json(), *values])

    @classmethod
    def from_json(cls, text: str) -> CheckedRow:
        row, contents, looks, dropped, unreadable = json.loads(text)
        return cls(
            Demonstration.model_validate_json(row),
            contents,
            looks,
            dropped,
            None if unreadable is None else tuple(unreadable),
        )


class RowChecker:
    """Checks rows; loads what executes operations when a call needs it."""

    def __init__(self, config: Config, folder: Path, services: Services):
        self.config, self.settings = config, config.refinement
        self.media_hashes = MediaHashes(config.toolbox, folder / HASHES)
        self.operations: dict[str, type[Operation]] = {o.name: o for o in select(config.toolbox.operations)}
        self.score = quality.scorer(services)
        near = self.settings.duplicates
        self.by_appearance = bool(near.near) and near.pictures == "look"
        self._executor: Executor | None = None

    @property
    def executor(self) -> Executor:
        """Executes the operations of demonstrations; raises if one cannot run here."""
        if self._executor is None:
            self._executor = Executor(self.config.toolbox, self.config.dialogue)
        return self._executor

    def check(self, demonstrations: Sequence[Demonstration]) -> list[CheckedRow]:
        rules = self.settings.quality
        rows = [
            CheckedRow(d, dropped=quality.rule_violation(d, self.operations, rules)) for d in demonstrations
        ]
        media = {_key(m): m for row in rows if row.dropped is None for m in row.demonstration.media}

        def hash_one(item: Media) -> tuple[str, int] | PixelisError:
            try:
                content = self.media_hashes.content(item)
                return content, self.media_hashes.perceptual_hash(item) if self.by_appearance else 0
            except PixelisError as error:
                return error

        with ThreadPoolExecutor(THREADS) as pool:
            hashes = dict(zip(media, pool.map(hash_one, media.values()), strict=True))
        return [row if row.dropped is not None else self._check(row, hashes) for row in rows]

    def _check(self, row: CheckedRow, hashes: dict[str, tuple[str, int] | PixelisError]) -> CheckedRow:
        d, contents, looks = row.demonstration, list[str](), list[int]()
        for item in d.media:
            found = hashes[_key(item)]
            if isinstance(found, PixelisError):
                return replace(row, unreadable=(found.code, found.message))
            contents.append(found[0])
            looks.append(found[1])
        if any(step.observation is None for step in d.steps):
            observed = with_observations(d, self.executor)
            if isinstance(observed, str):
                return replace(row, dropped=observed)
            d = observed
        d = d.model_copy(update={"quality": quality.heuristic(d, self.score)})
        is_poor = (d.quality or 0.0) < self.settings.quality.min_score
        return CheckedRow(
            d, contents, looks if self.by_appearance else [], dropped="quality" if is_poor else None
        )


def with_observations(d: Demonstration, executor: Executor) -> Demonstration | str:
    """The demonstration with the missing observations, or an error code if a call is refused."""
    if any(step.further for step in d.steps):
        return "several_calls"
    try:
        session = executor.open(d)
        turns = []
        for turn in d.turns:
            if turn.op is not None:
                observation = session.execute(
                    turn.op, turn.target, allow_error=not turn.learn, **turn.arguments
                )
                if turn.observation is None:
                    turn = turn.model_copy(update={"observation": observation})
            turns.append(turn)
    except PixelisError as failure:
        return failure.code
    return d.model_copy(update={"turns": turns})


def _key(media: Media) -> str:
    return f"{media.kind} {media.uri} {' '.join(media.frames or [])} {media.spans or ''}"

"""Checks of demonstrations by processes of Ray Data: the rows and the order of a plain loop."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pixelis.config import Config
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.refinement.pipeline import ROWS_AT_A_TIME, records
from pixelis.datasets.refinement.row_checks import CheckedRow, RowChecker
from pixelis.datasets.stream import END, record_stream
from pixelis.records import Demonstration
from pixelis.rewards.services import Services


class RowCheck:
    def __init__(self, config: Config, folder: str):
        self.checker = RowChecker(config, Path(folder), Services(config.rewards, folder))

    def __call__(self, texts: Sequence[str]) -> list[str]:
        rows = [Demonstration.model_validate_json(text) for text in texts]
        return [row.to_json() for row in self.checker.check(rows)]


def checked_rows(config: Config, folder: Path) -> Iterator[CheckedRow | BadRow]:
    """The rows of ``data.demonstrations`` in order, checked by up to ``refinement.workers`` processes."""
    from pixelis.datasets.execution import Change  # imports Ray Data

    source = config.data.demonstrations
    cards = functools.partial(_cards, config) if source.startswith("cards:") else None
    arguments = (config, str(folder.resolve()))
    change = Change(RowCheck, arguments, config.refinement.workers, config.toolbox.cpus, ROWS_AT_A_TIME)
    for row in record_stream(source, Demonstration, change, cards, config.data.limit):
        yield row if isinstance(row, BadRow) else CheckedRow.from_json(row.text)


def _cards(config: Config) -> Iterable[dict[str, Any]]:
    source = config.data.demonstrations
    for number, row in enumerate(records(config)):
        if isinstance(row, Demonstration):
            place = {"file": source, "row": str(number)}
            yield END | place | {"id": row.id, "text": row.model_dump_json(), "weight": 1.0}
    yield END

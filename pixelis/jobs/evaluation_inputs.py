"""Inputs of an evaluation, and their check by `--dry-run`: questions, a baseline's scores, another model's answers."""

from __future__ import annotations

import codecs
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from pixelis.actors import reservations
from pixelis.config import Config
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.files import Row as FileRow
from pixelis.datasets.files import read_file
from pixelis.datasets.labels import drop_labels
from pixelis.datasets.questions import read_questions
from pixelis.datasets.readers.base import read_json
from pixelis.errors import BadConfig, BadInput, MissingFile
from pixelis.evaluation import foreign_answers
from pixelis.evaluation.clusters import require_questions
from pixelis.rewards.llm_client import LlmClient

if TYPE_CHECKING:
    from pixelis.jobs.dry_run import Input
    from pixelis.policy.estimate import Finding


def arm_name(name: str, max_pixels: int | None) -> str:
    """Name of the evaluation of a set with a pixel budget, in reports and files."""
    return name if max_pixels is None else f"{name}-{max_pixels}px"


def check_baseline(config: Config) -> None:
    """Read the scores of `evaluate.baseline`, if it is set, for every set and pixel budget.

    Raises BadConfig if it is the evaluation's own run.dir, whose scores are replaced before they are compared; and as
    `baseline_scores`.
    """
    e = config.evaluate
    if e.baseline is None:
        return
    if Path(e.baseline).resolve() == Path(config.run.dir).resolve():
        message = f"evaluate.baseline={e.baseline} is the run.dir of this evaluation, which would be compared with itself"
        raise BadConfig(message, fix="choose another run.dir")
    names = [Path(e.answers).stem] if e.answers is not None else list(e.sets) or [config.run.name]
    budgets: list[int | None] = [*e.max_pixels] if e.answers is None else []
    for name in names:
        for max_pixels in budgets or [None]:
            baseline_scores(e.baseline, arm_name(name, max_pixels))


def baseline_scores(baseline: str, name: str) -> dict[str, float]:
    """Mean score by question of the set ``name`` in the run.dir of another evaluation, or of its only set.

    Raises MissingFile, BadInput.
    """
    folder = Path(baseline)
    path = folder / f"scores-{name}.jsonl"
    if not path.is_file():
        others = sorted(folder.glob("scores-*.jsonl"))
        if len(others) != 1:
            message = f"evaluate.baseline={baseline} has {len(others) or 'no'} files of scores and no {path.name}"
            raise MissingFile(message, fix="name the run.dir of an evaluation of the same sets")
        (path,) = others
    try:
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]  # text would be split at U+2028 too
        scores = {row["id"]: [score for score in row["scores"] if score is not None] for row in rows}
        return {id: statistics.fmean(values) for id, values in scores.items() if values}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise BadInput(f"{path} is no file of scores: {error!r:.100}", fix="name the run.dir of an evaluation") from None


def answer_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of answers. MissingFile, BadInput."""
    if not path.is_file():
        raise MissingFile(f"evaluate.answers={path} is no file", fix="name the file of the other model's answers")
    if path.suffix == ".json":
        with path.open("rb") as file:  # bytes, because a wrong encoding is reported by the readers
            is_object = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
        if is_object:
            return foreign_answers.rows_of(read_json(path))
    return [row.values if isinstance(row, FileRow) else _refuse(row) for row in read_file(fs.LocalFileSystem(), str(path))]


def _refuse(row: BadRow) -> dict[str, Any]:
    raise BadInput(f"{row.file}, row {row.row}: {row.message}", code=row.code, fix="correct the row")


# -- the dry run ------------------------------------------------------------------------------------------------------


def needs(config: Config) -> list[reservations.Need]:
    """What an evaluation of a policy reserves."""
    return reservations.needs(config, learner=False, rollouts=True)


def inputs(config: Config) -> Iterator[Input]:
    """The inputs that a dry run reads."""
    from pixelis.jobs import dry_run

    e, player = config.evaluate, None
    if e.api.url is None and e.answers is None:
        player = dry_run.player_of(config)
        yield from dry_run.policy_inputs(config)
    for item in dry_run.held_out_inputs(config, config.held_out if e.answers is None else {"": config.data.evaluate}, player):
        yield item if not e.clusters else item._replace(read=functools.partial(_read_for_clusters, config, item.read))
    if e.answers is not None:
        yield dry_run.Input("evaluate.answers", e.answers, lambda path: answer_rows(Path(path)))
    if e.baseline is not None:
        yield dry_run.Input("evaluate.baseline", e.baseline, lambda _: check_baseline(config))


def _read_for_clusters(config: Config, read: Callable[[str], object], source: str) -> None:
    """Read a source whose questions are clustered, which needs some of them."""
    read(source)
    clusters, on_labels = config.evaluate.clusters, None if config.rewards.labelled else drop_labels
    count = sum(1 for _ in read_questions(source, limit=2 * clusters, epochs=1, on_labels=on_labels))
    require_questions(count, clusters, source)


def findings(config: Config) -> list[Finding]:
    """Estimates of memory with every pixel budget, and placement."""
    from pixelis.jobs import plan
    from pixelis.policy import estimate

    rows = [*estimate.check(config, "evaluate"), *plan.check(config, needs(config))]
    for max_pixels in config.evaluate.max_pixels:
        swept = config.model_copy(update={"dialogue": config.dialogue.with_max_pixels(max_pixels)})
        errors = [row for row in estimate.check(swept, "evaluate") if row.level == "error"]
        rows += [replace(row, text=f"evaluate.max_pixels {max_pixels}: {row.text}") for row in errors]
    return rows


def check(config: Config) -> None:
    """Check the configuration and every input, for `--dry-run`."""
    from pixelis.jobs import dry_run

    dry_run.show_operations(config)
    if config.evaluate.answers is None and config.evaluate.api.url is None:
        dry_run.show_findings("evaluate", config, findings(config))
    elif config.evaluate.answers is None:
        LlmClient(config.evaluate.api, "evaluate.api").close()  # raises without its model or key
    dry_run.check_inputs(inputs(config))

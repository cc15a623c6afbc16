"""Evaluates a model behind an OpenAI-compatible address, and another model's answers in a file."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from pyarrow import fs

from pixelis.actors import evaluation_report, report
from pixelis.config import Config
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.files import read_file
from pixelis.datasets.questions import read_questions, require_text
from pixelis.datasets.readers.base import read_json
from pixelis.errors import BadInput, MissingFile
from pixelis.evaluation import foreign_answers
from pixelis.jobs.chat_agent import ChatAgent
from pixelis.jobs.chat_model import ChatModel
from pixelis.jobs.evaluation_arms import Arm, compare_with, evaluate_sets, graded, save
from pixelis.rewards.extraction import answers_of
from pixelis.rewards.grader import Grader
from pixelis.telemetry.html.report import write_report
from pixelis.telemetry.progress import Progress


def evaluate_api(
    config: Config, folder: Path, max_pixels: int | None, previous: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Evaluate the model of `evaluate.api` on each set; returns ``previous`` and the new summaries.

    A cluster is started only if the model is offered operations.
    """
    config, e = _whole_texts(config), config.evaluate
    model, grader = ChatModel(config, folder, max_pixels), Grader(config.rewards, folder)
    agent: ChatAgent | None = None

    def measure(name: str, source: str, operations: bool) -> Arm:
        rows = read_questions(source, limit=e.questions and e.questions + 1, epochs=1)
        questions = [require_text(question, source) for question in rows]
        truncated = 0 < e.questions < len(questions) and not source.startswith("cards:")
        questions = questions[: e.questions or None]
        total = len(questions) * e.samples * max(1, len(e.seeds))
        with Progress(f"evaluate {name}", total, enabled=config.telemetry.progress) as progress:
            request = (questions, e.samples, e.seeds, progress.update)
            groups = model.groups(*request) if agent is None else agent.groups(*request, operations)
        arm = graded(config, grader, name, groups, e.seeds, e.samples)
        arm.summary |= {"truncated": True} if truncated else {}
        return arm

    try:
        agent = ChatAgent(config, model) if e.api.operations else None
        arms = evaluate_sets(config, folder, max_pixels, measure, operations=True)
    finally:
        model.close()
        grader.close()
    first, summaries = arms[0], [*previous, *(arm.summary for arm in arms)]
    no_views = [None] * len(first.groups)
    chosen = evaluation_report.choose_with_causes(
        first.name, first.groups, no_views, config.telemetry.trajectories
    )
    page = write_report(folder, {"arms": summaries}, [], report.pages(config, chosen))
    print(f"report: {page}")
    return summaries


def score_answers(config: Config, folder: Path) -> dict[str, Any]:
    """Score the file `evaluate.answers` against data.evaluate; returns the summary."""
    config = _whole_texts(config)
    assert config.evaluate.answers is not None
    path = Path(config.evaluate.answers)
    rows = answer_rows(path)
    limit = config.evaluate.questions and max(config.evaluate.questions, len(rows))
    questions = list(read_questions(config.data.evaluate, limit=limit, epochs=1))
    groups = foreign_answers.episodes(rows, questions)
    grader = Grader(config.rewards, folder)
    try:
        arm = graded(config, grader, path.stem, groups)
        scored = foreign_answers.with_scores(
            rows, arm.groups, answers_of(arm.groups, config.rewards, grader.services)
        )
    finally:
        grader.close()
    text = json.dumps(scored, indent=2, ensure_ascii=False)
    (folder / f"{path.stem}_with_score.json").write_text(text, encoding="utf-8")
    save(config, folder, arm)
    if config.evaluate.baseline is not None:
        arm.summary["baseline"] = compare_with(config.evaluate.baseline, arm)
    return arm.summary


def answer_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of answers. MissingFile, BadInput."""
    if not path.is_file():
        raise MissingFile(
            f"evaluate.answers={path} is no file", fix="name the file of the other model's answers"
        )
    if path.suffix == ".json":
        with path.open("rb") as file:  # bytes, because a wrong encoding is reported by the readers
            is_object = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
        if is_object:
            return foreign_answers.rows_of(read_json(path))
    rows = []
    for row in read_file(fs.LocalFileSystem(), str(path)):
        if isinstance(row, BadRow):
            raise BadInput(f"{row.file}, row {row.row}: {row.message}", code=row.code, fix="correct the row")
        rows.append(row.values)
    return rows


def _whole_texts(config: Config) -> Config:
    """For models that need not know our tags: the whole text is the answer, unless ``rewards.extractor`` is set."""
    if config.rewards.extractor != "dialect":
        return config
    return config.changed({"rewards.extractor": "whole"})

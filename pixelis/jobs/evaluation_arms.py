"""An evaluated policy or model: its summary, the files of its episodes, and comparisons with others."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from pixelis.actors import evaluation_report
from pixelis.actors.group_views import GroupViews
from pixelis.config import Config, published
from pixelis.config.published import PublishedFigure, PublishedFigures
from pixelis.errors import BadConfig, BadInput, MissingFile
from pixelis.evaluation import outputs
from pixelis.evaluation.capabilities import capabilities
from pixelis.evaluation.causes import error_causes
from pixelis.evaluation.looking import looking
from pixelis.evaluation.metrics import correctness, summarise
from pixelis.evaluation.published import compare_published
from pixelis.evaluation.samples import breakdown, count_errors, question_rows, sample_metrics, seed_metrics
from pixelis.evaluation.statistics import compare
from pixelis.records import Group
from pixelis.rewards.extraction import answers_of
from pixelis.rewards.grader import Grader
from pixelis.rewards.services import Services, shared_services

SAME_SETS = "name the run.dir of an evaluation of the same sets"


@dataclass
class Arm:
    """One evaluated policy: its summary and the groups with references to their views."""

    name: str
    summary: dict[str, Any]
    groups: list[Group]
    views: list[GroupViews]

    @property
    def correct(self) -> dict[str, float]:
        return correctness(self.groups)


def summary_of(
    config: Config,
    name: str,
    groups: Sequence[Group],
    services: Services,
    seeds: Sequence[int] = (),
    samples: int = 1,
) -> dict[str, Any]:
    """The summary of scored groups, with ``samples`` episodes of each seed in turn."""
    metrics = {**sample_metrics(groups, config.rewards, services), **seed_metrics(groups, seeds, samples)}
    answers = answers_of(groups, config.rewards, services)
    metrics |= {
        "answered": sum(answer is not None for answer in answers.values()),
        **count_errors(groups, answers),
    }
    if causal := looking(groups):
        metrics["looking"] = causal
    bars = {op: result["bar"] for op, result in causal.get("operations", {}).items()}
    if uses := capabilities(groups, bars):
        metrics |= {"capabilities": uses, "error_causes": error_causes(groups)}
    return {"name": name, **summarise(groups), **breakdown(groups), **metrics}


def graded(
    config: Config,
    grader: Grader,
    name: str,
    groups: list[Group],
    seeds: Sequence[int] = (),
    samples: int = 1,
) -> Arm:
    """The scored episodes of a model that is no policy of ours."""
    with ThreadPoolExecutor(4) as pool:
        scored = list(pool.map(grader.score, groups))
    return Arm(name, summary_of(config, name, scored, grader.services, seeds, samples), scored, [])


def evaluate_sets(
    config: Config,
    folder: Path,
    max_pixels: int | None,
    measure: Callable[[str, str, bool], Arm],
    operations: bool,
) -> list[Arm]:
    """Measure and save every set, with `evaluate.direct` also without operations.

    ``measure`` evaluates a source under a name, with or without operations.
    """
    e, arms = config.evaluate, list[Arm]()
    for name, source in (e.sets or {config.run.name: config.data.evaluate}).items():
        label = arm_name(name, max_pixels)
        arm = measure(label, source, operations)
        save(config, folder, arm)
        if e.direct:
            direct = measure(f"{label}-direct", source, False)
            save(config, folder, direct)
            arm.summary |= {"direct": direct.summary, "operations_gain": compare(arm.correct, direct.correct)}
        if e.baseline is not None:
            arm.summary["baseline"] = compare_with(e.baseline, arm)
        if max_pixels is not None:
            arm.summary |= {"set": name, "max_pixels": max_pixels}
        arms.append(arm)
    return arms


def arm_name(name: str, max_pixels: int | None) -> str:
    """Name of the evaluation of a set with a pixel budget, in reports and files."""
    return name if max_pixels is None else f"{name}-{max_pixels}px"


def save(config: Config, folder: Path, arm: Arm) -> None:
    """Write ``trajectories-NAME.jsonl`` (groups), ``scores-NAME.jsonl`` (questions) and ``evaluate.outputs``.

    With ``evaluate.images`` also every view: the ``uri`` of an image is then its file, relative to ``folder``.
    """
    if config.evaluate.images and arm.views:
        paths = ray.get(
            evaluation_report.save_images.remote(str(folder / f"images-{arm.name}"), arm.groups, arm.views)
        )
        for trajectory in (trajectory for group in arm.groups for trajectory in group.trajectories):
            for image, path in zip(trajectory.images, paths[trajectory.id], strict=True):
                image.uri = str(Path(path).relative_to(folder))
    with (folder / f"trajectories-{arm.name}.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(group.model_dump_json() + "\n" for group in arm.groups)
    answers = answers_of(arm.groups, config.rewards, shared_services(config.rewards))
    with (folder / f"scores-{arm.name}.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(
            json.dumps(row, ensure_ascii=False) + "\n" for row in question_rows(arm.groups, answers)
        )
    model = config.evaluate.api.model or config.policy.adapter or config.policy.model
    for system in config.evaluate.outputs:
        for name, text in outputs.files(system, arm.name, arm.groups, answers, model).items():
            path = folder / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(text, encoding="utf-8")


def compare_with(baseline: str, arm: Arm) -> dict[str, Any] | None:
    """The arm minus the scores of the same questions in another run.dir. MissingFile, BadInput."""
    return _compare_shared(
        arm.correct, baseline_scores(baseline, arm.name), arm.name, f"evaluate.baseline={baseline}"
    )


def _compare_shared(
    ours: Mapping[str, float], others: Mapping[str, float], name: str, source: str
) -> dict[str, Any] | None:
    if len(others.keys() & ours.keys()) < 2:
        raise BadInput(f"{source} shares no questions with {name}", fix=SAME_SETS)
    return compare(ours, others)


def baseline_scores(baseline: str, name: str) -> dict[str, float]:
    """Mean score by question of the set ``name``, or the only set, of another run.dir. MissingFile, BadInput."""
    folder = Path(baseline)
    path = folder / f"scores-{name}.jsonl"
    if not path.is_file():
        others = sorted(folder.glob("scores-*.jsonl"))
        if len(others) != 1:
            raise MissingFile(f"evaluate.baseline={baseline} has no {path.name}", fix=SAME_SETS)
        (path,) = others
    return read_scores(path)


def read_scores(path: Path) -> dict[str, float]:
    """Mean score by question of a file ``scores-NAME.jsonl``. BadInput."""
    try:
        # Text would be split at U+2028 too
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        scores = {row["id"]: [score for score in row["scores"] if score is not None] for row in rows}
        return {id: statistics.fmean(values) for id, values in scores.items() if values}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise BadInput(f"{path} is no file of scores: {error!r:.100}", fix=SAME_SETS) from None


def check_baseline(config: Config) -> None:
    """Read the scores of `evaluate.baseline` for every set and pixel budget; raises as `baseline_scores`.

    BadConfig if it is the evaluation's own run.dir, whose scores are replaced before they are compared.
    """
    e = config.evaluate
    if e.baseline is None:
        return
    if Path(e.baseline).resolve() == Path(config.run.dir).resolve():
        raise BadConfig(
            f"evaluate.baseline={e.baseline} is the run.dir of this evaluation", fix="choose another run.dir"
        )
    names = [Path(e.answers).stem] if e.answers is not None else list(e.sets) or [config.run.name]
    budgets: list[int | None] = [*e.max_pixels] if e.answers is None else []
    for name in names:
        for max_pixels in budgets or [None]:
            baseline_scores(e.baseline, arm_name(name, max_pixels))


def read_published(path: str) -> PublishedFigures:
    """`published.read`, and the scores that the figures name. MissingFile, BadConfig, BadInput."""
    figures = published.read(path)
    for figure in figures.figures:
        if figure.scores is not None:
            read_scores(Path(figure.scores))
    return figures


def compare_with_published(path: str, folder: Path, summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`compare_published` of the evaluation in ``folder`` with the figures in the file at ``path``."""

    def pair(figure: PublishedFigure, name: str) -> dict[str, Any] | None:
        theirs = str(figure.scores)
        return _compare_shared(
            read_scores(folder / f"scores-{name}.jsonl"), read_scores(Path(theirs)), name, theirs
        )

    return compare_published(read_published(path), summaries, pair)

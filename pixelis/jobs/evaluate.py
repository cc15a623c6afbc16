"""Evaluate a policy on held-out questions with complete episodes.

Prints accuracies with their 95 % intervals, of the whole and by category, the rate of pixel reasoning and the tool error rate;
writes evaluation.json, scores-NAME.jsonl (by question), trajectories-NAME.jsonl and report.html to run.dir. `evaluate.samples`
adds avg@k, pass@k and maj@k, `evaluate.seeds` the spread over sampling seeds, `evaluate.direct` the gain by operations on the
same questions, `evaluate.baseline` the difference to another evaluation, both with a paired test. `evaluate.sets` evaluates
several sets by name, `evaluate.max_pixels` each with several pixel budgets; `evaluate.clusters` shows which kinds of questions
are wrong most often; `evaluate.images` also saves the pictures that the policy saw, and `evaluate.outputs` writes the files of
other systems. Instead of a policy, `evaluate.api` evaluates any model behind an OpenAI-compatible address (url, model, key in an
environment variable), and `evaluate.answers` scores another model's answers from a file and writes NAME_with_score.json.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from pixelis.actors import error_clusters, evaluation_report, placement, report
from pixelis.actors.group_views import GroupViews
from pixelis.config import Config, from_command_line
from pixelis.datasets.labels import drop_labels
from pixelis.datasets.questions import read_questions, require_text
from pixelis.errors import BadInput, DataFailure
from pixelis.evaluation import foreign_answers, outputs, table
from pixelis.evaluation.capabilities import capabilities
from pixelis.evaluation.causes import error_causes
from pixelis.evaluation.clusters import require_questions
from pixelis.evaluation.metrics import correctness, summarise
from pixelis.evaluation.samples import breakdown, count_errors, question_rows, sample_metrics, seed_metrics
from pixelis.evaluation.statistics import compare
from pixelis.jobs.chat_agent import ChatAgent
from pixelis.jobs.chat_model import ChatModel
from pixelis.jobs.driver import driver, make_run_dir, run_folder
from pixelis.jobs.evaluation_inputs import answer_rows, arm_name, baseline_scores, check, check_baseline
from pixelis.jobs.evaluation_inputs import inputs as inputs
from pixelis.jobs.evaluation_inputs import needs as needs
from pixelis.jobs.watch import watch
from pixelis.records import Group, Question
from pixelis.rewards.extraction import answers_of
from pixelis.rewards.grader import Grader
from pixelis.rewards.services import Services, shared_services
from pixelis.telemetry import diagnosis, lineage
from pixelis.telemetry.events import EventLog
from pixelis.telemetry.html.episode import EpisodePage
from pixelis.telemetry.html.report import write_report
from pixelis.telemetry.progress import Progress


@dataclass
class Arm:
    """One evaluated policy: its summary and the groups with references to their views."""

    name: str
    summary: dict[str, Any]
    groups: list[Group]
    views: list[GroupViews]

    @property
    def correct(self) -> dict[str, float]:
        """Correctness by question."""
        return correctness(self.groups)


def measure(
    config: Config,
    actors: placement.Actors,
    name: str,
    version: int,
    *,
    operations: bool = True,
    source: str | None = None,
    samples: int = 1,
    seeds: Sequence[int] = (),
) -> Arm:
    """Evaluate policy ``version`` on ``source`` (default data.evaluate) with ``samples`` episodes per question and seed.

    The correctness of a question is the mean over its episodes.
    """
    source = source or config.data.evaluate
    coordinator, count = actors.coordinator, config.evaluate.questions
    truncated = False
    if not source.startswith("cards:"):  # `cards:` is endless
        on_labels = None if config.rewards.labelled else drop_labels
        total = sum(1 for _ in read_questions(source, limit=count and count + 1, epochs=1, on_labels=on_labels))
        truncated, count = 0 < count < total, min(total, count or total)
        require_questions(count, config.evaluate.clusters, source)

    request = {"samples": samples, "seeds": seeds}
    groups, views = watch(
        config,
        f"evaluate {name}",
        count * max(1, len(seeds)),
        lambda: ray.get(coordinator.evaluate.remote(source, count, version, operations, name, **request)),
        lambda: (ray.get(coordinator.progress.remote())["evaluated"].get(name, 0), {}),
        waiting="answering the first questions",
    )
    summary = summary_of(config, name, groups, shared_services(config.rewards), seeds, samples)
    arm = Arm(name, summary | ({"truncated": True} if truncated else {}), groups, views)
    EventLog(config.run.dir).write("evaluate", version=version, source=source, tools=operations, **arm.summary)
    return arm


def summary_of(
    config: Config, name: str, groups: Sequence[Group], services: Services, seeds: Sequence[int] = (), samples: int = 1
) -> dict[str, Any]:
    """The summary of scored groups, which have ``samples`` episodes of each seed in turn."""
    metrics = {**sample_metrics(groups, config.rewards, services), **seed_metrics(groups, seeds, samples)}
    answers = answers_of(groups, config.rewards, services)
    metrics |= {"answered": sum(answer is not None for answer in answers.values()), **count_errors(groups, answers)}
    if uses := capabilities(groups):
        metrics |= {"capabilities": uses, "error_causes": error_causes(groups)}
    return {"name": name, **summarise(groups), **breakdown(groups), **metrics}


def save(config: Config, folder: Path, arm: Arm) -> None:
    """Write ``trajectories-NAME.jsonl``, one group per line, and ``scores-NAME.jsonl``, one question per line.

    With ``evaluate.images`` also every view, below ``images-NAME``: the ``uri`` of an image in a trajectory is then its file,
    relative to ``folder``. With ``evaluate.outputs`` also the files of those systems.
    """
    if config.evaluate.images and arm.views:
        paths = ray.get(evaluation_report.save_images.remote(str(folder / f"images-{arm.name}"), arm.groups, arm.views))
        for trajectory in (trajectory for group in arm.groups for trajectory in group.trajectories):
            for image, path in zip(trajectory.images, paths[trajectory.id], strict=True):
                image.uri = str(Path(path).relative_to(folder))
    with (folder / f"trajectories-{arm.name}.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(group.model_dump_json() + "\n" for group in arm.groups)
    answers = answers_of(arm.groups, config.rewards, shared_services(config.rewards))
    with (folder / f"scores-{arm.name}.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in question_rows(arm.groups, answers))
    model = config.evaluate.api.model or config.policy.adapter or config.policy.model
    for system in config.evaluate.outputs:
        for name, text in outputs.files(system, arm.name, arm.groups, answers, model).items():
            path = folder / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(text, encoding="utf-8")


def compare_with(baseline: str, arm: Arm) -> dict[str, Any] | None:
    """The arm minus the scores of the same questions in another run.dir. MissingFile, BadInput."""
    other = baseline_scores(baseline, arm.name)
    if len(other.keys() & arm.correct.keys()) < 2:
        message = f"evaluate.baseline={baseline} shares no questions with {arm.name}"
        raise BadInput(message, fix="name the run.dir of an evaluation of the same sets")
    return compare(arm.correct, other)


def evaluate_sets(
    config: Config,
    folder: Path,
    max_pixels: int | None,
    previous: list[dict[str, Any]],
    actors: placement.Actors,
    version: int,
) -> list[dict[str, Any]]:
    """Evaluate a policy version on each set; returns ``previous`` and the new summaries.

    Saves the episodes and writes the report, which shows all of these summaries and episodes of the first new one.
    """
    sets = config.evaluate.sets or {config.run.name: config.data.evaluate}
    e, summaries, first, examples = config.evaluate, list(previous), None, dict[str, list[list[report.Chosen]]]()
    for name, source in sets.items():
        label = arm_name(name, max_pixels)
        request: dict[str, Any] = {"source": source, "samples": e.samples, "seeds": e.seeds}
        arm = measure(config, actors, label, version, operations=e.operations, **request)
        save(config, folder, arm)
        if e.clusters:
            arm.summary["clusters"] = clusters = error_clusters.find(config, actors.embedder, arm.groups, arm.views)
            examples[label] = evaluation_report.choose_wrong(clusters, arm.groups, arm.views)
        if e.direct:
            direct = measure(config, actors, f"{label}-direct", version, operations=False, **request)
            save(config, folder, direct)
            add_direct(arm, direct)
        if e.baseline is not None:
            arm.summary["baseline"] = compare_with(e.baseline, arm)
        summaries.append(arm.summary | ({} if max_pixels is None else {"set": name, "max_pixels": max_pixels}))
        first = first or arm
    assert first is not None
    episodes = evaluation_report.choose_with_causes(first.name, first.groups, first.views, e.trajectories)
    page = ray.get(report.write.remote(config, str(folder), {"arms": summaries}, [], episodes, examples))
    print(f"report: {page}")
    return summaries


def evaluate_api(config: Config, folder: Path, max_pixels: int | None, previous: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As ``evaluate_sets``, of the model of ``evaluate.api``. No cluster is started unless it is offered operations."""
    config = _whole_texts(config)
    sets, e = config.evaluate.sets or {config.run.name: config.data.evaluate}, config.evaluate
    summaries, pages = list(previous), list[EpisodePage]()
    model, grader = ChatModel(config, folder, max_pixels), Grader(config.rewards, folder)
    agent: ChatAgent | None = None

    def answer(name: str, questions: Sequence[Question], operations: bool) -> Arm:
        total = len(questions) * e.samples * max(1, len(e.seeds))
        with Progress(f"evaluate {name}", total, enabled=config.telemetry.progress) as progress:
            request = (questions, e.samples, e.seeds, progress.update)
            groups = model.groups(*request) if agent is None else agent.groups(*request, operations)
        arm = graded(config, grader, name, groups, e.seeds, e.samples)
        save(config, folder, arm)
        return arm

    try:
        agent = ChatAgent(config, model) if e.api.operations else None
        for name, source in sets.items():
            label = arm_name(name, max_pixels)
            rows = read_questions(source, limit=e.questions and e.questions + 1, epochs=1)
            questions = [require_text(question, source) for question in rows]
            truncated = 0 < e.questions < len(questions) and not source.startswith("cards:")
            questions = questions[: e.questions or None]
            arm = answer(label, questions, operations=True)
            arm.summary |= {"truncated": True} if truncated else {}
            if e.direct:
                add_direct(arm, answer(f"{label}-direct", questions, operations=False))
            if e.baseline is not None:
                arm.summary["baseline"] = compare_with(e.baseline, arm)
            summaries.append(arm.summary | ({} if max_pixels is None else {"set": name, "max_pixels": max_pixels}))
            for title, group, _ in evaluation_report.choose_with_causes(
                label, arm.groups, [None] * len(arm.groups), 0 if pages else e.trajectories
            ):
                trajectory, pictures = group.trajectories[0], dict[str, Any]()
                for media in group.question.media:
                    pictures |= report.load_pictures(media, trajectory, config.toolbox)
                pages.append(EpisodePage(question=group.question, trajectory=trajectory, pictures=pictures, title=title))
    finally:
        model.close()
        grader.close()
    print(f"report: {write_report(folder, {'arms': summaries}, [], pages)}")
    return summaries


def _whole_texts(config: Config) -> Config:
    """For models that need not know our tags: the whole text may be the answer, unless ``rewards.extractor`` is set."""
    if config.rewards.extractor != "dialect":
        return config
    return config.model_copy(update={"rewards": config.rewards.model_copy(update={"extractor": "whole"})})


def graded(config: Config, grader: Grader, name: str, groups: list[Group], seeds: Sequence[int] = (), samples: int = 1) -> Arm:
    """The scored episodes of a model that is no policy of ours."""
    with ThreadPoolExecutor(4) as pool:
        scored = list(pool.map(grader.score, groups))
    return Arm(name, summary_of(config, name, scored, grader.services, seeds, samples), scored, [])


def add_direct(arm: Arm, direct: Arm) -> None:
    """Add the arm without operations to the summary of the one with them, and their difference in pairs."""
    arm.summary |= {"direct": direct.summary, "operations_gain": compare(arm.correct, direct.correct)}


def mean_accuracy(summaries: list[dict[str, Any]]) -> float | None:
    """Mean accuracy over the sets that have one."""
    accuracies = [summary["accuracy"] for summary in summaries if summary["accuracy"] is not None]
    return statistics.fmean(accuracies) if accuracies else None


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
        answers = answers_of(arm.groups, config.rewards, grader.services)
    finally:
        grader.close()
    output = folder / f"{path.stem}_with_score.json"
    output.write_text(
        json.dumps(foreign_answers.with_scores(rows, arm.groups, answers), indent=2, ensure_ascii=False), encoding="utf-8"
    )
    save(config, folder, arm)
    if config.evaluate.baseline is not None:
        arm.summary["baseline"] = compare_with(config.evaluate.baseline, arm)
    return arm.summary


def show(summary: dict[str, Any]) -> None:
    """Print a summary; DataFailure if no episode was scored."""
    if summary["accuracy"] is None:
        causes = ", ".join(f"{cause} x{count}" for cause, count in summary["unscored"].items())
        raise DataFailure(f"{summary['name']}: no episode could be scored ({causes})", fix="give the questions answers")
    print("\n".join(table.lines(summary)))
    if problem := diagnosis.of_evaluation(summary):
        print(f"warning: {problem}", file=sys.stderr, flush=True)


def run(config: Config, actors: placement.Actors | None = None, version: int = 0) -> None:
    """Evaluate on every set with every pixel budget; writes all results to run.dir and prints the summaries.

    actors: those of a training run, to evaluate its policy ``version`` without `evaluate.max_pixels`; by default actors are
    placed for `policy.adapter`.
    """
    check_baseline(config)
    e, summaries = config.evaluate, list[dict[str, Any]]()
    budgets: list[int | None] = list(dict.fromkeys(e.max_pixels)) or [None]
    with run_folder(config, held_out=list(config.held_out.values()), has_policy=e.api.url is None) as folder:
        for max_pixels in budgets:
            dialogue = config.dialogue if max_pixels is None else config.dialogue.with_max_pixels(max_pixels)
            arm_config = config.model_copy(update={"dialogue": dialogue})
            if e.api.url is not None:
                summaries = evaluate_api(arm_config, folder, max_pixels, summaries)
            elif actors is not None:
                summaries = evaluate_sets(arm_config, folder, max_pixels, summaries, actors, version)
            else:
                with placement.placed(arm_config, learner=False, initial=config.policy.adapter) as own:
                    summaries = evaluate_sets(arm_config, folder, max_pixels, summaries, own, 0)
        result: dict[str, Any] = summaries[0]
        if e.max_pixels:
            means = {str(n): mean_accuracy([s for s in summaries if s["max_pixels"] == n]) for n in budgets}
            result = {"sets": summaries, "mean_by_max_pixels": means}
        elif e.sets:
            result = {"sets": summaries, "mean": mean_accuracy(summaries)}
        (folder / "evaluation.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
        lineage.record_in_run(folder / "evaluation.json", "evaluation")
        for summary in summaries:
            show(summary)
        if e.sets and not e.max_pixels:
            print(f"mean over {len(summaries)} sets {result['mean']:.3f}")
        for n, mean in result.get("mean_by_max_pixels", {}).items():
            print(f"{n} pixels: accuracy {mean:.3f}")


def main() -> None:
    """Entry point of `python -m pixelis.jobs.evaluate`."""
    config = from_command_line(__doc__, "evaluate", default="configs/nano/evaluate.yaml", check=check)
    with driver("evaluate"):
        if config.evaluate.answers is None:
            run(config)
            return
        check_baseline(config)
        folder = make_run_dir(config)
        summary = score_answers(config, folder)
        (folder / "evaluation.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
        show(summary)


if __name__ == "__main__":
    main()

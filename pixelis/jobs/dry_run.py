"""Checks of `--dry-run`: every input file of a job, and the configuration against the model.

The result is printed on standard error. Nothing is started and no weights are read.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pixelis.config import Config, PolicyConfig
from pixelis.errors import BadConfig, BadInput, MissingFile, PixelisError

if TYPE_CHECKING:
    from pixelis.datasets.bad_rows import BadRow
    from pixelis.datasets.demonstrations import Player
    from pixelis.policy.estimate import Job, Prompt
    from pixelis.records import Question

PROMPTS = 256
"""Number of questions read to estimate the longest prompt."""
PROBE_ROWS = 1000
"""Number of demonstrations checked."""
ESTIMATED: dict[str, Job] = {
    "rft": "rft",
    "ttrl": "rft",
    "sft": "sft",
    "serve": "serve",
    "evaluate": "evaluate",
    "answer": "evaluate",
}
"""Job -> the kind of job that its memory estimate is for."""


def checks(job: str) -> Callable[[Config], None]:
    """The check of a job for `config.from_command_line`."""
    return functools.partial(check, job=job)


def check(config: Config, job: str) -> None:
    """Check the configuration and the inputs of ``job``. Raises BadConfig for a contradiction, and as `check_inputs`."""
    from pixelis.dialogue.dialects import offered
    from pixelis.operations import select
    from pixelis.policy import estimate

    print(
        f"operations offered in the dialect {config.dialogue.dialect}: "
        f"{', '.join(operation.name for operation in offered(config)) or 'none'}",
        file=sys.stderr,
    )
    own = [name for name in config.toolbox.operations if ":" in name]
    for name, operation in zip(own, select(own), strict=True):
        operation.ready(config.toolbox)
        print(f"  ok     toolbox.operations: {name} is {operation.name}", file=sys.stderr)
    if job == "evaluate" and config.evaluate.answers is not None:
        pass  # no model is asked
    elif job == "evaluate" and config.evaluate.api.url is not None:
        from pixelis.rewards.llm_client import LlmClient

        LlmClient(config.evaluate.api, "evaluate.api").close()
    elif job in ESTIMATED:
        from pixelis.jobs import plan

        findings = estimate.check(config, ESTIMATED[job], prompts(config) if ESTIMATED[job] == "rft" else [])
        findings += plan.check(config, job)
        if job == "evaluate":
            for max_pixels in config.evaluate.max_pixels:
                swept = config.model_copy(update={"dialogue": config.dialogue.with_max_pixels(max_pixels)})
                swept_findings = [f for f in estimate.check(swept, "evaluate", []) if f.level == "error"]
                findings += [replace(f, text=f"evaluate.max_pixels {max_pixels}: {f.text}") for f in swept_findings]
        print(f"checks of {job} with {config.policy.model}:\n{estimate.table(findings)}", file=sys.stderr)
        if errors := [finding.text for finding in findings if finding.level == "error"]:
            raise BadConfig("; ".join(errors), fix="change these keys")
    check_inputs(config, job)


def check_inputs(config: Config, job: str) -> None:
    """Open every input of ``job``. Raises one error that names the keys of all inputs that cannot be read."""
    problems: list[tuple[str, PixelisError]] = []
    for key, value, read in inputs(config, job):
        try:
            read(value)
        except PixelisError as error:
            problems.append((f"{key}={value}", error))
        else:
            print(f"  ok     {key}={value}", file=sys.stderr)
    if not problems:
        return
    lines = [error.message if error.message.startswith(name) else f"{name}: {error.message}" for name, error in problems]
    text = "\n".join(line + (f" ({e.fix})" if e.fix else "") for line, (_, e) in zip(lines, problems, strict=True))
    kind = next((k for k in (BadConfig, MissingFile) if isinstance(problems[0][1], k)), BadInput)
    raise kind(text, fix=f"correct {' and '.join(name.partition('=')[0] for name, _ in problems)}")


def inputs(config: Config, job: str) -> Iterator[tuple[str, str, Callable[[str], object]]]:
    """Key, value and reading function of every input of ``job``."""
    from pixelis.policy.ranks import read as read_ranks

    policy = config.policy
    if _has_policy(config, job):
        yield "policy.model", policy.model, _model
        if policy.adapter:
            yield "policy.adapter", policy.adapter, functools.partial(_adapter, policy, job in ("rft", "ttrl", "sft"))
        if policy.lora.ranks:
            yield "policy.lora.ranks", policy.lora.ranks, read_ranks
    if config.learner.deepspeed and job in ("rft", "ttrl", "sft", "serve"):
        yield "learner.deepspeed", config.learner.deepspeed, _json
    demonstrations = functools.partial(_demonstrations, config, job)
    read = _questions_without_judge if job in ESTIMATED and not config.rewards.judge.url else _questions
    held_out: Callable[[str], object] = functools.partial(read, config, job, None)
    if job == "evaluate" and config.evaluate.clusters:
        held_out = functools.partial(_enough_questions, config, held_out)
    if job == "answer" and config.data.evaluate:
        yield "data.evaluate", config.data.evaluate, functools.partial(_first_question, config)
    for key, source in _questions_of(config, job):
        yield key, source, functools.partial(read, config, job, config.data.max_bad_rows)
    for key, source in _held_out_of(config, job):
        yield key, source, held_out
    if job == "evaluate":
        yield from _beside_questions(config)
    if job == "serve" and config.evolution.enabled and config.evolution.canary.enabled:
        yield "evolution.canary.questions", config.evolution.canary.questions, functools.partial(_canary, config)
    if job == "sft":
        yield "data.demonstrations", config.data.demonstrations, demonstrations
        if config.sft.evaluate_every:
            yield "sft.validation", config.sft.validation, demonstrations
    if job == "refine":
        yield "data.demonstrations", config.data.demonstrations, functools.partial(_refinable, config)
        if config.refinement.online.source:
            yield "refinement.online.source", config.refinement.online.source, _experiences


def _questions_of(config: Config, job: str) -> Iterator[tuple[str, str]]:
    """Key and value of the sources of questions of ``job``."""
    if job in ("rft", "ttrl"):
        yield "data.train", config.data.train
    if job == "synthesize":
        from pixelis.datasets.synthesis.quota_scheduler import quotas

        synthesis = config.synthesis
        for name in sorted({quota.source for quota in quotas(synthesis)}):
            yield f"synthesis.datasources.{name}.path", synthesis.datasources[name].path
        if synthesis.method == "imitation" and synthesis.imitation.demonstrations:
            yield "synthesis.imitation.demonstrations", synthesis.imitation.demonstrations


def _held_out_of(config: Config, job: str) -> Iterator[tuple[str, str]]:
    """Key and value of the sources of held-out questions of ``job``, of which no row may be bad."""
    during_sft = bool(config.sft.evaluate_every and config.sft.evaluate_episodes)
    during_rft = bool(config.rft.evaluate_every or config.rft.evaluate_first)
    if job == "evaluate" or (job == "rft" and during_rft) or (job == "sft" and during_sft):
        only = job == "evaluate" and config.evaluate.answers is not None  # of the questions that were answered
        for name, source in ({"": config.data.evaluate} if only else config.held_out).items():
            yield f"evaluate.sets.{name}" if name else "data.evaluate", source
    if job == "refine":
        for source in config.refinement.holdout.sources:
            yield "refinement.holdout.sources", source


def _beside_questions(config: Config) -> Iterator[tuple[str, str, Callable[[str], object]]]:
    """Key, value and reading function of the inputs of an evaluation beside its questions."""
    from pixelis.jobs.evaluation_inputs import answer_rows, check_baseline

    e = config.evaluate
    if e.answers is not None:
        yield "evaluate.answers", e.answers, lambda path: answer_rows(Path(path))
    if e.baseline is not None:
        yield "evaluate.baseline", e.baseline, lambda _: check_baseline(config)


def _model(name: str) -> None:
    from pixelis.dialogue.spec import ModelSpec
    from pixelis.policy.model_path import resolve

    ModelSpec.load(resolve(name))


def _adapter(policy: PolicyConfig, learns: bool, folder: str) -> None:
    """Check an adapter and, if it is LoRA, whether it fits the model, and in a job that ``learns`` the configuration."""
    from pixelis.policy.adapters import check_adapter, load_adapter
    from pixelis.policy.architecture import Architecture
    from pixelis.policy.export import BaseFile
    from pixelis.policy.model_path import fingerprint, resolve

    adapter, base = load_adapter(folder, lazily=True), resolve(policy.model)
    if adapter.kind == "lora" and not policy.full:
        BaseFile(base).updates(adapter)
        if learns:
            architecture, shapes = Architecture(policy.model), dict[str, tuple[int, ...]]()
            layers = architecture.shapes(policy.lora.targets, policy.lora.vision_tower)
            for name, rank in architecture.ranks(policy.lora).items():
                shapes |= {f"{name}.A": (rank, layers[name][1]), f"{name}.B": (layers[name][0], rank)}
            check_adapter(adapter, policy, fingerprint(base), shapes)


def _has_policy(config: Config, job: str) -> bool:
    return job != "evaluate" or (config.evaluate.api.url is None and config.evaluate.answers is None)


def _player(config: Config, job: str) -> Player | None:
    """Shows rows to the model of a job; None without one, or if it cannot be loaded, which the check of ``policy.model`` says."""
    from pixelis.datasets.demonstrations import Player
    from pixelis.policy.model_path import resolve

    with contextlib.suppress(PixelisError):
        return Player(config, str(resolve(config.policy.model))) if job in ESTIMATED and _has_policy(config, job) else None
    return None


def _questions(config: Config, job: str, max_bad_rows: float | None, source: str) -> Iterator[Question]:
    """The questions of a source; reads the first, and shows ``data.probe_rows``. ``max_bad_rows``: None for a held-out set."""
    from pixelis.datasets.labels import drop_labels
    from pixelis.datasets.questions import BadRowBudget, read_questions

    on_labels = None if config.rewards.labelled else drop_labels
    rows = read_questions(source, seed=0, epochs=1, max_bad_rows=max_bad_rows, shuffle_rows=PROBE_ROWS, on_labels=on_labels)
    first = [next(rows)]
    if not source.startswith("cards:") and (player := _player(config, job)) is not None:
        first += itertools.islice(rows, max(0, config.data.probe_rows - 1))
        # A share of a few rows is less than one.
        limit = max(1.0, max_bad_rows * len(first)) if max_bad_rows and max_bad_rows < 1 else max_bad_rows
        budget = BadRowBudget(source, limit, _note if max_bad_rows else None)
        for question in first[: config.data.probe_rows]:
            budget.add(player.problem(question, source))
        budget.check()
    return itertools.chain(first, rows)


def _note(row: BadRow) -> None:
    print(f"  note   {row}", file=sys.stderr)


def _canary(config: Config, _: str) -> None:
    from pixelis.actors.canary import canary_questions

    canary_questions(config.evolution.canary)


def _first_question(config: Config, source: str) -> None:
    from pixelis.datasets.labels import drop_labels
    from pixelis.datasets.questions import read_questions

    if next(read_questions(source, epochs=1, max_bad_rows=config.data.max_bad_rows, on_labels=drop_labels), None) is None:
        raise BadInput("has no questions", fix="see docs/data.md for the rows")


def _questions_without_judge(config: Config, job: str, max_bad_rows: float | None, source: str) -> None:
    from pixelis.rewards.scorers import JUDGED

    probed = itertools.islice(_questions(config, job, max_bad_rows, source), PROMPTS + 1)
    if judged := {config.rewards.scorer_of(q.task, q.scorer) for q in probed} & JUDGED:
        raise BadConfig(
            f"has questions with the scorer {min(judged)}, which needs a judge",
            fix="set rewards.judge.url and rewards.judge.model, or another rewards.scorer",
        )


def _enough_questions(config: Config, read: Callable[[str], object], source: str) -> None:
    """Read a source of an evaluation, whose clusters need some of its questions."""
    from pixelis.datasets.labels import drop_labels
    from pixelis.datasets.questions import read_questions
    from pixelis.evaluation.clusters import require_questions

    read(source)
    clusters, on_labels = config.evaluate.clusters, None if config.rewards.labelled else drop_labels
    count = sum(1 for _ in read_questions(source, limit=2 * clusters, epochs=1, on_labels=on_labels))
    require_questions(count, clusters, source)


def _demonstrations(config: Config, job: str, source: str) -> None:
    from pixelis.datasets.demonstration_stream import demonstrations

    if not sum(
        1
        for _ in itertools.islice(
            demonstrations(config, source, 1, _player(config, job), _note if config.data.max_bad_rows else None), PROBE_ROWS
        )
    ):
        raise BadInput("has no demonstrations", fix="see docs/data.md for the row format")


def _refinable(config: Config, source: str) -> None:
    from pixelis.datasets.refinement.pipeline import records

    if next(iter(records(config)), None) is None:
        raise BadInput("holds no row", fix="see docs/data.md for the rows")


def _experiences(source: str) -> None:
    from pixelis.datasets.refinement.sets import read_experiences

    read_experiences(source)


def _json(path: str) -> None:
    try:
        json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MissingFile(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadConfig(f"is not JSON: {error}", fix="correct the file") from None


def prompts(config: Config) -> list[Prompt]:
    """Sizes of the prompts of the first questions: tokens of the text with its system prompt, pictures and clips.

    Without readable questions, the size of an empty one with a picture. Empty without a tokenizer.
    """
    from pixelis.datasets.questions import read_questions
    from pixelis.dialogue.render import Renderer
    from pixelis.dialogue.spec import ModelSpec, load_tokenizer
    from pixelis.operations import select
    from pixelis.operations.environment import select_environments
    from pixelis.policy.model_path import resolve
    from pixelis.records import Question

    try:
        tokenizer = load_tokenizer(folder := resolve(config.policy.model))
        environments = select_environments(config.toolbox.environments)
        renderer = Renderer(
            tokenizer, ModelSpec.load(folder, tokenizer), config.dialogue, select(config.toolbox.operations), environments
        )
    except PixelisError:  # reported by `check_inputs`
        return []
    try:
        data = config.data
        rows = read_questions(data.train, limit=data.limit, epochs=1, max_bad_rows=data.max_bad_rows)
        questions = list(itertools.islice(rows, PROMPTS))
    except PixelisError:
        questions = [Question(id="none", question="")]
    sizes: list[Prompt] = []
    for question in questions:
        kinds = [media.kind for media in question.media] or ["image"]
        tokens = sum(len(turn.tokens) for turn in renderer.prompt(question, []))
        sizes.append({"text": tokens, "images": kinds.count("image"), "clips": kinds.count("video")})
    return sizes

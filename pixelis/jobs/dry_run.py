"""Shared parts of the jobs' ``check`` for `--dry-run`: print what a job needs, and read every input.

Everything is printed on standard error. Nothing is started and no weights are read.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pixelis import hub
from pixelis.actors.reservations import Need
from pixelis.config import Config
from pixelis.config.teacher import ADDRESS, STUDENT, VERSION
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.labels import drop_labels
from pixelis.datasets.questions import BadRowBudget, read_questions
from pixelis.dialogue.dialects import offered
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadConfig, BadInput, MissingFile, PixelisError
from pixelis.families.spec import load_spec, load_tokenizer, model_family
from pixelis.operations import select
from pixelis.operations.environment import select_environments
from pixelis.policy import ranks
from pixelis.policy.adapters import check_adapter, load_adapter
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.records import Question
from pixelis.rewards.scorers import JUDGED

if TYPE_CHECKING:  # it imports torch, which the driver of a run does without
    from pixelis.policy.estimate import Finding, Job, Prompt

PROMPTS = 256
"""Number of questions read to estimate the longest prompt."""
PROBE_ROWS = 1000
"""Window in which the questions are shuffled: errors near the beginning of a source show."""


class Input(NamedTuple):
    """An input of a job: its key, its value, and a function that reads it and raises what is wrong."""

    key: str
    value: str
    read: Callable[[str], object]


def check(job: str, config: Config, inputs: Iterable[Input], findings: Sequence[Finding] = ()) -> None:
    """Print what a job offers and needs, and read its inputs. Raises BadConfig and what an input raises."""
    from pixelis.policy import estimate

    names = ", ".join(operation.name for operation in offered(config))
    print(f"operations offered in the dialect {config.dialogue.dialect}: {names or 'none'}", file=sys.stderr)
    own = [name for name in config.toolbox.operations if ":" in name]
    for name, operation in zip(own, select(own), strict=True):
        operation.ready(config.toolbox)
        print(f"  ok     toolbox.operations: {name} is {operation.name}", file=sys.stderr)
    for name, environment in select_environments(config.toolbox).items():
        actions = ", ".join(action.name for action in environment.actions)
        print(f"  ok     toolbox.environments: {name} offers {actions}", file=sys.stderr)
    if findings:
        print(f"checks of {job} with {config.policy.model}:\n{estimate.table(findings)}", file=sys.stderr)
    if errors := [finding.text for finding in findings if finding.level == "error"]:
        raise BadConfig("; ".join(errors), fix="change these keys")
    models = {key: name for key, name in config.hub_models.items() if key != "policy.model"}
    others = (Input(key, name, functools.partial(_fetch, key)) for key, name in models.items())
    check_inputs(itertools.chain(inputs, others))


@hub.without_weights()
def findings(
    config: Config, job: Job, needs: Sequence[Need], prompts: Sequence[Prompt] = ()
) -> list[Finding]:
    """Estimates of memory and disk, and the placement of the needs."""
    from pixelis.jobs import plan
    from pixelis.policy import estimate

    return [*estimate.check(config, job, prompts), *plan.check(config, needs)]


@hub.without_weights()
def check_inputs(inputs: Iterable[Input]) -> None:
    """Read every input. Raises one error that names the keys of all that cannot be read."""
    problems: list[tuple[Input, PixelisError]] = []
    for item in inputs:
        try:
            item.read(item.value)
        except PixelisError as error:
            problems.append((item, error))
        else:
            print(f"  ok     {item.key}={item.value}", file=sys.stderr)
    if not problems:
        return
    lines = []
    for item, problem in problems:
        name = f"{item.key}={item.value}"
        line = problem.message if problem.message.startswith(name) else f"{name}: {problem.message}"
        lines.append(line + (f" ({problem.fix})" if problem.fix else ""))
    first = problems[0][1]
    kind = next((kind for kind in (BadConfig, MissingFile) if isinstance(first, kind)), BadInput)
    raise kind("\n".join(lines), fix=f"correct {' and '.join(item.key for item, _ in problems)}")


def policy_inputs(config: Config, trains: bool = False) -> Iterator[Input]:
    """The model with its adapter and ranks; for training the DeepSpeed file too."""
    policy = config.policy
    yield Input("policy.model", policy.model, functools.partial(_read_model, policy.family))
    if policy.quantization != "none":
        yield Input("policy.quantization", policy.quantization, _read_quantization)
    if policy.adapter:
        yield Input("policy.adapter", policy.adapter, functools.partial(_read_adapter, config, trains))
    if policy.lora.ranks:
        yield Input("policy.lora.ranks", policy.lora.ranks, ranks.read)
    if trains:
        yield from deepspeed_inputs(config)


def _read_model(family: str | None, name: str) -> None:
    load_spec(resolve(name), family=family)
    _fetch("policy.model", name)


def _fetch(key: str, name: str) -> None:
    """Fetch a model's settings, and print the size of the weights that a run will fetch."""
    if size := hub.remaining_bytes(name):
        print(f"  note   {key}: {size / 1e9:.2f} GB of weights will be fetched", file=sys.stderr)


def _read_quantization(_: str) -> None:
    from pixelis.policy import quantization

    quantization.check_installed()


def teacher_inputs(config: Config) -> Iterator[Input]:
    """The teachers of `rft.teacher`; servers are asked to score a few tokens."""
    for name in config.rft.teacher.names:
        yield Input("rft.teacher", name, functools.partial(_read_teacher, config))


def _read_teacher(config: Config, name: str) -> None:
    from pixelis.engines.teacher_server import TeacherServer

    if ADDRESS.fullmatch(name):
        TeacherServer(config, name).client.close()
    elif name in config.rft.teacher.models:
        load_spec(resolve(name), family=config.policy.family)
    elif name != STUDENT and not VERSION.fullmatch(name):
        load_adapter(name, lazily=True)


def deepspeed_inputs(config: Config) -> Iterator[Input]:
    if config.learner.deepspeed:
        yield Input("learner.deepspeed", config.learner.deepspeed, _read_json)


def _read_adapter(config: Config, trains: bool, folder: str) -> None:
    """Check whether an adapter fits the model, and for training the keys of `policy.lora`."""
    from pixelis.policy.architecture import Architecture
    from pixelis.policy.export import BaseFile

    policy = config.policy
    adapter, base = load_adapter(folder, lazily=True), resolve(policy.model)
    if adapter.kind != "lora" or policy.full:
        return
    if not hub.is_complete(base):
        print("  note   policy.adapter is compared with the model when its weights are here", file=sys.stderr)
        return
    BaseFile(base, model_family(base, policy.family)).updates(adapter)
    if trains:
        architecture, shapes = Architecture(policy), dict[str, tuple[int, ...]]()
        layers = architecture.shapes(policy.lora.targets, policy.lora.vision_tower)
        for name, rank in architecture.ranks(policy.lora).items():
            shapes |= {f"{name}.A": (rank, layers[name][1]), f"{name}.B": (layers[name][0], rank)}
        check_adapter(adapter, policy, fingerprint(base), shapes)


def _read_json(path: str) -> None:
    try:
        json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MissingFile(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadConfig(f"is not JSON: {error}", fix="correct the file") from None


def question_input(
    config: Config, key: str, source: str, *, held_out: bool = False, player: Player | None = None
) -> Input:
    """A source of questions, the first of which ``player`` shows to the model."""
    limit = None if held_out else config.data.max_bad_rows

    def read(source: str) -> None:
        questions = itertools.islice(_probed(config, limit, source, player), PROMPTS + 1)
        if config.rewards.judge.url:
            next(questions)
        elif judged := {config.rewards.scorer_of(q.task, q.scorer) for q in questions} & JUDGED:
            raise BadConfig(
                f"has questions with the scorer {min(judged)}, which needs a judge",
                fix="set rewards.judge.url and rewards.judge.model, or another rewards.scorer",
            )

    return Input(key, source, read)


def held_out_inputs(
    config: Config, sources: Mapping[str, str], player: Player | None = None
) -> Iterator[Input]:
    for name, source in sources.items():
        key = f"evaluate.sets.{name}" if name else "data.evaluate"
        yield question_input(config, key, source, held_out=True, player=player)


def read_first(config: Config, source: str, held_out: bool = False) -> None:
    next(_probed(config, None if held_out else config.data.max_bad_rows, source))


def _probed(
    config: Config, max_bad_rows: float | None, source: str, player: Player | None = None
) -> Iterator[Question]:
    """The questions of a source; the first `data.probe_rows` were shown to the model."""
    on_labels = None if config.labelled else drop_labels
    # Packaged pictures are drawn as they are read: a window of them takes minutes, and none is bad.
    window = 1 if source.startswith("packaged:") else PROBE_ROWS
    rows = read_questions(
        source, seed=0, epochs=1, max_bad_rows=max_bad_rows, shuffle_rows=window, on_labels=on_labels
    )
    first = [next(rows)]
    if player is not None and not source.startswith("cards:"):
        first += itertools.islice(rows, max(0, config.data.probe_rows - 1))
        # A share of a few rows is less than one.
        limit = max(1.0, max_bad_rows * len(first)) if max_bad_rows and max_bad_rows < 1 else max_bad_rows
        budget = BadRowBudget(source, limit, note if max_bad_rows else None)
        for question in first[: config.data.probe_rows]:
            budget.add(player.problem(question, source))
        budget.check()
    return itertools.chain(first, rows)


def player_of(config: Config) -> Player | None:
    """Shows rows to the model; None if it cannot be loaded, which the check of ``policy.model`` reports."""
    try:
        return Player(config, str(resolve(config.policy.model)))
    except PixelisError:
        return None


def note(row: BadRow) -> None:
    print(f"  note   {row}", file=sys.stderr)


@hub.without_weights()
def prompts(config: Config) -> list[Prompt]:
    """Sizes of the prompts of the first questions; without questions, of an empty one with a picture."""
    try:
        tokenizer = load_tokenizer(folder := resolve(config.policy.model))
        renderer = Renderer(
            tokenizer,
            load_spec(folder, tokenizer, config.policy.family),
            config.dialogue,
            select(config.toolbox.operations),
            select_environments(config.toolbox),
        )
    except PixelisError:  # reported by `check_inputs`
        return []
    data = config.data
    try:
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

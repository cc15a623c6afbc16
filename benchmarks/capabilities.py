"""How well do policies use the operations? Between a policy that never looks and an oracle that always does.

    python -m benchmarks.capabilities --policy rft=runs/quickstart/rft/checkpoints/step_00000040 [--policy
    base=] [--count 100]
        [--recipe configs/nano/evaluate.yaml] [--dir runs/capabilities] [key=value ...]

Writes COUNT questions for each of six capabilities, about media with exact truth that no training uses: cards
in pictures and in clips (`zoom_in`, `select_frames`), drawings, coins and photographs (`segment_object_at`,
`get_properties`), words over photographs (`read_text`), and objects that move over footage (`select_frames`,
`track_object`). Each question names the calls that it needs in `meta.expected_calls`, and can be answered by
them: the oracle plays them. Then every policy answers all of them with complete episodes, by the
configuration of `pixelis evaluate`, whose table has the same scores for any questions like these: `pixelis
evaluate CONFIG data.evaluate=runs/capabilities/questions.jsonl`. `base=` is the model without an adapter.
Questions that DIR has already are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import keep_arguments, machine, parse_args
from pixelis.actors import placement
from pixelis.config import Config, absolute, load
from pixelis.datasets import card_questions, packaged
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.synthesis.evidence import with_expected_calls
from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.tasks import TASKS
from pixelis.errors import DataFailure
from pixelis.evaluation import table
from pixelis.jobs import evaluate, evaluation_arms
from pixelis.jobs.driver import driver, run_folder
from pixelis.policy.model_path import resolve
from pixelis.records import Demonstration, Group, Question, StopReason, Trajectory
from pixelis.rewards.grader import Grader

ROOM = (
    "dialogue.max_turns_test=8",
    "dialogue.max_turn_tokens=160",
    "dialogue.max_context=4096",
    "learner.row_tokens=4096",
    "dialogue.max_images=32",
    "dialogue.frames=1",
    "evaluate.questions=0",
)
"""Room for the longest of the expected episodes in the embedded model's dialogue, and one frame of a clip in
the prompt, so that others must be selected; `key=value` on the command line stands above these.
"""
TASKS_BY_CAPABILITY = {
    "segmenting": ("attributes", ("shapes", "coins", "photos")),
    "reading": ("targeted_ocr", ("text",)),
    "frames": ("frame_selection", ("clips",)),
    "tracking": ("spatio_temporal_tracking", ("clips",)),
}
BASE = "base="
SEVERAL_WAYS = {"begins", "farther"}
"""Forms of question that other frames answer as well as those of the demonstration."""
DETOURS = {"reading": "zoom_in", "tracking": "segment_object_at"}
"""Operations that demonstrations of a capability may call, but need not."""


def demonstrations(capability: str, count: int, folder: Path) -> Iterator[Demonstration]:
    """Demonstrations of a capability; their calls are what their question needs."""
    if capability in ("zooming", "cards in clips"):
        rows = card_questions.demonstration_rows(
            "test", count, 7, 0.0, clips=float(capability == "cards in clips")
        )
        yield from (Demonstration.model_validate({**row, "task": capability}) for row in rows)
        return
    name, sources = TASKS_BY_CAPABILITY[capability]
    executor, number = Executor(), 0
    streams = [
        packaged.read(f"packaged:{source}?split=test&count=100000&seed=7", folder / "media")
        for source in sources
    ]
    for attempt, question in enumerate(itertools.chain.from_iterable(zip(*streams, strict=False))):
        try:
            demonstration = TASKS[name].make(question, np.random.default_rng([7, attempt]), executor)
        except DataFailure:
            continue  # the annotations offer no question of this kind
        method = demonstration.provenance.method if demonstration.provenance else ""
        detour = any(step.op == DETOURS.get(capability) for step in demonstration.steps)
        if not detour and method.partition("/")[2] not in SEVERAL_WAYS:
            yield demonstration.model_copy(update={"id": f"{capability}-{attempt}", "task": capability})
            number += 1
        if number == count:
            return


def write_questions(config: Config, folder: Path, count: int) -> list[Group]:
    """Write the file of questions; the episodes of the oracle.

    A demonstration that the dialogue has no room for is left out.
    """
    player, oracle = Player(config, str(resolve(config.policy.model))), list[Group]()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "questions.jsonl").open("w", encoding="utf-8") as out:
        for capability in ("zooming", "cards in clips", *TASKS_BY_CAPABILITY):
            for demonstration in demonstrations(capability, count, folder):
                try:
                    trajectory, _ = player.play(demonstration)
                except DataFailure as failure:
                    print(f"left out: {failure.message}")
                    continue
                if demonstration.annotations is not None:
                    demonstration = with_expected_calls(demonstration)
                fields = {name: getattr(demonstration, name) for name in Question.model_fields}
                question = Question(**{**fields, "annotations": None})
                out.write(question.model_dump_json() + "\n")
                oracle.append(_group(question, trajectory))
    return oracle


def _group(question: Question, trajectory: Trajectory) -> Group:
    return Group(
        id=question.id,
        question=question,
        trajectories=[trajectory.model_copy(update={"group_id": question.id})],
    )


def rows(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The table in Markdown: a row for each score, a column for each policy."""
    yield f"| | {' | '.join(results)} |\n|---|{'---|' * len(results)}"
    first = next(iter(results.values()))["capabilities"]
    for op, part in first["operations"].items():
        names = [part["score"], *(name for name in ("cer", "hota", "idf1", "mota") if name in part)]
        parts = [summary["capabilities"]["operations"][op] for summary in results.values()]
        yield (
            f"| `{op}`: calls ({part['n']} expected) | {' | '.join(str(other['calls']) for other in parts)} |"
        )
        for name in names:
            cells = (
                _cell(other["mean"], other["ci95"]) if name == part["score"] else f"{other[name]:.3f}"
                for other in parts
            )
            yield f"| `{op}`: {table.SCORE_NAMES.get(name, name.upper())} | {' | '.join(cells)} |"
    all_of = [summary["capabilities"] for summary in results.values()]
    yield f"| expected operations in order | {' | '.join(_cell(**other['order']) for other in all_of)} |"
    yield (
        "| unnecessary calls by episode | "
        f"{' | '.join(format(other['unnecessary'], '.2f') for other in all_of)} |"
    )
    for task in next(iter(results.values()))["tasks"]:
        parts = [summary["tasks"][task] for summary in results.values()]
        yield (
            f"| accuracy: {task} ({parts[0]['n']}) | "
            f"{' | '.join(_cell(p['accuracy'], p['ci95']) for p in parts)} |"
        )


def _cell(mean: float, ci95: list[float]) -> str:
    return f"{mean:.3f} [{ci95[0]:.3f}, {ci95[1]:.3f}]"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME=ADAPTER",
        help="may be repeated; by default `base=`",
    )
    parser.add_argument("--count", type=int, default=100, help="questions of each capability")
    parser.add_argument(
        "--recipe", default="configs/nano/evaluate.yaml", help="configuration of the model and its dialogue"
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/capabilities"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the recipe")
    args = parse_args(parser, count=2)
    folder = args.dir.absolute()
    keep_arguments(folder, args, "policy")
    shared = [*ROOM, *args.overrides, f"data.evaluate={folder / 'questions.jsonl'}"]
    results = dict[str, dict[str, Any]]()
    with driver("capabilities"):
        config = absolute(load(args.recipe, [*shared, f"run.dir={folder}"]))
        played = folder / "trajectories-oracle.jsonl"
        if played.exists():
            oracle = [Group.model_validate_json(line) for line in played.read_bytes().splitlines()]
        else:
            oracle = write_questions(config, folder, args.count)
        silent = [
            Trajectory(question_id=group.question.id, stop_reason=StopReason.NO_ACTION) for group in oracle
        ]
        blind = [_group(group.question, trajectory) for group, trajectory in zip(oracle, silent, strict=True)]
        grader = Grader(config.rewards, folder)
        try:
            arms = [
                evaluation_arms.graded(config, grader, name, groups)
                for name, groups in (("never", blind), ("oracle", oracle))
            ]
        finally:
            grader.close()
        for arm in arms:
            evaluation_arms.save(config, folder, arm)
        results["never looks"] = arms[0].summary
        for entry in args.policy or [BASE]:
            name, _, adapter = entry.partition("=")
            own = [f"run.dir={folder / name}", *([f"policy.adapter={adapter}"] if adapter else [])]
            config = absolute(load(args.recipe, [*shared, *own]))
            with (
                run_folder(config) as run,
                placement.placed(config, learner=False, initial=config.policy.adapter) as actors,
            ):
                measured = evaluate.measure(config, actors, name, 0)
                evaluation_arms.save(config, run, measured)
            results[name] = measured.summary
        results["oracle"] = arms[1].summary
    (folder / "capabilities.json").write_text(json.dumps({"machine": machine(), **results}), encoding="utf-8")
    print("\n".join(rows(results)))
    print(
        json.dumps(
            {"machine": machine(), **{name: summary["capabilities"] for name, summary in results.items()}}
        )
    )


if __name__ == "__main__":
    main()

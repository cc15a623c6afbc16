"""Answer a file of questions about pictures and clips, and write the answers with their trajectories.

usage: pixelis answer FILE [CONFIG.yaml] [key=value ...] [--url URL] [--out OUT.jsonl] [--limit N]
       [--concurrency N] [--calibrate] [--dry-run]

FILE is any source of questions (docs/data.md); true answers in it are not read. serve.samples samples of each
question vote, with serve.sampling and up to dialogue.max_turns_test turns, on the generators of a job of its
own (policy.adapter names the checkpoint), or with --url at a running service, behind its callers, with the
key in PIXELIS_API_KEY; nothing is stored or learnt there. A line of OUT.jsonl (default: answers.jsonl in
run.dir) has id, question, answer, confidence, verdict, trajectory, policy_version and error: why a question
could not be answered. Repeating the command answers what is missing. --calibrate reads the true answers when
all questions are answered, shows accuracy by confidence, and prints the setting that makes confidence the
probability of a right answer. --dry-run checks FILE and the configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import filelock

from pixelis.actors import placement, reservations
from pixelis.actors.generator_router import GeneratorRouter, RolloutRequest, RouterTimeouts
from pixelis.config import Config, from_command_line
from pixelis.datasets.labels import Labels, OnLabels, drop_labels
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.session import BATCH_PRIORITY, SamplingParams
from pixelis.errors import BadConfig, BadInput, DataFailure
from pixelis.evaluation.calibration import Calibration, bins, calibration_error, fit
from pixelis.files import disk_failures, locked
from pixelis.jobs import dry_run
from pixelis.jobs.command import CommandParser, asks_for_help
from pixelis.jobs.driver import driver, run_folder
from pixelis.jobs.remote_agent import RemoteAgent
from pixelis.records import Question
from pixelis.rewards import vote
from pixelis.rewards.scorers import case_of, find_scorer
from pixelis.rewards.services import shared_services
from pixelis.serve.protocol.agent import without_tokens

DEFAULT = "configs/nano/evaluate.yaml"
REPORT_S = 10.0
"""Seconds between lines of progress."""
RESOURCES = {"workers", "cpus", "gpus", "timeout_s", "memory_bytes", "cache_bytes"}
"""Keys of `toolbox` that may change while a file is answered."""
Answerer = Callable[[Question], Awaitable[dict[str, Any]]]
"""Answers a question with the fields of a line; raises BadInput or DataFailure if it has no answer."""


def parse(words: list[str]) -> argparse.Namespace:
    """The options of the command; `rest` are the words of the configuration. Raises BadConfig."""
    parser = CommandParser("answer")
    parser.add_argument("source", metavar="FILE")
    parser.add_argument("--url")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--calibrate", action="store_true")
    options, rest = parser.parse_known_args(words)
    if any(number is not None and number < 1 for number in (options.limit, options.concurrency)):
        raise BadConfig("--limit and --concurrency are positive numbers", fix="pixelis answer --help")
    if options.calibrate and options.url is not None:
        raise BadConfig(
            "a running service applies its own calibration", fix="leave out --url, or --calibrate"
        )
    options.rest = [*rest, f"data.evaluate={options.source}"]
    return options


class AnswerFile:
    """The lines written so far, and new ones; a line that a crash cut off is removed.

    ``settings`` identify how the answers are made: BadInput for a file with answers made otherwise.
    """

    def __init__(self, file: BinaryIO, path: Path, settings: str):
        self.file, self.settings = file, settings
        self.failed = 0
        self.done = set[tuple[int, str]]()
        size = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                self.done.add((row["number"], row["id"]))
                same = row["settings"] == settings
            except (ValueError, KeyError, TypeError):
                raise BadInput(f"{path} has lines that are no answers", fix="choose another --out") from None
            if not same:
                raise BadInput(f"{path} has answers made with other settings", fix="choose another --out")
            size += len(line)
        file.truncate(size)
        file.seek(size)

    def add(self, number: int, question: Question, fields: dict[str, Any]) -> None:
        """Write a line, which is on disk when this returns."""
        head = {"number": number, "id": question.id, "settings": self.settings, "question": question.question}
        self.file.write(json.dumps({**head, **fields}, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.done.add((number, question.id))
        self.failed += fields.get("error") is not None


@contextmanager
def answer_file(path: Path, settings: str) -> Iterator[AnswerFile]:
    """Open or create the file of answers. BadConfig for a folder, BadInput if it is in use."""
    with ExitStack() as stack:
        stack.enter_context(disk_failures(path))
        try:
            stack.enter_context(locked(path.with_name(f".{path.name}.lock"), wait=False))
            path.touch()
            file = stack.enter_context(path.open("r+b"))
        except (IsADirectoryError, NotADirectoryError, FileExistsError):
            raise BadConfig(
                f"{path} is a folder, or below a file", fix="name another file by --out"
            ) from None
        except filelock.Timeout:
            raise BadInput(
                f"another process writes {path}", fix="wait for it, or choose another --out"
            ) from None
        yield AnswerFile(file, path, settings)


def questions_of(
    config: Config, limit: int | None, on_labels: OnLabels = drop_labels
) -> Iterator[tuple[int, Question]]:
    """The numbered questions of the file, without their true answers, which only ``on_labels`` gets."""
    source = config.data.evaluate
    if source.startswith("cards:") and not limit:
        raise BadConfig("cards: has no end", fix="add --limit N")
    return enumerate(
        read_questions(
            source,
            epochs=1,
            max_bad_rows=config.data.max_bad_rows,
            on_labels=on_labels,
            limit=limit or 0,
        )
    )


async def answer_all(
    questions: Iterator[tuple[int, Question]], out: AnswerFile, answer: Answerer, concurrency: int
) -> None:
    """Answer what ``out`` lacks, ``concurrency`` questions at a time. What is written before an error remains."""
    skipped, reported = len(out.done), time.monotonic()
    missing = (pair for pair in questions if (pair[0], pair[1].id) not in out.done)
    lock = asyncio.Lock()

    async def work() -> None:
        nonlocal reported
        while True:
            async with lock:
                pair = await asyncio.to_thread(next, missing, None)
            if pair is None:
                return
            number, question = pair
            started = time.monotonic()
            try:
                fields = await answer(question)
            except (BadInput, DataFailure) as error:
                fields = {"answer": None, "error": {"code": error.code, "message": error.message}}
            fields["seconds"] = round(time.monotonic() - started, 3)
            await asyncio.to_thread(out.add, number, question, fields)
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                show(f"{len(out.done)} questions, {out.failed} without an answer")

    await asyncio.gather(*(work() for _ in range(concurrency)))
    show(
        f"{len(out.done) - skipped} questions answered now, {skipped} before; {out.failed} without an answer"
    )


def show(text: str) -> None:
    print(f"[answer] {text}", file=sys.stderr, flush=True)


async def local_agent(config: Config, actors: placement.Actors) -> Answerer:
    router = GeneratorRouter(actors.generators, RouterTimeouts.of(config))
    await router.load(0)
    s, d = config.serve, config.dialogue
    sampling = SamplingParams(
        s.sampling.temperature, s.sampling.top_p, d.max_turn_tokens, config.run.seed, BATCH_PRIORITY
    )

    async def answer(question: Question) -> dict[str, Any]:
        request = RolloutRequest(
            question,
            f"answer-{question.id}",
            s.samples if sampling.temperature else 1,
            sampling,
            config.toolbox.has_tools and bool(question.media),
            d.max_turns_test,
            augmentations=s.augmentations,
            views=False,
        )
        group = (await router.rollout(request)).group
        verdict, winner = await asyncio.to_thread(vote.elect, question, group.trajectories, config)
        return {
            "answer": verdict.answer,
            "confidence": verdict.confidence,
            "verdict": verdict.model_dump(mode="json"),
            "trajectory": without_tokens(winner, {}).model_dump(mode="json"),
            "policy_version": group.policy_version,
            "error": None,
        }

    return answer


def settings_of(config: Config, url: str | None) -> str:
    """Identifies what determines the answers."""
    parts: dict[str, Any] = {"source": config.data.evaluate, "url": url}
    if url is None:
        parts["config"] = config.model_dump(
            mode="json",
            include={
                "policy": {"model", "adapter", "dtype"},
                "engine": {"name", "quantization", "model"},
                "serve": {"samples", "sampling", "augmentations"},
                "evolution": {"vote"},
                "rewards": {"scorer", "scorers"},
                "run": {"seed"},
                "dialogue": True,
                "toolbox": True,
            },
            exclude={"toolbox": RESOURCES},
        )
        parts["tasks"] = {task: of.scorer for task, of in config.rewards.tasks.items() if of.scorer}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def show_calibration(config: Config, limit: int | None, path: Path, configured: Calibration | None) -> None:
    """Print accuracy by confidence of the answers in ``path``, and the calibration fitted to them. BadInput."""
    confidences, right = correctness(config, limit, path)
    fitted, unseen = fit(confidences, right)
    print(f"{len(right)} answers, {sum(right) / len(right):.3f} of them right\n\nanswers  confidence  right")
    for part in bins(confidences, right):
        print(f"{part.answers:7}  {part.confidence:10.3f}  {part.right:5.3f}")
    print("\ncalibration error (mean distance of the two)")
    print(f"  {calibration_error(confidences, right):.3f}  as the strategy computes it")
    if configured is not None:
        applied = [vote.probability(confidence, configured) for confidence in confidences]
        print(f"  {calibration_error(applied, right):.3f}  with the configured evolution.vote.calibration")
    print(f"  {unseen:.3f}  with a curve fitted to four fifths of these answers, on the last fifth")
    print(f"\nevolution.vote.calibration=[{fitted[0]},{fitted[1]}]")


def correctness(config: Config, limit: int | None, path: Path) -> tuple[list[float], list[bool]]:
    """Confidence (0..1) and correctness of each elected answer in ``path`` whose question has a truth."""
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]  # text would be split at U+2028 too
    elected = {row["number"]: row for row in rows if row["error"] is None and not row["verdict"]["reason"]}
    rewards, services, truths = config.rewards, shared_services(config.rewards), dict[str, Labels]()
    confidences, right = list[float](), list[bool]()
    for number, question in questions_of(config, limit, truths.__setitem__):
        truth, row = truths.pop(question.id, None), elected.get(number)
        if truth is None or not truth.answers or row is None:
            continue
        score = find_scorer(rewards.scorer_of(question.task, truth.scorer))(
            case_of(question, row["answer"], truth.answers), services
        )
        confidences.append(row["confidence"])
        right.append(score >= 1.0)
    return confidences, right


async def answer_here(
    config: Config, options: argparse.Namespace, out: AnswerFile, actors: placement.Actors
) -> None:
    most = max(1, config.engine.max_num_seqs * config.engine.workers // config.serve.samples)
    agent = await local_agent(config, actors)
    await answer_all(questions_of(config, options.limit), out, agent, options.concurrency or most)


async def answer_there(config: Config, options: argparse.Namespace, out: AnswerFile) -> None:
    key = os.environ.get(config.serve.api_key_env, "").strip()
    async with RemoteAgent(options.url, key, config.toolbox, config.serve.timeout_s) as agent:
        await answer_all(questions_of(config, options.limit), out, agent.answer, options.concurrency or 4)


def check(config: Config) -> None:
    needs = reservations.needs(config, learner=False, rollouts=True)
    read = functools.partial(dry_run.read_first, config)
    questions = dry_run.Input("data.evaluate", config.data.evaluate, read)
    inputs = [*dry_run.policy_inputs(config), questions]
    dry_run.check("answer", config, inputs, dry_run.findings(config, "evaluate", needs))


def main() -> None:
    words = sys.argv[1:]
    if asks_for_help(words):
        from_command_line(__doc__, "answer", words, default=DEFAULT)
    with driver("answer"):
        options = parse(words)
        config = from_command_line(__doc__, "answer", options.rest, default=DEFAULT, check=check)
        configured = config.evolution.vote.calibration
        if options.calibrate:  # of what the strategy computes
            config = config.changed({"evolution.vote.calibration": None})
        path = options.out or Path(config.run.dir) / "answers.jsonl"
        with answer_file(path, settings_of(config, options.url)) as out:
            if options.url is not None:
                asyncio.run(answer_there(config, options, out))
            else:
                with (
                    run_folder(config, config.data.evaluate),
                    placement.placed(config, learner=False, initial=config.policy.adapter) as actors,
                ):
                    asyncio.run(answer_here(config, options, out, actors))
            if options.calibrate:
                show_calibration(config, options.limit, path, configured)
        print(f"answers: {path}")


if __name__ == "__main__":
    main()

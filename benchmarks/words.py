"""Does a service learn more from its votes together with users' words than from its votes alone?

    python -m benchmarks.words --adapter CHECKPOINT [--seeds 42 43 44] [--arms votes words false] [--share 0.1]
        [--requests 800] [--questions 800] [--dir runs/words]

The policy of the checkpoint answers a stream of `warm`, unlabelled pictures as the quickstart's service does and
learns from its clear votes, as in `benchmarks.vote_learning`. All arms of a seed learn from the same answers and
are asked the same other pictures afterwards. The policy must understand a correction: SFT teaches it with
`data.demonstrations=cards:?split=train&corrected=0.2`.

- ``votes``: the clear votes.
- ``words``: also what the policy answers clearly once ``--share`` of its wrong answers are corrected by a user
  ("No, it is a 7.").
- ``false``: also what it answers clearly once ``--share`` of its right answers are called wrong ("No, it is a 3.").

No canary refuses an update: ``canary`` says what it would decide about unchanged pictures. Rows that DIR has are
not computed again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.actor_overhead import LocalGenerator
from benchmarks.harness import Report, keep_arguments, parse_args
from benchmarks.vote_learning import GROUP, Request, accuracy, answer, is_right, learn, source_of, truth, use
from pixelis.config import Config, load
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.agent import Episode
from pixelis.evaluation.statistics import paired_bootstrap
from pixelis.evolution.canary import compare
from pixelis.evolution.gate import gate
from pixelis.evolution.words import corrected_question, transplant
from pixelis.policy.adapters import load_adapter
from pixelis.records import Experience, Question, Verdict
from pixelis.rewards.vote import winning

SHIFT = "warm"
ARMS = ("votes", "words", "false")
Taught = tuple[Request, str]
"""A request and the label that is learnt."""


@dataclasses.dataclass
class Answered:
    """A request of the stream, its verdict, and what the policy does once it is told the words."""

    request: Request
    verdict: Verdict
    words: str = ""
    again: Taught | None = None

    @property
    def is_right(self) -> bool:
        """Whether the answer is the true one."""
        return is_right(self.verdict.answer, self.request.question)


def said(answered: Answered, arm: str, share: float, rng: random.Random) -> str:
    """What a user says about an answer in an arm; mostly nothing."""
    digit, speaks = truth(answered.request.question), rng.random() < share
    other = rng.choice([str(n) for n in range(10) if str(n) != digit])
    if arm == "votes" or answered.verdict.answer is None or not speaks:
        return ""
    if (arm == "words") == answered.is_right:
        return ""
    return f"No, it is a {digit if arm == 'words' else other}."


def tell(config: Config, generator: LocalGenerator, spoken: Sequence[Answered]) -> None:
    """Ask the served policy again with the words, as `pixelis.serve.words` does; sets ``again``."""
    asked = []
    for item in spoken:
        winner = winning([e.trajectory for e in item.request.episodes], item.verdict)
        asked.append(
            Experience(
                question=item.request.question,
                trajectory=winner,
                verdict=item.verdict,
                policy_version=0,
                created_at=0.0,
            )
        )
    questions = [
        corrected_question(experience, item.words) for experience, item in zip(asked, spoken, strict=True)
    ]
    groups = answer(config, generator, questions, GROUP)
    for item, experience, episodes in zip(spoken, asked, groups, strict=True):
        verdict = Request(item.request.question, episodes).verdict(config)
        if not gate(verdict, config.evolution):
            continue
        own = {"question_id": item.request.question.id, "group_id": experience.trajectory.group_id}
        moved = [(transplant(experience.trajectory, e.trajectory), e.views) for e in episodes]
        kept = [Episode(t.model_copy(update=own), views) for t, views in moved if t is not None]
        item.again = Request(item.request.question, kept), verdict.answer or ""


def taught_by(config: Config, arm: str, stream: Sequence[Answered]) -> tuple[list[Taught], dict[str, Any]]:
    """What an arm learns from, in the order of the stream, and how often words make the votes clear and right."""
    e, rng = config.evolution, random.Random(0)
    taught, spoken = list[Taught](), [item for item in stream[e.cold_start :] if item.words]
    for item in stream[e.cold_start :]:
        held_out = rng.random() < e.canary.traffic_share
        if not held_out and gate(item.verdict, e):
            taught.append((item.request, item.verdict.answer or ""))
        if item.again is not None:
            taught.append(item.again)
    clear = [item for item in spoken if item.again is not None]
    right = sum(is_right(item.again[1], item.request.question) for item in clear if item.again is not None)
    counts = {"tasks": len(taught), "spoken": len(spoken), "words_clear": len(clear), "words_right": right}
    return taught, counts


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapter", type=Path, required=True, help="checkpoint of the policy that answers")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42], help="seeds of pictures and sampling")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--share", type=float, default=0.1, help="share of the answers that users speak about"
    )
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--questions", type=int, default=800, help="held-out pictures, and as many unchanged")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all arms")
    parser.add_argument("--dir", type=Path, default=Path("runs/words"), help="folder of the rows")
    clear = ["evolution.gate=0.2", "evolution.batch=4"]
    args = parse_args(parser, requests=64, questions=8, share=1.0, set=clear, dir=None)
    if args.dir is not None:
        keep_arguments(args.dir, args, "seeds", "arms")
    own = [f"policy.adapter={args.adapter}", "policy.lora.vision_tower=true", "evolution.words=true"]
    config = load("configs/nano/quickstart.yaml", [*own, *args.set])
    report, generator = Report("words"), LocalGenerator(config, load_adapter(args.adapter))
    for seed in args.seeds:
        run_seed(args, report, generator, config, seed)
    report.close()


def run_seed(
    args: argparse.Namespace, report: Report, generator: LocalGenerator, config: Config, seed: int
) -> None:
    """Run the arms of a seed that have no row yet; a later arm is compared with ``votes``."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    start, rows = load_adapter(args.adapter), dict[str, dict[str, Any]]()
    stream, tests, before = list[Answered](), dict[str, list[Question]](), dict[str, list[float]]()

    def questions(split: str, count: int, shift: str = SHIFT) -> list[Question]:
        return list(read_questions(source_of(split, seed, shift), limit=count, epochs=1))

    def ask() -> None:
        asked = questions("validation", args.requests)
        generator.augmentations = []
        tests.update(changed=questions("test", args.questions), old=questions("test", args.questions, ""))
        before.update((name, accuracy(config, generator, start, test)) for name, test in tests.items())
        use(generator, start)
        generator.augmentations = list(config.serve.augmentations)
        for question, episodes in zip(asked, answer(config, generator, asked, GROUP), strict=True):
            request = Request(question, episodes)
            stream.append(Answered(request, request.verdict(config)))

    for arm in args.arms:
        path = args.dir / f"{seed}_{arm}.json" if args.dir is not None else None
        if path is not None and path.exists():
            rows[arm] = json.loads(path.read_text(encoding="utf-8"))
            report.row(f"{seed} {arm}", shown(rows[arm]))
            continue
        if not stream:
            ask()
        rng = random.Random(seed)
        for item in stream:
            item.again, item.words = None, said(item, arm, args.share, rng)
        use(generator, start)
        generator.augmentations = list(config.serve.augmentations)
        tell(config, generator, [item for item in stream if item.words])
        taught, row = taught_by(config, arm, stream)
        adapter, row["updates"] = learn(config, taught)
        row["vote_right"] = float(np.mean([item.is_right for item in stream]))
        generator.augmentations = []
        for name, test in tests.items():
            after = accuracy(config, generator, adapter, test)
            row[name] = {
                "before": float(np.mean(before[name])),
                "after": float(np.mean(after)),
                "right": after,
            }
            row[name] |= paired_bootstrap(after, before[name])
            if arm != "votes" and "votes" in rows:
                row[name]["minus_votes"] = paired_bootstrap(after, rows["votes"][name]["right"])
        names = [question.id for question in tests["old"]]
        pair = (dict(zip(names, scores, strict=True)) for scores in (row["old"]["right"], before["old"]))
        row["canary"] = compare(*pair, config.evolution.canary).reason
        rows[arm] = row
        if path is not None:
            path.write_text(json.dumps(row), encoding="utf-8")
        report.row(f"{seed} {arm}", shown(row))


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the score of each question."""
    return {
        key: {k: v for k, v in value.items() if k != "right"} if isinstance(value, dict) else value
        for key, value in row.items()
    }


if __name__ == "__main__":
    main()

"""Distil looking closer into demonstrations of a policy that does so only where it pays.

The policy plays distill.episodes episodes of each question of data.train (data.limit of them) with operations, and
as many without; an exported memory (a folder of Parquet files) is such a source too. Right is what agrees with the
truth or, without one, with the vote of the episodes with operations. The share of right answers without operations
is the confidence of a question. On distill.holdout of the questions the job chooses the smallest confidence from
which answering at once is not inferior to looking always, by the tolerance and risk of evolution.canary. Writes to
run.dir:

  distilled.jsonl   right episodes of the others, at once from the threshold on, looking below it
  summary.json      the threshold, the tests, and counts by category

`pixelis sft data.demonstrations=RUN_DIR/distilled.jsonl policy.adapter=...` makes the policy that decides by itself.
Episodes are played once; a repeated run continues with them.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pixelis.actors import reservations
from pixelis.config import CanaryConfig, Config
from pixelis.datasets.labels import drop_labels
from pixelis.datasets.questions import count_questions, read_questions
from pixelis.datasets.refinement.episodes import Episodes
from pixelis.datasets.refinement.filters import Outcomes
from pixelis.datasets.refinement.looking import Played, answers_at_once, mixture
from pixelis.datasets.refinement.sets import write_rows
from pixelis.errors import BadConfig, DataFailure
from pixelis.evaluation.samples import categories_of
from pixelis.evolution import canary
from pixelis.files import write_json
from pixelis.jobs import dry_run
from pixelis.jobs.driver import job, run_folder
from pixelis.jobs.refine import play
from pixelis.records import Demonstration, Question
from pixelis.rewards.services import Services
from pixelis.telemetry import lineage

FILE = "distilled.jsonl"


def run(config: Config) -> dict[str, Any]:
    """Play, choose and write; returns the summary. DataFailure if no demonstration is left."""
    s = config.distill
    with run_folder(config, config.data.train) as folder:
        for name in (FILE, "summary.json"):  # results of another configuration must not remain
            (folder / name).unlink(missing_ok=True)
        rows = questions(config)
        episodes = Episodes(config, folder, rows, s.episodes, glance=True, hint=s.hint, whole=True)
        play(episodes)
        services = Services(config.rewards, folder)
        try:
            pairs = zip(episodes.groups("looking"), episodes.groups("glance"), strict=True)
            played = [Played.of(*pair, config.rewards, services) for pair in pairs]
        finally:
            services.close()
        demonstrations, summary = distil(config, played)
        write_json(folder / "summary.json", summary)
        if not demonstrations:
            counts = ", ".join(f"{cause} {n}" for cause, n in summary["dropped"].items())
            raise DataFailure(f"no demonstration is left ({counts})", code="no_rows", fix="see summary.json")
        write_rows(folder / FILE, demonstrations)
        lineage.record_in_run(folder / FILE, "dataset")
        return summary


def questions(config: Config) -> list[Question]:
    source, limits = config.data.train, (config.data.limit, config.data.max_bad_rows)
    on_labels = None if config.rewards.labelled else drop_labels
    count_questions(source, *limits, on_labels)  # raises for an endless source
    rows = read_questions(source, limit=limits[0], epochs=1, max_bad_rows=limits[1], on_labels=on_labels)
    return list(rows)


def distil(config: Config, played: list[Played]) -> tuple[list[Demonstration], dict[str, Any]]:
    """The demonstrations, and the summary."""
    s, dropped = config.distill, Counter[str]()
    labelled = [p for p in played if p.outcomes.looking and p.outcomes.glance]
    held_out = random.Random(config.run.seed).sample(labelled, round(s.holdout * len(labelled)))
    outcomes = {p.looking.question.id: p.outcomes for p in held_out}
    threshold, decisions = choose_threshold(outcomes, config.evolution.canary)
    dropped["no_label"] = len(played) - len(labelled)
    chosen, by_category = list[Demonstration](), dict[str, Counter[str]]()
    for p in labelled:
        if p.looking.question.id in outcomes:
            continue
        arm = "at_once" if answers_at_once(p.outcomes, threshold) else "looking"
        own = p.demonstrations(threshold, s.keep * (s.looks if arm == "looking" else 1))
        dropped["no_right_episode"] += not own
        for category in categories_of(p.looking):
            by_category.setdefault(category, Counter())[arm if own else "dropped"] += 1
        chosen += own
    summary = {
        "source": config.data.train,
        "questions": len(played),
        "held_out": len(held_out),
        "threshold": threshold,
        "tests": [{"threshold": t, **dataclasses.asdict(d)} for t, d in decisions.items()],
        "demonstrations": len(chosen),
        "at_once": sum(not d.steps for d in chosen),
        "dropped": dict(dropped),
        "categories": {name: dict(counts) for name, counts in sorted(by_category.items())},
    }
    return chosen, summary


def choose_threshold(
    held_out: Mapping[str, Outcomes], config: CanaryConfig
) -> tuple[float | None, dict[float, canary.Decision]]:
    """The smallest threshold whose mixture is not inferior to looking always, None without one; all tests.

    Tested from 1 down to the first failure, so that all tests together run the risk of one (a fixed sequence of
    tests, Maurer et al. 1995).
    """
    looking = {id: outcomes.rate for id, outcomes in held_out.items()}
    most = max((len(outcomes.glance) for outcomes in held_out.values()), default=0) - 1
    chosen, decisions = None, dict[float, canary.Decision]()
    for threshold in (right / most for right in range(most, -1, -1)) if most > 0 else ():
        mixed = {id: mixture(outcomes, threshold) for id, outcomes in held_out.items()}
        decisions[threshold] = canary.compare(mixed, looking, config)
        if decisions[threshold].bound < -config.tolerance:
            break
        chosen = threshold
    return chosen, decisions


def needs(config: Config) -> list[reservations.Need]:
    return reservations.needs(config, learner=False, rollouts=True)


def inputs(config: Config) -> Iterator[dry_run.Input]:
    yield from dry_run.policy_inputs(config)
    yield dry_run.question_input(config, "data.train", config.data.train, player=dry_run.player_of(config))


def check(config: Config) -> None:
    if not config.toolbox.has_tools:
        raise BadConfig("without operations nobody looks closer", fix="name toolbox.operations")
    dry_run.check("distill", config, inputs(config), dry_run.findings(config, "evaluate", needs(config)))


def main() -> None:
    with job("distill", __doc__, check) as config:
        s = run(config)
        looking = s["demonstrations"] - s["at_once"]
        chosen = "always look" if s["threshold"] is None else f"answer at once from {s['threshold']:.2f} on"
        print(f"{chosen}: {s['at_once']} demonstrations answer at once, {looking} look")
        print(", ".join(f"{cause} {n}" for cause, n in s["dropped"].items()))
        print(f"demonstrations: {config.run.dir}/{FILE}")


if __name__ == "__main__":
    main()

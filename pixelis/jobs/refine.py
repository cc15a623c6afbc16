"""Refine demonstrations into sets to learn from: rules, quality, duplicates, filters, difficulty, gates, recipes.

Reads data.demonstrations (a file or folder of rows, or `cards:`) and writes to run.dir:
simple.jsonl, medium.jsonl, hard.jsonl   demonstrations by level
sft.jsonl, sft_validation.jsonl          demonstrations to imitate, by the recipe refinement.sft
rft.jsonl                                questions to roll out, by refinement.rft, with weights and signals in `meta`
online.jsonl                             experiences, by refinement.online, where it names a source
summary.json, card.html                  counts, what was dropped and why, gates with figures; the card shows examples

A set that fails a gate is not written: the job ends with the gate's name, its figure and the ids. Running it again changes
nothing; a killed run goes on with the verdicts, hashes and episodes it has. With refinement.pass_rate.episodes the policy plays
the questions on a cluster; without, no cluster is started.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pixelis.config import Config, from_command_line
from pixelis.datasets.questions import read_questions
from pixelis.datasets.refinement import filters, fusion, gates
from pixelis.datasets.refinement.difficulty import LEVELS
from pixelis.datasets.refinement.pipeline import Refinery, records
from pixelis.errors import BadInput, MissingFile
from pixelis.jobs.driver import driver, run_folder, watch
from pixelis.records import Demonstration, Experience
from pixelis.rewards.tools import Tools
from pixelis.telemetry import data_card, lineage
from pixelis.telemetry.events import plain
from pixelis.telemetry.progress import Progress

SETS = (*(f"{level}.jsonl" for level in LEVELS), "sft.jsonl", "sft_validation.jsonl", "rft.jsonl", "online.jsonl")


def run(config: Config) -> dict[str, Any]:
    """Refine, write the sets and the card; returns the summary. DataFailure ``gate`` or ``held_out`` when the set is rejected."""
    s = config.refinement
    made_from = {"demonstrations": config.data.demonstrations, "experiences": s.online.source}
    made_from |= {f"held_out_{number}": source for number, source in enumerate(s.holdout.sources)}
    with run_folder(config, **{role: source for role, source in made_from.items() if source}) as folder:
        for name in (*SETS, "summary.json"):  # what stands in the folder is of this configuration or not there
            (folder / name).unlink(missing_ok=True)
        tools, steps = Tools(config.rewards, folder), Steps(config.telemetry.progress)
        try:
            refinery = Refinery(config, folder, tools, steps)
            refinery.prepare()
            steps.close()
            outcomes = play(config, folder, refinery) if config.refinement.pass_rate.episodes else None
            refinery.finish(outcomes)
            return save(config, folder, refinery)
        finally:
            steps.close()
            tools.close()


def save(config: Config, folder: Path, refinery: Refinery) -> dict[str, Any]:
    """Write everything, the card first; the sets only when every gate is passed."""
    r, seed, kept = config.refinement, config.run.seed, refinery.demonstrations
    summary: dict[str, Any] = {**refinery.summary(), "config_sha256": config.sha256, "seed": seed}
    files: dict[str, Iterable[BaseModel]] = {f"{level}.jsonl": [d for d in kept if d.level == level] for level in LEVELS}
    imitated = fusion.sft(kept, r.sft, seed)
    asked, chosen = fusion.rft([d for d in kept if d.id not in refinery.not_asked], r.rft, seed)
    learnt, checked = fusion.validation(imitated.chosen, refinery.contents, r.sft.validation, seed)
    files |= {"sft.jsonl": learnt, "sft_validation.jsonl": checked, "rft.jsonl": asked}
    summary["sets"] = {
        "sft": {**imitated.summary(), "validation": len(checked)},
        "rft": {**chosen.summary(), "questions": len(asked)},
    }
    if r.online.source:
        experiences, found = fusion.online(read_experiences(r.online.source), r.online, time.time(), seed)
        files["online.jsonl"], summary["sets"]["online"] = experiences, found
    shown = [data_card.example(d, config.toolbox, config.dialogue.frames) for d in examples(kept, r.examples)]
    data_card.write_card(folder, summary, shown, config.run.name)
    write_text(folder / "rejected.json" if any(not g.passed for g in refinery.gates) else folder / "summary.json", summary)
    gates.enforce(refinery.gates)
    (folder / "rejected.json").unlink(missing_ok=True)
    for name, rows in files.items():
        write_rows(folder / name, rows)
        lineage.record_of_run(folder / name, "dataset")
    return summary


def play(config: Config, folder: Path, refinery: Refinery) -> dict[str, filters.Outcomes]:
    """Episodes of the policy on every question that is left, kept in run.dir/episodes-*.jsonl so that they are played once."""
    import ray

    from pixelis.actors import cluster

    s, asked = config.refinement.pass_rate, refinery.asked()
    source = folder / "questions.jsonl"
    write_rows(source, asked)
    arms = {"looking": True, **({"glance": False} if s.utility else {})}
    decides = {"policy", "dialogue", "toolbox", "engine", "evaluate", "rewards"}
    settings = [config.model_dump(mode="json", include=decides), config.run.seed, s.episodes, s.temperature]
    identity = hashlib.sha256(source.read_bytes() + json.dumps(settings, sort_keys=True).encode()).hexdigest()
    missing = [name for name in arms if not _played(folder, name, identity)]
    if missing:
        sampled = config.evaluate.model_copy(
            update={"sampling": config.evaluate.sampling.model_copy(update={"temperature": s.temperature})}
        )
        played = config.model_copy(update={"evaluate": sampled})
        with cluster.placed(played, learner=False, initial=config.policy.adapter) as actors:
            for name in missing:
                evaluate = functools.partial(actors.coordinator.evaluate.remote, str(source), len(asked), 0, arms[name], name)

                def poll(name: str = name) -> tuple[int, dict[str, Any]]:
                    return ray.get(actors.coordinator.progress.remote())["evaluated"].get(name, 0), {}

                def rolled(evaluate: Any = evaluate) -> Any:
                    return ray.get(evaluate(None, s.episodes))

                groups, _ = watch(config, f"episodes {name}", len(asked), rolled, poll)
                rows = [[g.question.id, arms[name], t.rewards.get("accuracy")] for g in groups for t in g.trajectories]
                write_text(folder / f"episodes-{name}.json", {"identity": identity, "rows": rows})
    kept = [json.loads((folder / f"episodes-{name}.json").read_text(encoding="utf-8"))["rows"] for name in arms]
    return filters.table(tuple(row) for rows in kept for row in rows)


def _played(folder: Path, name: str, identity: str) -> bool:
    try:
        return json.loads((folder / f"episodes-{name}.json").read_text(encoding="utf-8"))["identity"] == identity
    except (OSError, ValueError, KeyError):
        return False


class Steps:
    """Shows one step after the other."""

    def __init__(self, enabled: bool):
        self.enabled, self.name = enabled, ""
        self.shown: Progress | None = None

    def __call__(self, step: str, done: int, total: int) -> None:
        if step != self.name:
            self.close()
            self.name, self.shown = step, Progress(f"refine {step}", total, enabled=self.enabled)
            self.shown.__enter__()
        if self.shown is not None:
            self.shown.total = total
            self.shown.update(done)

    def close(self) -> None:
        """End the line of the last step."""
        if self.shown is not None:
            self.shown.__exit__(None, None, None)
            self.shown = None


def examples(kept: Sequence[Demonstration], count: int) -> list[Demonstration]:
    """Demonstrations for the card: each kind and task in turn, the same ones in every run."""
    piles: dict[tuple[str, str], list[Demonstration]] = {}
    for d in sorted(kept, key=lambda d: hashlib.sha256(d.id.encode()).digest()):
        piles.setdefault((d.task, d.kind), []).append(d)
    rounds = [pile[i] for i in range(count) for pile in (piles[key] for key in sorted(piles)) if i < len(pile)]
    return rounds[:count]


def read_experiences(source: str) -> list[Experience]:
    """Experiences of a JSON-lines file; MissingFile, and BadInput naming the line."""
    path, out = Path(source), []
    if not path.is_file():
        raise MissingFile(f"no file {source}", fix="refinement.online.source names a JSON-lines file of experiences")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    out.append(Experience.model_validate_json(line))
                except ValueError as error:
                    raise BadInput(f"{source}, line {number}: {str(error).splitlines()[0]}") from None
    return out


def write_rows(path: Path, rows: Iterable[BaseModel]) -> None:
    """One JSON line a record, aside and then renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as out:
        out.writelines(row.model_dump_json() + "\n" for row in rows)
    aside.replace(path)


def write_text(path: Path, content: Any) -> None:
    """Strict JSON, aside and then renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(
        json.dumps(plain(content), indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8", errors="replace"
    )
    aside.replace(path)


def check(config: Config) -> None:
    """What `--dry-run` adds: the source can be read, so can the evaluation sets, and which steps will run."""
    s = config.refinement
    first = next(iter(records(config)), None)
    for source in s.holdout.sources:
        next(read_questions(source))
    steps = {
        "rules": True,
        "observations by execution": s.observe,
        "quality": True,
        f"judge {config.rewards.judge.model}": s.quality.judge,
        "exact duplicates": s.duplicates.exact,
        f"near duplicates (pictures by {s.duplicates.pictures})": bool(s.duplicates.near),
        f"hold-out against {', '.join(s.holdout.sources)}": bool(s.holdout.sources),
        f"{s.pass_rate.episodes} episodes a question": bool(s.pass_rate.episodes),
        "perception utility": s.pass_rate.utility,
        "difficulty and levels": True,
        f"gates, {s.gates.replay:.0%} executed again": True,
    }
    print(f"first row: {getattr(first, 'id', None) or first}", file=sys.stderr)
    print("steps: " + "; ".join(name for name, on in steps.items() if on), file=sys.stderr)


def main() -> None:
    """Entry point of `python -m pixelis.jobs.refine`."""
    config = from_command_line(__doc__, "refine", default="configs/nano/refine.yaml", check=check)
    with driver("refine"):
        summary = run(config)
        dropped = ", ".join(f"{cause} {n}" for cause, n in Counter(summary["dropped"]).most_common()) or "nothing"
        print(f"kept {summary['kept']} of {summary['rows']} rows; dropped {dropped}")
        for name, made in summary["sets"].items():
            print(f"{name}: {made['count']} of {made['size']}" + (f", {made['short']} short" if made["short"] else ""))
        print(f"card: {Path(config.run.dir) / data_card.FILE}")


if __name__ == "__main__":
    main()

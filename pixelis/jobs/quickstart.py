"""The whole system in about ten minutes: SFT, RFT, evaluation, serving and online adaptation of the embedded model.

Writes run.dir/summary.json and run.dir/report.html. The stages are the other jobs' own functions; run them one by one with
`python -m pixelis.jobs.sft`, `rft`, `evaluate` and `serve`.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ray

from pixelis.actors import cluster, report
from pixelis.config import Config, from_command_line
from pixelis.datasets.questions import read_questions
from pixelis.evaluation.statistics import paired_bootstrap
from pixelis.jobs import evaluate, rft, serve, sft
from pixelis.jobs.driver import driver, run_folder, watch
from pixelis.operations.media import load_image
from pixelis.records import Question
from pixelis.serve.agent import png_url
from pixelis.telemetry import events

SHOWN = ("name", "accuracy", "ci95", "n", "rapr", "tool_error_rate")


def stage(config: Config, name: str, **update: Any) -> Config:
    """The configuration of one stage: its own folder below run.dir, and the learning settings of that stage."""
    run = config.run.model_copy(update={"name": name, "dir": f"{config.run.dir}/{name}"})
    policy = config.policy.model_copy(update={"adapter": update.pop("adapter", None)})
    learner = config.learner.model_copy(update=update)
    return config.model_copy(update={"run": run, "policy": policy, "learner": learner})


def main() -> None:
    """Entry point of `python -m pixelis.jobs.quickstart`."""
    config = from_command_line(__doc__, "quickstart", default="configs/nano/quickstart.yaml")
    with driver("quickstart"), run_folder(config) as folder:
        story = Story(config, folder)
        story.tell()


class Story:
    """The quickstart's stages in order, and what they measured."""

    def __init__(self, config: Config, folder: Path):
        self.config, self.folder = config, folder
        self.seconds: dict[str, float] = {"install": _install_seconds()}
        self.arms: dict[str, evaluate.Arm] = {}
        self.versions: dict[str, int] = {}
        self.shift: dict[str, Any] = {}
        self.reply: dict[str, Any] = {}

    def tell(self) -> None:
        q = self.config.quickstart
        started = time.monotonic()
        cluster.connect(self.config)
        print("1/4  SFT: a few demonstrations teach the protocol; most of them answer without looking closer")
        learnt = self.timed("sft", sft.run, stage(self.config, "sft", lr=q.sft_lr, schedule="cosine", checkpoint_every=50))
        config = stage(self.config, "rft", adapter=str(learnt), lr=q.rft_lr)
        with run_folder(config), cluster.placed(config, initial=str(learnt)) as actors:
            print("2/4  evaluate on held-out digits and photographs, then RFT with pixel operations in the rollouts")
            self.measure(config, actors, "direct", 0, operations=False)
            self.measure(config, actors, "sft", 0)
            self.timed("rft", rft.run, config, actors)
            self.versions = {"sft": 0, "rft": ray.get(actors.store.promoted.remote())}
            self.measure(config, actors, "rft", self.versions["rft"])
            print("3/4  serve the agent over HTTP and let it adapt to an unlabelled, shifted stream by votes")
            self.timed("serve", self.serve_and_adapt, config, actors)
            print("4/4  report")
            page = self.write(config, time.monotonic() - started)
        self.print_table(page)

    def timed(self, name: str, run: Any, *args: Any) -> Any:
        start = time.monotonic()
        result = run(*args)
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - start, 1)
        return result

    def measure(self, config: Config, actors: cluster.Actors, name: str, version: int, **options: Any) -> None:
        self.arms[name] = self.timed("evaluate", lambda: evaluate.measure(config, actors, name, version, **options))

    def serve_and_adapt(self, config: Config, actors: cluster.Actors) -> None:
        """One question over HTTP, then the shifted stream; accuracy on held-out shifted questions before and after."""
        q, version = config.quickstart, self.versions["rft"]
        shifted = f"cards:?split=test&seed=8&shift={q.shift}"
        online = stage(config, "evolve", adapter=config.policy.adapter, checkpoint_every=1)
        with run_folder(online), serve.serving(online, actors) as (url, evolution):
            self.reply = ask(url, next(read_questions(config.data.evaluate, start=0)))
            before = evaluate.measure(config, actors, "shift-before", version, source=shifted)
            learner = threading.Thread(target=serve.evolve, args=(online, actors, evolution), daemon=True)
            learner.start()
            questions = read_questions(f"cards:?split=validation&seed=9&shift={q.shift}", limit=q.stream, epochs=1)
            answered = [0]

            def send(question: Question) -> None:
                ask(url, question)
                answered[0] += 1

            def stream() -> None:
                with ThreadPoolExecutor(8) as pool:
                    list(pool.map(send, questions))
                ray.get(evolution.drain.remote())
                learner.join()

            watch(online, "adapt", q.stream, stream, lambda: (answered[0], ray.get(evolution.stats.remote())))
            self.versions["evolved"] = ray.get(actors.store.promoted.remote())
            after = evaluate.measure(config, actors, "shift-after", self.versions["evolved"], source=shifted)
            self.measure(config, actors, "evolved", self.versions["evolved"])
            stats = ray.get(evolution.stats.remote())
        difference = paired_bootstrap(after.correct, before.correct, seed=config.run.seed)
        self.shift = {
            "name": q.shift,
            "before": before.summary,
            "after": after.summary,
            "after_minus_before": difference,
            "requests": q.stream,
            "updates": stats["updates"],
        }

    def write(self, config: Config, total: float) -> str:
        """summary.json and report.html."""
        summary = {
            "arms": [{key: arm.summary[key] for key in SHOWN} for arm in self.arms.values()],
            "paired": {
                "rft_minus_sft": paired_bootstrap(self.arms["rft"].correct, self.arms["sft"].correct, seed=config.run.seed)
            },
            "seconds": {**self.seconds, "total": round(total, 1)},
            "versions": self.versions,
            "seed": config.run.seed,
            "shift": self.shift,
            "served": {key: self.reply[key] for key in ("answer", "confidence", "policy_version") if key in self.reply},
            "hardware": hardware(),
            "command": "make quickstart",
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
        curves = events.read(f"{config.run.dir}", "step/policy")
        episodes = [
            episode
            for name, count in (("sft", 3), ("rft", config.evaluate.trajectories - 3))
            for episode in report.choose(name, self.arms[name].groups, self.arms[name].views, count)
        ]
        for name, arm in self.arms.items():
            evaluate.save(self.folder, arm)
            shutil.move(self.folder / f"trajectories-{name}.jsonl", self.folder / f"trajectories-{name}.jsonl")
        return ray.get(report.write.remote(config, str(self.folder.resolve()), summary, curves, episodes))

    def print_table(self, page: str) -> None:
        print(f"\n{'arm':10} {'accuracy':>8}  {'95 % interval':15} {'zooms':>6} {'tool errors':>11}")
        for name, arm in self.arms.items():
            s = arm.summary
            low, high = s["ci95"]
            print(f"{name:10} {s['accuracy']:8.3f}  [{low:.3f}, {high:.3f}]  {s['rapr']:6.2f} {s['tool_error_rate']:11.3f}")
        before, after = self.shift["before"], self.shift["after"]
        print(
            f"\non the `{self.shift['name']}` stream: {before['accuracy']:.3f} before, {after['accuracy']:.3f} after "
            f"{self.shift['updates']} updates from {self.shift['requests']} unlabelled requests"
        )
        print(f"\nreport   {page}\nsummary  {self.folder / 'summary.json'}")


def ask(url: str, question: Question) -> dict[str, Any]:
    """Ask the served agent one question with its picture; labels never travel."""
    picture = png_url(load_image(question.media[0].uri, 2**26, 2**26))
    reply = httpx.post(f"{url}/v1/agent", json={"question": question.question, "image": picture}, timeout=120)
    reply.raise_for_status()
    return reply.json()


def hardware() -> str:
    """The machine in words, for figures that leave it."""
    import os
    import platform

    cpu = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return f"{os.cpu_count()} CPU cores ({cpu}), {platform.system()}, Python {platform.python_version()}"


def _install_seconds() -> float:
    import sys

    note = Path(sys.prefix) / "install-seconds"
    return float(note.read_text()) if note.is_file() else 0.0


if __name__ == "__main__":
    main()

"""Run the whole system in about ten minutes: SFT, RFT, evaluation, serving and online adaptation.

Writes run.dir/summary.json and run.dir/report.html. The stages call the functions of the other jobs; run them
one by one with `pixelis sft`, `rft`, `evaluate` and `serve`. Re-running continues with the first unfinished
stage.
"""

from __future__ import annotations

import base64
import itertools
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import ray

from pixelis.actors import cluster, evaluation_report, placement, report
from pixelis.config import Config, ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.datasets.questions import read_questions
from pixelis.errors import BadConfig, InfraFailure
from pixelis.evaluation import table
from pixelis.evaluation.statistics import paired_bootstrap
from pixelis.jobs import evaluate, evaluation_arms, rft, serve, sft, synthesize
from pixelis.jobs.driver import hardware, job, run_folder, versions
from pixelis.jobs.watch import watch
from pixelis.operations.image import png_url
from pixelis.operations.pictures import write_film
from pixelis.operations.video import Clip
from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.records import Question
from pixelis.rewards.scorers import canonical
from pixelis.telemetry import events, lineage

T = TypeVar("T")
SFT_LR = 2e-3
"""Learning rate of SFT; that of RFT is `learner.lr` of the recipe."""
CLIENTS = 8
"""Concurrent requests in the unlabelled stream."""
ATTEMPTS = 4
"""Requests for one answer while the service is overloaded, as it can be on a busy machine."""
OVERLOADED = (429, 503, 504)


def main() -> None:
    with job("quickstart", __doc__) as config, run_folder(config) as folder:
        Quickstart(config, folder).run()


def stage(config: Config, name: str, adapter: Path | None = None, **learner: Any) -> Config:
    """Configuration of a stage: its folder below run.dir, the initial adapter, learner settings."""
    values: dict[str, Any] = {"run.name": name, "run.dir": f"{config.run.dir}/{name}"}
    values["policy.adapter"] = str(adapter) if adapter else None
    return config.changed(values | {f"learner.{key}": value for key, value in learner.items()})


def with_own_data(config: Config) -> Config:
    """The configuration with demonstrations and questions that `synthesis` makes: of the splits train and test.

    Of the demonstrations `data.direct_share` answer at once.
    """
    s, folder = config.synthesis, Path(config.run.dir)
    total = sum(task.target_sample_count for task in s.tasks.values())
    for split, count in (("train", total), ("test", config.evaluate.questions)):
        sources = {
            name: source.model_copy(update={"path": f"{source.path}&split={split}"})
            for name, source in s.datasources.items()
        }
        tasks = {
            name: task.model_copy(
                update={"target_sample_count": round(task.target_sample_count * count / total)}
            )
            for name, task in s.tasks.items()
        }
        own = s.model_copy(update={"datasources": sources, "tasks": tasks})
        synthesize.run(stage(config, split).changed({"synthesis": own}))
    train, test = (str(folder / split / "samples") for split in ("train", "test"))
    demonstrations = f"{train}?direct={config.data.direct_share}"
    return config.changed(
        {
            "data.train": train,
            "data.demonstrations": demonstrations,
            "data.evaluate": test,
            # A candidate must not unlearn an operation that the traffic does not need.
            "evolution.canary.questions": train,
        }
    )


class Quickstart:
    def __init__(self, config: Config, folder: Path):
        self.config, self.folder = config, folder
        installed = Path(sys.prefix) / "install-seconds"  # by `make install`
        self.seconds = {"install": float(installed.read_text()) if installed.is_file() else 0.0}
        self.arms: dict[str, evaluation_arms.Arm] = {}
        self.policies: dict[str, int] = {}
        self.shift: dict[str, Any] = {}
        self.reply: dict[str, Any] = {}
        self.correct: list[bool] = []
        """Whether each reply to the stream was right; the service never receives the truth."""

    def run(self) -> None:
        started = time.monotonic()
        print(f"results go to {self.folder}/ ; Ctrl-C stops, running again resumes")
        cluster.connect(self.config)
        if self.config.synthesis.tasks:
            print("0/4  synthesis: demonstrations of every operation, from annotated pictures and clips")
            self.config = self.timed("synthesize", lambda: with_own_data(self.config))
        print("1/4  SFT: demonstrations teach the protocol; most of them answer at once")
        sft_adapter = self.timed(
            "sft", lambda: sft.run(stage(self.config, "sft", lr=SFT_LR, schedule="cosine"))
        )
        config = stage(self.config, "rft", adapter=sft_adapter)
        with (
            run_folder(config, config.data.train),
            placement.placed(config, initial=str(sft_adapter)) as actors,
        ):
            print("2/4  RFT: rollouts choose where to look; evaluated on held-out pictures")
            self.measure(config, actors, "direct", 0, operations=False)
            self.measure(config, actors, "sft", 0)
            rft_adapter = self.timed("rft", lambda: rft.run(config, actors))
            # An earlier run of the last stage may have displaced these weights.
            weights, step = load_adapter(rft_adapter), checkpoint.step_of(rft_adapter)
            published = ray.get(actors.store.publish.remote(weights, "rft", step, restart=True))
            self.policies = {"sft": 0, "rft": published}
            self.measure(config, actors, "rft", self.policies["rft"])
            print("3/4  serve over HTTP; the agent adapts to changed, unlabelled pictures by its own votes")
            self.timed("serve", lambda: self.serve_and_adapt(config, actors, rft_adapter))
            self.measure(config, actors, "evolved", self.policies["evolved"])
            print("4/4  report")
            page = self.write(config, time.monotonic() - started)
        self.print_table(page)

    def timed(self, name: str, run: Callable[[], T]) -> T:
        start = time.monotonic()
        result = run()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - start, 1)
        return result

    def measure(
        self, config: Config, actors: placement.Actors, name: str, policy: int, operations: bool = True
    ) -> None:
        self.arms[name] = self.timed(
            "evaluate", lambda: evaluate.measure(config, actors, name, policy, operations=operations)
        )

    def serve_and_adapt(self, config: Config, actors: placement.Actors, adapter: Path) -> None:
        """Ask a question over HTTP, then send the stream; measures other changed pictures before and after."""
        q = self.config.quickstart
        online = stage(self.config, "evolve", adapter=adapter, checkpoint_every=1)
        # What changes is the look of the pictures
        online = online.changed({"policy.lora.vision_tower": True, "run.resume": False})
        # An earlier run's memory would contain these very pictures.
        shutil.rmtree(Path(online.run.dir) / "memory", ignore_errors=True)
        with run_folder(online), serve.serving(online, actors) as (url, backend):
            if (evolution := backend.evolution) is None:
                raise BadConfig(
                    "the last stage of the quickstart learns from traffic", fix="evolution.enabled=true"
                )
            self.reply = ask(url, next(read_questions(config.data.evaluate)), learn=False)
            print(
                f"     asked {url}/v1/agent about a held-out picture: {self.reply['answer']} "
                f"(confidence {self.reply['confidence']:.2f}, truth {self.reply['truth']})"
            )
            with ThreadPoolExecutor(1) as background:
                learning = background.submit(serve.evolve, online, actors, evolution)
                try:
                    before = evaluate.measure(
                        online, actors, "shift-before", self.policies["rft"], source=q.held_out
                    )
                    while not ray.get(evolution.stats.remote())["learning"]:
                        if learning.done():
                            raise learning.exception() or InfraFailure("the online learner ended early")
                        time.sleep(0.2)
                    stats = self.stream(online, url, evolution, learning.result)
                    decisions = [row["decision"] for row in ray.get(evolution.canary_curve.remote())]
                finally:
                    ray.get(evolution.stop.remote())
            self.policies["evolved"] = newest(actors, "evolve", default=self.policies["rft"])
            after = evaluate.measure(
                online, actors, "shift-after", self.policies["evolved"], source=q.held_out
            )
        self.shift = {
            "traffic": q.traffic,
            "before": before.summary,
            "after": after.summary,
            "after_minus_before": paired_bootstrap(after.correct, before.correct, seed=self.config.run.seed),
            "requests": q.stream,
            "replies_right": {
                "first_quarter": float(np.mean(self.correct[: q.stream // 4])),
                "last_quarter": float(np.mean(self.correct[-(q.stream // 4) :])),
            },
            "updates": stats["updates"],
            "promoted": decisions.count("promote"),
            "refused": decisions.count("refuse"),
            "undecided": decisions.count("wait"),
        }

    def stream(self, online: Config, url: str, evolution: Any, finish: Callable[[], Any]) -> dict[str, int]:
        """Send the unlabelled requests, then wait until the learner has processed their updates."""
        q = self.config.quickstart

        def send(question: Question) -> None:
            reply = ask(url, question)
            self.correct.append(canonical(reply["answer"] or "") == canonical(reply["truth"]))

        def run() -> dict[str, int]:
            questions = itertools.islice(read_questions(q.traffic, self.config.run.seed, epochs=1), q.stream)
            with ThreadPoolExecutor(CLIENTS) as pool:
                list(pool.map(send, questions))
            ray.get(evolution.drain.remote())
            finish()
            return ray.get(evolution.stats.remote())

        def poll() -> tuple[int, dict[str, Any]]:
            stats = ray.get(evolution.stats.remote())
            return len(self.correct), {"updates": stats["updates"], "waiting": stats["queue"]}

        return watch(online, "adapt", q.stream, run, poll)

    def write(self, config: Config, total: float) -> str:
        rft_minus_sft = paired_bootstrap(
            self.arms["rft"].correct, self.arms["sft"].correct, seed=self.config.run.seed
        )
        summary = {
            "arms": [
                {
                    key: arm.summary[key]
                    for key in ("name", "accuracy", "ci95", "n", "rapr", "tool_error_rate", "turns")
                }
                for arm in self.arms.values()
            ],
            "paired": {"rft_minus_sft": rft_minus_sft},
            "seconds": {**self.seconds, "total": round(total, 1)},
            "versions": {
                **versions(),
                **{f"policy/{name}": str(number) for name, number in self.policies.items()},
            },
            "seed": self.config.run.seed,
            "shift": self.shift,
            "served": {
                key: self.reply[key] for key in ("answer", "truth", "confidence", "policy_version", "seconds")
            },
            "hardware": hardware(),
            "command": shlex.join(["pixelis", "quickstart", *sys.argv[1:]]),
        }
        result = self.folder / "summary.json"
        result.write_text(json.dumps(summary, indent=2), encoding="utf-8")
        checkpoints = [
            latest
            for name in ("sft", "rft", "evolve")
            if (latest := checkpoint.latest(self.folder / name)) is not None
        ]
        lineage.record(
            result,
            inputs={"policy": checkpoints, "data": config.data.evaluate},
            config=self.config,
            kind="evaluation",
        )
        curves = events.read(self.folder / "sft", "step/sft") + events.read(config.run.dir, "step/policy")
        rft, count = self.arms["rft"], config.telemetry.trajectories
        compared = report.choose_differing(
            {name: (self.arms[name].groups, self.arms[name].views) for name in ("sft", "rft", "evolved")},
            count // 2,
        )
        episodes = evaluation_report.choose_with_causes("rft", rft.groups, rft.views, count - count // 2)
        for arm in self.arms.values():
            evaluation_arms.save(config, self.folder, arm)
        folder = str(self.folder.resolve())
        return ray.get(report.write.remote(config, folder, summary, curves, episodes, compared=compared))

    def print_table(self, page: str) -> None:
        print(f"\n{'arm':8} {'accuracy':>8}  {'95 % interval':13}  {'zooms':>5}  {'tool errors':>11}")
        for name, arm in self.arms.items():
            s = arm.summary
            low, high = s["ci95"]
            interval = f"[{100 * low:.1f}, {100 * high:.1f}]"
            errors = f"{100 * s['tool_error_rate']:.1f} %"
            print(f"{name:8} {100 * s['accuracy']:6.1f} %  {interval:13}  {s['rapr']:5.2f}  {errors:>11}")
        if "capabilities" in (summary := self.arms["rft"].summary):
            print("", *table.lines(summary), sep="\n")
        before, after, gain = self.shift["before"], self.shift["after"], self.shift["after_minus_before"]
        low, high = gain["ci95"]
        print(
            f"\nchanged pictures: {100 * before['accuracy']:.1f} % before, "
            f"{100 * after['accuracy']:.1f} % after "
            f"{self.shift['updates']} updates from {self.shift['requests']} unlabelled requests: "
            f"{100 * gain['mean']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]\n"
            f"candidates: {self.shift['promoted']} promoted, {self.shift['refused']} refused, "
            f"{self.shift['undecided']} undecided"
        )
        print(f"\nsummary  {self.folder / 'summary.json'}\nreport   {page}   <- open this in a browser")


def newest(actors: placement.Actors, kind: str, default: int = 0) -> int:
    """Newest promoted policy version of stage ``kind``; ``default`` if there is none."""
    versions = [
        v.version for v in ray.get(actors.store.list.remote()) if v.stage == kind and v.status == "promoted"
    ]
    return max(versions, default=default)


def ask(url: str, question: Question, learn: bool = True) -> dict[str, Any]:
    """The reply of the served agent and the truth, which is not sent. InfraFailure without an answer."""
    media = open_media(question.media[0], ToolboxConfig())
    shown = (
        {"video": film_url(media)} if isinstance(media, Clip) else {"image": png_url(media, compress_level=1)}
    )
    body = {"question": question.question, "learn": learn, **shown}
    for attempt in range(ATTEMPTS):
        time.sleep(attempt)
        # A proxy does not reach this machine
        reply = httpx.post(f"{url}/v1/agent", json=body, timeout=120, trust_env=False)
        if reply.status_code not in OVERLOADED:
            break
    if reply.is_error:
        raise InfraFailure(
            f"the served agent answered {reply.status_code}: {reply.text:.200}",
            fix="if the machine is busy with other work, run the command again: it resumes",
        )
    return {**reply.json(), "truth": question.answers[0] if question.answers else None}


def film_url(clip: Clip) -> str:
    """A clip as a data URL."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_film(Path(folder) / "clip", clip.frames(range(len(clip.times))), clip.times.tolist())
        return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


if __name__ == "__main__":
    main()

"""Online learning through an outside agent: what the same agent gains from the traffic of its own episodes.

    python -m benchmarks.agent_online --adapter CHECKPOINT [--seeds 42 1337 2024] [--groups 800] [--dir DIR]

A service without operations of its own (`toolbox.operations=[]`) serves a policy that was trained through
docs/examples/zoom_agent.py. The agent answers unlabelled questions about `warm` pictures: eight episodes a question
at `POST /v1/episodes`, which end without a reward, so that their vote decides. The agent answers 500 other warm
pictures before and after. Compare the gain with that of the quickstart's service (docs/results.md). Writes a line
for each seed to DIR/agent_online.jsonl; seeds that it has are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import ray

from benchmarks.harness import local_ray, machine, parse_args
from pixelis.actors import placement
from pixelis.actors.agent_runner import Agent, AgentQuestion, load_agent
from pixelis.config import Config, absolute, load
from pixelis.datasets.questions import read_questions
from pixelis.errors import InfraFailure
from pixelis.evaluation.statistics import paired_bootstrap
from pixelis.jobs import evaluate, serve
from pixelis.jobs.driver import run_folder
from pixelis.records import Question

AGENT = Path(__file__).parents[1] / "docs" / "examples" / "zoom_agent.py"
GROUP, AT_ONCE = 8, 6
"""Episodes of a question, and questions at once."""
EXPIRES_S = 45
"""Without a reward an episode ends when it expires."""
ATTEMPTS, PAUSE_S = 30, 2.0
"""To open an episode while too many are open."""
HELD_OUT = "cards:?split=test&seed=8&shift=warm"
STREAM = "cards:?split=validation&seed=9&shift=warm"


class Shown(AgentQuestion):
    """A question for a service, which does not have its pictures: each request carries them."""

    @property
    def content(self) -> list[dict[str, Any]]:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.pictures.values()]
        return [*parts, {"type": "text", "text": self.text}]


def configured(seed: int, folder: Path, args: argparse.Namespace) -> Config:
    overrides = {
        "run.dir": str(folder),
        "run.seed": seed,
        "run.resume": False,
        "policy.adapter": str(args.adapter),
        "policy.lora.vision_tower": True,
        "toolbox.operations": [],
        "rft.agent": f"{AGENT}:run",
        "learner.checkpoint_every": 1,
        "serve.port": args.port,
        "serve.episodes.max_open": 64 * GROUP,
        "evaluate.questions": args.questions,
    }
    return absolute(load("configs/nano/quickstart.yaml", overrides))


async def answer(url: str, config: Config, agent: Agent, questions: Sequence[Question]) -> Counter[str]:
    """Let the agent answer each question in a group of episodes; counts what became of them."""
    played, room = Counter[str](), asyncio.Semaphore(AT_ONCE)

    async def play(http: httpx.AsyncClient, client: openai.AsyncOpenAI, question: AgentQuestion) -> None:
        body = {"group": question.id, "samples": GROUP, "expires_s": EXPIRES_S}
        for _ in range(ATTEMPTS):
            reply = await http.post(f"{url}/v1/episodes", json=body)
            if reply.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
            await asyncio.sleep(PAUSE_S)
        reply.raise_for_status()
        try:
            await agent(question, client.with_options(base_url=reply.json()["base_url"]))
            played["ended"] += 1
        except openai.OpenAIError as error:
            played[type(error).__name__] += 1

    async def play_group(http: httpx.AsyncClient, client: openai.AsyncOpenAI, question: Question) -> None:
        async with room:
            shown = Shown.of(question, config.toolbox)
            await asyncio.gather(*(play(http, client, shown) for _ in range(GROUP)))

    async with (
        httpx.AsyncClient(timeout=config.serve.timeout_s) as http,
        openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=5) as client,
    ):
        await asyncio.gather(*(play_group(http, client, question) for question in questions))
    await asyncio.sleep(EXPIRES_S + PAUSE_S)
    return played


def measure(seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Accuracy before and after the stream, and what the service learnt."""
    config = configured(seed, folder, args)
    questions = list(read_questions(STREAM, limit=args.groups, epochs=1))
    with (
        run_folder(config),
        placement.placed(config, initial=str(args.adapter)) as actors,
        serve.serving(config, actors) as (url, backend),
        ThreadPoolExecutor(1) as background,
    ):
        evolution, first = backend.evolution, ray.get(actors.store.promoted.remote())
        assert evolution is not None
        learning = background.submit(serve.evolve, config, actors, evolution)
        try:
            before = evaluate.measure(config, actors, "before", first, source=HELD_OUT)
            while not ray.get(evolution.stats.remote())["learning"]:
                if learning.done():
                    raise learning.exception() or InfraFailure("the online learner ended early")
                time.sleep(0.2)
            played = asyncio.run(answer(url, config, load_agent(f"{AGENT}:run"), questions))
            ray.get(evolution.drain.remote())
            learning.result()
            stats = ray.get(evolution.stats.remote())
            decisions = Counter(row["decision"] for row in ray.get(evolution.canary_curve.remote()))
        finally:
            ray.get(evolution.stop.remote())
        last = ray.get(actors.store.promoted.remote())
        after = evaluate.measure(config, actors, "after", last, source=HELD_OUT)
    return {
        "seed": seed,
        "before": before.summary["accuracy"],
        "after": after.summary["accuracy"],
        "gain": paired_bootstrap(after.correct, before.correct, seed=seed),
        "groups": args.groups,
        "episodes": dict(played),
        "tasks": stats["received"],
        "updates": stats["updates"],
        "decisions": dict(decisions),
        "machine": machine(),
    }


def main() -> None:
    """Run the seeds that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapter", type=Path, required=True, help="checkpoint of RFT through the agent")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1337, 2024])
    parser.add_argument("--groups", type=int, default=800, help="questions of the stream")
    parser.add_argument("--questions", type=int, default=500, help="held-out questions")
    parser.add_argument("--port", type=int, default=8931, help="of the service")
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks/agent_online"))
    args = parse_args(parser, seeds=[42], groups=2, questions=8)
    args.adapter = args.adapter.absolute()
    args.dir.mkdir(parents=True, exist_ok=True)
    file = args.dir / "agent_online.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    known = {json.loads(line)["seed"] for line in lines}
    with local_ray(configured(args.seeds[0], args.dir / "cluster", args)):
        for seed in args.seeds:
            if seed in known:
                continue
            line = json.dumps(measure(seed, args.dir.absolute() / str(seed), args))
            with file.open("a", encoding="utf-8") as out:
                print(line, file=out)
            print(line, flush=True)


if __name__ == "__main__":
    main()

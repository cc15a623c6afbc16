"""Overhead of an outside agent: the same groups through an agent that only asks, and by our own loop.

    python -m benchmarks.outside_agent [--tokens 96] [--groups 4]

Both sides roll out the same questions with the same seeds on one generator, alternately, and sample the same
tokens, which is checked. The agent is a function in an AgentRunner, which sends the question by the openai client to
the episode routes, and names its picture as a file. The embedded model samples so hot that its turns are long,
without operations.
Goal: at most 1.15 times the seconds of our own loop.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, compare, local_ray, parse_args
from pixelis.actors import placement
from pixelis.actors.agent_rollouts import AgentRollouts
from pixelis.actors.generator_router import GeneratorRouter, RolloutRequest, RouterTimeouts
from pixelis.config import absolute, load
from pixelis.datasets.questions import read_questions
from pixelis.dialogue.session import SamplingParams
from pixelis.records import Group

GROUP, HOT = 8, 5.0


async def ask(question: Any, client: Any) -> None:
    """The agent: one question, and no reward of its own."""
    messages = [{"role": "user", "content": question.content}]
    await client.chat.completions.create(model="policy", messages=messages)


def tokens(groups: list[Group]) -> list[list[int]]:
    """What the policy sampled, in order."""
    return [turn.tokens for group in groups for t in group.trajectories for turn in t.replies]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=96, help="limit of a turn")
    parser.add_argument("--groups", type=int, default=4, help=f"groups of {GROUP} at once")
    parser.add_argument("--repeats", type=int, default=7)
    args = parse_args(parser, tokens=8, groups=1, repeats=2)
    report = Report("outside_agent")
    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            "run.dir": folder,
            "rft.agent": f"{Path(__file__).resolve()}:ask",
            "toolbox.operations": [],
            "dialogue.max_turn_tokens": args.tokens,
        }
        config = absolute(load("configs/nano/rft.yaml", overrides))
        with local_ray(config), placement.placed(config, learner=False) as actors:
            loop = asyncio.new_event_loop()
            router = GeneratorRouter(actors.generators, RouterTimeouts.of(config))
            outside = AgentRollouts(config, router)
            loop.run_until_complete(router.load(0))
            source = read_questions(config.data.train, seed=3)
            batches = [list(itertools.islice(source, args.groups)) for _ in range(args.repeats + 1)]

            def side(host: Any, seen: list[list[Group]], cpu_s: list[float]) -> Any:
                """Rolls out the next batch at each call, and adds the CPU seconds of this process."""
                remaining = iter(batches)

                async def roll_out() -> list[Group]:
                    sampling = SamplingParams(HOT, 1.0, args.tokens, 0)
                    requests = [RolloutRequest(q, q.id, GROUP, sampling) for q in next(remaining)]
                    results = await asyncio.gather(*map(host.rollout, requests))
                    return [result.group for result in results]

                def call() -> None:
                    started = time.process_time()
                    seen.append(loop.run_until_complete(roll_out()))
                    cpu_s.append(time.process_time() - started)

                return call

            theirs, ours = list[list[Group]](), list[list[Group]]()
            their_cpu_s, our_cpu_s = list[float](), list[float]()
            ratio = compare(side(outside, theirs, their_cpu_s), side(router, ours, our_cpu_s), args.repeats)
            assert outside.server is not None
            outside.server.cancel()
            loop.run_until_complete(asyncio.wait([outside.server]))
            assert list(map(tokens, theirs)) == list(map(tokens, ours)), "the two sides sampled other tokens"
            counts = [len(turn) for groups in ours for turn in tokens(groups)]
            report.row("tokens of a completion", sum(counts) / len(counts))
            report.row("seconds through the agent / by our own loop", ratio, goal="<= 1.15")
            at_once = args.groups * GROUP
            added_ms = 1e3 * (ratio.ours_s - ratio.baseline_s) / at_once
            report.row("ms that the agent adds to a completion", added_ms, note=f"{at_once} at once")
            cpu_ms = 1e3 * (statistics.median(their_cpu_s) - statistics.median(our_cpu_s)) / at_once
            report.row("CPU ms of them in the process with the routes", cpu_ms)
    report.close()


if __name__ == "__main__":
    main()

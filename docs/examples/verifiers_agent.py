"""Trains Pixelis through an environment of `verifiers` (0.4), which runs in a Python of its own.

verifiers wants openai<3 and mcp==2.0.0, Pixelis newer ones; they meet over HTTP:

    uv venv agents && uv pip install --python agents/bin/python verifiers
    agents/bin/python verifiers_agent.py TASKSET --rows rows.jsonl
    pixelis rft data.train=rows.jsonl rft.agent=http ...
    agents/bin/python verifiers_agent.py TASKSET --url http://127.0.0.1:PORT [--parallel 8]

The first call writes the tasks as questions. The second plays a task for each question that the trainer offers:
the environment's harness, tools and rewards are its own, its model is the episode.
"""

import argparse
import asyncio
import json
import os
from pathlib import Path

import httpx
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def environment(taskset: str) -> vf.Env:
    """The taskset with the chat harness, whose program runs in a process of this machine."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return load_environment(resolve_env_config({"taskset": {"id": taskset}, "agent": agent}))


async def play(env: vf.Env, tasks: dict[str, vf.Task], trainer: httpx.AsyncClient) -> None:
    """Play the questions that the trainer offers, until it ends."""
    while True:
        try:
            offer = await trainer.post("/v1/episodes/next", json={"wait_s": 30})
        except httpx.TransportError:  # the run has ended
            return
        if offer.status_code == 204:
            continue
        opened = offer.raise_for_status().json()
        address = f"/v1/episodes/{opened['id']}"
        client = vf.EvalClientConfig(base_url=opened["base_url"], api_key_var="PIXELIS_API_KEY")
        episode = await env.run_episode(tasks[opened["question"]], vf.ModelContext("pixelis", client))
        if episode.ok:
            await trainer.post(f"{address}/reward", json={"reward": episode.traces[0].reward})
        else:  # a fault of the environment is no reward of 0
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            cause = f"{errors[-1].type}: {errors[-1].message}"[:1000]
            await trainer.post(f"{address}/fail", json={"cause": cause})


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("taskset")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--parallel", type=int, default=8)
    options = parser.parse_args()
    env = environment(options.taskset)
    tasks = {task.data.prompt_text: task for task in env.taskset}
    if options.rows:
        rows = [json.dumps({"id": f"task{n}", "question": question}) for n, question in enumerate(tasks)]
        options.rows.write_text("\n".join(rows) + "\n")
        return
    headers = {"Authorization": f"Bearer {os.environ.get('PIXELIS_API_KEY', '')}"}
    async with (
        env.serving(),
        httpx.AsyncClient(base_url=options.url, headers=headers, timeout=600) as trainer,
    ):
        await asyncio.gather(*(play(env, tasks, trainer) for _ in range(options.parallel)))


if __name__ == "__main__":
    asyncio.run(main())

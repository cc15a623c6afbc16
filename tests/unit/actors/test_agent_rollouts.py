"""The episode routes of a training run, with a router that replies at once in the generators' place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from pixelis.actors.agent_rollouts import FILE_URL, AgentRollouts, create_app
from pixelis.actors.agent_runner import AgentQuestion
from pixelis.actors.group_views import GroupViews
from pixelis.actors.rollout_messages import RolloutRequest, RolloutResult
from pixelis.config import absolute, load
from pixelis.dialogue.session import SamplingParams
from pixelis.operations.image import png_url
from pixelis.records import Group, Media, Question, StopReason, Turn


class Router:
    """Keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[RolloutRequest] = []

    async def episodes(self, request: RolloutRequest, **_: Any) -> AsyncIterator[RolloutResult]:
        self.requests.append(request)
        trajectory = request.resume[0].trajectory
        reply = Turn(role="assistant", text="<answer>7</answer>", tokens=[2], log_probs=[-0.1])
        turns = [*trajectory.turns, Turn(role="user", text="q", tokens=[1]), reply]
        update = {"turns": turns, "answer": "7", "stop_reason": StopReason.ANSWER}
        replied = [trajectory.model_copy(update=update)]
        group = Group(id="g", question=request.question, trajectories=replied, policy_version=0)
        yield RolloutResult(group, GroupViews(None))  # type: ignore[arg-type]


def test_pictures_that_an_agent_names_or_sends_back_are_those_of_the_question(tmp_path: Path) -> None:
    async def main() -> None:
        config = absolute(load("configs/nano/rft.yaml", [f"run.dir={tmp_path}", "rft.agent=http"]))
        router = Router()
        rollouts = AgentRollouts(config, router)  # type: ignore[arg-type]
        picture = png_url(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8), 9)
        question = Question(id="q", question="Which?", media=[Media(id="img0", uri=picture)])
        shown = AgentQuestion.of(question, config.toolbox)
        own = {FILE_URL.format(media.id): media for media in question.media}
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=create_app(rollouts)),
            base_url="http://run",
            headers={"Authorization": f"Bearer {rollouts.key}"},
        )

        async def offered() -> Any:
            episode = rollouts.begin(question, "g", SamplingParams(), 60, own=own)
            rollouts.questions[episode.id] = shown
            await rollouts.offers.put(episode)
            return (await client.post("/v1/episodes/next", json={})).json()

        async def chat(episode: Any, *messages: Any) -> httpx.Response:
            body = {"model": "policy", "messages": messages}
            return await client.post(f"{episode['base_url']}/chat/completions", json=body)

        async with client:
            named = await offered()
            assert named["images"] == list(shown.pictures.values())
            first = {"role": "user", "content": shown.content}
            assert (await chat(named, first)).status_code == 200
            assert router.requests[-1].question.media == question.media
            again = {"role": "user", "content": shown.content}
            extended = await chat(named, first, {"role": "assistant", "content": "7"}, again)
            assert extended.json()["pixelis"]["branch"] == "main"
            (said,) = router.requests[-1].resume[0].said
            assert said.message is not None
            assert [(m.id, m.uri) for m in said.message.media] == [("img1", question.media[0].uri)]
            sent = await offered()
            pictures = [{"type": "image_url", "image_url": {"url": url}} for url in sent["images"]]
            text = {"type": "text", "text": sent["question"]}
            assert (await chat(sent, {"role": "user", "content": [*pictures, text]})).status_code == 200
            assert router.requests[-1].question.media == question.media
            wrong = [{"type": "file", "file": {"file_id": "img9"}}]
            refused = await chat(sent, {"role": "user", "content": wrong})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "file_not_found")
            path = f"/v1/episodes/{sent['id']}"
            rewards = [(await client.post(f"{path}/reward", json={"reward": v})).json() for v in (0.5, 9)]
            assert [reward["reward"] for reward in rewards] == [0.5, 0.5]
            assert (await client.post(f"{path}/fail", json={"cause": "late"})).json()["status"] == "rewarded"
            assert (await client.post("/v1/episodes", json={})).status_code == 403
            assert (await client.post("/v1/episodes/next", json={"wait_s": 0})).status_code == 204

    asyncio.run(main())

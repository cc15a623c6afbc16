"""A scripted stand-in for the Generator actor, and a handle on the deployed gateway."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import random
import re
import socket
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import ray
from PIL import Image
from ray.actor import ActorHandle

from pixelis.actors.generator_router import RolloutRequest
from pixelis.config import Config
from pixelis.errors import BadImage, InfraFailure
from pixelis.records import (
    Action,
    Group,
    ImageView,
    Media,
    Observation,
    Question,
    StopReason,
    Trajectory,
    Turn,
)
from pixelis.records.vectors import combine

KEY = "test-key-4711"


def picture_url(size: tuple[int, int] = (40, 30), format: str = "PNG", **options: Any) -> str:
    buffer = io.BytesIO()
    pixels = np.arange(size[0] * size[1] * 3, dtype=np.uint32).reshape(size[1], size[0], 3) % 251
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, format=format, **options)
    return f"data:image/{format.lower()};base64," + base64.b64encode(buffer.getvalue()).decode()


@ray.remote(num_cpus=0)
def refuse_picture() -> None:
    raise BadImage("the picture is not to our taste", code="image_undecodable")


@ray.remote(num_cpus=0, max_restarts=-1)
class ScriptedGenerator:
    """Follows commands in the question: ``say 7,7,8`` gives the samples' answers, ``wait 5`` sleeps before
    them.

    With the seed 0, ``mend 8`` gives other answers to a second group. ``pause 1`` sleeps between streamed
    turns. ``die0`` ends generator 0 at once, ``fall0`` after its first streamed turn; ``refuse0`` and
    ``break`` raise expected and unexpected errors, ``nested`` an error of an actor behind the generator.
    """

    def __init__(self, index: int):
        self.index, self.version, self.counts = index, 0, Counter[str]()
        self.sessions = 0

    async def ready(self) -> None:
        return None

    async def health(self) -> dict[str, Any]:
        return {"index": self.index, "version": self.version, "sessions": self.sessions}

    async def load(self, version: int) -> int:
        self.version = version
        return version

    async def pieces(self, turns: list[list[int]]) -> list[list[bytes]]:
        """An answer is told by its first letter, the second token."""
        return [
            [b"<answer>" if token < 1000 else chr(token - 1000).encode() for token in tokens]
            for tokens in turns
        ]

    async def counters(self) -> dict[str, int]:
        return dict(self.counts)

    @ray.method(num_returns=2)
    async def rollout(self, request: RolloutRequest):  # type: ignore[no-untyped-def]
        self.counts["rollouts"] += 1
        group, views = await self._play(request)
        return group, views, *self._first_views(request)

    @ray.method(num_returns="streaming")
    async def stream(self, request: RolloutRequest):  # type: ignore[no-untyped-def]
        self.counts["rollouts"] += 1
        question = request.question
        pause = re.search(r"pause ([\d.]+)", question.question)
        rollout = asyncio.ensure_future(self._play(request))
        try:
            group, views = await rollout
            for place in range(1, max(len(t.turns) for t in group.trajectories)):
                first = group.trajectories[0].turns[place : place + 1]
                if request.text and first and first[0].role == "assistant":
                    for letter in first[0].text:
                        yield [(0, letter)]
                turns = [(sample, t.turns[place], t.id) for sample, t in enumerate(group.trajectories)]
                bare = {"tokens": [], "log_probs": []}
                yield [
                    (sample, turn.model_copy(update=bare), views[id][1:] if turn.role == "tool" else [])
                    for sample, turn, id in turns
                ]
                if pause:
                    await asyncio.sleep(float(pause[1]))
                if f"fall{self.index}" in question.question:
                    await asyncio.sleep(0.5)  # what it sent has arrived
                    os._exit(1)
            self.counts["streamed"] += 1
            yield group
            yield views
            for nothing in self._first_views(request):
                yield nothing
        except (GeneratorExit, asyncio.CancelledError):
            self.counts["closed"] += 1
            raise
        finally:
            rollout.cancel()

    def _first_views(self, request: RolloutRequest) -> list[None]:
        """None for each medium: all views are returned with the episodes."""
        return [None] * len(request.question.media if request.views else [])

    async def _play(self, request: RolloutRequest):  # type: ignore[no-untyped-def]
        self.sessions += request.samples
        try:
            return await self._answer(request)
        finally:
            self.sessions -= request.samples

    async def _answer(self, request: RolloutRequest):  # type: ignore[no-untyped-def]
        question, group_id = request.question, request.group_id
        script = question.question
        if wait := re.search(r"wait ([\d.]+)", script):
            try:
                await asyncio.sleep(float(wait[1]))
            except asyncio.CancelledError:
                self.counts["cancelled"] += 1
                raise
        if f"die{self.index}" in script:
            os._exit(1)
        if "break" in script:
            raise RuntimeError("secret internals")
        if "nested" in script:  # as when the Toolbox behind a generator refuses
            await refuse_picture.remote()
        if f"refuse{self.index}" in script:
            raise InfraFailure("not here")
        say = re.search(r"say (\S+)", script)
        answers = say[1].split(",") if say else ["7"]
        # The second time
        if (mended := re.search(r"mend (\S+)", script)) and request.sampling.seed >= request.samples:
            answers = [mended[1]]
        if "recall" in script:  # the earlier answers and how many pictures came with each question
            counts = "".join(str(len(exchange.media)) for exchange in question.history)
            earlier = "".join(exchange.answer for exchange in question.history)
            answers = [f"{earlier} {counts} of {len(question.media)}"]
        episodes = [
            self._episode(question, group_id, answers[i % len(answers)], request.operations)
            for i in range(request.samples)
        ]
        for last in (t.turns[-1] for t, _ in episodes if request.sampling.top_log_probs):
            last.top_log_probs = [
                [(token + n, log_prob - n) for n in range(request.sampling.top_log_probs)]
                for token, log_prob in zip(last.tokens, last.log_probs, strict=True)
            ]
        group = Group(
            id=group_id, question=question, trajectories=[t for t, _ in episodes], policy_version=self.version
        )
        return group, {t.id: views for t, views in episodes}

    def _episode(
        self, question: Question, group_id: str, answer: str, operations: bool
    ) -> tuple[Trajectory, list[np.ndarray]]:
        picture = question.media[0] if question.media else Media(id="none", uri="none")
        source = picture.width or 8, picture.height or 8
        images = [ImageView(id="img0", source_size=source, view_size=(8, 8))]
        views = [np.full((8, 8, 3), 10, np.uint8)]
        turns = [Turn(role="user", text=question.question, tokens=[1, 2, 3], images=["img0"])]
        if operations:
            box = (0.25, 0.25, 0.75, 0.75)
            crop = ImageView(id="obs1", parent="img0", box=box, source_size=(4, 4), view_size=(8, 8))
            images.append(crop)
            views.append(np.full((8, 8, 3), 200, np.uint8))
            use = (
                {"real": -0.1, "blank": -2.3, "elsewhere": -2.5, "another": -9.0}
                if question.question.endswith("!")
                else {}
            )
            seen = Observation(
                status="ok", id="obs1", text="obs1 = zoom_in(img0)", images=[crop], answer_log_probs=use
            )
            action = Action(op="zoom_in", arguments={"box": box})
            turns.append(Turn(role="assistant", text="zoom", tokens=[4], log_probs=[-0.1], action=action))
            turns.append(Turn(role="tool", tokens=[5], images=["obs1"], observation=seen))
        tokens, text = [6, 1000 + ord(answer[0])], f"<answer>{answer}</answer>"
        turns.append(Turn(role="assistant", text=text, tokens=tokens, log_probs=[-0.2, -0.3]))
        reached = answer != "none"
        trajectory = Trajectory(
            question_id=question.id,
            group_id=group_id,
            images=images,
            turns=turns,
            answer=answer if reached else None,
            stop_reason=StopReason.ANSWER if reached else StopReason.LENGTH,
            policy_version=self.version,
        )
        return trajectory, views


@ray.remote(num_cpus=0, max_restarts=-1)
class ScriptedEmbedder:
    """Vectors of 4 x 4 grey values and of the words, weighted as the Embedder weights them."""

    def question_vector(self, question: Question, views: list[np.ndarray]) -> np.ndarray:
        words = np.zeros(16, np.float32)
        for word in question.question.split():
            words[sum(word.encode()) % 16] += 1
        cells = [
            np.asarray(Image.fromarray(view).convert("L").resize((4, 4), Image.Resampling.BOX)).ravel()
            for view in views
        ]
        grey = np.mean(cells, axis=0) if cells else np.zeros(16)
        visual, text = np.concatenate([grey, np.zeros(16)]), np.concatenate([np.zeros(16), words])
        return combine(visual if views else None, text if question.question else None)


@dataclass
class Deployed:
    """The running gateway and the actors behind it."""

    config: Config
    url: str
    generators: list[ActorHandle]
    evolution: ActorHandle

    def client(self, key: str | None = KEY, timeout: float | httpx.Timeout = 30.0) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        # Plain HTTP: reading the certificates of the world for each client would take longer than most
        # requests.
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, verify=False)

    def ask(self, question: str, key: str | None = KEY, **changes: Any) -> httpx.Response:
        with self.client(key) as client:
            return client.post("/v1/agent", json={"question": question, "image": picture_url(), **changes})

    def stats(self) -> dict[str, int]:
        return ray.get(self.evolution.stats.remote())

    def counters(self) -> Counter[str]:
        total = Counter[str]()
        for counts in ray.get([g.counters.remote() for g in self.generators]):
            total.update(counts)
        return total


def free_port() -> int:
    """A free port below those that the system gives to others: Ray's processes take hundreds before the port
    is used.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

"""Asks a model behind an OpenAI-compatible address an evaluation's questions; its replies become episodes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import itertools
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import ExifTags, Image

from pixelis.config import Config
from pixelis.datasets.media import open_media
from pixelis.dialogue.agent import Episode, Limits, Tools, play
from pixelis.dialogue.chat import ChatConversation, ChatReply, Message, picture_part
from pixelis.dialogue.dialects import DIALECTS
from pixelis.errors import DataFailure, InfraFailure
from pixelis.jobs.watch import call_in_thread
from pixelis.operations.encoded import read_encoded
from pixelis.operations.image import load_image, png_url
from pixelis.operations.media import segment_centers
from pixelis.operations.pictures import frame_label
from pixelis.operations.pixel_budget import shrink
from pixelis.operations.video import Clip
from pixelis.records import Group, ImageView, Media, Question, StopReason, Trajectory
from pixelis.rewards.llm_client import LlmClient

T = TypeVar("T")
DIALECT = DIALECTS["plain"]
SENT = ("PNG", "JPEG", "WEBP")
"""Formats of picture files that are sent as they are; others are sent as PNG."""
FRAME_QUALITY = 95
"""Of the JPEG that a clip's frame is sent as."""
UNREACHABLE = ("api_timeout", "api_busy", "api_error")
"""Failures of the service, not of a question."""
MAX_FAILURES_IN_A_ROW = 10


class ChatModel:
    """The model of ``evaluate.api``. Raises BadConfig when url, model or key are missing.

    A repeated evaluation asks only for replies that are missing in ``folder``. ``max_pixels`` shrinks pictures.
    """

    def __init__(self, config: Config, folder: Path, max_pixels: int | None = None):
        self.config, self.api, self.max_pixels = config, config.evaluate.api, max_pixels
        # Replies of another service to the same requests are another model's.
        store = folder / f"replies-{hashlib.sha256((self.api.url or '').encode()).hexdigest()[:8]}.sqlite"
        if not config.run.resume:
            for path in folder.glob(f"{store.name}*"):
                path.unlink()
        self.client = LlmClient(
            self.api,
            "evaluate.api",
            store,
            code="api",
            concurrency=self.api.concurrency,
            temperature_step=0.0,
        )
        self._failures = 0
        """Requests in a row without an answer."""

    def groups(
        self,
        questions: Sequence[Question],
        samples: int,
        seeds: Sequence[int],
        on_done: Callable[[int], None],
    ) -> list[Group]:
        """``samples`` episodes of each question for each seed (without seeds: in total).

        ``on_done`` receives the number of finished episodes. InfraFailure when several questions in a row get
        no answer; what was answered is kept. BadConfig for a wrong key, model or address, BadInput for media.
        """
        return asyncio.run(self.play_groups(self.episode, questions, samples, seeds, on_done))

    async def play_groups(
        self,
        episode: Callable[[Question, int | None, int], Awaitable[Trajectory]],
        questions: Sequence[Question],
        samples: int,
        seeds: Sequence[int],
        on_done: Callable[[int], None],
    ) -> list[Group]:
        """As `groups`, with the episodes that ``episode`` plays for a question, a seed and a sample."""
        draws = list(itertools.product(seeds or (None,), range(samples)))
        slots, count = asyncio.Semaphore(self.api.concurrency), itertools.count(1)

        async def play_one(question: Question, seed: int | None, sample: int) -> Trajectory:
            async with slots:
                trajectory = await episode(question, seed, sample)
            on_done(next(count))
            return trajectory

        try:
            trajectories = iter(
                await asyncio.gather(*(play_one(question, *draw) for question in questions for draw in draws))
            )
        except BaseException:
            self.client.stopping.set()
            raise
        return [
            Group(id=q.id, question=q, trajectories=list(itertools.islice(trajectories, len(draws))))
            for q in questions
        ]

    async def episode(self, question: Question, seed: int | None, sample: int) -> Trajectory:
        """One answer without operations; errors as in `groups`."""
        shown = await self.submit(lambda: [pair for media in question.media for pair in self._parts(media)])
        parts = {view.id: messages for view, messages in shown}
        instruct = self.config.dialogue.instructs
        conversation = ChatConversation(
            self.asker(seed, sample), DIALECT, {}, "unit", instruct=instruct, parts=parts
        )
        return await self.play(conversation, question, seed, sample, [view for view, _ in shown])

    def asker(self, seed: int | None, sample: int) -> Callable[[list[Message]], Awaitable[ChatReply]]:
        """`ask` for one sample, in a thread."""
        return lambda messages: self.submit(self.ask, messages, seed, sample)

    async def play(
        self,
        conversation: ChatConversation,
        question: Question,
        seed: int | None,
        sample: int,
        images: Sequence[ImageView],
        views: Sequence[np.ndarray] = (),
        tools: Tools | None = None,
    ) -> Trajectory:
        """Play an episode; errors as in `groups`. A refused request makes it unscored."""
        started = time.perf_counter()
        trajectory = Trajectory(
            id=f"{question.id}-{sample}" if seed is None else f"{question.id}-s{seed}-{sample}",
            question_id=question.id,
            group_id=question.id,
            dialect=conversation.dialect.name,
            images=[image.model_copy() for image in images],
        )
        try:
            limits = Limits.of(self.config.dialogue, test=True)
            trajectory.stop_reason = await play(
                conversation, question, Episode(trajectory, list(views)), tools, limits
            )
        except DataFailure as failure:
            trajectory.stop_reason, trajectory.unscored = StopReason.ERROR, failure.code
        trajectory.seconds = time.perf_counter() - started
        return trajectory

    def submit(self, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.wrap_future(call_in_thread(lambda: call(*arguments)))

    def ask(self, messages: list[Message], seed: int | None, sample: int) -> ChatReply:
        """The reply to a chat, of this sample alone. DataFailure for this chat; others as in `groups`."""
        sampling = self.config.evaluate.sampling
        body: dict[str, Any] = {"model": self.api.model, "messages": messages, **self.api.parameters}
        body |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
        if seed is not None:  # another one for each sample, in the range that services accept
            body["seed"] = int.from_bytes(hashlib.sha256(f"{seed}:{sample}".encode()).digest()[:4]) >> 1
        try:
            reply = self.client.post(
                "chat/completions",
                body,
                _extract,
                lambda text: ChatReply(**json.loads(text)),
                sample,
                sampling.temperature,
            )
        except DataFailure as failure:
            self._failures += failure.code in UNREACHABLE
            if failure.code in UNREACHABLE and self._failures >= MAX_FAILURES_IN_A_ROW:
                raise InfraFailure(
                    f"{self._failures} questions in a row got no answer; the last: {failure.message}",
                    code=failure.code,
                    fix="repeat the command when the service is back: it asks what is missing",
                ) from None
            raise
        self._failures = 0
        return reply

    def _parts(self, media: Media) -> list[tuple[ImageView, list[Message]]]:
        """The picture, or evenly spread frames of the clip, each with its parts of the message."""
        toolbox = self.config.toolbox
        if media.kind == "video":
            clip = open_media(media, toolbox)
            assert isinstance(clip, Clip)
            numbers, parts = segment_centers(len(clip.times), self.config.dialogue.frames), []
            for i, (number, frame) in enumerate(zip(numbers, clip.frames(numbers), strict=True)):
                view, seconds = self._shrunk(frame), float(clip.times[number])
                label = {"type": "text", "text": f"{frame_label(number, seconds)}:"}
                source = {"parent": media.id, "frame": number, "time": seconds}
                file = io.BytesIO()
                Image.fromarray(view).save(file, "JPEG", quality=FRAME_QUALITY)
                url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
                parts.append((_view(f"{media.id}.{i}", frame, view, **source), [label, picture_part(url)]))
            return parts
        if media.uri.lower().startswith("cards:"):
            picture = open_media(media, toolbox)
            assert isinstance(picture, np.ndarray)
        else:
            content = read_encoded(media.uri, toolbox.max_image_bytes, "image")
            picture = load_image(content, toolbox.max_image_bytes, toolbox.max_image_pixels)
            # Not every service turns a picture as its EXIF tag says
            with Image.open(io.BytesIO(content)) as opened:
                kind = opened.format or ""
                upright = opened.getexif().get(ExifTags.Base.Orientation, 1) == 1
            if self._shrunk(picture) is picture and kind in SENT and upright:
                url = f"data:{Image.MIME[kind]};base64,{base64.b64encode(content).decode()}"
                return [(_view(media.id, picture, picture), [picture_part(url)])]
        view = self._shrunk(picture)
        return [(_view(media.id, picture, view), [picture_part(png_url(view))])]

    def _shrunk(self, picture: np.ndarray) -> np.ndarray:
        height, width = picture.shape[:2]
        if self.max_pixels is None or height * width <= self.max_pixels:
            return picture
        return shrink(picture, math.floor(max(height, width) * math.sqrt(self.max_pixels / (height * width))))

    def close(self) -> None:
        self.client.close()


def _extract(body: bytes) -> str:
    """Text, reasoning and finish reason of a chat completion, as JSON; ValueError, KeyError for garbage."""
    choice = json.loads(body)["choices"][0]
    message = choice["message"]
    text = message.get("content") or ""
    if isinstance(text, list):  # some services answer in parts
        text = "".join(part["text"] for part in text if part.get("type") == "text")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    truncated = choice.get("finish_reason") == "length"
    return json.dumps({"text": text, "reasoning": reasoning, "truncated": truncated})


def _view(name: str, source: np.ndarray, view: np.ndarray, **origin: Any) -> ImageView:
    sizes = {"source_size": (source.shape[1], source.shape[0]), "view_size": (view.shape[1], view.shape[0])}
    return ImageView.model_validate({"id": name, **sizes, **origin})

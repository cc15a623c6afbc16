"""Asks a model behind an OpenAI-compatible address the questions of an evaluation; its replies become episodes."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from pixelis.config import Config
from pixelis.datasets.media import open_media
from pixelis.datasets.synthesis.chat import data_url
from pixelis.dialogue.dialects import DIALECTS, Dialect, Piece
from pixelis.errors import BadInput, DataFailure, InfraFailure
from pixelis.operations.encoded import media_type, read_encoded
from pixelis.operations.image import load_image
from pixelis.operations.media import segment_centers
from pixelis.operations.pictures import frame_label
from pixelis.operations.pixel_budget import shrink
from pixelis.operations.scale import Scale
from pixelis.operations.video import Clip
from pixelis.records import Group, ImageView, Media, Question, StopReason, Trajectory, Turn
from pixelis.rewards.llm_client import LlmClient

T = TypeVar("T")
DIALECT = DIALECTS["plain"]
SENT = ("image/png", "image/jpeg", "image/webp")
"""Types of picture files that are sent as they are; others are sent as PNG."""
FRAME_QUALITY = 95
"""Of the JPEG that a clip's frame is sent as."""
ORIENTATION = 0x0112
"""The EXIF tag."""
UNREACHABLE = ("api_timeout", "api_busy", "api_error")
"""Failures of the service, not of a question."""
MAX_FAILURES_IN_A_ROW = 10


@dataclass(frozen=True)
class Reply:
    """What a model said. ``truncated``: its length ended it."""

    text: str
    reasoning: str = ""
    truncated: bool = False

    @property
    def transcript(self) -> str:
        """The text after the reasoning in thought tags."""
        return f"<think>{self.reasoning}</think>\n{self.text}" if self.reasoning else self.text


class ChatModel:
    """The model of ``evaluate.api``; thread-safe. Raises BadConfig when url, model or key are missing.

    Replies are kept in ``folder``, so that a repeated evaluation asks only what is missing. ``max_pixels`` shrinks pictures;
    without it they are sent in full.
    """

    def __init__(self, config: Config, folder: Path, max_pixels: int | None = None):
        self.config, self.api, self.max_pixels = config, config.evaluate.api, max_pixels
        # Replies of another service to the same requests are another model's.
        store = folder / f"replies-{hashlib.sha256((self.api.url or '').encode()).hexdigest()[:8]}.sqlite"
        if not config.run.resume:
            for path in folder.glob(f"{store.name}*"):
                path.unlink()
        self.client = LlmClient(
            self.api, "evaluate.api", store, code="api", concurrency=self.api.concurrency, temperature_step=0.0
        )
        self._failures = 0
        self._lock = threading.Lock()
        self._calls = SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]()
        for _ in range(self.api.concurrency):
            threading.Thread(target=self._work, name="chat", daemon=True).start()

    def groups(
        self, questions: Sequence[Question], samples: int, seeds: Sequence[int], on_done: Callable[[int], None]
    ) -> list[Group]:
        """``samples`` episodes of each question for each seed (without seeds: in total).

        ``on_done`` receives the number of finished episodes. InfraFailure when several questions in a row get no answer from the
        service; what was answered is kept. BadConfig for a wrong key, model or address, BadInput for a picture or clip that
        cannot be opened.
        """
        draws = list(itertools.product(seeds or (None,), range(samples)))
        futures = [[self.submit(self.episode, question, *draw) for draw in draws] for question in questions]
        try:
            for count, future in enumerate(as_completed(itertools.chain(*futures)), 1):
                future.result()
                on_done(count)
        except BaseException:
            self.client.stopping.set()
            raise
        answers = [[future.result() for future in row] for row in futures]
        return [Group(id=q.id, question=q, trajectories=ts) for q, ts in zip(questions, answers, strict=True)]

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call in one of as many threads as requests may be in flight; a stopped job does not wait for them."""
        future = Future[T]()
        self._calls.put((future, call, arguments))
        return future

    def _work(self) -> None:
        while (item := self._calls.get()) is not None and not self.client.stopping.is_set():
            future, call, arguments = item
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

    def episode(self, question: Question, seed: int | None, sample: int) -> Trajectory:
        """One answer. A refused request gives an unscored episode; for errors see ``groups``."""
        started = time.perf_counter()
        trajectory = Trajectory(
            id=f"{question.id}-{sample}" if seed is None else f"{question.id}-s{seed}-{sample}",
            question_id=question.id,
            group_id=question.id,
            dialect=DIALECT.name,
        )
        messages, trajectory.images, trajectory.turns = self.messages(question)
        try:
            reply = self.ask(messages, seed, sample)
        except DataFailure as failure:
            trajectory.stop_reason, trajectory.unscored = StopReason.ERROR, failure.code
            return trajectory
        trajectory.turns.append(Turn(role="assistant", text=reply.transcript))
        trajectory.answer = DIALECT.parse(reply.text, {}, Scale("unit")).answer
        trajectory.stop_reason = StopReason.NO_ACTION if trajectory.answer is None else StopReason.ANSWER
        if reply.truncated:
            trajectory.answer, trajectory.stop_reason = None, StopReason.LENGTH
        trajectory.seconds = time.perf_counter() - started
        return trajectory

    def ask(self, messages: list[dict[str, Any]], seed: int | None, sample: int) -> Reply:
        """The reply to a chat; equal chats of different samples are asked for separately. DataFailure, and see ``groups``."""
        sampling = self.config.evaluate.sampling
        body: dict[str, Any] = {"model": self.api.model, "messages": messages, **self.api.parameters}
        body |= {"max_tokens": self.api.max_tokens} if self.api.max_tokens else {}
        body |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
        body |= {"seed": _seed(seed, sample)} if seed is not None else {}
        try:
            reply = self.client.post("chat/completions", body, _reply, _read, sample, sampling.temperature)
        except DataFailure as failure:
            self._failed(failure)
            raise
        with self._lock:
            self._failures = 0
        return reply

    def _failed(self, failure: DataFailure) -> None:
        if failure.code not in UNREACHABLE:
            return
        with self._lock:
            self._failures += 1
            if self._failures < MAX_FAILURES_IN_A_ROW:
                return
        message = f"{self._failures} questions in a row got no answer; the last: {failure.message}"
        raise InfraFailure(message, code=failure.code, fix="repeat the command when the service is back: it asks what is missing")

    def messages(self, question: Question) -> tuple[list[dict[str, Any]], list[ImageView], list[Turn]]:
        """The messages of a request, the pictures in them, and the same as turns."""
        shown = [pair for media in question.media for pair in self._parts(media)]
        contents = {view.id: parts for view, parts in shown}
        views, instruct = [view for view, _ in shown], self.config.dialogue.system != "none"
        messages, turns = chat(question, views, contents, DIALECT, False, instruct)
        return messages, views, turns

    def _parts(self, media: Media) -> list[tuple[ImageView, list[dict[str, Any]]]]:
        """The picture, or ``dialogue.frames`` evenly spread frames of the clip, each with its parts of the message."""
        toolbox = self.config.toolbox
        if media.kind == "video":
            clip = open_media(media, toolbox)
            assert isinstance(clip, Clip)
            numbers, parts = segment_centers(len(clip.times), self.config.dialogue.frames), []
            for i, (number, frame) in enumerate(zip(numbers, clip.frames(numbers), strict=True)):
                view, seconds = self._shrunk(frame), float(clip.times[number])
                label = {"type": "text", "text": f"{frame_label(number, seconds)}:"}
                source = {"parent": media.id, "frame": number, "time": seconds}
                parts.append((_view(f"{media.id}.{i}", frame, view, **source), [label, picture_part(_jpeg(view))]))
            return parts
        if media.uri.lower().startswith("cards:"):
            picture = open_media(media, toolbox)
            assert isinstance(picture, np.ndarray)
        else:
            content = read_encoded(media.uri, toolbox.max_image_bytes, "image")
            picture = load_image(content, toolbox.max_image_bytes, toolbox.max_image_pixels)
            if self._shrunk(picture) is picture and (kind := _type(content)) in SENT and not _turned(content):
                url = f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
                return [(_view(media.id, picture, picture), [picture_part(url)])]
        view = self._shrunk(picture)
        return [(_view(media.id, picture, view), [picture_part(data_url(view))])]

    def _shrunk(self, picture: np.ndarray) -> np.ndarray:
        height, width = picture.shape[:2]
        if self.max_pixels is None or height * width <= self.max_pixels:
            return picture
        return shrink(picture, math.floor(max(height, width) * math.sqrt(self.max_pixels / (height * width))))

    def close(self) -> None:
        """Close connections and the file of replies, and end the threads that are not in a request."""
        for _ in range(self.api.concurrency):
            self._calls.put(None)
        self.client.close()


def chat(
    question: Question,
    views: Sequence[ImageView],
    contents: Mapping[str, list[dict[str, Any]]],
    dialect: Dialect,
    tools: bool,
    instruct: bool,
) -> tuple[list[dict[str, Any]], list[Turn]]:
    """The messages of a conversation up to its question, and the same as turns. ``contents``: the parts of each view by id."""
    messages, turns, left = list[dict[str, Any]](), list[Turn](), {view.parent or view.id for view in views}

    def ask(text: str, media: set[str]) -> None:
        own = [view for view in views if (view.parent or view.id) in media]
        pieces = dialect.question(text, own, tools, instruct)
        messages.append({"role": "user", "content": content_of(pieces, contents)})
        turns.append(Turn(role="user", text=text_of(pieces), images=[view.id for view in own]))

    for exchange in question.history:
        ask(exchange.question, set(exchange.media))
        left -= set(exchange.media)
        messages.append({"role": "assistant", "content": exchange.answer})
        turns[-1].text += f"\n{exchange.answer}"
    ask(question.question, left)
    return messages, turns


def content_of(pieces: Sequence[Piece], contents: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Text and pictures as the parts of a message."""
    parts = list[dict[str, Any]]()
    for piece in pieces:
        parts += [{"type": "text", "text": str(piece)}] if isinstance(piece, str) else contents[piece.id]
    return parts


def text_of(pieces: Sequence[Piece]) -> str:
    """The text among the pieces of a turn."""
    return "".join(str(piece) for piece in pieces if isinstance(piece, str))


def _read(text: str) -> Reply:
    """The reply that ``_reply`` has written."""
    return Reply(**json.loads(text))


def _reply(body: bytes) -> str:
    """Text, reasoning and finish reason of a chat completion, as JSON; ValueError and KeyError for anything else."""
    choice = json.loads(body)["choices"][0]
    message = choice["message"]
    text = message.get("content") or ""
    if isinstance(text, list):  # some services answer in parts
        text = "".join(part["text"] for part in text if part.get("type") == "text")
    if not isinstance(text, str):
        raise ValueError("the reply has no text")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    truncated = choice.get("finish_reason") == "length"
    return json.dumps({"text": text, "reasoning": reasoning if isinstance(reasoning, str) else "", "truncated": truncated})


def _seed(seed: int, sample: int) -> int:
    """The seed of a request: another one for each sample, in the range that services accept."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{sample}".encode()).digest()[:4]) >> 1


def _type(content: bytes) -> str:
    try:
        return media_type(content)
    except BadInput:
        return ""


def _turned(content: bytes) -> bool:
    """Whether a picture is to be turned or mirrored for display, which not every service does."""
    with Image.open(io.BytesIO(content)) as picture:
        return picture.getexif().get(ORIENTATION, 1) != 1


def _view(name: str, source: np.ndarray, view: np.ndarray, **origin: Any) -> ImageView:
    sizes = {"source_size": (source.shape[1], source.shape[0]), "view_size": (view.shape[1], view.shape[0])}
    return ImageView.model_validate({"id": name, **sizes, **origin})


def picture_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _jpeg(frame: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=FRAME_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"

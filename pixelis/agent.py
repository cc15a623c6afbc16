"""A policy and its operations in this process: `pixelis.Agent` answers from Python, without Ray.

The engine and the episodes run on an event loop in a thread of their own, so `ask` also works where a loop runs
already, as in a notebook. Operations run in threads of this process, without a toolbox's limit on memory: one that
takes longer than `toolbox.timeout_s` is reported to the policy, but not stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from PIL import Image

from pixelis.config import Config, absolute, load
from pixelis.datasets.media import open_media
from pixelis.dialogue.agent import Episode, Limits, Outcome, run_episode
from pixelis.dialogue.augmentation import AugmentedSession, alternate
from pixelis.dialogue.failures import require_completed
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import SamplingParams
from pixelis.engines import Engine, start_engine
from pixelis.errors import BadImage, BadInput, InfraFailure
from pixelis.operations import Scene, execute, select
from pixelis.operations.encoded import check_pixels
from pixelis.operations.image import rgb
from pixelis.operations.media import first_look
from pixelis.operations.video import Clip
from pixelis.policy.adapters import Adapter, load_adapter
from pixelis.policy.model_path import resolve
from pixelis.records import Action, ImageView, Media, Question, Trajectory, Verdict, new_id
from pixelis.rewards import vote

NANO, OTHERS = "configs/nano/base.yaml", "configs/first_run/base.yaml"
"""Default configurations: of the embedded model, and of others."""

Picture = str | Path | Image.Image | np.ndarray
"""A path, a ``data:`` URL, a picture of Pillow, or uint8 [H, W, 3], RGB."""


@dataclass(frozen=True)
class Answer:
    """The answer to a question, and the episode that gave it; a notebook shows the episode with its crops.

    ``confidence`` is that of the samples' vote (docs/evolution.md), None for one sample, which cannot agree with
    another. ``samples`` are all episodes, ``trajectory`` the winner.
    """

    answer: str | None
    confidence: float | None
    question: Question = field(repr=False)
    trajectory: Trajectory = field(repr=False)
    verdict: Verdict = field(repr=False)
    samples: list[Trajectory] = field(repr=False)
    pixels: Mapping[str, np.ndarray] = field(repr=False)
    """Views of the trajectory by image id, uint8 [h, w, 3]."""
    originals: Mapping[str, np.ndarray] = field(repr=False)
    """The question's pictures at full size by id, uint8 [H, W, 3]."""

    @property
    def views(self) -> dict[str, Image.Image]:
        """All that the policy saw, by image id."""
        return {name: Image.fromarray(view) for name, view in self.pixels.items()}

    @property
    def crops(self) -> dict[str, Image.Image]:
        """What the operations showed to the policy, by image id (``obs1``)."""
        shown = {image.id for observation in self.trajectory.observations for image in observation.images}
        return {name: view for name, view in self.views.items() if name in shown}

    def _repr_html_(self) -> str:
        from pixelis.telemetry.html.episode import EpisodePage
        from pixelis.telemetry.html.render import render

        title = "" if self.confidence is None else f"confidence {self.confidence:.2f}"
        page = EpisodePage(self.question, self.trajectory, {**self.pixels, **self.originals}, title)
        document = html.escape(render("answer.html", title="Answer", page=page))
        # Without scripts, forms and links to the notebook: the policy and the pictures wrote what it shows.
        style = "width:100%;height:640px;border:0;resize:vertical"
        return f'<iframe sandbox title="Answer" style="{style}" srcdoc="{document}"></iframe>'


class Agent:
    """Answers questions about pictures and clips. It may be shared by threads, and is closed by `close` or ``with``."""

    def __init__(self, config: Config):
        self.config = config
        self.operations = {operation.name: operation for operation in select(config.toolbox.operations)}
        for operation in self.operations.values():
            operation.ready(config.toolbox)
        adapter = load_adapter(config.policy.adapter) if config.policy.adapter else None
        self._loop, self._closed = asyncio.new_event_loop(), False
        self._thread = threading.Thread(target=self._loop.run_forever, name="pixelis-agent", daemon=True)
        self._thread.start()
        try:
            starting = self._start(resolve(config.policy.model), adapter)
            self.engine, self.renderer = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        except BaseException:
            self._end_loop()
            raise

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        adapter: str | Path | None = None,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        **overrides: Any,
    ) -> Agent:
        """Load a model (`nano`, a folder, owner/name of the hub) with an adapter (a run, a checkpoint, PEFT's format).

        ``config`` and ``overrides`` as in `pixelis.rft`; by default configs/nano/base.yaml, or for another model
        configs/first_run/base.yaml. An adapter needs the `dialogue` that it was trained with: name RUN/config.yaml.
        Raises BadConfig, MissingFile, MissingDependency, and BadInput for an adapter of another model.
        """
        named = {"policy.model": model, "policy.adapter": adapter}
        given = {key: str(value) for key, value in named.items() if value is not None}
        default = NANO if model in (None, "nano") else OTHERS
        return cls(absolute(load(config or default, given | overrides)))

    async def _start(self, folder: Path, adapter: Adapter | None) -> tuple[Engine, Renderer]:
        engine = start_engine(self.config, folder, self.config.run.seed)
        try:
            await engine.load(0, adapter)
            operations = list(self.operations.values())
            return engine, Renderer(engine.tokenizer, engine.spec, self.config.dialogue, operations)
        except BaseException:
            await engine.aclose()
            raise

    @overload
    def ask(
        self,
        question: str,
        images: Sequence[Picture] = (),
        videos: Sequence[str | Path] = (),
        samples: int = 1,
    ) -> Answer: ...

    @overload
    def ask(
        self,
        question: list[str],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        samples: int = 1,
    ) -> list[Answer]: ...

    def ask(
        self,
        question: str | list[str],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        samples: int = 1,
    ) -> Answer | list[Answer]:
        """Answer a question about pictures and clips (paths or ``data:`` URLs), or a list of questions as a batch.

        Several questions share the media, unless ``images`` or ``videos`` has a list for each. One sample is greedy;
        several, drawn with `serve.sampling`, vote. Raises BadInput for media and prompts that cannot be used,
        InfraFailure if the engine fails or the agent is closed.
        """
        future = self._submit(question, images, videos, samples)
        try:
            return future.result()
        finally:
            future.cancel()  # after Ctrl-C

    async def aask(
        self,
        question: str | list[str],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        samples: int = 1,
    ) -> Any:
        """`ask` as a coroutine of any event loop; cancelling it ends the episodes."""
        return await asyncio.wrap_future(self._submit(question, images, videos, samples))

    def _submit(
        self, question: str | list[str], images: Sequence[Any], videos: Sequence[Any], samples: int
    ) -> Future[Any]:
        if self._closed:
            raise InfraFailure("the agent is closed", code="agent_closed", fix="load it again")
        answering: Coroutine[Any, Any, Answer | list[Answer]]
        if isinstance(question, str):
            answering = self._answer(question, images, videos, samples)
        else:
            answering = self._answer_all(question, images, videos, samples)
        return asyncio.run_coroutine_threadsafe(answering, self._loop)

    async def _answer_all(
        self, questions: Sequence[str], images: Sequence[Any], videos: Sequence[Any], samples: int
    ) -> list[Answer]:
        room = asyncio.Semaphore(max(1, self.config.engine.max_num_seqs // max(1, samples)))

        async def answer(question: str, images: Sequence[Any], videos: Sequence[Any]) -> Answer:
            async with room:
                return await self._answer(question, images, videos, samples)

        each = zip(questions, _each(images, len(questions)), _each(videos, len(questions)), strict=True)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(*row)) for row in each]
        except ExceptionGroup as errors:  # the others are cancelled
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _answer(
        self, text: str, images: Sequence[Picture], videos: Sequence[str | Path], samples: int
    ) -> Answer:
        if samples < 1:
            raise BadInput(f"samples={samples}", fix="ask for one sample or more")
        media = await asyncio.to_thread(self._open, images, videos)
        question = Question(id=new_id("q"), question=text, media=[_record(*item) for item in media.items()])
        episodes = await self._episodes(question, media, samples)
        trajectories = [episode.trajectory for episode in episodes]
        require_completed(trajectories)
        verdict, winner = await asyncio.to_thread(vote.elect, question, trajectories, self.config)
        views = next(episode.views for episode in episodes if episode.trajectory is winner)
        return Answer(
            verdict.answer,
            verdict.confidence if samples > 1 else None,
            question,
            winner,
            verdict,
            trajectories,
            dict(zip((image.id for image in winner.images), views, strict=True)),
            {name: item for name, item in media.items() if isinstance(item, np.ndarray)},
        )

    async def _episodes(
        self, question: Question, media: Mapping[str, np.ndarray | Clip], samples: int
    ) -> list[Episode]:
        config, sampling = self.config, self.config.serve.sampling
        images, views = await asyncio.to_thread(first_look, media, config.dialogue, self.engine.spec.multiple)
        tools = _Tools(self, media) if self.operations and media else None
        params = SamplingParams(
            sampling.temperature if samples > 1 else 0.0,
            sampling.top_p,
            config.dialogue.max_turn_tokens,
            config.run.seed,
        )
        augmentations = alternate(config.serve.augmentations, samples)
        sessions = [await self.engine.open(question.id) for _ in augmentations]
        episodes = await asyncio.gather(
            *(
                run_episode(
                    session if name is None else AugmentedSession(session, name),
                    self.renderer,
                    question,
                    images,
                    views,
                    tools,
                    Limits.of(config.dialogue, test=True),
                    replace(params, seed=params.seed + number),
                    group_id=question.id,
                    policy_version=self.engine.version,
                )
                for number, (session, name) in enumerate(zip(sessions, augmentations, strict=True))
            )
        )
        for episode, name in zip(episodes, augmentations, strict=True):
            episode.trajectory.augmentation = name
        return episodes

    def _open(self, images: Sequence[Picture], videos: Sequence[str | Path]) -> dict[str, np.ndarray | Clip]:
        """The decoded media by id; the message of a BadInput names the one that cannot be used."""
        opened, settings = dict[str, np.ndarray | Clip](), self.config.toolbox
        for kind, prefix, sources in (("image", "img", images), ("video", "vid", videos)):
            if isinstance(sources, str | Path | Image.Image | np.ndarray):
                raise BadInput(f"{kind}s is no list", fix=f"pass a list: {kind}s=[...]")
            for number, source in enumerate(sources):
                try:
                    if isinstance(source, str | Path):
                        record = Media(id=f"{prefix}{number}", uri=str(source), kind=kind)
                        opened[record.id] = open_media(record, settings)
                    else:
                        opened[f"{prefix}{number}"] = _decoded(source, settings.max_image_pixels)
                except BadInput as error:
                    raise error.about(f"{kind}s[{number}]") from None
        return opened

    def close(self) -> None:
        """Release the model; questions that are being answered are cancelled. Idempotent."""
        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._end_loop()

    async def _end(self) -> None:
        await self.engine.aclose()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Tools:
    """The operations on the opened media of one question, in threads of this process."""

    def __init__(self, agent: Agent, media: Mapping[str, np.ndarray | Clip]):
        self.agent, self.media = agent, media

    async def execute(
        self, action: Action, images: list[ImageView], objects: dict[str, dict[str, Any]]
    ) -> Outcome:
        agent, settings, started = self.agent, self.agent.config.toolbox, time.perf_counter()
        sizes = agent.engine.spec.multiple, agent.renderer.coordinates
        scene = Scene.of(agent.config.dialogue, settings, *sizes, self.media, images, objects)
        async with asyncio.timeout(settings.timeout_s):
            observation, views = await asyncio.to_thread(execute, action, scene, agent.operations)
        observation.seconds = time.perf_counter() - started
        return observation, views


def _each(media: Sequence[Any], questions: int) -> Sequence[Sequence[Any]]:
    """The media of each of several questions."""
    if not media or not all(isinstance(item, list | tuple) for item in media):
        return [media] * questions
    if len(media) != questions:
        raise BadInput(f"{questions} questions with {len(media)} lists of media", fix="give a list for each")
    return media


def _record(name: str, opened: np.ndarray | Clip) -> Media:
    """A medium with the hash of its content in the place of its source."""
    if isinstance(opened, Clip):
        size = {"height": opened.height, "width": opened.width}
        return Media(id=name, uri=f"sha256:{opened.sha256}", kind="video", **size)
    digest = hashlib.sha256(np.ascontiguousarray(opened).data).hexdigest()
    return Media(id=name, uri=f"sha256:{digest}", height=opened.shape[0], width=opened.shape[1])


def _decoded(source: Any, max_pixels: int) -> np.ndarray:
    """A picture of Pillow or an array as read-only uint8 [H, W, 3]. BadInput."""
    if isinstance(source, Image.Image):
        check_pixels(source.width, source.height, max_pixels, "image")
        try:
            return rgb(source.copy())
        except OSError as error:
            raise BadImage(f"the picture cannot be decoded: {error}", code="image_undecodable") from None
    if not isinstance(source, np.ndarray) or source.dtype != np.uint8 or source.shape[2:] != (3,):
        kind = (
            f"{source.dtype} {list(source.shape)}"
            if isinstance(source, np.ndarray)
            else type(source).__name__
        )
        raise BadInput(
            f"{kind} is no picture", fix="pass a path, a data: URL, a PIL image or uint8 [H, W, 3]"
        )
    check_pixels(source.shape[1], source.shape[0], max_pixels, "image")
    pixels = source.copy()  # the caller may change its own
    pixels.flags.writeable = False
    return pixels

"""A policy and its operations in this process: `pixelis.Agent` answers from Python, without Ray.

Operations run in threads of this process, without a toolbox's limit on memory: one that takes longer than
`toolbox.timeout_s` is reported to the policy, but not stopped.
"""

from __future__ import annotations

import asyncio
import functools
import html
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from pixelis.config import Config, ToolboxConfig, absolute, load
from pixelis.config.load import Source
from pixelis.config.references import EMBEDDED
from pixelis.datasets.media import open_media
from pixelis.dialogue.agent import Limits, Outcome, run_episode
from pixelis.dialogue.augmentation import AugmentedSession, alternate
from pixelis.dialogue.failures import require_completed
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import SamplingParams
from pixelis.engines import start_engine
from pixelis.errors import BadInput
from pixelis.operations import Scene, execute, select
from pixelis.operations.encoded import check_pixels
from pixelis.operations.image import rgb
from pixelis.operations.media import first_look
from pixelis.operations.video import Clip
from pixelis.policy.adapters import load_adapter
from pixelis.policy.model_path import resolve
from pixelis.records import Action, ImageView, Media, Question, Trajectory, new_id
from pixelis.rewards import vote

OTHERS = "configs/first_run/base.yaml"
"""Default configuration of models that are not embedded."""

T = TypeVar("T")
Picture = str | Path | Image.Image | np.ndarray
"""A path, a ``data:`` URL, a picture of Pillow, or uint8 [H, W, 3], RGB."""


@dataclass(frozen=True)
class Answer:
    """The answer to a question, and the episode that gave it; a notebook shows the episode with its crops.

    ``confidence`` is that of the vote of all ``samples`` (docs/evolution.md), None for one sample, which cannot
    agree with another. ``pictures`` by image id, uint8 [h, w, 3]: the question's at full size, crops and frames as
    the policy saw them.
    """

    answer: str | None
    confidence: float | None
    question: Question = field(repr=False)
    trajectory: Trajectory = field(repr=False)
    samples: list[Trajectory] = field(repr=False)
    pictures: Mapping[str, np.ndarray] = field(repr=False)

    @property
    def crops(self) -> dict[str, Image.Image]:
        """What the operations showed to the policy, by image id (``obs1``)."""
        shown = [image.id for observation in self.trajectory.observations for image in observation.images]
        return {name: Image.fromarray(self.pictures[name]) for name in shown}

    def _repr_html_(self) -> str:
        from pixelis.telemetry.html.episode import EpisodePage
        from pixelis.telemetry.html.render import render

        title = "" if self.confidence is None else f"confidence {self.confidence:.2f}"
        page = EpisodePage(self.question, self.trajectory, self.pictures, title)
        document = html.escape(render("answer.html", title="Answer", page=page))
        # Without scripts, forms and links to the notebook: the policy and the pictures wrote what it shows.
        style = "width:100%;height:640px;border:0;resize:vertical"
        return f'<iframe sandbox title="Answer" style="{style}" srcdoc="{document}"></iframe>'


class Agent:
    """Answers questions about pictures and clips. It may be shared by threads, and is closed by `close` or ``with``."""

    def __init__(self, config: Config):
        self.config, self.room = config, asyncio.Semaphore(config.engine.max_num_seqs)
        _begin(self._start()).result()

    async def _start(self) -> None:
        config, operations = self.config, select(self.config.toolbox.operations)
        for operation in operations:
            operation.ready(config.toolbox)
        adapter = load_adapter(config.policy.adapter) if config.policy.adapter else None
        self.engine = start_engine(config, resolve(config.policy.model))
        try:
            await self.engine.load(0, adapter)
            self.renderer = Renderer(self.engine.tokenizer, self.engine.spec, config.dialogue, operations)
        except BaseException:
            await self.engine.aclose()
            raise

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        adapter: str | Path | None = None,
        config: Source = None,
        **overrides: Any,
    ) -> Agent:
        """Load a model (`nano`, `mini`, a folder, owner/name of the hub) with an adapter (a run, a checkpoint, PEFT's format).

        ``config`` and ``overrides`` as in `pixelis.rft`; by default configs/nano/base.yaml or
        configs/mini/base.yaml, for another model configs/first_run/base.yaml. An adapter needs the `dialogue` that
        it was trained with: name RUN/config.yaml.
        Raises BadConfig, MissingFile, MissingDependency, and BadInput for an adapter of another model.
        """
        named = {"policy.model": model, "policy.adapter": adapter}
        policy = {key: value for key, value in named.items() if value is not None}
        default = f"configs/{model or 'nano'}/base.yaml" if model in (None, *EMBEDDED) else OTHERS
        return cls(absolute(load(config or default, policy | overrides)))

    def ask(
        self,
        question: str,
        images: Sequence[Picture] = (),
        videos: Sequence[str | Path] = (),
        samples: int = 1,
    ) -> Answer:
        """Answer a question about pictures and clips, also where an event loop runs, as in a notebook.

        One sample is greedy; several, drawn with `serve.sampling`, vote. Raises BadInput for media and prompts that
        cannot be used, InfraFailure if the engine fails or is closed.
        """
        future = _begin(self._answer(question, images, videos, samples))
        try:
            return future.result()
        finally:
            future.cancel()  # after Ctrl-C

    async def aask(
        self,
        question: str,
        images: Sequence[Picture] = (),
        videos: Sequence[str | Path] = (),
        samples: int = 1,
    ) -> Answer:
        """`ask` in any event loop: several at once are one batch. Cancelling it ends the episodes."""
        return await asyncio.wrap_future(_begin(self._answer(question, images, videos, samples)))

    async def _answer(
        self, text: str, images: Sequence[Picture], videos: Sequence[str | Path], samples: int
    ) -> Answer:
        config, sampling = self.config, self.config.serve.sampling
        if samples < 1:
            raise BadInput(f"samples={samples}", fix="ask for one sample or more")
        temperature = sampling.temperature if samples > 1 else 0.0
        turn_tokens, seed = config.dialogue.max_turn_tokens, config.run.seed
        params = SamplingParams(temperature, sampling.top_p, turn_tokens, seed)
        async with self.room:
            media, opened = await asyncio.to_thread(self._open, images, videos)
            shown = await asyncio.to_thread(first_look, opened, config.dialogue, self.engine.spec.multiple)
            question = Question(id=new_id("q"), question=text, media=media)
            tools = _Tools(self, opened) if self.renderer.operations and media else None
            lights = alternate(config.serve.augmentations, samples)
            sessions = [await self.engine.open(question.id) for _ in lights]
            episodes = await asyncio.gather(
                *(
                    run_episode(
                        session if light is None else AugmentedSession(session, light),
                        self.renderer,
                        question,
                        *shown,
                        tools,
                        Limits.of(config.dialogue, test=True),
                        replace(params, seed=seed + number),
                        group_id=question.id,
                        policy_version=self.engine.version,
                    )
                    for number, (session, light) in enumerate(zip(sessions, lights, strict=True))
                )
            )
        for episode, light in zip(episodes, lights, strict=True):
            episode.trajectory.augmentation = light
        trajectories = [episode.trajectory for episode in episodes]
        require_completed(trajectories)
        verdict, winner = await asyncio.to_thread(vote.elect, question, trajectories, config)
        views = next(episode.views for episode in episodes if episode.trajectory is winner)
        pictures = dict(zip((image.id for image in winner.images), views, strict=True))
        pictures |= {name: item for name, item in opened.items() if isinstance(item, np.ndarray)}
        confidence = verdict.confidence if samples > 1 else None
        return Answer(verdict.answer, confidence, question, winner, trajectories, pictures)

    def _open(
        self, images: Sequence[Picture], videos: Sequence[str | Path]
    ) -> tuple[list[Media], dict[str, np.ndarray | Clip]]:
        """The media of a question, and decoded by id; a BadInput names the one that cannot be used."""
        media, opened, settings = list[Media](), dict[str, np.ndarray | Clip](), self.config.toolbox
        for kind, prefix, sources in (("image", "img", images), ("video", "vid", videos)):
            if isinstance(sources, str | np.ndarray):
                raise BadInput(f"{kind}s is no list", fix=f"pass a list: {kind}s=[...]")
            for number, source in enumerate(sources):
                is_named = isinstance(source, str | Path)
                item = Media(id=f"{prefix}{number}", uri=str(source) if is_named else "memory", kind=kind)
                media.append(item)
                try:
                    opened[item.id] = open_media(item, settings) if is_named else _decoded(source, settings)
                except BadInput as error:
                    raise error.about(f"{kind}s[{number}]") from None
        return media, opened

    def close(self) -> None:
        """Release the model; questions that are being answered fail. Idempotent."""
        _begin(self.engine.aclose()).result()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Tools:
    """The operations on the opened media of one question, in threads of this process."""

    agent: Agent
    media: Mapping[str, np.ndarray | Clip]

    async def execute(
        self, action: Action, images: list[ImageView], objects: dict[str, dict[str, Any]]
    ) -> Outcome:
        agent, config, started = self.agent, self.agent.config, time.perf_counter()
        sizes = agent.engine.spec.multiple, agent.renderer.coordinates
        scene = Scene.of(config.dialogue, config.toolbox, *sizes, self.media, images, objects)
        async with asyncio.timeout(config.toolbox.timeout_s):
            observation, views = await asyncio.to_thread(execute, action, scene, agent.renderer.operations)
        observation.seconds = time.perf_counter() - started
        return observation, views


def _begin(work: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(work, _loop())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all engines and episodes, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="pixelis-agent", daemon=True).start()
    return loop


def _decoded(source: Any, settings: ToolboxConfig) -> np.ndarray:
    """A picture of Pillow or an array as read-only uint8 [H, W, 3], a copy. BadInput."""
    try:
        image = Image.fromarray(source) if isinstance(source, np.ndarray) else source
        check_pixels(image.width, image.height, settings.max_image_pixels, "image")
        return rgb(image.copy())
    except (AttributeError, TypeError, OSError) as error:
        fix = "pass a path, a data: URL, a PIL image or uint8 [H, W, 3]"
        raise BadInput(f"no picture: {error}", fix=fix) from None

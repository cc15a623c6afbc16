"""The agent behind the gateway: samples trajectories, looks up neighbours in memory, votes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakValueDictionary

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from pixelis.actors.after_episode import view_pngs
from pixelis.actors.cluster import actor_handle
from pixelis.actors.generator_router import (
    GeneratorRouter,
    RolloutRequest,
    RolloutResult,
    RouterTimeouts,
    TextUpdate,
    TurnUpdate,
)
from pixelis.actors.memory import SearchResult
from pixelis.config import Config
from pixelis.dialogue.augmentation import alternate
from pixelis.dialogue.failures import require_completed
from pixelis.errors import BadImage, BadInput, InfraFailure
from pixelis.evolution import privacy
from pixelis.operations.encoded import read_encoded
from pixelis.operations.image import data_url, details, image_pixels, load_image
from pixelis.operations.media import first_look
from pixelis.operations.pixel_budget import PixelBudget, fit
from pixelis.operations.video import Clip, clip_pixels, open_clip
from pixelis.records import (
    ImageView,
    Media,
    Question,
    Trajectory,
    Verdict,
    new_id,
)
from pixelis.rewards import vote
from pixelis.rewards.equality import Equality
from pixelis.rewards.services import shared_services
from pixelis.serve.after_reply import AfterReply
from pixelis.serve.agent_types import AgentQuery, Answer, Backends, Picture, Pictures, TextEvent, TurnEvent
from pixelis.serve.retrieval import Lookup, Retrieval
from pixelis.telemetry import tracing

MAX_FRAME_RATE = 30
"""Frames of a clip per second of the longest clip."""
DRAIN_S = 10.0
"""Longest wait of a stopping gateway for the work after its last replies."""


class Samples(NamedTuple):
    """A group, and its samples whose answers have the required format."""

    result: RolloutResult
    accepted: list[Trajectory]


class Agent:
    """Answers questions by vote, stores experiences, and sends confident verdicts to Evolution."""

    def __init__(self, config: Config, backends: Backends):
        self.config, self.backends = config, backends
        self.counts: Counter[str] = Counter()
        timeouts = RouterTimeouts.serving(config)
        self.router = GeneratorRouter(
            backends.generators, timeouts, follows=True, attempts=2, namespace=backends.namespace
        )
        self.retrieval = Retrieval(config, backends, self.counts)
        self.memory = self.retrieval.memory
        evolution = self.evolution_actor if backends.evolution else None
        self.after_reply = AfterReply(config, self.retrieval, evolution, self.counts, self.answer)
        self.decoding = asyncio.Semaphore(2)
        self.pictures_in_use: WeakValueDictionary[tuple[str, bool], Picture] = WeakValueDictionary()
        self.decoded_bytes_since_trim = 0
        seconds = config.serve.max_video_seconds
        caps = {"max_video_seconds": seconds, "max_video_frames": math.ceil(MAX_FRAME_RATE * seconds)}
        self.clip_caps = config.toolbox.model_copy(update=caps)
        self.version: int | None = None

    async def ready(self, timeout_s: float) -> None:
        """Call the actors once: the first call to an actor takes seconds, because its class is imported."""
        with contextlib.suppress(TimeoutError, RayError, InfraFailure):  # they may start later
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(self.router.health(timeout_s), self.retrieval.ready())

    async def measure(self, query: AgentQuery) -> tuple[AgentQuery, int]:
        """The query with its clips as encoded bytes, and the decoded size of its media by their headers.

        Raises BadImage for those outside the caps.
        """
        return await asyncio.to_thread(self._measure, query)

    def _measure(self, query: AgentQuery) -> tuple[AgentQuery, int]:
        caps = self.clip_caps
        limit = self.config.serve.max_request_pixels
        frames = self.config.dialogue.frames
        pixels, clips = 0, list[bytes]()
        for number, url in enumerate(query.images):
            with _named(query, f"img{number}"):
                pixels += image_pixels(url, caps.max_image_bytes, caps.max_image_pixels)
        for number, clip in enumerate(query.clips):
            with _named(query, f"vid{number}"):
                clips.append(read_encoded(clip, caps.max_video_bytes, "video"))
                pixels += frames * clip_pixels(clips[-1], caps)
        if pixels > limit:
            message = f"the pictures of the request have {pixels} pixels, more than {limit}"
            raise BadImage(message, code="image_too_many_pixels", fix="send fewer or smaller pictures")
        return replace(query, clips=clips), 3 * pixels + sum(map(len, clips))

    async def decode(self, query: AgentQuery) -> Pictures:
        """Raises BadImage for damaged pictures and those outside the caps."""
        # A picture of 50 million pixels takes a second and 350 MB to decode.
        async with self.decoding:
            return await asyncio.to_thread(self._decode_all, query)

    def _decode_all(self, query: AgentQuery) -> Pictures:
        pictures, clips = dict[str, Picture](), dict[str, Clip]()
        for number, url in enumerate(query.images):
            with _named(query, id := f"img{number}"):
                pictures[id] = self._decode(url, query.operations)
        for number, source in enumerate(query.clips):
            with _named(query, id := f"vid{number}"):
                clips[id] = open_clip(source, self.clip_caps)
        media = [
            Media(id=id, uri=p.uri, height=p.height, width=p.width, details=p.details)
            for id, p in pictures.items()
        ]
        media += [
            Media(id=name, uri=f"sha256:{clip.sha256}", kind="video", height=clip.height, width=clip.width)
            for name, clip in clips.items()
        ]
        _, frames = first_look(clips, self.config.dialogue, 1)
        views = [picture.view for picture in pictures.values()] + frames
        self.decoded_bytes_since_trim += sum(view.nbytes for view in views)
        full = {id: p.ref for id, p in pictures.items()} | {id: ray.put(clip) for id, clip in clips.items()}
        return Pictures(media, full, views, list(pictures.values()))

    def _decode(self, url: str, operations: bool) -> Picture:
        """``operations`` false decodes no more than the policy's view needs, where the format allows it."""
        # A hash in place of the data URL, which would travel with every record of the question.
        uri = f"sha256:{hashlib.sha256(url.encode()).hexdigest()}"
        if (known := self.pictures_in_use.get((uri, operations))) is not None:
            return known
        caps, d = self.config.toolbox, self.config.dialogue.input
        pixels = load_image(
            url, caps.max_image_bytes, caps.max_image_pixels, None if operations else 4 * d.max_pixels
        )
        self.decoded_bytes_since_trim += pixels.nbytes
        height, width, _ = pixels.shape
        view = fit(pixels, PixelBudget(d.min_pixels, d.max_pixels), 1)
        cells = details(pixels) if self.config.memory.pictures else ""
        return self.pictures_in_use.setdefault(
            (uri, operations), Picture(uri, height, width, ray.put(pixels), view, cells)
        )

    def return_memory(self) -> None:
        """Return the memory of decoded pictures to the system: glibc keeps most of what is freed."""
        if self.decoded_bytes_since_trim and sys.platform == "linux":
            self.decoded_bytes_since_trim = 0
            ctypes.CDLL(None).malloc_trim(0)

    async def answer(self, query: AgentQuery, pictures: Pictures | None = None) -> Answer:
        """Sample and vote; ``pictures`` are those of ``decode``, called if None.

        Raises BadImage, BadInput for a prompt that does not fit, InfraFailure. Cancelling it cancels the
        rollouts.
        """
        async with contextlib.aclosing(self.stream(query, pictures, turns=False)) as items:
            return [item async for item in items if isinstance(item, Answer)][-1]

    async def stream(
        self, query: AgentQuery, pictures: Pictures | None = None, turns: bool = True
    ) -> AsyncGenerator[TextEvent | TurnEvent | Answer, None]:
        """The turns of all samples and the text of the first as they happen, then the answer."""
        started = time.monotonic()
        if pictures is None:
            with tracing.span("decode"):
                pictures = await self.decode(query)
        question = _question(query, pictures)
        cold = await self.retrieval.cold()
        with self.retrieval.lookup(
            question, pictures.views, search=not cold, store=bool(query.remember)
        ) as lookup:
            samples: Samples | None = None
            async with contextlib.aclosing(self._sample(question, query, pictures, turns)) as items:
                async for item in items:
                    if isinstance(item, TurnEvent | TextEvent):
                        yield item
                    else:
                        samples = item
            assert samples is not None
            group, accepted = samples.result.group, samples.accepted
            with tracing.span("vote") as span:
                verdict = await self._judge(question, accepted, lookup, cold, query)
                span.set_attribute("pixelis.confidence", verdict.confidence)
        answer = Answer(
            verdict,
            group,
            vote.winning(accepted, verdict),
            samples.result.views,
            accepted,
            neighbours=lookup.neighbours,
            retrieval_id=lookup.retrieval_id,
            cold_start=cold,
            seconds=time.monotonic() - started,
            originals=pictures.full,
        )
        self.version = group.policy_version
        self.counts["answered"] += 1
        self.counts["cold_start"] += cold
        with tracing.span("remember"):
            await self.after_reply.remember(answer, query, lookup)
        yield answer

    async def _sample(
        self, question: Question, query: AgentQuery, pictures: Pictures, turns: bool
    ) -> AsyncGenerator[TextEvent | TurnEvent | Samples, None]:
        """Sample, and once more if no answer has the required format."""
        attempts, lights = 0, alternate(self.config.serve.augmentations, query.samples)
        # Greedy samples would fail the same way again.
        for trial in range(2 if query.answers is not None and query.sampling.temperature else 1):
            result: RolloutResult | None = None
            sampling = replace(query.sampling, seed=query.sampling.seed + trial * query.samples)
            first_attempt = attempts
            span = tracing.begin("rollout", samples=query.samples)
            request = RolloutRequest(
                question,
                new_id("group"),
                query.samples,
                sampling,
                query.operations,
                query.max_turns,
                pictures.full,
                augmentations=self.config.serve.augmentations,
                text=turns,
                trace=tracing.traceparent(span),
                causal_use=self.config.serve.causal_use,
            )
            try:
                async with contextlib.aclosing(self.router.episodes(request, stream=turns)) as items:
                    async for item in items:
                        if isinstance(item, RolloutResult):
                            result = item
                            continue
                        attempt = first_attempt + item.attempt
                        fields = {"sample": item.sample, "samples": query.samples, "attempt": attempt}
                        if isinstance(item, TextUpdate):
                            yield TextEvent(**fields, text=item.text)
                        else:
                            attempts = attempt + 1
                            images = await _shown_views(item)
                            light = lights[item.sample]
                            yield TurnEvent(**fields, turn=item.turn, images=images, augmentation=light)
            finally:
                span.end()
            assert result is not None
            trajectories = result.group.trajectories
            require_completed(trajectories)
            accepted = trajectories
            if query.answers is not None:
                accepted = await query.answers.filter(trajectories, lambda t: t.answer)
            if accepted:
                yield Samples(result, accepted)
                return
            self.counts["answers_rejected"] += 1
        message = "no sample gave an answer of the format that the request requires"
        raise BadInput(message, code="response_format_failed")

    async def _judge(
        self,
        question: Question,
        samples: list[Trajectory],
        lookup: Lookup,
        cold: bool,
        query: AgentQuery,
    ) -> Verdict:
        if cold:
            return vote.direct(samples)
        await lookup.wait()
        neighbours = [
            n for n in lookup.neighbours if not privacy.is_redacted(n.experience.verdict.answer or "")
        ]
        answers, rewards = query.answers, self.config.rewards
        if answers is not None:
            neighbours = await answers.filter(neighbours, lambda n: n.experience.verdict.answer)
        stored = lookup.stored_question or question
        scorer = rewards.scorer_of(question.task, question.scorer)
        same = answers.same if answers is not None else Equality(question, scorer, shared_services(rewards))
        # Formulas are compared in worker processes, which takes milliseconds.
        verdict = await asyncio.to_thread(
            vote.vote, samples, neighbours, self.config.evolution, stored, time.time(), same, query.user
        )
        return verdict.model_copy(update={"neighbours": len(lookup.neighbours), "partial": lookup.partial})

    async def pictures(self, answer: Answer) -> dict[str, str]:
        """The winner's views as PNG data URLs by image id. Raises InfraFailure if they are lost."""
        try:
            return data_urls(answer.pngs or await view_pngs(answer.winner, answer.views))
        except RayError as error:
            raise InfraFailure("the trajectory's pictures were lost with their generator") from error

    async def search(self, query: AgentQuery, k: int, user: str | None, timeout_s: float) -> SearchResult:
        """The ``k`` experiences (of ``user``) with the words of a query that are most similar to it."""
        assert self.memory is not None
        pictures = await self.decode(query)
        question = _question(query, pictures)
        vector = await self.retrieval.vector(question, pictures.views)
        return await self.memory.search(vector, k, False, user, question.question, timeout_s)

    async def drain(self, timeout_s: float = DRAIN_S) -> None:
        await self.after_reply.drain(timeout_s)

    async def evolution_actor(self) -> ActorHandle:
        """Raises InfraFailure if it is not running."""
        return await asyncio.to_thread(actor_handle, self.backends.evolution or "", self.backends.namespace)


def _question(query: AgentQuery, pictures: Pictures) -> Question:
    return Question(
        id=new_id("q"),
        question=query.question,
        history=query.history,
        media=pictures.media,
        task="serve",
        split="serve",
    )


@contextlib.contextmanager
def _named(query: AgentQuery, id: str) -> Iterator[None]:
    """Add the place of the picture or clip with this id to errors."""
    try:
        yield
    except BadInput as error:
        error.place = query.places.get(id)
        raise


async def _shown_views(update: TurnUpdate) -> list[ImageView]:
    urls = await asyncio.to_thread(lambda: [data_url(privacy.clean_png(view)) for view in update.views])
    images = update.turn.observation.images if update.turn.observation is not None else []
    return [image.model_copy(update={"uri": url}) for image, url in zip(images, urls, strict=True)]


def data_urls(pictures: Mapping[str, bytes]) -> dict[str, str]:
    return {name: data_url(png) for name, png in pictures.items()}

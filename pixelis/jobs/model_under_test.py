"""A model under test: transformers' own model, learners, exports and episodes of an engine, which checks share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from pixelis.config import Config
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import Completion, SamplingParams
from pixelis.engines import Engine, start_engine
from pixelis.families.family import Family, ModelSpec
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.operations import select
from pixelis.policy.adapters import Adapter
from pixelis.policy.export import write_merged_model, write_peft
from pixelis.policy.log_probs import banned_mask
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import Trainer
from pixelis.records import Coordinates, ImageView, Observation, Question

Turns = list[tuple[list[int], list[np.ndarray]]]
"""New tokens and views of each turn of an episode, without what the policy says."""
Gradients = Mapping[str, np.ndarray]


class Reference:
    """transformers' own model of a folder, with a PEFT adapter if one is named."""

    def __init__(
        self, spec: ModelSpec, folder: Path, adapter: Path | None = None, dtype: torch.dtype = torch.float32
    ):
        import transformers
        from peft import PeftModel

        self.spec, self.processor = spec, None
        kind = transformers.AutoModelForCausalLM
        if spec.reads_images:
            kind = transformers.AutoModelForImageTextToText
            self.images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
            # Where image tokens follow the size of the view, it was fitted before
            is_fitted = type(spec.family).image_tokens is Family.image_tokens
            self.options = {"do_resize": False} if is_fitted else {}
            # Many need torchvision, or tokens with names that a tokenizer may lack
            with contextlib.suppress(ImportError, ValueError, AttributeError):
                self.processor = transformers.AutoProcessor.from_pretrained(folder)
        self.base: Any = kind.from_pretrained(folder, dtype=dtype).eval()
        self.model = self.base
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.base, adapter, is_trainable=True).eval()

    def pixels(self, views: Sequence[np.ndarray]) -> dict[str, Any]:
        """What the model's own image processor makes of views."""
        pictures = [Image.fromarray(view) for view in views]
        return dict(self.images(images=pictures, return_tensors="pt", **self.options).to(self.base.dtype))

    @torch.no_grad()
    def count_features(self, views: Sequence[np.ndarray]) -> int:
        """Image tokens that the model's own vision tower fills."""
        features = self.base.get_image_features(**self.pixels(views), return_dict=True).pooler_output
        return sum(part.numel() for part in features) // self.base.config.get_text_config().hidden_size

    def score(self, sample: TrainSample) -> Float[Tensor, " policy_tokens"]:
        ids = torch.from_numpy(sample.tokens)[None]
        inputs = self.pixels(sample.views) if sample.views else {}
        arguments = inspect.signature(self.base.forward).parameters
        for name in {"mm_token_type_ids", "token_type_ids"} & arguments.keys() if inputs else ():
            inputs[name] = (ids == self.spec.image_token).int()
        logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0].float()
        allowed = torch.log_softmax(logits + banned_mask(self.spec.banned, logits.shape[-1]), -1)
        return allowed[:-1].gather(1, ids[0, 1:, None])[sample.mask[1:], 0]

    @torch.no_grad()
    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        return [self.score(sample).numpy() for sample in samples]

    def gradients(self, samples: Sequence[TrainSample]) -> Gradients:
        for sample in samples:
            (-self.score(sample).sum() / sum(s.policy_tokens for s in samples)).backward()
        return {short(n): p.grad.numpy() for n, p in self.model.named_parameters() if p.grad is not None}


class Subject:
    """A model under test and what several checks share: learners, exports, and episodes of an engine.

    config: `policy.dtype` is the engine's; coordinates: the scale in which the model was trained to write places,
    None if nobody says; scratch: a folder for exports.
    """

    def __init__(self, config: Config, coordinates: Coordinates | None, scratch: Path):
        self.config, self.coordinates, self.scratch = config, coordinates, scratch
        self.folder = resolve(config.policy.model)
        self.tokenizer = load_tokenizer(self.folder)
        self.spec = load_spec(self.folder, self.tokenizer, config.policy.family)
        self.renderer = Renderer(self.tokenizer, self.spec, config.dialogue, select(["zoom_in"]))
        self.reference = Reference(self.spec, self.folder)
        self.rng = np.random.default_rng(0)
        side = max(64 // self.spec.multiple, 1) * self.spec.multiple
        self.size, higher = (side, side), (side + self.spec.multiple, side)
        self.pictures = [self.view(self.size), self.view(higher)] if self.spec.reads_images else []
        self.episodes = self._episodes()
        self.samples = [asyncio.run(play(turns, self._random_words)) for turns in self.episodes.values()]

    def _episodes(self) -> dict[str, Turns]:
        """Episodes by what they test; two have one prompt, which a packed row holds once."""
        one, other = self.pictures[:1], self.pictures[1:]
        episodes = {
            "text": self.asked("How many?"),
            "the same text": self.asked("How many?"),
            "several turns": [*self.asked("Where?", *other), self.seen(*one), self.seen(*other)],
        }
        if self.spec.reads_images:
            episodes["picture"] = self.asked("What is it?", *one)
            episodes["the same picture"] = self.asked("What is it?", *one)
            episodes["clip"] = self.asked("When?", *(self.view(self.size) for _ in range(3)))
        return episodes

    def view(self, size: tuple[int, int]) -> np.ndarray:
        return self.rng.integers(0, 255, (*size, 3), dtype=np.uint8)

    def asked(self, text: str, *views: np.ndarray) -> Turns:
        """A prompt with a picture, or with the frames of a clip."""
        shown = views_of(views)
        for i, view in enumerate(shown if len(views) > 1 else ()):
            view.parent, view.frame, view.time = "vid0", i, float(i)
        turns = self.renderer.prompt(Question(id="q", question=text), shown, operations=False)
        return [([token for turn in turns for token in turn.tokens], [*views])]

    def seen(self, *views: np.ndarray) -> tuple[list[int], list[np.ndarray]]:
        observation = Observation(status="ok", id="obs1", text="seen", images=views_of(views))
        return self.renderer.observation(observation, 1).tokens, [*views]

    async def _random_words(self, tokens: list[int], views: list[np.ndarray]) -> Completion:
        allowed = np.setdiff1d(np.arange(self.spec.vocab), self.spec.banned)
        said = [*self.rng.choice(allowed, 5).tolist(), self.spec.stop]
        return Completion(said, [0.0] * len(said), "stop")

    def trainer(self, full: bool) -> Trainer:
        policy = self.config.policy.model_copy(update={"full": full, "dtype": "float32"})
        return Trainer(policy, self.config.learner, total_steps=1, device="cpu")

    @cached_property
    def whole(self) -> Trainer:
        """A learner of all parameters: the base model, as no check changes them."""
        return self.trainer(full=True)

    @cached_property
    def adapted(self) -> Trainer:
        trainer, lora = self.trainer(full=False), self.config.policy.lora
        tensors = {
            name: self.rng.normal(0, 0.08, shape).astype(np.float32)
            for name, shape in trainer.model.shapes.items()
        }
        trainer.reset_to(Adapter(tensors, lora.alpha, lora.rank, fingerprint(self.folder)))
        return trainer

    @cached_property
    def peft(self) -> Reference:
        text_only = not self.spec.reads_images
        folder = write_peft(self.adapted.adapter(), self.scratch / "peft", text_only=text_only)
        return Reference(self.spec, self.folder, folder)

    @cached_property
    def merged(self) -> Path:
        out, family = self.scratch / "merged", self.config.policy.family
        return write_merged_model(self.adapted.adapter(), self.folder, out, family=family)

    @cached_property
    def generated(self) -> list[list[TrainSample]]:
        return self.generate(self.folder, [None, self.adapted.adapter()])

    def generate(self, folder: Path, adapters: Sequence[Adapter | None]) -> list[list[TrainSample]]:
        async def episode(engine: Engine, turns: Turns) -> TrainSample:
            session = await engine.open()
            say = functools.partial(session.generate, sampling=SamplingParams(max_tokens=16))
            sample = await play(turns, say)
            session.close()
            return sample

        async def run() -> list[list[TrainSample]]:
            engine, rounds = start_engine(self.config, folder), []
            try:
                for version, adapter in enumerate(adapters):
                    await engine.load(version, adapter)
                    running = (episode(engine, turns) for turns in self.episodes.values())
                    rounds.append(await asyncio.gather(*running))
            finally:
                await engine.aclose()
            return rounds

        return asyncio.run(run())


async def play(turns: Turns, say: Callable[..., Awaitable[Completion]]) -> TrainSample:
    tokens, mask, log_probs, views = list[int](), list[bool](), list[float](), list[np.ndarray]()
    for new, shown in turns:
        said = await say(new, shown)
        tokens += [*new, *said.tokens]
        mask += [False] * len(new) + [True] * len(said.tokens)
        log_probs += [0.0] * len(new) + said.log_probs
        views += shown
    return TrainSample(np.asarray(tokens), np.asarray(mask), np.asarray(log_probs, np.float32), 1.0, views)


def views_of(views: Sequence[np.ndarray]) -> list[ImageView]:
    return [ImageView(id=f"img{i}", view_size=view.shape[1::-1]) for i, view in enumerate(views)]


def short(name: str) -> str:
    """A parameter's name without what PEFT and the structure of our text models add to it."""
    name = name.removeprefix("base_model.model.").replace("language_model.", "")
    return name.replace(".lora_A.default.weight", ".A").replace(".lora_B.default.weight", ".B")

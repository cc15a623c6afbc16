"""A model under test: transformers' own model, learners, exports and episodes of an engine, which checks share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from pixelis.config import Config, LoraConfig, PolicyConfig
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.session import Completion, SamplingParams
from pixelis.engines import start_engine
from pixelis.families.family import Family, ModelSpec
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.operations import select
from pixelis.policy.adapters import Adapter
from pixelis.policy.architecture import Architecture
from pixelis.policy.export import write_merged_model, write_peft
from pixelis.policy.log_probs import banned_mask
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import Trainer
from pixelis.records import Coordinates, ImageView, Observation, Question

Turns = list[tuple[list[int], list[np.ndarray]]]
"""New tokens and views of each turn of an episode, without what the policy says."""
Gradients = Mapping[str, np.ndarray]
LORA = LoraConfig(rank=4, alpha=8)


class Reference:
    """transformers' own model of a folder, with a PEFT adapter if one is named."""

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        adapter: Path | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        import transformers
        from peft import PeftModel

        reads, self.spec, self.processor = spec.reads_images, spec, None
        kind = transformers.AutoModelForImageTextToText if reads else transformers.AutoModelForCausalLM
        self.base: Any = kind.from_pretrained(folder, dtype=dtype).eval()
        self.model = self.base
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.base, adapter, is_trainable=True).eval()
        if reads:
            self.images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
            # Where image tokens follow the size of the view, it was fitted before
            is_fitted = type(spec.family).image_tokens is Family.image_tokens
            self.options = {"do_resize": False} if is_fitted else {}
            # Many need torchvision, or tokens with names that a tokenizer may lack
            with contextlib.suppress(ImportError, ValueError, AttributeError):
                self.processor = transformers.AutoProcessor.from_pretrained(folder)

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
        """Log-probabilities of the policy tokens by a forward pass of this sample alone."""
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
        """Gradients of the mean SFT loss."""
        for sample in samples:
            (-self.score(sample).sum() / sum(s.policy_tokens for s in samples)).backward()
        return {short(n): p.grad.numpy() for n, p in self.model.named_parameters() if p.grad is not None}


class Subject:
    """A model under test and what several checks share: learners, exports, and episodes of an engine.

    coordinates: the scale in which the model was trained to write places, None if nobody says; scratch: a
    folder for exports; dtype: the engine's.
    """

    def __init__(self, config: Config, coordinates: Coordinates | None, scratch: Path, dtype: str):
        self.config, self.coordinates, self.scratch, self.dtype = config, coordinates, scratch, dtype
        self.policy = config.policy.model_copy(update={"lora": LORA})
        self.folder = resolve(self.policy.model)
        self.tokenizer = load_tokenizer(self.folder)
        self.spec = load_spec(self.folder, self.tokenizer, self.policy.family)
        self.renderer = Renderer(self.tokenizer, self.spec, config.dialogue, select(["zoom_in"]))
        self.reference = Reference(self.spec, self.folder)
        base = self.reference.base
        self.is_tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
        self.rng = np.random.default_rng(0)
        side = self.spec.multiple
        rows = max(1, 64 // side)
        columns = rows if side > 64 else rows + 1  # large ones are tiles of hundreds of tokens
        self.wide, self.high = (side * rows, side * columns), (side * (rows + 1), side * rows)
        self.episodes = self._episodes()
        self.samples = [asyncio.run(play(turns, self._random_words)) for turns in self.episodes.values()]

    def _episodes(self) -> dict[str, Turns]:
        """Episodes by what they test; two have one prompt, which a packed row holds once."""
        if not self.spec.reads_images:
            texts = {name: self.asked("How many?") for name in ("text", "the same text")}
            return texts | {"several turns": [*self.asked("Where?"), self.seen()]}
        wide, high, *frames = (self.view(size) for size in (self.wide, self.high, *[self.wide] * 3))
        return {
            "text": self.asked("How many?"),
            "picture": self.asked("What is it?", wide),
            "the same picture": self.asked("What is it?", wide),
            "clip": self.asked("When?", *frames),
            "several turns": [*self.asked("Where?", high), self.seen(wide), self.seen(high)],
        }

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

    def trainer(self, **policy: Any) -> Trainer:
        """A learner whose row holds all samples, and which clips nothing."""
        row = {"rows": 1, "row_tokens": sum(len(sample.tokens) for sample in self.samples)}
        learner = self.config.learner.model_copy(update=row | {"max_grad_norm": 1e9})
        return Trainer(self.policy.model_copy(update=policy), learner, total_steps=1, device="cpu")

    @cached_property
    def plain(self) -> Trainer:
        return self.trainer()

    @cached_property
    def whole(self) -> Trainer:
        return self.trainer(full=True)

    @cached_property
    def adapted(self) -> Trainer:
        """A learner with a random adapter."""
        trainer = self.trainer()
        trainer.reset_to(self.random_adapter(trainer.model.shapes, self.folder))
        return trainer

    def random_adapter(self, shapes: Mapping[str, tuple[int, ...]], base: Path) -> Adapter:
        tensors = {name: self.rng.normal(0, 0.08, shape).astype(np.float32) for name, shape in shapes.items()}
        return Adapter(tensors, LORA.alpha, LORA.rank, fingerprint(base))

    def write_peft(self, adapter: Adapter, name: str) -> Path:
        text_only = not self.spec.reads_images
        return write_peft(adapter, self.scratch / name, str(self.folder), text_only=text_only)

    @cached_property
    def peft(self) -> Reference:
        """The export of the adapter, in PEFT."""
        return Reference(self.spec, self.folder, self.write_peft(self.adapted.adapter(), "peft"))

    @cached_property
    def merged(self) -> Path:
        out, family = self.scratch / "merged", self.policy.family
        return write_merged_model(self.adapted.adapter(), self.folder, out, family=family)

    @cached_property
    def update(self) -> Adapter:
        """An adapter of the merged model: of all layers with the vision tower, and of an untied output layer.

        That of the output layer only makes the image token likely, wherever it can be sampled.
        """
        shapes = dict[str, tuple[int, ...]]()
        for name, (height, width) in (
            Architecture(self.policy).shapes(LORA.targets, self.spec.reads_images).items()
        ):
            shapes |= {f"{name}.A": (LORA.rank, width), f"{name}.B": (height, LORA.rank)}
        if self.is_tied:
            return self.random_adapter(shapes, self.merged)
        shapes["lm_head.A"] = LORA.rank, self.reference.base.lm_head.in_features
        adapter, left = (
            self.random_adapter(shapes, self.merged),
            np.zeros((self.spec.vocab, LORA.rank), np.float32),
        )
        left[self.spec.image_token] = 5000
        return replace(adapter, tensors={**adapter.tensors, "lm_head.B": left})

    @cached_property
    def generated(self) -> list[list[TrainSample]]:
        """Episodes of an engine: with the base model, and with the adapter."""
        return self.generate(self.policy, [None, self.adapted.adapter()])

    @cached_property
    def regenerated(self) -> list[list[TrainSample]]:
        """Episodes of an engine of the merged model: as it is, and after `update`."""
        targets = LORA.targets if self.is_tied else [*LORA.targets, "lm_head"]
        lora = LORA.model_copy(update={"targets": targets, "vision_tower": self.spec.reads_images})
        policy = self.policy.model_copy(update={"lora": lora, "model": str(self.merged)})
        return self.generate(policy, [None, self.update])

    def generate(self, policy: PolicyConfig, adapters: Sequence[Adapter | None]) -> list[list[TrainSample]]:
        """The episodes as an engine generates them with each of the adapters."""
        settings = {"policy": policy.model_copy(update={"dtype": self.dtype})}

        async def run() -> list[list[TrainSample]]:
            engine = start_engine(self.config.model_copy(update=settings), policy.model)
            rounds, sampling = [], SamplingParams(max_tokens=8)
            try:
                for version, adapter in enumerate(adapters):
                    await engine.load(version, adapter)
                    sessions = [await engine.open() for _ in self.episodes]
                    says = (functools.partial(session.generate, sampling=sampling) for session in sessions)
                    rounds.append(await asyncio.gather(*map(play, self.episodes.values(), says)))
                    for session in sessions:
                        session.close()
            finally:
                await engine.aclose()
            return rounds

        return asyncio.run(run())


async def play(turns: Turns, say: Callable[..., Awaitable[Completion]]) -> TrainSample:
    """An episode whose policy turns `say` returns."""
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

"""Tiny random models of all families, and episodes for them, shared by the tests of engine and learner."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from pixelis import config
from pixelis.families.family import ModelSpec
from pixelis.families.features import concatenate
from pixelis.families.spec import load_spec
from pixelis.families.vision import patchify
from pixelis.nano.architecture import build
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.policy.adapters import Adapter
from pixelis.policy.log_probs import banned_mask, token_log_probs
from pixelis.policy.lora import BaseWeights, adapted_layers, lora_parameters, merge_into
from pixelis.policy.model import load_model
from pixelis.policy.model_path import fingerprint
from pixelis.policy.packing import collate
from pixelis.policy.samples import TrainSample

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "internvl", "gemma4")
LORA = config.LoraConfig(rank=4, alpha=8)
TINY = {
    **{"hidden": 64, "heads": 2, "kv_heads": 1, "layers": 2, "feedforward": 96},
    **{"vision_hidden": 32, "vision_layers": 2},
}
"""Sizes of the tiny models: heads 32 wide, the least that vLLM takes on CPU, share keys."""
WIDE = {**TINY, "hidden": 128}
"""Sizes of those with Gated DeltaNet, whose heads vLLM takes from 64 on."""
torch.set_num_threads(1)


@functools.cache
def folder(family: str) -> Path:
    """A model folder on disk."""
    root = Path(tempfile.mkdtemp(prefix=f"pixelis-{family}-"))
    atexit.register(shutil.rmtree, root, True)
    tokenizer = build_tokenizer()
    sizes = WIDE if family.startswith("qwen3_5") else TINY
    model = build(tokenizer, family, seed=3, **sizes)  # type: ignore[arg-type]
    model.save_pretrained(root)
    tokenizer.save_pretrained(root)
    return root


def published(family: str, target: Path) -> Path:
    """The model folder with the layout of the published files: stacked experts, those of Qwen3-VL transposed."""
    target.mkdir()
    for file in folder(family).iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder(family) / "model.safetensors")
    stacked = {
        name: t.transpose(1, 2).contiguous()
        for name, t in tensors.items()
        if name.endswith("_proj") and t.dim() == 3
    }
    for name in [name for name in tensors if ".experts.0.down_proj" in name]:
        stem = name.partition(".0.down_proj")[0]

        def stack(part: str, stem: str = stem) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{stem}.{expert}.{part}.weight") for expert in range(4)])

        stacked[f"{stem}.gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
        stacked[f"{stem}.down_proj"] = stack("down_proj")
    assert stacked
    save_file(tensors | stacked, target / "model.safetensors", {"format": "pt"})
    return target


def policy(family: str = "qwen3_vl", **values: object) -> config.PolicyConfig:
    settings = {"model": str(folder(family)), "lora": LORA, "dtype": "float32", **values}
    return config.PolicyConfig(**settings)  # type: ignore[arg-type]


@functools.cache
def spec(family: str = "qwen3_vl") -> ModelSpec:
    return load_spec(folder(family))


def stock(family: str = "qwen3_vl") -> torch.nn.Module:
    """A fresh model with transformers' own attention."""
    return load_model(policy(family), "cpu")[0]


def merged(adapter: Adapter, family: str = "qwen3_vl") -> torch.nn.Module:
    """A fresh model with an adapter in its weights."""
    model = stock(family)
    merge_into(model, BaseWeights(), adapter)
    return model


def random_adapter(
    family: str = "qwen3_vl", seed: int = 0, size: float = 0.08, mixed: bool = False, tower: bool = False
) -> Adapter:
    """All layers of one rank, or with `mixed` the first without an adapter and the others of ranks 2 to 6.

    tower: also the layers of the vision tower.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    layers = adapted_layers(stock(family), LORA.targets, tower)
    for place, (name, layer) in enumerate(layers.items()):
        rank = (2 + (place - 1) % 5 if place else 0) if mixed else LORA.rank
        if rank:
            tensors[f"{name}.A"] = rng.normal(0, size, (rank, layer.in_features)).astype(np.float32)
            tensors[f"{name}.B"] = rng.normal(0, size, (layer.out_features, rank)).astype(np.float32)
    return Adapter(tensors, LORA.alpha, LORA.rank, fingerprint(folder(family)))


def adapter_state(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Copies of a peft model's adapters, as they are published."""
    return {name: p.detach().numpy().copy() for name, p in lora_parameters(model).items()}


def set_adapter_state(model: torch.nn.Module, state: dict[str, np.ndarray]) -> None:
    parameters = lora_parameters(model)
    assert set(parameters) == set(state)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(state[name]))


class Maker:
    """Random texts, views and two-turn episodes."""

    def __init__(self, family: str = "qwen3_vl", seed: int = 0):
        self.spec, self.rng = spec(family), np.random.default_rng(seed)
        self.words = [t for t in range(7, self.spec.vocab) if t not in self.spec.banned]

    def text(self, n: int) -> list[int]:
        return [int(t) for t in self.rng.choice(self.words, n)]

    def view(self, height: int = 32, width: int = 32) -> np.ndarray:
        """Noise of this size, rounded up to one that the model's views have."""
        side = self.spec.multiple
        shape = -(-height // side) * side, -(-width // side) * side, 3
        return self.rng.integers(0, 255, shape, dtype=np.uint8)

    def image(self, view: np.ndarray) -> list[int]:
        return self.spec.family.image_ids(self.spec, *view.shape[:2])

    def sample(
        self,
        turns: int = 2,
        view: np.ndarray | None = None,
        advantage: float | None = None,
        longest: int = 12,
    ) -> TrainSample:
        view = self.view() if view is None else view
        views = [view]
        tokens = self.text(3) + self.image(view) + self.text(4)
        mask = [False] * len(tokens)
        for turn in range(turns):
            output = [*self.text(int(self.rng.integers(1, longest))), self.spec.stop]
            tokens, mask = tokens + output, mask + [True] * len(output)
            if turn < turns - 1:
                crop = self.view(32, 48)
                views.append(crop)
                seen = self.text(2) + self.image(crop) + self.text(3)
                tokens, mask = tokens + seen, mask + [False] * len(seen)
        flags = np.asarray(mask)
        return TrainSample(
            tokens=np.asarray(tokens),
            mask=flags,
            log_probs=np.where(flags, self.rng.normal(-6.5, 0.3, len(tokens)), 0).astype(np.float32),
            advantage=float(self.rng.normal()) if advantage is None else advantage,
            views=views,
        )


def stock_pixels(s: ModelSpec, views: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """What the model's own processor makes of views."""
    if s.family_name == "internvl":
        return {"pixel_values": s.family.pixel_values(s, views)}
    if s.family_name == "gemma4":
        processor = Gemma4ImageProcessorPil(
            do_resize=False, max_soft_tokens=70, patch_size=s.patch, pooling_kernel_size=s.merge
        )
        inputs = processor(list(views), return_tensors="pt")
        return {name: inputs[name] for name in ("pixel_values", "image_position_ids")}
    pixels, grid = patchify(views, s.patch, s.merge, s.temporal, s.image_mean, s.image_std)
    return {"pixel_values": pixels, "image_grid_thw": grid}


def stock_logits(model: torch.nn.Module, sample: TrainSample) -> torch.Tensor:
    """Logits [n, vocab] of a sample by transformers' own forward, unpadded."""
    s = spec(model.config.model_type)
    ids = torch.from_numpy(sample.tokens)[None]
    if not s.reads_images:  # these classes leave the whole forward pass to the learner
        text_model = getattr(model.model, "language_model", model.model)
        return model.lm_head(text_model(input_ids=ids).last_hidden_state)[0]
    inputs = stock_pixels(s, sample.views) if sample.views else {}
    if inputs and s.family_name != "internvl":
        inputs["mm_token_type_ids"] = (ids == s.image_token).int()
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]


def stock_log_probs(model: torch.nn.Module, sample: TrainSample, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of a sample's policy tokens by transformers' forward, one unpadded sample at a time."""
    logits = stock_logits(model, sample).float() / temperature
    logits = logits.index_fill(1, torch.tensor(spec(model.config.model_type).banned), float("-inf"))
    chosen = torch.log_softmax(logits, -1)[:-1].gather(1, torch.from_numpy(sample.tokens)[1:, None])[:, 0]
    return chosen[torch.from_numpy(sample.mask[1:])]


def check_log_probs(
    model: torch.nn.Module,
    samples: Sequence[TrainSample],
    expected: Sequence[np.ndarray],
    limit: float = 1e-4,
) -> None:
    """transformers' forward of a model gives these log-probabilities of the policy tokens."""
    with torch.no_grad():
        for sample, values in zip(samples, expected, strict=True):
            assert np.abs(stock_log_probs(model, sample).numpy() - values).max() < limit


def packed_log_probs(
    model: torch.nn.Module, samples: Sequence[TrainSample], temperature: float = 1.0, **options: int
) -> np.ndarray:
    """Log-probabilities of all policy tokens by the learner's packed forward."""
    s = spec(model.config.model_type)
    s.family.attend_packed(model)
    batch = collate(samples, s)
    features = concatenate(s.family.encode_views(model, s, batch.views)) if batch.views else None
    banned = banned_mask(s.banned, s.vocab)
    with torch.no_grad():
        return token_log_probs(model, s, batch, features, banned, temperature, **options)[0].numpy()


def check_same_training(
    weights: Mapping[str, np.ndarray],
    moments: Mapping[str, np.ndarray],
    expected_weights: Mapping[str, np.ndarray],
    expected_moments: Sequence[Mapping[str, np.ndarray]],
    limit: float,
) -> None:
    """Two AdamW runs saw the same gradients and took the same steps, whichever kernels of the processor
    computed them.

    moments: `{name}.exp_avg` after the last step; expected_moments: the same after each step; limit: largest
    difference of a weight. AdamW divides a gradient by its own size: where the gradient is rounding noise so
    is the update, and no two processors agree on it. Compared are therefore the gradients relative to their
    norm (the first moment is linear in them), and the weights wherever each step's gradient was zero or
    larger than a thousandth of its layer's largest.
    """
    names = sorted(expected_weights)
    assert sorted(weights) == names
    result, expected = (
        np.concatenate([m[f"{n}.exp_avg"].ravel() for n in names]) for m in (moments, expected_moments[-1])
    )
    assert np.linalg.norm(result - expected) < 1e-4 * np.linalg.norm(expected)
    clear_values = 0
    for name in names:
        clear, before = np.ones(expected_weights[name].shape, bool), np.float32(0)
        for step in expected_moments:
            average = step[f"{name}.exp_avg"]
            gradient = np.abs(average - 0.9 * before)  # in units of 1 - beta1
            clear &= (average == 0) | (gradient > 1e-3 * gradient.max())
            before = average
        clear_values += int(clear.sum())
        assert np.abs(weights[name] - expected_weights[name])[clear].max(initial=0) < limit, name
    assert clear_values > 0.9 * sum(w.size for w in expected_weights.values()), (
        "too little is left to compare"
    )

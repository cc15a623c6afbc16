"""Configuration of the policy: model, adapters and precision."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from pixelis.config.base import Section

ALL_LINEAR = "all-linear"
"""Entry of policy.lora.targets for all linear layers of the language model; the name is PEFT's."""


class LoraConfig(Section):
    rank: PositiveInt = 16
    """rank of the adapters"""
    alpha: PositiveInt = 32
    """scale of the adapters: the update is alpha / rank * B A"""
    ranks: str | None = None
    """file of the job `ranks` with a rank for each layer, instead of `rank`; alpha is scaled to keep alpha /
    rank"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """dropout on the input of the adapters"""
    targets: list[str] = Field([ALL_LINEAR])
    """names of the linear layers of the language model with adapters; all-linear: all but lm_head"""
    vision_tower: bool = False
    """adapters on all linear layers of the vision tower too"""

    def adapts(self, layer: str) -> bool:
        """Whether a linear layer of the language model, or `lm_head`, gets an adapter. layer: its own name."""
        return layer in self.targets or (ALL_LINEAR in self.targets and layer != "lm_head")


class PolicyConfig(Section):
    model: str = "nano"
    """`nano` or `mini` (the embedded models), a Hugging Face folder of a family (docs/models.md), or owner/name[@revision]
    on the hub"""
    family: str | None = None
    """package.module:NAME of a model family of your own, or generic; unset: by `model_type` of config.json"""
    adapter: str | None = None
    """checkpoint to start from, a run (its best checkpoint, else its newest) or a folder that PEFT saved: its
    adapter, or with policy.full its model"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """precision; auto: bfloat16 on GPUs that support it, else float32"""
    quantization: Literal["none", "nf4"] = "none"
    """nf4: keep the language model's linear layers in 4 bit under the adapters (QLoRA), in learners, in the
    engine hf and in the embedder; needs the extra quant; for vllm see engine.quantization"""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """attention kernel; with sdpa, samples share their prompts, which on GRPO's rows outweighs flash-attn"""
    full: bool = False
    """train all parameters instead of adapters"""
    freeze_vision_tower: bool = False
    """with `full`: train all parameters but those of the vision tower; for adapters see lora.vision_tower"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    lora: LoraConfig = LoraConfig()

    @property
    def trains_vision_tower(self) -> bool:
        """Whether updates change the features of pictures."""
        return not self.freeze_vision_tower if self.full else self.lora.vision_tower


class PolicyStoreConfig(Section):
    keep: int | None = Field(None, ge=1)
    """newest policy versions whose weights are kept in the object store and in run.dir, beside the first one
    and up to three promoted ones; unset: 8 adapters, or 3 models with policy.full"""

    transfer: Literal["object", "gloo", "nccl"] = "object"
    """rft, ttrl: how generators get a new version: object: from Ray's object store; gloo, nccl: with
    policy.full, from the learner in one broadcast between hosts, or between GPUs, while they serve the old
    version"""
    transfer_timeout_s: PositiveFloat = 60.0
    """timeout in seconds of each part of a broadcast; after a failure a version comes from the store"""

    @property
    def streams(self) -> bool:
        """Whether versions are broadcast."""
        return self.transfer != "object"

    def newest(self, full: bool) -> int:
        """Newest versions to keep. full: they are models, not adapters."""
        return self.keep or (3 if full else 8)

    def promoted(self, full: bool) -> int:
        """Promoted versions to keep for rollbacks."""
        return min(3, self.newest(full))

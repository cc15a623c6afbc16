"""Configuration of the learner: optimizer, batching, ZeRO and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pixelis.config.base import Section, Share


class LearnerConfig(Section):
    workers: PositiveInt = 1
    """learner processes"""
    min_workers: int | None = Field(None, ge=1)
    """rft, ttrl: learner processes with which a run goes on if a lost node leaves room for no more; unset: it
    waits for room for all of them"""
    cpus: NonNegativeFloat = 0.5
    """CPUs that each learner process reserves, also its threads: an optimizer in the host's memory takes 4 or
    more"""
    gpus: NonNegativeFloat = 0
    """GPUs that each learner process reserves"""
    lr: PositiveFloat = 1e-3
    """peak learning rate"""
    warmup: Share = 0.05
    """share of the steps with linear warm-up"""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """learning rate after the warm-up"""
    min_lr_ratio: Share = 0.0
    """final learning rate of the schedules cosine and linear, as a share of `lr`"""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW betas"""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW weight decay"""
    moments: Literal["float32", "bfloat16"] = "float32"
    """type of AdamW's moments; bfloat16, rounded at random, halves their memory"""
    max_grad_norm: PositiveFloat = 1.0
    """maximum norm of the gradient; larger gradients are clipped"""
    row_tokens: int = Field(1024, ge=16)
    """tokens per packed row"""
    rows: PositiveInt = 4
    """packed rows per forward pass"""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage; 0: no sharding, sufficient for adapters"""
    sequence_parallel: PositiveInt = 1
    """learners that divide each packed row among them, for rows that do not fit one GPU; a divisor of
    `workers` and of the model's attention heads"""
    deepspeed: str | None = None
    """DeepSpeed JSON file merged into the generated configuration"""
    peak_tflops: float | None = Field(None, gt=0)
    """10^12 operations per second of a GPU, for the metric learner/mfu; unset: by the GPU's name"""
    checkpoint_every: PositiveInt = 10
    """steps between checkpoints"""
    keep: PositiveInt = 3
    """number of checkpoints to keep, beside the one with the best evaluation"""
    save_only_model: bool = False
    """checkpoints without AdamW's moments, two thirds of their bytes; a resumed run starts with new ones"""
    max_failures: NonNegativeInt = 2
    """restarts from the last checkpoint before the run fails"""

    def shares(self, workers: int) -> int:
        """Number of parts that `workers` learners divide a batch into: one for each group of
        `sequence_parallel`.
        """
        return max(1, workers // self.sequence_parallel)

    def problems(self) -> list[str]:
        """What contradicts the numbers of workers."""
        out = []
        if (self.min_workers or 1) > self.workers:
            out.append(f"learner.min_workers {self.min_workers} is above learner.workers {self.workers}")
        for key, workers in {
            "workers": self.workers,
            "min_workers": self.min_workers or self.workers,
        }.items():
            if workers % self.sequence_parallel:
                out.append(
                    f"learner.{key} {workers} is no multiple of learner.sequence_parallel "
                    f"{self.sequence_parallel}"
                )
        return out

"""Configuration of the learner: optimizer, batching, ZeRO and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pixelis.config.base import Section


class LearnerConfig(Section):
    workers: int = Field(1, ge=1, description="learner processes")
    min_workers: int | None = Field(
        None,
        ge=1,
        description="rft, ttrl: learner processes with which a run goes on if a lost node leaves room for "
        "no more; unset: it "
        "waits for room for all of them",
    )
    cpus: float = Field(
        0.5, ge=0, description="CPUs that each learner process reserves; without a GPU, also its threads"
    )
    gpus: float = Field(0, ge=0, description="GPUs that each learner process reserves")
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    warmup: float = Field(0.05, ge=0, le=1, description="share of the steps with linear warm-up")
    schedule: Literal["constant", "cosine"] = Field("constant", description="learning rate after the warm-up")
    betas: tuple[float, float] = Field((0.9, 0.99), description="AdamW betas")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    moments: Literal["float32", "bfloat16"] = Field(
        "float32", description="type of AdamW's moments; bfloat16, rounded at random, halves their memory"
    )
    max_grad_norm: float = Field(
        1.0, gt=0, description="maximum norm of the gradient; larger gradients are clipped"
    )
    row_tokens: int = Field(1024, ge=16, description="tokens per packed row")
    rows: int = Field(4, ge=1, description="packed rows per forward pass")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="DeepSpeed ZeRO stage; 0: no sharding, sufficient for adapters"
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="learners that divide each packed row among them, for rows that do not fit one GPU; a "
        "divisor of `workers` "
        "and of the model's attention heads",
    )
    deepspeed: str | None = Field(
        None, description="DeepSpeed JSON file merged into the generated configuration"
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description=(
            "10^12 operations per second of a GPU, for the metric learner/mfu; unset: by the GPU's name"
        ),
    )
    checkpoint_every: int = Field(10, ge=1, description="steps between checkpoints")
    keep: int = Field(
        3, ge=1, description="number of checkpoints to keep, beside the one with the best evaluation"
    )
    save_only_model: bool = Field(
        False,
        description=(
            "checkpoints without AdamW's moments, two thirds of their bytes; a resumed run starts "
            "with new ones"
        ),
    )
    max_failures: int = Field(2, ge=0, description="restarts from the last checkpoint before the run fails")

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

"""Configuration of the generation engine and its sampling."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from pixelis.config.base import Section


class SamplingConfig(Section):
    temperature: NonNegativeFloat = 1.0
    """sampling temperature; 0: greedy"""
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus sampling: cumulative probability of the tokens considered; 1: all"""


class EngineConfig(Section):
    name: Literal["hf", "vllm", "vllm_server"] = "hf"
    """generation engine; vllm_server: running servers at `urls`, which take adapters and no other weights"""
    urls: list[str] = Field([])
    """vllm_server: address of the server of each generator, such as http://HOST:8000"""
    api_key_env: str = ""
    """vllm_server: environment variable with the servers' key; empty: none"""
    adapter_folder: str | None = None
    """vllm_server: folder for adapters that the servers see under the same path; unset: this machine's memory"""
    workers: PositiveInt = 1
    """generator actors; in a file also {min: 1, max: 8}, which sets max_workers"""
    max_workers: int | None = Field(None, ge=1)
    """generators at most; rft, ttrl: those beyond `workers` join the run when the cluster has room for them;
    serve: they start and end with the load; an autoscaling cluster adds nodes for them; unset: as many as
    `workers`"""
    cpus: NonNegativeFloat = 0.5
    """CPUs that each generator reserves; without a GPU, also its threads"""
    gpus: NonNegativeFloat = 0
    """GPUs that each generator reserves"""
    colocate: bool = False
    """rft, ttrl: each generator shares the GPU of a learner and sleeps while the learner steps; needs
    rft.max_off_policy_steps=0, engine.workers=learner.workers and gpus=1 (or 0) of both; the embedder runs on
    the CPU"""
    max_num_seqs: PositiveInt = 256
    """maximum number of episodes decoded together, and of environments open at once"""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """vllm: maximum number of tokens computed in one pass; unset: vLLM's default for the GPU"""
    timeout_s: PositiveFloat = 600.0
    """vllm: timeout in seconds of one turn of an episode and of loading a version"""
    health_timeout_s: PositiveFloat = 2.0
    """seconds in which a generator must answer a health check, and between two checks"""
    rollout_timeout_s: float | None = Field(None, gt=0)
    """timeout in seconds of a group of episodes with its retries; loading a version may take a minute more;
    unset: derived from dialogue.max_turns, dialogue.max_turn_tokens, toolbox.timeout_s and the episodes of a
    generator"""
    on_update: Literal["drain", "keep"] = "drain"
    """drain: finish the running episodes before loading new weights; keep: pause them, load the weights and
    continue; use it when rft.max_off_policy_steps is above 0"""
    tensor_parallel: PositiveInt = 1
    """vllm: GPUs of one node that share one model, equal to engine.gpus"""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """vllm: share of the reserved GPU memory (gpus=0.5: of half a GPU) for weights and KV cache"""
    enforce_eager: bool = False
    """vllm: no CUDA graphs (slower, but starts faster)"""
    adapters: Literal["swap", "merge"] = "swap"
    """vllm: swap: apply the LoRA adapter separately, if vLLM can for all its layers; merge: merge it into the
    weights at each load"""
    quantization: Literal["none", "fp8", "int8", "awq"] = "none"
    """vllm: fp8: quantise the weights while they load, for GPUs; int8, awq: generate with the quantised copy
    engine.model; the importance weights of rft.loss correct for the difference"""
    model: str | None = None
    """vllm: folder or hub name of a quantised copy of policy.model, which learners still train with its own
    weights"""

    @property
    def threads(self) -> int:
        return max(1, int(self.cpus))

    @property
    def most_workers(self) -> int:
        return self.max_workers or self.workers

    @model_validator(mode="before")
    @classmethod
    def _range_of_workers(cls, values: Any) -> Any:
        """`workers: {min: 1, max: 8}` as `workers: 1` and `max_workers: 8`."""
        if not isinstance(values, dict) or not isinstance(workers := values.get("workers"), dict):
            return values
        if workers.keys() != {"min", "max"}:
            raise ValueError(
                f"engine.workers is a number or has the keys min and max, not {', '.join(workers) or 'none'}"
            )
        return {**values, "workers": workers["min"], "max_workers": workers["max"]}

    @model_validator(mode="after")
    def _reserves_its_gpus(self) -> EngineConfig:
        if self.tensor_parallel > 1 and self.gpus and self.gpus != self.tensor_parallel:
            raise ValueError(
                f"engine.tensor_parallel {self.tensor_parallel} needs as many engine.gpus, not {self.gpus:g}"
            )
        return self

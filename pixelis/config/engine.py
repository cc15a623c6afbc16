"""Configuration of the generation engine and its sampling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pixelis.config.base import Section


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1 keeps all")


class EngineConfig(Section):
    name: Literal["hf", "vllm"] = Field("hf", description="generation engine")
    workers: int = Field(1, ge=1, description="generator actors")
    cpus: float = Field(0.5, ge=0, description="CPUs that each generator reserves")
    gpus: float = Field(0, ge=0, description="GPUs that each generator reserves")
    threads: int = Field(1, ge=1, description="CPU threads of each generator")
    max_num_seqs: int = Field(256, ge=1, description="episodes decoded together")
    timeout_s: float = Field(600.0, gt=0, description="vllm: seconds one turn of an episode, or one load of a version, may take")
    rollout_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds a group of episodes may take, retries on other generators included; unset: from dialogue.max_turns, "
        "max_turn_tokens and toolbox.timeout_s, and how many episodes share the generators",
    )
    load_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds a generator may take to load a version, the episodes that it finishes before included; then it gets "
        "no work until it has loaded it; unset: a minute more than a group may take",
    )
    retry_pause_s: float = Field(1.0, gt=0, description="seconds between attempts to bring back a generator that failed")
    suspect_s: float = Field(10.0, gt=0, description="serving: seconds in which a generator that failed is chosen last")
    health_timeout_s: float = Field(2.0, gt=0, description="seconds a generator has to say how it is")
    on_update: Literal["drain", "keep"] = Field(
        "drain",
        description="new weights wait for the episodes that run (drain), or the episodes are held, the weights change and they "
        "go on (keep: no waiting for the longest episode when rft.max_off_policy_steps is above 0)",
    )
    tensor_parallel: int = Field(1, ge=1, description="vllm: GPUs that share one model")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="vllm: share of a GPU's memory for weights, keys and values"
    )
    kv_cache_bytes: int | None = Field(
        None, ge=1, description="vllm: memory for keys and values; none: what gpu_memory_utilization leaves (on CPU 1 GiB)"
    )
    enforce_eager: bool = Field(False, description="vllm: no CUDA graphs (slower, starts sooner)")
    adapters: Literal["swap", "merge"] = Field(
        "swap", description="vllm: apply LoRA adapters beside the weights, or merge them into the weights at each load"
    )
    max_loras: int = Field(2, ge=1, description="vllm: LoRA adapters held at once (the new one is read beside the old)")

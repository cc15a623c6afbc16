"""The root of the configuration: all sections, and the checks across them."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import model_validator

from pixelis.config.base import Section
from pixelis.config.cluster import ClusterConfig
from pixelis.config.data import DataConfig
from pixelis.config.dialogue import DialogueConfig
from pixelis.config.distill import DistillConfig
from pixelis.config.engine import EngineConfig
from pixelis.config.evaluate import EvaluateConfig
from pixelis.config.evolution import EvolutionConfig
from pixelis.config.learner import LearnerConfig
from pixelis.config.memory import MemoryConfig
from pixelis.config.policy import PolicyConfig, PolicyStoreConfig
from pixelis.config.quickstart import QuickstartConfig
from pixelis.config.ranks import RanksConfig
from pixelis.config.references import EMBEDDED, is_hub_id
from pixelis.config.refinement import RefinementConfig
from pixelis.config.rewards import RewardsConfig
from pixelis.config.rft import RftConfig
from pixelis.config.run import RunConfig
from pixelis.config.serve import ServeConfig
from pixelis.config.sft import SftConfig
from pixelis.config.synthesis import SynthesisConfig
from pixelis.config.teacher import ADDRESS, STUDENT, VERSION
from pixelis.config.telemetry import TelemetryConfig
from pixelis.config.toolbox import ToolboxConfig
from pixelis.config.ttrl import TtrlConfig

MODELS = (
    "policy.model",
    "engine.model",
    "ranks.tuned",
    "toolbox.segmenter",
    "toolbox.detector",
    "toolbox.searcher",
)
"""Keys with a model: a folder, or an id on the Hugging Face Hub."""
PATHS = (
    *MODELS,
    "run.dir",
    "policy.adapter",
    "policy.lora.ranks",
    "data.train",
    "data.evaluate",
    "data.demonstrations",
    "evaluate.published",
    "memory.dir",
    "evolution.canary.questions",
    "sft.validation",
    "synthesis.teacher.demonstrations",
    "learner.deepspeed",
)
"""Keys with a path, or a source of rows."""
RECIPES = Path(__file__).resolve().parent.parent / "recipes"
"""Folder of the packaged recipes: `configs/` in a checkout."""
ABLATIONS = "ablations"
"""Its folder with ablation files."""
DEPLOYMENT = ("cluster", "monitoring")
"""Its folders with files of Ray, Kubernetes, Slurm, Prometheus and Grafana, which are no recipes."""
TOKENS_PER_S = 10.0
"""Slowest expected generation speed of one episode, for timeouts."""
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class Config(Section):
    """The configuration of all jobs."""

    run: RunConfig = RunConfig()
    """name, folder, seed and resumption of the run"""
    policy: PolicyConfig = PolicyConfig()
    """model, adapters, precision"""
    policy_store: PolicyStoreConfig = PolicyStoreConfig()
    """versions of the policy that a run keeps"""
    dialogue: DialogueConfig = DialogueConfig()
    """dialect, pixel budgets, limits of an episode"""
    engine: EngineConfig = EngineConfig()
    """generators: engine, number, resources, timeouts"""
    toolbox: ToolboxConfig = ToolboxConfig()
    """pixel operations and their limits"""
    data: DataConfig = DataConfig()
    """questions and demonstrations to read"""
    learner: LearnerConfig = LearnerConfig()
    """optimizer, batching, resources, checkpoints"""
    synthesis: SynthesisConfig = SynthesisConfig()
    """creation of demonstrations from annotated media"""
    refinement: RefinementConfig = RefinementConfig()
    """quality, duplicates, filters, gates and recipes of data sets"""
    distill: DistillConfig = DistillConfig()
    """demonstrations of answering at once where that is as good as looking closer"""
    sft: SftConfig = SftConfig()
    """supervised fine-tuning: length, weights, validation, curriculum"""
    ranks: RanksConfig = RanksConfig()
    """LoRA ranks from the changes of a full fine-tune"""
    rft: RftConfig = RftConfig()
    """reinforcement fine-tuning: algorithm, rollouts, advantages, loss"""
    rewards: RewardsConfig = RewardsConfig()
    """reward terms, weights, scorers, judge, curriculum"""
    ttrl: TtrlConfig = TtrlConfig()
    """test-time adaptation without labels"""
    evaluate: EvaluateConfig = EvaluateConfig()
    """evaluation: questions, sampling, saved episodes"""
    serve: ServeConfig = ServeConfig()
    """HTTP service: address, samples, limits"""
    memory: MemoryConfig = MemoryConfig()
    """experience memory: shards, index, retention"""
    evolution: EvolutionConfig = EvolutionConfig()
    """online learning: votes, gate, updates, canary, review, audit"""
    quickstart: QuickstartConfig = QuickstartConfig()
    """stages of the quickstart"""
    telemetry: TelemetryConfig = TelemetryConfig()
    """trackers, saved trajectories, progress"""
    cluster: ClusterConfig = ClusterConfig()
    """Ray cluster: address, resources"""

    @property
    def labelled(self) -> list[str]:
        """Keys that let a true answer influence training, in any phase of a curriculum."""
        rewards = self.rewards.labelled if self.rft.teacher.rewards else []
        return [*rewards, *(["rft.teacher.context"] if self.rft.teacher.labelled else [])]

    @property
    def needs_embedder(self) -> bool:
        """Whether episodes are embedded, for rewards or to cluster the questions of an evaluation."""
        return self.rewards.needs_states or self.evaluate.clusters > 0

    @model_validator(mode="after")
    def _constant_length(self) -> Config:
        loss = self.rft.loss  # set here, so that a dry run prints Dr. GRPO's length
        if loss.aggregate == "constant" and not loss.constant_tokens:
            length = self.dialogue.max_turns * self.dialogue.max_turn_tokens
            resolved = self.rft.model_copy(
                update={"loss": loss.model_copy(update={"constant_tokens": length})}
            )
            object.__setattr__(self, "rft", resolved)
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        checks = (
            *(self._folders, self._lengths, self._rft, self._teacher, self._sampling),
            *(self._quantization, self._colocation, self._servers, self._versions),
        )
        problems = [problem for check in checks for problem in check()] + self.learner.problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _folders(self) -> Iterator[str]:
        for key, folder in (("run.dir", self.run.dir), ("memory.dir", self.memory.dir)):
            if folder and "://" in folder:  # object stores cannot lock, append, rename and link
                yield f"{key} {folder} is no folder: mount a filesystem that all nodes share, such as NFS"
        if not self.evaluate.questions and any(
            source.startswith("cards:") for source in self.held_out.values()
        ):
            yield "evaluate.questions=0 takes all questions of a set, and cards: has no end"
        if not (self.memory.enabled and self.memory.pictures):
            if self.evolution.rehearse:
                yield "evolution.rehearse draws from the memory: set memory.enabled and memory.pictures"
            if self.evolution.unlearn_s is not None:
                yield "evolution.unlearn_s records updates: set memory.enabled and memory.pictures"
            if self.evolution.words:
                yield "evolution.words asks about stored pictures: set memory.enabled and memory.pictures"
        if self.evaluate.direct and not self.toolbox.has_tools:
            yield "evaluate.direct compares answers with and without operations: toolbox.operations is empty"

    def _lengths(self) -> Iterator[str]:
        d, learner = self.dialogue, self.learner
        if d.max_turn_tokens >= d.max_context:
            yield f"dialogue.max_turn_tokens {d.max_turn_tokens} must be below max_context {d.max_context}"
        if learner.row_tokens < d.max_context:
            yield (
                f"learner.row_tokens {learner.row_tokens} is below dialogue.max_context {d.max_context}: an "
                "episode must fit into a row"
            )
        shares = learner.shares(learner.workers)
        for key, batch in (
            ("rft.prompts_per_step", self.rft.prompts_per_step),
            ("sft.batch", self.sft.batch),
        ):
            if batch % shares:
                yield f"{key} {batch} is not divisible by learner.workers / sequence_parallel, {shares}"

    def _rft(self) -> Iterator[str]:
        r = self.rft
        if r.replay.capacity and r.loss.kl > 0 and r.loss.kl_in == "reward":
            yield "rft.replay keeps advantages, which rft.loss.kl_in=reward makes depend on the weights"
        if r.advantage.baseline == "critic" and self.learner.sequence_parallel > 1:
            yield "rft.advantage.baseline=critic sees whole rows: set learner.sequence_parallel=1"
        if r.advantage.min_group > r.group_size and r.teacher.rewards:
            yield f"rft.advantage.min_group {r.advantage.min_group} is above rft.group_size {r.group_size}"
        if r.advantage.baseline == "pass_at_k" and r.advantage.k >= r.group_size:
            yield f"rft.advantage.k {r.advantage.k} is not below rft.group_size {r.group_size}"
        if r.agent and ("causal_use" in self.rewards.computed or self.evolution.canary.min_use is not None):
            yield "rft.agent: causal use is measured of the policy's own loop alone"
        if r.filter.key not in (keys := ["none", "reward", *self.rewards.computed, *self.rewards.own]):
            yield f"rft.filter.key {r.filter.key} has no weight: name one of {', '.join(keys)}"

    def _teacher(self) -> Iterator[str]:
        r = self.rft
        if r.teacher.names and r.sampling.top_p < 1:
            yield f"rft.sampling.top_p {r.sampling.top_p} counts as divergence from rft.teacher: set it to 1"
        if r.sampling.temperature != 1 and any(map(ADDRESS.fullmatch, r.teacher.names)):
            yield f"rft.sampling.temperature {r.sampling.temperature}: servers of rft.teacher score at 1"
        if r.teacher.rewards:
            return
        if r.advantage.baseline == "critic" or r.loss.kl_in == "reward":
            yield "rft.teacher.rewards=false leaves no reward for a critic or rft.loss.kl_in=reward"
        if r.filter.key != "none" or r.replay.capacity:
            yield "rft.teacher.rewards=false leaves rft.filter and rft.replay no advantage to choose by"

    def _sampling(self) -> Iterator[str]:
        """What the engines cannot sample, or the learner would take for another distribution."""
        loss, top_p = self.rft.loss, self.rft.sampling.top_p
        # Engines record probabilities within the nucleus; learner and reference score the whole vocabulary.
        if top_p < 1 and loss.kl > 0 and loss.kl_in == "reward":
            yield f"rft.sampling.top_p {top_p} counts as divergence: set it to 1, or rft.loss.kl_in=loss"
        if top_p < 1 and loss.importance == "none" and loss.proximal == "learner":
            yield f"rft.sampling.top_p {top_p} needs rft.loss.importance=truncate to correct for it"
        for name, section in (("rft", self.rft), ("evaluate", self.evaluate), ("serve", self.serve)):
            temperature = section.sampling.temperature
            if (self.engine.name != "hf" and temperature > 2) or 0 < temperature < 0.01:
                yield f"{name}.sampling.temperature {temperature} is neither 0 nor from 0.01 to vLLM's 2"

    def _quantization(self) -> Iterator[str]:
        policy, e, loss = self.policy, self.engine, self.rft.loss
        if policy.quantization != "none" and (policy.full or self.learner.zero_stage == 3):
            yield "policy.quantization freezes a whole base: set policy.full=false, learner.zero_stage below 3"
        is_corrected = loss.importance != "none" or loss.proximal != "learner"
        if e.name == "vllm" and e.quantization != policy.quantization and not is_corrected:
            yield (
                f"engine.quantization={e.quantization} samples for policy.quantization={policy.quantization}: "
                "set rft.loss.importance=truncate"
            )

    def _colocation(self) -> Iterator[str]:
        e, learner = self.engine, self.learner
        if e.most_workers < e.workers:
            yield f"engine.max_workers {e.max_workers} is below engine.workers {e.workers}"
        if not e.colocate:
            return
        if e.most_workers > e.workers:
            yield "engine.colocate has a generator for each learner: unset engine.max_workers"
        if self.rft.max_off_policy_steps:
            yield "engine.colocate lets generators and learners take turns: set rft.max_off_policy_steps=0"
        if (e.gpus or learner.gpus) and not e.gpus == learner.gpus == e.tensor_parallel == 1:
            yield "engine.colocate needs 1 for engine.gpus, learner.gpus and engine.tensor_parallel"
        if e.gpus and e.workers != learner.workers:
            yield f"engine.colocate needs as many engine.workers as learner.workers {learner.workers}"

    def _servers(self) -> Iterator[str]:
        e = self.engine
        if e.name != "vllm_server":
            if e.urls:
                yield f"engine.urls names the servers of engine.name=vllm_server, not of {e.name}"
            return
        if not e.urls:
            yield "engine.name=vllm_server needs a server for each generator: set engine.urls=[http://HOST:PORT]"
        elif len(e.urls) != e.most_workers:
            yield f"engine.urls names {len(e.urls)} servers for {e.most_workers} generators: set engine.workers={len(e.urls)}"
        if e.gpus or e.colocate:
            yield "engine.name=vllm_server reserves no GPU: set engine.gpus=0 and engine.colocate=false"
        if self.policy.full or self.policy.lora.vision_tower or e.quantization != "none":
            yield (
                "a vLLM server takes adapters of the language model alone: set policy.full=false, "
                "policy.lora.vision_tower=false and engine.quantization=none, or engine.name=vllm"
            )

    def _versions(self) -> Iterator[str]:
        e, transfer = self.engine, self.policy_store.transfer
        uniform = not self.policy.full and not self.policy.lora.ranks
        if e.name != "hf" and uniform and self.policy.lora.rank > max(VLLM_LORA_RANKS):
            yield f"policy.lora.rank {self.policy.lora.rank} is above vLLM's largest, {max(VLLM_LORA_RANKS)}"
        if self.policy_store.streams and not self.policy.full:
            yield f"policy_store.transfer={transfer} is for policy.full=true: leave it at object"
        if transfer == "nccl" and (e.colocate or not (self.learner.gpus and e.gpus)):
            yield "policy_store.transfer=nccl needs a GPU for each learner and generator: use object or gloo"
        if (e.quantization in ("int8", "awq")) != bool(e.model):
            yield (
                f"engine.quantization={e.quantization} with engine.model={e.model}: int8 and awq need the "
                "folder of a quantised copy of policy.model, which llm-compressor writes, others none"
            )
        if e.quantization == "none":
            return
        if e.name != "vllm":
            yield f"engine.quantization={e.quantization} needs engine.name=vllm"
        if self.policy.full or e.adapters == "merge" or "lm_head" in self.policy.lora.targets:
            yield (
                f"engine.quantization={e.quantization} applies adapters at runtime: policy.full, "
                "engine.adapters=merge and an adapted lm_head need quantization=none"
            )

    @property
    def rollout_timeout_s(self) -> float:
        """Timeout of a group: an episode at TOKENS_PER_S, for each wave of episodes plus one."""
        if self.engine.rollout_timeout_s is not None:
            return self.engine.rollout_timeout_s
        d, r = self.dialogue, self.rft
        turns = max(d.max_turns, d.max_turns_test)
        episode = turns * (d.max_turn_tokens / TOKENS_PER_S + self.toolbox.timeout_s * self.toolbox.has_tools)
        running = r.prompts_per_step * r.group_size * (r.max_off_policy_steps + 1)
        waves = math.ceil(running / (self.engine.workers * self.engine.max_num_seqs))
        return max(600.0, (waves + 1) * episode)

    @property
    def hub_models(self) -> dict[str, str]:
        """The models of the Hugging Face Hub by key."""
        names = {key: operator.attrgetter(key)(self) or "" for key in MODELS}
        names["rft.teacher.model"] = self.rft.teacher.model or ""
        names |= {f"rft.teacher.by_task.{task}": name for task, name in self.rft.teacher.by_task.items()}
        return {key: name for key, name in names.items() if is_hub_id(name)}

    @property
    def learns_online(self) -> bool:
        """Whether a service updates its policy; a read-only one does not."""
        return self.evolution.enabled and not self.serve.read_only

    @property
    def remembers(self) -> bool:
        """Whether a service stores experiences."""
        return self.memory.enabled and not self.serve.read_only

    @property
    def held_out(self) -> dict[str, str]:
        """The sources of an evaluation by name; `data.evaluate` alone has none."""
        return self.evaluate.sets or {"": self.data.evaluate}

    @property
    def load_timeout_s(self) -> float:
        """Timeout of loading a version, which may wait for the longest episode."""
        return self.rollout_timeout_s + 60.0

    def changed(self, values: Mapping[str, Any]) -> Config:
        """A copy with other values by dotted key (`rft.steps`), which are not validated again."""

        def replaced(section: Section, key: str, value: Any) -> Any:
            head, _, rest = key.partition(".")
            content = replaced(getattr(section, head), rest, value) if rest else value
            return section.model_copy(update={head: content})

        return functools.reduce(lambda config, item: replaced(config, *item), values.items(), self)

    def to_yaml(self) -> str:
        """The resolved configuration, which loads to an equal Config."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=120)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def recipe_files(*suffixes: str) -> list[Path]:
    """The packaged recipes with these suffixes, by default `.yaml`."""
    files = sorted(RECIPES.rglob("*"))
    recipes = [file for file in files if file.relative_to(RECIPES).parts[0] not in (*DEPLOYMENT, ABLATIONS)]
    return [file for file in recipes if file.suffix in (suffixes or (".yaml",))]


def ablation_files() -> list[Path]:
    return sorted((RECIPES / ABLATIONS).glob("*.yaml"))


def shipped(name: str, suffix: str = "") -> Path | None:
    """The packaged file or folder of a name such as ``configs/nano/rft.yaml`` or ``nano/rft``."""
    path = RECIPES / name.removeprefix("configs/")
    inside = path.resolve().is_relative_to(RECIPES.resolve())
    return next((file for file in (path, Path(f"{path}{suffix}")) if inside and file.exists()), None)


def absolute(config: Config) -> Config:
    """The configuration with absolute paths, since workers run in other folders than the driver.

    A missing ``configs/...`` file falls back to the packaged one.
    """
    local = set(PATHS) - config.hub_models.keys()
    paths = {key: path for key in PATHS if key in local and (path := operator.attrgetter(key)(config))}
    sets = {name: _absolute(source) for name, source in config.evaluate.sets.items()}
    teacher = config.rft.teacher
    by_task = {task: _absolute_teacher(name) for task, name in teacher.by_task.items()}
    model = teacher.model and _absolute_teacher(teacher.model)
    others = {"evaluate.sets": sets, "rft.teacher.by_task": by_task, "rft.teacher.model": model}
    return config.changed({key: _absolute(path) for key, path in paths.items()} | others)


def _absolute_teacher(name: str) -> str:
    return name if name == STUDENT or VERSION.fullmatch(name) or is_hub_id(name) else _absolute(name)


def _absolute(text: str) -> str:
    if text in (*EMBEDDED, "mobilenet") or text.startswith(("cards:", "packaged:", "hf:")) or "://" in text:
        return text
    match = None if os.path.exists(text.partition("?")[0]) else re.fullmatch(r"(\w+:)(.+)", text)
    name, root = match.groups() if match else ("", text)
    path = Path(root).expanduser()
    if root.startswith("configs/") and not path.exists():
        path = shipped(root) or path
    return name + str(path.absolute())

"""Typed configuration: one YAML file, dotted overrides on the command line, nothing else.

``python -m pixelis.jobs.rft configs/nano/rft.yaml learner.lr=3e-4 --dry-run`` prints the resolved configuration. A file may
name another with ``extends: other.yaml`` (relative to itself); later values win. Unknown keys, wrong types and
contradictions are errors that name the key's path. The defaults are those of the embedded model on a laptop.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import signal
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pixelis.errors import BadConfig, MissingFile
from pixelis.presets import ALGORITHMS
from pixelis.reward_presets import REWARD_PRESETS

PATHS = (
    ("run", "dir"),
    ("policy", "model"),
    ("policy", "adapter"),
    ("data", "train"),
    ("data", "evaluate"),
    ("data", "demonstrations"),
    ("learner", "deepspeed"),
    ("toolbox", "segmenter"),
)
REWARD_MEANS = ("own", "own_limit_s", "own_children", "scorer", "math", "judge", "workers", "cpus")
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class Section(BaseModel):
    """Base of every part of the configuration: unknown keys are errors, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Run(Section):
    name: str = Field("run", description="name of this run in logs and reports")
    dir: str = Field("runs/run", description="folder of checkpoints, events and reports; re-running with it resumes")
    seed: int = Field(42, description="seed of data order, sampling and initialisation")
    resume: bool = Field(True, description="continue from the last complete checkpoint in run.dir")


class Lora(Section):
    rank: int = Field(16, ge=1, description="rank of the adapters")
    alpha: int = Field(32, ge=1, description="scale numerator: the update is alpha / rank * B A")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapter's input")
    targets: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="names of the linear layers that get an adapter (language model only)",
    )


class Policy(Section):
    model: str = Field("nano", description="`nano`, or a folder with a Hugging Face Qwen2.5-VL or Qwen3-VL model")
    adapter: str | None = Field(None, description="checkpoint folder whose adapter to start from")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on GPUs that have it, else float32")
    attention: Literal["auto", "sdpa", "flash_attention_2"] = Field(
        "auto", description="auto: flash-attn when installed on a GPU, else sdpa"
    )
    full: bool = Field(False, description="train all parameters instead of adapters")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    lora: Lora = Lora()


class PixelRange(Section):
    min_pixels: int = Field(4096, ge=1, description="smallest area of a view in pixels")
    max_pixels: int = Field(4096, ge=1, description="largest area of a view in pixels")

    @model_validator(mode="after")
    def _ordered(self) -> PixelRange:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        return self


class Dialogue(Section):
    dialect: Literal["qwen"] = Field("qwen", description="wire format of actions and answers")
    system: Literal["auto", "none"] = Field(
        "auto", description="auto: tool schemas in a system turn, none for the embedded model; none: never"
    )
    coordinates: Literal["auto", "thousand", "pixels"] = Field(
        "auto",
        description="boxes the model writes: 0..1000 (Qwen3-VL), absolute pixels of the view (Qwen2.5-VL), auto by architecture",
    )
    input: PixelRange = Field(PixelRange(), description="pixel budget of a question's picture")
    crop: PixelRange = Field(PixelRange(), description="pixel budget of an observation's picture")
    frame: PixelRange = Field(PixelRange(), description="pixel budget of a frame of a clip")
    frames: int = Field(8, ge=1, description="frames of a clip that the policy sees at first, evenly spread")
    max_turns: int = Field(3, ge=1, description="policy turns in training")
    max_turns_test: int = Field(3, ge=1, description="policy turns in evaluation and serving")
    max_turn_tokens: int = Field(32, ge=1, description="new tokens in one policy turn")
    max_context: int = Field(512, ge=16, description="tokens of a whole episode")
    max_images: int = Field(8, ge=1, description="images in a whole episode")


class Sampling(Section):
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1 keeps all")


class Engine(Section):
    name: Literal["hf", "vllm"] = Field("hf", description="generation engine")
    workers: int = Field(1, ge=1, description="generator actors")
    cpus: float = Field(0.5, ge=0, description="CPUs that each generator reserves")
    gpus: float = Field(0, ge=0, description="GPUs that each generator reserves")
    threads: int = Field(1, ge=1, description="CPU threads of each generator")
    max_rows: int = Field(256, ge=1, description="episodes decoded together")
    deadline_s: float = Field(600.0, gt=0, description="vllm: seconds one turn of an episode, or one load of a version, may take")
    tensor_parallel: int = Field(1, ge=1, description="vllm: GPUs that share one model")
    gpu_memory: float = Field(0.9, gt=0, le=1, description="vllm: share of a GPU's memory for weights, keys and values")
    kv_cache_bytes: int | None = Field(
        None, ge=1, description="vllm: memory for keys and values; none: what gpu_memory leaves (on CPU 1 GiB)"
    )
    eager: bool = Field(False, description="vllm: no CUDA graphs (slower, starts sooner)")
    adapters: Literal["swap", "merge"] = Field(
        "swap", description="vllm: apply LoRA adapters beside the weights, or merge them into the weights at each load"
    )
    max_loras: int = Field(2, ge=1, description="vllm: LoRA adapters held at once (the new one is read beside the old)")


class Toolbox(Section):
    operations: list[str] = Field(
        ["zoom_in", "segment_object_at", "get_properties", "read_text", "track_object", "select_frames"],
        description="pixel operations that the policy may call; an own one as `package.module:Class`",
    )
    workers: int = Field(1, ge=1, description="toolbox actors of each generator")
    cpus: float = Field(0.25, ge=0, description="CPUs that each toolbox reserves")
    deadline_s: float = Field(30.0, gt=0, description="seconds an operation may take")
    memory_bytes: int = Field(2_000_000_000, ge=100_000_000, description="memory an operation may take beyond the idle toolbox")
    cache_bytes: int = Field(256_000_000, ge=0, description="results kept by each generator for calls that repeat")
    max_image_bytes: int = Field(20_000_000, ge=1, description="largest encoded image")
    max_image_pixels: int = Field(50_000_000, ge=1, description="largest decoded image, checked before decoding")
    max_video_bytes: int = Field(500_000_000, ge=1, description="largest encoded clip")
    max_video_seconds: float = Field(3600.0, gt=0, description="longest clip")
    max_video_frames: int = Field(200_000, ge=1, description="most frames of a clip")
    max_frames: int = Field(8, ge=1, description="most frames that one select_frames shows")
    max_track_frames: int = Field(300, ge=2, description="most frames that one track_object follows")
    segmenter: str = Field("grabcut", description="`grabcut`, or a folder with a SAM or SAM 2 checkpoint of transformers")


class Data(Section):
    train: str = Field("cards:?split=train", description="questions to train on: `cards:` or a JSON-lines file of questions")
    evaluate: str = Field("cards:?split=test&seed=7", description="held-out questions")
    demonstrations: str = Field("cards:?split=train", description="demonstrations for sft: `cards:` or a JSON-lines file")
    direct_share: float = Field(0.7, ge=0, le=1, description="share of `cards:` demonstrations that answer without an operation")
    limit: int = Field(0, ge=0, description="use only the first N questions; 0 is all")


class Learner(Section):
    workers: int = Field(1, ge=1, description="learner processes")
    cpus: float = Field(0.5, ge=0, description="CPUs that each learner process reserves")
    gpus: float = Field(0, ge=0, description="GPUs that each learner process reserves")
    threads: int = Field(1, ge=1, description="CPU threads of each learner process")
    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    warmup: float = Field(0.05, ge=0, le=1, description="share of the steps that warm up linearly")
    schedule: Literal["constant", "cosine"] = Field("constant", description="learning rate after the warm-up")
    betas: tuple[float, float] = Field((0.9, 0.99), description="AdamW moments")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    clip_norm: float = Field(1.0, gt=0, description="largest norm of the gradient")
    row_tokens: int = Field(1024, ge=16, description="tokens of a packed row")
    rows: int = Field(4, ge=1, description="packed rows in one forward pass")
    zero_stage: Literal[0, 1, 2, 3] = Field(1, description="DeepSpeed ZeRO stage")
    deepspeed: str | None = Field(None, description="DeepSpeed JSON file to merge in")
    checkpoint_every: int = Field(10, ge=1, description="steps between checkpoints")
    keep: int = Field(3, ge=1, description="checkpoints kept")
    max_failures: int = Field(2, ge=0, description="restarts from the last checkpoint before the run fails")


class Sft(Section):
    steps: int = Field(150, ge=1, description="optimizer steps")
    batch: int = Field(16, ge=1, description="demonstrations in a step")


class Advantage(Section):
    baseline: Literal["mean", "loo", "greedy", "batch", "none", "pass_at_k", "second_best"] = Field(
        "mean",
        description="what is subtracted: mean of the group, of its other rollouts, reward of a greedy rollout, mean of the "
        "batch, nothing; pass_at_k and second_best are advantages of their own",
    )
    scale: Literal["std", "mad", "batch_std", "none"] = Field(
        "std", description="what the difference is divided by; batch_std whitens over the whole batch"
    )
    eps: float = Field(1e-4, gt=0, description="added to the divisor")
    k: int = Field(4, ge=1, description="attempts that pass_at_k is about")
    batch_over: Literal["sequence", "token"] = Field(
        "sequence", description="whether a rollout counts once or by its tokens in the statistics of the batch"
    )
    min_group: int = Field(2, ge=1, description="scored rollouts a group needs to be used")
    exclude: list[Literal["no_action", "length", "over_turn", "over_context", "over_images", "deadline", "error"]] = Field(
        [], description="stop reasons of rollouts that are left out of statistics and loss, as unscored ones always are"
    )
    excluded_count: bool = Field(False, description="excluded rollouts count in the statistics with reward 0 (Mini-o3's code)")

    @model_validator(mode="after")
    def _possible(self) -> Advantage:
        in_group = self.baseline in ("mean", "loo", "pass_at_k", "second_best")
        if in_group and self.min_group < 2:
            raise ValueError(f"baseline {self.baseline} compares rollouts of a group: set min_group to 2 or more")
        if self.scale in ("std", "mad") and not in_group:
            raise ValueError(f"scale {self.scale} is of a group but baseline {self.baseline} is not: set scale=none or batch_std")
        if self.scale == "mad" and self.baseline not in ("mean", "loo"):
            raise ValueError(f"scale mad does not go with baseline {self.baseline}: set scale=std")
        return self


class Loss(Section):
    surrogate: Literal["clip", "cispo", "sapo", "reinforce"] = Field(
        "clip", description="PPO clipping, clipped weight on log-probs (CISPO), soft gate (SAPO), or no ratio at all"
    )
    ratio: Literal["token", "sequence", "sequence_token"] = Field(
        "token", description="ratio of each token, or the geometric mean of the sequence (GSPO; sequence_token: GSPO-token)"
    )
    proximal: Literal["learner", "behaviour"] = Field(
        "learner", description="denominator of the ratio: the weights before the batch's first step, or the engine's log-probs"
    )
    clip_low: float = Field(0.2, gt=0, description="ratio clipped below 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="ratio clipped above 1 + clip_high")
    dual_clip: float = Field(0.0, ge=0, description="c: with a negative advantage the loss is at most c times it; 0 is off")
    sapo_positive: float = Field(1.0, gt=0, description="temperature of the soft gate for positive advantages")
    sapo_negative: float = Field(1.05, gt=0, description="temperature of the soft gate for negative advantages")
    aggregate: Literal["token", "sequence", "constant"] = Field(
        "token", description="mean over all tokens of the batch, over sequences of token means, or sum over a constant length"
    )
    constant_tokens: int = Field(
        0, ge=0, description="length that aggregate=constant divides by; 0: dialogue.max_turns * dialogue.max_turn_tokens"
    )
    kl: float = Field(0.0, ge=0, description="weight of the KL divergence to the starting policy")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL divergence of each token")
    kl_in: Literal["loss", "reward"] = Field("loss", description="a term of the loss, or taken off the reward (by k1)")
    entropy: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    importance: Literal["truncate", "mask", "none"] = Field(
        "truncate", description="learner / engine weights outside their bounds: cut to the bound, or the tokens are left out"
    )
    importance_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="weight of each token, product over the sequence, or its geometric mean"
    )
    importance_cap: float = Field(2.0, gt=0, description="upper bound of learner / engine importance weights")
    importance_floor: float = Field(0.0, ge=0, description="lower bound of them")

    @model_validator(mode="after")
    def _possible(self) -> Loss:
        if self.dual_clip and (self.surrogate != "clip" or self.dual_clip <= 1 + self.clip_high):
            raise ValueError("dual_clip needs surrogate=clip and a value above 1 + clip_high")
        if self.surrogate == "reinforce" and self.ratio != "token":
            raise ValueError(f"surrogate reinforce has no ratio, but ratio={self.ratio}")
        if self.kl > 0 and self.kl_in == "reward" and self.kl_estimator != "k1":
            raise ValueError(f"a KL taken off the reward is summed by k1, not {self.kl_estimator}: set kl_estimator=k1")
        if self.importance_floor >= self.importance_cap:
            raise ValueError(f"importance_floor {self.importance_floor} is not below importance_cap {self.importance_cap}")
        return self


class DynamicSampling(Section):
    filter: Literal["none", "accuracy"] = Field(
        "none", description="accuracy: groups whose rollouts are all right or all wrong are replaced by new questions (DAPO)"
    )
    most: float = Field(3.0, ge=1, description="questions tried for a batch, as a multiple of rft.questions; then it is smaller")


class Replay(Section):
    capacity: int = Field(0, ge=0, description="rollouts kept to fill up smaller batches (selective sample replay); 0 is off")
    alpha: float = Field(1.0, ge=0, description="a kept rollout is drawn with probability ~ |advantage| ** alpha")
    max_age: int = Field(8, ge=1, description="steps that a rollout is kept")
    max_bytes: int = Field(1_000_000_000, ge=1, description="bytes of views that kept rollouts may hold in the object store")


class Rft(Section):
    algorithm: str | None = Field(
        None, description=f"named settings of rft.advantage and rft.loss, explicit keys win: {', '.join(ALGORITHMS)}"
    )
    steps: int = Field(40, ge=1, description="optimizer steps")
    questions: int = Field(32, ge=1, description="questions in a step")
    group: int = Field(8, ge=1, description="rollouts of a question")
    minibatches: int = Field(1, ge=1, description="optimizer steps that a batch is cut into")
    staleness: int = Field(0, ge=0, description="steps that rollouts may lag behind the learner; 0 is exact on-policy")
    sampling: Sampling = Sampling()
    advantage: Advantage = Advantage()
    loss: Loss = Loss()
    dynamic: DynamicSampling = DynamicSampling()
    replay: Replay = Replay()
    evaluate_every: int = Field(0, ge=0, description="steps between held-out evaluations; 0 is never")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Fill in what the named algorithm sets and nothing else does, so that the printed configuration is the resolved one."""
        name = values.get("algorithm") if isinstance(values, dict) else None
        if not isinstance(name, str):
            return values
        if name not in ALGORITHMS:
            near = difflib.get_close_matches(name, ALGORITHMS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"one of {', '.join(ALGORITHMS)}"
            raise ValueError(f"no algorithm `{name}` ({hint})")
        given = {k: v.model_dump(exclude_unset=True) if isinstance(v, Section) else v for k, v in values.items()}
        return _merge({part: dict(keys) for part, keys in ALGORITHMS[name].items()}, given)


class Curiosity(Section):
    form: Literal["paper", "repo"] = Field("paper", description="bonus of Pixel-Reasoner's paper or of its code")
    counts: Literal["executed", "requested"] = Field("executed", description="calls that count, for rate, bonus and cost")
    target: float = Field(0.3, ge=0, le=1, description="H: rate of pixel reasoning below which a call earns a bonus")
    alpha: float = Field(0.5, ge=0, description="weight of the bonus in the paper's form")
    free_calls: int = Field(1, ge=0, description="N: calls that cost nothing")
    beta: float = Field(0.05, ge=0, description="cost of each further call")


class RewardWeights(Section):
    accuracy: float = Field(1.0, description="weight of the answer's score, 0..1")
    wrong: float = Field(0.0, description="weight of the score less 1, -1..0: 1 beside accuracy gives +1 and -1")
    format: float = Field(
        0.0, description="weight of well-formed turns, 0 or 1 (-1 or 0 for rewards.format balanced and boxed_once)"
    )
    curiosity: float = Field(0.0, description="weight of the Pixel-Reasoner bonus and call cost")
    curiosity_bonus: float = Field(0.0, description="weight of the bonus alone")
    efficiency: float = Field(0.0, description="weight of the call cost alone, at most 0")
    tool_if_correct: float = Field(0.0, description="weight of 1 for an executed operation and a right answer")
    tool_penalty: float = Field(0.0, description="weight of minus the score for any call")
    unrepaired_error_zero: float = Field(0.0, description="weight of minus the score when the last call failed: 1 takes it back")
    overlong: float = Field(0.0, description="weight of the soft overlong punishment, -1..0 (DAPO)")
    length: float = Field(0.0, description="weight of brevity within the group, -0.5..0.5, from rewards.length_start on")
    step_markers: float = Field(0.0, description="weight of visible steps in the reasoning, 0..1")
    majority_vote: float = Field(0.0, description="weight of agreeing with the group's majority, 0..1 (TTRL)")
    coherence: float = Field(0.0, description="weight of sensible sequences of operations, -1..1 (Pixelis)")
    curiosity_dynamics: float = Field(0.0, description="weight of what a trained dynamics model did not foresee, 0..1 (Pixelis)")
    tool_misuse: float = Field(0.0, description="weight of the tool penalties, at most 0 (Pixelis)")


FormatKind = Literal["dialect", "think_answer", "caption", "turns", "think_boxed", "balanced", "boxed_once"]


class TaskRewards(Section):
    weights: RewardWeights = RewardWeights()
    format: FormatKind = Field("dialect", description="what well-formed means")


class Overlong(Section):
    max_tokens: int = Field(20480, ge=1, description="generated tokens of an episode that cost 1")
    buffer: int = Field(4096, ge=1, description="tokens before that over which the cost grows")

    @model_validator(mode="after")
    def _ordered(self) -> Overlong:
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer {self.buffer} is above max_tokens {self.max_tokens}")
        return self


class VoteReward(Section):
    min_share: float = Field(0.0, ge=0, le=1, description="least share of the rollouts that a majority needs")
    tie: Literal["first", "abstain"] = Field(
        "first", description="equal counts: the answer seen first, or no reward for the group"
    )


class Dynamics(Section):
    state: int = Field(768, ge=1, description="size of a state vector of the embedder")
    action: int = Field(128, ge=32, description="size of an action vector")
    hidden: int = Field(256, ge=1, description="size of the hidden layers")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout while learning")
    lr: float = Field(1e-3, gt=0, description="learning rate of AdamW")
    epochs: int = Field(4, ge=1, description="passes over the transitions of a step")
    eta: float = Field(0.5, gt=0, description="weight of the prediction error")
    beta: float = Field(0.2, ge=0, le=1, description="share of the forward loss; the rest is the inverse loss")
    scale: float = Field(0.1, gt=0, description="weight of the intrinsic reward")


class Normalise(Section):
    terms: list[str] = Field([], description="terms that become z-scores of running statistics; never a penalty")
    min_samples: int = Field(10, ge=2, description="values seen before a term is normalised")
    min_std: float = Field(0.1, gt=0, description="smallest standard deviation")
    clip: float = Field(3.0, gt=0, description="largest z-score")
    freeze_after: int = Field(0, ge=0, description="values after which the statistics stand still; 0 is never")


class Curriculum(Section):
    kind: Literal["none", "trigger", "steps"] = Field(
        "none", description="weights of accuracy, curiosity_dynamics and coherence: fixed, by progress, or by step"
    )
    trigger: list[tuple[float, float, float]] = Field(
        [(1, 0, 0), (1, 0, 0.1), (1, 0.05, 0.1)],
        min_length=3,
        max_length=3,
        description="weights of the three phases by progress",
    )
    steps: list[tuple[int, float, float, float]] = Field(
        [(0, 1, 0, 0), (5000, 0.7, 0.2, 0.1), (10000, 0.5, 0.3, 0.2)],
        min_length=1,
        description="first step and weights of a phase",
    )
    window: int = Field(100, ge=1, description="steps of the moving averages")
    check_every: int = Field(100, ge=1, description="steps between looks at the triggers")
    min_samples: int = Field(1000, ge=0, description="scored rollouts before the first advance")
    success: float = Field(0.7, description="success rate above which phase 1 ends")
    first_steps: int = Field(10_000, ge=1, description="steps after which phase 1 ends anyway")
    slope: float = Field(0.001, description="slope of coherence over five looks that is no improvement any more")
    patience: int = Field(5, ge=1, description="looks in a row below the slope after which phase 2 ends")
    combined: float = Field(0.65, description="success rate times coherence above which phase 2 ends")
    second_steps: int = Field(20_000, ge=1, description="steps after which phase 2 ends anyway")


class MathScorer(Section):
    children: int = Field(2, ge=1, description="processes that compare formulas, for each scorer actor")
    limit_s: float = Field(5.0, gt=0, description="seconds a comparison may take before its process is killed")
    memory_bytes: int = Field(2_000_000_000, ge=500_000_000, description="address space of such a process")


class Judge(Section):
    required: bool = Field(False, description="a missing url, model or key stops the run at its start")
    url: str | None = Field(None, description="base of an OpenAI-compatible API, e.g. http://judge:8000/v1")
    model: str = Field("", description="model that judges")
    api_key_env: str = Field(
        "PIXELIS_JUDGE_API_KEY", description="environment variable that holds the key; empty: no key is sent"
    )
    tries: int = Field(5, ge=1, description="requests for a verdict")
    timeout_s: float = Field(30.0, gt=0, description="seconds a request may take")
    budget_s: float = Field(120.0, gt=0, description="seconds that all tries for a verdict may take")
    concurrency: int = Field(8, ge=1, description="requests at a time, for each scorer actor")
    cache: bool = Field(True, description="keep verdicts in run.dir/judge.sqlite")


class Rewards(Section):
    preset: str | None = Field(None, description=f"named rewards, explicit keys win: {', '.join(REWARD_PRESETS)}")
    weights: RewardWeights = RewardWeights()
    tasks: dict[str, TaskRewards] = Field({}, description="other weights and format for questions of a task (Question.task)")
    own: dict[str, float] = Field(
        {}, description="own rewards, `package.module:function`, and their weights; a list weighs each 1"
    )
    own_limit_s: float = Field(10.0, gt=0, description="seconds a call of an own reward may take before its process is killed")
    own_children: int = Field(2, ge=1, description="processes that run own rewards, for each scorer actor")
    scorer: str | None = Field(None, description="scorer of every question, in place of the one it names")
    format: FormatKind = Field("dialect", description="what well-formed means")
    curiosity: Curiosity = Curiosity()
    tool_above: float = Field(0.5, ge=0, lt=1, description="score above which a tool bonus is paid")
    max_answer_chars: int = Field(0, ge=0, description="an answer as long as this is wrong and badly formed; 0: any length")
    length_start: int = Field(0, ge=0, description="step before which the length term is 0")
    overlong: Overlong = Overlong()
    vote: VoteReward = VoteReward()
    dynamics: Dynamics = Dynamics()
    normalise: Normalise = Normalise()
    curriculum: Curriculum = Curriculum()
    clip: float = Field(0.0, ge=0, description="largest absolute reward; 0: any")
    math: MathScorer = MathScorer()
    judge: Judge = Judge()
    workers: int = Field(1, ge=1, description="scorer actors")
    cpus: float = Field(0.25, ge=0, description="CPUs that each scorer reserves")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """Fill in what the preset sets and nothing else does, so that the printed configuration is the resolved one."""
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("own"), (list, tuple)):
            values = {**values, "own": {str(name): 1.0 for name in values["own"]}}
        name = values.get("preset")
        if not isinstance(name, str):
            return values
        if name not in REWARD_PRESETS:
            near = difflib.get_close_matches(name, REWARD_PRESETS, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"one of {', '.join(REWARD_PRESETS)}"
            raise ValueError(f"no preset `{name}` ({hint})")
        given = {k: v.model_dump(exclude_unset=True) if isinstance(v, Section) else v for k, v in values.items()}
        return _merge(REWARD_PRESETS[name], given)

    @property
    def mixtures(self) -> list[RewardWeights]:
        """Every set of weights that may be in force."""
        return [self.weights, *(task.weights for task in self.tasks.values())]

    @property
    def needs_states(self) -> bool:
        """True when an embedder has to look at every episode."""
        return self.curriculum.kind != "none" or any(w.curiosity_dynamics or w.coherence for w in self.mixtures)

    @property
    def stateful(self) -> bool:
        """True when scoring depends on what was scored before."""
        learns = any(w.curiosity_dynamics for w in self.mixtures)
        return bool(self.normalise.terms) or self.curriculum.kind != "none" or learns

    @model_validator(mode="after")
    def _possible(self) -> Rewards:
        never = {"efficiency", "tool_penalty", "tool_misuse", "unrepaired_error_zero", "overlong", "wrong"}
        for name in self.normalise.terms:
            if name not in RewardWeights.model_fields:
                near = difflib.get_close_matches(name, RewardWeights.model_fields, n=1)
                raise ValueError(f"normalise.terms: no term `{name}`" + (f" (did you mean `{near[0]}`?)" if near else ""))
            if name in never:
                raise ValueError(f"normalise.terms: {name} is a penalty and is never normalised")
        for name in self.own:
            module, colon, function = name.partition(":")
            if not colon or not all(part.isidentifier() for part in [*module.split("."), function]):
                raise ValueError(f"own: `{name}` is not written package.module:function")
        if self.stateful and self.workers > 1:
            raise ValueError("normalise, curriculum and curiosity_dynamics keep running state: set workers=1")
        return self


class Evaluate(Section):
    questions: int = Field(500, ge=1, description="held-out questions")
    sampling: Sampling = Field(Sampling(temperature=0.0), description="how answers are drawn")
    operations: bool = Field(True, description="false: the direct arm, answers without any operation")
    trajectories: int = Field(12, ge=0, description="episodes kept with pictures in the report")


class Serve(Section):
    host: str = Field("127.0.0.1", description="address to bind; anything but loopback needs an API key")
    port: int = Field(8000, ge=1, le=65535, description="port of the HTTP gateway")
    api_key_env: str = Field("PIXELIS_API_KEY", description="environment variable that holds the API key")
    samples: int = Field(8, ge=1, description="k: samples of a request that vote")
    sampling: Sampling = Field(Sampling(temperature=1.0), description="how the votes are drawn")
    max_body_bytes: int = Field(16_000_000, ge=1024, description="largest request body")
    max_question_chars: int = Field(4000, ge=1, description="longest question")
    max_queue: int = Field(64, ge=1, description="requests waiting before the gateway answers 429")
    timeout_s: float = Field(60.0, gt=0, description="seconds a request may take")


class Evolution(Section):
    enabled: bool = Field(True, description="learn from served traffic")
    gate: float = Field(0.7, ge=0, le=1, description="least confidence (inclusive) of a verdict that becomes an update")
    batch: int = Field(16, ge=1, description="update tasks in one optimizer step")
    queue: int = Field(256, ge=1, description="update tasks that wait; the oldest is dropped beyond")
    lr: float = Field(3e-4, gt=0, description="learning rate of online updates")
    kl: float = Field(0.01, ge=0, description="weight of the k3 KL term to the policy that served")


class Quickstart(Section):
    sft_lr: float = Field(2e-3, gt=0, description="learning rate of the SFT stage")
    rft_lr: float = Field(1e-3, gt=0, description="learning rate of the RFT stage")
    shift: str = Field("rotate", description="how the online stream's pictures differ: noise, rotate, invert, ...")
    stream: int = Field(160, ge=1, description="unlabelled requests in the online stream")
    shift_questions: int = Field(300, ge=1, description="held-out questions of the shifted kind, before and after")


class Telemetry(Section):
    wandb: bool = Field(False, description="log to Weights & Biases (works offline)")
    tensorboard: bool = Field(False, description="log to TensorBoard")
    rollouts: int = Field(2, ge=0, description="groups of each step written to run.dir/rollouts.jsonl")
    progress: bool = Field(True, description="progress lines in the driver")


class Cluster(Section):
    address: str | None = Field(None, description="Ray address; empty: RAY_ADDRESS if set, else a local cluster")
    cpus: float | None = Field(None, description="CPUs of a local cluster; empty: all")
    object_store_bytes: int = Field(1_000_000_000, ge=80_000_000, description="object store of a local cluster")
    dashboard: bool = Field(False, description="start the Ray dashboard with a local cluster")
    autoscaling: bool = Field(False, description="the cluster can grow: wait for nodes instead of failing")
    placement_timeout_s: float = Field(120.0, gt=0, description="seconds to wait for the actors' resources")


class Config(Section):
    """The whole configuration of any job."""

    run: Run = Run()
    policy: Policy = Policy()
    dialogue: Dialogue = Dialogue()
    engine: Engine = Engine()
    toolbox: Toolbox = Toolbox()
    data: Data = Data()
    learner: Learner = Learner()
    sft: Sft = Sft()
    rft: Rft = Rft()
    rewards: Rewards = Rewards()
    evaluate: Evaluate = Evaluate()
    serve: Serve = Serve()
    evolution: Evolution = Evolution()
    quickstart: Quickstart = Quickstart()
    telemetry: Telemetry = Telemetry()
    cluster: Cluster = Cluster()

    @model_validator(mode="after")
    def _constant_length(self) -> Config:
        """The length that Dr. GRPO divides by depends on the dialogue; resolved here, so that a dry run prints it."""
        loss = self.rft.loss
        if loss.aggregate == "constant" and not loss.constant_tokens:
            length = self.dialogue.max_turns * self.dialogue.max_turn_tokens
            resolved = self.rft.model_copy(update={"loss": loss.model_copy(update={"constant_tokens": length})})
            object.__setattr__(self, "rft", resolved)
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        d, problems = self.dialogue, []
        if d.max_turn_tokens >= d.max_context:
            problems.append(
                f"dialogue.max_turn_tokens {d.max_turn_tokens} leaves no room in dialogue.max_context {d.max_context}"
            )
        if self.learner.row_tokens < d.max_context:
            problems.append(
                f"learner.row_tokens {self.learner.row_tokens} is below dialogue.max_context {d.max_context}: "
                "an episode must fit a row"
            )
        if self.rft.questions % self.learner.workers:
            problems.append(f"rft.questions {self.rft.questions} is not divisible by learner.workers {self.learner.workers}")
        if self.sft.batch % self.learner.workers:
            problems.append(f"sft.batch {self.sft.batch} is not divisible by learner.workers {self.learner.workers}")
        if self.rft.replay.capacity and self.rft.loss.kl > 0 and self.rft.loss.kl_in == "reward":
            problems.append("rft.replay keeps advantages, but rft.loss.kl_in=reward makes them anew from the present weights")
        if self.rft.advantage.min_group > self.rft.group:
            problems.append(f"rft.advantage.min_group {self.rft.advantage.min_group} is above rft.group {self.rft.group}")
        if self.rft.advantage.baseline == "pass_at_k" and self.rft.advantage.k >= self.rft.group:
            problems.append(f"rft.advantage.k {self.rft.advantage.k} is not below rft.group {self.rft.group}")
        sampled = {
            "rft": self.rft.sampling.temperature,
            "evaluate": self.evaluate.sampling.temperature,
            "serve": self.serve.sampling.temperature,
        }
        for name, temperature in sampled.items():
            if self.engine.name == "vllm" and not (temperature == 0 or 0.01 <= temperature <= 2):
                problems.append(f"{name}.sampling.temperature {temperature}: vLLM takes 0, or 0.01 to 2")
        if self.engine.name == "vllm" and not self.policy.full and self.policy.lora.rank > max(VLLM_LORA_RANKS):
            problems.append(f"policy.lora.rank {self.policy.lora.rank} is above vLLM's largest, {max(VLLM_LORA_RANKS)}")
        if self.policy.full and self.policy.adapter:
            problems.append("policy.full trains all parameters but policy.adapter names an adapter")
        if not self.toolbox.operations and self.evaluate.operations:
            problems.append("toolbox.operations is empty but evaluate.operations is true")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def to_yaml(self) -> str:
        """The resolved configuration as YAML; loading it gives an equal Config."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=120)

    @property
    def sha256(self) -> str:
        """Hash of the resolved configuration, checked by every actor at start."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def load(path: str | Path | None = None, overrides: list[str] | None = None) -> Config:
    """Read a YAML file (with its ``extends`` chain) and apply ``a.b=value`` overrides.

    Raises BadConfig naming the key's path for unknown keys, wrong types and contradictions; MissingFile for no file.
    """
    values = _read(Path(path), seen=()) if path else {}
    # A preset replaces the rewards that the file describes; overrides beside it refine it, in whatever order they stand.
    for override in sorted(overrides or [], key=lambda text: not text.startswith("rewards.preset=")):
        key, eq, text = override.partition("=")
        if not eq or not key:
            raise BadConfig(f"`{override}` is no override", fix="write it as key.path=value, for example learner.lr=3e-4")
        node = values
        *parents, last = key.split(".")
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise BadConfig(f"`{key}`: `{name}` is a value, not a section")
        node[last] = _scalar(text)
        if key == "rewards.preset":
            values["rewards"] = _below_preset(node) | {last: node[last]}
    return parse(values)


def parse(values: dict[str, Any]) -> Config:
    """Validate plain values into a Config; BadConfig on the first-class errors described in ``load``."""
    unknown = _unknown_keys(Config, values, "")
    if unknown:
        raise BadConfig("unknown configuration key " + "; ".join(unknown), fix="see `--help` for every key")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = []
        for e in error.errors():
            where = ".".join(str(p) for p in e["loc"]) or "config"
            reason = e["msg"].removeprefix("Value error, ")
            given = "" if e["type"] == "value_error" else f" (given: {e['input']!r})"
            lines.append(f"{where}: {reason}{given}")
        raise BadConfig("bad configuration: " + "; ".join(lines), fix="see `--help` for types and meanings") from None


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if not path.is_file():
        near = sorted(str(p) for p in Path("configs").rglob("*.yaml"))
        hint = difflib.get_close_matches(str(path), near, n=1)
        raise MissingFile(
            f"no configuration file {path}",
            fix=f"did you mean {hint[0]}?" if hint else "give the path of a YAML file, e.g. configs/nano/rft.yaml",
        )
    path = path.resolve()
    if path in seen:
        raise BadConfig(f"{path.name} extends itself through {' -> '.join(p.name for p in seen)}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path.name} is not YAML: {error}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise BadConfig(f"{path.name} holds {type(values).__name__}, not sections")
    parent = values.pop("extends", None)
    if not parent:
        return values
    base = _read(path.parent / str(parent), (*seen, path))
    above, below = values.get("rewards"), base.get("rewards")
    if isinstance(above, dict) and above.get("preset") and isinstance(below, dict):
        base["rewards"] = _below_preset(below)
    return _merge(base, values)


def _below_preset(rewards: dict[str, Any]) -> dict[str, Any]:
    """What stays of a file's rewards when something above it names a preset: means and own rewards, not weights and shapes."""
    return {key: value for key, value in rewards.items() if key in REWARD_MEANS}


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in top.items():
        out[key] = _merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _unknown_keys(kind: type[BaseModel], values: Any, prefix: str) -> list[str]:
    if not isinstance(values, dict):
        return []
    out = []
    for key, value in values.items():
        field = kind.model_fields.get(str(key))
        if field is None:
            every = [p for p, *_ in _keys(Config)]
            near = (
                difflib.get_close_matches(f"{prefix}{key}", every, n=1) or [p for p in every if p.rsplit(".", 1)[-1] == key][:1]
            )
            out.append(f"`{prefix}{key}`" + (f" (did you mean `{near[0]}`?)" if near else ""))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            out += _unknown_keys(field.annotation, value, f"{prefix}{key}.")
    return out


def _keys(kind: type[BaseModel], prefix: str = "") -> list[tuple[str, str, Any, str]]:
    """(path, type, default, meaning) of every leaf key below ``kind``."""
    rows: list[tuple[str, str, Any, str]] = []
    for name, field in kind.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += _keys(annotation, f"{prefix}{name}.")
            continue
        if get_origin(annotation) is Literal:
            shown = "|".join(str(v) for v in get_args(annotation))
        else:
            shown = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
        rows.append((f"{prefix}{name}", shown, field.default, field.description or ""))
    return rows


def absolute(config: Config) -> Config:
    """The configuration with every path made absolute: workers run in other folders, and on other machines, than the driver.

    `nano`, `grabcut` and `cards:` sources are names, not paths.
    """
    values = config.model_dump()
    for section, key in PATHS:
        text = values[section][key]
        if text and text not in ("nano", "grabcut") and not text.startswith("cards:"):
            values[section][key] = str(Path(text).expanduser().absolute())
    return Config.model_validate(values)


def describe() -> str:
    """Every key with its type, default and meaning, one line each."""
    lines = []
    for path, kind, default, meaning in _keys(Config):
        lines.append(f"  {path:34} {json.dumps(default, default=str):<22} {meaning}  [{kind}]")
    return "\n".join(lines)


def from_command_line(doc: str, job: str, argv: list[str] | None = None, default: str | None = None) -> Config:
    """Read ``[CONFIG.yaml] [key=value ...] [--dry-run] [--help]`` of a job; exits on the two flags and on bad config.

    ``default`` is the configuration file used when none is named.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if "--help" in args or "-h" in args:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` is no error
        print(f"{doc.strip()}\n\nusage: python -m pixelis.jobs.{job} [CONFIG.yaml] [key=value ...] [--dry-run] [--help]\n")
        print(f"keys (name, default, meaning, type):\n{describe()}")
        raise SystemExit(0)
    flags = [a for a in args if a.startswith("-") and a != "--dry-run"]
    files = [a for a in args if not a.startswith("-") and "=" not in a]
    try:
        if flags:
            raise BadConfig(f"unknown option {flags[0]}", fix="options are key=value, --dry-run and --help")
        if len(files) > 1:
            raise BadConfig(
                f"one configuration file, not {len(files)}: {' '.join(files)}", fix="let one file `extends:` the other"
            )
        config = absolute(load(files[0] if files else default, [a for a in args if "=" in a and not a.startswith("-")]))
    except (BadConfig, MissingFile) as error:
        print(f"pixelis.jobs.{job}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if "--dry-run" in args:
        print(config.to_yaml(), end="")
        raise SystemExit(0)
    return config

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


class Toolbox(Section):
    operations: list[str] = Field(
        ["zoom_in"],
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
    baseline: Literal["mean", "none"] = Field("mean", description="what is subtracted within a group")
    scale: Literal["std", "none"] = Field("std", description="what the difference is divided by")
    eps: float = Field(1e-4, gt=0, description="added to the divisor")
    min_group: int = Field(2, ge=2, description="scored rollouts a group needs to be used")


class Loss(Section):
    clip_low: float = Field(0.2, gt=0, description="ratio clipped below 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="ratio clipped above 1 + clip_high")
    aggregate: Literal["token", "sequence"] = Field(
        "token", description="mean over all tokens of the batch, or over sequences of token means"
    )
    kl: float = Field(0.0, ge=0, description="weight of the k3 KL term to the starting policy")
    importance_cap: float = Field(2.0, gt=0, description="truncation of learner / engine importance weights")


class Rft(Section):
    steps: int = Field(40, ge=1, description="optimizer steps")
    questions: int = Field(32, ge=1, description="questions in a step")
    group: int = Field(8, ge=2, description="rollouts of a question")
    staleness: int = Field(0, ge=0, description="steps that rollouts may lag behind the learner; 0 is exact on-policy")
    sampling: Sampling = Sampling()
    advantage: Advantage = Advantage()
    loss: Loss = Loss()
    evaluate_every: int = Field(0, ge=0, description="steps between held-out evaluations; 0 is never")


class Curiosity(Section):
    target: float = Field(0.3, ge=0, le=1, description="H: rate of pixel reasoning below which a call earns a bonus")
    alpha: float = Field(0.5, ge=0, description="weight of the bonus")
    free_calls: int = Field(1, ge=0, description="N: calls that cost nothing")
    beta: float = Field(0.05, ge=0, description="cost of each further call")


class RewardWeights(Section):
    accuracy: float = Field(1.0, description="weight of the answer's score, 0..1")
    format: float = Field(0.0, description="weight of well-formed turns, 0 or 1")
    curiosity: float = Field(0.0, description="weight of the Pixel-Reasoner bonus and call cost")


class Rewards(Section):
    weights: RewardWeights = RewardWeights()
    curiosity: Curiosity = Curiosity()
    workers: int = Field(1, ge=1, description="scorer actors")
    cpus: float = Field(0.25, ge=0, description="CPUs that each scorer reserves")


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
        if self.rft.advantage.min_group > self.rft.group:
            problems.append(f"rft.advantage.min_group {self.rft.advantage.min_group} is above rft.group {self.rft.group}")
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
    for override in overrides or []:
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
    return _merge(_read(path.parent / str(parent), (*seen, path)), values) if parent else values


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

"""What jobs, models, engines, tools, data and services are told; reinforcement and rewards have files of their own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pixelis.config.section import Section


class Run(Section):
    name: str = Field("run", description="name of this run in logs and reports")
    dir: str = Field("runs/run", description="folder of checkpoints, events and reports; re-running with it resumes")
    seed: int = Field(42, description="seed of data order, sampling and initialisation")
    resume: bool = Field(True, description="continue from the last complete checkpoint in run.dir")


class Lora(Section):
    rank: int = Field(16, ge=1, description="rank of the adapters")
    alpha: int = Field(32, ge=1, description="scale numerator: the update is alpha / rank * B A")
    ranks: str | None = Field(
        None, description="file of jobs.ranks with a rank for each layer, instead of `rank`; its alpha is alpha / rank times that"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapter's input")
    targets: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description="names of the linear layers that get an adapter (language model only)",
    )


class Policy(Section):
    model: str = Field("nano", description="`nano`, or a folder with a Hugging Face Qwen2.5-VL or Qwen3-VL model")
    adapter: str | None = Field(None, description="checkpoint folder to start from: its adapter, with policy.full its model")
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
    dialect: Literal["qwen", "mini_o3", "pixel_reasoner", "deepeyes", "plain"] = Field(
        "qwen",
        description="wire format of calls and answers; of toolbox.operations those are offered that it has a form for: qwen all, "
        "mini_o3 zoom_in, pixel_reasoner zoom_in and select_frames, deepeyes zoom_in and one called rotate, plain none",
    )
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

    @model_validator(mode="after")
    def _one_scale(self) -> Dialogue:
        if self.coordinates != "auto" and self.dialect != "qwen":
            raise ValueError(f"dialogue.coordinates must be auto: the dialect {self.dialect} has its own")
        return self


class Sampling(Section):
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; 1 keeps all")


class Engine(Section):
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


class Toolbox(Section):
    operations: list[str] = Field(
        ["zoom_in", "segment_object_at", "get_properties", "read_text", "track_object", "select_frames"],
        description="pixel operations that the policy may call; an own one as `package.module:Class`",
    )
    workers: int = Field(1, ge=1, description="toolbox actors of each generator")
    cpus: float = Field(0.25, ge=0, description="CPUs that each toolbox reserves")
    timeout_s: float = Field(30.0, gt=0, description="seconds an operation may take")
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
    train: str = Field(
        "cards:?split=train",
        description="questions to train on: `cards:`, `packaged:NAME`, a data set `NAME:ROOT`, or files of rows "
        "`PATH?format=NAME&media=FOLDER`",
    )
    evaluate: str = Field("cards:?split=test&seed=7", description="held-out questions")
    demonstrations: str = Field("cards:?split=train", description="demonstrations for sft: `cards:` or a JSON-lines file")
    direct_share: float = Field(0.7, ge=0, le=1, description="share of `cards:` demonstrations that answer without an operation")
    limit: int = Field(0, ge=0, description="use only the first N questions; 0 is all")
    shuffle_rows: int = Field(10_000, ge=1, description="questions shuffled at a time; a smaller source is shuffled as a whole")
    max_bad_rows: float = Field(
        0, ge=0, description="rows that cannot be used and are skipped: a number, or below 1 a share; more is an error"
    )


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
    max_grad_norm: float = Field(1.0, gt=0, description="largest norm of the gradient")
    row_tokens: int = Field(1024, ge=16, description="tokens of a packed row")
    rows: int = Field(4, ge=1, description="packed rows in one forward pass")
    zero_stage: Literal[0, 1, 2, 3] = Field(0, description="DeepSpeed ZeRO stage; 0 shards nothing, as suits adapters")
    deepspeed: str | None = Field(None, description="DeepSpeed JSON file to merge in")
    checkpoint_every: int = Field(10, ge=1, description="steps between checkpoints")
    keep: int = Field(3, ge=1, description="checkpoints kept")
    max_failures: int = Field(2, ge=0, description="restarts from the last checkpoint before the run fails")


class Evaluate(Section):
    questions: int = Field(500, ge=1, description="held-out questions")
    sampling: Sampling = Field(Sampling(temperature=0.0), description="how answers are drawn")
    operations: bool = Field(True, description="false: the direct arm, answers without any operation")
    trajectories: int = Field(12, ge=0, description="episodes kept with pictures in the report")


class Quickstart(Section):
    sft_lr: float = Field(2e-3, gt=0, description="learning rate of the SFT stage")
    rft_lr: float = Field(1e-3, gt=0, description="learning rate of the RFT stage")
    shift: str = Field("warm", description="how the online stream's pictures differ: warm, noise, rotate, invert, ...")
    stream: int = Field(800, ge=1, description="unlabelled requests in the online stream")
    shift_questions: int = Field(500, ge=1, description="held-out questions of the shifted kind, before and after")


class Telemetry(Section):
    wandb: bool = Field(False, description="log to Weights & Biases (works offline)")
    tensorboard: bool = Field(False, description="log to TensorBoard")
    rollouts: int = Field(2, ge=0, description="groups of each step written to run.dir/rollouts.jsonl")
    trajectories: int = Field(
        4, ge=0, description="episodes of each evaluation during rft kept with pictures in run.dir/trajectories; 0 is none"
    )
    progress: bool = Field(True, description="progress lines in the driver")


class Cluster(Section):
    address: str | None = Field(None, description="Ray address; empty: RAY_ADDRESS if set, else a local cluster")
    cpus: float | None = Field(None, description="CPUs of a local cluster; empty: all")
    object_store_bytes: int = Field(1_000_000_000, ge=80_000_000, description="object store of a local cluster")
    dashboard: bool = Field(False, description="start the Ray dashboard with a local cluster")
    autoscaling: bool = Field(False, description="the cluster can grow: wait for nodes instead of failing")
    placement_timeout_s: float = Field(120.0, gt=0, description="seconds to wait for the actors' resources")

"""Estimates what a configuration needs from a model's config.json alone: what `--dry-run` prints and refuses.

The architecture is built on torch's meta device, so no weight is read or allocated. Parameters, adapters and optimizer states are
counted exactly; activations are what one real layer saves for its backward pass, run on the meta device.

Not counted, as they depend on the machine: the CUDA context, the allocator's fragmentation, buffers of NCCL and of cuBLAS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch

from pixelis.errors import MissingFile
from pixelis.policy.adapters import adapter_bytes
from pixelis.policy.architecture import Architecture, language_layer_bytes, vision_block_bytes
from pixelis.policy.deepspeed_engine import settings as deepspeed_settings
from pixelis.policy.log_probs import CHUNK_VALUES
from pixelis.policy.ranks import largest_rank, merges, served_rank

if TYPE_CHECKING:
    from pixelis import config

GIB = 2**30
GPU_BYTES = 80 * GIB
"""Memory of a GPU where none is there to ask: an A100 or H100 of 80 GB."""
TIGHT = 0.95
"""Share of a GPU's memory that what is counted may take: the rest is for what is not."""
FEATURE_CACHE_BYTES = 256 * 2**20

# -- memory ---------------------------------------------------------------------------------------------------------------------


def learner_dtype(policy: config.PolicyConfig, gpu: bool) -> torch.dtype:
    """Type of the weights: what `model.pick_dtype` will find, as far as one can know before."""
    if policy.dtype == "auto":
        return torch.bfloat16 if gpu else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[policy.dtype]


def learner_memory(
    arch: Architecture, policy: config.PolicyConfig, learner: config.LearnerConfig
) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes on each learner's device, bytes in its host's memory) by part, at the peak of a step.

    With P trainable and F frozen parameters, N workers, and `width` bytes a weight (ZeRO, arXiv 1910.02054, sections 3 and 5;
    DeepSpeed's optimizers of stage 1 and up keep a float32 copy of the trainable parameters whatever the type of the weights):

    - weights: (P + F) * width, over N at stage 3, where the gathered ones come on top (`stage3_max_live_parameters`). Adapters
      are float32.
    - gradients: P * width, over N at stages 2 and 3. Optimizer: two moments of 4 bytes, from stage 1 a float32 copy too, over N.
    - buckets: `reduce_bucket_size` numbers of a gradient, twice with `overlap_comm`.
    - activations of one packed pass of `rows * row_tokens` tokens: what all layers save, or with gradient checkpointing each
      layer's input and what a single layer saves (arXiv 1604.06174); besides, the two widest gradients inside a layer.
    - vision: a frozen tower keeps nothing but the block it is in, and up to 256 MiB of features; a trained one as above. The
      passes are taken to be all pictures: `merge ** 2` patches for each token.
    - logits: `log_probs.CHUNK_VALUES` of them, in the model's type, twice in float32 (probabilities and their logarithms), and
      their gradient.
    """
    gpu = learner.gpus > 0
    width, workers = arch.width, learner.workers
    bfloat16 = policy.full and arch.dtype == torch.bfloat16
    zero = deepspeed_settings(learner, bfloat16, torch.device("cuda" if gpu else "cpu"))["zero_optimization"]
    stage = int(zero["stage"])
    model = arch.thin(None if policy.full else policy.lora)
    if policy.full:
        trainable, frozen, kept = arch.parameters, 0, width
    else:
        trainable, frozen, kept = adapter_bytes(arch.shapes(policy.lora.targets), arch.ranks(policy.lora), 1), arch.parameters, 4
    over = workers if stage == 3 else 1
    device = {
        "weights": frozen * width // over if not policy.full else trainable * width // over,
        "adapters": 0 if policy.full else trainable * 4 // over,
        "gradients": trainable * kept // (workers if stage >= 2 else 1),
        "optimizer": trainable * 8 // (workers if stage >= 1 else 1) + (trainable * 4 // workers if stage >= 1 else 0),
    }
    host = {"optimizer": 0, "weights": 0}
    if offloaded(zero, "offload_optimizer"):
        host["optimizer"], device["optimizer"] = device["optimizer"] + trainable * 4 // workers, 0  # gradients go there too
    if offloaded(zero, "offload_param") and stage == 3:
        host["weights"], device["weights"] = device["weights"], 0
    if stage == 3 and workers > 1:
        live = int(zero.get("stage3_max_live_parameters", 10**9)) + int(zero.get("stage3_prefetch_bucket_size", 5 * 10**7))
        device["gathered"] = min(live, arch.parameters) * width
    if stage >= 1:
        bucket = min(int(zero.get("reduce_bucket_size", 5 * 10**8)), max(trainable, 1))
        device["buckets"] = bucket * kept * (2 if zero.get("overlap_comm") else 1)
    tokens = learner.rows * learner.row_tokens
    layer, layers = language_layer_bytes(model, tokens), int(arch.text.num_hidden_layers)
    widest = max(int(arch.text.intermediate_size), int(arch.text.hidden_size))
    workspace = 2 * tokens * widest * (width if policy.full else 4)
    inputs = layers * tokens * int(arch.text.hidden_size) * width
    device["activations"] = workspace + (inputs + layer if policy.gradient_checkpointing else layers * layer)
    patches = tokens * int(arch.vision.spatial_merge_size) ** 2
    block, depth = vision_block_bytes(model, patches), int(arch.vision.depth)
    if policy.full:
        entering = depth * patches * int(arch.vision.hidden_size) * width
        device["vision"] = entering + block if policy.gradient_checkpointing else depth * block
    else:
        device["vision"] = block + FEATURE_CACHE_BYTES
    vocab = int(arch.text.vocab_size)
    device["logits"] = min(max(CHUNK_VALUES, vocab), tokens * vocab) * (2 * width + 8)
    return {k: v for k, v in device.items() if v}, {k: v for k, v in host.items() if v}


def offloaded(zero: dict[str, Any], key: str) -> bool:
    """Whether DeepSpeed's section sends this to the host."""
    return (zero.get(key) or {}).get("device", "none") != "none"


def generator_memory(arch: Architecture, policy: config.PolicyConfig, engine: config.EngineConfig) -> dict[str, int]:
    """Bytes on each GPU of a generator before any key or value, by part.

    vLLM shares the weights among `tensor_parallel` GPUs and keeps `max_loras` slots of its rank in the weights' type beside them;
    merged adapters take no slot. The embedded engine merges, and keeps the original of each layer that it changed.
    """
    out = {"weights": arch.parameters * arch.width // engine.tensor_parallel}
    shapes = {} if policy.full else arch.shapes(policy.lora.targets)
    if engine.name == "hf":
        changed = arch.parameters if policy.full else sum(math.prod(shapes[name]) for name in arch.ranks(policy.lora))
        return out | {"originals": changed * arch.width}
    if not policy.full and not merges(policy, engine):
        rank = served_rank(largest_rank(policy.lora))
        out["adapters"] = engine.max_loras * rank * sum(o + i for o, i in shapes.values()) * arch.width
    return out


# -- checks ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A line of the table. error: the run cannot work as configured; note: it works, but perhaps not as meant."""

    level: Literal["ok", "note", "error"]
    subject: str
    text: str


class Prompt(TypedDict):
    """What a prompt holds: tokens of text, and how many pictures and clips."""

    text: int
    images: int
    clips: int


def table(findings: Iterable[Finding]) -> str:
    """Findings as aligned lines."""
    return "\n".join(f"  {f.level:5}  {f.subject:15}  {f.text}" for f in findings)


def check(
    config: config.Config, job: Literal["rft", "sft"], prompts: Sequence[Prompt] = (), gpu_bytes: int | None = None
) -> list[Finding]:
    """Everything that can be known before the first actor starts.

    prompts: what some prompts of the job hold; gpu_bytes: memory of a GPU, default that of the present one, else 80 GiB. Without
    the model's folder only what needs no model is checked. Raises BadConfig for another architecture or a wrong target.
    """
    out = _batch(config, job) + _learner(config, job)
    try:
        arch = Architecture(config.policy.model, learner_dtype(config.policy, config.learner.gpus > 0))
    except MissingFile as error:
        message = f"{error.message}: adapters, lengths and memory are not checked (its config.json is enough for that)"
        return [*out, Finding("note", "model", message)]
    size, seen = (f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M" for count in arch.counts)
    out.append(Finding("ok", "model", f"{arch.family}, {size} parameters, {seen} of them in the vision tower"))
    if not config.policy.full:
        out.append(_adapters(config, arch, job))
    out += _context(config, arch, prompts, job)
    if job == "rft":
        out += _states(config, arch)
    out += _memory(config, arch, job, gpu_bytes or _present_gpu() or GPU_BYTES)
    return out


def _present_gpu() -> int:
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


def _batch(c: config.Config, job: str) -> list[Finding]:
    workers = c.learner.workers
    if job == "sft":
        return [Finding("ok", "batch", f"{c.sft.batch} demonstrations over {workers} learners: {c.sft.batch // workers} each")]
    rollouts, parts = c.rft.prompts_per_step * c.rft.group_size, c.rft.minibatches
    drawn = f"{c.rft.prompts_per_step} questions x {c.rft.group_size} = {rollouts} rollouts"
    message = f"{drawn} over {workers} learners: {rollouts // workers} each"
    out = [Finding("ok", "batch", message + (f", in {parts} optimizer steps" if parts > 1 else ""))]
    if parts > rollouts // workers:
        out.append(Finding("error", "batch", f"rft.minibatches {parts} is above the {rollouts // workers} rollouts of a learner"))
    if c.rft.prompts_per_step < c.engine.workers:
        out.append(
            Finding(
                "note",
                "batch",
                f"rft.prompts_per_step {c.rft.prompts_per_step} is below engine.workers {c.engine.workers}: some are idle",
            )
        )
    return out


def _learner(c: config.Config, job: str) -> list[Finding]:
    out = []
    bfloat16 = c.policy.full and learner_dtype(c.policy, c.learner.gpus > 0) == torch.bfloat16
    zero = deepspeed_settings(c.learner, bfloat16, torch.device("cpu"))["zero_optimization"]
    stage = int(zero["stage"])
    if c.learner.deepspeed and stage != c.learner.zero_stage:
        file = Path(c.learner.deepspeed).name
        out.append(
            Finding("error", "deepspeed", f"learner.zero_stage is {c.learner.zero_stage}, but learner.deepspeed {file}: {stage}")
        )
    if job == "rft":
        if c.rft.loss.kl > 0 and stage == 3:
            out.append(Finding("error", "deepspeed", "rft.loss.kl swaps whole weights, which learner.zero_stage 3 does not hold"))
        if c.rft.sampling.temperature <= 0:
            out.append(Finding("error", "sampling", "rft.sampling.temperature 0 has no distribution to learn from"))
        if c.engine.name == "vllm" and 0 < c.engine.gpus < c.engine.tensor_parallel:
            out.append(
                Finding("error", "engine", f"engine.tensor_parallel {c.engine.tensor_parallel} wants engine.gpus as many or more")
            )
    return out


def _adapters(c: config.Config, arch: Architecture, job: str) -> Finding:
    lora = c.policy.lora
    shapes, ranks = arch.shapes(lora.targets), arch.ranks(lora)
    low, largest = min(ranks.values()), max(ranks.values())
    message = f"{f'ranks {low} to {largest}' if low < largest else f'rank {low}'} on {len(ranks)} layers"
    message += f", {in_bytes(adapter_bytes(shapes, ranks))} a version"
    key = "policy.lora.ranks" if lora.ranks else "policy.lora.rank"
    if wide := [name for name, rank in ranks.items() if rank > min(shapes[name])]:
        rank, smallest = max((ranks[name], -min(shapes[name])) for name in wide)
        return Finding("error", "adapters", f"{key} {rank} is above the {-smallest} of a layer it adapts")
    if job == "rft" and c.engine.name == "vllm":
        if merges(c.policy, c.engine):
            why = "" if c.engine.adapters == "merge" else " as lm_head is adapted"
            return Finding("ok", "adapters", f"{message}, merged into vLLM's weights{why}")
        rank = served_rank(largest)
        message += f", served by vLLM as rank {rank}"
        if rank != largest and not lora.ranks:
            return Finding("note", "adapters", f"{message}: policy.lora.rank {rank} would cost vLLM the same")
    return Finding("ok", "adapters", message)


def _context(c: config.Config, arch: Architecture, prompts: Sequence[Prompt], job: str) -> list[Finding]:
    d, tile, out = c.dialogue, arch.multiple**2, []
    sizes = {}
    for name, budget in (("input", d.input), ("crop", d.crop), ("frame", d.frame)):
        sizes[name] = budget.max_pixels // tile
        if not sizes[name]:
            message = f"dialogue.{name}.max_pixels {budget.max_pixels} holds no tile of {arch.multiple} x {arch.multiple} pixels"
            out.append(Finding("error", "pictures", message))
    view, crop, clip = sizes["input"] + 2, sizes["crop"] + 2, d.frames * (sizes["frame"] + 2)
    message = (
        f"a full view takes {view - 2} tokens, a crop {crop - 2}, a clip's first look {d.frames} x {sizes['frame']} = {clip}"
    )
    out.append(Finding("ok", "pictures", message))
    if d.frames > d.max_images:
        out.append(Finding("error", "context", f"dialogue.frames {d.frames} is above dialogue.max_images {d.max_images}"))
    if d.max_context > arch.positions:
        message = f"dialogue.max_context {d.max_context} is above the {arch.positions} positions of policy.model"
        out.append(Finding("error", "context", message))
    first: Prompt = {"text": 0, "images": 1, "clips": 0}
    longest = max(prompts, key=lambda p: p["text"] + p["images"] * view + p["clips"] * clip, default=first)
    text = longest["text"]
    shown = longest["images"] * view + longest["clips"] * clip
    for what, tokens, keys in (
        ("the pictures of the longest prompt", shown, "dialogue.input.max_pixels, dialogue.frame.max_pixels or dialogue.frames"),
        ("a clip's first look", clip, "dialogue.frames or dialogue.frame.max_pixels"),
    ):
        if tokens + text + d.max_turn_tokens > d.max_context:
            message = f"{what} ({tokens} tokens), its text ({text}) and one turn of dialogue.max_turn_tokens {d.max_turn_tokens}"
            out.append(Finding("error", "context", f"{message} do not fit dialogue.max_context {d.max_context}: lower {keys}"))
    turns = d.max_turns if job == "rft" else 1
    whole = text + shown + turns * d.max_turn_tokens + (turns - 1) * crop
    words = f"text {text}" if prompts else "text unknown"
    message = f"longest prompt {text + shown} ({words}), with {turns} full turns and crops {whole}"
    message += f" of dialogue.max_context {d.max_context}"
    if job == "rft" and c.engine.name == "vllm":
        message += " (vLLM's max_model_len)"
    if whole > d.max_context:
        out.append(Finding("note", "context", f"{message}: an episode that uses it all ends as over_context"))
    else:
        out.append(Finding("ok", "context", message))
    return out


def _states(c: config.Config, arch: Architecture) -> list[Finding]:
    """The embedder's states are as wide as the language model."""
    width, state = int(arch.text.hidden_size), c.rewards.dynamics.state
    if not c.rewards.needs_states or width == state:
        return []
    return [Finding("error", "rewards", f"rewards.dynamics.state {state} is not the {width} of policy.model's hidden states")]


def _memory(c: config.Config, arch: Architecture, job: str, gpu_bytes: int) -> list[Finding]:
    device, host = learner_memory(arch, c.policy, c.learner)
    out = [_fits("learner", device, c.learner.gpus, gpu_bytes, "learner.zero_stage, policy.gradient_checkpointing, learner.rows")]
    if c.policy.full and job == "rft":
        version, store = arch.parameters * 4, c.cluster.object_store_bytes
        message = f"a published version is {in_bytes(version)} in the object store"
        small = f": more than cluster.object_store_bytes {in_bytes(store)} of a local cluster" if version > store else ""
        out.append(Finding("note" if small else "ok", "version", message + small))
    if host:
        out.append(Finding("ok", "learner's host", f"{_parts(host)} for each learner"))
    if job == "sft":
        return out
    asked = {"generators": c.engine.workers * c.engine.gpus, "learners": c.learner.workers * c.learner.gpus}
    if c.rewards.needs_states:
        asked["embedder"] = c.engine.gpus
    if gpus := sum(asked.values()):
        out.append(Finding("ok", "GPUs", f"{' + '.join(f'{count:g} for {name}' for name, count in asked.items())} = {gpus:g}"))
    generator = arch
    if (wanted := learner_dtype(c.policy, c.engine.gpus > 0)) != arch.dtype:
        generator = Architecture(c.policy.model, wanted)
    heads = int(arch.text.num_attention_heads)
    if heads % c.engine.tensor_parallel:
        message = f"engine.tensor_parallel {c.engine.tensor_parallel} does not divide the {heads} heads of policy.model"
        out.append(Finding("error", "engine", message))
    parts = generator_memory(generator, c.policy, c.engine)
    shared = min(c.engine.tensor_parallel, int(arch.text.num_key_value_heads))
    one = generator.kv_token_bytes * c.dialogue.max_context // shared
    used, kv = sum(parts.values()), f"keys and values of an episode {in_bytes(one)}"
    if not c.engine.gpus:
        out.append(Finding("ok", "generator", f"{_parts(parts)}; {kv}"))
        return out
    share = c.engine.gpu_memory_utilization if c.engine.name == "vllm" else 1.0
    room = c.engine.kv_cache_bytes or int(min(1.0, c.engine.gpus / c.engine.tensor_parallel) * share * gpu_bytes) - used
    count = max(0, room // one)
    message = f"{_parts(parts)}; {kv}, {count} fit the rest of {in_bytes(gpu_bytes)} at once"
    if not count:
        out.append(Finding("error", "generator", f"{message}: raise engine.tensor_parallel or lower dialogue.max_context"))
    elif count < c.engine.max_num_seqs:
        wait = "others wait" if c.engine.name == "vllm" else "longer ones together run out of memory"
        out.append(Finding("note", "generator", f"{message}, engine.max_num_seqs is {c.engine.max_num_seqs}: {wait}"))
    else:
        out.append(Finding("ok", "generator", message))
    return out


def _fits(subject: str, parts: dict[str, int], gpus: float, gpu_bytes: int, keys: str) -> Finding:
    """A GPU's parts against its memory; states that cannot fit are an error, activations above it a note: they depend on data."""
    if not gpus:
        return Finding("ok", subject, f"{_parts(parts)} in the memory of its machine")
    have = int(gpu_bytes * min(1.0, gpus))
    total, fixed = sum(parts.values()), sum(parts.get(k, 0) for k in ("weights", "adapters", "gradients", "optimizer"))
    message = f"{_parts(parts)} of {in_bytes(have)}"
    if fixed > have:
        return Finding("error", subject, f"{message}: does not fit, see {keys} and learner.deepspeed (offload)")
    if total > TIGHT * have:
        return Finding("note", subject, f"{message}: tight, see {keys}")
    return Finding("ok", subject, message)


def _parts(parts: dict[str, int]) -> str:
    return " + ".join(f"{name} {in_bytes(size)}" for name, size in parts.items()) + f" = {in_bytes(sum(parts.values()))}"


def in_bytes(count: int) -> str:
    """Bytes for people, in units of 1024."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"

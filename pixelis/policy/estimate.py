"""Memory estimates and configuration checks for `--dry-run`, from a model's config.json alone.

Not counted, because they depend on the machine: the CUDA context, fragmentation in the allocator, buffers of
NCCL and cuBLAS.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import torch

from pixelis.errors import MissingFile
from pixelis.policy import storage
from pixelis.policy.adapters import adapter_bytes
from pixelis.policy.architecture import Architecture, learner_dtype
from pixelis.policy.deepspeed_engine import deepspeed_config
from pixelis.policy.log_probs import CHUNK_VALUES
from pixelis.policy.ranks import MAX_LORAS, largest_rank, merges, served_rank

if TYPE_CHECKING:
    from pixelis import config

GIB = 2**30
GPU_BYTES = 80 * GIB
"""Assumed memory of a GPU on a machine without one: an A100 or H100 of 80 GB."""
TIGHT = 0.95
"""Estimates above this share of a GPU's memory get a note, because not everything is counted."""
FEATURE_CACHE_BYTES = 256 * 2**20
QUANTIZED_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QUANTIZED_BYTES = {"fp8": 1.0, "int8": 1.0, "awq": 0.52}
"""Bytes of a quantised parameter with its share of the scales, for AWQ of groups of 128."""
RESIDENT = ("weights", "adapters", "gradients", "optimizer")
"""Parts of the learner's memory that stay between steps."""
Bytes = dict[str, int]


def learner_memory(
    arch: Architecture,
    policy: config.PolicyConfig,
    learner: config.LearnerConfig,
    has_reference: bool = False,
    full_kl: bool = False,
) -> tuple[Bytes, Bytes]:
    """(bytes on each learner's device, bytes in its host's memory) by part, at the peak of a step.

    With P trainable and F frozen parameters of `width` bytes and N workers (ZeRO, arXiv 1910.02054, sections
    3 and 5):

    - weights: (P + F) * width, divided by N at stage 3, which adds the gathered ones. Adapters are float32.
    - gradients: P * width, divided by N from stage 2.
    - optimizer: two moments of 4 bytes (2 with `moments=bfloat16`) and, from stage 1, a float32 copy, divided
      by N.
    - buckets: `reduce_bucket_size` numbers of a gradient, doubled by `overlap_comm`.
    - optimizer step: DeepSpeed's stages 1 and 2 flatten the gradient and convert it to float32 while the
      buffers of a pass are
      free.
    - reference (has_reference: for a KL term): its trainable weights, and while it is used the current ones.
    - activations, vision, logits: see `_pass_bytes`.
    """
    gpu, width, workers = learner.gpus > 0, arch.width, learner.workers
    bfloat16 = policy.full and arch.dtype == torch.bfloat16
    zero = deepspeed_config(learner, bfloat16, torch.device("cuda" if gpu else "cpu"))["zero_optimization"]
    stage = int(zero["stage"])
    if policy.full:
        trainable, gradient_width = arch.trained_parameters(policy), width
    else:
        shapes = arch.shapes(policy.lora.targets, policy.lora.vision_tower)
        trainable, gradient_width = adapter_bytes(shapes, arch.ranks(policy.lora), 1), 4
    moments = 2 * (2 if learner.moments == "bfloat16" else 4)
    weight_shards, gradient_shards, optimizer_shards = (
        workers if stage >= first else 1 for first in (3, 2, 1)
    )
    device = {
        "weights": arch.parameters * width // weight_shards,
        "adapters": 0 if policy.full else trainable * 4 // weight_shards,
        "gradients": trainable * gradient_width // gradient_shards,
        "optimizer": trainable * (moments + (4 if stage >= 1 else 0)) // optimizer_shards,
        "reference": 2 * trainable * gradient_width // weight_shards if has_reference else 0,
    }

    def is_offloaded(key: str) -> bool:
        return (zero.get(key) or {}).get("device", "none") != "none"

    host = {"optimizer": 0, "weights": 0}
    if is_offloaded("offload_optimizer"):
        # With the gradients
        host["optimizer"], device["optimizer"] = device["optimizer"] + trainable * 4 // workers, 0
    if is_offloaded("offload_param") and stage == 3:
        host["weights"], device["weights"] = device["weights"], 0
    if stage == 3 and workers > 1:
        live = int(zero.get("stage3_max_live_parameters", 10**9)) + int(
            zero.get("stage3_prefetch_bucket_size", 5 * 10**7)
        )
        device["gathered"] = min(live, arch.parameters) * width
    if stage >= 1:
        bucket = min(int(zero.get("reduce_bucket_size", 5 * 10**8)), max(trainable, 1))
        device["buckets"] = bucket * gradient_width * (2 if zero.get("overlap_comm") else 1)
    in_a_pass = _pass_bytes(
        arch, policy, -(-learner.rows * learner.row_tokens // learner.sequence_parallel), full_kl
    )
    if stage in (1, 2) and device["optimizer"]:
        flat = trainable * (gradient_width + (4 if gradient_width < 4 else 0)) // optimizer_shards
        device["optimizer step"] = max(0, flat - device["buckets"] - sum(in_a_pass.values()))
    device |= in_a_pass
    return {k: v for k, v in device.items() if v}, {k: v for k, v in host.items() if v}


def _pass_bytes(arch: Architecture, policy: config.PolicyConfig, tokens: int, full_kl: bool) -> Bytes:
    """Bytes of a packed pass of `tokens` tokens by part.

    - activations: those that all layers save, or with gradient checkpointing the input of each and the
      activations of one (arXiv 1604.06174); and the two widest gradients inside a layer.
    - vision: of a frozen tower the current block and the feature cache; a trained one counts as the layers.
    - logits: a chunk in the model's type, twice in float32, and their gradient. full_kl: the reference's, and
      three more in float32.
    """

    def saved(layers: int, layer: int, width: int) -> int:
        return layers * width * arch.width + layer if policy.gradient_checkpointing else layers * layer

    text = arch.text
    hidden, vocab = int(text.hidden_size), int(text.vocab_size)
    workspace = 2 * tokens * max(int(text.intermediate_size), hidden) * arch.width
    parts = {
        "activations": workspace
        + saved(int(text.num_hidden_layers), arch.layer_bytes(tokens), tokens * hidden)
    }
    if arch.vision is not None:
        patches = tokens * int(arch.vision.spatial_merge_size) ** 2
        block = arch.vision_block_bytes(patches)
        is_trained = policy.trains_vision_tower
        parts["vision"] = (
            saved(int(arch.vision.depth), block, patches * arch.vision_width)
            if is_trained
            else block + FEATURE_CACHE_BYTES
        )
    width = 2 * arch.width + 8 + (arch.width + 12 if full_kl else 0)
    parts["logits"] = min(max(CHUNK_VALUES, vocab), tokens * vocab) * width
    return parts


def generator_memory(arch: Architecture, policy: config.PolicyConfig, engine: config.EngineConfig) -> Bytes:
    """Bytes on each GPU of a generator without KV cache, by part.

    vLLM shards the weights over `tensor_parallel` GPUs and reserves MAX_LORAS adapter slots of its rank in
    the weights' type. Merged adapters need no slot. The embedded engine merges and keeps the original weights
    of changed layers.
    """
    linear = (
        sum(o * i for o, i in arch.shapes(QUANTIZED_LAYERS).values())
        if engine.quantization in QUANTIZED_BYTES
        else 0
    )
    weights = (arch.parameters - linear) * arch.width + int(
        linear * QUANTIZED_BYTES.get(engine.quantization, 0)
    )
    out = {"weights": weights // engine.tensor_parallel}
    shapes = {} if policy.full else arch.shapes(policy.lora.targets, policy.lora.vision_tower)
    if engine.name == "hf":
        changed = (
            sum(math.prod(shapes[name]) for name in arch.ranks(policy.lora))
            if shapes
            else arch.trained_parameters(policy)
        )
        return out | {"originals": changed * arch.width}
    if shapes and not merges(policy, engine):
        rank = served_rank(largest_rank(policy.lora))
        out["adapters"] = MAX_LORAS * rank * sum(o + i for o, i in shapes.values()) * arch.width
    return out


# -- checks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A line of the table. error: the run cannot work as configured; note: it works, but perhaps not as
    intended.
    """

    level: Literal["ok", "note", "error"]
    subject: str
    text: str


Job = Literal["rft", "sft", "serve", "evaluate"]
"""Jobs with a model; ttrl is checked as rft."""


class Prompt(TypedDict):
    """Size of a prompt: tokens of text, number of pictures and of clips."""

    text: int
    images: int
    clips: int


def table(findings: Iterable[Finding]) -> str:
    """Findings as aligned lines."""
    return "\n".join(f"  {f.level:5}  {f.subject:15}  {f.text}" for f in findings)


def check(
    config: config.Config, job: Job, prompts: Sequence[Prompt] = (), gpu_bytes: int | None = None
) -> list[Finding]:
    """Check a configuration without starting an actor.

    prompts: sizes of some prompts of the job; gpu_bytes: memory of a GPU, by default `cluster.nodes.gpu_gib`
    or this machine's, else 80 GiB. Without the model's folder, checks that need the model are left out.
    Raises BadConfig for an unsupported model or a wrong target.
    """
    out = (_batch(config, job) if job in ("rft", "sft") else []) + (
        _learner(config, job) if job != "evaluate" else []
    )
    try:
        arch = Architecture(config.policy.model, learner_dtype(config.policy, config.learner.gpus > 0))
    except MissingFile as error:
        message = (
            f"{error.message}: adapters, lengths and memory are not checked (they need only its config.json)"
        )
        return [*out, Finding("note", "model", message)]
    counts = arch.parameters, arch.vision_parameters
    total, vision = (f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M" for count in counts)
    out.append(
        Finding("ok", "model", f"{arch.family}, {total} parameters, {vision} of them in the vision tower")
    )
    if not config.policy.full:
        out.append(_adapters(config, arch, job))
    out += _context(config, arch, prompts, job)
    if gpu_bytes is None and (gib := config.cluster.nodes.gpu_gib) is not None:
        gpu_bytes = int(gib * GIB)
    if gpu_bytes is None:
        gpu_bytes = (
            torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else GPU_BYTES
        )
    learns = job in ("rft", "sft") or (
        job == "serve" and config.evolution.enabled and not config.serve.read_only
    )
    if learns:
        out += _training(config, arch, job, gpu_bytes)
    if job != "sft":
        if config.needs_embedder or (job == "serve" and config.memory.enabled and not config.serve.read_only):
            parts = {
                "weights": arch.parameters * arch.width,
                "activations": arch.layer_bytes(config.dialogue.max_context),
            }
            out.append(_fits("embedder", parts, sum(parts.values()), config.engine.gpus, gpu_bytes))
        out += _generator(config, arch, gpu_bytes)
    return out


def _batch(c: config.Config, job: str) -> list[Finding]:
    shares, parallel = c.learner.shares(c.learner.workers), c.learner.sequence_parallel
    learners = f"{shares} groups of {parallel} learners" if parallel > 1 else f"{shares} learners"
    if job == "sft":
        return [
            Finding(
                "ok", "batch", f"{c.sft.batch} demonstrations over {learners}: {c.sft.batch // shares} each"
            )
        ]
    prompts, minibatches = c.rft.prompts_per_step, c.rft.minibatches
    rollouts = prompts * c.rft.group_size
    share = rollouts // shares
    message = f"{prompts} questions x {c.rft.group_size} = {rollouts} rollouts over {learners}: {share} each"
    out = [
        Finding("ok", "batch", message + (f", in {minibatches} optimizer steps" if minibatches > 1 else ""))
    ]
    if (
        c.engine.quantization != "none"
        and c.rft.loss.importance == "none"
        and c.rft.loss.proximal == "learner"
    ):
        message = (
            f"rollouts come from {c.engine.quantization} weights, but rft.loss.importance=none does "
            "not correct for that"
        )
        out.append(Finding("error", "batch", f"{message}: set it to truncate"))
    if minibatches > share:
        out.append(
            Finding(
                "error", "batch", f"rft.minibatches {minibatches} is above the {share} rollouts of a learner"
            )
        )
    if prompts < c.engine.workers:
        message = f"rft.prompts_per_step {prompts} is below engine.workers {c.engine.workers}: some are idle"
        out.append(Finding("note", "batch", message))
    return out


def _learner(c: config.Config, job: str) -> list[Finding]:
    out = []
    bfloat16 = c.policy.full and learner_dtype(c.policy, c.learner.gpus > 0) == torch.bfloat16
    stage, default = (
        int(deepspeed_config(learner, bfloat16, torch.device("cpu"))["zero_optimization"]["stage"])
        for learner in (c.learner, c.learner.model_copy(update={"deepspeed": None}))
    )
    if c.learner.deepspeed and stage != default:
        own = f"learner.zero_stage is {c.learner.zero_stage}" + (
            ", in bfloat16 1" if default != c.learner.zero_stage else ""
        )
        out.append(
            Finding(
                "error",
                "deepspeed",
                f"{own}, but learner.deepspeed {Path(c.learner.deepspeed).name}: {stage}",
            )
        )
    if job == "rft" and c.rft.sampling.temperature <= 0:
        out.append(
            Finding("error", "sampling", "rft.sampling.temperature 0 has no distribution to learn from")
        )
    if job == "rft" and c.rft.sampling.top_p < 1:
        message = (
            f"rft.sampling.top_p {c.rft.sampling.top_p:g}: no other token is sampled, but the "
            "learner scores the whole"
        )
        out.append(
            Finding("note", "sampling", f"{message} vocabulary, so that importance weights are below 1")
        )
    return out


def _adapters(c: config.Config, arch: Architecture, job: str) -> Finding:
    lora = c.policy.lora
    shapes, ranks = arch.shapes(lora.targets, lora.vision_tower), arch.ranks(lora)
    smallest, largest = min(ranks.values()), max(ranks.values())
    message = (
        f"{f'ranks {smallest} to {largest}' if smallest < largest else f'rank {smallest}'} on "
        f"{len(ranks)} layers"
    )
    message += f", {format_bytes(adapter_bytes(shapes, ranks))} a version"
    if excessive := [(rank, -min(shapes[name])) for name, rank in ranks.items() if rank > min(shapes[name])]:
        rank, side = max(excessive)
        key = "policy.lora.ranks" if lora.ranks else "policy.lora.rank"
        return Finding("error", "adapters", f"{key} {rank} is above the {-side} of a layer it adapts")
    if job == "sft" or c.engine.name != "vllm":
        return Finding("ok", "adapters", message)
    if merges(c.policy, c.engine):
        adapted = "the vision tower" if lora.vision_tower else "lm_head"
        reason = "" if c.engine.adapters == "merge" else f" as {adapted} is adapted"
        return Finding("ok", "adapters", f"{message}, merged into vLLM's weights{reason}")
    rank = served_rank(largest)
    message += f", served by vLLM as rank {rank}"
    if rank != largest and not lora.ranks:
        return Finding("note", "adapters", f"{message}: policy.lora.rank {rank} would cost vLLM the same")
    return Finding("ok", "adapters", message)


def _context(c: config.Config, arch: Architecture, prompts: Sequence[Prompt], job: str) -> list[Finding]:
    """Tokens of pictures, clips and the longest prompt against the context."""
    d, out = c.dialogue, []
    budgets = {"input": d.input, "crop": d.crop, "frame": d.frame}
    sizes = {name: budget.max_pixels // arch.multiple**2 for name, budget in budgets.items()}
    for name in (name for name, size in sizes.items() if not size):
        tile = f"{arch.multiple} x {arch.multiple}"
        message = f"dialogue.{name}.max_pixels {budgets[name].max_pixels} holds no tile of {tile} pixels"
        out.append(Finding("error", "pictures", message))
    view, crop, clip = sizes["input"] + 2, sizes["crop"] + 2, d.frames * (sizes["frame"] + 2)
    looks = f"a clip's first look {d.frames} x {sizes['frame']} = {clip}"
    out.append(Finding("ok", "pictures", f"a full view takes {view - 2} tokens, a crop {crop - 2}, {looks}"))
    if d.frames > d.max_images:
        out.append(
            Finding(
                "error", "context", f"dialogue.frames {d.frames} is above dialogue.max_images {d.max_images}"
            )
        )
    if d.max_context > arch.text.max_position_embeddings:
        positions = arch.text.max_position_embeddings
        message = f"dialogue.max_context {d.max_context} is above the {positions} positions of policy.model"
        out.append(Finding("error", "context", message))
    single: Prompt = {"text": 0, "images": 1, "clips": 0}
    longest = max(prompts, key=lambda p: p["text"] + p["images"] * view + p["clips"] * clip, default=single)
    text, images = longest["text"], longest["images"] * view + longest["clips"] * clip
    for part, tokens, keys in (
        (
            "the pictures of the longest prompt",
            images,
            "dialogue.input.max_pixels, dialogue.frame.max_pixels or dialogue.frames",
        ),
        ("a clip's first look", clip, "dialogue.frames or dialogue.frame.max_pixels"),
    ):
        if tokens + text + d.max_turn_tokens > d.max_context:
            message = (
                f"{part} ({tokens} tokens), its text ({text}) and one turn of "
                f"dialogue.max_turn_tokens {d.max_turn_tokens}"
            )
            out.append(
                Finding(
                    "error",
                    "context",
                    f"{message} do not fit dialogue.max_context {d.max_context}: lower {keys}",
                )
            )
    turns = d.max_turns if job != "sft" else 1
    episode = text + images + turns * d.max_turn_tokens + (turns - 1) * crop
    message = f"longest prompt {text + images} ({f'text {text}' if prompts else 'text unknown'})"
    message += f", with {turns} full turns and crops {episode} of dialogue.max_context {d.max_context}"
    if job != "sft" and c.engine.name == "vllm":
        message += " (vLLM's max_model_len)"
    if episode > d.max_context:
        out.append(Finding("note", "context", f"{message}: an episode that uses it all ends as over_context"))
    else:
        out.append(Finding("ok", "context", message))
    return out


def _training(c: config.Config, arch: Architecture, job: str, gpu_bytes: int) -> list[Finding]:
    """Memory of the learners, object store and disk of a job that trains."""
    has_reference = job == "serve" or (job == "rft" and c.rft.loss.kl > 0)
    full_kl = job == "rft" and has_reference and c.rft.loss.kl_estimator == "full"
    device, host = learner_memory(arch, c.policy, c.learner, has_reference, full_kl)
    resident = sum(device.get(part, 0) for part in RESIDENT)
    out = [_fits("learner", device, resident, c.learner.gpus, gpu_bytes)]
    if host:
        out.append(Finding("ok", "learner's host", f"{_format_parts(host)} for each learner"))
    if job == "rft" and c.engine.colocate and c.engine.name == "vllm":
        share = c.engine.gpu_memory_utilization
        message = f"engine.gpu_memory_utilization {share:g} of {format_bytes(gpu_bytes)}"
        message += f" beside {format_bytes(resident)} of the learner"
        is_beyond = share * gpu_bytes + resident > gpu_bytes
        rest = f": does not fit, lower it to {max(0.0, 1 - resident / gpu_bytes):.2f}" if is_beyond else ""
        out.append(Finding("error" if is_beyond else "ok", "colocate", message + rest))
    version = storage.version_bytes(c, arch)
    if job == "rft":
        parts, store = storage.parts(c, version, job), c.cluster.object_store_bytes
        short = (
            f": more than cluster.object_store_bytes {format_bytes(store)} of a local cluster"
            if store
            else ""
        )
        is_short = store is not None and sum(parts.values()) > store
        message = f"at most {_format_parts(parts)}{short if is_short else ''}"
        out.append(Finding("note" if is_short else "ok", "object store", message))
    parts = storage.disk_parts(c, version, storage.trained_bytes(c, arch), job)
    folder = next(
        path for path in (Path(c.run.dir).absolute(), *Path(c.run.dir).absolute().parents) if path.is_dir()
    )
    free, message = shutil.disk_usage(folder).free, f"at most {_format_parts(parts)} in run.dir"
    if sum(parts.values()) > free:
        return [
            *out,
            Finding("note", "disk", f"{message}: {folder} has {format_bytes(free)} free on this machine"),
        ]
    return [*out, Finding("ok", "disk", message)]


def _generator(c: config.Config, arch: Architecture, gpu_bytes: int) -> list[Finding]:
    """Memory of the generators, and how many episodes of full length fit beside their weights."""
    engine, out = c.engine, []
    if (dtype := learner_dtype(c.policy, engine.gpus > 0)) != arch.dtype:
        arch = Architecture(c.policy.model, dtype)
    heads = int(arch.text.num_attention_heads)
    if heads % engine.tensor_parallel:
        message = (
            f"engine.tensor_parallel {engine.tensor_parallel} does not divide the {heads} heads of "
            "policy.model"
        )
        out.append(Finding("error", "engine", message))
    parts = generator_memory(arch, c.policy, engine)
    shards = min(engine.tensor_parallel, int(arch.text.num_key_value_heads))
    episode = arch.kv_token_bytes * c.dialogue.max_context // shards
    message = f"{_format_parts(parts)}; keys and values of an episode {format_bytes(episode)}"
    if not engine.gpus:
        return [*out, Finding("ok", "generator", message)]
    reserved = int(min(1.0, engine.gpus / engine.tensor_parallel) * gpu_bytes)
    usable = int((engine.gpu_memory_utilization if engine.name == "vllm" else 1.0) * reserved)
    episodes = max(0, (usable - sum(parts.values())) // episode)
    message += f", {episodes} fit the rest of {format_bytes(reserved)} at once"
    if not episodes:
        out.append(
            Finding(
                "error", "generator", f"{message}: raise engine.tensor_parallel or lower dialogue.max_context"
            )
        )
    elif episodes < engine.max_num_seqs:
        effect = "others wait" if engine.name == "vllm" else "longer ones together run out of memory"
        out.append(
            Finding("note", "generator", f"{message}, engine.max_num_seqs is {engine.max_num_seqs}: {effect}")
        )
    else:
        out.append(Finding("ok", "generator", message))
    return out


def _fits(subject: str, parts: Mapping[str, int], fixed: int, gpus: float, gpu_bytes: int) -> Finding:
    """An error if `fixed` bytes exceed the reserved GPU memory; a note if all parts do."""
    if not gpus:
        return Finding("ok", subject, f"{_format_parts(parts)} in the memory of its machine")
    available = int(gpu_bytes * min(1.0, gpus))
    message = f"{_format_parts(parts)} of {format_bytes(available)}"
    keys = (
        "learner.zero_stage, policy.gradient_checkpointing, learner.rows"
        if subject == "learner"
        else "engine.gpus"
    )
    if fixed > available:
        offload = " and learner.deepspeed (offload)" if subject == "learner" else ""
        return Finding("error", subject, f"{message}: does not fit, see {keys}{offload}")
    if sum(parts.values()) > TIGHT * available:
        return Finding("note", subject, f"{message}: tight, see {keys}")
    return Finding("ok", subject, message)


def _format_parts(parts: Mapping[str, int]) -> str:
    return (
        " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        + f" = {format_bytes(sum(parts.values()))}"
    )


def format_bytes(count: int) -> str:
    """Bytes in units of 1024."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"

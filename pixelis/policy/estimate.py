"""Estimates memory and checks a configuration for `--dry-run`, from a model's config.json alone."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

import torch

from pixelis.errors import MissingFile
from pixelis.policy import storage
from pixelis.policy.adapters import adapter_bytes
from pixelis.policy.architecture import Architecture, learner_dtype
from pixelis.policy.deepspeed_engine import deepspeed_config
from pixelis.policy.forward import FEATURE_CACHE_BYTES
from pixelis.policy.log_probs import CHUNK_VALUES
from pixelis.policy.quantization import NF4_BYTES
from pixelis.policy.ranks import MAX_LORAS, largest_rank, merges, served_rank

if TYPE_CHECKING:
    from pixelis import config

GIB = 2**30
GPU_BYTES = 80 * GIB
TIGHT = 0.95
"""Estimates above this share of a GPU's memory get a note, because not everything is counted."""
QUANTIZED_BYTES = {"fp8": 1.0, "int8": 1.0, "awq": 0.52, "nf4": NF4_BYTES}
"""Bytes of a quantised parameter with its share of the scales, for AWQ of groups of 128."""
RESIDENT = ("weights", "adapters", "gradients", "optimizer")
"""Parts of the learner's memory that stay between steps."""
Bytes = dict[str, int]


def weight_bytes(arch: Architecture, quantization: str) -> int:
    """Bytes of the base model's weights. quantization: of the linear layers of the language model."""
    linear = sum(arch.linear_weights.values()) if quantization != "none" else 0
    return int((arch.parameters - linear) * arch.width + linear * QUANTIZED_BYTES.get(quantization, 0))


def learner_memory(
    arch: Architecture,
    policy: config.PolicyConfig,
    learner: config.LearnerConfig,
    has_reference: bool = False,
    full_kl: bool = False,
) -> tuple[Bytes, Bytes]:
    """(bytes on each learner's device, bytes in its host's memory) by part, at the peak of a step.

    Sharding follows ZeRO (arXiv 1910.02054, sections 3 and 5). `optimizer step`: stages 1 and 2 convert the
    flat gradient to float32 when the buffers of a pass are free. reference: set aside, as the current weights
    are while it is used.
    """
    width, workers, full = arch.width, learner.workers, policy.full
    device_type = torch.device("cuda" if learner.gpus else "cpu")
    zero = deepspeed_config(learner, full and arch.dtype == torch.bfloat16, device_type)["zero_optimization"]
    stage = int(zero["stage"])
    if full:
        trainable, gradient_width = arch.trained_parameters(policy), width
    else:
        shapes = arch.shapes(policy.lora.targets, policy.lora.vision_tower)
        trainable, gradient_width = adapter_bytes(shapes, arch.ranks(policy.lora), 1), 4
    state_width = 2 * (2 if learner.moments == "bfloat16" else 4) + (4 if stage else 0)
    weight_shards, gradient_shards, optimizer_shards = (
        workers if stage >= first else 1 for first in (3, 2, 1)
    )
    device = {
        "weights": weight_bytes(arch, policy.quantization) // weight_shards,
        "adapters": 0 if full else trainable * 4 // weight_shards,
        "gradients": trainable * gradient_width // gradient_shards,
        "optimizer": trainable * state_width // optimizer_shards,
        "reference": 2 * trainable * gradient_width // weight_shards if has_reference else 0,
    }
    host: Bytes = {}

    def is_offloaded(key: str) -> bool:
        return (zero.get(key) or {}).get("device", "none") != "none"

    if is_offloaded("offload_optimizer"):  # with the gradients
        host["optimizer"] = device.pop("optimizer") + trainable * 4 // workers
    if is_offloaded("offload_param") and stage == 3:
        host["weights"] = device.pop("weights")
    if stage == 3 and workers > 1:
        live = zero.get("stage3_max_live_parameters", 10**9)
        live += zero.get("stage3_prefetch_bucket_size", 5 * 10**7)
        device["gathered"] = min(int(live), arch.parameters) * width
    if stage:
        bucket = min(int(zero.get("reduce_bucket_size", 5 * 10**8)), max(trainable, 1))
        device["buckets"] = bucket * gradient_width * (2 if zero.get("overlap_comm") else 1)
    tokens = -(-learner.rows * learner.row_tokens // learner.sequence_parallel)
    in_a_pass = _pass_bytes(arch, policy, tokens, full_kl)
    if policy.quantization != "none":
        in_a_pass["dequantised layer"] = max(arch.linear_weights.values()) * width
    if stage in (1, 2) and "optimizer" in device:
        flat = trainable * (gradient_width + (4 if gradient_width < 4 else 0)) // optimizer_shards
        device["optimizer step"] = max(0, flat - device["buckets"] - sum(in_a_pass.values()))
    return {name: size for name, size in (device | in_a_pass).items() if size}, host


def _pass_bytes(arch: Architecture, policy: config.PolicyConfig, tokens: int, full_kl: bool) -> Bytes:
    """Bytes of a packed pass by part, with gradient checkpointing as in arXiv 1604.06174.

    activations: also the two widest gradients of a layer. logits: a chunk, twice in float32, and their
    gradient; full_kl: the reference's, and three more in float32.
    """

    def saved(layers: Sequence[int], width: int) -> int:
        if policy.gradient_checkpointing:
            return len(layers) * width * arch.width + max(layers)
        return sum(layers)

    text = arch.text
    hidden, vocab = int(text.hidden_size), int(text.vocab_size)
    layers = saved(arch.layer_bytes(tokens), tokens * hidden)
    parts = {"activations": 2 * tokens * max(arch.inner_width, hidden) * arch.width + layers}
    if arch.vision is not None:
        patches = tokens * arch.geometry.merge**2
        block = arch.vision_block_bytes(patches)
        if policy.trains_vision_tower:
            depth = int(getattr(arch.vision, "depth", 0) or arch.vision.num_hidden_layers)
            parts["vision"] = saved([block] * depth, patches * arch.vision_width)
        else:
            parts["vision"] = block + FEATURE_CACHE_BYTES
    width = 2 * arch.width + 8 + (arch.width + 12 if full_kl else 0)
    parts["logits"] = min(max(CHUNK_VALUES, vocab), tokens * vocab) * width
    return parts


def generator_memory(arch: Architecture, policy: config.PolicyConfig, engine: config.EngineConfig) -> Bytes:
    """Bytes on each GPU of a generator without KV cache, by part.

    vLLM reserves MAX_LORAS adapters; the embedded engine merges and keeps the original weights of changed
    layers, but for 4-bit ones.
    """
    quantization = policy.quantization if engine.name == "hf" else engine.quantization
    parts = {"weights": weight_bytes(arch, quantization) // engine.tensor_parallel}
    shapes = {} if policy.full else arch.shapes(policy.lora.targets, policy.lora.vision_tower)
    if engine.name == "hf":
        adapted = arch.ranks(policy.lora) if shapes else {}
        beside = {n: r for n, r in adapted.items() if quantization != "none" and n in arch.linear_weights}
        changed = sum(math.prod(shapes[name]) for name in adapted.keys() - beside.keys())
        parts["originals"] = (arch.trained_parameters(policy) if policy.full else changed) * arch.width
        parts["adapters"] = adapter_bytes(shapes, beside, arch.width)
    elif shapes and not merges(policy, engine):
        rank = served_rank(largest_rank(policy.lora))
        parts["adapters"] = MAX_LORAS * adapter_bytes(shapes, rank, arch.width)
    return parts


# Checks


Level = Literal["ok", "note", "error"]


@dataclass(frozen=True)
class Finding:
    """A line of the table. error: the run cannot work as configured; note: perhaps not as intended."""

    level: Level
    subject: str
    text: str


_ok, _note, _error = (functools.partial(Finding, level) for level in get_args(Level))
Job = Literal["rft", "sft", "serve", "evaluate"]
"""Jobs with a model; ttrl is checked as rft."""


class Prompt(TypedDict):
    """Size of a prompt: tokens of text, number of pictures and of clips."""

    text: int
    images: int
    clips: int


def table(findings: Iterable[Finding]) -> str:
    return "\n".join(f"  {f.level:5}  {f.subject:15}  {f.text}" for f in findings)


def check(
    config: config.Config, job: Job, prompts: Sequence[Prompt] = (), gpu_bytes: int | None = None
) -> list[Finding]:
    """Check a configuration without starting an actor.

    prompts: sizes of some prompts; gpu_bytes: by default `cluster.nodes.gpu_gib` or this machine's, else 80
    GiB. Without the model's folder, checks that need the model are left out.
    """
    findings = list(_settings(config, job))
    try:
        arch = Architecture(config.policy, learner_dtype(config.policy, config.learner.gpus > 0))
    except MissingFile as error:
        return [*findings, _note("model", f"{error.message}: lengths and memory are not checked")]
    if gpu_bytes is None and config.cluster.nodes.gpu_gib is not None:
        gpu_bytes = int(config.cluster.nodes.gpu_gib * GIB)
    elif gpu_bytes is None:
        has_gpu = torch.cuda.is_available()
        gpu_bytes = torch.cuda.get_device_properties(0).total_memory if has_gpu else GPU_BYTES
    total, vision = (
        f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"
        for count in (arch.parameters, arch.vision_parameters)
    )
    text = f"{arch.model_type}, {total} parameters, {vision} of them in the vision tower"
    findings.append(_ok("model", text))
    if arch.family.note:
        findings.append(_note("model", f"models of type {arch.model_type} {arch.family.note}"))
    if not config.policy.full:
        findings.append(_adapters(config, arch, job))
    findings += _context(config, arch, prompts, job)
    if job in ("rft", "sft") or (job == "serve" and config.learns_online):
        findings += _training(config, arch, job, gpu_bytes)
    if config.needs_embedder or (job == "serve" and config.remembers):
        activations = max(arch.layer_bytes(config.dialogue.max_context))
        parts = {"weights": weight_bytes(arch, config.policy.quantization), "activations": activations}
        if job != "sft":
            findings.append(_fits("embedder", parts, sum(parts.values()), config.engine.gpus, gpu_bytes))
    if job != "sft":
        findings += _generator(config, arch, gpu_bytes)
    return findings


def _settings(c: config.Config, job: str) -> Iterator[Finding]:
    shares = c.learner.shares(c.learner.workers)
    if job == "sft":
        text = f"{c.sft.batch} demonstrations over {shares} learners: {c.sft.batch // shares} each"
        yield _ok("batch", text)
    if job == "rft":
        prompts, minibatches = c.rft.prompts_per_step, c.rft.minibatches
        share = prompts * c.rft.group_size // shares
        text = f"{prompts} questions x {c.rft.group_size} rollouts over {shares} learners: {share} each"
        yield _ok("batch", text)
        if minibatches > share:
            text = f"rft.minibatches {minibatches} is above the {share} rollouts of a learner"
            yield _error("batch", text)
        if c.rft.sampling.temperature <= 0:
            text = "rft.sampling.temperature 0 has no distribution to learn from"
            yield _error("sampling", text)
        if c.rft.sampling.top_p < 1:
            text = "the learner scores also tokens that rft.sampling.top_p excludes: importance weights are below 1"
            yield _note("sampling", text)
    if c.learner.deepspeed and job != "evaluate":
        bfloat16 = c.policy.full and learner_dtype(c.policy, c.learner.gpus > 0) == torch.bfloat16
        merged, default = (
            deepspeed_config(learner, bfloat16, torch.device("cpu"))["zero_optimization"]["stage"]
            for learner in (c.learner, c.learner.model_copy(update={"deepspeed": None}))
        )
        if int(merged) != default:
            file = Path(c.learner.deepspeed).name
            text = f"learner.zero_stage is {default}, but learner.deepspeed {file}: {merged}"
            yield _error("deepspeed", text)


def _adapters(c: config.Config, arch: Architecture, job: str) -> Finding:
    lora = c.policy.lora
    shapes, ranks = arch.shapes(lora.targets, lora.vision_tower), arch.ranks(lora)
    # A rank for all layers may exceed the sides of narrow ones, such as gates.
    widest = max(map(min, shapes.values()))
    for name, rank in ranks.items():
        if rank > (min(shapes[name]) if lora.ranks else widest):
            key = "policy.lora.ranks" if lora.ranks else "policy.lora.rank"
            return _error("adapters", f"{key} {rank} is above a side of {name}, {min(shapes[name])}")
    smallest, largest = min(ranks.values()), max(ranks.values())
    text = f"rank {smallest}" if smallest == largest else f"ranks {smallest} to {largest}"
    text += f" on {len(ranks)} layers, {format_bytes(adapter_bytes(shapes, ranks))} a version"
    if job != "sft" and c.engine.name == "vllm":
        merged = merges(c.policy, c.engine)
        text += f", {'merged' if merged else f'served by vLLM as rank {served_rank(largest)}'}"
    return _ok("adapters", text)


def _context(c: config.Config, arch: Architecture, prompts: Sequence[Prompt], job: str) -> Iterator[Finding]:
    d = c.dialogue
    full, crop, frame = (arch.image_tokens(budget.max_pixels) for budget in (d.input, d.crop, d.frame))
    if not min(full, crop, frame):
        tile = arch.geometry.multiple**2
        yield _error(
            "pictures", f"a max_pixels in dialogue is below the {tile} pixels of a tile of policy.model"
        )
    view, clip = full + 2, d.frames * (frame + 2)
    text = (
        f"a full view takes {full} tokens, a crop {crop}, a clip's first look {d.frames} x {frame} = {clip}"
    )
    yield _ok("pictures", text)
    if d.frames > d.max_images:
        text = f"dialogue.frames {d.frames} is above dialogue.max_images {d.max_images}"
        yield _error("context", text)
    if d.max_context > (positions := arch.text.max_position_embeddings):
        text = f"dialogue.max_context {d.max_context} is above the {positions} positions of policy.model"
        yield _error("context", text)
    single: Prompt = {"text": 0, "images": 1, "clips": 0}
    longest = max(prompts, key=lambda p: p["text"] + p["images"] * view + p["clips"] * clip, default=single)
    words, images = longest["text"], longest["images"] * view + longest["clips"] * clip
    keys = "dialogue.input.max_pixels, dialogue.frame.max_pixels or dialogue.frames"
    for part, tokens in (("the pictures of the longest prompt", images), ("a clip's first look", clip)):
        if tokens + words + d.max_turn_tokens > d.max_context:
            text = (
                f"{part} ({tokens} tokens), its text ({words}) and one turn ({d.max_turn_tokens}) do not fit "
            )
            text += f"dialogue.max_context {d.max_context}: lower {keys}"
            yield _error("context", text)
    turns = d.max_turns if job != "sft" else 1
    episode = words + images + turns * d.max_turn_tokens + (turns - 1) * (crop + 2)
    text = f"longest prompt {words + images} ({f'text {words}' if prompts else 'text unknown'})"
    text += f", with {turns} full turns and crops {episode} of dialogue.max_context {d.max_context}"
    if episode > d.max_context:
        yield _note("context", f"{text}: an episode that uses it all ends as over_context")
    else:
        yield _ok("context", text)


def _training(c: config.Config, arch: Architecture, job: str, gpu_bytes: int) -> Iterator[Finding]:
    has_reference = job == "serve" or (job == "rft" and c.rft.loss.kl > 0)
    full_kl = job == "rft" and has_reference and c.rft.loss.kl_estimator == "full"
    device, host = learner_memory(arch, c.policy, c.learner, has_reference, full_kl)
    resident = sum(device.get(part, 0) for part in RESIDENT)
    yield _fits("learner", device, resident, c.learner.gpus, gpu_bytes)
    if host:
        yield _ok("learner's host", f"{_format_parts(host)} for each learner")
    if job == "rft" and c.engine.colocate and c.engine.name == "vllm":
        share, left = c.engine.gpu_memory_utilization, max(0.0, 1 - resident / gpu_bytes)
        text = f"engine.gpu_memory_utilization {share:g} beside {format_bytes(resident)} of the learner"
        if share > left:
            yield _error("colocate", f"{text}: does not fit, lower it to {left:.2f}")
        else:
            yield _ok("colocate", text)
    version = storage.version_bytes(c, arch)
    if job == "rft":
        parts, room = storage.parts(c, version, job), c.cluster.object_store_bytes
        is_short = room is not None and sum(parts.values()) > room
        text = f"at most {_format_parts(parts)}{': above cluster.object_store_bytes' if is_short else ''}"
        yield Finding("note" if is_short else "ok", "object store", text)
    parts = storage.disk_parts(c, version, storage.trained_bytes(c, arch), job)
    run_dir = Path(c.run.dir).absolute()
    free = shutil.disk_usage(next(path for path in (run_dir, *run_dir.parents) if path.is_dir())).free
    text = f"at most {_format_parts(parts)} in run.dir"
    if sum(parts.values()) > free:
        yield _note("disk", f"{text}, which has {format_bytes(free)} free on this machine")
    else:
        yield _ok("disk", text)


def _generator(c: config.Config, arch: Architecture, gpu_bytes: int) -> Iterator[Finding]:
    engine = c.engine
    if engine.name == "vllm_server":
        yield _ok("generator", f"{len(engine.urls)} servers, whose memory is their own")
        return
    if (dtype := learner_dtype(c.policy, engine.gpus > 0)) != arch.dtype:
        arch = Architecture(c.policy, dtype)
    if (heads := int(arch.text.num_attention_heads)) % engine.tensor_parallel:
        text = f"engine.tensor_parallel {engine.tensor_parallel} does not divide the {heads} heads"
        yield _error("engine", f"{text} of policy.model")
    parts = generator_memory(arch, c.policy, engine)
    shards = min(engine.tensor_parallel, int(arch.text.num_key_value_heads))
    episode = (arch.kv_token_bytes * c.dialogue.max_context + arch.state_bytes) // shards
    what = "keys, values and states" if arch.state_layers else "keys and values"
    text = f"{_format_parts(parts)}; {what} of an episode {format_bytes(episode)}"
    if not engine.gpus:
        yield _ok("generator", text)
        return
    reserved = int(min(1.0, engine.gpus / engine.tensor_parallel) * gpu_bytes)
    usable = int((engine.gpu_memory_utilization if engine.name == "vllm" else 1.0) * reserved)
    episodes = max(0, (usable - sum(parts.values())) // episode)
    text += f", {episodes} fit the rest of {format_bytes(reserved)} at once"
    if not episodes:
        text += ": raise engine.tensor_parallel or lower dialogue.max_context"
        yield _error("generator", text)
    elif episodes < engine.max_num_seqs:
        effect = "others wait" if engine.name == "vllm" else "longer ones together run out of memory"
        yield _note("generator", f"{text}, engine.max_num_seqs is {engine.max_num_seqs}: {effect}")
    else:
        yield _ok("generator", text)


def _fits(subject: str, parts: Mapping[str, int], fixed: int, gpus: float, gpu_bytes: int) -> Finding:
    """An error if `fixed` bytes exceed the reserved GPU memory; a note if all parts do."""
    if not gpus:
        return _ok(subject, f"{_format_parts(parts)} in the memory of its machine")
    available = int(gpu_bytes * min(1.0, gpus))
    text, keys = f"{_format_parts(parts)} of {format_bytes(available)}", "engine.gpus"
    if subject == "learner":
        keys = "learner.zero_stage, policy.gradient_checkpointing, learner.rows, learner.deepspeed (offload)"
    if fixed > available:
        return _error(subject, f"{text}: does not fit, see {keys}")
    if sum(parts.values()) > TIGHT * available:
        return _note(subject, f"{text}: tight, see {keys}")
    return _ok(subject, text)


def _format_parts(parts: Mapping[str, int]) -> str:
    listed = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    return f"{listed} = {format_bytes(sum(parts.values()))}"


def format_bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"

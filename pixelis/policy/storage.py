"""Estimates how much of Ray's object store and of the disk a job needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pixelis.policy.adapters import adapter_bytes
from pixelis.policy.replay import MAX_BYTES

if TYPE_CHECKING:
    from pixelis import config
    from pixelis.policy.architecture import Architecture

PICTURE_PIXELS = 2_000_000
"""Assumed pixels of a question's picture at full resolution."""
PIXEL_BYTES = 3
MIN_BYTES = 1_000_000_000
"""Smallest object store of a local cluster. It also holds the blocks that Ray Data reads ahead."""
RESERVE = 1.3
"""Factor for what is not counted: copies in transfer, and results that wait for their caller."""


def kept_versions(c: config.Config, job: str) -> int:
    """Most versions in the policy store; a service keeps older promoted ones."""
    # In training every version is promoted
    older = c.policy_store.promoted(c.policy.full) if job == "serve" else 0
    return c.policy_store.newest(c.policy.full) + older + 1


def version_bytes(c: config.Config, arch: Architecture) -> int:
    return (
        arch.trained_parameters(c.policy) * arch.dtype.itemsize if c.policy.full else trained_bytes(c, arch)
    )


def trained_bytes(c: config.Config, arch: Architecture) -> int:
    """Bytes of what is trained in float32, as in a checkpoint."""
    if c.policy.full:
        return arch.trained_parameters(c.policy) * 4
    return adapter_bytes(
        arch.shapes(c.policy.lora.targets, c.policy.lora.vision_tower), arch.ranks(c.policy.lora)
    )


def parts(c: config.Config, version: int, job: str) -> dict[str, int]:
    """Bytes in the object stores of all nodes at most, by part; rollouts have a crop in each further turn."""
    r, d = c.rft, c.dialogue
    running = (r.max_off_policy_steps + 1) * r.prompts_per_step
    crops = max(0, min(d.max_turns, d.max_images) - 1) * r.group_size
    group = (d.input.max_pixels + crops * d.crop.max_pixels) * PIXEL_BYTES
    out = {
        "versions": kept_versions(c, job) * version,
        "views": (running + r.prompts_per_step) * group,
        "pictures": running * PICTURE_PIXELS * PIXEL_BYTES,
        "replay": MAX_BYTES if r.replay.capacity else 0,
    }
    return {name: size for name, size in out.items() if size}


def disk_parts(c: config.Config, version: int, trained: int, job: str) -> dict[str, int]:
    """Bytes in run.dir at most, by part, without logs and saved episodes.

    checkpoints: the newest `learner.keep`, the best and the one that is written.
    """
    has_reference = job == "serve" or (job == "rft" and c.rft.loss.kl > 0)
    has_average = job == "serve" and c.evolution.ema > 0
    evaluated = (job == "rft" and c.rft.evaluate_every) or (job == "sft" and c.sft.evaluate_every)
    kept = c.learner.keep + bool(evaluated) + 1
    moments = 0 if c.learner.save_only_model else 2
    out = {"checkpoints": kept * (1 + moments + has_reference + has_average) * trained}
    return out if job == "sft" else out | {"versions": kept_versions(c, job) * version}


def needed_bytes(c: config.Config) -> tuple[int, int]:
    """(bytes that a job's object stores should have together, bytes of its largest object)."""
    from pixelis.policy.architecture import Architecture, learner_dtype

    version = version_bytes(c, Architecture(c.policy, learner_dtype(c.policy, c.learner.gpus > 0)))
    return max(MIN_BYTES, int(RESERVE * sum(parts(c, version, "serve").values()))), version

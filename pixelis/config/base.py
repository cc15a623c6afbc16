"""The base class of configuration sections, and helpers to merge, list and check keys."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

MAX_FILE_NAME = 100
"""Bytes of a name that is part of names of files."""


Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base class of all sections: immutable; unknown keys and infinite numbers are errors.

    The text below a key is its description in `--help` and in the documentation.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in top.items():
        out[key] = (
            merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
        )
    return out


def apply_preset(values: Any, key: str, settings_of: Callable[[str], dict[str, Any]]) -> Any:
    """Merge explicit values over `settings_of` the preset that ``key`` names, if it names one."""
    name = values.get(key) if isinstance(values, dict) else None
    if not isinstance(name, str):
        return values
    explicit = {
        k: v.model_dump(exclude_unset=True) if isinstance(v, Section) else v for k, v in values.items()
    }
    return merge(settings_of(name), explicit)


def check_file_name(name: str) -> None:
    """Raise ValueError unless ``name`` can be a part of the names of files."""
    if not 0 < len(name.encode("utf-8", "replace")) <= MAX_FILE_NAME or "/" in name or "\0" in name:
        raise ValueError(
            f"`{name[:MAX_FILE_NAME]}` names files: it has 1 to {MAX_FILE_NAME} bytes and no slash"
        )


def check_name(kind: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
    """Raise ValueError for an unknown name, with the nearest one, or all and ``otherwise``."""
    if name in (names := list(known)):
        return
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"one of {', '.join(names)}{otherwise}"
    raise ValueError(f"no {kind} `{name}` ({hint})")


def leaf_keys(kind: type[BaseModel], prefix: str = "") -> list[tuple[str, str, Any, str]]:
    """(path, type, default, description) of every leaf key of ``kind``."""
    rows: list[tuple[str, str, Any, str]] = []
    for name, field in kind.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += leaf_keys(annotation, f"{prefix}{name}.")
            continue
        if get_origin(annotation) is Literal:
            type_name = "|".join(str(v) for v in get_args(annotation))
        else:
            type_name = (
                annotation.__name__
                if isinstance(annotation, type)
                else str(annotation).replace("typing.", "")
            )
        rows.append((f"{prefix}{name}", type_name, field.default, field.description or ""))
    return rows


def annotation_of(kind: type[BaseModel], path: str) -> Any:
    """The type of the key at ``path`` of ``kind``, which may lie in a map; None for an unknown key."""
    annotation: Any = kind
    for name in path.split("."):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = field.annotation if (field := annotation.model_fields.get(name)) else None
        else:
            annotation = get_args(annotation)[1] if get_origin(annotation) is dict else None
    return annotation


RENAMED = {
    "evaluate.operations": "toolbox.operations",
    "evaluate.trajectories": "telemetry.trajectories",
    "refinement.quality.least": "refinement.quality.min_score",
    "rewards.math": "rewards.timeout_s",
    "rewards.own_timeout_s": "rewards.timeout_s",
    "synthesis.distillation": "synthesis.teacher",
    "synthesis.imitation": "synthesis.teacher",
    "telemetry.comet": "telemetry.trackers",
    "telemetry.mlflow": "telemetry.trackers",
    "telemetry.swanlab": "telemetry.trackers",
    "telemetry.tensorboard": "telemetry.trackers",
    "telemetry.trackio": "telemetry.trackers",
    "telemetry.wandb": "telemetry.trackers",
}
"""Former key -> its current name, suggested in the error for the former one."""


SYNONYMS = {
    "learning_rate": "learner.lr",
    "lr": "learner.lr",
    "warmup_ratio": "learner.warmup",
    "lr_scheduler_type": "learner.schedule",
    "lora_rank": "policy.lora.rank",
    "lora_r": "policy.lora.rank",
    "lora_alpha": "policy.lora.alpha",
    "lora_target_modules": "policy.lora.targets",
    "model_name_or_path": "policy.model",
    "model_path": "policy.model",
    "bf16": "policy.dtype",
    "attn_implementation": "policy.attention",
    "output_dir": "run.dir",
    "seed": "run.seed",
    "num_generations": "rft.group_size",
    "rollout_n": "rft.group_size",
    "max_steps": "rft.steps",
    "num_train_epochs": "sft.epochs",
    "per_device_train_batch_size": "sft.batch",
    "train_batch_size": "rft.prompts_per_step",
    "beta": "rft.loss.kl",
    "kl_coef": "rft.loss.kl",
    "epsilon": "rft.loss.clip_low",
    "epsilon_high": "rft.loss.clip_high",
    "max_completion_length": "dialogue.max_turn_tokens",
    "max_prompt_length": "dialogue.max_context",
    "max_model_len": "dialogue.max_context",
    "max_pixels": "dialogue.input.max_pixels",
    "dataset_name": "data.train",
    "train_files": "data.train",
    "val_files": "data.evaluate",
    "tensor_parallel_size": "engine.tensor_parallel",
    "tensor_model_parallel_size": "engine.tensor_parallel",
    "save_steps": "learner.checkpoint_every",
    "save_total_limit": "learner.keep",
    "report_to": "telemetry.trackers",
}
"""Name of a setting in TRL, verl, EasyR1 or vLLM -> our key, suggested in the error for an unknown key."""


def unknown_keys(root: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> list[str]:
    unknown = _unknown_paths(root, values, prefix)
    existing = [path for path, *_ in leaf_keys(root, prefix)] if unknown else []
    messages = []
    for path in unknown:
        last = path.rsplit(".", 1)[-1]
        synonyms = [key for key in (RENAMED.get(path), SYNONYMS.get(last)) if key]
        near = synonyms or difflib.get_close_matches(path, existing, n=1)
        near = near or [p for p in existing if p.rsplit(".", 1)[-1] == last]
        messages.append(f"`{path}`" + (f" (did you mean `{near[0]}`?)" if near else ""))
    return messages


def _unknown_paths(kind: type[BaseModel], values: Any, prefix: str) -> list[str]:
    out: list[str] = []
    for key, value in values.items() if isinstance(values, Mapping) else ():
        field = kind.model_fields.get(str(key))
        if field is None:
            out.append(f"{prefix}{key}")
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            out += _unknown_paths(field.annotation, value, f"{prefix}{key}.")
    return out

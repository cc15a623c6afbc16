"""Loads a configuration from YAML files, the files that they extend, and ``key=value`` overrides."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pixelis.config.base import accepts_null, leaf_keys, merge, unknown_keys
from pixelis.config.root import RECIPES, Config, recipe_files, shipped
from pixelis.errors import BadConfig, MissingFile

SCORING_KEYS = ("own", "own_timeout_s", "own_workers", "scorer", "math", "judge", "workers", "cpus")
"""Keys of `rewards` about scoring itself, which a preset of a later file does not replace."""
ALTERNATIVES = {"sft.steps": "sft.epochs", "rft.steps": "rft.epochs"}
"""Alternative keys: one on the command line replaces the other in the file; both on the command line are an error."""


def load(path: str | Path | None = None, overrides: list[str] | None = None) -> Config:
    """Read a YAML file with its ``extends`` chain and apply ``a.b=value`` overrides; ``a.b=null`` restores a default.

    A path that does not exist may name a packaged recipe: ``configs/nano/rft.yaml`` or ``nano/rft``. Raises BadConfig with the
    path of the key for unknown keys, wrong types and contradictions; MissingFile for a missing file.
    """
    values = _read(find(path), seen=()) if path else {}
    # A preset replaces the rewards of the file, so it comes before the other overrides, which refine it.
    pairs = [_split(override) for override in overrides or []]
    pairs.sort(key=lambda pair: pair[0] != "rewards.preset")
    keys = {key for key, _ in pairs}
    for steps, epochs in ALTERNATIVES.items():
        if {steps, epochs} <= keys:
            raise BadConfig(f"{steps} and {epochs} contradict each other", fix="give one of the two")
        if steps in keys:
            section, key = epochs.split(".")
            (values.get(section) or {}).pop(key, None)
    for key, text in pairs:
        _override(values, key, text)
    return parse(values)


def find(path: str | Path) -> Path:
    """The configuration file at ``path``, else the recipe of that name. Raises MissingFile with the nearest name."""
    path = Path(path).expanduser()
    if path.is_file():
        return path
    if recipe := shipped(str(path), suffix=".yaml"):
        return recipe
    recipes = [str(file.relative_to(RECIPES)) for file in recipe_files()]
    near = difflib.get_close_matches(str(path).removeprefix("configs/"), recipes, n=1)
    fix = (
        f"did you mean configs/{near[0]}?" if near else "give the path of a YAML file, or a recipe: `pixelis recipes` lists them"
    )
    raise MissingFile(f"no configuration file {path}", fix=fix)


def parse(values: dict[str, Any]) -> Config:
    """Validate plain values. Raises BadConfig as ``load`` does."""
    unknown = unknown_keys(Config, values)
    if unknown:
        raise BadConfig("unknown configuration key " + "; ".join(unknown), fix="`--help --all` lists every key")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = []
        for e in error.errors():
            key = ".".join(str(p) for p in e["loc"]) or "config"
            reason = e["msg"].removeprefix("Value error, ")
            value = "" if e["type"] == "value_error" else f" (value: {e['input']!r})"
            lines.append(f"{key}: {reason}{value}")
        raise BadConfig("invalid configuration: " + "; ".join(lines), fix="`--help SECTION` explains the keys") from None


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise BadConfig(f"{path.name} extends itself through {' -> '.join(p.name for p in seen)}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path.name} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise BadConfig(f"{path.name} is a {type(values).__name__}, not a mapping of sections")
    parents = values.pop("extends", None) or []
    below: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        file = path.parent / str(parent)
        if not file.is_file():
            raise MissingFile(f"{path.name} extends {parent}, which does not exist", fix=f"correct `extends:` in {path}")
        below = _stack(below, _read(file, (*seen, path)))
    return _stack(below, values)


def _stack(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``below`` overridden by ``above``; a rewards preset in ``above`` replaces the rewards of ``below``."""
    rewards = above.get("rewards")
    if isinstance(rewards, dict) and rewards.get("preset") and isinstance(below.get("rewards"), dict):
        below = {**below, "rewards": _below_preset(below["rewards"])}
    return merge(below, above)


def _below_preset(rewards: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rewards.items() if key in SCORING_KEYS}


def _split(override: str) -> tuple[str, str]:
    key, eq, text = override.partition("=")
    if not eq or not key:
        raise BadConfig(f"`{override}` is not an override", fix="write it as key.path=value, for example learner.lr=3e-4")
    return key, text


def _override(values: dict[str, Any], key: str, text: str) -> None:
    node = values
    *parents, last = key.split(".")
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise BadConfig(f"`{key}`: `{name}` is a value, not a section")
    value = _scalar(text)
    if value is None and not accepts_null(Config, key) and key in {path for path, *_ in leaf_keys(Config)}:
        node.pop(last, None)
        return
    node[last] = value
    if key == "rewards.preset":
        values["rewards"] = _below_preset(node) | {last: value}


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

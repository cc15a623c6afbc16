"""Loads a configuration from YAML files, the files that they extend, and ``key=value`` overrides."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import ValidationError

from pixelis.config.base import Section, annotation_of, leaf_keys, merge, unknown_keys
from pixelis.config.presets.algorithms import algorithm_settings
from pixelis.config.presets.rewards import reward_settings
from pixelis.config.rewards import RewardsConfig
from pixelis.config.root import RECIPES, Config, ablation_files, recipe_files, shipped
from pixelis.errors import BadConfig, MissingFile

S = TypeVar("S", bound=Section)
SCORING_KEYS = frozenset({"timeout_s", "scorer", "judge", "workers", "cpus"})
"""Keys of `rewards` about scoring itself, which a preset replaces only where it sets them."""
NAMED = {
    "rft": ("algorithm", algorithm_settings, frozenset({"advantage", "loss", "critic", "filter", "replay"})),
    "rewards": ("preset", reward_settings, frozenset(RewardsConfig.model_fields) - SCORING_KEYS),
}
"""Section -> the key that names settings, the settings of a name, and the keys that any name replaces."""
ALTERNATIVES = {"sft.steps": "sft.epochs", "rft.steps": "rft.epochs"}
"""Alternative keys: one on the command line replaces the other in the file."""


class Layer(NamedTuple):
    """The values of one file and its name."""

    name: str
    values: dict[str, Any]


Source = str | Path | Config | None
"""A YAML file, the name of a recipe, or a complete configuration."""


def load(path: Source = None, overrides: Sequence[str] | Mapping[str, Any] | None = None) -> Config:
    """Read a YAML file with its ``extends`` chain and apply ``a.b=value`` overrides; null restores a default.

    A mapping of overrides has dotted keys (``{"a.b": value}``) or sections (``{"a": {"b": value}}``).
    A named algorithm or preset replaces settings of the files below; keys beside its name refine it. Raises
    BadConfig with the key's path for unknown keys, wrong types and contradictions; MissingFile.
    """
    return load_with_origins(path, overrides)[0]


def load_with_origins(
    path: Source = None, overrides: Sequence[str] | Mapping[str, Any] | None = None
) -> tuple[Config, dict[str, str]]:
    """As ``load``, with the origin of each key that is set: a file, a named setting or the command line."""
    if isinstance(path, Config):
        layers = [Layer("Config", path.model_dump(mode="json"))]
    else:
        layers = _layers(find(path), seen=()) if path else []
    overrides = list(_words(overrides)) if isinstance(overrides, Mapping) else overrides
    values: dict[str, Any] = {}
    for layer in layers:
        values = merge(_replaced(values, layer.values), layer.values)
    pairs = [split_override(override) for override in overrides or []]
    keys = {key for key, _ in pairs}
    for steps, epochs in ALTERNATIVES.items():
        if {steps, epochs} <= keys:
            raise BadConfig(f"{steps} and {epochs} contradict each other", fix="give one of the two")
        if steps in keys:
            section, key = epochs.split(".")
            (values.get(section) or {}).pop(key, None)
    names = {section: f"{section}.{key}" for section, (key, *_) in NAMED.items()}
    for section, path_of_name in names.items():
        for key, text in pairs:
            if key == path_of_name:
                values = _replaced(values, {section: {key.partition(".")[2]: parse_value(Config, key, text)}})
    for key, text in pairs:
        apply_override(Config, values, key, text)
    config = parse(values)
    origins: dict[str, str] = {}
    for section, (key, settings_of, _) in NAMED.items():
        if isinstance(node := values.get(section), dict) and isinstance(name := node.get(key), str):
            preset = {section: settings_of(name)}
            origins |= {path: f"{key} {name}" for path, *_ in leaf_keys(Config) if _holds(preset, path)}
    for path, *_ in leaf_keys(Config):
        if not _holds(values, path):
            continue
        if files := [layer.name for layer in layers if _holds(layer.values, path)]:
            origins[path] = files[-1]
        if any(f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.") for key in keys):
            origins[path] = "command line"
    return config, origins


def _words(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Values as overrides on the command line: texts as they are, others in JSON, which is YAML."""
    for name, value in overrides.items():
        kind = annotation_of(Config, f"{prefix}{name}")
        if isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, Section):
            yield from _words(value, f"{prefix}{name}.")
        else:
            text = str(value) if isinstance(value, str | Path) else json.dumps(value, default=str)
            yield f"{prefix}{name}={text}"


def find(path: str | Path) -> Path:
    """The configuration file at ``path``, else the recipe of that name; MissingFile with the nearest name."""
    path = Path(path).expanduser()
    if path.is_file():
        return path
    if (recipe := shipped(str(path), suffix=".yaml")) and recipe.is_file():
        return recipe
    recipes = [str(file.relative_to(RECIPES)) for file in [*recipe_files(), *ablation_files()]]
    near = difflib.get_close_matches(str(path).removeprefix("configs/"), recipes, n=1)
    fix = (
        f"did you mean configs/{near[0]}?"
        if near
        else "give the path of a YAML file, or a recipe: `pixelis recipes` lists them"
    )
    raise MissingFile(f"no configuration file {path}", fix=fix)


def parse(values: dict[str, Any]) -> Config:
    """Validate plain values. Raises BadConfig as ``load`` does."""
    return validated(Config, values, fix="`--help --all` lists every key, `--help SECTION` explains them")


def validated(kind: type[S], values: dict[str, Any], fix: str) -> S:
    """Validate the values of a file of ``kind``; BadConfig ends with ``fix``."""
    unknown = unknown_keys(kind, values)
    if unknown:
        raise BadConfig("unknown configuration key " + "; ".join(unknown), fix=fix)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        lines = []
        for e in error.errors():
            key = ".".join(str(p) for p in e["loc"]) or "config"
            reason = e["msg"].removeprefix("Value error, ")
            value = "" if e["type"] in ("value_error", "missing") else f" (value: {e['input']!r})"
            lines.append(f"{key}: {reason}{value}")
        raise BadConfig("invalid configuration: " + "; ".join(lines), fix=fix) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty for an empty file. Raises BadConfig for anything else."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path.name} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise BadConfig(f"{path.name} is a {type(values).__name__}, not a mapping of sections")
    return values


def _layers(path: Path, seen: tuple[Path, ...]) -> list[Layer]:
    """A file and those that it extends, the lowest first."""
    path = path.resolve()
    if path in seen:
        raise BadConfig(f"{path.name} extends itself through {' -> '.join(p.name for p in seen)}")
    values = read_yaml(path)
    parents = values.pop("extends", None) or []
    layers: list[Layer] = []
    for parent in [parents] if isinstance(parents, str) else parents:
        file = path.parent / str(parent)
        if not file.is_file():
            raise MissingFile(
                f"{path.name} extends {parent}, which does not exist", fix=f"correct `extends:` in {path}"
            )
        layers += _layers(file, (*seen, path))
    return [*layers, Layer(f"{path.parent.name}/{path.name}", values)]


def _replaced(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``below`` without what the algorithm and the preset named in ``above`` replace."""
    for section, (key, settings_of, replaced) in NAMED.items():
        top, base = above.get(section), below.get(section)
        name = top.get(key) if isinstance(top, dict) else None
        if not isinstance(name, str) or not isinstance(base, dict):
            continue
        try:
            settings = settings_of(name)
        except ValueError:  # an unknown name, which `parse` reports
            continue
        below = {**below, section: _without({k: v for k, v in base.items() if k not in replaced}, settings)}
    return below


def _without(values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """``values`` without the keys of ``settings``."""
    out = {}
    for key, value in values.items():
        if key not in settings:
            out[key] = value
        elif isinstance(value, dict) and isinstance(settings[key], dict):
            out[key] = _without(value, settings[key])
    return out


def _holds(values: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def split_override(override: str) -> tuple[str, str]:
    """Key and text of ``key.path=value``."""
    key, eq, text = override.partition("=")
    if not eq or not key:
        raise BadConfig(
            f"`{override}` is not an override", fix="write it as key.path=value, for example learner.lr=3e-4"
        )
    return key, text


def apply_override(kind: type[Section], values: dict[str, Any], key: str, text: str) -> None:
    """Set ``key`` of ``values``, those of a file of ``kind``; null restores a default."""
    node = values
    *parents, last = key.split(".")
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise BadConfig(f"`{key}`: `{name}` is a value, not a section")
    value = parse_value(kind, key, text)
    is_nullable = type(None) in get_args(annotation_of(kind, key))
    if value is None and not is_nullable and key in {path for path, *_ in leaf_keys(kind)}:
        node.pop(last, None)
    else:
        node[last] = value


def parse_value(kind: type[Section], key: str, text: str) -> Any:
    """The value of ``text`` on the command line: itself if the key takes a text, else YAML."""
    annotation = annotation_of(kind, key)
    kinds = [annotation] if get_origin(annotation) not in (Union, UnionType) else get_args(annotation)
    if text != "null" and any(
        part is str or (get_origin(part) is Literal and isinstance(get_args(part)[0], str)) for part in kinds
    ):
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, str) and any(get_origin(part) in (list, tuple, dict) for part in kinds):
        raise BadConfig(
            f"{key}={text} is no list or map in YAML", fix="write a list as [a, b] or a map as {a: 1, b: 2}"
        )
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value

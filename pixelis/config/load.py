"""Reading a configuration: a YAML file with what it extends, overrides, and the command line of the jobs."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pixelis.config.base import leaf_keys, merge, unknown_keys
from pixelis.config.root import Config, absolute
from pixelis.errors import BadConfig, MissingFile, PixelisError

REWARD_MEANS = ("own", "own_limit_s", "own_children", "scorer", "math", "judge", "workers", "cpus")


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
    unknown = unknown_keys(Config, values)
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
    return merge(base, values)


def _below_preset(rewards: dict[str, Any]) -> dict[str, Any]:
    """What stays of a file's rewards when something above it names a preset: means and own rewards, not weights and shapes."""
    return {key: value for key, value in rewards.items() if key in REWARD_MEANS}


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


def describe() -> str:
    """Every key with its type, default and meaning, one line each."""
    lines = []
    for path, kind, default, meaning in leaf_keys(Config):
        lines.append(f"  {path:34} {json.dumps(default, default=str):<22} {meaning}  [{kind}]")
    return "\n".join(lines)


def from_command_line(
    doc: str,
    job: str,
    argv: list[str] | None = None,
    default: str | None = None,
    check: Callable[[Config], None] | None = None,
) -> Config:
    """Read ``[CONFIG.yaml] [key=value ...] [--dry-run] [--help]`` of a job; exits on the two flags and on bad config.

    ``default`` is the configuration file used when none is named. ``check`` looks at the configuration of a dry run once it is
    printed; what it raises becomes a message, with exit code 2 for BadConfig.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if "--help" in args or "-h" in args:
        usage = f"usage: python -m pixelis.jobs.{job} [CONFIG.yaml] [key=value ...] [--dry-run] [--help]"
        try:
            print(f"{doc.strip()}\n\n{usage}\n\nkeys (name, default, meaning, type):\n{describe()}", flush=True)
        except BrokenPipeError:  # `--help | head` is no error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
        print(config.to_yaml(), end="", flush=True)
        try:
            if check is not None:
                check(config)
        except PixelisError as error:
            print(f"pixelis.jobs.{job}: {error}", file=sys.stderr)
            raise SystemExit(2 if isinstance(error, BadConfig) else 1) from None
        raise SystemExit(0)
    return config

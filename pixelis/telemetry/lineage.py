"""Lineage files: the inputs, configuration, code and seed of a result.

A folder has a `lineage.json`, a file NAME a `NAME.lineage.json` beside it. Paths are relative to the result, so
that a tree of runs can be moved.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pixelis.errors import BadInput, MissingFile, first_problem
from pixelis.files import write_json
from pixelis.policy.checkpoint import MANIFEST, file_sha256, is_complete

if TYPE_CHECKING:
    from pixelis.config import Config

NAME = "lineage.json"
PACKAGES = ("torch", "transformers", "deepspeed", "peft", "ray", "vllm", "numpy")
BLOCK = 2**16
SAMPLE_ABOVE = 64 * 2**20
"""Size in bytes above which only blocks of a weight file are hashed."""
MEDIA = frozenset(
    [
        ".png",
        ".jpg",
        ".jpeg",
        ".webp",
        ".gif",
        ".bmp",
        ".tif",
        ".tiff",
        ".mp4",
        ".avi",
        ".mov",
        ".mkv",
        ".webm",
        ".wav",
        ".mp3",
    ]
)
"""Suffixes of files of which only name and size are hashed."""
EXCLUDED = frozenset({NAME, "lock.json", "STOP"})
"""Files of a folder that are not part of its content."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Input(_Part):
    """An input of a result. Generated and remote sources have no path and no hash."""

    role: str = "input"
    source: str
    path: str | None = None
    sha256: str | None = None
    bytes: int | None = None


class Code(_Part):
    """Version of the package and of those it computes with; in a checkout its commit and whether it has changes."""

    version: str
    packages: dict[str, str] = {}
    commit: str | None = None
    dirty: bool | None = None


class Record(_Part):
    """What a result was made from, and by which code and configuration."""

    format: Literal[1] = 1
    kind: str
    sha256: str | None = None
    """Hash of the result; None for the folder of a run, which still grows."""
    inputs: list[Input]
    config_sha256: str | None
    seed: int | None
    code: Code
    made: str
    earlier: list[Record] = []
    """The records before the run was resumed with other inputs, configuration or code."""

    @property
    def provenance(self) -> tuple[object, ...]:
        return (self.config_sha256, self.seed, self.code, [(i.role, i.source, i.sha256) for i in self.inputs])


Source = str | Path | Input


def record(
    path: str | Path,
    *,
    inputs: Iterable[Source] | Mapping[str, Source | Iterable[Source]] = (),
    config: Config | None = None,
    kind: str,
    grows: bool = False,
) -> Path:
    """Write the lineage of the result at ``path``; returns the lineage file.

    inputs: files, folders, sources (`coco:/data/coco?split=val`), or Input when the hash is known; the keys of a
    mapping are the roles. grows: the result is the folder of a run, which gets no hash and keeps its earlier
    record. Raises MissingFile if the result or an input does not exist.
    """
    path = Path(path)
    roles = inputs if isinstance(inputs, Mapping) else {"input": inputs}
    single = (str, Path, Input)
    by_role = {role: [sources] if isinstance(sources, single) else sources for role, sources in roles.items()}
    new = Record(
        kind=kind,
        sha256=None if grows else digest(path)[0],
        inputs=[
            _resolve_input(role, source, path) for role, sources in by_role.items() for source in sources
        ],
        config_sha256=config.sha256 if config is not None else None,
        seed=config.run.seed if config is not None else None,
        code=code(),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if grows and (previous := read(path)) is not None:
        changed = (
            [previous.model_copy(update={"earlier": []})] if previous.provenance != new.provenance else []
        )
        new = new.model_copy(update={"earlier": [*previous.earlier, *changed]})
    write_json(lineage_file(path), _dump(new))
    return lineage_file(path)


def _dump(record: Record) -> dict[str, Any]:
    return record.model_dump(mode="json", exclude_defaults=True) | {"format": 1}


def lineage_file(path: str | Path) -> Path:
    path = Path(path)
    return path / NAME if path.is_dir() else path.with_name(f"{path.name}.{NAME}")


def read(path: str | Path) -> Record | None:
    """The record of exactly this result, None without one. Raises BadInput for a damaged file."""
    file = lineage_file(path)
    if not file.is_file():
        return None
    try:
        return Record.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problem = f"{file} is not a lineage file: {first_problem(error).message}"
        raise BadInput(problem, fix="make the result again") from None


def of_run(path: str | Path, kind: str) -> dict[str, object] | None:
    """The lineage of the run around ``path``, with paths relative to ``path``; None outside of a run."""
    # Start above `path`: an older result of the same name may have a lineage file there.
    if (run := find_record(Path(path).absolute().parent)) is None:
        return None
    folder, run_record = run
    base = Path(path).parent if Path(path).is_file() else Path(path)

    def moved(record: Record) -> Record:
        inputs = [
            relative_to(base, i, Path(os.path.normpath(folder / i.path))) if i.path else i
            for i in record.inputs
        ]
        return record.model_copy(
            update={"inputs": inputs, "earlier": [moved(e) for e in record.earlier], "kind": kind}
        )

    return _dump(moved(run_record))


def of_checkpoint(run_dir: str | Path) -> dict[str, object] | None:
    """The lineage of every checkpoint of a run; None if the folder has no lineage."""
    return of_run(Path(run_dir) / "checkpoints" / "step", "checkpoint")


def record_in_run(path: str | Path, kind: str) -> None:
    """Write the lineage of a result inside a run's folder: the run's with the result's hash."""
    if (known := of_run(path, kind)) is None:
        raise MissingFile(f"{path} is not inside the folder of a run")
    write_json(lineage_file(path), known | {"sha256": digest(path)[0]})


def find_record(path: str | Path) -> tuple[Path, Record] | None:
    """The result at ``path``, or the folder it was made in (up to three levels above), and its record."""
    path = Path(os.path.abspath(path))
    for result in (path, *list(path.parents)[: 1 if path.is_file() else 3]):
        if (known := read(result)) is not None:
            # An input may lie in the folder of its product, but is not made by it.
            inputs = [Path(os.path.normpath(result / i.path)) for i in known.inputs if i.path]
            return None if result != path and path in inputs else (result, known)
    return None


def digest(path: str | Path, without: Path | None = None) -> tuple[str, int]:
    """(sha256, bytes) of a file, a folder, or the matches of a pattern with `*`. Raises MissingFile.

    That of a folder covers names and contents: of pictures, clips and sounds only the size, of weights above
    64 MiB evenly spread blocks, of a checkpoint the hashes in its manifest. It excludes hidden files, lineage
    files and everything below ``without``.
    """
    path = Path(path)
    if path.is_file():
        return file_sha256(path), path.stat().st_size
    if path.is_dir():
        if (path / MANIFEST).is_file() and is_complete(path):
            files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
            entries = {name: entry for name, entry in files.items() if name not in EXCLUDED}
            text = json.dumps(entries, sort_keys=True).encode()
            return hashlib.sha256(text).hexdigest(), sum(int(entry["bytes"]) for entry in entries.values())
        root, paths = path, [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
        if without is not None:
            excluded = Path(os.path.abspath(without))
            paths = [p for p in paths if not Path(os.path.abspath(p)).is_relative_to(excluded)]
    else:
        paths = [Path(name) for name in glob.glob(str(path), recursive=True)] if "*" in str(path) else []
        if not paths:
            raise MissingFile(f"no file or folder {path}")
        root = Path(os.path.commonpath([p.parent for p in paths]))
    names = {}
    for file in filter(Path.is_file, paths):
        relative = file.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)
        if not hidden and file.name not in EXCLUDED and not file.name.endswith(f".{NAME}"):
            names[relative.as_posix()] = file
    hashed, size = hashlib.sha256(), 0
    for name in sorted(names):
        length = names[name].stat().st_size
        size += length
        hashed.update(f"{name}:{length}:".encode())
        if names[name].suffix.lower() not in MEDIA:
            hashed.update(_content_hash(names[name], length).encode())
    return hashed.hexdigest(), size


def _content_hash(path: Path, size: int) -> str:
    if path.suffix != ".safetensors" or size <= SAMPLE_ABOVE:
        return file_sha256(path)
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        for i in range(65):
            file.seek(i * (size - BLOCK) // 64)
            hashed.update(file.read(BLOCK))
    return hashed.hexdigest()


@cache
def code() -> Code:
    number, packages = "unknown", {"python": platform.python_version()}
    with contextlib.suppress(PackageNotFoundError):
        number = version("pixelis")
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str | None:
        try:
            process = subprocess.run(
                ["git", "-C", package, *arguments], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return process.stdout.strip()

    # The package may be installed inside the checkout of another project, whose commits do not describe it.
    if (
        git("ls-files", "--error-unmatch", "__init__.py") is None
        or (commit := git("rev-parse", "HEAD")) is None
    ):
        return Code(version=number, packages=packages)
    dirty = bool(git("status", "--porcelain", "--", "."))
    return Code(version=number, packages=packages, commit=commit, dirty=dirty)


def _resolve_input(role: str, source: Source, result: Path) -> Input:
    base = result if result.is_dir() else result.parent
    if isinstance(source, Input):
        role = source.role if role == "input" else role
        path = Path(source.path) if source.path else None
        return (relative_to(base, source, path) if path else source).model_copy(update={"role": role})
    path = local_path(source)
    if path is None:
        return Input(role=role, source=str(source))
    sha256, size = digest(path, without=result)
    return relative_to(
        base, Input(role=role, source=str(source), path=str(path), sha256=sha256, bytes=size), path
    )


def relative_to(base: Path, item: Input, path: Path) -> Input:
    """The input with its path, also inside its source, relative to ``base`` if they share a folder."""
    path, base = Path(os.path.abspath(path)), Path(os.path.abspath(base))
    unrelated = os.path.commonpath([path, base]) == path.anchor
    shown = str(path) if unrelated else os.path.relpath(path, base)
    return item.model_copy(update={"path": shown, "source": item.source.replace(item.path or shown, shown)})


def local_path(source: str | Path) -> Path | None:
    """The path of a source (`coco:/data/coco?split=val`); None if it is remote or generated. MissingFile."""
    if isinstance(source, Path) or os.path.exists(source):
        path = Path(source)
    else:
        body = source.partition("?")[0]
        scheme, colon, rest = body.partition(":")
        if "://" in body or (colon and scheme and not rest):
            return None
        path = Path(body)
        if not _exists(path) and colon:
            if not _exists(Path(rest)):
                return None
            path = Path(rest)
    if not _exists(path):
        raise MissingFile(f"no file or folder {path}")
    return path


def _exists(path: Path) -> bool:
    return path.exists() or ("*" in str(path) and bool(glob.glob(str(path), recursive=True)))

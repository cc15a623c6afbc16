"""Lineage: what a data set, a checkpoint or a result was made from, in a small file beside it.

The record of a folder is its `lineage.json`, that of a file NAME is `NAME.lineage.json`. It holds hashes of the inputs, of the
resolved configuration and of the code, and the seed. Paths are relative to the result, so a tree of runs may be moved.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pixelis.errors import BadInput, MissingFile, first_problem
from pixelis.policy.checkpoint import MANIFEST, file_sha256, is_complete, write_json

if TYPE_CHECKING:
    from pixelis.config import Config

NAME = "lineage.json"
BLOCK, SAMPLED = 2**16, 64 * 2**20
MEDIA = frozenset(
    [".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".mp4", ".avi", ".mov", ".mkv", ".webm", ".wav", ".mp3"]
)
PASSING = frozenset({NAME, "lock.json", "STOP"})
"""Files of a folder that are no content of it."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Input(_Part):
    """What a result was made from. Generated and remote sources have no path: the text of the source stands for them."""

    role: str = "input"
    source: str
    path: str | None = None
    sha256: str | None = None
    bytes: int | None = None


class Code(_Part):
    """Version of the package, and the commit when it runs from a checkout; dirty: with changes that no commit has."""

    version: str
    commit: str | None = None
    dirty: bool | None = None


class Record(_Part):
    """The content of a lineage file. sha256: of the result itself, None while it still grows (the folder of a run).

    earlier: what held before a run was resumed with other inputs, another configuration or other code.
    """

    format: Literal[1] = 1
    kind: str
    sha256: str | None = None
    inputs: list[Input]
    config_sha256: str | None
    seed: int | None
    code: Code
    made: str
    earlier: list[Record] = []

    @property
    def made_from(self) -> tuple[object, ...]:
        """What makes two records of one result different."""
        return (self.config_sha256, self.seed, self.code, [(i.role, i.source, i.sha256) for i in self.inputs])


Source = str | Path | Input


def record(
    path: str | Path,
    *,
    inputs: Iterable[Source] | Mapping[str, Source | Iterable[Source]] = (),
    config: Config | None = None,
    kind: str,
    seed: int | None = None,
    grows: bool = False,
) -> Path:
    """Write the lineage of the result at ``path`` (a file or a folder that exists); returns the lineage file.

    inputs: files, folders, sources (`coco:/data/coco?split=val`, `cards:?split=train`), or Input when the hash is known; as a
    mapping their keys say what they were for. seed: default that of the configuration. grows: the result is not done, so it has
    no hash, and what an earlier run in it was made from is kept. Raises MissingFile for a result or an input that is not there.
    """
    path = Path(path)
    if not path.exists():
        raise MissingFile(f"no result {path} to record the lineage of")
    found = Record(
        kind=kind,
        sha256=None if grows else digest(path)[0],
        inputs=[_described(role, source, path) for role, source in _pairs(inputs)],
        config_sha256=config.sha256 if config is not None else None,
        seed=config.run.seed if seed is None and config is not None else seed,
        code=code(),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if grows and (before := read(path)) is not None:
        old = [before.model_copy(update={"earlier": []})] if before.made_from != found.made_from else []
        found = found.model_copy(update={"earlier": [*before.earlier, *old]})
    place = place_of(path)
    write_json(place, found.model_dump(mode="json", exclude_defaults=True) | {"format": 1})
    return place


def place_of(path: str | Path) -> Path:
    """Where the lineage of a result is written."""
    path = Path(path)
    return path / NAME if path.is_dir() else path.with_name(f"{path.name}.{NAME}")


def read(path: str | Path) -> Record | None:
    """The record of exactly this result, None for none. Raises BadInput for one that cannot be read."""
    place = place_of(path)
    if not place.is_file():
        return None
    try:
        return Record.model_validate_json(place.read_bytes())
    except ValidationError as error:
        problem = first_problem(error)
        message = f"{place} is not a lineage file: {problem.path} {problem.message}"
        raise BadInput(message, fix="make the result again") from None


def inherited(path: str | Path, kind: str) -> dict[str, object] | None:
    """The lineage that a result in a run's folder has: that of the run, paths relative to the result; None outside of a run."""
    # Not of what lies there already: it may be an older result of the same name.
    if (found := holder(Path(path).absolute().parent)) is None:
        return None
    place, known = found
    base = Path(path).parent if Path(path).is_file() else Path(path)

    def moved(record: Record) -> Record:
        inputs = [_placed(i, Path(os.path.normpath(place / i.path)), base) if i.path else i for i in record.inputs]
        return record.model_copy(update={"inputs": inputs, "earlier": [moved(e) for e in record.earlier], "kind": kind})

    return moved(known).model_dump(mode="json", exclude_defaults=True) | {"format": 1}


def of_checkpoint(run_dir: str | Path) -> dict[str, object] | None:
    """The lineage that every checkpoint below ``run_dir`` carries: that of its run; None outside of a run."""
    return inherited(Path(run_dir) / "checkpoints" / "step", "checkpoint")


def record_of_run(path: str | Path, kind: str) -> None:
    """Write the lineage of a result that a run made in its folder: what the run was made from, and the result's own hash."""
    if (found := inherited(path, kind)) is None:
        raise MissingFile(f"{path} lies in the folder of no run")
    write_json(place_of(path), found | {"sha256": digest(path)[0]})


def holder(path: str | Path) -> tuple[Path, Record] | None:
    """(result, record) of the result at ``path``, or of the folder up to three levels above that it was made in."""
    path = Path(os.path.abspath(path))
    for place in (path, *list(path.parents)[: 1 if path.is_file() else 3]):
        if (found := read(place)) is not None:
            # Raw material may lie where the product is written; it is not made by itself.
            mine = (Path(os.path.normpath(place / i.path)) for i in found.inputs if i.path)
            return None if place != path and path in mine else (place, found)
    return None


# -- hashes ---------------------------------------------------------------------------------------------------------------------


def digest(path: str | Path, without: Path | None = None) -> tuple[str, int]:
    """(sha256, bytes) of a file's content, of a folder, or of the files that a pattern with `*` names.

    In a folder names and contents count, except: of pictures, clips and sounds names and sizes; of weights above 64 MiB size,
    first block and 64 blocks spread evenly, as `policy.model.fingerprint` does. A checkpoint counts as its checksummed manifest
    says. Hidden files and lineage files do not count, nor does what lies below ``without``. Raises MissingFile.
    """
    path = Path(path)
    if path.is_file():
        return file_sha256(path), path.stat().st_size
    if path.is_dir():
        if (path / MANIFEST).is_file() and is_complete(path):
            files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
            known = {name: entry for name, entry in files.items() if name not in PASSING}
            text = json.dumps(known, sort_keys=True).encode()
            return hashlib.sha256(text).hexdigest(), sum(int(entry["bytes"]) for entry in known.values())
        root, paths = path, [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
        if without is not None:
            outside = Path(os.path.abspath(without))
            paths = [p for p in paths if not Path(os.path.abspath(p)).is_relative_to(outside)]
    else:
        paths = [Path(name) for name in glob.glob(str(path), recursive=True)] if "*" in str(path) else []
        if not paths:
            raise MissingFile(f"no file or folder {path}")
        root = Path(os.path.commonpath([p.parent for p in paths]))
    names = {p.relative_to(root).as_posix(): p for p in paths if p.is_file() and _counts(p.relative_to(root))}
    whole, size = hashlib.sha256(), 0
    for name in sorted(names):
        length = names[name].stat().st_size
        size += length
        whole.update(f"{name}:{length}:".encode())
        if names[name].suffix.lower() not in MEDIA:
            whole.update(_content(names[name], length).encode())
    return whole.hexdigest(), size


def _counts(name: Path) -> bool:
    hidden = any(part.startswith(".") for part in name.parts)
    return not hidden and name.name not in PASSING and not name.name.endswith(f".{NAME}")


def _content(path: Path, size: int) -> str:
    if path.suffix != ".safetensors" or size <= SAMPLED:
        return file_sha256(path)
    some = hashlib.sha256()
    with open(path, "rb") as file:
        for i in range(65):
            file.seek(i * (size - BLOCK) // 64)
            some.update(file.read(BLOCK))
    return some.hexdigest()


@cache
def code() -> Code:
    """The code that runs: version of the package, and commit and state of its checkout when it is one."""
    try:
        number = version("pixelis")
    except PackageNotFoundError:
        number = "unknown"
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", package, *arguments], capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # A package installed into some other project's checkout is none of that project's commits.
    if git("ls-files", "--error-unmatch", "__init__.py") is None or (commit := git("rev-parse", "HEAD")) is None:
        return Code(version=number)
    return Code(version=number, commit=commit, dirty=bool(git("status", "--porcelain", "--", ".")))


# -- the chain ------------------------------------------------------------------------------------------------------------------

State = Literal["ok", "changed", "missing", "unhashed", "cycle"]
SAID = {
    "ok": "",
    "changed": "CHANGED since",
    "missing": "MISSING",
    "unhashed": "generated or remote: nothing to compare",
    "cycle": "CYCLE: it is made from itself",
}


@dataclass(frozen=True)
class Node:
    """A result or a source in a chain. state: what its content is to what the result above it was made from."""

    name: str
    role: str
    state: State
    sha256: str | None
    record: Record | None = None
    sources: tuple[Node, ...] = ()

    def walk(self) -> Iterator[Node]:
        """This node and everything below it."""
        yield self
        for node in self.sources:
            yield from node.walk()

    @property
    def broken(self) -> list[Node]:
        """Nodes that are missing, changed or made from themselves."""
        return [node for node in self.walk() if node.state in ("changed", "missing", "cycle")]


def trace(path: str | Path) -> Node:
    """The chain of a result down to its sources, every hash compared. Raises MissingFile for a result without a lineage."""
    path = Path(os.path.abspath(path))
    if not path.exists():
        raise MissingFile(f"no result {path}")
    if (found := holder(path)) is None:
        raise MissingFile(f"{path} has no lineage", fix="name a result with a lineage.json in or beside it")
    place, known = found
    damaged = (place / MANIFEST).is_file() and not is_complete(place)
    state: State = "ok" if known.sha256 in (None, digest(place)[0]) and not damaged else "changed"
    name = place.name if place == path else f"{place.name} (holds {path.name})"
    return _node(name, "result", state, known.sha256, (place, known), place if place.is_dir() else place.parent, ())


def _node(
    name: str, role: str, state: State, sha256: str | None, held: tuple[Path, Record], root: Path, above: tuple[Path, ...]
) -> Node:
    place, known = held
    if place in above:
        return Node(name, role, "cycle", sha256, known)
    sources = tuple(_source(item, place, root, (*above, place)) for item in known.inputs)
    return Node(name, role, state, sha256, known, sources)


def _source(item: Input, result: Path, root: Path, above: tuple[Path, ...]) -> Node:
    """An input of ``result``, named by its path from ``root``, the folder of the whole chain's result."""
    if item.path is None:
        return Node(item.source, item.role, "unhashed", item.sha256)
    path = Path(os.path.normpath((result if result.is_dir() else result.parent) / item.path))
    name = _placed(item, path, root).source
    try:
        state: State = "ok" if digest(path, without=result)[0] == item.sha256 else "changed"
    except MissingFile:
        return Node(name, item.role, "missing", item.sha256)
    found = holder(path)
    if found is None:
        return Node(name, item.role, state, item.sha256)
    return _node(name, item.role, state, item.sha256, found, root, above)


def tree(node: Node, indent: str = "", last: bool = True, first: bool = True) -> list[str]:
    """The chain as lines of text, results above what they are made from."""
    what = [f"{node.role}: {node.name}"] + ([f"sha256 {node.sha256[:12]}"] if node.sha256 else [])
    if (known := node.record) is not None:
        commit = f" {known.code.commit[:10]}{'+changes' if known.code.dirty else ''}" if known.code.commit else ""
        what += [known.kind, f"pixelis {known.code.version}{commit}", f"seed {known.seed}" if known.seed is not None else ""]
        what += [f"config {known.config_sha256[:12]}" if known.config_sha256 else "", known.made]
        what += [f"resumed after {len(known.earlier)} other settings" if known.earlier else ""]
    what.append(SAID[node.state])
    lines = [("" if first else indent + ("└─ " if last else "├─ ")) + "  ".join(part for part in what if part)]
    below = "" if first else indent + ("   " if last else "│  ")
    for number, source in enumerate(node.sources, 1):
        lines += tree(source, below, number == len(node.sources), first=False)
    return lines


def mermaid(node: Node) -> str:
    """The chain as a Mermaid flowchart, from sources to the result; one box for each content."""
    ids: dict[tuple[str, str | None], str] = {}
    boxes, arrows = [], []

    def box(one: Node) -> str:
        key = (one.name, one.sha256)
        if key not in ids:
            ids[key] = f"n{len(ids)}"
            label = "<br/>".join(part for part in (one.name, (one.sha256 or "")[:12], SAID[one.state]) if part)
            boxes.append(f'  {ids[key]}["{label.replace(chr(34), "#quot;")}"]')
        return ids[key]

    for one in node.walk():
        for source in one.sources:
            arrow = f"  {box(source)} -->|{source.role}| {box(one)}"
            if arrow not in arrows:
                arrows.append(arrow)
    box(node)
    return "\n".join(["flowchart BT", *boxes, *arrows])


# -- inputs ---------------------------------------------------------------------------------------------------------------------


def _pairs(inputs: Iterable[Source] | Mapping[str, Source | Iterable[Source]]) -> list[tuple[str, Source]]:
    if not isinstance(inputs, Mapping):
        return [("input", source) for source in inputs]
    single = (str, Path, Input)
    return [(role, source) for role, v in inputs.items() for source in ([v] if isinstance(v, single) else v)]


def _described(role: str, source: Source, result: Path) -> Input:
    base = result if result.is_dir() else result.parent
    if isinstance(source, Input):
        role = source.role if role == "input" else role
        path = Path(source.path) if source.path else None
        return (_placed(source, path, base) if path else source).model_copy(update={"role": role})
    path = path_in(source)
    if path is None:
        return Input(role=role, source=str(source))
    sha256, size = digest(path, without=result)
    return _placed(Input(role=role, source=str(source), path=str(path), sha256=sha256, bytes=size), path, base)


def _placed(item: Input, path: Path, base: Path) -> Input:
    """The input with its path, and the path inside its source, relative to ``base``; absolute when they share no folder."""
    path, base = Path(os.path.abspath(path)), Path(os.path.abspath(base))
    far = os.path.commonpath([path, base]) == path.anchor
    shown = str(path) if far else os.path.relpath(path, base)
    return item.model_copy(update={"path": shown, "source": item.source.replace(item.path or shown, shown)})


def path_in(source: str | Path) -> Path | None:
    """The local path that a source names (`shop.jsonl`, `coco:/data/coco?split=val`), None for generated and remote ones.

    Raises MissingFile for a path that is not there.
    """
    if isinstance(source, Path) or os.path.exists(source):
        path = Path(source)
    else:
        body = source.partition("?")[0]
        scheme, colon, rest = body.partition(":")
        if "://" in body or (colon and scheme and not rest):
            return None
        path = Path(body)
        if not _is_there(path) and colon:
            if not _is_there(Path(rest)):
                return None
            path = Path(rest)
    if not _is_there(path):
        raise MissingFile(f"no file or folder {path}", fix="a result's inputs must be there when it is made")
    return path


def _is_there(path: Path) -> bool:
    return path.exists() or ("*" in str(path) and bool(glob.glob(str(path), recursive=True)))

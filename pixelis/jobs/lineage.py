"""Trace the inputs of a data set, a checkpoint or a result back to their sources and verify every hash.

usage: pixelis lineage RESULT [--descendants FOLDER]

RESULT is a data set, a run, a checkpoint or a rank file. Exits with 1 if an input has changed, is missing or
depends on itself.

  --descendants FOLDER  list the runs and results in FOLDER that were made from RESULT instead, and the state of each run
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pixelis.config.references import EMBEDDED
from pixelis.errors import MissingFile
from pixelis.jobs.command import command
from pixelis.jobs.run_lock import LEASE_S
from pixelis.policy.checkpoint import MANIFEST, is_complete
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.telemetry import events, lineage

State = Literal["ok", "changed", "missing", "unhashed", "cycle"]
STATE_LABELS = {
    "ok": "",
    "changed": "CHANGED since",
    "missing": "MISSING",
    "unhashed": "generated or remote, cannot be compared",
    "cycle": "CYCLE: made from itself",
}


@dataclass(frozen=True)
class Node:
    """A result or a source; its state compares it with the hash that the result above it recorded."""

    name: str
    role: str
    state: State
    sha256: str | None
    record: lineage.Record | None = None
    sources: tuple[Node, ...] = ()

    def walk(self) -> Iterator[Node]:
        yield self
        for node in self.sources:
            yield from node.walk()

    @property
    def broken(self) -> list[Node]:
        return [node for node in self.walk() if node.state in ("changed", "missing", "cycle")]


def trace(path: str | Path) -> Node:
    """The chain from a result to its sources, with every hash compared. MissingFile without a lineage."""
    path = Path(os.path.abspath(path))
    if not path.exists():
        raise MissingFile(f"{path} does not exist")
    if (located := lineage.find_record(path)) is None:
        raise MissingFile(f"{path} has no lineage", fix="name a result with a lineage.json")
    result, known = located
    damaged = (result / MANIFEST).is_file() and not is_complete(result)
    state: State = "ok" if known.sha256 in (None, lineage.digest(result)[0]) and not damaged else "changed"
    name = result.name if result == path else f"{result.name} (holds {path.name})"
    return _node(
        name, "result", state, known.sha256, located, result if result.is_dir() else result.parent, ()
    )


def _node(
    name: str,
    role: str,
    state: State,
    sha256: str | None,
    located: tuple[Path, lineage.Record],
    root: Path,
    above: tuple[Path, ...],
) -> Node:
    result, known = located
    if result in above:
        return Node(name, role, "cycle", sha256, known)
    sources = tuple(_source(item, result, root, (*above, result)) for item in known.inputs)
    return Node(name, role, state, sha256, known, sources)


def _source(item: lineage.Input, result: Path, root: Path, above: tuple[Path, ...]) -> Node:
    """The node of an input of ``result``, named by its path relative to ``root``."""
    if item.path is None:
        state: State = "unhashed"
        if item.source in EMBEDDED and item.sha256 is not None:
            state = "ok" if fingerprint(resolve(item.source)) == item.sha256 else "changed"
        return Node(item.source, item.role, state, item.sha256)
    path = Path(os.path.normpath((result if result.is_dir() else result.parent) / item.path))
    name = lineage.relative_to(root, item, path).source
    try:
        state = "ok" if lineage.digest(path, without=result)[0] == item.sha256 else "changed"
    except MissingFile:
        return Node(name, item.role, "missing", item.sha256)
    if (located := lineage.find_record(path)) is None:
        return Node(name, item.role, state, item.sha256)
    return _node(name, item.role, state, item.sha256, located, root, above)


def tree(node: Node, indent: str = "") -> list[str]:
    parts = [f"{node.role}: {node.name}", f"sha256 {node.sha256[:12]}" if node.sha256 else ""]
    if (known := node.record) is not None:
        commit, changes = (known.code.commit or "")[:10], "+changes" if known.code.dirty else ""
        parts += [known.kind, f"pixelis {known.code.version} {commit}{changes}".rstrip()]
        parts.append("" if known.seed is None else f"seed {known.seed}")
        parts += [f"config {known.config_sha256[:12]}" if known.config_sha256 else "", known.made]
        parts.append(f"resumed {len(known.earlier)} times with other settings" if known.earlier else "")
    lines = [indent + "  ".join(part for part in (*parts, STATE_LABELS[node.state]) if part)]
    for source in node.sources:
        lines += tree(source, indent + "    ")
    return lines


def descendants(path: Path, folder: Path) -> list[str]:
    """The results in ``folder`` that were made from ``path`` or from what it holds, each above its own."""
    records = dict[Path, lineage.Record]()
    for file in sorted(folder.rglob(f"*{lineage.NAME}")):
        result = (
            file.parent if file.name == lineage.NAME else Path(str(file).removesuffix(f".{lineage.NAME}"))
        )
        if (known := lineage.read(result)) is not None and known.kind != "checkpoint":
            records[result] = known

    def below(source: Path, indent: str, above: tuple[Path, ...]) -> Iterator[str]:
        for result, known in records.items():
            base = result if result.is_dir() else result.parent
            inputs = [Path(os.path.normpath(base / i.path)) for i in known.inputs if i.path]
            if result not in above and any(i == source or source in i.parents for i in inputs):
                yield f"{indent}{result.relative_to(folder)}  {known.kind}  {known.made}  {_progress(result)}".rstrip()
                yield from below(result, indent + "    ", (*above, result))

    return list(below(path, "", (path,)))


def _progress(result: Path) -> str:
    """The last step of a run, and whether it still goes on."""
    steps = [event["step"] for event in events.read(result) if event["kind"].startswith("step/")]
    if not steps:
        return ""
    lock = result / "lock.json"
    if not lock.is_file():
        return f"step {max(steps)}"
    goes_on = time.time() - lock.stat().st_mtime < LEASE_S
    return f"step {max(steps)}, {'running' if goes_on else 'stopped without an end'}"


def main() -> None:
    with command("lineage", __doc__) as parser:
        parser.add_argument("result", type=Path)
        parser.add_argument("--descendants", type=Path)
        arguments = parser.parse_args()
        if arguments.descendants is not None:
            rows = descendants(arguments.result.absolute(), arguments.descendants.absolute())
            print("\n".join(rows) or f"nothing in {arguments.descendants} was made from {arguments.result}")
            return
        node = trace(arguments.result)
        print("\n".join(tree(node)))
        if broken := node.broken:
            text = f"{len(broken)} of {len(list(node.walk()))} have changed or are missing"
            print(f"pixelis lineage: {text}", file=sys.stderr)
            raise SystemExit(1)


if __name__ == "__main__":
    main()

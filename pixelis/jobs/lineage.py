"""Trace the inputs of a data set, a checkpoint or a result back to their sources and verify every hash.

usage: pixelis lineage RESULT [--mermaid] [--help]

RESULT is a file or folder: a data set, a run, a checkpoint or a rank file. Exits with 1 if an input has
changed, is missing or depends on itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pixelis.errors import MissingFile
from pixelis.jobs.command import command
from pixelis.policy.checkpoint import MANIFEST, is_complete
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.telemetry import lineage

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
    """A result or a source in a chain. state: comparison of its content with the hash that the result above
    it recorded."""

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
    """The chain from a result to its sources, with every hash compared. Raises MissingFile for a result
    without a lineage."""
    path = Path(os.path.abspath(path))
    if not path.exists():
        raise MissingFile(f"{path} does not exist")
    if (located := lineage.find_record(path)) is None:
        raise MissingFile(
            f"{path} has no lineage", fix="name a result with a lineage.json in it or beside it"
        )
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
    """The node of an input of ``result``, named by its path relative to ``root``, the folder of the traced
    result."""
    if item.path is None:
        # The embedded model, which lies in the package
        known = item.source == "nano" and item.sha256 is not None
        state: State = (
            "unhashed" if not known else "ok" if fingerprint(resolve("nano")) == item.sha256 else "changed"
        )
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


def tree(node: Node, indent: str = "", last: bool = True, first: bool = True) -> list[str]:
    """The chain as lines of text, each result above its inputs."""
    parts = [f"{node.role}: {node.name}"] + ([f"sha256 {node.sha256[:12]}"] if node.sha256 else [])
    if (known := node.record) is not None:
        commit = (
            f" {known.code.commit[:10]}{'+changes' if known.code.dirty else ''}" if known.code.commit else ""
        )
        parts += [
            known.kind,
            f"pixelis {known.code.version}{commit}",
            f"seed {known.seed}" if known.seed is not None else "",
        ]
        parts += [f"config {known.config_sha256[:12]}" if known.config_sha256 else "", known.made]
        parts += [f"resumed {len(known.earlier)} times with other settings" if known.earlier else ""]
    parts.append(STATE_LABELS[node.state])
    lines = [
        ("" if first else indent + ("└─ " if last else "├─ ")) + "  ".join(part for part in parts if part)
    ]
    below = "" if first else indent + ("   " if last else "│  ")
    for number, source in enumerate(node.sources, 1):
        lines += tree(source, below, number == len(node.sources), first=False)
    return lines


def mermaid(node: Node) -> str:
    """The chain as a Mermaid flowchart from sources to the result, with one box for each content."""
    ids: dict[tuple[str, str | None], str] = {}
    boxes, arrows = [], []

    def box(item: Node) -> str:
        key = (item.name, item.sha256)
        if key not in ids:
            ids[key] = f"n{len(ids)}"
            label = "<br/>".join(
                part for part in (item.name, (item.sha256 or "")[:12], STATE_LABELS[item.state]) if part
            )
            boxes.append(f'  {ids[key]}["{label.replace(chr(34), "#quot;")}"]')
        return ids[key]

    for item in node.walk():
        for source in item.sources:
            arrow = f"  {box(source)} -->|{source.role}| {box(item)}"
            if arrow not in arrows:
                arrows.append(arrow)
    box(node)
    return "\n".join(["flowchart BT", *boxes, *arrows])


def main() -> None:
    """Entry point of `python -m pixelis.jobs.lineage`."""
    with command("lineage", __doc__) as parser:
        parser.add_argument("result")
        parser.add_argument("--mermaid", action="store_true")
        arguments = parser.parse_args()
        node = trace(arguments.result)
        print(mermaid(node) if arguments.mermaid else "\n".join(tree(node)))
        if broken := node.broken:
            print(
                f"pixelis lineage: {len(broken)} of {len(list(node.walk()))} have changed or are missing",
                file=sys.stderr,
            )
            raise SystemExit(1)


if __name__ == "__main__":
    main()

"""List the traces of a service, or show one as text and as a page.

usage: pixelis trace RUN_DIR [TRACE_ID] [--count N] [--out FILE]

RUN_DIR is the folder of a run with `telemetry.traces=file`, or its folder `traces`. Without TRACE_ID the last
traces are listed, the latest first (--count, default 20). TRACE_ID, or its first digits, is what a reply's header
`X-Trace-Id` says: its spans are printed with their times, and drawn on RUN_DIR/traces/TRACE_ID.html or --out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pixelis.errors import MissingFile
from pixelis.jobs.command import command
from pixelis.telemetry import tracing
from pixelis.telemetry.html.filters import age
from pixelis.telemetry.html.render import render, write_page

AFTER_S = 1.0
"""Seconds after a reply within which work still belongs to its request."""


def main() -> None:
    with command("trace", __doc__) as parser:
        parser.add_argument("folder", metavar="RUN_DIR", type=Path)
        parser.add_argument("trace", metavar="TRACE_ID", nargs="?")
        parser.add_argument("--count", type=int, default=20)
        parser.add_argument("--out", type=Path)
        a = parser.parse_args()
        folder = a.folder / tracing.FOLDER if (a.folder / tracing.FOLDER).is_dir() else a.folder
        if not any(folder.glob("*.jsonl")):
            raise MissingFile(
                f"there are no traces in {folder}", fix="start the service with telemetry.traces=file"
            )
        traces = tracing.read(folder)
        if a.trace is None:
            latest = list(reversed(traces.items()))[: a.count]
            print("\n".join(summary(id, spans) for id, spans in latest) or "no traces yet")
            return
        matches = [id for id in traces if id.startswith(a.trace.lower())]
        if len(matches) != 1:
            raise MissingFile(
                f"{len(matches) or 'no'} traces begin with {a.trace}", fix="list them: pixelis trace RUN_DIR"
            )
        rows = tracing.tree(traces[matches[0]])
        print("\n".join(listing(rows)))
        path = write_page(a.out or folder / f"{matches[0]}.html", page(matches[0], rows))
        print(f"page: {path}", file=sys.stderr)


def page(id: str, rows: list[tuple[int, dict[str, Any]]]) -> str:
    bars = [{**span, "depth": depth, "bar": bar(span, rows)} for depth, span in rows]
    first, length = window(rows)
    return render("trace.html", title=f"Trace {id[:8]}", id=id, spans=bars, first=first, seconds=length)


def window(rows: list[tuple[int, dict[str, Any]]]) -> tuple[float, float]:
    """Start and length in seconds of the request and the work right after it; updates may follow much later."""
    root = rows[0][1]
    ends = [span["end"] for _, span in rows if span["start"] <= root["end"] + AFTER_S]
    return root["start"], max(1e-6, max(ends) - root["start"])


def bar(span: dict[str, Any], rows: list[tuple[int, dict[str, Any]]]) -> tuple[float, float] | None:
    """Where a span begins and ends in the window, 0..1; None for a later one."""
    first, length = window(rows)
    start, end = ((span[at] - first) / length for at in ("start", "end"))
    return (max(0.0, start), end) if end <= 1 + 1e-9 else None


def summary(id: str, spans: list[dict[str, Any]]) -> str:
    root = tracing.tree(spans)[0][1]
    status = root["attributes"].get("http.response.status_code", "")
    wait = f"{1000 * (root['end'] - root['start']):.0f} ms"
    return f"{id}  {age(root['start']):>10}  {wait:>9}  {len(spans):>3} spans  {root['name']} {status}"


def listing(rows: list[tuple[int, dict[str, Any]]]) -> list[str]:
    first, lines = rows[0][1]["start"], []
    for depth, span in rows:
        name, failed = ("  " * depth + span["name"])[:34], "  failed" if span["failed"] else ""
        start, end = (1000 * (span[at] - first) for at in ("start", "end"))
        lines.append(f"{name:<34} {span['service']:<10} {start:10.1f} {end - start:10.1f} ms{failed}")
    return lines


if __name__ == "__main__":
    main()

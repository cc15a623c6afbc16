"""Verify and search the audit log of a service.

usage: pixelis audit RUN_DIR [--head HASH] [--event E] [--actor A] [--result R] [--since T] [--until T] [--json]

RUN_DIR is the folder of a run, or its folder `audit`. Recomputes the hash of every line, follows the chain through all files and
names each line that was changed or does not follow the line before it. The event in the file audit.head beside the folder must
be in the chain: otherwise its end was cut off. --head is a hash noted earlier that must be in the chain too; it detects an end
that was cut off together with that file. The other options print matching events; T is 2026-01-31, 2026-01-31T12:00 or seconds
since the epoch (UTC unless a zone is given). Exits with 1 if the chain is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from pixelis.errors import BadConfig
from pixelis.evolution import audit
from pixelis.jobs.command import CommandParser, run_command


def main() -> None:
    """Entry point of `python -m pixelis.jobs.audit`."""
    run_command("audit", __doc__, _run)


def _run(words: list[str]) -> None:
    arguments = _parse(words)
    report = audit.verify(arguments.folder, arguments.head)
    if arguments.search:
        for event in audit.search(
            arguments.folder, arguments.event, arguments.actor, arguments.since, arguments.until, arguments.result
        ):
            print(json.dumps(asdict(event)) if arguments.json else _line(event))
    out = sys.stderr if arguments.search else sys.stdout  # keeps the events on stdout for pipes
    print(f"{report.lines} events in {report.files} files, the last hash is {report.head}", file=out)
    if report.torn:
        print("the last line is incomplete: it is being written, or a crash cut it off; the next start repairs it", file=out)
    for problem in report.problems:
        print(problem, file=out)
    if not report.ok:
        print(f"pixelis audit: the chain is broken in {len(report.problems)} places", file=sys.stderr)
        raise SystemExit(1)
    end = "" if report.anchored else "; it has no anchor, so lines cut off at its end would not show"
    print(f"the chain is intact{end}", file=out)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = CommandParser("audit")
    parser.add_argument("folder", metavar="RUN_DIR", type=Path)
    for name in ("head", "event", "actor", "result"):
        parser.add_argument(f"--{name}")
    for name in ("since", "until"):
        parser.add_argument(f"--{name}", type=_time)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.event is not None and arguments.event not in audit.EVENTS:
        raise BadConfig(f"no event {arguments.event}", fix=f"one of {', '.join(audit.EVENTS)}")
    if arguments.result is not None and arguments.result not in audit.RESULTS:
        raise BadConfig(f"no result {arguments.result}", fix=f"one of {', '.join(audit.RESULTS)}")
    if (arguments.folder / audit.FOLDER).is_dir():
        arguments.folder = arguments.folder / audit.FOLDER
    arguments.search = arguments.json or any(
        getattr(arguments, name) is not None for name in ("event", "actor", "result", "since", "until")
    )
    return arguments


def _time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _line(event: audit.AuditEvent) -> str:
    timestamp = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="milliseconds")
    details = json.dumps(event.details, ensure_ascii=True) if event.details else ""
    return f"{timestamp} {event.event} {event.result} by {json.dumps(event.actor)}: {json.dumps(event.action)} {details}".rstrip()


if __name__ == "__main__":
    main()

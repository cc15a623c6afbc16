"""Check the audit log of a run that served, and search it.

usage: pixelis audit RUN_DIR [--head HASH] [--event E] [--actor A] [--result R] [--since T] [--until T] [--json]

RUN_DIR is the folder of a run, or its folder `audit`. Every line's hash is computed again and the chain followed through all
files; each line that was changed, removed, inserted or moved is named. --head is a hash noted earlier that must be in the chain:
only so is a cut end seen. Any of the others prints the events that match, T being 2026-01-31, 2026-01-31T12:00 or seconds since
the epoch (times without a zone are UTC). Exit code 1 when the chain is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from pixelis.errors import BadConfig, PixelisError
from pixelis.evolution import audit


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadConfig(message, fix="pixelis audit --help")


def main() -> None:
    """Entry point of `python -m pixelis.jobs.audit`."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print((__doc__ or "").strip())
        return
    try:
        asked = _arguments(sys.argv[1:])
        report = audit.verify(asked.folder, asked.head)
        if asked.search:
            for event in audit.search(asked.folder, asked.event, asked.actor, asked.since, asked.until, asked.result):
                print(json.dumps(asdict(event)) if asked.json else _line(event))
    except PixelisError as error:
        print(f"pixelis.jobs.audit: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, BadConfig) else 1) from None
    out = sys.stderr if asked.search else sys.stdout  # what was searched for can be piped
    print(f"{report.lines} events in {report.files} files, the last hash is {report.head}", file=out)
    if report.torn:
        print("the last line is not complete: being written, or cut by a crash; the next start repairs it", file=out)
    for problem in report.problems:
        print(problem, file=out)
    if not report.ok:
        print(f"pixelis.jobs.audit: the chain is broken in {len(report.problems)} places", file=sys.stderr)
        raise SystemExit(1)
    print("the chain is whole", file=out)


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False)
    parser.add_argument("folder", metavar="RUN_DIR", type=Path)
    for name in ("head", "event", "actor", "result"):
        parser.add_argument(f"--{name}")
    for name in ("since", "until"):
        parser.add_argument(f"--{name}", type=_time)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(words)
    if asked.event is not None and asked.event not in audit.EVENTS:
        raise BadConfig(f"no event {asked.event}", fix=f"one of {', '.join(audit.EVENTS)}")
    if asked.result is not None and asked.result not in audit.RESULTS:
        raise BadConfig(f"no result {asked.result}", fix=f"one of {', '.join(audit.RESULTS)}")
    if (asked.folder / audit.FOLDER).is_dir():
        asked.folder = asked.folder / audit.FOLDER
    asked.search = asked.json or any(getattr(asked, name) is not None for name in ("event", "actor", "result", "since", "until"))
    return asked


def _time(written: str) -> float:
    try:
        return float(written)
    except ValueError:
        moment = datetime.fromisoformat(written)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _line(event: audit.AuditEvent) -> str:
    when = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="milliseconds")
    details = json.dumps(event.details, ensure_ascii=True) if event.details else ""
    return f"{when} {event.event} {event.result} by {json.dumps(event.actor)}: {json.dumps(event.action)} {details}".rstrip()


if __name__ == "__main__":
    main()

"""Verify and search the audit log of a service.

usage: pixelis audit RUN_DIR [--head HASH] [--event E] [--actor A] [--result R] [--since T] [--until T] [--json]

RUN_DIR is the folder of a run, or its folder `audit`. Recomputes the hash of every line and names each line that
was changed or does not follow the line before it. The event in audit.head beside the folder, and --head, a hash
noted earlier, must be in the chain: otherwise its end was cut off. The other options print matching events; T is
2026-01-31, 2026-01-31T12:00 or seconds since the epoch (UTC unless a zone is given). Exits with 1 if the chain is
broken.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from pixelis.evolution import audit
from pixelis.jobs.command import command


def main() -> None:
    with command("audit", __doc__) as parser:
        parser.add_argument("folder", metavar="RUN_DIR", type=Path)
        parser.add_argument("--head")
        parser.add_argument("--actor")
        parser.add_argument("--event", choices=audit.EVENTS)
        parser.add_argument("--result", choices=audit.RESULTS)
        parser.add_argument("--since", type=_time)
        parser.add_argument("--until", type=_time)
        parser.add_argument("--json", action="store_true")
        a = parser.parse_args()
        folder = a.folder / audit.FOLDER if (a.folder / audit.FOLDER).is_dir() else a.folder
        report, out = audit.verify(folder, a.head), sys.stdout
        if a.json or any(value is not None for value in (a.event, a.actor, a.result, a.since, a.until)):
            out = sys.stderr  # keeps the events on stdout for pipes
            for event in audit.search(folder, a.event, a.actor, a.since, a.until, a.result):
                if a.json:
                    print(json.dumps(asdict(event)))
                    continue
                moment = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="milliseconds")
                text = f"{moment} {event.event} {event.result} by {json.dumps(event.actor)}: "
                text += f"{json.dumps(event.action)} {json.dumps(event.details) if event.details else ''}"
                print(text.rstrip())
        print(f"{report.lines} events in {report.files} files, the last hash is {report.head}", file=out)
        if report.torn:
            print("the last line is incomplete: it is being written, or a crash cut it off", file=out)
        for problem in report.problems:
            print(problem, file=out)
        if not report.ok:
            print(f"pixelis audit: the chain is broken in {len(report.problems)} places", file=sys.stderr)
            raise SystemExit(1)
        end = "" if report.anchored else "; it has no anchor, so lines cut off at its end would not show"
        print(f"the chain is intact{end}", file=out)


def _time(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


if __name__ == "__main__":
    main()

"""Create, list and revoke the API keys of a service.

usage: pixelis keys create RUN_DIR NAME [--scopes ask,feedback]
       pixelis keys list RUN_DIR [--json]
       pixelis keys revoke RUN_DIR NAME

RUN_DIR is the run.dir of the service, or the file that serve.keys names. `create` prints the key, once: the file
holds only its SHA-256. A running service follows the file.

Scopes: ask (questions), feedback, steer (promote, roll back, pause, review), read (everybody's experiences, the
status and the metrics), users (the `user` of a request names one of several callers, each with an own share of
updates). The key in PIXELIS_API_KEY has every scope. A revoked name may be created again; the new key then sees
what the old one stored.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from pixelis.errors import BadConfig
from pixelis.jobs.command import CommandParser, command
from pixelis.serve.keys import FILE, SCOPES, KeyFile, Scope


def main() -> None:
    with command("keys", __doc__) as parser:
        orders = parser.add_subparsers(dest="order", required=True, parser_class=CommandParser)
        for name in ("create", "list", "revoke"):
            order = orders.add_parser(name)
            order.add_argument("folder", metavar="RUN_DIR", type=Path)
            if name != "list":
                order.add_argument("name", metavar="NAME")
            if name == "create":
                order.add_argument("--scopes", type=_scopes, default=["ask", "feedback"])
            if name == "list":
                order.add_argument("--json", action="store_true")
        a = parser.parse_args()
        file = KeyFile(a.folder if a.folder.suffix == ".json" else a.folder / FILE)
        if a.order == "create":
            print(file.create(a.name, a.scopes))
            print(f"key {a.name}: store it now, it is not shown again", file=sys.stderr)
        elif a.order == "revoke":
            file.revoke(a.name)
            print(f"key {a.name} is revoked")
        elif a.json:
            print(
                json.dumps(
                    [key.model_dump(mode="json", exclude={"digest"}) for key in file.entries()], indent=1
                )
            )
        else:
            for key in file.entries():
                state = f"revoked {_date(key.revoked_at)}" if key.revoked_at is not None else "valid"
                print(f"{key.name}  {','.join(key.scopes)}  created {_date(key.created_at)}  {state}")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _scopes(text: str) -> list[Scope]:
    scopes = [word.strip() for word in text.split(",")]
    for scope in scopes:
        if scope not in SCOPES:
            raise BadConfig(f"no scope {scope!r}", fix=f"some of {','.join(SCOPES)}")
    return [scope for scope in SCOPES if scope in scopes]


if __name__ == "__main__":
    main()

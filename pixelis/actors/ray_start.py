"""Checks where a local Ray cluster writes, and names the cause of a failed start.

Standard library only, because `pixelis doctor` makes the same checks before anything is installed.
"""

from __future__ import annotations

import os
import re
import tempfile
from datetime import datetime
from pathlib import Path

from pixelis.errors import InfraFailure

SOCKET_CHARACTERS = 107
"""Longest path of a Unix socket, in bytes."""
BUSY = "the machine may have been too busy: run the command again"
FIXES = (
    ("Too many open files", "raise the limit of open files: ulimit -n 65536"),
    (
        "start new thread|Resource temporarily unavailable",
        "raise the limit of processes: ulimit -u, or a container's --pids-limit",
    ),
    (
        "No space left|quota exceeded",
        "free the disk of Ray's sessions, or set RAY_TMPDIR to a folder on another disk",
    ),
    ("Version mismatch", "use the versions of Ray and Python that the cluster has"),
    (
        r"\b[Tt]oken",
        "set RAY_AUTH_TOKEN_PATH to the file with the cluster's token, or unset it for a local cluster",
    ),
    ("object_store_memory", "lower cluster.object_store_bytes"),
    ("Invalid.* address", "set RAY_ADDRESS or cluster.address to HOST:PORT of the cluster's head"),
    ("[Tt]imed out|overloaded|Failed to connect", BUSY),
)
"""Patterns of Ray's message or logs, and the fixes of what they tell."""
_LOGGED = re.compile(r"^\[[^\]]* [CEF] \d+ \d+\] \(\w+\) \S+: (.{1,200})", re.MULTILINE)


def session_folder() -> tuple[str, str]:
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        if variable in os.environ:
            return variable, os.environ[variable]
    return "RAY_TMPDIR", "/tmp"  # nosec B108 (Ray's default)


def check_session_folder() -> None:
    variable, folder = session_folder()
    session = f"session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{os.getpid()}"
    characters = len(os.fsencode(os.path.join(folder, "ray", session, "sockets", "plasma_store")))
    if (excess := characters - SOCKET_CHARACTERS) > 0:
        raise InfraFailure(
            f"{variable}={folder} is too long for the path of Ray's socket",
            fix=f"set {variable}=/tmp, or a folder of {len(os.fsencode(folder)) - excess} characters at most",
        )
    fix = f"set {variable}=/tmp, or another folder that you can write to"
    check_writable(Path(folder, "ray"), "Ray's sessions", fix)


def check_token_folder() -> None:
    token = Path(os.path.expanduser("~"), ".ray", "auth_token")
    chosen = os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    if not chosen and os.environ.get("RAY_AUTH_MODE") != "disabled" and not os.path.isfile(token):
        check_writable(token.parent, "Ray's token", "set HOME to a folder that you can write to")


def check_writable(folder: Path, content: str, fix: str) -> None:
    """Write a file in ``folder``, or where that will be created; InfraFailure if that fails."""
    if not folder.is_absolute():  # also without a home folder
        raise InfraFailure(f"{content} cannot be written to {folder}, which is no absolute path", fix=fix)
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        message = f"{content} cannot be written to {folder}: {existing}: {error.strerror}"
        raise InfraFailure(message, fix=fix) from None


def start_failure(error: Exception, address: str | None) -> InfraFailure:
    """The failure to start or join a cluster, with its cause from Ray's message or logs."""
    message = " ".join(str(error).split())[:400] or type(error).__name__
    folder = os.path.join(session_folder()[1], "ray")
    if not address:
        logs = Path(folder).glob(f"session_*_{os.getpid()}/logs/*")
        texts = [
            path.read_text(errors="replace") for path in sorted(logs) if path.stem in ("gcs_server", "raylet")
        ]
        logged = [match[1].strip() for text in texts if (match := _LOGGED.search(text))]
        message += f": {logged[0]}" if logged else ""
    fixes = (fix for pattern, fix in FIXES if re.search(pattern, message))
    fix = next(fixes, "`pixelis doctor` checks this machine")
    if address:
        return InfraFailure(f"the Ray cluster at {address} could not be joined: {message}", fix=fix)
    fix = f"{fix}; Ray's logs are in {folder}/session_latest/logs"
    return InfraFailure(f"Ray did not start: {message}", fix=fix)

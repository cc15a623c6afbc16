"""JSON lines of what a process of a service logs, and of each request, with the id of its trace."""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import threading
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pixelis.telemetry import tracing

if TYPE_CHECKING:
    from pixelis.config import Config

FOLDER = "logs"
MAX_FILE_BYTES = 50_000_000
"""Size at which a log file is closed; the one before it is then deleted."""
MAX_WAITING = 10_000
"""Records that wait for a slow disk; more are dropped."""
_started = threading.Lock()


def start(config: Config, service: str) -> None:
    """Write this process's spans and, if ``telemetry.logs`` is set, its records from now on."""
    tracing.start(config, service)
    if not config.telemetry.logs or not _started.acquire(blocking=False):
        return
    folder = Path(config.run.dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("pixelis")
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING)
    # A thread of its own writes: a disk that hangs must not stop the event loop.
    listener = QueueListener(waiting, _File(folder / f"{service}-{os.getpid()}.jsonl", service))
    listener.start()
    atexit.register(listener.stop)
    logger.addHandler(_Queue(waiting))
    logger.setLevel(logging.INFO)


class _Queue(QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        record.trace_id = tracing.trace_id()
        return super().prepare(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line if the queue is full."""


class _File(RotatingFileHandler):
    def __init__(self, path: Path, service: str):
        super().__init__(path, maxBytes=MAX_FILE_BYTES, backupCount=1, encoding="utf-8", delay=True)
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self.service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace_id := getattr(record, "trace_id", ""):
            line["trace_id"] = trace_id
        return json.dumps(line | getattr(record, "fields", {}), ensure_ascii=False, default=str)

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line if the disk is full."""

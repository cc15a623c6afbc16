"""A client of an OpenAI-compatible API: key from the environment, a rate limit, tries with growing temperature, a cache.

What could not be got within the tries and the budget is a DataFailure that names why, never an invented reply.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import os
import random
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
from PIL import Image

from pixelis.config.synthesis import ChatConfig
from pixelis.errors import BadConfig, DataFailure
from pixelis.rewards.judge import PATIENT, STEP, completion, retry_after

log = logging.getLogger(__name__)

T = TypeVar("T")
WRONG = (401, 403, 404)
"""Replies that say key, model or address are wrong: no other request would fare better."""


class ChatClient:
    """Asks for replies; safe to use from many threads. ``counts``: asked, cached, and causes of failed tries by name.

    ``name`` is the configuration section in messages. BadConfig when url, model or key are missing. ``cache`` is a SQLite file,
    None for memory only.
    """

    def __init__(self, settings: ChatConfig, name: str, cache: str | Path | None = None):
        self.settings, self.name = settings, name
        if not settings.url or not settings.model:
            raise BadConfig(
                f"{name}.url and {name}.model are needed",
                fix="name an OpenAI-compatible server and its model",
            )
        headers = {}
        if settings.api_key_env:
            key = os.environ.get(settings.api_key_env, "")
            if not key:
                raise BadConfig(
                    f"the key of {name} is not in the environment variable {settings.api_key_env}",
                    fix=f"export {settings.api_key_env}=..., or set {name}.api_key_env='' for a server that wants none",
                )
            headers["Authorization"] = f"Bearer {key}"
        self.client = httpx.Client(headers=headers, timeout=settings.timeout_s)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._next = 0.0
        self._known: dict[str, str] = {}
        self._store = _open(cache) if cache is not None and settings.cache else None

    def ask(self, messages: list[dict[str, Any]], read: Callable[[str], T], draw: int = 0) -> T:
        """``read`` of the reply's text; a ValueError of it is another try. ``draw`` tells requests apart that ask the same.

        BadConfig when key, model or address are wrong.
        DataFailure ``chat_timeout``, ``chat_busy``, ``chat_error``, ``chat_refused``, ``chat_garbage`` (no chat completion), or
        ``chat_rejected`` when ``read`` took none of the replies. Only a reply that ``read`` took is kept.
        """
        body = {"model": self.settings.model, "messages": messages, "max_tokens": self.settings.max_tokens}
        return self.post("chat/completions", body, completion, read, draw)

    def post(
        self, path: str, body: dict[str, Any], extract: Callable[[bytes], str], read: Callable[[str], T], draw: int = 0
    ) -> T:
        """``ask`` for any endpoint below the url: ``extract`` takes from a reply what is kept, ValueError when it is garbage."""
        s = self.settings
        asked = json.dumps([path, s.temperature, body, draw], sort_keys=True)
        key = hashlib.sha256(asked.encode()).hexdigest()
        if (kept := self._remember(key)) is not None:
            try:
                value = read(kept)
                self.counts["cached"] += 1
                return value
            except ValueError:
                pass  # what counts as a usable reply has changed since
        deadline = time.monotonic() + s.budget_s
        failure = DataFailure(f"{self.name} was not asked", code="chat_timeout")
        for attempt in range(s.tries):
            if not self._take_turn(deadline):
                break
            left = deadline - time.monotonic()
            if left <= 0:
                break
            wait = min(0.25 * 2**attempt, 8.0) * random.uniform(0.75, 1.25)
            try:
                request = {**body, "temperature": round(min(2.0, s.temperature + STEP * attempt), 3)}
                text = self._reply(path, request, extract, min(s.timeout_s, left), wait)
                value = read(text)
            except ValueError as error:
                failure, wait = DataFailure(f"{self.name}: {error}", code="chat_rejected"), 0.0
            except _Again as again:
                failure, wait = again.failure, again.wait
            else:
                self._keep(key, text)
                return value
            with self._lock:
                self.counts[failure.code] += 1
            if attempt + 1 < s.tries:
                time.sleep(max(0.0, min(wait, deadline - time.monotonic())))
        raise failure

    def close(self) -> None:
        """Close connections and the cache."""
        self.client.close()
        if self._store is not None:
            self._store.close()

    def _reply(self, path: str, request: dict[str, Any], extract: Callable[[bytes], str], timeout: float, wait: float) -> str:
        with self._lock:
            self.counts["asked"] += 1
        try:
            reply = self.client.post(f"{str(self.settings.url).rstrip('/')}/{path}", json=request, timeout=timeout)
        except httpx.TimeoutException:
            raise _Again(DataFailure(f"{self.name} took longer than {timeout:g} s", code="chat_timeout"), wait) from None
        except httpx.HTTPError as error:
            raise _Again(DataFailure(f"{self.name}: {type(error).__name__}", code="chat_error"), wait) from None
        if reply.status_code != 200:
            failure = f"{self.name} replied {reply.status_code}"
            if reply.status_code in WRONG:
                fix = f"look at {self.name}.url, .model and .api_key_env"
                raise BadConfig(f"{failure}: {reply.text[:200]}", fix=fix)
            if reply.status_code not in PATIENT and reply.status_code < 500:
                raise DataFailure(f"{failure}: {reply.text[:200]}", code="chat_refused")
            code = "chat_busy" if reply.status_code == 429 else "chat_error"
            raise _Again(DataFailure(failure, code=code), retry_after(reply.headers.get("Retry-After"), wait))
        try:
            return extract(reply.content)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise _Again(DataFailure(f"{self.name}: the reply is not one of {path}", code="chat_garbage"), 0.0) from None

    def _take_turn(self, deadline: float) -> bool:
        """Wait for the rate limit: requests start at even distances. False when that would be after ``deadline``."""
        with self._lock:
            at = max(self._next, time.monotonic())
            if at > deadline:
                return False
            self._next = at + 60.0 / self.settings.calls_per_minute
        time.sleep(max(0.0, at - time.monotonic()))
        return True

    def _remember(self, key: str) -> str | None:
        with self._lock:
            if key not in self._known and self._store is not None:
                row = self._store.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    self._known[key] = str(row[0])
            return self._known.get(key)

    def _keep(self, key: str, text: str) -> None:
        with self._lock:
            self._known[key] = text
            if self._store is not None:
                try:
                    with self._store:
                        self._store.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, text))
                except sqlite3.Error as error:  # a full disk costs the cache, not the run
                    log.warning("a reply was not kept: %s", error)


class _Again(Exception):
    """A try that failed in a way that another may not."""

    def __init__(self, failure: DataFailure, wait: float):
        super().__init__(failure.message)
        self.failure, self.wait = failure, wait


def picture_part(view: np.ndarray) -> dict[str, Any]:
    """A uint8 [h, w, 3] picture as a part of a message."""
    return {"type": "image_url", "image_url": {"url": data_url(view)}}


def data_url(view: np.ndarray) -> str:
    """A uint8 [h, w, 3] picture as a PNG in a ``data:`` URL."""
    file = io.BytesIO()
    Image.fromarray(view).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _open(path: str | Path) -> sqlite3.Connection:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    store = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
    store.execute("PRAGMA journal_mode=WAL")
    with store:
        store.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
    return store

"""The one client of language-model services: OpenAI-compatible, with a cache, a rate limit, and tries with growing temperature.

What could not be had within the tries and the budget is a DataFailure that names why, never an invented reply.
"""

from __future__ import annotations

import hashlib
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
from typing import Any, Protocol, TypeVar

from pixelis.errors import BadConfig, DataFailure

log = logging.getLogger(__name__)

T = TypeVar("T")
STEP = 0.2
"""Temperature added with each try: a model that talked nonsense once would do so again at 0."""
PATIENT = (408, 409, 425, 429)
"""Replies of the 4xx family that another try may change."""
WRONG = (401, 403, 404)
"""Replies that say that key, model or address are wrong: no other request would fare better."""
LONGEST_WAIT_S = 60.0


class LlmSettings(Protocol):
    """The keys that every section about a language-model service has."""

    @property
    def url(self) -> str | None: ...
    @property
    def model(self) -> str: ...
    @property
    def api_key_env(self) -> str: ...
    @property
    def tries(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def budget_s(self) -> float: ...
    @property
    def cache(self) -> bool: ...


class LlmClient:
    """Asks for replies; safe to use from many threads. ``counts``: asked, cached, and causes of failed tries by name.

    ``section`` is the configuration section in messages, ``code`` the prefix of failure codes. ``cache`` is a SQLite file, None
    for memory only. ``calls_per_minute`` spaces the starts of requests evenly, ``concurrency`` bounds those in flight. BadConfig
    when url, model or key are missing; ``fix`` says what else would do.
    """

    def __init__(
        self,
        settings: LlmSettings,
        section: str,
        cache: str | Path | None = None,
        *,
        code: str = "chat",
        calls_per_minute: float | None = None,
        concurrency: int | None = None,
        fix: str = "",
    ):
        self.settings, self.section, self.code, self.calls_per_minute = settings, section, code, calls_per_minute
        if not settings.url or not settings.model:
            wanted = "name an OpenAI-compatible server and its model"
            raise BadConfig(f"{section}.url and {section}.model are needed", fix=f"{wanted}, or {fix}" if fix else wanted)
        key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
        if settings.api_key_env and not key:
            raise BadConfig(
                f"the key of {section} is not in the environment variable {settings.api_key_env}",
                fix=f"export {settings.api_key_env}=..., or set {section}.api_key_env='' for a server that needs none",
            )
        # Half a second, which only those pay who ask a model.
        import httpx2
        import openai

        # Nothing of the user's OpenAI account goes to another server, and no redirect is followed to one.
        self._headers: dict[str, Any] = {name: openai.Omit() for name in ("OpenAI-Organization", "OpenAI-Project")}
        self._headers["Authorization"] = f"Bearer {key}" if key else openai.Omit()
        self.openai, self.response = openai, httpx2.Response
        self.client = openai.OpenAI(
            base_url=settings.url,
            api_key=key or "none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(follow_redirects=False, limits=httpx2.Limits(max_connections=concurrency)),
        )
        self.counts: Counter[str] = Counter()
        self._slots = threading.Semaphore(concurrency or 2**20)
        self._lock = threading.Lock()
        self._next_start = 0.0
        self._replies: dict[str, str] = {}
        self._store = _open(cache) if cache is not None and settings.cache else None

    def ask(
        self,
        messages: list[dict[str, Any]],
        read: Callable[[str], T],
        draw: int = 0,
        *,
        temperature: float = 0.0,
        max_tokens: int = 1024,
    ) -> T:
        """``read`` of the reply's text; its ValueError is another try. ``draw`` tells requests apart that ask the same.

        DataFailure ``CODE_timeout``, ``CODE_busy``, ``CODE_error``, ``CODE_refused``, ``CODE_garbage`` (no chat completion), or
        ``CODE_rejected`` when ``read`` accepted none of the replies. Only a reply that ``read`` accepted is cached.
        """
        body = {"model": self.settings.model, "messages": messages, "max_tokens": max_tokens}
        return self.post("chat/completions", body, completion, read, draw, temperature)

    def post(
        self,
        path: str,
        body: dict[str, Any],
        extract: Callable[[bytes], str],
        read: Callable[[str], T],
        draw: int = 0,
        temperature: float = 0.0,
    ) -> T:
        """``ask`` for any endpoint below the url; ``extract`` takes what is cached from a reply, ValueError for garbage."""
        s = self.settings
        key = hashlib.sha256(json.dumps([path, temperature, body, draw], sort_keys=True).encode()).hexdigest()
        if (cached := self._cached(key)) is not None:
            try:
                value = read(cached)
                self._count("cached")
                return value
            except ValueError:
                pass  # what counts as a usable reply has changed since
        failure = DataFailure(f"{self.section} was not asked", code=f"{self.code}_timeout")
        with self._slots:
            deadline = time.monotonic() + s.budget_s  # waiting for a slot is not charged to the request
            for attempt in range(s.tries):
                if not self._wait_for_turn(deadline) or (left := deadline - time.monotonic()) <= 0:
                    break
                wait = min(0.25 * 2**attempt, 8.0) * random.uniform(0.75, 1.25)
                request = {**body, "temperature": round(min(2.0, temperature + STEP * attempt), 3)}
                try:
                    text = self._reply(path, request, extract, min(s.timeout_s, left), wait)
                    value = read(text)
                except ValueError as error:
                    failure, wait = DataFailure(f"{self.section}: {error}", code=f"{self.code}_rejected"), 0.0
                except _Again as again:
                    failure, wait = again.failure, again.wait
                else:
                    self._keep(key, text)
                    return value
                self._count(failure.code)
                if attempt + 1 < s.tries:
                    time.sleep(max(0.0, min(wait, deadline - time.monotonic())))
        raise failure

    def close(self) -> None:
        """Close connections and the cache."""
        self.client.close()
        if self._store is not None:
            self._store.close()

    def _reply(self, path: str, request: dict[str, Any], extract: Callable[[bytes], str], timeout: float, wait: float) -> str:
        def again(what: str, message: str, seconds: float) -> _Again:
            return _Again(DataFailure(f"{self.section} {message}", code=f"{self.code}_{what}"), seconds)

        self._count("asked")
        try:
            options: Any = {"timeout": timeout, "headers": self._headers}
            reply = self.client.post(f"/{path}", cast_to=self.response, body=request, options=options)
        except self.openai.APITimeoutError:
            raise again("timeout", f"took longer than {timeout:g} s", wait) from None
        except self.openai.APIConnectionError as error:
            raise again("error", f"cannot be reached: {type(error.__cause__ or error).__name__}", wait) from None
        except self.openai.APIStatusError as error:
            status, text = error.status_code, error.response.text[:200]
            if status not in PATIENT and status < 500:
                raise self._refusal(status, text) from None
            what = "busy" if status == 429 else "error"
            raise again(what, f"replied {status}", retry_after(error.response.headers.get("Retry-After"), wait)) from None
        try:
            return extract(reply.content)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise again("garbage", f"gave a reply that is not one of {path}", 0.0) from None

    def _refusal(self, status: int, text: str) -> DataFailure | BadConfig:
        """What a reply that no other try can change becomes: it ends the job when key, model or address are wrong."""
        message = f"{self.section} replied {status}: {text}"
        if status in WRONG:
            return BadConfig(message, fix=f"correct {self.section}.url, .model or .api_key_env")
        return DataFailure(message, code=f"{self.code}_refused")

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _wait_for_turn(self, deadline: float) -> bool:
        """Wait for the rate limit; False when the turn would come after ``deadline``."""
        if self.calls_per_minute is None:
            return True
        with self._lock:
            start = max(self._next_start, time.monotonic())
            if start > deadline:
                return False
            self._next_start = start + 60.0 / self.calls_per_minute
        time.sleep(max(0.0, start - time.monotonic()))
        return True

    def _cached(self, key: str) -> str | None:
        with self._lock:
            if key not in self._replies and self._store is not None:
                row = self._store.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    self._replies[key] = str(row[0])
            return self._replies.get(key)

    def _keep(self, key: str, text: str) -> None:
        with self._lock:
            self._replies[key] = text
            if self._store is not None:
                try:
                    with self._store:
                        self._store.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, text))
                except sqlite3.Error as error:  # a full disk costs the cache, not the run
                    log.warning("a reply of %s was not cached: %s", self.section, error)


class _Again(Exception):
    """A try that failed in a way that another may not."""

    def __init__(self, failure: DataFailure, wait: float):
        super().__init__(failure.message)
        self.failure, self.wait = failure, wait


def completion(body: bytes) -> str:
    """The text of a chat completion; ValueError for anything else."""
    try:
        message = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise ValueError("the reply is no chat completion") from None
    if not isinstance(message, str):
        raise ValueError("the reply has no text")
    return message


def json_object(text: str) -> dict[str, Any]:
    """The one JSON object of a reply; thoughts before ``</think>`` and a code fence are cut off. ValueError."""
    plain = text.strip()
    plain = plain if plain.startswith("{") else plain.rpartition("</think>")[2].strip()
    if plain.startswith("```") and plain.endswith("```"):
        plain = plain.removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    try:
        value = json.loads(plain)
    except (ValueError, RecursionError):
        raise ValueError(f"{plain[:80]!r} is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"{plain[:80]!r} is not an object")
    return value


def retry_after(text: str | None, otherwise: float) -> float:
    """Seconds that a ``Retry-After`` header asks for, a minute at most; ``otherwise`` without a number."""
    try:
        return min(max(float(text or ""), 0.0), LONGEST_WAIT_S)
    except ValueError:
        return otherwise


def _open(path: str | Path) -> sqlite3.Connection:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    store = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
    store.execute("PRAGMA journal_mode=WAL")
    with store:
        store.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
    return store

"""The client of OpenAI-compatible language-model services: cache, rate limit, retries with rising temperature."""

from __future__ import annotations

import contextlib
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
from typing import Any, TypeVar

from pixelis.config.llm import LlmConfig
from pixelis.errors import BadConfig, DataFailure

log = logging.getLogger(__name__)

T = TypeVar("T")
Reply = TypeVar("Reply")
TEMPERATURE_STEP = 0.2
"""Added with each try: at temperature 0 an invalid reply would repeat."""
RETRIED = (408, 409, 425, 429)
"""4xx status codes that are retried."""
MISCONFIGURED = (401, 403, 404)
"""Status codes that every request would get."""
MAX_WAIT_S = 60.0


class LlmClient:
    """Requests replies; thread-safe. ``counts``: ``asked``, ``cached``, and failed tries by code.

    ``code``: prefix of failure codes; ``cache``: SQLite file, None for memory only; ``fix``: an alternative
    for messages.
    """

    def __init__(
        self,
        settings: LlmConfig,
        section: str,
        cache: str | Path | None = None,
        *,
        code: str = "chat",
        calls_per_minute: float | None = None,
        concurrency: int | None = None,
        fix: str = "",
        temperature_step: float = TEMPERATURE_STEP,
    ):
        self.temperature_step = temperature_step
        self.settings = settings
        self.section = section
        self.code = code
        self.calls_per_minute = calls_per_minute
        if not settings.url or not settings.model:
            required = "name an OpenAI-compatible server and its model"
            raise BadConfig(
                f"{section}.url and {section}.model are needed",
                fix=f"{required}, or {fix}" if fix else required,
            )
        key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
        if settings.api_key_env and not key:
            raise BadConfig(
                f"the environment variable {settings.api_key_env} with the key of {section} is not set",
                fix=(
                    f"export {settings.api_key_env}=..., or set {section}.api_key_env='' for a server that "
                    "needs none"
                ),
            )
        import httpx2  # importing both takes half a second
        import openai

        # Another server must get nothing of the user's OpenAI account, and redirects are not followed.
        self._headers: dict[str, Any] = {
            name: openai.Omit() for name in ("OpenAI-Organization", "OpenAI-Project")
        }
        self._headers["Authorization"] = f"Bearer {key}" if key else openai.Omit()
        self.openai, self.response = openai, httpx2.Response
        self.client = openai.OpenAI(
            base_url=settings.url,
            api_key=key or "none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(
                follow_redirects=False, limits=httpx2.Limits(max_connections=concurrency)
            ),
        )
        self.counts: Counter[str] = Counter()
        self.stopping = threading.Event()
        """Ends waits and further tries of the requests in flight."""
        self._slots = threading.Semaphore(concurrency or 2**20)
        self._lock = threading.Lock()
        self._next_start = 0.0
        if cache is not None:
            Path(cache).parent.mkdir(parents=True, exist_ok=True)
        self._store = sqlite3.connect(cache or ":memory:", timeout=30.0, check_same_thread=False)
        self._store.execute("PRAGMA journal_mode=WAL")
        with self._store:
            self._store.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)"
            )

    def ask(
        self,
        messages: list[dict[str, Any]],
        read: Callable[[str], T],
        draw: int = 0,
        *,
        temperature: float = 0.0,
        max_tokens: int = 1024,
    ) -> T:
        """The value of ``read`` for the reply's text; a ValueError of it is retried.

        ``draw`` distinguishes equal requests in the cache. DataFailure ``CODE_timeout``, ``_busy``,
        ``_error``, ``_refused``, ``_garbage`` (no chat completion) or ``_rejected`` (by ``read``).
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
        """``ask`` for any endpoint; ``extract`` gets the text from a reply's body."""
        key = hashlib.sha256(json.dumps([path, temperature, body, draw], sort_keys=True).encode()).hexdigest()
        with self._lock:
            row = self._store.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        if row is not None:
            try:
                value = read(row[0])
                self._count("cached")
                return value
            except ValueError:
                pass  # `read` accepts other replies than when this one was cached
        text, value = self.request(path, body, extract, lambda text: (text, read(text)), temperature)
        try:
            with self._lock, self._store:
                self._store.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, text))
        except sqlite3.Error as error:  # the run continues without the cache
            log.warning("a reply of %s was not cached: %s", self.section, error)
        return value

    def request(
        self,
        path: str,
        body: dict[str, Any],
        extract: Callable[[bytes], Reply],
        read: Callable[[Reply], T],
        temperature: float | None = None,
    ) -> T:
        """``post`` without the cache; ``extract`` may get any value from a reply's body."""
        s = self.settings
        failure = DataFailure(f"{self.section}: no time for a request", code=f"{self.code}_timeout")
        with self._slots:
            deadline = time.monotonic() + s.total_timeout_s  # excludes the wait for a slot
            for attempt in range(s.tries):
                if (
                    not self._wait_for_rate(deadline)
                    or (left := deadline - time.monotonic()) <= 0
                    or self.stopping.is_set()
                ):
                    break
                wait = min(0.25 * 2**attempt, 8.0) * random.uniform(0.75, 1.25)
                if temperature is not None:
                    raised = min(2.0, temperature + self.temperature_step * attempt)
                    body = {**body, "temperature": round(raised, 3)}
                try:
                    return read(self._reply(path, body, extract, min(s.timeout_s, left), wait))
                except ValueError as error:
                    failure, wait = DataFailure(f"{self.section}: {error}", code=f"{self.code}_rejected"), 0.0
                except _Retry as retry:
                    failure, wait = retry.failure, retry.wait
                self._count(failure.code)
                if attempt + 1 < s.tries:
                    self.stopping.wait(max(0.0, min(wait, deadline - time.monotonic())))
        raise failure

    def close(self) -> None:
        self.stopping.set()
        self.client.close()
        with self._lock:  # sqlite must not close while another thread uses it
            self._store.close()

    def _reply(
        self, path: str, request: dict[str, Any], extract: Callable[[bytes], T], timeout: float, wait: float
    ) -> T:
        def retry(cause: str, message: str, seconds: float) -> _Retry:
            return _Retry(DataFailure(f"{self.section} {message}", code=f"{self.code}_{cause}"), seconds)

        self._count("asked")
        try:
            options: Any = {"timeout": timeout, "headers": self._headers}
            reply = self.client.post(f"/{path}", cast_to=self.response, body=request, options=options)
        except self.openai.APITimeoutError:
            raise retry("timeout", f"took longer than {timeout:g} s", wait) from None
        except self.openai.APIConnectionError as error:
            raise retry(
                "error", f"cannot be reached: {type(error.__cause__ or error).__name__}", wait
            ) from None
        except self.openai.APIStatusError as error:
            status, text = error.status_code, error.response.text[:200]
            if status not in RETRIED and status < 500:
                raise self._refusal(status, text) from None
            with contextlib.suppress(ValueError):
                wait = min(max(float(error.response.headers.get("Retry-After", "")), 0.0), MAX_WAIT_S)
            raise retry("busy" if status == 429 else "error", f"replied {status}", wait) from None
        try:
            return extract(reply.content)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise retry("garbage", f"sent a reply that is not one of {path}", 0.0) from None

    def _refusal(self, status: int, text: str) -> DataFailure | BadConfig:
        """The error for a reply that is not retried."""
        message = f"{self.section} replied {status}: {text}"
        if status in MISCONFIGURED:
            return BadConfig(message, fix=f"correct {self.section}.url, .model or .api_key_env")
        return DataFailure(message, code=f"{self.code}_refused")

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _wait_for_rate(self, deadline: float) -> bool:
        """False beyond ``deadline``."""
        if self.calls_per_minute is None:
            return True
        with self._lock:
            start = max(self._next_start, time.monotonic())
            if start > deadline:
                return False
            self._next_start = start + 60.0 / self.calls_per_minute
        time.sleep(max(0.0, start - time.monotonic()))
        return True


class _Retry(Exception):
    def __init__(self, failure: DataFailure, wait: float):
        super().__init__(failure.message)
        self.failure, self.wait = failure, wait


def completion(body: bytes) -> str:
    """The text of a chat completion's body; ValueError for anything else."""
    try:
        message = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise ValueError("the reply is not a chat completion") from None
    if not isinstance(message, str):
        raise ValueError("the reply has no text")
    return message


def json_object(text: str) -> dict[str, Any]:
    """The JSON object of a reply, without thoughts before ``</think>`` and a code fence; ValueError."""
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

"""Services of scoring: worker processes for formulas and users' functions, the judge, threads, counters."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pixelis.config import RewardsConfig
from pixelis.config.references import is_function
from pixelis.errors import BadConfig, BadInput, DataFailure
from pixelis.records import Question, Trajectory
from pixelis.rewards.judge import GradingJudge, Judge
from pixelis.rewards.worker_pool import WorkerPool

PUBLIC = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables of the workers for formulas, which need no keys."""

WORKERS = 2
"""Processes of a scorer that compare formulas, and as many that run users' functions."""
MATH_BYTES = 2_000_000_000
OVERALL = "overall"


class Services:
    """Opens each service on first use and closes all in ``close``; thread-safe.

    ``counts``: causes and statuses; ``seconds``: (calls, total, longest) by scorer and own reward.
    """

    def __init__(self, settings: RewardsConfig, run_dir: str | Path | None = None):
        self.settings, self.run_dir = settings, run_dir
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, tuple[int, float, float]] = {}
        self._opened: dict[str, Any] = {}
        self._lock = threading.RLock()

    def check(self) -> None:
        """Raise BadConfig for a judge that lacks settings, and for own functions that cannot be called."""
        if self.settings.judge.required or self.settings.judge.url:
            self._judge("judge", Judge)
        if self.settings.own:
            _ = self.takes_group
        names = {f"tasks.{name}.scorer": task.scorer for name, task in self.settings.tasks.items()}
        names |= {"scorer": self.settings.scorer, "extractor": self.settings.extractor}
        for key, name in names.items():
            if name and is_function(name):
                self._check_function("check_text", name, f"rewards.{key}")

    def note(self, status: str) -> None:
        with self._lock:
            self.counts[status] += 1

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            duration = time.monotonic() - started
            with self._lock:
                calls, total, longest = self.seconds.get(name, (0, 0.0, 0.0))
                self.seconds[name] = (calls + 1, total + duration, max(longest, duration))

    def metrics(self) -> dict[str, float]:
        """Counts, mean and longest seconds, and numbers of replaced workers."""
        with self._lock:
            metrics = {f"scorer/{name}": float(count) for name, count in sorted(self.counts.items())}
            for name, (calls, total, longest) in sorted(self.seconds.items()):
                metrics[f"scorer_seconds/{name}_mean"] = total / calls
                metrics[f"scorer_seconds/{name}_max"] = longest
            for name in ("math", "own"):
                if name in self._opened:
                    metrics[f"scorer/{name}_replaced"] = float(self._opened[name].replaced)
        return metrics

    def math(self, answer: str, truths: Sequence[str]) -> float:
        """1.0 when the formulas are equal. DataFailure when the truths cannot be compared at all."""
        request: dict[str, Any] = {"task": "math", "truths": list(truths)}
        try:
            return float(self._compare({**request, "answer": answer}))
        except DataFailure as failure:
            if failure.code == "truth_unparsable":
                raise
            cause = failure.code
        if cause == "answer_unparsable":
            self.note("parse_fail")
            return 0.0
        # The answer is to blame only if the same truths can be compared with another.
        self._compare({**request, "answer": "1"})
        self.note(f"math_{cause}")
        return 0.0

    def system(self, name: str, reply: str | None, truths: Sequence[str]) -> float:
        """The score of a comparison of ``system_scorers``; 0 without a reply, and when the comparison fails."""
        if reply is None:
            return 0.0
        try:
            return float(
                self._compare({"task": "system", "name": name, "reply": reply, "truths": list(truths)})
            )
        except DataFailure as failure:
            self.note(f"math_{failure.code}")
            return 0.0

    def _compare(self, request: dict[str, Any]) -> Any:
        """The value of a comparison, repeated once if its process ended."""
        try:
            return self.math_workers.call(request)
        except DataFailure as failure:
            if failure.code != "crashed":
                raise
        return self.math_workers.call(request)

    def equal(self, name: str, answer: str | None, truths: Sequence[str]) -> float:
        """The best score of a user's function of (answer, truth); 0 without an answer."""
        if answer is None:
            return 0.0
        scores = []
        for truth in truths:
            arguments = [answer, truth]
            value = finite(self.own_workers.call({"task": "text", "name": name, "arguments": arguments}))
            if isinstance(value, DataFailure):
                raise value
            scores.append(value)
        return max(scores)

    def extract(self, name: str, text: str) -> str | None:
        value = self.own_workers.call({"task": "text", "name": name, "arguments": [text]})
        if value is not None and not isinstance(value, str):
            raise DataFailure(f"{name} returned {type(value).__name__}", code="wrong_type")
        return value

    def readable(self, answer: str) -> bool:
        """Whether the formula can be parsed and compared within the timeout."""
        try:
            self._compare({"task": "math", "truths": ["1"], "answer": answer})
        except DataFailure as failure:
            self.note("parse_fail" if failure.code == "answer_unparsable" else f"math_{failure.code}")
            return False
        return True

    def judge(self, question: str, truths: Sequence[str], answer: str) -> float:
        """1.0 when the judge accepts the answer."""
        return self._judge("judge", Judge).score(question, truths, answer)

    def grade(self, question: str, truths: Sequence[str], answer: str) -> float:
        """The judge's grade in tenths."""
        return self._judge("grading_judge", GradingJudge).score(question, truths, answer)

    def _judge(self, name: str, kind: type[Judge]) -> Judge:
        if not (settings := self.settings.judge).url and not settings.required:
            fix = "set rewards.judge.url and rewards.judge.model, or another rewards.scorer"
            raise BadInput("a question needs a judge and none is configured", code="no_judge", fix=fix)
        cache = Path(self.run_dir) / "judge.sqlite" if self.run_dir is not None else None
        return self._once(name, lambda: kind(settings, cache))

    def own(
        self, name: str, trajectories: Sequence[Trajectory], question: Question, step: int
    ) -> list[dict[str, float] | DataFailure]:
        """Value of a user's function for each rollout, or the failure; a dict has more metrics than ``overall``."""
        rows = [t.model_dump(mode="json") for t in trajectories]
        fields = {"task": "own", "name": name, "question": question.model_dump(mode="json"), "step": step}

        def call(part: list[dict[str, Any]]) -> list[dict[str, float] | DataFailure]:
            try:
                with self.timed(name):
                    value = self.own_workers.call({**fields, "trajectories": part})
            except DataFailure as failure:
                return [failure] * len(part)
            values = value if self.takes_group[name] else [value]
            if not isinstance(values, list):
                return [DataFailure(f"{name} returned no list", code="wrong_type")] * len(part)
            if len(values) != len(part):
                message = f"{name} returned {len(values)} values for {len(part)} trajectories"
                return [DataFailure(message, code="wrong_length")] * len(part)
            return [_metrics(v) for v in values]

        if self.takes_group[name]:
            return call(rows)
        return [value for values in self.threads.map(call, [[r] for r in rows]) for value in values]

    @property
    def threads(self) -> ThreadPoolExecutor:
        count = 2 * WORKERS + self.settings.judge.concurrency
        return self._once("threads", lambda: ThreadPoolExecutor(count, "scorer"))

    @property
    def takes_group(self) -> dict[str, bool]:
        """Whether each own reward takes a whole group; BadConfig for one that cannot be called."""

        return self._once(
            "takes_group",
            lambda: {n: self._check_function("check_own", n, "rewards.own") for n in self.settings.own},
        )

    def _check_function(self, task: str, name: str, key: str) -> bool:
        try:
            return bool(self.own_workers.call({"task": task, "name": name}, timeout_s=60.0))
        except DataFailure as failure:
            fix = "name a function that can be imported and takes these arguments"
            raise BadConfig(f"{key} `{name}`: {failure.message}", fix=fix) from None

    @property
    def math_workers(self) -> WorkerPool:
        timeout_s = self.settings.timeout_s
        environment = {key: os.environ[key] for key in PUBLIC if key in os.environ}
        return self._once(
            "math", lambda: WorkerPool(WORKERS, timeout_s, MATH_BYTES, environment, warm="warm_math")
        )

    @property
    def own_workers(self) -> WorkerPool:
        return self._once("own", lambda: WorkerPool(WORKERS, self.settings.timeout_s))

    def _once(self, name: str, factory: Callable[[], Any]) -> Any:
        with self._lock:
            if name not in self._opened:
                self._opened[name] = factory()
            return self._opened[name]

    def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, {}
        if "threads" in opened:
            opened["threads"].shutdown(wait=False, cancel_futures=True)
        for name in ("math", "own", "judge", "grading_judge"):
            if name in opened:
                opened[name].close()


def _metrics(value: Any) -> dict[str, float] | DataFailure:
    """A user's numbers, or the first failure."""
    result: dict[str, float] = {}
    for key, item in (value if isinstance(value, dict) else {OVERALL: value}).items():
        number = finite(item)
        if isinstance(number, DataFailure):
            return number
        result[str(key)] = number
    return result if OVERALL in result else DataFailure(f"a reward without `{OVERALL}`", code="no_overall")


def finite(value: Any) -> float | DataFailure:
    """A finite number as a float, or the failure ``wrong_type`` or ``not_finite``."""
    if not isinstance(value, (int, float)):
        return DataFailure(f"{type(value).__name__} is not a number", code="wrong_type")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else DataFailure(f"{value} is not finite", code="not_finite")


_shared: dict[str, Services] = {}
_shared_lock = threading.Lock()


def shared_services(settings: RewardsConfig) -> Services:
    """This process's services for these settings, closed at exit; for callers that score occasionally."""
    key = json.dumps(settings.model_dump(mode="json"), sort_keys=True)
    with _shared_lock:
        if key not in _shared:
            _shared[key] = Services(settings)
            atexit.register(_shared[key].close)
        return _shared[key]

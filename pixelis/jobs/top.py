"""Watch a training run or a service: progress, learning curves, operations and alarms.

usage: pixelis top RUN_DIR | URL [--every SECONDS] [--once]

RUN_DIR is the folder of an rft, ttrl or sft run (also of a finished one), URL the address of a service, such
as http://127.0.0.1:8000; its key is taken from PIXELIS_API_KEY. It is redrawn every two seconds; --once prints
one frame and ends. Ctrl-C ends only this command.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pixelis.errors import BadConfig, InfraFailure, MissingFile
from pixelis.jobs.command import command
from pixelis.telemetry import diagnosis, events
from pixelis.telemetry.html.filters import age, number

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 32
CURVES = {
    "reward/total": "reward",
    "train/accuracy": "accuracy, training",
    "evaluate/accuracy": "accuracy, held out",
    "rollout/rapr": "with operations",
    "rollout/loops": "with a loop",
    "rollout/exploration": "exploration",
    "policy/kl": "KL to the start",
    "policy/entropy": "entropy",
    "policy/loss": "loss",
}
"""Metrics drawn as curves, where a run has them."""


def main() -> None:
    with command("top", __doc__) as parser:
        parser.add_argument("target", metavar="RUN_DIR | URL")
        parser.add_argument("--every", type=float, default=2.0)
        parser.add_argument("--once", action="store_true")
        a = parser.parse_args()
        is_service = a.target.startswith(("http://", "https://"))
        draw = Service(a.target).draw if is_service else functools.partial(draw_run, Path(a.target))
        if a.once:
            Console().print(draw())
        else:
            _watch(draw, a.every)


def _watch(draw: Callable[[], RenderableType], every_s: float) -> None:
    with contextlib.suppress(KeyboardInterrupt), Live(draw(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            try:
                frame = draw()
            except InfraFailure as error:  # the service may come back
                frame = Panel(Text(str(error), style="red"))
            live.update(frame, refresh=True)


def draw_run(folder: Path) -> RenderableType:
    """The state of a run from its event log. Raises MissingFile without one."""
    log = events.read(folder)
    if not log:
        raise MissingFile(
            f"there is no run in {folder}", fix="give the run.dir of a job, such as runs/nano/rft"
        )
    # A repeated step counts once
    newest = {event["step"]: event for event in log if event["kind"].startswith("step/")}
    steps = [newest[step] for step in sorted(newest)]
    if not steps:
        stage = next((event["name"] for event in reversed(log) if event["kind"] == events.STAGE), "starting")
        return Panel(Text(f"no step yet: {stage}"), title=str(folder))
    last = steps[-1]
    pace = (last["time"] - steps[0]["time"]) / max(1, len(steps) - 1)
    head = Text(f"step {last['step']}, {age(last['time'])}, {pace:.1f} s a step")
    alarms = [event for event in log if event["kind"] in (events.ALARM, events.NOTICE)][-3:]
    problems = [
        diagnosis.of_run(steps) or "",
        *(f"{age(event['time'])}: {event['text']}" for event in alarms),
    ]
    evaluations = [event for event in log if event["kind"] == "evaluation"]
    red = Text("\n".join(problems), style="red")
    return Panel(Group(head, curves(steps, evaluations), shares(last), red), title=str(folder))


def curves(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, label in CURVES.items():
        source = evaluations if name.startswith("evaluate/") else steps
        if values := [v for event in source if (v := events.as_number(event.get(name))) is not None]:
            alarm = name == "policy/kl" and values[-1] > diagnosis.KL_LIMIT
            line = Text(curve(values), style="red" if alarm else "cyan")
            table.add_row(label, line, number(values[-1]), f"{number(min(values))} to {number(max(values))}")
    return table


def shares(step: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for prefix in ("operation/", "stop/"):
        values = [(value, name) for name, value in step.items() if name.startswith(prefix) and value]
        for value, name in sorted(values, reverse=True):
            table.add_row(name, "█" * max(1, round(24 * min(1.0, value))), number(value))
    return table


class Service:
    """Draws a service from its routes; keeps the samples that its rate needs."""

    def __init__(self, url: str):
        key = os.environ.get("PIXELIS_API_KEY", "")
        self.url = url.rstrip("/")
        self.http = httpx.Client(timeout=5, headers={"Authorization": f"Bearer {key}"} if key else {})
        self.samples: list[tuple[float, float]] = []
        """Time and number of answers since the gateways started."""

    def draw(self) -> RenderableType:
        """One frame. InfraFailure for a service that does not answer, BadConfig for a missing key."""
        health = self._get("/healthz", "status", "generators", "memory")
        evolution = self._get("/v1/evolution", "counts")
        counts, status, memory = evolution["counts"], evolution.get("status") or {}, evolution.get("memory")
        self.samples = [*self.samples[-WIDTH:], (time.monotonic(), float(counts.get("answered", 0)))]
        style = "green" if health["status"] == "ok" else "red"
        state = f"{health['status']}, {health['generators']} generators, memory {health['memory']}"
        rates = [max(0.0, n1 - n0) / max(1e-9, t1 - t0) for (t0, n0), (t1, n1) in pairwise(self.samples)]
        rate = f"  {curve(rates)}  {rates[-1]:.1f} a second" if rates else ""
        table = Table.grid(padding=(0, 2))
        table.add_row("answered", f"{counts.get('answered', 0):g}{rate}")
        table.add_row(
            "remembered", f"{memory.get('memory/size', 0):g} experiences" if memory else "no memory"
        )
        if evolution.get("enabled"):
            learning = "learning" if status.get("learning") else "not learning"
            learning = "paused" if status.get("paused") else learning
            table.add_row("serves", f"version {evolution['policy_version']}, {learning}")
            rollbacks = f"{counts.get('rollbacks', 0)} rollbacks"
            table.add_row("updates", f"{evolution['updates']}, {evolution['queue']} tasks wait, {rollbacks}")
            sent, gated = counts.get("update_sent", 0), counts.get("gated", 0)
            table.add_row("verdicts", f"{sent} confident enough to learn from, {gated} not")
            canary = [entry["accuracy"] for entry in evolution.get("canary", []) if "accuracy" in entry]
            if canary:
                table.add_row("canary", f"{curve(canary)}  {canary[-1]:.3f}")
            if (kl := status.get("mean_kl")) is not None:
                table.add_row("KL of updates", number(kl))
        problems = [diagnosis.of_service(counts) or ""]
        problems += [
            f"{alert['metric']} = {number(alert['value'])}" for alert in evolution.get("alerts", [])[:3]
        ]
        red = Text("\n".join(problems), style="red")
        return Panel(Group(Text(state, style=style), table, red), title=self.url)

    def _get(self, path: str, *expected: str) -> dict[str, Any]:
        """The object at ``path``, which has the ``expected`` keys, also in an answer that reports an error."""
        try:
            reply = self.http.get(self.url + path)
        except httpx.HTTPError as error:
            raise InfraFailure(
                f"{self.url} does not answer: {type(error).__name__}", fix="start it with `pixelis serve`"
            ) from None
        if reply.status_code in (401, 403):
            raise BadConfig(f"{self.url} refuses the key", fix="set PIXELIS_API_KEY to a key with `read`")
        with contextlib.suppress(ValueError):
            content = reply.json()
            if isinstance(content, dict) and set(expected) <= content.keys():
                return content
        raise InfraFailure(
            f"{self.url} answers {path} with {reply.status_code} and is not ready, or no Pixelis service",
            fix="wait, or give the address that `pixelis serve` prints",
        )


def curve(values: Sequence[float], width: int = WIDTH) -> str:
    """Values as a line of blocks, averaged to at most ``width``, from their smallest to their largest."""
    count = min(width, len(values))
    means = []
    for place in range(count):
        part = values[place * len(values) // count : (place + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low, high = min(means, default=0.0), max(means, default=0.0)
    top = len(BARS) - 1
    return "".join(BARS[round((value - low) / ((high - low) or 1.0) * top)] for value in means)


if __name__ == "__main__":
    main()

"""The report of a run: one HTML file that opens anywhere, without network, script or server.

Its reader may never have heard of the project, so every figure says what to look at. Everything that came from a model, a
dataset or a user is escaped, and the page's content policy forbids scripts and connections besides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pixelis.telemetry.charts import legend, line_chart
from pixelis.telemetry.events import as_number, plain
from pixelis.telemetry.pages import EpisodePage, render_page
from pixelis.telemetry.progress import clock
from pixelis.telemetry.style import STYLE
from pixelis.telemetry.words import number, safe, text

FILE = "report.html"

ARMS = {
    "direct": "the model answers at once; no operations are offered",
    "base": "the model before this run",
    "sft": "after supervised fine-tuning on demonstrations",
    "rft": "after reinforcement learning with the pixel operations",
    "evolved": "after adapting online to traffic without labels",
}
STAGES = {
    "sft": "Supervised fine-tuning (sft)",
    "rft": "Reinforcement learning (rft)",
    "evolve": "Online adaptation (evolve)",
}
KINDS = {"step/sft": "sft", "step/policy": "rft"}
"""Kinds of events that are training steps, and their stage."""
SHARES = ("accuracy", "rapr", "tool_error_rate")
SPOKEN = {"rapr": "rate of pixel reasoning", "tool_error_rate": "tool error rate"}

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
LEAD = (
    "An agent is asked about pictures that hold more than it can see at a glance. It may call operations on the picture, such as "
    "zooming in, before it answers. This page shows what one run taught it about when and where to look."
)
ARMS_CAPTION = (
    "Look at the bars: each is the share of held-out questions answered correctly, the thin line its 95 % interval. Bars whose "
    "lines do not meet differ. Pixel reasoning is the share of episodes in which the policy used at least one operation; tool "
    "errors is the share of its calls that failed."
)
PAIRED_CAPTION = "Differences on the same questions. Where the interval contains zero, chance alone can explain the difference."
SHIFT_LEAD = (
    "The served agent met pictures unlike those it was trained on, without any labels. Several of its own answers to a question "
    "voted, and confident votes became training."
)
SHIFT_CAPTION = (
    "Accuracy on changed pictures before and after the votes. Much overlap of the thin lines shows neither gain nor loss."
)
SHARES_CAPTION = (
    "Look whether the two rise together: accuracy is the share of training episodes answered correctly, the rate of pixel "
    "reasoning the share in which the policy used an operation."
)
REWARD_CAPTION = (
    "What the policy was paid for, averaged over the episodes of a step. A bonus that grows while accuracy does not is a policy "
    "that games its reward."
)
LOSS_CAPTION = "How far the model is from what it is shown: it should fall and then flatten."
EPISODES_LEAD = (
    "Single episodes, step by step: the picture and where the policy zoomed in, then its own words, what each call gave back, "
    "and at the end what it earned."
)


def write_report(
    run_dir: str | Path,
    summary: Mapping[str, Any],
    curves: Sequence[Mapping[str, Any]],
    episodes: Sequence[EpisodePage],
    title: str | None = None,
    file: str = FILE,
) -> Path:
    """Write `run_dir/report.html` (aside, then renamed) and give its path; `file`: another name for it.

    - `summary`: what `summary.json` holds: `arms`, `paired`, `seconds`, `versions`, `seed`, and where known `shift`
      (`{"before": {...}, "after": {...}}`, each like an arm, and paired differences; other entries are shown as they are),
      `served` (a reply), `hardware` (text or mapping) and `command`. What is absent is left out of the page.
    - `curves`: one mapping per training step with `step`, `area/name` numbers and optionally `stage` (`sft`, `rft`), for example
      the events of kind `step/sft` and `step/policy`; a number that is missing or not finite is a gap.
    - `episodes`: shown in order, pictures inlined.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path, aside = folder / file, folder / f".{file}.{os.getpid()}"
    aside.write_bytes(render(summary, curves, episodes, title or folder.resolve().name).encode("utf-8", "replace"))
    aside.replace(path)
    return path


def render(
    summary: Mapping[str, Any], curves: Sequence[Mapping[str, Any]], episodes: Sequence[EpisodePage], title: str = "run"
) -> str:
    """The whole document of `write_report` as text."""
    facts = plain(summary)
    body = "".join((_lead(facts), _arms(facts), _shift(facts), _curves(curves), _episodes(episodes), _facts(facts)))
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{safe(title)} · Pixelis</title><style>{STYLE}</style></head>"
        f'<body><main><p class="brand">Pixelis report</p><h1>{text(title)}</h1>{body}</main></body></html>\n'
    )


def _lead(facts: Mapping[str, Any]) -> str:
    """What the page is about and, when the arms are there, what came out."""
    arms = {arm.get("name"): arm for arm in _mappings(facts.get("arms")) if as_number(arm.get("accuracy")) is not None}
    out = [f'<p class="lead">{LEAD}</p>']
    if "rft" in arms:
        n = arms["rft"].get("n")
        of = f"{text(n)} held-out questions" if n else "the held-out questions"
        said = [f"The trained agent answers <b>{_percent(arms['rft']['accuracy'])}</b> of {of} correctly"]
        if "sft" in arms:
            said.append(f"<b>{_percent(arms['sft']['accuracy'])}</b> before reinforcement learning")
        if "direct" in arms:
            said.append(f"<b>{_percent(arms['direct']['accuracy'])}</b> when no operations are offered")
        out.append(f'<p class="lead">{"; ".join(said)}.</p>')
    return "".join(out)


def _arms(facts: Mapping[str, Any]) -> str:
    arms = _mappings(facts.get("arms"))
    if not arms:
        return ""
    rows = []
    for arm in arms:
        name = str(arm.get("name", ""))
        label = text(name) + (f"<small>{ARMS[name]}</small>" if name in ARMS else "")
        rows.append((label, _accuracy(arm), _percent(arm.get("rapr")), _tool_errors(arm), text(arm.get("n", "–"))))
    heads = ("policy", "accuracy", "pixel reasoning", "tool errors", "questions")
    caption = f'<p class="caption">{ARMS_CAPTION}</p>'
    return _section("How good it became", _table(heads, rows), caption, _differences(facts.get("paired") or {}))


def _differences(paired: Mapping[str, Any]) -> str:
    """Paired differences, `{"rft_minus_sft": {"mean": ..., "ci95": [...]}}`, in points."""
    out = []
    for name, difference in paired.items():
        left, _, right = name.partition("_minus_")
        what = f"{text(left)} minus {text(right)}" if right else text(name)
        ends = _ends(difference.get("ci95"))
        interval = f"<small>95 % interval {ends[0] * 100:+.1f} to {ends[1] * 100:+.1f}</small>" if ends else ""
        out.append(f"<li>{what}: <b>{_points(difference.get('mean'))}</b> {interval}</li>")
    return f"<p>{PAIRED_CAPTION}</p><ul>{''.join(out)}</ul>" if out else ""


def _shift(facts: Mapping[str, Any]) -> str:
    shift = facts.get("shift")
    if not isinstance(shift, dict) or not ("before" in shift and "after" in shift):
        return ""
    rows = []
    for name in ("before", "after"):
        arm = shift[name] if isinstance(shift[name], dict) else {"accuracy": shift[name]}
        rows.append((name, _accuracy(arm), _percent(arm.get("rapr")), text(arm.get("n", "–"))))
    table = _table(("", "accuracy", "pixel reasoning", "questions"), rows)
    paired = {key: value for key, value in shift.items() if "_minus_" in key and isinstance(value, dict)}
    rest = {key: value for key, value in shift.items() if key not in ("before", "after", *paired)}
    caption = f'<p class="caption">{SHIFT_CAPTION}</p>'
    return _section("Adapting to changed pictures", f"<p>{SHIFT_LEAD}</p>", table, caption, _differences(paired), _pairs(rest))


def _curves(curves: Sequence[Mapping[str, Any]]) -> str:
    stages: dict[str, list[Mapping[str, Any]]] = {}
    for row in curves:
        stages.setdefault(str(row.get("stage") or KINDS.get(str(row.get("kind")), "")), []).append(row)
    out = []
    for stage, rows in stages.items():
        series = _series(rows)
        if not series:
            continue
        if stage:
            out.append(f"<h3>{STAGES.get(stage, text(stage))}</h3>")
        main, more = _figures(series)
        if main:
            out.append(f'<div class="grid">{"".join(main)}</div>')
        if more:
            out.append(f'<details><summary>{len(more)} more curves</summary><div class="grid">{"".join(more)}</div></details>')
    if not out:
        return ""
    lead = "<p>Every point is one optimizer step; the numbers beside the names are the last step's.</p>"
    return _section("How it learned", lead, *out)


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """`area/name` -> its finite (step, value) points, names in order of appearance."""
    series: dict[str, list[tuple[float, float]]] = {}
    for i, row in enumerate(rows):
        step = as_number(row.get("step"))
        for key, value in row.items():
            if "/" in key and (y := as_number(value)) is not None:
                series.setdefault(key, []).append((float(i) if step is None else step, y))
    return series


def _figures(series: Mapping[str, list[tuple[float, float]]]) -> tuple[list[str], list[str]]:
    """(the figures everybody should see, one small figure for each other curve)."""
    shares = {key: points for key, points in series.items() if _name(key) in SHARES and not key.startswith("reward/")}
    if not any(_name(key) == "accuracy" for key in shares) and "reward/accuracy" in series:
        shares = {"reward/accuracy": series["reward/accuracy"], **shares}
    rewards = {key: points for key, points in series.items() if key.startswith("reward/")}
    losses = {key: points for key, points in series.items() if _name(key) == "loss"}
    main = []
    if shares:
        main.append(_figure("Accuracy and rate of pixel reasoning", shares, SHARES_CAPTION, share=True))
    if rewards:
        main.append(_figure("Reward, term by term", rewards, REWARD_CAPTION))
    if losses and not main:  # a policy-gradient loss says nothing about quality: where accuracy is known it is among the rest
        main.append(_figure("Loss", losses, LOSS_CAPTION))
    else:
        losses = {}
    shown = {*shares, *rewards, *losses}
    return main, [_figure(key, {key: points}) for key, points in series.items() if key not in shown]


def _figure(name: str, series: Mapping[str, list[tuple[float, float]]], caption: str = "", share: bool = False) -> str:
    named = {f"{SPOKEN[_name(key)]} ({key})" if _name(key) in SPOKEN else key: points for key, points in series.items()}
    note = f"<p>{caption}</p>" if caption else ""
    drawing = line_chart(named, share=share) + f"<figcaption>{legend(named, share=share)}{note}</figcaption>"
    return f"<figure><h4>{text(name)}</h4>{drawing}</figure>"


def _name(key: str) -> str:
    return key.rsplit("/", 1)[-1]


def _episodes(episodes: Sequence[EpisodePage]) -> str:
    if not episodes:
        return ""
    signs = {True: ("right", "✓"), False: ("wrong", "✗"), None: ("", "?")}
    links = []
    for i, page in enumerate(episodes, 1):
        colour, sign = signs[page.correct]
        links.append(f'<a class="pill {colour}" href="#episode-{i}">{i} {sign}</a>')
    pages = "".join(render_page(page, i) for i, page in enumerate(episodes, 1))
    return _section("What it does", f"<p>{EPISODES_LEAD}</p>", f'<nav class="links">{"".join(links)}</nav>', pages)


def _facts(facts: Mapping[str, Any]) -> str:
    """Where the numbers come from: command, hardware, seed, time and versions, and the summary itself."""
    out = []
    if facts.get("command"):
        out.append(f"<h3>Command</h3><pre>{text(facts['command'])}</pre>")
    if hardware := facts.get("hardware"):
        out.append("<h3>Hardware</h3>" + (_pairs(hardware) if isinstance(hardware, dict) else f"<p>{text(hardware)}</p>"))
    if facts.get("seed") is not None:
        out.append(f"<p>Seed {text(facts['seed'])}.</p>")
    seconds = {key: took for key, value in (facts.get("seconds") or {}).items() if (took := as_number(value)) is not None}
    if seconds:
        out.append(f"<h3>Time</h3>{_pairs({key: clock(took) for key, took in seconds.items()})}")
    if isinstance(facts.get("served"), dict):
        out.append(f"<h3>First reply of the served agent</h3>{_pairs(facts['served'])}")
    if facts.get("versions"):
        out.append(f"<h3>Versions</h3>{_pairs(facts['versions'])}")
    raw = text(json.dumps(facts, indent=1, ensure_ascii=False))
    out.append(f"<details><summary>The summary as JSON</summary><pre>{raw}</pre></details>")
    return _section("Where the numbers come from", *out)


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the row; on a phone the heads are repeated in the cells."""
    head = "".join(f"<th scope=col>{name}</th>" for name in heads)
    body = []
    for first, *cells in rows:
        labelled = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in zip(heads[1:], cells, strict=True))
        body.append(f"<tr><th scope=row>{first}</th>{labelled}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _accuracy(arm: Mapping[str, Any]) -> str:
    """The accuracy, its interval, and both drawn as a bar on 0..100 %."""
    value, ends = as_number(arm.get("accuracy")), _ends(arm.get("ci95"))
    if value is None:
        return "–"
    spread, line = "", ""
    if ends:
        low, high = (min(1.0, max(0.0, end)) for end in ends)
        spread = f"<small>{ends[0] * 100:.1f} to {ends[1] * 100:.1f}</small>"
        line = f'<i style="left:{low:.2%};width:{high - low:.2%}"></i>'
    bar = f'<div class="bar" aria-hidden="true"><span style="width:{min(1.0, max(0.0, value)):.2%}"></span>{line}</div>'
    return f"<b>{_percent(value)}</b> {spread}{bar}"


def _tool_errors(arm: Mapping[str, Any]) -> str:
    calls = arm.get("operations")
    if calls == 0 or (calls is None and not arm.get("rapr") and not arm.get("tool_error_rate")):
        return "no calls"
    return _percent(arm.get("tool_error_rate"))


def _pairs(values: Mapping[str, Any]) -> str:
    if not values:
        return ""
    items = []
    for key, value in values.items():
        shown = number(value) if isinstance(value, float) else value if isinstance(value, (str, int)) else json.dumps(value)
        items.append(f"<div><dt>{text(key)}</dt><dd>{text(shown)}</dd></div>")
    return f"<dl>{''.join(items)}</dl>"


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _ends(value: Any) -> tuple[float, float] | None:
    numbers = [as_number(end) for end in value] if isinstance(value, list) else []
    return (numbers[0], numbers[1]) if len(numbers) == 2 and numbers[0] is not None and numbers[1] is not None else None


def _percent(value: Any) -> str:
    share = as_number(value)
    return "–" if share is None else f"{share * 100:.1f} %"


def _points(value: Any) -> str:
    share = as_number(value)
    return "–" if share is None else f"{share * 100:+.1f} points"

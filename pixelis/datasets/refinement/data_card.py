"""The card of a data set: one HTML file that says what it holds, what was left out and why, and which gates it passed.

It shows some demonstrations with their pictures. No script, no network; all text of the data is escaped.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.config import ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.errors import OperationError, PixelisError
from pixelis.operations import geometry
from pixelis.operations.draw import annotate, shrink
from pixelis.operations.media import spread
from pixelis.operations.video import Clip
from pixelis.records import Action, Demonstration, ImageView, Step, StopReason, Trajectory, Turn
from pixelis.telemetry.events import as_number, plain
from pixelis.telemetry.findings import frame_key, wanted_frames
from pixelis.telemetry.pages import EpisodePage, render_page
from pixelis.telemetry.report import POLICY
from pixelis.telemetry.style import STYLE
from pixelis.telemetry.words import number, safe, text

FILE = "card.html"
PICTURE_PIXELS = 1280
"""Longest side of a picture or frame that is kept for a card."""
MAX_BARS = 40
MAX_IDS = 200

LEAD = (
    "A set of demonstrations: questions about pictures and clips, each with the thoughts and pixel operations that lead to its "
    "answer. This card says what is in it, what was left out and why, and shows some as they are."
)
KINDS = {
    "golden": "right, to be imitated",
    "self_correction": "a mistake, then its correction; the mistake is not learnt",
    "outcome_negative": "only the answer is wrong; never imitated",
    "trap_perceptual": "wrong because something is seen wrongly; never imitated",
    "trap_logical": "wrong because of the last inference; never imitated",
}
DISTRIBUTIONS = {
    "kinds": ("Kinds", "What they are for. Wrong ones serve reinforcement as hard negatives."),
    "tasks": ("Tasks", "What the questions are about."),
    "operations": ("Operations", "How often each operation is called."),
    "lengths": ("Lengths", "Number of actions: each thought and each operation is one."),
    "sources": ("Sources", "Where the pictures and annotations come from."),
}
SETS_CAPTION = (
    "What each recipe asked for and what there was. A recipe takes no more than its share of a cell: what is short was not there."
)


def write_card(
    folder: str | Path, facts: Mapping[str, Any], examples: Sequence[EpisodePage] = (), title: str | None = None, file: str = FILE
) -> Path:
    """Write ``folder/card.html`` (aside, then renamed) and give its path.

    ``facts`` is what ``summary.json`` holds; known are ``rows``, ``kept``, ``dropped``, ``bad_rows``, the distributions
    ``kinds``, ``tasks``, ``operations``, ``lengths`` and ``sources``, ``levels``, ``sets`` and ``gates``. What is absent is left
    out. ``examples`` come from ``example``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path, aside = folder / file, folder / f".{file}.{os.getpid()}"
    aside.write_bytes(render(facts, examples, title or folder.resolve().name).encode("utf-8", "replace"))
    aside.replace(path)
    return path


def render(facts: Mapping[str, Any], examples: Sequence[EpisodePage], title: str) -> str:
    """The whole document of ``write_card`` as text."""
    known = plain(facts)
    body = "".join((_lead(known), _gates(known), _distributions(known), _levels(known), _sets(known), _examples(examples)))
    facts_text = text(json.dumps(_short(known), indent=1, ensure_ascii=False))
    raw = f"<details><summary>The summary as JSON</summary><pre>{facts_text}</pre></details>"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{safe(title)} · Pixelis data card</title><style>{STYLE}</style></head>"
        f'<body><main><p class="brand">Pixelis data card</p><h1>{text(title)}</h1>{body}{raw}</main></body></html>\n'
    )


# -- parts ----------------------------------------------------------------------------------------------------------


def _lead(facts: Mapping[str, Any]) -> str:
    out = [f'<p class="lead">{LEAD}</p>']
    kept, rows = as_number(facts.get("kept")), as_number(facts.get("rows"))
    if kept is not None:
        of = f" of {rows:,.0f} rows read".replace(",", " ") if rows is not None else ""
        failed = [gate for gate in _mappings(facts.get("gates")) if not gate.get("passed")]
        state = "passed every gate" if not failed else f"failed {len(failed)} gates and was not written"
        gates = f"; the set {state}" if facts.get("gates") else ""
        out.append(f'<p class="lead"><b>{kept:,.0f}</b> demonstrations'.replace(",", " ") + f"{of}{gates}.</p>")
    if facts.get("source"):
        out.append(f"<p>Made from {text(facts['source'], 300)}.</p>")
    causes = Counter(_counts(facts.get("bad_rows")))
    causes.update(_counts(facts.get("dropped")))  # a cause of both adds up
    if causes:
        out.append(f"<h3>Left out, by cause</h3>{_bars(causes)}")
    return "".join(out)


def _gates(facts: Mapping[str, Any]) -> str:
    gates = _mappings(facts.get("gates"))
    if not gates:
        return ""
    rows = []
    for gate in gates:
        verdict = '<span class="pill right">passed</span>' if gate.get("passed") else '<span class="pill wrong">failed</span>'
        figure, limit = as_number(gate.get("figure")), as_number(gate.get("limit"))
        ids: dict[str, Any] = gate["ids"] if isinstance(gate.get("ids"), dict) else {}
        said = "".join(f"<li>{text(key, 100)}: {text(why, 300)}</li>" for key, why in list(ids.items())[:MAX_IDS])
        more = f"<p>and {len(ids) - MAX_IDS} more</p>" if len(ids) > MAX_IDS else ""
        folded = f"<details><summary>{len(ids)} named</summary><ul>{said}</ul>{more}</details>" if ids else ""
        shown = [number(v) if v is not None else "–" for v in (figure, limit)]
        rows.append((f"{text(gate.get('name', ''))}<small>{text(gate.get('says', ''))}</small>", verdict, *shown, folded))
    heads = ("gate", "verdict", "figure", "limit", "what broke it")
    return _section("Gates", "<p>A set that fails one of these is not written.</p>", _table(heads, rows))


def _distributions(facts: Mapping[str, Any]) -> str:
    figures = []
    for key, (title, caption) in DISTRIBUTIONS.items():
        counts = _counts(facts.get(key))
        if counts:
            notes = KINDS if key == "kinds" else {}
            figures.append(f"<figure><h4>{title}</h4>{_bars(counts, notes)}<figcaption>{caption}</figcaption></figure>")
    return _section("What is in it", f'<div class="grid">{"".join(figures)}</div>') if figures else ""


def _levels(facts: Mapping[str, Any]) -> str:
    levels = facts.get("levels")
    if not isinstance(levels, dict):
        return ""
    rows = []
    for name, level in levels.items():
        if isinstance(level, dict):
            values = [as_number(level.get(key)) for key in ("count", "share", "difficulty", "length")]
            shown = [number(v, share=i == 1) if v is not None else "–" for i, v in enumerate(values)]
            rows.append((text(name), *shown, str(len(_counts(level.get("tasks"))))))
    heads = ("level", "demonstrations", "share", "mean difficulty", "mean length", "tasks")
    lead = "<p>How hard they are: by length, operations, reasoning, corrections, task. A curriculum begins with the simple.</p>"
    return _section("Levels", lead, _table(heads, rows)) if rows else ""


def _sets(facts: Mapping[str, Any]) -> str:
    sets = facts.get("sets")
    out = []
    for name, made in sets.items() if isinstance(sets, dict) else ():
        if not isinstance(made, dict):
            continue
        rows = []
        for cell, counts in (made.get("cells") or {}).items():
            wanted, got = as_number(counts.get("wanted")), as_number(counts.get("got"))
            if wanted is not None and got is not None:
                rows.append((text(cell), number(wanted), number(got), number(max(0.0, wanted - got))))
        absent = [text(part) for part in made.get("absent") or []]
        missing = f"<p>Asked for and not there at all: {', '.join(absent)}; its share went to the others.</p>" if absent else ""
        count, size = as_number(made.get("count")) or 0, as_number(made.get("size")) or 0
        lead = f"<p><b>{count:,.0f}</b> of the recipe's {size:,.0f}.</p>".replace(",", " ")
        left = _counts(made.get("left_out") or made.get("dropped"))
        table = _table(("cell", "wanted", "got", "short"), rows) if rows else ""
        out.append(f"<h3>{text(name)}</h3>{lead}{missing}{table}{_bars(left) if left else ''}")
    return _section("Sets by recipe", f"<p>{SETS_CAPTION}</p>", *out) if out else ""


def _examples(examples: Sequence[EpisodePage]) -> str:
    if not examples:
        return ""
    links = "".join(
        f'<a class="pill" href="#episode-{i}">{i} {text(p.title.partition(" · ")[0])}</a>' for i, p in enumerate(examples, 1)
    )
    pages = "".join(render_page(page, i) for i, page in enumerate(examples, 1))
    lead = "<p>Some demonstrations as a learner meets them: what it sees, each thought and call, what the call gave back.</p>"
    return _section("Examples", lead, f'<nav class="links">{links}</nav>', pages)


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope=col>{name}</th>" for name in heads)
    body = []
    for first, *cells in rows:
        pairs = zip(heads[1:], cells, strict=True)
        labelled = "".join(f'<td data-label="{name}">{cell}</td>' if cell else "<td></td>" for name, cell in pairs)
        body.append(f"<tr><th scope=row>{first}</th>{labelled}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _bars(counts: Mapping[str, float], notes: Mapping[str, str] | None = None) -> str:
    """Named counts as bars, the largest as wide as the column; beyond the first some they are summed up."""
    items = list(counts.items())
    shown = items[:MAX_BARS] + ([("others", sum(n for _, n in items[MAX_BARS:]))] if len(items) > MAX_BARS else [])
    total, most = sum(counts.values()) or 1.0, max(counts.values(), default=1.0) or 1.0
    out = []
    for name, n in shown:
        note = f"<small> {(notes or {})[name]}</small>" if name in (notes or {}) else ""
        share = number(n / total, share=True)
        bar = f'<div class="bar" aria-hidden="true"><span style="width:{n / most:.2%}"></span></div>'
        out.append(f"<div><dt>{text(name, 80)}{note}</dt><dd><b>{number(n)}</b> <small>{share}</small>{bar}</dd></div>")
    return f"<dl>{''.join(out)}</dl>"


def _counts(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): n for name, count in value.items() if (n := as_number(count)) is not None and n >= 0}


def _mappings(values: Any) -> list[Mapping[str, Any]]:
    return [v for v in values if isinstance(v, Mapping)] if isinstance(values, (list, tuple)) else []


def _short(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts without long lists of ids: ``summary.json`` has them."""
    gates = [{k: v for k, v in gate.items() if k != "ids"} for gate in _mappings(facts.get("gates"))]
    return {key: value for key, value in facts.items() if key not in ("gates", "held_out")} | ({"gates": gates} if gates else {})


# -- examples -------------------------------------------------------------------------------------------------------


def example(demonstration: Demonstration, settings: ToolboxConfig, frames: int = 8) -> EpisodePage:
    """A demonstration as a page shows it, with its pictures and what its operations showed, made from them again.

    ``frames``: how many of a clip the policy sees at first. Media that cannot be opened are said to be missing.
    """
    opened: dict[str, np.ndarray | Clip] = {}
    for media in demonstration.media:
        with contextlib.suppress(PixelisError):
            opened[media.id] = open_media(media, settings)
    first: list[ImageView] = []
    for name, item in opened.items():
        if isinstance(item, Clip):
            size, seen = (item.width, item.height), spread(len(item.times), frames)
            first += [
                ImageView(id=f"{name}.{i}", parent=name, frame=n, time=float(item.times[n]), source_size=size, view_size=size)
                for i, n in enumerate(seen)
            ]
        else:
            first.append(ImageView(id=name, source_size=(item.shape[1], item.shape[0])))
    trajectory = as_trajectory(demonstration, first)
    pictures: dict[str, np.ndarray] = {}
    for name, item in opened.items():
        if isinstance(item, Clip):
            numbers = [n for n in wanted_frames(trajectory).get(name, []) if n < len(item.times)]
            for n, frame in zip(numbers, item.frames(numbers), strict=True):
                pictures[frame_key(name, n)] = shrink(frame, PICTURE_PIXELS)
        else:
            pictures[name] = item
    found = {view.id: o.data for o in trajectory.observations for view in o.images}
    for view in trajectory.images:
        if view.id in found and (cut := _cut(view, trajectory.images, pictures, found[view.id])) is not None:
            pictures[view.id] = cut
    whole = {name: shrink(picture, PICTURE_PIXELS) for name, picture in pictures.items()}
    made = [demonstration.kind, demonstration.task, demonstration.level or ""]
    if demonstration.quality is not None:
        made.append(f"quality {demonstration.quality:.2f}")
    return EpisodePage(demonstration, trajectory, whole, title=" · ".join(part for part in made if part), made=True)


def as_trajectory(demonstration: Demonstration, first: Sequence[ImageView] = ()) -> Trajectory:
    """The turns of a demonstration as those of an episode, without tokens; ``first`` is what it sees before its first turn."""
    media = [m.id for m in demonstration.media]
    images = list(first)
    turns = [Turn(role="user", text=demonstration.question, images=[view.id for view in first])]
    for step in demonstration.turns:
        if step.op is None:
            turns.append(Turn(role="assistant", text=_said(step, step.answer or "")))
            continue
        action = Action(op=step.op, target=step.target or (media[0] if media else "img0"), arguments=step.arguments)
        call = f"{step.op} {json.dumps({'target': action.target, **step.arguments}, ensure_ascii=False, default=str)}"
        said = _said(step, call) + ("" if step.learn else "\n(a mistake on purpose: in the context, not learnt)")
        turns.append(Turn(role="assistant", text=said, action=action, learn=step.learn))
        found = step.observation
        if found is not None:
            turns.append(Turn(role="tool", text=found.text, observation=found, images=[view.id for view in found.images]))
            images += found.images
    return Trajectory(
        question_id=demonstration.id,
        images=images,
        turns=turns,
        answer=demonstration.final,
        stop_reason=StopReason.ANSWER if demonstration.final is not None else StopReason.NO_ACTION,
    )


def _said(step: Step, deed: str) -> str:
    return f"{step.think}\n{deed}" if step.think else deed


def _cut(
    view: ImageView, images: Sequence[ImageView], pictures: Mapping[str, np.ndarray], data: Mapping[str, Any]
) -> np.ndarray | None:
    """The pixels that a view shows with what was found drawn on them, at the size it was seen; None without its picture."""
    try:
        links = geometry.chain(images, view.id)
        first = links[0]
        clip = first.frame is not None
        root = str(first.parent) if clip else first.id
        picture = pictures.get(frame_key(root, first.frame or 0) if clip else root)
        if picture is None:
            return None
        height, width = picture.shape[:2]
        left, top, right, bottom = geometry.to_pixels(geometry.to_root(links), width, height)
    except OperationError:
        return None
    part = shrink(picture[top:bottom, left:right], max(view.view_size) or PICTURE_PIXELS)
    if not any(data.get(key) for key in ("objects", "lines", "tracks")):
        return part
    return annotate(part, data, (left / width, top / height, right / width, bottom / height), first.frame, root)

"""The figures of an evaluation beside published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pixelis.config.published import PublishedFigure, PublishedFigures


def compare_published(
    published: PublishedFigures,
    summaries: Sequence[Mapping[str, Any]],
    pair: Callable[[PublishedFigure, str], dict[str, Any] | None],
) -> dict[str, Any]:
    """Each published figure beside that of the evaluated sets, as shares; ``missing`` names what was not evaluated.

    ``ci95`` is the interval of ``ours``; ``inside``: it holds the published figure. ``pair`` compares the scores that
    a figure names with those of an evaluated set.
    """
    figures, missing = list[dict[str, Any]](), list[str]()
    for figure in published.figures:
        named = [s for s in summaries if figure.set in (None, s["name"])]
        measured = _measured(figure, named[0]) if len(named) == 1 else None
        if measured is None:
            missing.append(_described(figure))
            continue
        ours, (low, high), n = measured
        theirs = round(figure.published / 100, 6)
        row = figure.model_dump(include={"name", "category", "metric", "source"}, exclude_none=True)
        row |= {"set": named[0]["name"], "published": theirs, "ours": ours, "ci95": [low, high], "n": n}
        row |= {"difference": ours - theirs, "inside": low <= theirs <= high}
        if figure.base is not None:
            row["base"] = round(figure.base / 100, 6)
        if figure.scores is not None:
            row["paired"] = pair(figure, row["set"])
        figures.append(row)
    return {"model": published.model, "figures": figures, "missing": missing}


def _described(figure: PublishedFigure) -> str:
    of = f" of category {figure.category}" if figure.category else ""
    where = f"set {figure.set}" if figure.set else "a single set"
    return f"{figure.name} ({figure.metric}{of} on {where})"


def _measured(
    figure: PublishedFigure, summary: Mapping[str, Any]
) -> tuple[float, tuple[float, float], int] | None:
    """Value, interval and number of episodes of a figure; None if the summary lacks it."""
    if figure.category is not None:
        part = summary.get("categories", {}).get(figure.category, {"n": 0})
        return (part["accuracy"], part["ci95"], part["n"]) if part["n"] else None
    name, _, k = figure.metric.partition("@")
    if not k:
        return (summary["accuracy"], summary["ci95"], summary["n"]) if summary["n"] else None
    key = f"{name}@k"
    return (summary[key], summary["ci95@k"][key], summary["n"]) if summary.get("k") == int(k) else None


def lines(comparison: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `compare_published`, in percent."""
    yield f"published figures of {comparison['model']}, in percent"
    rows = [("evaluation", "set", "metric", "base", "published", "ours", "difference", "")]
    for row in comparison["figures"]:
        base = f"{100 * row['base']:.1f}" if "base" in row else ""
        ours = f"{100 * row['ours']:.1f} {_interval(row['ci95'], '.1f')}"
        numbers = (base, f"{100 * row['published']:.1f}", ours, f"{100 * row['difference']:+.1f}")
        place = "inside our interval" if row["inside"] else "outside our interval"
        rows.append((row["name"], row["set"], row["metric"], *numbers, place))
        if pair := row.get("paired"):
            text = f"{_interval(pair['ci95'], '+.1f')}, p {pair['p']:.2g} on {pair['n']} questions"
            rows.append(("", "", "in pairs", "", "", "", f"{100 * pair['mean']:+.1f}", text))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        yield "  " + "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip()
    yield from (f"  not evaluated: {text}" for text in comparison["missing"])


def _interval(ends: Sequence[float], form: str) -> str:
    return f"[{100 * ends[0]:{form}}, {100 * ends[1]:{form}}]"

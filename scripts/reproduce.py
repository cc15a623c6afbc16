"""The published figures and settings of the systems in docs/reproduce.md, the settings beside those of our recipes.

python scripts/reproduce.py [--write]

The settings are in `configs/reproduce/SYSTEM/published.toml`, the figures in its `figures*.toml`.
--write replaces the table of figures in docs/reproduce.md.
"""

from __future__ import annotations

import argparse
import functools
import operator
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pixelis import config
from pixelis.config import published
from pixelis.config.root import RECIPES

FOLDER = RECIPES / "reproduce"
PAGE = Path(__file__).resolve().parent.parent / "docs/reproduce.md"


class Setting(NamedTuple):
    """A published value, its source, and why ours differs from it; empty where it must not."""

    value: Any
    source: str
    reason: str = ""


class System(NamedTuple):
    name: str
    sources: str
    recipes: dict[str, dict[str, Setting]]
    """recipe -> key -> setting, without those of the recipe that it is like"""
    like: dict[str, str]

    def settings(self, recipe: str) -> dict[str, Setting]:
        """All published settings of a recipe."""
        below = self.settings(self.like[recipe]) if recipe in self.like else {}
        return below | self.recipes[recipe]


def systems() -> dict[str, System]:
    """The systems by their folder."""
    return {path.parent.name: _read(path) for path in sorted(FOLDER.glob("*/published.toml"))}


def _read(path: Path) -> System:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    name, sources = content.pop("name"), content.pop("sources")
    like = {recipe: keys.pop("like") for recipe, keys in content.items() if "like" in keys}
    recipes = {recipe: {key: Setting(*row) for key, row in keys.items()} for recipe, keys in content.items()}
    return System(name, sources, recipes, like)


@functools.cache
def _recipe(folder: str, recipe: str) -> config.Config:
    return config.load(FOLDER / folder / f"{recipe}.yaml")


def resolved(folder: str, recipe: str, key: str) -> Any:
    """The value of a key in a recipe, with lists for tuples as TOML has them."""
    value = operator.attrgetter(key)(_recipe(folder, recipe))
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.10g}" if isinstance(value, int | float) else str(value)


def table(folder: str, system: System) -> str:
    """The table of a system in Markdown."""
    lines = [
        *textwrap.wrap(f"Sources: {system.sources}.", width=140, break_on_hyphens=False),
        "",
        "| recipe | key | published | ours | source |",
        "|---|---|---|---|---|",
    ]
    for recipe, settings in system.recipes.items():
        name = f"`{recipe}`"
        if recipe in system.like:
            lines.append(f"| {name} | otherwise as `{system.like[recipe]}` | | | |")
            name = ""
        for key, (value, source, reason) in settings.items():
            ours = _text(resolved(folder, recipe, key)) + (f": {reason}" if reason else "")
            lines.append(f"| {name} | `{key}` | {_text(value)} | {ours} | {source} |")
            name = ""
    return "\n".join(lines)


def figures() -> dict[Path, published.PublishedFigures]:
    """The published figures by their file."""
    return {path: published.read(path) for path in sorted(FOLDER.glob("*/figures*.toml"))}


def figure_table() -> str:
    """The published figures of all systems in Markdown."""
    lines = [
        "| system, model | evaluation | base | published | source | recipes |",
        "|---|---|---|---|---|---|",
    ]
    for path, of_model in figures().items():
        folder, (_, *size) = path.parent.name, path.stem.split("_")
        first = f"{systems()[folder].name}, {of_model.model}"
        recipes = f"`{folder}/*_{size[0]}`" if size else f"`{folder}`"
        for figure in of_model.figures:
            metric = "" if figure.metric == "accuracy" else f", {figure.metric}"
            numbers = f"{'' if figure.base is None else figure.base} | {figure.published}"
            lines.append(f"| {first} | {figure.name}{metric} | {numbers} | {figure.source} | {recipes} |")
            first = recipes = ""
    return "\n".join(lines)


def page() -> str:
    """docs/reproduce.md with its table as it should be."""
    before, start, rest = PAGE.read_text(encoding="utf-8").partition("<!-- published figures -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return f"{before}{start}\n{figure_table()}\n\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="replace the table of docs/reproduce.md")
    if parser.parse_args(arguments).write:
        PAGE.write_text(page(), encoding="utf-8")
        return
    print(f"{figure_table()}\n")
    for folder, system in systems().items():
        print(f"{system.name}\n\n{table(folder, system)}\n")


if __name__ == "__main__":
    main()

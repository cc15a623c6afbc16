"""docs/evolution.md says of every key what the configuration says, and of every built-in threshold what is built in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pixelis.config import EvolutionConfig, MemoryConfig
from pixelis.evolution.alerts import BUILT_IN
from pixelis.evolution.audit import EVENTS, RESULTS
from pixelis.evolution.privacy_patterns import CATEGORIES

PAGE = Path(__file__).parents[2].joinpath("docs", "evolution.md").read_text(encoding="utf-8")


def keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from keys(type(default), f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", spelled(default), field.description or ""


def spelled(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_the_table_has_every_key_with_its_default():
    table = re.findall(r"^\| `((?:evolution|memory)\.[\w.]+)` \| `(.*)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert table == [*keys(EvolutionConfig, "evolution"), *keys(MemoryConfig, "memory")]


def test_the_table_has_every_built_in_threshold():
    rows = {
        row[0]: row[1:]
        for row in re.findall(r"^\| `(\w+)`.*? \| (over|at most) ([\d.]+) \| (\w+) \| (\d+) \|$", PAGE, re.MULTILINE)
    }
    for t in BUILT_IN:
        side, limit = ("over", t.over) if t.over is not None else ("at most", t.at_most)
        assert rows[t.metric] == (side, f"{limit:g}", t.severity, f"{t.cooldown_s:g}")


def test_every_event_result_and_category_is_named():
    for name in (*EVENTS, *RESULTS, *CATEGORIES):
        assert f"`{name}`" in PAGE, name

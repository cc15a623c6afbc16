"""MkDocs hook: shows files of the repository's root as pages of the site, and generates tables of
configuration keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pixelis.config import Config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The root's file for its page, with links relative to docs; other pages with a table for each `<!--
    keys: ... -->`.
    """
    source = Path(page.file.src_uri.upper()).with_suffix(".md")
    if page.file.src_uri in ("contributing.md", "changelog.md", "security.md"):
        return source.read_text(encoding="utf-8").replace("](docs/", "](")
    return re.sub(r"<!-- keys: (.+) -->", lambda match: key_table(match[1].split()), markdown)


def key_table(sections: list[str]) -> str:
    """A table of the keys of these sections with their defaults and descriptions."""
    rows = [row for name in sections for row in key_rows(name, type(getattr(Config(), name)))]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def key_rows(prefix: str, section: type[BaseModel]) -> Iterator[str]:
    """A row for each key of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from key_rows(f"{prefix}.{name}", type(default))
        else:
            shown = (
                "unset"
                if default is None
                else str(default).lower()
                if isinstance(default, bool)
                else str(default)
            )
            yield f"| `{prefix}.{name}` | `{shown}` | {field.description} |"

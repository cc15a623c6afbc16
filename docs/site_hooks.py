"""MkDocs hook: shows CONTRIBUTING.md, CHANGELOG.md and SECURITY.md of the repository's root as pages of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The root's file for its page, with links relative to docs; every other page as it is."""
    source = Path(page.file.src_uri.upper()).with_suffix(".md")
    if page.file.src_uri in ("contributing.md", "changelog.md", "security.md"):
        return source.read_text(encoding="utf-8").replace("](docs/", "](")
    return markdown

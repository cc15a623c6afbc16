"""The page on which a person compares pairs of episodes without knowing which policy made which."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from pixelis.telemetry.html.episode import EpisodePage
from pixelis.telemetry.html.render import render, source


@dataclass(frozen=True)
class RatingItem:
    name: str
    left: EpisodePage
    right: EpisodePage


def render_ratings(page: str, items: Sequence[RatingItem]) -> str:
    """The document: one file that works without a network. ``page``: the id in the saved ratings.

    It is the only page with a script, which the page's policy allows by its hash.
    """
    script = source("ratings.js").strip()
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    return render(
        "ratings.html",
        title="Which answer is better?",
        page=page,
        items=items,
        script_hash=f"sha256-{digest}",
    )

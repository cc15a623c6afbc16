"""Demonstrations for the tests of refinement: one picture, as many calls as asked for."""

from __future__ import annotations

from typing import Any

from pixelis.config import RewardsConfig
from pixelis.datasets.refinement.quality import scorer
from pixelis.records import Demonstration, ImageView, Observation, Provenance, Step
from pixelis.rewards.services import Services

SCORE = scorer(Services(RewardsConfig()))
TASKS = ("geometric_comparison", "text_extraction", "object_counting", "spatial_reasoning")


def seen(number: int, box: tuple = (0.1, 0.1, 0.5, 0.5), text: str = "") -> Observation:
    """What a zoom gave."""
    view = ImageView(id=f"obs{number}", parent="img0", box=box, source_size=(100, 100), view_size=(56, 56))
    return Observation(
        status="ok", id=f"obs{number}", text=text, images=[view], data={"op": "zoom_in", "target": "img0"}
    )


def zoom(
    number: int = 1, shift: float = 0.0, think: str | None = "I look closer at the red frame", **fields: Any
) -> Step:
    """A zoom with its observation, each ``number`` at another place."""
    box = (round(0.05 * number + shift, 4), 0.1, round(0.05 * number + shift + 0.2, 4), 0.5)
    values = {
        "think": think,
        "op": "zoom_in",
        "target": "img0",
        "arguments": {"box": list(box)},
        "observation": seen(number, box),
    }
    return Step(**{**values, **fields})


def demonstration(name: str = "d1", zooms: int = 2, **fields: Any) -> Demonstration:
    """A golden demonstration; ``kind`` decides what is wrong with it, ``turns`` replaces its turns."""
    kind = fields.get("kind", "golden")
    said = "7" if kind in ("golden", "self_correction") else "3"
    turns = [zoom(i + 1) for i in range(zooms)]
    if kind == "self_correction":
        turns = [zoom(1, 0.3, learn=False), zoom(2, think="Wait, that is not the red frame. I look again")]
    turns.append(Step(think=f"The digit in the red frame is {said}", answer=said))
    values: dict[str, Any] = {
        "id": name,
        "question": "Which digit is in the red frame?",
        "media": [{"id": "img0", "uri": "cards:?split=train&seed=1&index=1"}],
        "answers": ["7"],
        "task": "geometric_comparison",
        "turns": turns,
        "provenance": Provenance(source="test", original_id=name, method="by hand"),
    }
    return Demonstration(**{**values, **fields})

"""Words and numbers for annotations: unambiguous names, places, outlines, and whether two of them agree."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import cv2
import numpy as np

from pixelis.operations import masks
from pixelis.records import Box, Point, Region
from pixelis.rewards.scorers import box_iou

NAMELESS = frozenset({"object", "thing", "entity", "region", "stuff", "text"})
"""Labels that say nothing."""
ACROSS, DOWN = ("left", "middle", "right"), ("upper", "middle", "lower")
COLOURS = ("color", "colour")
"""What data sets call the attribute."""
SAME_COLOUR = {"gray": "grey", "teal": "cyan", "magenta": "pink", "violet": "purple", "turquoise": "cyan", "maroon": "brown"}
"""Names that annotations use for colours that get_properties calls otherwise."""
_ARTICLE = re.compile(r"^(a|an|the|this|that|one|his|her|their|its)\s+", re.IGNORECASE)
_PLURALS = {"person": "people", "man": "men", "woman": "women", "child": "children", "knife": "knives", "mouse": "mice"}
_SAME_PLURAL = frozenset({"sheep", "scissors", "skis", "fish", "deer", "aircraft", "broccoli", "luggage", "fruit"})


def plural(label: str) -> str:
    """Several of what a label names."""
    head, _, last = label.rpartition(" ")
    before = f"{head} " if head else ""
    if last in _PLURALS:
        return before + _PLURALS[last]
    if last in _SAME_PLURAL:
        return label
    if last.endswith(("s", "x", "z", "ch", "sh")):
        return f"{label}es"
    if last.endswith("y") and last[-2:-1] not in "aeiou":
        return f"{label[:-1]}ies"
    return f"{label}s"


def article(noun: str) -> str:
    """``a cup``, ``an apple``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def colour_of(region: Region) -> str | None:
    """The annotated colour."""
    values = [region.attributes[key] for key in COLOURS if isinstance(region.attributes.get(key), str)]
    return values[0] if values else None


def middle(box: Sequence[float]) -> Point:
    """The middle of a box."""
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def area(box: Sequence[float]) -> float:
    """Of a box, as a share of the picture."""
    return (box[2] - box[0]) * (box[3] - box[1])


def place(box: Sequence[float]) -> str:
    """Which ninth of the picture the middle of a box is in: ``upper left``, ``middle right``, ``centre``."""
    x, y = middle(box)
    across, down = ACROSS[min(2, int(3 * x))], DOWN[min(2, int(3 * y))]
    if across == down == "middle":
        return "centre"
    return f"{down} {across}" if across != "middle" else f"{down} middle"


def side(here: float, low: str, high: str, margin: float = 0.05) -> str | None:
    """On which side of one half a coordinate lies; None within ``margin`` of it."""
    return None if abs(here - 0.5) < margin else low if here < 0.5 else high


def noun(label: str) -> str:
    """A label without the article that phrases of captions begin with."""
    return _ARTICLE.sub("", label.strip())


def describe(regions: Sequence[Region], partial: Collection[str] = ()) -> dict[str, str]:
    """A name for each region, by id, that fits no other of them: "the red cup", "the leftmost cup", "the cup in the centre".

    Regions that no such name is found for are left out. Of labels that are ``partial``ly annotated, so that there may be more
    such things in the picture, only the place says which one is meant.
    """
    alike: dict[str, list[Region]] = {}  # "cup", "a cup" and "the cup" of captions are one
    for region in regions:
        alike.setdefault(noun(region.label), []).append(region)
    names: dict[str, str] = {}
    for name, members in alike.items():
        if all(region.label not in partial for region in members):
            colours = Counter(colour_of(region) for region in members)
            for region in members:
                colour = colour_of(region)
                if len(members) == 1:
                    names[region.id] = f"the {name}"
                elif colour and colours[colour] == 1 and not _is_part(colour, name):
                    names[region.id] = f"the {colour} {name}"
            names.update({id_: told for id_, told in _extremes(members) if id_ not in names})
        cells = Counter(place(region.box) for region in members)
        alone = {r.id: f"the {name} in the {place(r.box)}" for r in members if cells[place(r.box)] == 1}
        names = {**alone, **names}
    told = Counter(names.values())  # "the red cup" may be a cup that is red and something labelled "red cup"
    return {id_: name for id_, name in names.items() if told[name] == 1}


def _is_part(colour: str, label: str) -> bool:
    return colour.lower() in label.lower().split()


def _extremes(alike: Sequence[Region], margin: float = 0.03) -> Iterable[tuple[str, str]]:
    """Of regions of one label those that lie farthest out by a clear margin."""
    if len(alike) < 2:
        return
    for name, key in (
        ("leftmost", lambda r: middle(r.box)[0]),
        ("rightmost", lambda r: -middle(r.box)[0]),
        ("topmost", lambda r: middle(r.box)[1]),
        ("lowest", lambda r: -middle(r.box)[1]),
    ):
        first, second = sorted(alike, key=key)[:2]
        if key(second) - key(first) >= margin:
            yield first.id, f"the {name} {noun(first.label)}"


def outline(region: Region, height: int, width: int) -> np.ndarray | None:
    """The annotated outline, bool [height, width]; None for a region that has only a box."""
    if region.mask is not None:
        mask = masks.decode(region.mask)
        return mask.full() if (mask.height, mask.width) == (height, width) else None
    if region.outline:
        drawn = np.zeros((height, width), np.uint8)
        for polygon in region.outline:
            corners = np.asarray(polygon, float) * (width, height)
            cv2.fillPoly(drawn, [np.round(corners).astype(np.int32).reshape(-1, 1, 2)], 1)
        return drawn > 0 if drawn.any() else None
    return None


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    """Intersection over union of two bool [h, w] masks."""
    both = np.count_nonzero(one | other)
    return np.count_nonzero(one & other) / both if both else 0.0


def inner_point(mask: np.ndarray) -> Point:
    """The point of a bool [h, w] mask that is farthest from its rim, 0..1."""
    depth = cv2.distanceTransform(np.pad(mask.astype(np.uint8), 1), cv2.DIST_L2, 3)[1:-1, 1:-1]
    row, column = np.unravel_index(int(depth.argmax()), mask.shape)
    return (float(column) + 0.5) / mask.shape[1], (float(row) + 0.5) / mask.shape[0]


def track_overlap(boxes: Sequence[Sequence[float]], truth: Sequence[Sequence[float]]) -> list[float]:
    """Box IoU frame by frame."""
    return [box_iou(a, b) for a, b in zip(boxes, truth, strict=True)]


def outward(box: Sequence[float], grid: float = 0.001) -> Box:
    """The smallest box on a grid that covers a box, inside 0..1; places that a model writes are on one."""
    x0, y0, x1, y1 = box
    steps = [math.floor(x0 / grid + 1e-6), math.floor(y0 / grid + 1e-6), math.ceil(x1 / grid - 1e-6), math.ceil(y1 / grid - 1e-6)]
    a, b, c, d = (round(min(1.0, max(0.0, step * grid)), 6) for step in steps)
    return a, b, c, d


def grown(box: Sequence[float], share: float) -> Box:
    """A box made larger by a share of its own width and height on each side, inside 0..1."""
    x0, y0, x1, y1 = box
    more_x, more_y = share * (x1 - x0), share * (y1 - y0)
    return max(0.0, x0 - more_x), max(0.0, y0 - more_y), min(1.0, x1 + more_x), min(1.0, y1 + more_y)


def around(box: Sequence[float], side: float, grid: float, move: Point = (0.0, 0.0)) -> Box:
    """A square of about ``side`` (0..1) on a grid with a box in its middle, moved by ``move`` and held inside 0..1."""
    steps = max(1, min(round(1 / grid), math.ceil(side / grid - 1e-6)))
    corner = []
    for at, by in zip(middle(box), move, strict=True):
        corner.append(min(max(round((at + by) / grid - steps / 2), 0), round(1 / grid) - steps))
    left, top = corner
    a, b, c, d = (round(v * grid, 6) for v in (left, top, left + steps, top + steps))
    return a, b, c, d


def covered(box: Sequence[float], by: Sequence[float]) -> float:
    """Share of a box that lies inside another."""
    width, height = min(box[2], by[2]) - max(box[0], by[0]), min(box[3], by[3]) - max(box[1], by[1])
    return max(0.0, width) * max(0.0, height) / max(area(box), 1e-9)


def heading(dx: float, dy: float, tolerance: float = 33.0) -> str | None:
    """The one of left, right, up and down that a movement (y down) points to within ``tolerance`` degrees."""
    angle = math.degrees(math.atan2(dy, dx))
    for name, at in (("right", 0.0), ("down", 90.0), ("left", 180.0), ("up", -90.0)):
        if abs((angle - at + 180) % 360 - 180) <= tolerance:
            return name
    return None


def listed(items: Sequence[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"

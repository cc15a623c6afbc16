"""Names for annotated things: nouns and plurals, positions in words, and descriptions that fit one thing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from pixelis.datasets.synthesis.geometry import middle
from pixelis.records import Region

GENERIC_LABELS = frozenset({"object", "thing", "entity", "region", "stuff", "text"})
ACROSS, DOWN = ("left", "middle", "right"), ("upper", "middle", "lower")
SIDES = {"left": "to its left", "right": "to its right", "up": "above it", "down": "below it"}
PREPOSITIONS = {"left": "to the left of", "right": "to the right of", "up": "above", "down": "below"}
COLOUR_SYNONYMS = {
    "gray": "grey",
    "teal": "cyan",
    "magenta": "pink",
    "violet": "purple",
    "turquoise": "cyan",
    "maroon": "brown",
}
"""Colour names of annotations, by which get_properties has other names."""
_ARTICLE = re.compile(r"^(a|an|the|this|that|one|his|her|their|its)\s+", re.IGNORECASE)
_PLURALS = {
    "person": "people",
    "man": "men",
    "woman": "women",
    "child": "children",
    "knife": "knives",
    "mouse": "mice",
}
_SAME_PLURAL = frozenset(
    {"sheep", "scissors", "skis", "fish", "deer", "aircraft", "broccoli", "luggage", "fruit"}
)


def plural(label: str) -> str:
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
    value = region.attributes.get("color", region.attributes.get("colour"))
    return value if isinstance(value, str) else None


def position(box: Sequence[float]) -> str:
    """The ninth of the picture that holds the middle of a box: ``upper left``, ``centre``."""
    x, y = middle(box)
    across, down = ACROSS[min(2, int(3 * x))], DOWN[min(2, int(3 * y))]
    if across == down == "middle":
        return "centre"
    return f"{down} {across}" if across != "middle" else f"{down} middle"


def half(coordinate: float, low: str, high: str, margin: float) -> str | None:
    """The name of the half that a coordinate lies in; None within ``margin`` of the middle."""
    return None if abs(coordinate - 0.5) < margin else low if coordinate < 0.5 else high


def noun(label: str) -> str:
    """A label without its article: labels from captions begin with one."""
    return _ARTICLE.sub("", label.strip())


def describe(regions: Sequence[Region], partial: Collection[str] = ()) -> dict[str, str]:
    """Descriptions that fit one region, by id: "the red cup", "the leftmost cup", "the cup in the centre".

    Of ``partial`` labels further things may be unannotated: only a position identifies one of them.
    """
    by_noun: dict[str, list[Region]] = {}  # "cup", "a cup" and "the cup" of captions are one kind
    for region in regions:
        by_noun.setdefault(noun(region.label), []).append(region)
    names: dict[str, str] = {}
    for name, members in by_noun.items():
        if all(region.label not in partial for region in members):
            colours = Counter(colour_of(region) for region in members)
            for region in members:
                colour = colour_of(region)
                if len(members) == 1:
                    names[region.id] = f"the {name}"
                elif colour and colours[colour] == 1 and colour.lower() not in name.lower().split():
                    names[region.id] = f"the {colour} {name}"
            names.update({key: text for key, text in _extremes(members) if key not in names})
        cells = Counter(position(region.box) for region in members)
        by_position = {
            r.id: f"the {name} in the {position(r.box)}" for r in members if cells[position(r.box)] == 1
        }
        names = {**by_position, **names}
    uses = Counter(names.values())  # "the red cup" may be a cup that is red and something labelled "red cup"
    return {region_id: name for region_id, name in names.items() if uses[name] == 1}


def _extremes(members: Sequence[Region], margin: float = 0.03) -> Iterable[tuple[str, str]]:
    """The ids and descriptions of the regions of one kind that lie farthest out by a clear margin."""
    if len(members) < 2:
        return
    for name, axis, sign in (("leftmost", 0, 1), ("rightmost", 0, -1), ("topmost", 1, 1), ("lowest", 1, -1)):
        first, second = sorted(members, key=lambda r: sign * middle(r.box)[axis])[:2]
        if sign * (middle(second.box)[axis] - middle(first.box)[axis]) >= margin:
            yield first.id, f"the {name} {noun(first.label)}"


def listed(items: Sequence[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"

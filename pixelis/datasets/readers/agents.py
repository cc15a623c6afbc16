"""Steps of people on web sites: Multimodal-Mind2Web. The HTML of the pages is not read."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from pixelis.datasets.annotation_geometry import box_xywh, header_size
from pixelis.datasets.fields import RowError, need, optional, parse_json, text, whole
from pixelis.datasets.media_root import MediaRoot
from pixelis.datasets.readers.base import AnnotationFile, DatasetRoot, Rows, image
from pixelis.records import Annotations, Question, Region

COLUMNS = [
    "action_uid",
    "operation",
    "pos_candidates",
    "website",
    "domain",
    "subdomain",
    "annotation_id",
    "confirmed_task",
    "screenshot",
    "action_reprs",
    "target_action_index",
]
NOT_RENDERED = ["-1"] * 4
_ELEMENT_NAME = re.compile(r"\[[^\]]*\]\s*(.*?)\s*->")


def mind2web(root: DatasetRoot) -> Rows:
    media_root = root.media_root()
    for path in root.paths("data/{split}-*.parquet", "data/{split}-00000-of-00027.parquet"):
        file = AnnotationFile(root, path)
        yield from file.each_row(functools.partial(_step, file, media_root), COLUMNS)


def _step(file: AnnotationFile, media_root: MediaRoot, row: dict[str, Any]) -> Question:
    key, goal = text(row, "action_uid"), text(row, "confirmed_task")
    uri = media_root.reference("screenshot", row.get("screenshot"))
    size = header_size(Path(uri))
    actions = [str(action) for action in need(row, "action_reprs", list)]
    step = whole(row.get("target_action_index"), "target_action_index")
    if step >= len(actions):
        raise RowError("target_action_index", "outside", f"step {step} of {len(actions)}")
    element_name = _ELEMENT_NAME.match(actions[step])
    regions, hidden = [], 0
    for i, candidate in enumerate(optional(row, "pos_candidates", list, [])):
        with file.collect_errors(f"{key}, pos_candidates[{i}]"):
            element = parse_json(candidate, "pos_candidates")
            attributes = parse_json(need(element, "attributes", str), "attributes")
            sides = text(attributes, "bounding_box_rect").split(",")
            if sides == NOT_RENDERED:
                hidden += 1
                continue
            tag, target = text(element, "tag"), bool(element.get("is_original_target"))
            label = (element_name[1] if element_name and target else "") or tag
            box = box_xywh(sides, *size, "bounding_box_rect")
            regions.append(
                Region(id=f"element{i}", label=label, box=box, attributes={"tag": tag, "target": target})
            )
    page: dict[str, Any] = {
        name: row.get(name) for name in ("annotation_id", "website", "domain", "subdomain")
    }
    return file.question(
        key,
        image(uri, size),
        Annotations(regions=regions, captions=[goal]),
        goal=goal,
        actions=actions,
        step=step,
        operation=parse_json(need(row, "operation", str), "operation"),
        hidden=hidden or None,
        **page,
    )

"""Steps of people on web sites: Multimodal-Mind2Web.

https://huggingface.co/datasets/osunlp/Multimodal-Mind2Web: parquet files with a row per step: a screenshot, the element of the
step (``pos_candidates``: JSON, its attributes JSON again with ``bounding_box_rect`` "left,top,width,height" in pixels, -1 for
elements that are not rendered), the operation, and the goal and all steps of the task (``confirmed_task``, ``action_reprs``).
Screenshots inside the rows become files of the cache. The HTML of the pages is not read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pixelis.datasets.annotation_geometry import box_xywh, header_size
from pixelis.datasets.fields import RowError, need, optional, parse_json, text, whole
from pixelis.datasets.media_root import MediaRoot
from pixelis.datasets.readers.base import AnnotationFile, DatasetRoot, Rows, image
from pixelis.errors import BadInput
from pixelis.records import Annotations, Question, Region

COLUMNS = [
    *("action_uid", "operation", "pos_candidates", "website", "domain", "subdomain", "annotation_id", "confirmed_task"),
    *("screenshot", "action_reprs", "target_action_index"),
]
NOT_RENDERED = ["-1"] * 4
_ELEMENT_NAME = re.compile(r"\[[^\]]*\]\s*(.*?)\s*->")


def _mind2web(root: DatasetRoot) -> Rows:
    root.path("data")
    paths = sorted(root.folder.glob(f"data/{root.split}-*.parquet"))
    if not paths:
        root.path("data/{split}-00000-of-00027.parquet")
    for path in paths:
        file, number = AnnotationFile(root, path), 0
        try:
            with pq.ParquetFile(path, pre_buffer=False) as table:
                if missing := [name for name in COLUMNS if name not in table.schema_arrow.names]:
                    raise BadInput(f"{path} has no column {missing[0]}", fix="give the official files")
                for batch in table.iter_batches(batch_size=4, columns=COLUMNS, use_threads=False):
                    for row in batch.to_pylist():
                        number += 1
                        yield from file.convert(number, _step, file, root.media_root(), row)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None


def _step(file: AnnotationFile, media_root: MediaRoot, row: dict[str, Any]) -> Question:
    key, goal = file.unique(text(row, "action_uid"), "action_uid"), text(row, "confirmed_task")
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
            regions.append(
                Region(
                    id=f"element{i}",
                    label=(element_name[1] if element_name and target else "") or tag,
                    box=box_xywh(sides, *size, "bounding_box_rect"),
                    attributes={"tag": tag, "target": target},
                )
            )
    page: dict[str, Any] = {name: row.get(name) for name in ("annotation_id", "website", "domain", "subdomain")}
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


READERS = {"mind2web": _mind2web}

"""Steps of people on web sites: Multimodal-Mind2Web.

https://huggingface.co/datasets/osunlp/Multimodal-Mind2Web: parquet files of one row a step, with a screenshot, the element that
was acted on (``pos_candidates``: JSON, its attributes JSON again with ``bounding_box_rect`` "left,top,width,height" in pixels,
-1 for what is not drawn), the operation, and the goal and all steps of the task (``confirmed_task``, ``action_reprs``).
Screenshots stand inside the rows; they become files of the cache. Pages themselves are not read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from pixelis.datasets.annotation_geometry import box_xywh, header_size
from pixelis.datasets.fields import RowError, need, optional, parse_json, text, whole
from pixelis.datasets.media_root import MediaRoot
from pixelis.datasets.readers.base import Checker, DatasetReader, DatasetRoot, Rows
from pixelis.errors import BadInput
from pixelis.records import Annotations, Media, Question, Region

COLUMNS = (
    *("action_uid", "operation", "pos_candidates", "website", "domain", "subdomain", "annotation_id", "confirmed_task"),
    *("screenshot", "action_reprs", "target_action_index"),
)
_NAMED = re.compile(r"\[[^\]]*\]\s*(.*?)\s*->")


def _mind2web(place: DatasetRoot) -> Rows:
    place.path("data")
    files = sorted(place.root.glob(f"data/{place.split}-*.parquet"))
    if not files:
        place.path("data/{split}-00000-of-00027.parquet")
    root = MediaRoot(fs.LocalFileSystem(), str(place.root), place.options["cache"] or None)
    for path in files:
        rows, number = Checker(path), 0
        try:
            with pq.ParquetFile(path, pre_buffer=False) as file:
                if missing := [name for name in COLUMNS if name not in file.schema_arrow.names]:
                    raise BadInput(f"{path} has no column {missing[0]}", fix="give the official files")
                for batch in file.iter_batches(batch_size=4, columns=list(COLUMNS), use_threads=False):
                    for row in batch.to_pylist():
                        number += 1
                        yield from rows.one(number, _step, place, root, rows, row)
        except (pa.ArrowException, OSError) as error:
            raise BadInput(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None


def _step(place: DatasetRoot, root: MediaRoot, rows: Checker, row: dict[str, Any]) -> Question:
    key, goal = rows.unique(text(row, "action_uid"), "action_uid"), text(row, "confirmed_task")
    uri = root.reference("screenshot", row.get("screenshot"))
    width, height = header_size(Path(uri))
    actions = [str(action) for action in need(row, "action_reprs", list)]
    step = whole(row.get("target_action_index"), "target_action_index")
    if step >= len(actions):
        raise RowError("target_action_index", "outside", f"step {step} of {len(actions)}")
    told: dict[str, Any] = {name: row.get(name) for name in ("annotation_id", "website", "domain", "subdomain")}
    named = _NAMED.match(actions[step])
    regions, hidden = [], 0
    for position, candidate in enumerate(optional(row, "pos_candidates", list, [])):
        with rows.row(f"{key}, pos_candidates[{position}]"):
            element = parse_json(candidate, "pos_candidates")
            attributes = parse_json(need(element, "attributes", str), "attributes")
            corners = text(attributes, "bounding_box_rect").split(",")
            if corners == ["-1"] * 4:
                hidden += 1
                continue
            tag = text(element, "tag")
            target = bool(element.get("is_original_target"))
            regions.append(
                Region(
                    id=f"element{position}",
                    label=(named[1] if named and target else "") or tag,
                    box=box_xywh(corners, width, height, "bounding_box_rect"),
                    attributes={"tag": tag, "target": target},
                )
            )
    return place.question(
        key,
        Media(id="img0", uri=uri, width=width, height=height),
        Annotations(regions=regions, captions=[goal]),
        dropped=rows.pending,
        goal=goal,
        actions=actions,
        step=step,
        operation=parse_json(need(row, "operation", str), "operation"),
        hidden=hidden or None,
        **told,
    )


READERS = {
    "mind2web": DatasetReader(
        "mind2web",
        "agents",
        _mind2web,
        "ROOT/data/SPLIT-00000-of-00027-....parquet (train, test_task, test_website, test_domain)",
        "https://huggingface.co/datasets/osunlp/Multimodal-Mind2Web",
        {"split": "train", "cache": ""},
    )
}

"""Records shared by all packages: one versioned schema for synthesis, SFT, RFT, memory, serving and logs.

Records contain references, never pixels or tensors: an image has an id within a trajectory (``img0``,
``obs1``), a URI or content hash, and a size.
"""

from __future__ import annotations

from pixelis.records.demonstration import Demonstration, Level, Provenance, SampleKind, Step, Verbatim
from pixelis.records.experience import (
    Experience,
    Feedback,
    Neighbour,
    PolicyVersion,
    UpdateTask,
    Verdict,
    VersionStatus,
    Vote,
)
from pixelis.records.question import (
    SCHEMA_VERSION,
    Annotations,
    Box,
    Coordinates,
    Event,
    Exchange,
    Function,
    Line,
    Media,
    Point,
    Question,
    Record,
    Region,
    Relation,
    Seconds,
    Span,
    new_id,
    place_media,
)
from pixelis.records.trajectory import Action, Group, ImageView, Observation, StopReason, Trajectory, Turn

__all__ = [
    "SCHEMA_VERSION",
    "Action",
    "Annotations",
    "Box",
    "Coordinates",
    "Demonstration",
    "Event",
    "Exchange",
    "Experience",
    "Feedback",
    "Function",
    "Group",
    "ImageView",
    "Level",
    "Line",
    "Media",
    "Neighbour",
    "Observation",
    "Point",
    "PolicyVersion",
    "Provenance",
    "Question",
    "Record",
    "Region",
    "Relation",
    "SampleKind",
    "Seconds",
    "Span",
    "Step",
    "StopReason",
    "Trajectory",
    "Turn",
    "UpdateTask",
    "Verbatim",
    "Verdict",
    "VersionStatus",
    "Vote",
    "new_id",
    "place_media",
]

"""Golden demonstrations by task: from annotated media to a question with the turns that answer it.

A form of question chooses its subject from the annotations, executes the operations and gives the annotated
answer. Where these contradict each other, the sample is dropped.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.narrator import Style
from pixelis.datasets.synthesis.sample import Form, Sample
from pixelis.datasets.synthesis.tasks import details, pixels, pointing, relations, text, video
from pixelis.errors import BadConfig, DataFailure
from pixelis.records import Demonstration, Question


@dataclass(frozen=True)
class Task:
    name: str
    forms: Mapping[str, Form]
    operations: Mapping[str, str] = field(default_factory=dict)
    """The operation by form, where it is no default one."""

    def available(self, operations: Container[str]) -> list[str]:
        return [
            form for form in self.forms if form not in self.operations or self.operations[form] in operations
        ]

    def make(
        self, question: Question, rng: np.random.Generator, executor: Executor, style: Style = "full"
    ) -> Demonstration:
        """A golden demonstration by the first form, in random order, that fits the annotations."""
        names = self.available(executor.operations)
        for index in rng.permutation(len(names)):
            sample = Sample(question, rng, executor, style, self.name, names[index])
            try:
                return self.forms[names[index]](sample)
            except DataFailure as failure:
                if failure.code != "unsuitable":
                    raise
        raise DataFailure(f"{question.id}: the annotations offer nothing for {self.name}", code="unsuitable")


def check_operations(names: Iterable[str], operations: Container[str]) -> None:
    """BadConfig for a task none of whose forms can be made with these operations."""
    for name in names:
        if name in TASKS and not TASKS[name].available(operations):
            missing = ", ".join(dict.fromkeys(TASKS[name].operations.values()))
            raise BadConfig(
                f"synthesis.tasks.{name} needs one of the operations {missing}",
                fix="add it to toolbox.operations",
            )


TASKS: dict[str, Task] = {
    name: Task(name, forms, *operations)
    for name, forms, *operations in (
        ("detail_perception", details.DETAILS),
        ("attributes", details.ATTRIBUTES),
        ("geometric_comparison", relations.GEOMETRY),
        ("counting", relations.COUNTING),
        ("relations", relations.RELATIONS),
        ("targeted_ocr", text.READING),
        ("frame_selection", video.FRAMES),
        ("spatio_temporal_tracking", video.TRACKING),
        ("impaired_text", text.IMPAIRED, {"turned": "rotate", "mirrored": "flip", "dark": "enhance"}),
        ("measurement", relations.MEASUREMENT, dict.fromkeys(relations.MEASUREMENT, "measure")),
        ("marked_counting", relations.MARKING, {"marked": "mark"}),
        ("found_counting", relations.FINDING, {"found": "find"}),
        ("pixel_values", pixels.PIXELS, dict.fromkeys(pixels.PIXELS, "python")),
        ("picture_comparison", relations.COMPARISON, dict.fromkeys(relations.COMPARISON, "compare")),
        ("moment_search", video.SEARCH, dict.fromkeys(video.SEARCH, "search_clip")),
        ("pointing", pointing.POINTING),
        ("follow_up", {**details.FOLLOW_UPS, **relations.FOLLOW_UPS, **text.FOLLOW_UPS, **video.FOLLOW_UPS}),
    )
}
"""Every task by name."""

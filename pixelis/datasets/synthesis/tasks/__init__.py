"""Golden demonstrations by task: annotated media in, a question with the turns of an assistant that answers it out.

A task has several forms of question. A form takes what it speaks of from the annotations, executes the operations, and gives the
answer that the annotations hold; where what was executed says something else, the sample is dropped with a code. Codes:
``unsuitable`` (nothing in the annotations for this task), ``outline_differs``, ``text_differs``, ``track_differs``,
``measure_differs``, ``not_shown``, and those of refused operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pixelis.datasets.synthesis.executor import Executor
from pixelis.datasets.synthesis.narrator import Style
from pixelis.datasets.synthesis.sample import Form, Sample
from pixelis.datasets.synthesis.tasks import details, relations, text, video
from pixelis.errors import DataFailure
from pixelis.records import Demonstration, Question


@dataclass(frozen=True)
class Task:
    """A kind of question with the forms it comes in."""

    name: str
    forms: Mapping[str, Form]

    def make(self, question: Question, rng: np.random.Generator, executor: Executor, style: Style = "full") -> Demonstration:
        """A golden demonstration about annotated media; the same arguments give the same one.

        Forms are tried in an order that ``rng`` gives until one fits the annotations. DataFailure says why there is none.
        """
        names = list(self.forms)
        for place in rng.permutation(len(names)):
            sample = Sample(question, rng, executor, style, self.name, names[place])
            try:
                return self.forms[names[place]](sample)
            except DataFailure as failure:
                if failure.code != "unsuitable":
                    raise
        raise DataFailure(f"{question.id}: nothing annotated for {self.name}", code="unsuitable")


TASKS: dict[str, Task] = {
    name: Task(name, forms)
    for name, forms in (
        ("detail_perception", details.DETAILS),
        ("attributes", details.ATTRIBUTES),
        ("geometric_comparison", relations.GEOMETRY),
        ("counting", relations.COUNTING),
        ("relations", relations.RELATIONS),
        ("targeted_ocr", text.READING),
        ("frame_selection", video.FRAMES),
        ("spatio_temporal_tracking", video.TRACKING),
    )
}
"""Every task by name."""

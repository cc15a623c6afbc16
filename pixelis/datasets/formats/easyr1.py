"""EasyR1's rows ``{problem, answer}`` with ``images`` or ``videos``."""

from __future__ import annotations

from pixelis.datasets.formats.base import Columns, Format

COLUMNS = Columns(question="problem", answers="answer", images="images", videos="videos", placeholder="<{}>")
FORMATS = {"easyr1": Format("problem answer", COLUMNS.read, COLUMNS.write, excluded="solution image doc_id cot")}

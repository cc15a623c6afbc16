"""EasyR1's rows ``{problem, answer}`` with ``images`` or ``videos``."""

from __future__ import annotations

from pixelis.datasets.formats.table import Columns

COLUMNS = Columns(question="problem", answers="answer", images="images", videos="videos", placeholder="<{}>")
FORMATS = {"easyr1": COLUMNS.format("problem answer", excluded="solution image image_path doc_id cot")}

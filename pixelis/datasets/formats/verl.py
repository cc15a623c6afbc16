"""Parquet rows of verl, of DeepEyes (with images, and tools in ``env_name``) and TTRL (text)."""

from __future__ import annotations

from pixelis.datasets import fields
from pixelis.datasets.formats.base import Format, Row, scorer_of
from pixelis.datasets.formats.chat import read_chat
from pixelis.datasets.formats.messages import show_media, turns_of
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Question
from pixelis.rewards.scorers import option_lines

MATH_SOURCES = frozenset(("thinklite_eureka", "xince"))
"""The sources that DeepEyes rewards as mathematics."""


def _read(row: Row, name: str, root: MediaRoot) -> Question:
    """The question of the last user turn, with the earlier ones as history; text rows may lack the answer."""
    source = fields.identifier(row, "data_source")
    turns = show_media(turns_of(row, "prompt", root), root.media(row, "images", "videos"), "prompt")
    extra = fields.optional(row, "extra_info", dict, {})
    index, reward_model = fields.identifier(extra, "index"), fields.need(row, "reward_model", dict)
    question = read_chat(row, name, turns, "prompt", "images", "videos", "data_source", asks=True)[-1]
    meta, task, answers = question.meta, source or "qa", None
    scorer = "mc_letter" if option_lines(question.question) else "math"
    if (has_media := row.get("images") is not None or "env_name" in row) or reward_model.get(
        "ground_truth"
    ) not in (None, ""):
        answers = fields.answers(reward_model, "ground_truth")
    if has_media and answers is not None:
        scorer = "judge"
        if source in MATH_SOURCES:
            task, scorer, meta["data_source"] = "math", "math_judge", source
        scorer = scorer_of(answers, scorer)
    tools: list[str] | None = None
    environment = None
    # DeepEyes's own environments of pictures are operations, any other name is one of the run
    if "env_name" in row:
        environment = fields.identifier(row, "env_name")
        if not environment:
            tools = []
        elif environment.startswith(("visual_toolbox", "vl_agent")):
            tools, environment = ["zoom_in", "rotate"], None
    own = {
        "id": f"{source}-{index}" if source and index else index or name,
        "answers": answers,
        "scorer": scorer,
        "task": task,
        "split": fields.identifier(extra, "split") or "train",
        "tools": tools,
        "environment": environment,
    }
    return question.model_copy(update=own)


VERL = Format(_read)

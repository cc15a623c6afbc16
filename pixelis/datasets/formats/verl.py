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
    extra, model = fields.optional(row, "extra_info", dict, {}), fields.need(row, "reward_model", dict)
    index = fields.identifier(extra, "index")
    question = read_chat(row, name, turns, "prompt", "images", "videos", "data_source", asks=True)[-1]
    question.id = f"{source}-{index}" if source and index else index or name
    question.task, question.split = source or "qa", fields.identifier(extra, "split") or "train"
    question.scorer = "mc_letter" if option_lines(question.question) else "math"
    is_deepeyes = row.get("images") is not None or "env_name" in row
    if is_deepeyes or model.get("ground_truth") not in (None, ""):
        question.answers = fields.answers(model, "ground_truth")
    if is_deepeyes and question.answers is not None:
        scorer = "judge"
        if source in MATH_SOURCES:
            question.task, scorer, question.meta["data_source"] = "math", "math_judge", source
        question.scorer = scorer_of(question.answers, scorer)
    # DeepEyes's own environments of pictures are operations, any other name is one of the run
    environment = fields.identifier(row, "env_name")
    if environment and not environment.startswith(("visual_toolbox", "vl_agent")):
        question.environment = environment
    elif "env_name" in row:
        question.tools = ["zoom_in", "rotate"] if environment else []
    return question


VERL = Format(_read)

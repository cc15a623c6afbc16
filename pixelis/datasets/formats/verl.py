"""The rows of verl, as TTRL and DeepEyes write them: a chat, images, and the answer in ``reward_model``."""

from __future__ import annotations

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Row, other_columns, question_text, scorer_of
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Question

MATH_SOURCES = frozenset(("thinklite_eureka", "xince"))
"""The sources that DeepEyes rewards as mathematics: task ``math``, whatever the question is."""


def read_chat_row(row: Row, name: str, root: MediaRoot) -> Question:
    """The question of the last user turn; RowError names the column that cannot be used."""
    messages, source = row.get("prompt"), fields.identifier(row, "data_source")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        raise RowError("prompt", "wrong_type", "expected a list of messages with `role` and `content`")
    user_turns = [m["content"] for m in messages if m.get("role") == "user"]
    if not user_turns:
        raise RowError("prompt", "empty", "the chat has no user turn")
    media = root.media(row, "images", "videos")
    extra = fields.optional(row, "extra_info", dict, {})
    index, answers = fields.identifier(extra, "index"), fields.answers(fields.need(row, "reward_model", dict), "ground_truth")
    meta = other_columns(row, "prompt", "images", "videos", "data_source")
    task, scorer = source or "qa", "math"
    if row.get("images") is not None or "env_name" in row:
        scorer = "judge"
        if source in MATH_SOURCES:
            task, scorer, meta["data_source"] = "math", "math_judge", source
    if system := "\n".join(m["content"] for m in messages if m.get("role") == "system"):
        meta["system"] = system
    return Question(
        id=f"{source}-{index}" if source and index else index or name,
        question=question_text(user_turns[-1], "prompt", media),
        media=media,
        answers=answers,
        scorer=scorer_of(answers, scorer),
        task=task,
        split=fields.identifier(extra, "split") or "train",
        tools=_tools(row),
        meta=meta,
    )


def _tools(row: Row) -> list[str] | None:
    """The operations of DeepEyes' environment `env_name`: none for an empty name, those of the run without the column."""
    if "env_name" not in row:
        return None
    name = fields.identifier(row, "env_name") or ""
    if name and not name.startswith(("visual_toolbox", "vl_agent")):
        raise RowError("env_name", "unknown_environment", f"no environment {name!r}: visual_toolbox or an empty name (no tools)")
    return ["zoom_in", "rotate"] if name else []


def write_chat_row(record: Question, style: str, ability: str) -> Row:
    """The row of a question without its images; ``style`` is how verl scores it."""
    marks, source = "".join(f"<{item.kind}>" for item in record.media), record.meta.get("data_source", record.task)
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": marks + record.question}],
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": (record.answers or [""])[0]},
        "extra_info": {"split": record.split, "index": record.id.removeprefix(f"{source}-")},
    }

"""The rows of verl, as TTRL and DeepEyes write them: a chat, images, and the answer in ``reward_model``."""

from __future__ import annotations

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Row, marked, other_columns, question_text, scorer_of
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Question
from pixelis.rewards.scorers import option_lines

MATH_SOURCES = frozenset(("thinklite_eureka", "xince"))
"""The sources that DeepEyes rewards as mathematics: task ``math``, whatever the question is."""


def read_chat_row(row: Row, name: str, root: MediaRoot) -> Question:
    """The question of the one user turn; RowError names the column that cannot be used.

    Rows without media may lack the answer, and their scorer follows from the question alone.
    """
    messages, source = row.get("prompt"), fields.identifier(row, "data_source")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        raise RowError("prompt", "wrong_type", "expected a list of messages with `role` and `content`")
    user_turns = [m["content"] for m in messages if m.get("role") == "user"]
    if not user_turns:
        raise RowError("prompt", "empty", "the chat has no user turn")
    if len(user_turns) > 1 or any(m.get("role") == "assistant" for m in messages):
        raise RowError("prompt", "second_question", "the chat has several turns, but a question is one")
    media = root.media(row, "images", "videos")
    extra = fields.optional(row, "extra_info", dict, {})
    index, reward_model = fields.identifier(extra, "index"), fields.need(row, "reward_model", dict)
    meta = other_columns(row, "prompt", "images", "videos", "data_source")
    task, answers = source or "qa", None
    scorer = "mc_letter" if option_lines(user_turns[0]) else "math"
    if (has_media := row.get("images") is not None or "env_name" in row) or reward_model.get("ground_truth") not in (None, ""):
        answers = fields.answers(reward_model, "ground_truth")
    if has_media and answers is not None:
        scorer = "judge"
        if source in MATH_SOURCES:
            task, scorer, meta["data_source"] = "math", "math_judge", source
        scorer = scorer_of(answers, scorer)
    if system := "\n".join(m["content"] for m in messages if m.get("role") == "system"):
        meta["system"] = system
    tools, environment = _tools(row)
    return Question(
        id=f"{source}-{index}" if source and index else index or name,
        question=question_text(user_turns[0], "prompt", media),
        media=media,
        answers=answers,
        scorer=scorer,
        task=task,
        split=fields.identifier(extra, "split") or "train",
        tools=tools,
        environment=environment,
        meta=meta,
    )


def _tools(row: Row) -> tuple[list[str] | None, str | None]:
    """The operations and the environment of ``env_name``.

    DeepEyes' own environments of pictures are operations, an empty name means none, and without the column they are those of the
    run. Any other name is that of an environment, which the run must know (``toolbox.environments``).
    """
    if "env_name" not in row:
        return None, None
    name = fields.identifier(row, "env_name") or ""
    if not name:
        return [], None
    if name.startswith(("visual_toolbox", "vl_agent")):
        return ["zoom_in", "rotate"], None
    return None, name


def write_chat_row(record: Question, style: str, ability: str) -> Row:
    """The row of a question without its images; ``style`` is how verl scores it."""
    meta = record.meta
    source, system = meta.get("data_source", record.task), meta.get("system")
    model, extra = meta.get("reward_model", {}), meta.get("extra_info", {})
    index = record.id.removeprefix(f"{source}-")
    return {
        "data_source": source,
        "prompt": [
            *([{"role": "system", "content": system}] if system else []),
            {"role": "user", "content": marked(record, "<{}>\n")},
        ],
        "ability": meta.get("ability", ability),
        "reward_model": {"style": style, **model} | ({"ground_truth": record.answers[0]} if record.answers else {}),
        "extra_info": {**extra, "split": record.split, "index": extra["index"] if str(extra.get("index")) == index else index},
    }

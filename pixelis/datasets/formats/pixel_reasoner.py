"""Pixel-Reasoner's rows: one question each for reinforcement learning, ``message_list`` for SFT."""

from __future__ import annotations

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Format, Row, other_columns, question_text, scorer_of
from pixelis.datasets.formats.chat import read_chat
from pixelis.datasets.formats.messages import turns_of
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Media, Question

LEARNT_TURNS = 2
"""Pixel-Reasoner trains on the last two turns of the assistant: wrong crops are not marked."""


def _read(row: Row, name: str, root: MediaRoot) -> Question:
    own_id = fields.identifier(row, "qid") or name
    media = root.media(row, images="image")
    if row.get("is_video"):
        if not media:
            raise RowError("image", "no_media", "the clip has no frames")
        media = [Media(id="vid0", kind="video", frames=[item.uri for item in media])]
    answers = fields.answers(row, "answer")
    return Question(
        id=own_id,
        question=question_text(fields.text(row, "question"), "question", media),
        media=media,
        answers=answers,
        scorer=scorer_of(answers, "pixel_reasoner"),
        task=own_id.partition("-")[0] if "-" in own_id else "qa",
        meta=other_columns(row, "qid", "question", "answer", "image", "is_video"),
    )


def _read_chat(row: Row, name: str, root: MediaRoot) -> list[Question]:
    turns = turns_of(row, "message_list", root)
    return read_chat(row, name, turns, "message_list", learnt_turns=LEARNT_TURNS)


PIXEL_REASONER, PIXEL_REASONER_SFT = Format(_read), Format(_read_chat)

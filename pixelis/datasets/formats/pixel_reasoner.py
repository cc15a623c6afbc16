"""Pixel-Reasoner's rows: one question each for reinforcement learning, ``message_list`` for SFT."""

from __future__ import annotations

from pixelis.datasets import fields
from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Format, Row, other_columns, question_text, scorer_of, whole_clip
from pixelis.datasets.formats.chat import calls_of, read_chat, result_text
from pixelis.datasets.formats.messages import turns_of
from pixelis.datasets.media_root import MediaRoot
from pixelis.errors import BadInput
from pixelis.records import Demonstration, Media, Question

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


def _write(record: Question) -> Row:
    clips = [item for item in record.media if item.kind == "video"]
    if clips and (len(record.media) > 1 or not clips[0].frames):
        raise BadInput(f"{record.id}: rows of this format hold images, or one clip as a list of frames")
    paths = whole_clip(record, clips[0]) if clips else [item.uri for item in record.media]
    return {
        "qid": record.id,
        "question": record.question,
        "answer": record.answers,
        "image": paths,
        "is_video": bool(clips),
    }


def _read_chat(row: Row, name: str, root: MediaRoot) -> list[Question]:
    return read_chat(
        row, name, turns_of(row, "message_list", root), "message_list", learnt_turns=LEARNT_TURNS
    )


def _write_chat(record: Demonstration, replies: list[str], images: list[list[str]]) -> Row:
    media = [
        {"image": item.uri} if item.kind == "image" else {"video": whole_clip(record, item)}
        for item in record.media
    ]
    users: list[list[Row]] = [[*media, {"text": record.question}]]
    for turn, files in zip(calls_of(record), images, strict=True):
        users.append(
            [{"text": result_text(turn, files) or "The result:"}, *({"image": path} for path in files)]
        )
    system = record.meta.get("system")
    turns: list[Row] = [{"role": "system", "content": [{"text": system}]}] if system else []
    for user, reply in zip(users, replies, strict=True):
        turns += [{"role": "user", "content": user}, {"role": "assistant", "content": [{"text": reply}]}]
    return {"message_list": turns}


PIXEL_REASONER = Format(_read, _write)
PIXEL_REASONER_SFT = Format(_read_chat, write_chat=_write_chat, dialect="pixel_reasoner")

"""ShareGPT chats: ``conversations`` or ``messages``, with media in columns of the row."""

from __future__ import annotations

import functools

from pixelis.datasets import fields
from pixelis.datasets.formats.base import ANSWERS, IMAGES, VIDEOS, Format, Row, first_column
from pixelis.datasets.formats.chat import read_chat
from pixelis.datasets.formats.messages import ChatTurn, reply_of, show_media, turns_of
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Question


def _read(chat: str, row: Row, name: str, root: MediaRoot, reply: bool = False) -> list[Question]:
    """The demonstrations of a row, or its question; ``reply``: with the separate answer as a turn."""
    images, videos, truth = (first_column(row, names) for names in (IMAGES, VIDEOS, ANSWERS))
    turns = show_media(turns_of(row, chat, root), root.media(row, images, videos), chat)
    asks = turns[-1].role == "user" and bool(truth)
    truths = fields.answers(row, truth) if asks or truth == "answer" else None
    if asks and reply:
        turns.append(ChatTurn("assistant", reply_of(row[truth])))
    used = (chat, images, videos, truth if truths else "")
    return read_chat(row, name, turns, *used, truths=truths, asks=asks and not reply)


def _format(chat: str) -> Format:
    return Format(functools.partial(_read, chat), functools.partial(_read, chat, reply=True))


CONVERSATIONS, MESSAGES = _format("conversations"), _format("messages")

"""ShareGPT chats: ``conversations`` or ``messages``, with media in columns of the row."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from pixelis.datasets import fields
from pixelis.datasets.formats.base import ANSWERS, IMAGES, VIDEOS, Format, Row, first_column, image_paths
from pixelis.datasets.formats.chat import calls_of, read_chat, result_text
from pixelis.datasets.formats.messages import ChatTurn, reply_of, show_media, turns_of
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Demonstration, Question


@dataclass(frozen=True)
class ChatColumns:
    """The column of a chat, and the keys and role names of its messages."""

    chat: str
    role: str
    text: str
    user: str
    assistant: str
    placeholder: str

    def format(self, dialect: str) -> Format:
        return Format(
            self.read,
            write_chat=self.write,
            demonstrate=functools.partial(self.read, reply=True),
            dialect=dialect,
        )

    def read(self, row: Row, name: str, root: MediaRoot, reply: bool = False) -> list[Question]:
        images, videos, truth = (first_column(row, names) for names in (IMAGES, VIDEOS, ANSWERS))
        turns = show_media(turns_of(row, self.chat, root), root.media(row, images, videos), self.chat)
        asks = turns[-1].role == "user" and bool(truth)
        truths = fields.answers(row, truth) if asks or truth == "answer" else None
        if asks and reply:
            turns.append(ChatTurn("assistant", reply_of(row[truth])))
        used = (self.chat, images, videos, truth if truths else "")
        return read_chat(row, name, turns, *used, truths=truths, asks=asks and not reply)

    def write(self, record: Demonstration, replies: list[str], images: list[list[str]]) -> Row:
        paths = image_paths(record)
        results = [
            result_text(turn, files, "<image>") for turn, files in zip(calls_of(record), images, strict=True)
        ]
        system = record.meta.get("system")
        chat: list[Row] = [{self.role: "system", self.text: system}] if system else []
        question = (
            record.question
            if "<image>" in record.question
            else self.placeholder * len(paths) + record.question
        )
        for user, reply in zip([question, *results], replies, strict=True):
            chat += [{self.role: self.user, self.text: user}, {self.role: self.assistant, self.text: reply}]
        return {
            "id": record.id,
            self.chat: chat,
            "images": [*paths, *(path for files in images for path in files)],
        }


CONVERSATIONS = ChatColumns("conversations", "from", "value", "human", "gpt", "<image>\n").format("mini_o3")
MESSAGES = ChatColumns("messages", "role", "content", "user", "assistant", "<image>").format("plain")

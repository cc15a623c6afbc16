"""ShareGPT chats: ``conversations`` of ``from`` and ``value`` (Mini-o3), ``messages`` of ``role`` and ``content`` (Reason-RFT).

The images lie in the column ``images``, in the order of the ``<image>`` in the user turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from pixelis.datasets.fields import RowError
from pixelis.datasets.formats.base import Format, Row, image_paths
from pixelis.datasets.formats.chat import (
    ChatTurn,
    calls_of,
    demonstration_of,
    messages_of,
    result_text,
    role_of,
)
from pixelis.datasets.media_root import MediaRoot
from pixelis.records import Demonstration


@dataclass(frozen=True)
class ChatColumns:
    """The column of a chat, and the keys and role names of its messages."""

    chat: str
    role: str
    text: str
    user: str
    assistant: str
    placeholder: str

    def read(self, row: Row, name: str, root: MediaRoot) -> Demonstration:
        """The demonstration of a row; RowError names the column that cannot be used."""
        turns = []
        media = root.media(row, "images" if row.get("images") is not None else "image", "videos")
        images, clips = ([item for item in media if item.kind == kind] for kind in ("image", "video"))
        for i, message in enumerate(messages_of(row, self.chat)):
            text = message.get(self.text)
            if not isinstance(text, str):
                raise RowError(f"{self.chat}.{i}.{self.text}", "wrong_type", "expected text")
            turn = ChatTurn(role_of(message.get(self.role), f"{self.chat}.{i}.{self.role}"), text)
            if turn.role == "user":
                for mark, remaining in (("<image>", images), ("<video>", clips)):
                    count = text.count(mark)
                    if count > len(remaining):
                        raise RowError(self.chat, "media_count", f"the chat has more {mark} than the row has of them")
                    turn.media += remaining[:count]
                    del remaining[:count]
            turns.append(turn)
        first = next((turn for turn in turns if turn.role == "user"), None)
        if (images or clips) and first is not None:
            if any(turn.media for turn in turns):
                unnamed = len(images) + len(clips)
                raise RowError(self.chat, "media_count", f"{unnamed} media of the row have no <image> or <video> in the chat")
            first.media = [*images, *clips]
        return demonstration_of(row, name, turns, self.chat, "images", "image", "videos")

    def write(self, record: Demonstration, replies: list[str], images: list[list[str]]) -> Row:
        """The row of a demonstration; BadInput if it has clips."""
        paths = image_paths(record)
        results = [result_text(turn, files, "<image>") for turn, files in zip(calls_of(record), images, strict=True)]
        system = record.meta.get("system")
        chat: list[Row] = [{self.role: "system", self.text: system}] if system else []
        question = record.question if "<image>" in record.question else self.placeholder * len(paths) + record.question
        for user, reply in zip([question, *results], replies, strict=True):
            chat += [{self.role: self.user, self.text: user}, {self.role: self.assistant, self.text: reply}]
        return {
            "id": record.id,
            self.chat: chat,
            "images": [*paths, *(path for files in images for path in files)],
        }


CONVERSATIONS = ChatColumns("conversations", "from", "value", "human", "gpt", "<image>\n")
MESSAGES = ChatColumns("messages", "role", "content", "user", "assistant", "<image>")
FORMATS = {
    "sharegpt": Format(
        "conversations",
        CONVERSATIONS.read,
        write_chat=CONVERSATIONS.write,
        dialect="mini_o3",
        excluded="messages message_list",
    ),
    "sharegpt_messages": Format(
        "messages", MESSAGES.read, write_chat=MESSAGES.write, dialect="plain", excluded="conversations message_list"
    ),
}

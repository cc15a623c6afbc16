"""A question as the body of ``POST /v1/agent``."""

from __future__ import annotations

import base64
from typing import Any

from pixelis.config import ToolboxConfig
from pixelis.datasets.media import encoded_card
from pixelis.errors import BadInput
from pixelis.operations.encoded import media_type, read_encoded
from pixelis.records import Question


def agent_request(question: Question, caps: ToolboxConfig) -> dict[str, Any]:
    """``question``, ``image``, ``video`` and ``history``, with the media as data URLs. BadInput."""
    urls = dict[str, str]()
    for media in question.media:
        if media.frames or media.spans:
            raise BadInput(
                f"{media.id} is no file that can be sent",
                code="media_not_sent",
                fix="give the clip as one file",
            )
        if media.uri.startswith("data:"):
            urls[media.id] = media.uri
        elif media.uri.startswith("cards:"):
            urls[media.id] = encoded_card(media.uri, caps)
        else:
            limit = caps.max_image_bytes if media.kind == "image" else caps.max_video_bytes
            content = read_encoded(media.uri, limit, media.kind)
            urls[media.id] = f"data:{media_type(content)};base64,{base64.b64encode(content).decode('ascii')}"
    kinds = {media.id: media.kind for media in question.media}

    def shown(ids: list[str]) -> dict[str, list[str]]:
        return {kind: [urls[id] for id in ids if kinds[id] == kind] for kind in ("image", "video")}

    earlier = {id for exchange in question.history for id in exchange.media}
    history = [{"question": e.question, "answer": e.answer, **shown(e.media)} for e in question.history]
    return {
        "question": question.question,
        "history": history,
        **shown([id for id in urls if id not in earlier]),
    }

"""Parts of messages as chat completions and responses spell them: texts, pictures and clips as data URLs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pixelis.errors import BadInput
from pixelis.operations.encoded import decode_base64, media_type
from pixelis.protocol.errors import ApiError, invalid, text_or

IMAGE_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "image/bmp", "image/tiff")
VIDEO_TYPES = ("video/mp4", "video/webm", "video/quicktime", "video/x-matroska", "image/gif", "video/gif")
MAX_PARTS = 256
_DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.IGNORECASE)

Kind = Literal["image", "video"]


class LenientModel(BaseModel):
    """A part of a request body that ignores unknown fields."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Medium(LenientModel):
    """A picture or clip: its ``url``, an uploaded file, a file's data, or base64 ``data`` of a ``format``."""

    url: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    data: str | None = None
    format: Literal["mp4", "webm", "gif"] = "mp4"

    def data_url(self, files: Mapping[str, str], kind: Kind | None, place: str) -> str:
        """Raises ApiError 400 if there is none, or of another kind."""
        if self.file_id is not None:
            return file_url(files, self.file_id, kind, place)
        if self.file_data is not None:
            return file_url({"": typed_data_url(self.file_data, place)}, "", kind, place)
        if self.data is not None:
            return f"data:{'image' if self.format == 'gif' else 'video'}/{self.format};base64,{self.data}"
        if self.url is None:
            raise invalid(place, "there is neither an address nor a file")
        return self.url


MEDIA: dict[str, Kind | None] = {
    **dict.fromkeys(("image_url", "image_file", "input_image"), "image"),
    **dict.fromkeys(("video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file")),
}
"""Kind of the content of each type of part, None if it may be either."""


class Part(LenientModel):
    """One part of a message, as chat completions or responses spell it."""

    type: str
    text: str | None = None
    image_url: text_or(Medium) | None = None  # type: ignore[valid-type]
    video_url: text_or(Medium) | None = None  # type: ignore[valid-type]
    input_video: Medium | None = None
    image_file: Medium | None = None
    file: Medium | None = None
    file_id: str | None = None
    file_data: str | None = None

    @property
    def medium(self) -> Medium:
        for medium in (self.image_url, self.video_url, self.input_video, self.image_file, self.file):
            if medium is not None:
                return Medium(url=medium) if isinstance(medium, str) else medium
        return Medium(file_id=self.file_id, file_data=self.file_data)


Content = text_or(Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)])


def file_ids(contents: Iterable[str | list[Part] | None]) -> list[str]:
    """The uploaded files that messages with these contents name."""
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [id for part in parts if (id := part.medium.file_id) is not None]


def file_url(files: Mapping[str, str], id: str, kind: Kind | None, param: str) -> str:
    """The data URL of a file. Raises ApiError 400 if missing or of another kind."""
    url = files.get(id)
    if url is None:
        raise ApiError(400, f"no file {id[:80]!r} is stored", "file_not_found", param)
    if kind is not None and not url.startswith((f"data:{kind}/", "data:image/gif")):
        noun = "picture" if kind == "image" else "clip"
        raise invalid(param, f"the file {id} is no {noun}", "file_type")
    return url


def typed_data_url(data: str, param: str) -> str:
    """The data URL of base64 data or of a data URL, typed by its first bytes."""
    body = data.partition(",")[2] if data[:5].lower() == "data:" else data
    try:
        return f"data:{media_type(decode_base64(body))};base64,{body}"
    except ValueError:
        raise invalid(param, "the file's data is not base64", "file_encoding") from None
    except BadInput as error:
        raise invalid(param, error.message, error.code) from None


def kind_url(url: str, kind: Kind | None, param: str) -> str:
    """The data URL of a picture or clip, with the type of its kind.

    Raises ApiError 400 unless ``url``, at ``param``, is one in base64. A gateway that fetched other addresses
    would open the network and the disk behind it.
    """
    if kind is None:
        kind = "video" if url.startswith("data:video/") else "image"
    noun, types = ("picture", IMAGE_TYPES) if kind == "image" else ("clip", VIDEO_TYPES)
    head = _DATA_URL.match(url[:200])
    if head is None:
        problem, what = f"must be a data URL such as data:{types[0]};base64,..., nothing is fetched", "scheme"
    elif head.group(1).lower() not in types:
        problem, what = f"must be one of {', '.join(types)}", "type"
    elif not head.group(2).lower().endswith(";base64"):
        problem, what = "must be base64 in its data URL", "encoding"
    else:
        # A GIF is either
        return re.sub("^data:(image|video)/", f"data:{kind}/", url, count=1, flags=re.IGNORECASE)
    raise invalid(param, f"the {noun} {problem}", f"{kind}_{what}")

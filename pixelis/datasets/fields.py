"""Reads the fields of foreign rows with type checks, and the media that they refer to."""

from __future__ import annotations

import hashlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from pyarrow import fs

from pixelis.errors import BadInput, InfraFailure
from pixelis.records import Media

CACHE = "~/.cache/pixelis/media"
"""Where media that come inside rows are kept as files, unless the source says otherwise."""
PIECE = 1 << 20
"""Bytes of a file elsewhere that are held at a time."""
PLACEHOLDER = re.compile(r"\s*<(image|video)>\s*")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class RowError(Exception):
    """Why a row cannot be used; ``column`` and ``code`` become those of its ``BadRow``."""

    def __init__(self, column: str, code: str, message: str):
        super().__init__(message)
        self.column, self.code, self.message = column, code, message


class Root:
    """Where the media of rows are: the folder of ``system`` that relative references stay under, and the cache of files."""

    def __init__(self, system: fs.FileSystem, folder: str, cache: str | None = None):
        self.system, self.folder = system, os.path.normpath(folder)
        self.local = isinstance(system, fs.LocalFileSystem)
        if self.local:
            self.folder = os.path.abspath(self.folder)
        self.cache = Path(cache or CACHE).expanduser().absolute()

    def reference(self, column: str, value: Any) -> str:
        """The URI of one picture or clip: a path, a path under the folder, a ``data:`` or ``cards:`` URI, or bytes.

        Bytes, alone or as ``{"bytes": ..., "path": ...}``, become a file of the cache. Faults: media_type, media_scheme,
        media_traversal, media_not_found, no_media. InfraFailure when the filesystem does not answer: were its file taken for
        missing, a run that goes on by number would go on with another question.
        """
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path") or value.get("image")
        if isinstance(value, bytes):
            return self._keep(hashlib.sha256(value).hexdigest(), lambda file: file.write(value))
        if value is None or value == "":
            raise RowError(column, "no_media", "no picture or clip is named")
        if not isinstance(value, str):
            raise RowError(column, "media_type", f"a picture is named by text, not {type(value).__name__}")
        if scheme := _SCHEME.match(value):
            if scheme[1].lower() in ("data", "cards", "packaged"):
                return value
            raise RowError(column, "media_scheme", f"{scheme[1]}: references are not followed")
        if "\0" in value:
            raise RowError(column, "media_traversal", "the reference holds a NUL character")
        if os.path.isabs(value):
            return self._local(column, value)
        path = os.path.normpath(f"{self.folder}/{value}")
        if path != self.folder and not path.startswith(self.folder.rstrip("/") + "/"):
            raise RowError(column, "media_traversal", f"{value[:100]} leads out of the media folder")
        if self.local:
            return self._local(column, path)
        name = hashlib.sha256(f"{self.system.type_name}:{path}".encode()).hexdigest()
        return self._keep(name, lambda file: self._fetch(column, path, file))

    def _local(self, column: str, path: str) -> str:
        if not os.path.isfile(path):
            raise RowError(column, "media_not_found", f"there is no file {path[:300]}")
        return path

    def _fetch(self, column: str, path: str, file: IO[bytes]) -> None:
        if self.system.get_file_info(path).type != fs.FileType.File:
            raise RowError(column, "media_not_found", f"there is no file {path[:300]}")
        with self.system.open_input_stream(path) as stream:
            while piece := stream.read(PIECE):
                file.write(piece)

    def _keep(self, name: str, write: Callable[[IO[bytes]], Any]) -> str:
        target = self.cache / name[:2] / name
        if target.is_file():
            return str(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                with (part := Path(folder, name)).open("wb") as file:
                    write(file)
                os.replace(part, target)  # whoever reads it sees all of it
        except OSError as error:
            raise InfraFailure(f"a file for {self.cache} cannot be had: {error}", fix="see to network, disk and rights") from None
        return str(target)


class Fields:
    """The columns of one row. What is wrong raises ``RowError`` with the name of the column."""

    def __init__(self, values: dict[str, Any], root: Root):
        self.values, self.root = values, root

    def __contains__(self, column: str) -> bool:
        return self.values.get(column) is not None

    def get(self, column: str) -> Any:
        """Whatever stands there; ``missing_column`` when nothing does."""
        if column not in self.values:
            raise RowError(column, "missing_column", "the column is missing")
        return self.values[column]

    def text(self, column: str) -> str:
        """Text that is not empty."""
        value = self.get(column)
        if not isinstance(value, str):
            raise RowError(column, "wrong_type", f"text is wanted, not {type(value).__name__}")
        if not value.strip():
            raise RowError(column, "empty", "the text is empty")
        return value

    def name(self, *columns: str) -> str | None:
        """The first of the columns that holds text or a whole number, as text."""
        for column in columns:
            value = self.values.get(column)
            if isinstance(value, bool) or not isinstance(value, str | int | None):
                raise RowError(column, "wrong_type", f"an id is text or a whole number, not {type(value).__name__}")
            if value is not None and str(value).strip():
                return str(value)
        return None

    def section(self, column: str) -> Fields:
        """A nested object."""
        value = self.get(column)
        if not isinstance(value, dict):
            raise RowError(column, "wrong_type", f"an object is wanted, not {type(value).__name__}")
        return Fields(value, self.root)

    def answers(self, column: str) -> list[str]:
        """One or several truths as text, the contents of an ``<answer>`` tag where there is one; ``no_label`` without any."""
        value = self.get(column)
        out = []
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, float) and (not math.isfinite(item) or item.is_integer()):
                item = int(item) if math.isfinite(item) else None
            if item is None or item == "":
                continue
            if isinstance(item, bool) or not isinstance(item, str | int | float):
                raise RowError(column, "wrong_type", f"an answer is text or a number, not {type(item).__name__}")
            tagged = _ANSWER.findall(str(item))
            if answer := (tagged[-1] if tagged else str(item)).strip():
                out.append(answer)
        if not out:
            raise RowError(column, "no_label", "there is no answer")
        return out

    def media(self, pictures: str | None = None, videos: str | None = None) -> list[Media]:
        """Pictures img0, img1, ... of one column and clips vid0, ... of another; each may be missing, one or a list.

        A clip is a file, or a list of pictures.
        """
        out = [
            Media(id=f"img{i}", uri=self.root.reference(pictures or "", item))
            for i, item in enumerate(self._list(pictures) if pictures else [])
        ]
        for i, item in enumerate(self._list(videos) if videos else []):
            if isinstance(item, list):
                frames = [self.root.reference(videos or "", frame) for frame in item]
                if not frames:
                    raise RowError(videos or "", "no_media", "a clip has no frames")
                out.append(Media(id=f"vid{i}", kind="video", frames=frames))
            else:
                out.append(Media(id=f"vid{i}", kind="video", uri=self.root.reference(videos or "", item)))
        return out

    def question(self, text: str, column: str, media: list[Media]) -> str:
        """The text without ``<image>`` and ``<video>``; ``media_count`` when there are other numbers of these than of media."""
        for kind in ("image", "video"):
            marks, have = text.count(f"<{kind}>"), sum(item.kind == kind for item in media)
            if marks and marks != have:
                raise RowError(column, "media_count", f"{marks} <{kind}> in the text for {have} of them")
        text = PLACEHOLDER.sub(" ", text).strip() if "<image>" in text or "<video>" in text else text.strip()
        if not text:
            raise RowError(column, "empty", "the text is empty")
        return text

    def rest(self, *used: str) -> dict[str, Any]:
        """The columns that are not ``used`` and can be written as JSON: what an own reward may look at."""
        return {key: value for key, value in self.values.items() if key not in used and value is not None and _plain(value)}

    def _list(self, column: str) -> list[Any]:
        value = self.values.get(column)
        return [] if value is None else list(value) if isinstance(value, list) else [value]


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def root_of(system: fs.FileSystem, folder: str, media: str | None, cache: str | None) -> Root:
    """The media folder of a source: ``media`` beside the files, on another filesystem, or the folder of the files themselves."""
    if media is None:
        return Root(system, folder, cache)
    if "://" in media:
        try:
            elsewhere, path = fs.FileSystem.from_uri(media)
            return Root(elsewhere, path, cache)
        except (OSError, ValueError) as error:
            raise BadInput(f"media={media}: {error}") from None
    if os.path.isabs(media):
        return Root(fs.LocalFileSystem(), media, cache)
    return Root(system, os.path.normpath(f"{folder}/{media}"), cache)

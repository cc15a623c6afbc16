"""Resolves the media references of rows to files; embedded and remote media become files of a cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from pyarrow import fs

from pixelis.datasets.fields import RowError
from pixelis.errors import BadImage, BadInput, InfraFailure
from pixelis.files import replacing
from pixelis.operations.encoded import read_encoded
from pixelis.records import Media

CACHE = "~/.cache/pixelis/media"
COPY_BYTES = 1 << 20
BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk0")
"""How PNG, JPEG, GIF, WebP and BMP begin in base64."""
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):")


class MediaRoot:
    """The folder of ``system`` that relative references must not leave, and the cache."""

    def __init__(self, system: fs.FileSystem, folder: str, cache: str | None = None):
        self.system, self.folder = system, os.path.normpath(folder)
        self.local = isinstance(system, fs.LocalFileSystem)
        if self.local:
            self.folder = os.path.abspath(self.folder)
        self.cache = Path(cache or CACHE).expanduser().absolute()

    @classmethod
    def of_source(cls, system: fs.FileSystem, folder: str, media: str | None, cache: str | None) -> MediaRoot:
        """The root of a source; ``media`` is relative to the folder of its files, its default."""
        if media is None:
            return cls(system, folder, cache)
        if "://" in media:
            try:
                remote, path = fs.FileSystem.from_uri(media)
                return cls(remote, path, cache)
            except (OSError, ValueError) as error:
                raise BadInput(f"media={media}: {error}") from None
        if os.path.isabs(media):
            return cls(fs.LocalFileSystem(), media, cache)
        return cls(system, os.path.normpath(f"{folder}/{media}"), cache)

    def reference(self, column: str, value: Any) -> str:
        """The URI of one image or clip, given as a path, a URI, base64, bytes, or ``{"bytes", "path"}``.

        RowError; InfraFailure if the filesystem does not answer: dropping the row would shift the numbers of
        later questions, by which a run resumes.
        """
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path") or value.get("image")
        if isinstance(value, str) and len(value) > 64 and value.startswith(BASE64):
            value = f"data:;base64,{value}"
        if isinstance(value, str) and value[:5].lower() == "data:":
            is_image = value[:11].lower() == "data:image/"
            try:  # the bytes are in memory anyway: `open_media` checks the caps
                value = read_encoded(value, len(value), "image" if is_image else "video")
            except BadImage as error:
                raise RowError(column, "bad_media", error.message) from None
        if isinstance(value, bytes):
            return self._store(hashlib.sha256(value).hexdigest(), lambda file: file.write(value))
        if value is None or value == "":
            raise RowError(column, "no_media", "no image or clip is named")
        if not isinstance(value, str):
            raise RowError(column, "media_type", f"a reference is text, not {type(value).__name__}")
        if scheme := SCHEME.match(value):
            if scheme[1].lower() in ("cards", "packaged"):
                return value
            raise RowError(column, "media_scheme", f"references to {scheme[1]}: are not followed")
        path = os.path.normpath(os.path.join(self.folder, value))
        inside = path == self.folder or path.startswith(self.folder.rstrip("/") + "/")
        if "\0" in value or not (inside or os.path.isabs(value)):
            raise RowError(column, "media_traversal", f"{value[:100]!r} leads out of the media folder")
        missing = RowError(column, "media_not_found", f"there is no file {path[:300]}")
        if self.local or os.path.isabs(value):
            if not os.path.isfile(path):
                raise missing
            return path

        def copy(file: IO[bytes]) -> None:
            if self.system.get_file_info(path).type != fs.FileType.File:
                raise missing
            with self.system.open_input_stream(path) as stream:
                shutil.copyfileobj(stream, file, COPY_BYTES)

        return self._store(hashlib.sha256(f"{self.system.type_name}:{path}".encode()).hexdigest(), copy)

    def media(self, row: Mapping[str, Any], images: str = "", videos: str = "") -> list[Media]:
        """Images img0, ... of one column and clips vid0, ... of another: missing, one value or a list.

        A clip is a file, or a list of images.
        """
        values = [row.get(column) for column in (images, videos)]
        shown, clips = ([] if v is None else v if isinstance(v, list) else [v] for v in values)
        result = [Media(id=f"img{i}", uri=self.reference(images, item)) for i, item in enumerate(shown)]
        for i, item in enumerate(clips):
            if item == []:
                raise RowError(videos, "no_media", "the clip has no frames")
            if isinstance(item, list):
                frames = [self.reference(videos, frame) for frame in item]
                result.append(Media(id=f"vid{i}", kind="video", frames=frames))
            else:
                result.append(Media(id=f"vid{i}", kind="video", uri=self.reference(videos, item)))
        return result

    def _store(self, name: str, write: Callable[[IO[bytes]], Any]) -> str:
        target = self.cache / name[:2] / name
        if not target.is_file():
            try:
                with replacing(target) as file:
                    write(file)
            except OSError as error:
                message = f"no file could be written below {self.cache}: {error}"
                raise InfraFailure(message, fix="check network, disk and permissions") from None
        return str(target)

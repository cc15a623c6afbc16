"""Encoded media from a path, a ``data:`` URL or bytes; sizes are checked before reading or decoding."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from pixelis.errors import BadImage, BadInput

Kind = Literal["image", "video"]
_NOUNS = {"image": "picture", "video": "clip"}
_EXAMPLES = {"image": "image/png", "video": "video/mp4"}
_SIGNATURES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"BM"), "image/bmp"),
    (re.compile(rb"II\*\0|MM\0\*"), "image/tiff"),
    (re.compile(rb"....ftypqt", re.DOTALL), "video/quicktime"),
    (re.compile(rb"....ftyp", re.DOTALL), "video/mp4"),
    (re.compile(rb"\x1a\x45\xdf\xa3"), "video/webm"),
)
_BASE64 = str.maketrans("-_", "+/", " \t\r\n\f\v")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")


def read_encoded(source: str | bytes | Path, max_bytes: int, kind: Kind) -> bytes:
    """Return the encoded bytes of a picture or clip, at least 1 and at most ``max_bytes``.

    Raises BadImage with code ``{kind}_scheme``, ``_not_found``, ``_empty``, ``_too_many_bytes``, or
    ``_undecodable`` for a broken ``data:`` URL. Any path is opened.
    """
    noun = _NOUNS[kind]
    if isinstance(source, bytes):
        data = source
    elif isinstance(source, str) and (match := SCHEME.match(source)):
        if match[1].lower() != "data":
            raise BadImage(
                f"{noun}s are not opened from {match[1][:20]}: URLs",
                code=f"{kind}_scheme",
                fix="give a file path, a data: URL with base64, or the bytes",
            )
        data = _data_url(source, max_bytes, kind)
    else:
        path = Path(source)
        fix = "give a readable file; paths are relative to the working directory of the job"
        missing = BadImage(f"no {noun} at {str(path)[-100:]!r}", code=f"{kind}_not_found", fix=fix)
        try:
            if not path.is_file():
                raise missing
            _check_bytes(path.stat().st_size, max_bytes, kind)
            data = path.read_bytes()
        except (OSError, ValueError):
            raise missing from None
    if not data:
        raise BadImage(f"the {noun} is empty", code=f"{kind}_empty")
    _check_bytes(len(data), max_bytes, kind)
    return data


def check_pixels(width: int, height: int, max_pixels: int, kind: Kind) -> None:
    """Raise BadImage ``{kind}_empty`` or ``_too_many_pixels`` for sizes outside the limits."""
    subject = "the picture is" if kind == "image" else "the frames are"
    if width < 1 or height < 1:
        raise BadImage(f"{subject} {width}x{height} pixels", code=f"{kind}_empty")
    if width * height > max_pixels:
        raise BadImage(
            f"{subject} {width}x{height} = {width * height} pixels, more than {max_pixels}",
            code=f"{kind}_too_many_pixels",
            fix=f"send a smaller {_NOUNS[kind]} or raise toolbox.max_image_pixels",
        )


def _data_url(url: str, max_bytes: int, kind: Kind) -> bytes:
    head = url[:200].partition(",")[0]
    media_type, *parameters = head[5:].split(";")
    code = f"{kind}_undecodable"
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise BadImage(
            "the data: URL is not base64", code=code, fix=f"write data:{_EXAMPLES[kind]};base64,..."
        )
    if kind == "image" and media_type and not media_type.strip().lower().startswith("image/"):
        raise BadImage(f"the data: URL declares {media_type[:40]}, not an image", code=code)
    # Line breaks take up to a sixteenth
    if (size := (len(url) - len(head) - 1) * 3 // 4) > max_bytes + max_bytes // 16 + 3:
        _check_bytes(size, max_bytes, kind)
    try:
        return decode_base64(url[len(head) + 1 :])
    except ValueError:
        raise BadImage("the data: URL contains broken base64", code=code) from None


def decode_base64(text: str) -> bytes:
    """The bytes of base64: usual or URL-safe, with or without line breaks, padding and escapes.

    Raises ValueError for other text.
    """
    text = (unquote(text) if "%" in text else text).translate(_BASE64).rstrip("=")
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def _check_bytes(size: int, max_bytes: int, kind: Kind) -> None:
    if size > max_bytes:
        raise BadImage(
            f"the {_NOUNS[kind]} has {size} bytes, more than {max_bytes}",
            code=f"{kind}_too_many_bytes",
            fix=f"send a smaller {_NOUNS[kind]} or raise toolbox.max_{kind}_bytes",
        )


def media_type(content: bytes) -> str:
    """The type that the first bytes tell. Raises BadInput for a type that no question accepts."""
    for signature, name in _SIGNATURES:
        if signature.match(content[:16]):
            return name
    fix = "upload PNG, JPEG, WebP, GIF, BMP, TIFF, MP4, QuickTime, WebM or Matroska"
    raise BadInput("the file is neither a picture nor a clip of a known format", code="file_type", fix=fix)

"""From a URI or bytes to uint8 RGB pixels, with the caps checked before anything is decoded."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from pixelis.config import Dialogue, Toolbox
from pixelis.dialogue.pixels import PixelBudget, fit
from pixelis.errors import BadImage, BadInput, MissingFile
from pixelis.operations.video import Clip, open_clip
from pixelis.records import ImageView, Media

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What is opened. Formats that run an interpreter (EPS, PDF, SVG) are not among them."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")


def open_media(media: Media, settings: Toolbox) -> np.ndarray | Clip:
    """A question's picture (uint8 [H, W, 3], RGB) or clip under the caps of ``settings``; raises BadImage."""
    if media.kind == "video":
        return open_clip(media.frames or media.uri, settings, fps=media.fps)
    return load_image(media.uri, settings.max_image_bytes, settings.max_image_pixels)


def first_look(
    opened: Mapping[str, np.ndarray | Clip], dialogue: Dialogue, multiple: int
) -> tuple[list[ImageView], list[np.ndarray]]:
    """What the policy sees of a question's media at first: each picture whole, of a clip ``dialogue.frames`` frames.

    Returns the views described and as uint8 [h, w, 3], sides in steps of ``multiple``. Frames are called vid0.0, vid0.1, ...
    """
    picture_budget = PixelBudget(dialogue.input.min_pixels, dialogue.input.max_pixels)
    frame_budget = PixelBudget(dialogue.frame.min_pixels, dialogue.frame.max_pixels)
    images, views = [], []
    for name, item in opened.items():
        if isinstance(item, Clip):
            numbers = spread(len(item.times), dialogue.frames)
            for place, (number, frame) in enumerate(zip(numbers, item.frames(numbers), strict=True)):
                views.append(fit(frame, frame_budget, multiple))
                images.append(
                    ImageView(
                        id=f"{name}.{place}",
                        parent=name,
                        frame=number,
                        time=float(item.times[number]),
                        source_size=(item.width, item.height),
                        view_size=(views[-1].shape[1], views[-1].shape[0]),
                    )
                )
        else:
            views.append(fit(item, picture_budget, multiple))
            size, shown = (item.shape[1], item.shape[0]), (views[-1].shape[1], views[-1].shape[0])
            images.append(ImageView(id=name, source_size=size, view_size=shown))
    return images, views


def spread(count: int, most: int) -> list[int]:
    """Up to ``most`` whole numbers of range(count), evenly spread, each in the middle of its share."""
    most = min(count, most)
    return [(2 * i + 1) * count // (2 * most) for i in range(most)]


def load_image(source: str | bytes | Path, max_bytes: int, max_pixels: int) -> np.ndarray:
    """Decode a picture: encoded bytes, a file path, a ``data:`` URL or a ``cards:`` name -> uint8 [H, W, 3], RGB.

    EXIF orientation is applied, transparency becomes white, 16-bit becomes 8-bit, of an animation the first frame is taken.
    Raises BadImage with code image_scheme, image_not_found, image_empty, image_too_many_bytes, image_too_many_pixels,
    image_mode or image_undecodable. A path is opened as it is: a gateway must let only ``data:`` URLs through.
    """
    if isinstance(source, bytes):
        return _decode(source, max_bytes, max_pixels)
    if isinstance(source, str):
        scheme = match[1].lower() if (match := _SCHEME.match(source)) else ""
        if scheme == "data":
            return _decode(_data_url(source, max_bytes), max_bytes, max_pixels)
        if scheme == "cards":
            return _card(source, max_pixels)
        if scheme:
            raise BadImage(
                f"{scheme}: pictures are not opened",
                code="image_scheme",
                fix="give a file path, a data: URL with base64, or the bytes",
            )
    return _decode(_file(Path(source), max_bytes), max_bytes, max_pixels)


def _card(uri: str, max_pixels: int) -> np.ndarray:
    from pixelis.datasets.cards import render

    try:
        picture = render(uri)
    except MissingFile:
        raise
    except BadInput as error:
        raise BadImage(error.message, code="image_not_found", fix=error.fix) from None
    _check_size(picture.shape[1], picture.shape[0], max_pixels)
    return picture


def _file(path: Path, max_bytes: int) -> bytes:
    try:
        if not path.is_file():
            raise BadImage(f"no picture {path}", code="image_not_found", fix="paths are relative to where the job runs")
        if path.stat().st_size > max_bytes:
            raise _too_many_bytes(path.stat().st_size, max_bytes)
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise BadImage(f"the picture file cannot be read: {error}", code="image_not_found") from None


def _data_url(url: str, max_bytes: int) -> bytes:
    head, comma, body = url.partition(",")
    kind = head[5:].split(";")
    if not comma or kind[-1].strip().lower() != "base64":
        raise BadImage("the data: URL is not base64", code="image_undecodable", fix="write data:image/png;base64,...")
    if kind[0] and len(kind) > 1 and not kind[0].strip().lower().startswith("image/"):
        raise BadImage(f"the data: URL says {kind[0][:40]}, not an image", code="image_undecodable")
    if len(body) * 3 // 4 > max_bytes + 3:
        raise _too_many_bytes(len(body) * 3 // 4, max_bytes)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise BadImage("the data: URL holds broken base64", code="image_undecodable") from None


def _decode(data: bytes, max_bytes: int, max_pixels: int) -> np.ndarray:
    if not data:
        raise BadImage("the picture is empty", code="image_empty")
    if len(data) > max_bytes:
        raise _too_many_bytes(len(data), max_bytes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the caps below are ours, stricter than Pillow's warning
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(image.width, image.height, max_pixels)
                return _rgb(image)
    except Image.DecompressionBombError:
        raise BadImage(f"the picture has more than {max_pixels} pixels", code="image_too_many_pixels") from None
    except BadImage:
        raise
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        reason = " ".join(str(error).split())[:120] if isinstance(error, OSError) else type(error).__name__
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "the bytes are none of " + ", ".join(FORMATS)
        raise BadImage(f"the picture cannot be decoded: {reason}", code="image_undecodable") from None


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise BadImage(f"the picture is {width}x{height} pixels", code="image_empty")
    if width * height > max_pixels:
        raise BadImage(
            f"the picture is {width}x{height} = {width * height} pixels, more than {max_pixels}",
            code="image_too_many_pixels",
            fix="send a smaller picture or raise toolbox.max_image_pixels",
        )


def _too_many_bytes(size: int, max_bytes: int) -> BadImage:
    return BadImage(
        f"the picture has {size} bytes, more than {max_bytes}",
        code="image_too_many_bytes",
        fix="send a smaller picture or raise toolbox.max_image_bytes",
    )


def _rgb(image: Image.Image) -> np.ndarray:
    image.load()
    with contextlib.suppress(Exception):  # broken metadata must not cost the picture: it is shown as stored
        image = ImageOps.exif_transpose(image)
    if image.mode in ("F", "I"):
        raise BadImage(
            "32-bit pixels have no agreed range of brightness", code="image_mode", fix="convert the picture to 8 or 16 bits"
        )
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.array(image.convert("RGB"), dtype=np.uint8)

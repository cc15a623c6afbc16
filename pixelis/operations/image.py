"""Decodes pictures to uint8 RGB pixels; size limits are checked before decoding."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageCms, ImageOps, JpegImagePlugin, TiffImagePlugin

from pixelis.errors import BadImage
from pixelis.operations.encoded import check_pixels, read_encoded

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Accepted formats; none runs an interpreter as EPS, PDF and SVG do."""

_SIGNATURES = (
    (re.compile(rb"(?s)\s*<(svg\b|(\?xml|!--|!doctype svg).{,900}?<svg\b)", re.IGNORECASE), "SVG"),
    (re.compile(rb"\s*<(!doctype html|html)", re.IGNORECASE), "an HTML page"),
    (re.compile(rb"%PDF-"), "PDF"),
    (re.compile(rb"....ftyp(heic|heix|heim|heis|hevc|mif1|msf1)", re.DOTALL), "HEIC"),
)
_MAX_SCANS, _MAX_SEGMENTS = 100, 10_000
"""Of a JPEG: each scan is decoded over all pixels, and programs write about 20."""
_MARKER = re.compile(rb"\xff([^\x00\x01\xff\xd0-\xd8])")
"""A JPEG marker that a length follows, or that of the end; no pixel data contain one."""
_CONVERSIONS = {
    "HEIC": "save it as JPEG; an iPhone does so with Settings > Camera > Formats > Most Compatible",
    "SVG": "draw it to PNG first, for example with `rsvg-convert -o picture.png FILE`",
    "PDF": "draw its pages to PNG first, for example with `pdftoppm -png -r 150 FILE page`",
}

_DETAIL_SIDE = 64
_MAX_DETAIL = 6
"""Largest difference (0..255) of a cell between copies of a picture: JPEG at a quality of 60, noise of 12 and a
change of size stay within it; another digit in 1/27 of its width does not."""


def image_pixels(source: str | bytes | Path, max_bytes: int, max_pixels: int) -> int:
    """The number of pixels that a picture declares; nothing is decoded. Raises BadImage as `load_image`."""
    data = read_encoded(source, max_bytes, "image")
    with _opened(data, max_pixels) as image:
        return image.width * image.height


def load_image(
    source: str | bytes | Path, max_bytes: int, max_pixels: int, draft: int | None = None
) -> np.ndarray:
    """Decode a picture: encoded bytes, a file path or a ``data:`` URL -> read-only uint8 [H, W, 3], RGB.

    EXIF orientation is applied, colours become sRGB, transparency white, 16 bits the upper 8; the first frame
    or page is taken. ``draft``: number of pixels that suffice; a larger JPEG is shrunk by 2, 4 or 8 while
    decoding. Raises BadImage (``image_*``). Any path is opened: a gateway must let only ``data:`` URLs
    through.
    """
    data = read_encoded(source, max_bytes, "image")
    with _opened(data, max_pixels) as image:
        if draft is not None and image.format == "JPEG":
            scale = max(1.0, math.sqrt(image.width * image.height / draft))
            image.draft(None, (math.ceil(image.width / scale), math.ceil(image.height / scale)))
        return rgb(image)


def png_url(picture: np.ndarray, compress_level: int = 6) -> str:
    """A picture, uint8 [h, w, 3], as a PNG in a ``data:`` URL. Level 1 takes a fifth of the time, and a fifth more bytes."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", compress_level=compress_level)
    return data_url(file.getvalue())


def data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


@contextlib.contextmanager
def _opened(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """The picture before decoding, inside the caps. What a decoder raises in the block becomes BadImage."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our caps are stricter than Pillow's warning
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                check_pixels(image.width, image.height, max_pixels, "image")
                if isinstance(image, TiffImagePlugin.TiffImageFile):
                    # A small TIFF may declare huge tiles, each of which the decoder allocates as a whole.
                    tile = math.prod(int(image.tag_v2.get(tag, 0)) for tag in (322, 323))
                    if tile > max(max_pixels, 4 * image.width * image.height):
                        raise BadImage(
                            f"the picture has tiles of {tile} pixels", code="image_too_many_pixels"
                        )
                if isinstance(image, JpegImagePlugin.JpegImageFile):
                    _check_scans(data)
                yield image
    except Image.DecompressionBombError:
        raise BadImage(
            f"the picture has more than {max_pixels} pixels", code="image_too_many_pixels"
        ) from None
    except (BadImage, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        fix = f"send one of {', '.join(FORMATS)}"
        if name := next((name for start, name in _SIGNATURES if start.match(data[:1000])), None):
            message = f"{name} is not accepted as a picture"
            raise BadImage(message, code="image_format", fix=_CONVERSIONS.get(name, fix)) from None
        message = "the picture cannot be decoded: its header is damaged, or its format is not accepted"
        raise BadImage(message, code="image_undecodable", fix=fix) from None
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        # Text from the file itself is never quoted: it could address the reader of the error.
        reason = " ".join(str(error).split())
        known = isinstance(error, OSError) and len(reason) < 100 and reason.isascii()
        message = f"the picture cannot be decoded: {reason if known else 'it is damaged'}"
        raise BadImage(message, code="image_undecodable", fix="save it again with another program") from None


def _check_scans(data: bytes) -> None:
    """Reject a JPEG with many scans: a small one may take minutes to decode."""
    scans = position = 0
    for _ in range(_MAX_SEGMENTS):
        marker = _MARKER.search(data, position)
        if marker is None or marker[1] == b"\xd9":  # phones append a clip, whose bytes may look like scans
            return
        scans += marker[1] == b"\xda"
        if scans > _MAX_SCANS:
            break
        position = marker.end() + max(2, int.from_bytes(data[marker.end() : marker.end() + 2], "big"))
    raise BadImage(
        f"the JPEG has more than {_MAX_SCANS} scans or {_MAX_SEGMENTS} segments",
        code="image_too_many_scans",
        fix="save it again with another program",
    )


def rgb(image: Image.Image) -> np.ndarray:
    """The pixels of a picture, as `load_image` returns them; changes ``image``. Raises what Pillow raises, BadImage."""
    image.load()
    with contextlib.suppress(Exception):  # with broken metadata the picture is shown as stored
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "CMYK" and image.format == "JPEG" and "adobe" not in image.info:
        # Pillow inverts every CMYK JPEG, but only Adobe stores inverted values
        image = ImageChops.invert(image)
    transparent = image.info.get("transparency")
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        message = "32-bit pixels have no agreed range of brightness"
        raise BadImage(message, code="image_mode", fix="convert the picture to 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        deep = np.asarray(image)
        grey = (deep >> 8).astype(np.uint8)
        if isinstance(transparent, int):
            grey[deep == transparent] = 255
        return _read_only(np.repeat(grey[..., None], 3, axis=2))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or transparent is not None:
        profile = image.info.get("icc_profile")
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
        image.info["icc_profile"] = profile
    profile = image.info.get("icc_profile") if image.mode in ("RGB", "RGBA") else None
    if image.mode != "RGB":
        image = image.convert("RGB")
    if profile:
        with contextlib.suppress(Exception):  # a broken profile is ignored
            embedded = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            if not ImageCms.getProfileDescription(embedded).strip().lower().startswith("srgb"):
                ImageCms.profileToProfile(image, embedded, ImageCms.createProfile("sRGB"), inPlace=True)
    return _read_only(np.asarray(image))


def details(pixels: np.ndarray) -> str:
    """The grey values of 64 x 64 cells of a picture, base64."""
    import cv2  # Pillow would copy all pixels

    cells = cv2.resize(pixels, (_DETAIL_SIDE,) * 2, interpolation=cv2.INTER_AREA)
    return base64.b64encode(cv2.cvtColor(cells, cv2.COLOR_RGB2GRAY).tobytes()).decode()


def are_copies(details: str, others: str) -> bool:
    """Whether two pictures differ visibly in no cell of their `details`; True if either has none."""
    a, b = (np.frombuffer(base64.b64decode(cells), np.uint8).astype(int) for cells in (details, others))
    return not (len(a) and len(b)) or int(np.abs(a - b).max()) <= _MAX_DETAIL


def _read_only(pixels: np.ndarray) -> np.ndarray:
    pixels.flags.writeable = False
    return pixels

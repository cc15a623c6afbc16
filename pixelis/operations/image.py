"""Pictures: from a path, a ``data:`` URL or bytes to uint8 RGB pixels, with the caps checked before anything is decoded."""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import re
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageCms, ImageOps, TiffImagePlugin

from pixelis.errors import BadImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""What is opened. Formats that run an interpreter (EPS, PDF, SVG) are not among them."""

_SIGNS = (
    (re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!DOCTYPE\s+svg.*?>\s*)?<svg\b", re.DOTALL | re.IGNORECASE), "SVG"),
    (re.compile(rb"\s*<(!doctype html|html)", re.IGNORECASE), "an HTML page"),
    (re.compile(rb"%PDF-"), "PDF"),
    (re.compile(rb"%!PS"), "PostScript"),
    (re.compile(rb"....ftyp(heic|heix|heim|heis|hevc|mif1|msf1)", re.DOTALL), "HEIC"),
    (re.compile(rb"....ftyp(?!avi[fs])", re.DOTALL), "a video"),
    (re.compile(rb"\x1aE\xdf\xa3"), "a video"),
    (re.compile(rb"RIFF....AVI ", re.DOTALL), "a video"),
    (re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", re.DOTALL), "JPEG 2000"),
    (re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "), "JPEG XL"),
    (re.compile(rb"8BPS"), "a Photoshop file"),
    (re.compile(rb"\0\0[\1\2]\0"), "an icon"),
)
"""What users send in place of a picture of those formats, by its first bytes."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")


def load_image(source: str | bytes | Path, max_bytes: int, max_pixels: int) -> np.ndarray:
    """Decode a picture: encoded bytes, a file path or a ``data:`` URL -> uint8 [H, W, 3], RGB.

    The array is read-only. EXIF orientation is applied, colours of another profile become sRGB, transparency becomes white,
    16 bits become the upper 8, of an animation or of many pages the first is taken; whatever else the file says is not looked
    at. Raises BadImage with code image_scheme, image_not_found, image_empty, image_too_many_bytes, image_too_many_pixels,
    image_format (known but not opened), image_mode (no agreed range of brightness) or image_undecodable (damaged). A path is
    opened as it is: a gateway must let only ``data:`` URLs through.
    """
    if isinstance(source, bytes):
        return _decode(source, max_bytes, max_pixels)
    if isinstance(source, str):
        scheme = match[1].lower() if (match := _SCHEME.match(source)) else ""
        if scheme == "data":
            return _decode(_data_url(source, max_bytes), max_bytes, max_pixels)
        if scheme:
            raise BadImage(
                f"{scheme}: pictures are not opened",
                code="image_scheme",
                fix="give a file path, a data: URL with base64, or the bytes",
            )
    return _decode(_file(Path(source), max_bytes), max_bytes, max_pixels)


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
                check_size(image.width, image.height, max_pixels)
                if isinstance(image, TiffImagePlugin.TiffImageFile):
                    _check_tiles(image, max_pixels)
                return _rgb(image)
    except Image.DecompressionBombError:
        raise BadImage(f"the picture has more than {max_pixels} pixels", code="image_too_many_pixels") from None
    except BadImage:
        raise
    except Image.UnidentifiedImageError:
        raise _unknown(data) from None
    except MemoryError:
        raise
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        raise BadImage(
            f"the picture cannot be decoded: {_reason(error)}", code="image_undecodable", fix="save it again with another program"
        ) from None


def _unknown(data: bytes) -> BadImage:
    """What to say of bytes that no decoder takes: the caller may have sent a known kind of file that is not opened."""
    formats = ", ".join(FORMATS)
    for sign, name in _SIGNS:
        if sign.match(data[:1000]):
            return BadImage(f"{name} is not opened as a picture", code="image_format", fix=f"convert it to one of {formats}")
    return BadImage(
        f"the picture cannot be decoded: a damaged header, or none of {formats}",
        code="image_undecodable",
        fix=f"send one of {formats}; TIFF with up to 16 bits a channel",
    )


def _reason(error: Exception) -> str:
    """Why decoding failed, in words of the decoder or ours: what stands in the file must not speak to who reads the error."""
    said = " ".join(str(error).split())
    if "too large" in said and isinstance(error, ValueError):
        return "its texts or its colour profile unpack to more than a picture needs"
    if isinstance(error, OSError) and len(said) < 100 and said.isascii():
        return said
    return "it is damaged"


def check_size(width: int, height: int, max_pixels: int) -> None:
    """BadImage ``image_empty`` or ``image_too_many_pixels`` for a picture outside the cap."""
    if width < 1 or height < 1:
        raise BadImage(f"the picture is {width}x{height} pixels", code="image_empty")
    if width * height > max_pixels:
        raise BadImage(
            f"the picture is {width}x{height} = {width * height} pixels, more than {max_pixels}",
            code="image_too_many_pixels",
            fix="send a smaller picture or raise toolbox.max_image_pixels",
        )


def _check_tiles(image: TiffImagePlugin.TiffImageFile, max_pixels: int) -> None:
    """A small TIFF may claim huge tiles, which the decoder allocates whole."""
    tags = image.tag_v2
    sides = [tags.get(tag, 0) for tag in (322, 323)]
    if all(isinstance(side, int) for side in sides) and sides[0] * sides[1] > max(max_pixels, 4 * image.width * image.height):
        raise BadImage(f"the picture has tiles of {sides[0]}x{sides[1]} pixels", code="image_too_many_pixels")


def _too_many_bytes(size: int, max_bytes: int) -> BadImage:
    return BadImage(
        f"the picture has {size} bytes, more than {max_bytes}",
        code="image_too_many_bytes",
        fix="send a smaller picture or raise toolbox.max_image_bytes",
    )


def _rgb(image: Image.Image) -> np.ndarray:
    image.load()
    with contextlib.suppress(Exception):  # broken metadata must not cost the picture: it is shown as stored
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "CMYK" and image.format == "JPEG" and "adobe" not in image.info:
        image = ImageChops.invert(image)  # only Adobe stores ink inverted, Pillow takes every JPEG for Adobe's
    clear = image.info.get("transparency")
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        values = np.asarray(image)
        if image.mode == "F" and not np.isfinite(values).all():
            raise BadImage("the picture has pixels that are not finite", code="image_mode", fix="convert it to 8 or 16 bits")
        raise BadImage(
            "32-bit pixels have no agreed range of brightness", code="image_mode", fix="convert the picture to 8 or 16 bits"
        )
    if image.mode == "I" or image.mode.startswith("I;16"):
        deep = np.asarray(image)
        grey = (deep >> 8).astype(np.uint8)
        if isinstance(clear, int):
            grey[deep == clear] = 255
        return _sealed(np.repeat(grey[..., None], 3, axis=2))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or clear is not None:
        profile = image.info.get("icc_profile")
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
        image.info["icc_profile"] = profile
    profile = image.info.get("icc_profile") if image.mode in ("RGB", "RGBA") else None
    if image.mode != "RGB":
        image = image.convert("RGB")
    if profile:
        with contextlib.suppress(Exception):  # a broken profile as above
            _to_srgb(image, profile)
    return _sealed(np.asarray(image))


def _to_srgb(image: Image.Image, profile: bytes) -> None:
    """Colours of an embedded profile (Display P3, Adobe RGB, ...) to sRGB, in place."""
    own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if not ImageCms.getProfileDescription(own).strip().lower().startswith("srgb"):
        ImageCms.profileToProfile(image, own, ImageCms.createProfile("sRGB"), inPlace=True)


def _sealed(pixels: np.ndarray) -> np.ndarray:
    pixels.flags.writeable = False
    return pixels

"""Opens the media of a question: pictures, clips, ``data:`` URLs, and ``cards:`` names."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from pixelis.config import ToolboxConfig
from pixelis.errors import BadImage, BadInput, MissingFile
from pixelis.operations.encoded import check_pixels
from pixelis.operations.image import load_image
from pixelis.operations.video import Clip, open_clip
from pixelis.records import Media


def open_media(media: Media, settings: ToolboxConfig) -> np.ndarray | Clip:
    """A question's picture (uint8 [H, W, 3], RGB) or clip under ``settings``' caps. BadImage, MissingFile."""
    if media.kind == "video":
        frames = [
            encoded_card(uri, settings) if uri.lower().startswith("cards:") else uri
            for uri in media.frames or ()
        ]
        return open_clip(frames or media.uri, settings, fps=media.fps, spans=media.spans)
    if media.uri.lower().startswith("cards:"):
        return _draw_card(media.uri, settings.max_image_pixels)
    return load_image(media.uri, settings.max_image_bytes, settings.max_image_pixels)


def encoded_card(uri: str, settings: ToolboxConfig) -> str:
    """As a BMP, which costs no compression."""
    file = io.BytesIO()
    Image.fromarray(_draw_card(uri, settings.max_image_pixels)).save(file, "BMP")
    return "data:image/bmp;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _draw_card(uri: str, max_pixels: int) -> np.ndarray:
    from pixelis.datasets.cards import render  # loaded only where cards are drawn

    try:
        picture = render(uri)
    except MissingFile:
        raise
    except BadInput as error:
        raise BadImage(error.message, code="image_not_found", fix=error.fix) from None
    check_pixels(picture.shape[1], picture.shape[0], max_pixels, "image")
    return picture

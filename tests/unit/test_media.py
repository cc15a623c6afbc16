"""Pictures as users send them: all kinds of encodings, and everything that must be refused before it is decoded."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from pixelis.errors import BadImage
from pixelis.operations.media import load_image

RED = (250, 10, 20)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def two_tone(size=(40, 30)) -> Image.Image:
    """Red above, blue below."""
    image = Image.new("RGB", size, RED)
    image.paste((0, 0, 250), (0, size[1] // 2, *size))
    return image


def load(source, max_bytes=1_000_000, max_pixels=1_000_000) -> np.ndarray:
    return load_image(source, max_bytes, max_pixels)


def refusal(source, **caps) -> str:
    with pytest.raises(BadImage) as error:
        load(source, **caps)
    return error.value.code


def test_the_same_picture_from_bytes_file_and_data_url(tmp_path):
    data = encoded(two_tone())
    (tmp_path / "a picture.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for source in (data, str(tmp_path / "a picture.png"), tmp_path / "a picture.png", url):
        pixels = load(source)
        assert (pixels.shape, pixels.dtype) == ((30, 40, 3), np.uint8)
        assert tuple(pixels[0, 0]) == RED
        assert pixels.flags.writeable


def test_card_names_are_drawn():
    assert load("cards:?split=validation&seed=1&index=2").shape == (768, 768, 3)
    assert refusal("cards:?split=validation&seed=1&index=2", max_pixels=1000) == "image_too_many_pixels"
    assert refusal("cards:?split=nowhere&seed=1&index=2") == "image_not_found"


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "YCbCr"])
def test_every_colour_mode_becomes_rgb(mode: str):
    kind = {"CMYK": "TIFF", "YCbCr": "TIFF"}.get(mode, "PNG")
    pixels = load(encoded(two_tone().convert(mode), kind))
    expected = np.asarray(two_tone().convert(mode).convert("RGB"))
    assert pixels.shape == (30, 40, 3)
    assert np.abs(pixels.astype(int) - expected).max() <= 8


def test_sixteen_bits_keep_their_brightness():
    grey = np.linspace(0, 65535, 40 * 30).reshape(30, 40).astype(np.uint16)
    pixels = load(encoded(Image.fromarray(grey)))
    np.testing.assert_array_equal(pixels[..., 1], grey >> 8)
    assert pixels.shape == (30, 40, 3)


def test_pixels_without_an_agreed_range_are_refused():
    values = np.full((30, 40), np.nan, np.float32)
    assert refusal(encoded(Image.fromarray(values), "TIFF")) == "image_mode"
    assert refusal(encoded(Image.fromarray(np.full((30, 40), 1000, np.int32)), "TIFF")) == "image_mode"


def test_transparency_becomes_white():
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert (load(encoded(clear)) == 255).all()
    palette = Image.new("P", (8, 8), 0)
    assert (load(encoded(palette, transparency=0)) == 255).all()
    half = load(encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 128))))
    assert 120 < half[0, 0, 0] < 135


def test_exif_orientation_is_applied_and_broken_exif_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side
    pixels = load(encoded(two_tone(), "JPEG", exif=exif))
    assert pixels.shape == (40, 30, 3)
    assert pixels[5, 28, 0] > 200 > 100 > pixels[5, 1, 0]
    assert load(encoded(two_tone(), "JPEG", exif=b"Exif\0\0MM\0*garbage")).shape == (30, 40, 3)


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (8, 8), RED), Image.new("RGB", (8, 8), (0, 0, 0))]
    pixels = load(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert np.abs(pixels[0, 0].astype(int) - RED).max() < 8


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_caps_are_checked_before_decoding():
    assert refusal(png_header(30_000, 30_000), max_pixels=50_000_000) == "image_too_many_pixels"
    assert refusal(png_header(9_000, 9_000), max_pixels=50_000_000) == "image_too_many_pixels"
    assert refusal(encoded(two_tone()), max_pixels=1199) == "image_too_many_pixels"
    assert load(encoded(two_tone()), max_pixels=1200).shape == (30, 40, 3)
    data = encoded(two_tone())
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert refusal(data, max_bytes=len(data) - 1) == refusal(url, max_bytes=len(data) - 1) == "image_too_many_bytes"
    assert load(data, max_bytes=len(data)).shape == load(url, max_bytes=len(data)).shape
    assert refusal("data:image/png;base64," + "!" * 5_000_000) == "image_too_many_bytes"


def test_a_file_over_the_cap_is_not_read(tmp_path):
    path = tmp_path / "large.png"
    path.write_bytes(b"\0" * 2001)
    assert refusal(path, max_bytes=2000) == "image_too_many_bytes"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "image_empty"),
        (b"not an image", "image_undecodable"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' width='8' height='8'/>", "image_undecodable"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "image_undecodable"),
        (encoded(two_tone((400, 300)), "JPEG")[:900], "image_undecodable"),
        (encoded(two_tone((400, 300)))[:-40], "image_undecodable"),
        (encoded(two_tone())[:20], "image_undecodable"),
        (png_header(40, 30), "image_undecodable"),
        (png_header(0, 30), "image_undecodable"),
    ],
)
def test_bytes_that_are_no_picture(data: bytes, code: str):
    assert refusal(data) == code


def test_one_pixel_is_a_picture():
    assert load(encoded(Image.new("RGB", (1, 1), RED))).tolist() == [[list(RED)]]


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.1/a.png", "https://example.org/a.png", "file:///etc/hosts", "FILE:/etc/hosts", "ftp://x/a.png", "sha256:00"],
)
def test_urls_that_would_reach_out_are_refused(url: str):
    assert refusal(url) == "image_scheme"


@pytest.mark.parametrize(
    "url",
    [
        *("data:image/png,rawbytes", "data:image/png;base64,@@@@", "data:text/html;base64,AAAA"),
        *("data:;base64,AAAA", "data:", "data:image/png"),
    ],
)
def test_broken_data_urls(url: str):
    assert refusal(url) == "image_undecodable"


def test_files_that_are_not_there(tmp_path):
    for path in ("no/such/picture.png", str(tmp_path), "nul\0byte.png", "/dev/zero"):
        assert refusal(path) == "image_not_found"

"""What a toolbox answers when the media of a question cannot be opened."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pixelis.actors import toolbox
from pixelis.config import load
from pixelis.errors import BadImage
from pixelis.records import Media

Toolbox = toolbox.Toolbox.__ray_metadata__.modified_class  # type: ignore[attr-defined]


def test_an_unexpected_error_costs_one_question_and_its_traceback_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", (40, 30)).save(tmp_path / "good.png")
    original = toolbox.open_media

    def broken(media: Media, settings: Any) -> Any:
        if media.id == "bad":
            raise ModuleNotFoundError("No module named 'av'")
        return original(media, settings)

    monkeypatch.setattr(toolbox, "open_media", broken)
    # Opening needs the configuration alone; __init__ sets handlers of this process
    tools = Toolbox.__new__(Toolbox)
    tools.config, tools.multiple = load(None), 28
    with caplog.at_level(logging.WARNING):
        opened, error = tools._open([Media(id="bad", uri=str(tmp_path / "good.png"))])
        good, (_, hashes) = tools._open([Media(id="good", uri=str(tmp_path / "good.png"))])
    assert opened == [None]
    assert isinstance(error, BadImage)
    assert error.code == "image_crashed"
    assert good[0].shape == (30, 40, 3)
    assert list(hashes) == ["good"]
    assert "No module named 'av'" in caplog.text

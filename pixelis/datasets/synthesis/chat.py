"""Requests to language models for the rewriter, imitation and distillation, and pictures in messages."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from pixelis.config.synthesis import ChatConfig
from pixelis.rewards.llm_client import LlmClient

T = TypeVar("T")


def chat_client(settings: ChatConfig, section: str, cache: str | Path | None = None) -> LlmClient:
    """The client of a section; BadConfig when url, model or key are missing."""
    return LlmClient(settings, section, cache, calls_per_minute=settings.calls_per_minute)


def ask(client: LlmClient, settings: ChatConfig, messages: list[dict[str, Any]], read: Callable[[str], T], draw: int = 0) -> T:
    """``LlmClient.ask`` with the section's temperature and length; raises the same errors."""
    return client.ask(messages, read, draw, temperature=settings.temperature, max_tokens=settings.max_tokens)


def picture_part(view: np.ndarray) -> dict[str, Any]:
    """A uint8 [h, w, 3] picture as a part of a message."""
    return {"type": "image_url", "image_url": {"url": data_url(view)}}


def data_url(view: np.ndarray) -> str:
    """A uint8 [h, w, 3] picture as a PNG in a ``data:`` URL."""
    file = io.BytesIO()
    Image.fromarray(view).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

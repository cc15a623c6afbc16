"""DeepEyes's parquet rows of verl: a chat, images inside the row, the answer in ``reward_model``, the tools in ``env_name``."""

from __future__ import annotations

from pixelis.datasets.formats import verl
from pixelis.datasets.formats.base import Format, Row, image_bytes, image_paths
from pixelis.records import Question


def _write(record: Question) -> Row:
    images = [image_bytes(path) for path in image_paths(record)]
    tools = record.environment or ("visual_toolbox_v2" if record.tools != [] else "")
    env_name = record.meta.get("env_name", tools)
    return verl.write_chat_row(record, "model", "vl") | {"images": images, "env_name": env_name}


FORMATS = {"deepeyes": Format("prompt reward_model", verl.read_chat_row, _write, any_of="images videos env_name")}

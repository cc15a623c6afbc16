"""Ray Data streams of training samples: rows in, tokens and views out, prepared beside the learner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import ray.data

from pixelis.config import Config
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.questions import read_demonstrations
from pixelis.policy.model import resolve
from pixelis.policy.samples import TrainSample
from pixelis.records import Demonstration

CPUS = 0.25
"""CPUs a preparing process reserves: it shares its core with the learner it feeds."""


def demonstration_stream(config: Config, start: int = 0) -> ray.data.Dataset:
    """Demonstrations from step ``start`` to the last, one row a sample (see ``Prepare``), in a fixed order."""
    count = config.sft.steps * config.sft.batch
    rows = read_demonstrations(config.data.demonstrations, count, config.run.seed, config.data.direct_share)
    rows = rows[start * config.sft.batch :]
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    packed = [{"row": row.model_dump_json()} for row in rows]
    blocks = max(1, len(packed) // (4 * config.sft.batch))
    return ray.data.from_items(packed, override_num_blocks=blocks).map_batches(
        Prepare,
        fn_constructor_args=(config, str(resolve(config.policy.model))),
        batch_size=config.sft.batch,
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=CPUS,
    )


class Prepare:
    """Plays demonstrations: columns id, tokens int32, mask bool, views (raw bytes), shapes (heights and widths)."""

    def __init__(self, config: Config, model_folder: str):
        self.player = Player(config, model_folder)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        out: dict[str, list] = {"id": [], "tokens": [], "mask": [], "views": [], "shapes": []}
        for text in batch["row"]:
            trajectory, views = self.player.play(Demonstration.model_validate_json(text))
            out["id"].append(trajectory.question_id)
            out["tokens"].append(np.asarray(trajectory.token_ids(), np.int32).tobytes())
            out["mask"].append(np.asarray(trajectory.loss_mask(), np.uint8).tobytes())
            out["views"].append(b"".join(view.tobytes() for view in views))
            out["shapes"].append(np.asarray([view.shape[:2] for view in views], np.int32).tobytes())
        return out


def samples_of(batch: dict[str, np.ndarray]) -> list[TrainSample]:
    """Training samples of one batch of ``Prepare``'s columns; views are read in place."""
    samples = []
    for i in range(len(batch["id"])):
        tokens = np.frombuffer(batch["tokens"][i], np.int32).astype(np.int64)
        mask = np.frombuffer(batch["mask"][i], np.uint8).astype(bool)
        views = list(_views(batch["views"][i], batch["shapes"][i]))
        none = np.zeros(len(tokens), np.float32)
        samples.append(TrainSample(tokens=tokens, mask=mask, log_probs=none, advantage=1.0, views=views, id=str(batch["id"][i])))
    return samples


def _views(data: bytes, shapes: bytes) -> Iterator[np.ndarray]:
    pixels, at = np.frombuffer(data, np.uint8), 0
    for height, width in np.frombuffer(shapes, np.int32).reshape(-1, 2).tolist():
        size = height * width * 3
        yield pixels[at : at + size].reshape(height, width, 3)
        at += size

"""Questions about pictures, a clip and text only in one batch: rollouts, scores and the learner's step."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import ray
import skimage.data
import tiny_policy
from PIL import Image

from pixelis.actors import placement
from pixelis.actors.group_views import fetch_groups
from pixelis.config import load
from pixelis.policy.samples import from_trajectory
from pixelis.policy.train_step import Trainer
from pixelis.records import Media, Question

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FRAMES, GROUP = 3, 2


def questions(folder: Path) -> dict[str, Question]:
    """Write questions about one picture, two pictures, a clip, and text only; return them by name."""
    for name, picture in (("coffee", skimage.data.coffee()), ("cat", skimage.data.chelsea())):
        Image.fromarray(picture).save(folder / f"{name}.png")
    frames = [str(folder / f"frame{i}.png") for i in range(8)]
    for i, path in enumerate(frames):
        Image.fromarray(np.roll(skimage.data.coffee()[::4, ::4], 8 * i, axis=1)).save(path)
    coffee, cat = (str(folder / f"{name}.png") for name in ("coffee", "cat"))
    media = {
        "picture": [Media(id="img0", uri=coffee)],
        "pictures": [Media(id="img0", uri=cat), Media(id="img1", uri=coffee)],
        "clip": [Media(id="vid0", kind="video", frames=frames, fps=4)],
        "text": [],
    }
    by_name = {
        name: Question(id=name, question=f"Which number is it: {len(m)}?", media=m, answers=["7"])
        for name, m in media.items()
    }
    (folder / "questions.jsonl").write_text("".join(q.model_dump_json() + "\n" for q in by_name.values()))
    return by_name


# tests/engines/test_parity.py: pictures and text of every family; tests/unit/operations/test_video.py: clips.
@pytest.mark.long
def test_pictures_clips_and_text_share_a_batch(ray_cluster: None, tmp_path: Path) -> None:
    """A Qwen2.5-VL in Hugging Face's format with its own system prompt and coordinates."""
    by_name, folder = questions(tmp_path), tiny_policy.folder("qwen2_5_vl")
    keys = [f"policy.model={folder}", f"data.train={tmp_path}/questions.jsonl", f"run.dir={tmp_path}/run"]
    keys += [f"dialogue.frames={FRAMES}", "dialogue.max_turn_tokens=12", "dialogue.max_context=2048"]
    keys += ["policy.lora.rank=4", "learner.row_tokens=2048", "toolbox.operations=[zoom_in]"]
    # With a KL term, rollouts without an advantage are trained on too.
    keys += ["rft.steps=1", f"rft.prompts_per_step={len(by_name)}", f"rft.group_size={GROUP}"]
    config = load(None, [*keys, "rft.loss.kl=0.01", "telemetry.rollouts=0"])
    with placement.placed(config, learner=False) as actors:
        ray.get(actors.coordinator.begin.remote(0, {}, 0), timeout=60)
        batch = ray.get(actors.coordinator.next_batch.remote(0, 1, 0), timeout=120)
        views = fetch_groups(batch.views)
    assert sorted(group.question.id for group in batch.groups) == sorted(by_name)
    assert not [name for name, value in batch.metrics.items() if name.startswith("unusable/") and value]
    first = {"picture": ["img0"], "pictures": ["img0", "img1"], "text": []}
    first["clip"] = [f"vid0.{i}" for i in range(FRAMES)]
    samples = []
    for group, group_views in zip(batch.groups, views, strict=True):
        images = first[group.question.id]
        assert len(group_views) == len({t.id for t in group.trajectories}) == GROUP
        for trajectory in group.trajectories:
            assert (trajectory.question_id, trajectory.group_id) == (group.question.id, group.id)
            assert trajectory.unscored is None
            assert next(turn.images for turn in trajectory.turns if turn.role == "user") == images
            assert len(group_views[trajectory.id]) == len(trajectory.images) >= len(images)
            samples.append(from_trajectory(trajectory, group_views[trajectory.id]))
    with closing(
        Trainer(config.policy, config.learner, config.rft.loss, total_steps=1, device="cpu")
    ) as trainer:
        metrics = trainer.update(samples)
    assert metrics["learner/trained_sequences"] == len(by_name) * GROUP
    assert not [name for name, value in metrics.items() if name.startswith("learner/dropped_") and value]
    assert np.isfinite([metrics["policy/loss"], metrics["policy/grad_norm"]]).all()
    assert metrics["policy/drift_max"] < 1e-3, (
        "engine and learner agree on every token, with and without pictures"
    )

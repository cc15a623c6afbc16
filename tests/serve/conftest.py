"""One deployed gateway for all tests here: real Ray Serve and HTTP in front of scripted generators."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray
from scripted import KEY, Deployed, ScriptedGenerator, free_port

from pixelis.actors.evolution import Evolution
from pixelis.config import load
from pixelis.serve import app


@pytest.fixture(scope="session")
def deployed(ray_cluster: None) -> Iterator[Deployed]:
    """Two generators of 8 rows, 4 samples a request: 4 requests run, 2 wait, the next is refused; 3 s a request."""
    overrides = ["engine.workers=2", "engine.max_rows=8", "serve.samples=4", "serve.max_queue=2", "serve.timeout_s=3"]
    overrides += ["serve.max_body_bytes=1000000", "serve.max_question_chars=500", "toolbox.max_image_pixels=1000000"]
    overrides += ["dialogue.max_images=3", "evolution.batch=2", "evolution.queue=4", f"serve.port={free_port()}"]
    config = load(None, overrides)
    names = ["scripted-0", "scripted-1"]
    generators = [ScriptedGenerator.options(name=name).remote(i) for i, name in enumerate(names)]
    evolution = Evolution.options(name="evolution-under-test").remote(config, generators)
    before = os.environ.get("PIXELIS_API_KEY")
    os.environ["PIXELIS_API_KEY"] = KEY
    try:
        url = app.start(config, names, "evolution-under-test")
    finally:
        os.environ.pop("PIXELIS_API_KEY")
        if before is not None:
            os.environ["PIXELIS_API_KEY"] = before
    yield Deployed(config, url, generators, evolution)
    app.stop()
    for actor in [*generators, evolution]:
        ray.kill(actor)

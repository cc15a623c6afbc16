"""docs/examples/contrast.py runs as a user's own operation does."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from calling import scene_of

from pixelis import config
from pixelis.errors import BadConfig
from pixelis.jobs import rft
from pixelis.operations import execute, select
from pixelis.records import Action

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def stretch(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    for name in [n for n in sys.modules if n == "docs" or n.startswith("docs.")]:
        monkeypatch.delitem(sys.modules, name)
    return {
        operation.name: operation
        for operation in select(["zoom_in", "docs.examples.contrast:StretchContrast"])
    }


OWN = """
from pixelis.operations import Operation, OperationArguments, Result
from pixelis.errors import MissingFile

class Arguments(OperationArguments):
    pass

class Good(Operation):
    name, description, Arguments = "good", "Does nothing.", Arguments
    @classmethod
    def run(cls, arguments, target, scene):
        return Result()

class Unbound(Good):
    def run(self, arguments, target, scene):
        return Result()

class Short(Good):
    @classmethod
    def run(cls, arguments):
        return Result()

class Silent(Good):
    description = ""

class Dict(Good):
    Arguments = dict

class Late(Good):
    @classmethod
    def ready(cls, settings):
        raise MissingFile("good needs weights.bin", fix="download it")
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Unbound", "classmethod"),
        ("Short", "arguments, target, scene"),
        ("Silent", "lacks description"),
        ("Dict", "not derived from OperationArguments"),
    ],
)
def test_faults_of_own_operations_are_found_before_a_call(tmp_path, name: str, message: str):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(BadConfig, match=message):
        select([f"{tmp_path}/own.py:{name}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        pytest.param("Good", 0, "own.py:Good is good", marks=pytest.mark.long),
        ("Late", 1, "good needs weights.bin"),
    ],
)
def test_a_dry_run_checks_own_operations(tmp_path, capsys, name: str, code: int, message: str):
    (tmp_path / "own.py").write_text(OWN)
    keys = ["configs/nano/rft.yaml", f'toolbox.operations=["{tmp_path}/own.py:{name}"]', "--dry-run"]
    with pytest.raises(SystemExit) as left:
        config.from_command_line("Doc.", "rft", keys, check=rft.check)
    assert (left.value.code or 0) == code
    assert message in capsys.readouterr().err


def test_it_stretches_contrast_and_says_so(stretch):
    ramp = np.broadcast_to(np.linspace(100, 150, 200, dtype=np.uint8)[None, :, None], (50, 200, 3)).copy()
    action = Action(op="stretch_contrast", arguments={"percent": 0.0, "box": [0.5, 0, 1, 1]})
    observation, (view,) = execute(action, scene_of(ramp), stretch)
    assert observation.status == "ok"
    assert (view.min(), view.max()) == (0, 255)
    assert (np.diff(view[0, :, 0].astype(int)) >= 0).all()
    assert observation.images[0].box == (0.5, 0.0, 1.0, 1.0)
    assert "150 is white" in observation.text
    assert execute(action, scene_of(np.full_like(ramp, 7)), stretch)[0].code == "nothing_found"

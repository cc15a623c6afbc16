"""`pixelis reproduce`: the evaluation beside a recipe of a training, and recipes that have none."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command

from pixelis.config.root import RECIPES
from pixelis.jobs import reproduce

TRAININGS = sorted((RECIPES / "reproduce").glob("*/train*.yaml"))


@pytest.mark.parametrize("path", TRAININGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_training_has_an_evaluation_of_its_policy(path: Path) -> None:
    train, evaluation = reproduce.recipes(str(path), ["run.dir=/tmp/x", "evaluate.questions=7"])
    assert evaluation.policy == train.policy
    assert evaluation.evaluate.questions == 7
    size = path.stem.partition("_")[2]
    file = f"figures_{size}.toml" if size else "figures.toml"
    assert Path(str(evaluation.evaluate.published)).resolve() == path.with_name(file).resolve()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["configs/reproduce/reason_rft/sft_2b.yaml"], "no recipe of an evaluation beside it"),
        (["configs/nano/rft.yaml"], "no recipe of an evaluation beside it"),
        ([], "0 files"),
        (["configs/reproduce/r1_v/train_2b.yaml", "rft.step=50"], "did you mean `rft.steps`"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(words: list[str], message: str, pixelis: Command) -> None:
    code, _, err = pixelis("reproduce", *words)
    assert (code, message in err) == (2, True), err

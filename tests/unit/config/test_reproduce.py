"""The recipes of docs/reproduce.md have the published settings, and its commands run dry."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import reproduce
from command_line import pixelis
from system_rows import DRY, write_folder

from pixelis import config
from pixelis.config.root import RECIPES

TEXT = reproduce.PAGE.read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
SYSTEMS = reproduce.systems()


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_recipe_has_the_published_settings_or_a_reason(name: str) -> None:
    system, folder = SYSTEMS[name], RECIPES / "reproduce" / name
    assert set(system.recipes) == {path.stem for path in folder.glob("*.yaml")}
    for recipe in system.recipes:
        for key, (value, source, reason) in system.settings(recipe).items():
            ours = reproduce.resolved(name, recipe, key)
            assert (ours == value) is not bool(reason), (recipe, key, ours, value)
            assert source, (recipe, key)


def test_the_page_has_the_figures_of_the_files() -> None:
    assert reproduce.page() == TEXT, "run `python scripts/reproduce.py --write`"
    assert all(f"| {system.name}, " in TEXT for system in SYSTEMS.values())


def test_the_command_prints_every_setting_beside_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce.main([])
    printed = capsys.readouterr().out
    for name, system in SYSTEMS.items():
        for recipe, settings in system.recipes.items():
            for key, setting in settings.items():
                assert f"| `{key}` | " in printed, (name, recipe)
                assert f" | {setting.source} |" in printed, (name, recipe, key)


def test_each_figure_belongs_to_an_evaluation_of_its_recipe() -> None:
    files = reproduce.figures()
    evaluations = [config.load(path) for path in sorted((RECIPES / "reproduce").glob("*/evaluate*.yaml"))]
    assert {RECIPES / str(e.evaluate.published).removeprefix("configs/") for e in evaluations} == set(files)
    for e in evaluations:
        of_model = files[RECIPES / str(e.evaluate.published).removeprefix("configs/")]
        for figure in of_model.figures:
            assert (figure.set or "") in e.held_out, (of_model.model, figure)
            assert figure.metric in ("accuracy", f"avg@{e.evaluate.samples}"), (of_model.model, figure)


def test_every_recipe_has_a_command() -> None:
    named = {word for command in COMMANDS for word in shlex.split(command)}
    recipes = {f"configs/{path.relative_to(RECIPES)}" for path in (RECIPES / "reproduce").glob("*/*.yaml")}
    assert recipes - named == set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("reproduce")
    write_folder(base)
    return base


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs_dry(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "home"))
    program, *arguments = shlex.split(command)
    assert program == "pixelis"
    code, _, errors = pixelis(capsys, monkeypatch, *arguments, *DRY)
    assert code == 0, errors

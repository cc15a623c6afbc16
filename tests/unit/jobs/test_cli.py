"""The `pixelis` command: jobs, recipes, completion, tiny models."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Command

from pixelis.config import load
from pixelis.errors import BadConfig, BadInput
from pixelis.families import FAMILIES
from pixelis.families.spec import load_spec
from pixelis.jobs import cli, completion, recipes, tiny_model


@pytest.mark.slow
def test_help_lists_every_job_that_exists(pixelis: Command) -> None:
    code, text, _ = pixelis("--help")
    assert code == 0
    sources = {file.stem: file.read_text(encoding="utf-8") for file in Path(cli.__file__).parent.glob("*.py")}
    jobs = {name.replace("_", "-") for name, source in sources.items() if "\ndef main(" in source} - {
        "cli",
        "ablation-trial",
    }
    assert jobs == set(cli.JOBS)
    for job in jobs:
        assert f"\n  {job} " in text
        assert callable(importlib.import_module(f"pixelis.jobs.{job.replace('-', '_')}").main)


def test_a_misspelt_job_or_key_gets_the_nearest(pixelis: Command) -> None:
    code, _, err = pixelis("evalaute")
    assert (code, err) == (2, "pixelis: no job `evalaute`\n  fix: did you mean `pixelis evaluate`?\n")
    code, _, err = pixelis("rft", "learner.lrr=3")
    assert code == 2
    assert "pixelis rft: unknown configuration key `learner.lrr` (did you mean `learner.lr`?)" in err


def test_recipes_are_listed_and_a_copy_of_them_loads(tmp_path: Path, pixelis: Command) -> None:
    assert "configs/nano/rft.yaml " in pixelis("recipes")[1]
    files = recipes.copy(tmp_path / "mine", "qwen3_vl_8b/sft")
    assert load(tmp_path / "mine/qwen3_vl_8b/sft.yaml") == load("configs/qwen3_vl_8b/sft.yaml")
    assert recipes.copy(tmp_path / "mine", "qwen3_vl_8b/sft") == files
    (tmp_path / "mine/qwen3_vl_8b/sft.yaml").write_text("mine: 1")
    with pytest.raises(BadConfig, match="differs from the recipe"):
        recipes.copy(tmp_path / "mine")
    assert pixelis("recipes", "copy", str(tmp_path / "x"), "nothing")[0] == 2


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ev"], {"evaluate"}),
        (["rft", "rft.group"], {"rft.group_size="}),
        (["rft", "engine.name", "=", "v"], {"vllm", "vllm_server"}),
        (["rft", "policy.full", "=", "f"], {"false"}),
        (["rft", "configs/nano/rft_pl"], {"configs/nano/rft_plain.yaml"}),
    ],
)
def test_bash_completes(words: list[str], offered: set[str]) -> None:
    line = (
        f"COMP_WORDS=(pixelis {' '.join(words)}); COMP_CWORD={len(words)}; _pixelis; echo ${{COMPREPLY[@]}}"
    )
    output = subprocess.check_output(["bash", "-c", f"{completion.script('bash')}\n{line}"], text=True)
    assert set(output.split()) == offered


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_is_a_folder_of_its_family(tmp_path: Path, family: str) -> None:
    assert tiny_model.make(tmp_path / "model", family) < 10**6
    spec = load_spec(tmp_path / "model")
    assert spec.patch == FAMILIES[family].patch
    with pytest.raises(BadInput, match="exists"):
        tiny_model.make(tmp_path / "model", family)


@pytest.mark.parametrize("call", ["pixelis.jobs.cli.overview()", "pixelis.jobs.doctor.main()"])
def test_help_and_doctor_load_nothing_heavy(call: str) -> None:
    heavy = "torch", "ray", "pydantic", "transformers", "httpx"
    code = f"import sys, {call.rpartition('.')[0]}; {call}; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "[]"

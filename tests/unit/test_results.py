"""`make results`: figures with their intervals are found in any result, a run is made once."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import service
from benchmarks.results import RUNS, Run, execute, figures, inside, main, recorded
from pixelis.config import load

ROOT = Path(__file__).parents[2]


def test_figures_have_the_interval_beside_them() -> None:
    result = {
        "arms": [{"name": "rft", "accuracy": 0.8, "ci95": [0.7, 0.9], "n": 500}],
        "speed": {"median": 1.1, "low": 1.0, "high": 1.2, "ours_s": 2.0},
        "fog": {"accuracy": 0.08, "difference": -0.77, "ci95": [-0.82, -0.71]},
        "ok": True,
        "machine": "two cores",
        "curve": [1.0, 2],
    }
    assert list(figures(result)) == [
        ("arms/rft", 0.8, (0.7, 0.9)),
        ("arms/rft/n", 500.0, None),
        ("speed", 1.1, (1.0, 1.2)),
        ("speed/ours_s", 2.0, None),
        ("fog", -0.77, (-0.82, -0.71)),
        ("fog/accuracy", 0.08, None),
        ("curve/0", 1.0, None),
        ("curve/1", 2.0, None),
    ]


def test_a_run_is_made_once_and_a_failed_one_again(tmp_path: Path) -> None:
    program = (
        "import json, pathlib, sys; p = pathlib.Path(sys.argv[1]); n = len(list(p.glob('n*'))); (p / "
        "('n' + str(n))).touch(); "
    )
    program += "sys.exit(3) if not n else print(json.dumps(dict(x=dict(mean=n, low=0, high=1))))"
    run = Run(f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} {{dir}}", 1)
    command = run.command
    assert execute("counted", command, run, tmp_path) is None
    second = execute("counted", command, run, tmp_path)
    assert second["figures"] == [{"path": "x", "value": 1.0, "interval": (0.0, 1.0)}]
    third = execute("counted", command, run, tmp_path)
    assert third["figures"][0]["value"] == 1.0
    assert len(list((tmp_path / "counted").glob("n*"))) == 2
    assert inside(
        {"figures": [{"path": "x", "value": 3.0, "interval": None}]}, json.loads(json.dumps(second))
    ) == [("x", 1.0, 3.0, (0.0, 1.0))]


def test_an_earlier_time_is_a_folder_or_a_recorded_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import json; print(json.dumps(dict(x=dict(mean=.5, low=0, high=1), y=2)))"
    run = Run(f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}", 1)
    monkeypatch.setattr("benchmarks.results.RUNS", {"own": run})
    monkeypatch.setattr("benchmarks.results.RECORD", tmp_path / "recorded.json")
    monkeypatch.setattr("sys.argv", ["results", "--dir", str(tmp_path / "runs"), "--record"])
    main()
    (row,) = recorded(tmp_path / "recorded.json")["own"]["figures"]
    assert row == {"path": "x", "value": 0.5, "interval": [0, 1]}
    assert row in recorded(tmp_path / "runs")["own"]["figures"]
    assert recorded(tmp_path / "none.json") == {}


def test_the_service_without_a_memory_has_a_valid_configuration() -> None:
    assert not load("configs/nano/serve.yaml", service.BARE).memory.enabled


@pytest.mark.parametrize("name", RUNS)
def test_the_commands_exist_and_the_page_names_them(name: str) -> None:
    words = shlex.split(RUNS[name].command)
    assert words[0] == sys.executable
    assert importlib.util.find_spec(words[2]) is not None
    assert all((ROOT / word).is_file() for word in words if word.startswith("configs/"))
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"`{name}`" in page or f"`{name.partition('-')[0]}-*`" in page


def test_every_accuracy_of_the_readme_is_on_the_page() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").replace("−", "-")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    accuracies = re.findall(r"([\d.]+) %  \[([\d.]+), ([\d.]+)\]", readme)
    assert len(accuracies) == 4
    (gain,) = re.findall(r"([+-][\d.]+) points \[([+-][\d.]+), ([+-][\d.]+)\]", readme)
    assert {figure for figures in [*accuracies, gain] for figure in figures if figure not in page} == set()

"""Folders of benchmarks, whose finished parts are not repeated, have parts of one set of arguments only."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import pytest

from benchmarks.harness import keep_arguments


def test_a_new_argument_fits_a_folder_of_before_and_a_misspelt_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "arguments.json").write_text("{}")
    keep_arguments(tmp_path, argparse.Namespace(steps=3, dir=tmp_path, smoke=False))
    with pytest.raises(KeyError):
        keep_arguments(tmp_path, argparse.Namespace(steps=3, dir=tmp_path, smoke=False), "seed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "earlier", "words"),
    [
        ("robustness", {"adapter": "/other"}, ["--adapter", "here"]),
        ("vote_learning", {"set": ["evolution.gate=0.5"]}, ["--adapter", "here"]),
        ("words", {"share": 0.2}, ["--adapter", "here"]),
        ("forgetting", {"steps": 1}, ["--adapter", "here"]),
        ("curriculum", {"sizes": [60, 6, 6]}, []),
        ("learning_trap", {"episodes": 4}, []),
        ("conversation", {"steps": 1}, []),
        ("capabilities", {"count": 2}, []),
        ("rank_recovery", {"batch": 2}, []),
    ],
)
def test_each_benchmark_refuses_results_of_other_arguments(
    name: str, earlier: dict, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "arguments.json").write_text(json.dumps(earlier))
    monkeypatch.setattr("sys.argv", [name, *words, "--dir", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"other arguments: {next(iter(earlier))} was"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert [path.name for path in tmp_path.iterdir()] == ["arguments.json"]

"""Folders of benchmarks, whose finished parts are not repeated, have parts of one set of arguments only."""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import keep_arguments

ARGUMENTS = st.fixed_dictionaries(
    {
        "questions": st.integers(),
        "adapter": st.sampled_from([None, "a"]),
        "set": st.lists(st.text()),
        "seeds": st.lists(st.integers()),
    }
)


def arguments(folder: Path, values: dict) -> argparse.Namespace:
    adapter = values["adapter"] and Path(values["adapter"])
    return argparse.Namespace(**values | {"adapter": adapter}, dir=folder, smoke=False)


@given(ARGUMENTS, ARGUMENTS)
def test_other_arguments_are_refused_and_named_unless_they_only_select(first: dict, second: dict) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "new"
        for _ in range(2):
            keep_arguments(folder, arguments(folder, first), "seeds")
        changed = [name for name in first if name != "seeds" and first[name] != second[name]]
        if not changed:
            keep_arguments(folder, arguments(folder, second), "seeds")
            return
        with pytest.raises(SystemExit) as refused:
            keep_arguments(folder, arguments(folder, second), "seeds")
        assert all(f"{name} was " in str(refused.value) for name in changed)
        assert "seeds was" not in str(refused.value)
        assert "choose another --dir" in str(refused.value)


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

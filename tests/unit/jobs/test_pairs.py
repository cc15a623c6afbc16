"""The documented pairs of algorithm and preset start, and say what they lack before they start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pixelis import config
from pixelis.config.presets.rewards import REWARD_PRESETS
from pixelis.jobs import rft

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \[.+?\) \| `(\w+)`[^|]*\| `([\w-]+)`[^|]*\| `(\w+)`", PAGE, re.MULTILINE)
CASES = [
    pytest.param(*row, id="-".join(row), marks=[pytest.mark.long] if number % 4 else [])
    for number, row in enumerate(ROWS)
]
JUDGE = ("rewards.judge.url=http://127.0.0.1:9/v1", "rewards.judge.model=m", "rewards.judge.api_key_env=")


def dry_run(*argv: str) -> int:
    with pytest.raises(SystemExit) as left:
        config.from_command_line(
            "Doc.", "rft", ["configs/nano/rft.yaml", *argv, "--dry-run"], check=rft.check
        )
    return int(left.value.code or 0)


def test_every_system_has_a_pair() -> None:
    assert len(ROWS) == 7


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "preset", "dialect"), CASES)
def test_a_documented_pair_starts_and_asks_for_its_judge(
    algorithm: str, preset: str, dialect: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"rft.algorithm={algorithm}", f"rewards.preset={preset}", f"dialogue.dialect={dialect}"]
    needs_judge = REWARD_PRESETS[preset].get("judge", {}).get("required", False)
    assert dry_run(*keys) == (2 if needs_judge else 0), capsys.readouterr().err
    if needs_judge:
        assert "rewards.judge.url" in capsys.readouterr().err
    assert dry_run(*keys, *JUDGE) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_questions_that_need_a_judge_fail_the_dry_run_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"id": str(i), "question": "?", "answers": ["7"], "scorer": "exact" if i < 5 else "judge"}
        for i in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = f"data.train={tmp_path / 'rows.jsonl'}"
    assert dry_run(source) == 2
    assert "has questions with the scorer judge, which needs a judge" in capsys.readouterr().err
    assert dry_run(source, *JUDGE) == 0
    assert dry_run(source, "rewards.scorer=exact") == 0

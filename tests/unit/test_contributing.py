"""The steps of CONTRIBUTING.md work: each code block runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (Add .+?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
NAMED = sorted(set(re.findall(r"`((?:pixelis|tests|docs)/[\w/]+\.\w+)`", TEXT)))


@pytest.mark.parametrize("title", SECTIONS)
def test_the_code_of_a_section_runs(title: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[title], re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-"], input=code, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_every_extension_point_has_a_section() -> None:
    assert set(SECTIONS) == {
        f"Add {what}" for what in ("an operation", "a reward", "an algorithm", "a dialect", "a reader")
    }


@pytest.mark.parametrize("path", NAMED)
def test_every_file_named_exists(path: str) -> None:
    assert (ROOT / path).is_file() or "NAME" in path

"""Every command of docs/coming-from.md runs dry, with a tiny random model and rows of each system."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_line import pixelis
from system_rows import DRY, write_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
BLOCKS = {title: "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL)) for title, text in SECTIONS.items()}
COMMANDS = [(title, line) for title, block in BLOCKS.items() for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the models and every data file of the page."""
    base = tmp_path_factory.mktemp("coming_from")
    write_folder(base)
    return base


def test_every_system_has_a_section_with_commands() -> None:
    systems = [
        "Pixel-Reasoner", "Reason-RFT", "TTRL", "Mini-o3", "R1-V", "DeepEyes", "Chain-of-Focus", "PyVision-RL",
        "Qwen3-VL and Qwen3.5", "EasyR1", "lmms-eval and VLMEvalKit",
    ]  # fmt: skip
    assert list(SECTIONS) == systems
    for title in systems:
        assert "Theirs: `" in SECTIONS[title]
        assert BLOCKS[title].strip()


@pytest.mark.parametrize(
    ("title", "command"), COMMANDS, ids=[f"{title}-{i}" for i, (title, _) in enumerate(COMMANDS)]
)
def test_a_command_of_the_page_runs(
    folder: Path,
    title: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "home"))
    program, *arguments = shlex.split(command)
    assert program == "pixelis"
    if "--help" not in arguments:
        arguments += DRY
    code, _, errors = pixelis(capsys, monkeypatch, *arguments)
    assert code == 0, errors

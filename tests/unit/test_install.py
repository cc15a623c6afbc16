"""The installations of the Makefile resolve on every supported Python, and faiss comes once."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALL = re.compile(r"call install,(constraints[-a-z]*\.txt),(\w+)")


def installations() -> list[tuple[str, str]]:
    """(file of constraints, extra) of each installation of the Makefile."""
    return CALL.findall((ROOT / "Makefile").read_text(encoding="utf-8"))


def resolve(constraints: str, extras: list[str], python: str) -> subprocess.CompletedProcess[str]:
    """Resolve for a version of Python from the metadata of packages, without installing one."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
    command = [uv, "pip", "compile", "pyproject.toml", "-c", constraints]
    command += ["--quiet", "--no-header", "--no-annotate", *(f"--extra={extra}" for extra in extras)]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)


@pytest.mark.slow
# These tests run in an installation on the other one.
@pytest.mark.parametrize("python", [pytest.param("3.11", marks=pytest.mark.long), "3.12"])
@pytest.mark.parametrize(("constraints", "extra"), installations())
@pytest.mark.long
def test_an_installation_of_the_makefile_resolves(constraints: str, extra: str, python: str) -> None:
    result = resolve(constraints, [extra, "nano", "dev", "docs"], python)
    assert result.returncode == 0, result.stderr
    names = {line.partition("==")[0] for line in result.stdout.splitlines()}
    assert {name for name in names if name.startswith("faiss")} == {f"faiss-{extra}"}
    assert ("vllm" in names) == (extra == "gpu")


def test_no_advice_names_a_package_of_an_index_that_is_not_ours() -> None:
    patterns = "pixelis/**/*.py", "docs/*.md", "*.md", "benchmarks/*.*"
    texts = [path for pattern in patterns for path in ROOT.glob(pattern)]
    advice = re.compile(r"pip install[^\n]*\bpixelis(\[|['\"\s]|$)")
    assert [path for path in texts if advice.search(path.read_text(encoding="utf-8"))] == []

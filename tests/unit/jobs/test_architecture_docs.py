"""docs/architecture.md says what is there: its hops exist and are as few as promised."""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from pathlib import Path

PAGE = Path("docs/architecture.md").read_text(encoding="utf-8")


def hops(section: str) -> list[tuple[str, str]]:
    """(file, function) of the numbered lines of a section."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py):(\w+)`", text, re.MULTILINE)


def functions(file: str) -> dict[str, str]:
    """Source of each function of a file by name; the last one of a name."""
    source = Path(file).read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(source))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name: ast.get_source_segment(source, node) or "" for node in nodes if isinstance(node, kinds)
    }


def test_every_hop_exists_and_there_are_no_more_than_promised() -> None:
    step, request = hops("The loop"), hops("From a chat request to an updated policy")
    assert 0 < len(step) - 1 <= 6
    assert 0 < len(request) <= 12
    for file, function in (*step, *request):
        assert function in functions(file), (file, function)


def test_each_function_of_a_step_calls_the_next() -> None:
    step = hops("The loop")
    for (file, function), (_, following) in itertools.pairwise(step):
        assert re.search(rf"\b{following}\b", functions(file)[function]), (function, following)


def test_the_drawing_shows_the_rooms_of_the_contract_in_their_order() -> None:
    contracts = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    rooms = [re.findall(r"\w+", layer) for layer in layers]
    drawing = PAGE.split("```")[1]
    drawn = [line.split() for line in drawing.splitlines() if line.strip(" |")]
    assert [words[: len(layer)] for words, layer in zip(drawn, rooms, strict=True)] == rooms

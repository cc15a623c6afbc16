"""No package imports a file that imports the package, which import-linter does not see."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import pixelis


def test_no_package_imports_a_file_that_imports_the_package() -> None:
    graph = grimp.build_graph("pixelis", cache_dir=None)
    packages = [module for module in graph.modules if graph.find_children(module)]
    circles = [
        f"{package} and {module}"
        for package in packages
        for module in graph.find_modules_directly_imported_by(package)
        if graph.chain_exists(importer=module, imported=package)
    ]
    assert not circles


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules",
    [
        "pixelis.policy.model, pixelis.policy.embed, pixelis.policy.checkpoint, pixelis.evaluation.tracking",
        pytest.param("pixelis.engines.hf", marks=pytest.mark.long),
        pytest.param("pixelis.policy.train_step, pixelis.policy.deepspeed_engine", marks=pytest.mark.long),
    ],
)
def test_a_process_with_a_policy_loads_no_library_that_it_does_not_need(modules: str) -> None:
    """Whichever comes first: together they would add two seconds to its start."""
    libraries = "sklearn", "scipy", "pandas", "pyarrow", "faiss"
    command = f"import sys, {modules}; print([name for name in {libraries} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", command], text=True).strip() == "[]"


def test_importing_pixelis_loads_nothing_heavy_and_changes_no_variable() -> None:
    script = """
import os, sys
before = dict(os.environ)
import pixelis
assert not {"pydantic", "numpy"} & sys.modules.keys()
assert {"Agent", "Answer", "sft", "rft", "evaluate"} <= set(dir(pixelis))
import pixelis.config
heavy = {"torch", "ray", "vllm", "transformers"}
assert not heavy & sys.modules.keys()
assert dict(os.environ) == before
try:
    pixelis.train
except AttributeError as error:
    assert "train" in str(error)
else:
    raise AssertionError
assert callable(pixelis.Agent.load) and "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_stub_of_the_package_has_its_lazy_names() -> None:
    folder = Path(pixelis.__file__).parent
    stub = re.findall(
        r"^from ([\w.]+) import (\w+) as \2$", (folder / "__init__.pyi").read_text(), re.MULTILINE
    )
    assert {name: home for home, name in stub} == pixelis._HOMES

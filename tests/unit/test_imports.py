"""No package imports a file that imports the package, which import-linter does not see."""

from __future__ import annotations

import subprocess
import sys

import grimp
import pytest


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
def test_a_process_with_a_policy_loads_no_library_that_it_does_not_need() -> None:
    """Together they would add two seconds to its start."""
    modules = (
        "pixelis.policy.model, pixelis.policy.embed, pixelis.policy.checkpoint, pixelis.evaluation.tracking"
    )
    libraries = "sklearn", "scipy", "pandas", "pyarrow", "faiss"
    command = f"import sys, {modules}; print([name for name in {libraries} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", command], text=True).strip() == "[]"

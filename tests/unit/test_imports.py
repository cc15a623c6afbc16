"""No package imports a file that imports the package, which import-linter does not see: it compares siblings only."""

from __future__ import annotations

import grimp


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

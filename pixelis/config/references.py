"""References to users' Python objects, ``package.module:Name`` or ``path.py:Name``, and to models of the hub."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pixelis.errors import BadConfig

EMBEDDED = {"nano": "base", "mini": "mini"}
"""Models that are part of the package, by name: their folders in `pixelis/nano`."""


class Registry(UserDict[str, Any]):
    """Objects by name. One given as ``package.module:Name`` is imported, and converted by ``make``, when
    first looked up.

    ``key``: the configuration key that names them.
    """

    def __init__(
        self, key: str, entries: Mapping[str, Any], make: Callable[[Any], Any] = lambda value: value
    ):
        self.key, self.make = key, make
        super().__init__(entries)

    def __getitem__(self, name: str) -> Any:
        entry = super().__getitem__(name)
        if isinstance(entry, str):
            self[name] = entry = self.make(load_reference(entry, self.key))
        return entry


HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
"""`owner/name` of the Hugging Face Hub, or `owner/name@revision` with a branch, a tag or a commit."""


def is_hub_id(text: str) -> bool:
    """Whether a model is named by its id on the hub, and no file or folder has this name."""
    return HUB_ID.fullmatch(text) is not None and not Path(text).exists()


def is_reference(text: str) -> bool:
    """Whether ``text`` has the form ``package.module:Name``."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), name])


def is_function(text: str) -> bool:
    """Whether ``text`` is a reference, or has the form ``path.py:name``."""
    path, _, name = text.rpartition(":")
    return is_reference(text) or (path.endswith(".py") and name.isidentifier())


def load_reference(reference: str, key: str) -> Any:
    """Import the object of a reference; BadConfig with the configuration ``key``."""
    fix = "write path.py:Name, or package.module:Name with the package on PYTHONPATH of every node"
    if not is_function(reference):
        raise BadConfig(
            f"{key}: `{reference}` is not of the form package.module:Name or path.py:Name", fix=fix
        )
    path, _, name = reference.rpartition(":")
    try:
        module = _load_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except Exception as error:  # the user's module can raise anything
        raise BadConfig(
            f"{key}: {reference} cannot be imported: {type(error).__name__}: {error}", fix=fix
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        fix = f"did you mean `{path}:{near[0]}`?" if near else f"define {name} in {module.__file__ or path}"
        raise BadConfig(f"{key}: {reference} cannot be imported: {path} has no `{name}`", fix=fix)
    return getattr(module, name)


def _load_file(path: Path) -> ModuleType:
    """The module of a file, loaded once in a process."""
    path = path.resolve()
    name = f"pixelis_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None or not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

"""Lets tests here use the tiny models of tests/unit, and vLLM's CPU build load (see cpu_build)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
BUILD = Path(__file__).parent / "cpu_build"

if importlib.util.find_spec("vllm") is not None:
    # For vLLM's processes by their environment, for this one, which runs already, by hand.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BUILD), os.environ.get("PYTHONPATH")]))
    _spec = importlib.util.spec_from_file_location("pixelis_cpu_build", BUILD / "sitecustomize.py")
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])

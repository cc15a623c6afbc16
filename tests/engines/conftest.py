"""Makes the tiny models of tests/unit importable and loads the shims of vLLM's CPU build (see cpu_build)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
BUILD = Path(__file__).parent / "cpu_build"

if importlib.util.find_spec("vllm") is not None:
    # vLLM's processes load it through PYTHONPATH. This process is already running, so it loads it here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BUILD), os.environ.get("PYTHONPATH")]))
    _spec = importlib.util.spec_from_file_location("pixelis_cpu_build", BUILD / "sitecustomize.py")
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])

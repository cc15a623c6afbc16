"""Runs async tests on the loop of their engine and loads the shims of vLLM's CPU build (see cpu_build)."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from running import RunningEngine

BUILD = Path(__file__).parent / "cpu_build"

if importlib.util.find_spec("vllm") is not None:
    # vLLM's processes load it through PYTHONPATH. This process is already running, so it loads it here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BUILD), os.environ.get("PYTHONPATH")]))
    _spec = importlib.util.spec_from_file_location("pixelis_cpu_build", BUILD / "sitecustomize.py")
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])


@pytest.fixture
def engine(running: RunningEngine) -> Any:
    return running.engine


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test on the event loop of its engine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    pyfuncitem.funcargs["running"].run(pyfuncitem.obj(**arguments))
    return True

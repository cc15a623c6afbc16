"""Benchmarks behind every figure that the project states. Usage: `python -m benchmarks.NAME --help`."""

import atexit
import os
import secrets
import shutil
import tempfile
from pathlib import Path

# Set before Ray is imported, which reads it; each run has its own token
if "RAY_AUTH_TOKEN_PATH" not in os.environ:
    _private = tempfile.mkdtemp(prefix="pixelis-benchmarks-")
    atexit.register(shutil.rmtree, _private, True)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{_private}/ray-token"}
    Path(os.environ["RAY_AUTH_TOKEN_PATH"]).write_text(secrets.token_hex(32), encoding="utf-8")

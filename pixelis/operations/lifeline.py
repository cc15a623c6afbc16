"""Runs a command that ends, with all that it started, when the process that started this one is killed.

usage: python lifeline.py PARENT_PID COMMAND ...

A script of the standard library alone, for Linux, where the kernel tells a process of its parent's death.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def _kill_group(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    if os.getpgrp() != os.getpid():
        os.setsid()
    signal.signal(signal.SIGTERM, _kill_group)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # it died before
        _kill_group()
    raise SystemExit(subprocess.call(sys.argv[2:]))

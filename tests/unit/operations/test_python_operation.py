"""PYTHON: what code may do on pixels, and what it may not, by attacks on the sandbox from inside."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import platform
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import skimage.data
from calling import call
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pixelis.config import ToolboxConfig
from pixelis.errors import MissingDependency, OperationError
from pixelis.operations import sandbox, sandbox_worker
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.python import Python
from pixelis.records import Observation

COFFEE = skimage.data.coffee()
PATIENT = ToolboxConfig(timeout_s=200, memory_bytes=300_000_000)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")


def run(code: str, **more) -> tuple[Observation, list[np.ndarray]]:
    box = {"box": more.pop("box")} if "box" in more else {}
    return call("python", COFFEE, scene={"settings": PATIENT, **more}, code=code, **box)


def test_code_reads_the_pixels_of_the_region_in_full_resolution():
    observation, views = run("print(image.shape)\nint((image[..., 0] > 200).sum())", box=[0.5, 0, 1, 0.5])
    assert observation.status == "ok"
    assert observation.text == f"(200, 300, 3)\n{(COFFEE[:200, 300:, 0] > 200).sum()}"
    assert views == []
    assert observation.data["error"] is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can drop root")
def test_code_does_not_run_as_root():
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, "import time\ntime.sleep(4)")
        users = set[str]()
        while not running.done():
            for pid in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
                for child in pid.read_text().split():
                    with contextlib.suppress(OSError):
                        status = Path(f"/proc/{child}/status").read_text()
                        if "Seccomp:\t2" in status:
                            users |= {line for line in status.splitlines() if line.startswith(("Uid", "Gid"))}
            time.sleep(0.05)
    assert running.result()[0].status == "ok"
    assert users == {"Uid:" + "\t65534" * 4, "Gid:" + "\t65534" * 4}


def test_pictures_are_shown_and_no_call_can_be_about_a_part_of_them():
    code = """
import cv2
from PIL import Image, ImageDraw
show(image[:50, :60])
show(image[..., 0] > 100)
p = Image.fromarray(image); ImageDraw.Draw(p).text((5, 5), "a", fill=(255, 0, 0)); show(p)
"""
    observation, views = run(code)
    assert observation.status == "ok", observation.text
    np.testing.assert_array_equal(views[0], COFFEE[:50, :60])
    np.testing.assert_array_equal(views[1][..., 0] > 0, COFFEE[..., 0] > 100)
    assert (views[2] != COFFEE).any()
    shown = observation.images[0].model_copy(update={"id": "obs1"})
    assert call("zoom_in", COFFEE, "obs1", [shown], box=[0, 0, 0.5, 0.5])[0].code == "bad_target"
    _, views = run("show(image)", budget=PixelBudget(56 * 56, 112 * 112), multiple=28)
    assert views[0].shape[0] * views[0].shape[1] <= 112 * 112


def test_libraries_work_and_equal_calls_give_equal_results():
    code = """
import random, statistics, cv2, math
from PIL import ImageFilter, Image, ImageFont
count, _ = cv2.connectedComponents((image[..., 0] > 200).astype(np.uint8))
blurred = cv2.GaussianBlur(image, (5, 5), 0)
small = Image.fromarray(image).resize((30, 20)).filter(ImageFilter.SHARPEN)
print(count, np.linalg.norm(np.eye(3)), np.fft.fft(np.ones(4))[0].real, statistics.mean([1, 2]), math.pi)
print(random.random(), np.random.rand(), list({"a", "b", "c"}), ImageFont.load_default(20).getbbox("abc")[2] > 0)
print(np.sort(image.ravel())[100], (image.astype(float) @ np.ones((3, 1))).sum() > 0)
"""
    first, second = run(code)[0], run(code)[0]
    assert first.data["error"] is None, first.text
    assert first.text == second.text


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('a')\n1 / 0", "a\nline 2: ZeroDivisionError: division by zero"),
        ("x = (", "line 1: SyntaxError"),
        ("def f():\n    raise ValueError('no')\nf()", "line 2: ValueError: no"),
        ("raise SystemExit", "line 1: SystemExit"),
        ("x = 1", "nothing printed"),
        ("show(np.zeros((3, 3)))", "show takes uint8"),
        ("show(np.zeros((5000, 5000), np.uint8))", "show takes pictures of"),
        ("for _ in range(4): show(image)", "at most 3 pictures"),
        ("print('x' * 100_000)", "more characters)"),
        ("import socket", "ModuleNotFoundError"),
        ("import subprocess", "ModuleNotFoundError"),
    ],
)
def test_errors_of_the_code_are_read_by_the_policy(code: str, expected: str):
    observation, _ = run(code)
    assert observation.status == "ok"
    assert expected in observation.text
    assert len(observation.text) < 5000


REFUSED = [
    "open('/etc/passwd').read()",
    "import os; os.open('/etc/passwd', os.O_RDONLY)",
    "open('x', 'w')",
    "import os; os.listdir('/')",
    "import os; os.listdir('/proc/self/fd')",
    "open('/proc/self/environ').read()",
    "open('/proc/self/mem', 'wb')",
    "import os; os.stat('/etc/passwd')",
    "import os; os.fork()",
    "import os; os.forkpty()",
    "import os; os.execv('/bin/sh', ['sh'])",
    "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "import os; os.kill(os.getppid(), 9)",
    "import os; os.setuid(0)",
    "import os; os.chdir('/')",
    "import os; os.unlink('/tmp/x')",
    "import os; os.memfd_create('x')",
    "import os; os.pipe()",
    "import os; os.dup(1)",
    "import os; os.read(0, 1)",
    "import os; os.read(1, 1)",
    "import os; os.write(2, b'x')",
    "import sys; r = sys.modules['resource']; r.setrlimit(r.RLIMIT_NOFILE, (9, 9))",
    "import _socket; _socket.socket()",
    (
        "import signal; signal.alarm(1); raise PermissionError if signal.alarm(0) in (-1, 4294967295) else "
        "SystemExit"
    ),
    "import sys; sys.modules['posix'].system('touch /tmp/pixelis_escape'); open('/tmp/pixelis_escape')",
    "import _thread; _thread.start_new_thread(print, ())",
    "np.memmap('/etc/passwd')",
    "np.fromfile('/etc/passwd')",
    "from PIL import Image; Image.open('/usr/share/pixmaps/x.png')",
]


ATTEMPT_ALL = """
for number, snippet in enumerate({snippets!r}):
    try:
        exec(snippet)
        print(number, "ran")
    except BaseException as error:
        print(number, type(error).__name__, str(error)[:60])
"""


def test_system_calls_that_reach_out_are_refused():
    observation, views = run(ATTEMPT_ALL.format(snippets=REFUSED))
    assert (observation.status, views) == ("ok", []), observation.text
    lines = observation.text.splitlines()
    assert len(lines) == len(REFUSED)
    refusals = (
        "PermissionError",
        "not permitted",
        "not allowed",
        "can't start new thread",
        "No module named",
    )
    assert [line for line in lines if not any(word in line for word in refusals)] == []
    assert not os.path.exists("/tmp/pixelis_escape")


CTYPES = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    result = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return result, ctypes.get_errno()
path = ctypes.create_string_buffer(b"/etc/passwd")
for number in {numbers}:
    print(number, *call(number, *{arguments}))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86_64")
def test_raw_system_calls_are_refused_too():
    """open, socket, clone, fork, vfork, execve, kill, ptrace, openat, io_uring_setup, clone3, openat2, ..."""
    numbers = [
        0, 2, 3, 17, 19, 20, 32, 33, 41, 42, 44, 46, 56, 57, 58, 59, 62, 101, 105, 157, 160, 165, 200, 234, 250,
        257, 272, 308, 310, 311, 317, 319, 321, 322, 323, 425, 426, 434, 435, 437, 438, 440, 451, 462,
    ]  # fmt: skip
    observation, _ = run(CTYPES.format(numbers=numbers, arguments="(-100, path, 0, 0, 0, 0)"))
    assert (observation.status, observation.data["error"]) == ("ok", None), observation.text
    lines = observation.text.splitlines()
    assert [line.split() for line in lines] == [[str(number), "-1", "1"] for number in numbers]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86_64")
def test_memory_cannot_be_made_executable_and_the_other_call_table_kills():
    code = CTYPES.format(numbers=[9], arguments="(0, 4096, 7, 34, -1, 0)")
    assert run(code)[0].text == "9 -1 1"
    code = CTYPES.format(numbers=[9], arguments="(0, 4096, 3, 34, -1, 0)")
    assert run(code)[0].text.split()[2] == "0"
    observation, _ = run(CTYPES.format(numbers=[0x40000000 + 2], arguments="(path, 0)"))  # x32's open
    assert observation.code == "crashed"


@pytest.mark.slow
def test_memory_is_limited_and_a_crash_costs_the_call_only():
    assert "MemoryError" in run("x = bytearray(10**9)")[0].text
    assert "MemoryError" in run("x = []\nwhile True: x.append(bytearray(10**6))")[0].text
    assert run("import ctypes; ctypes.string_at(0)")[0].code == "crashed"
    assert run("import os; os._exit(0)")[0].code == "crashed"
    deep, _ = run("def f(n): return f(n + 1)\nf(0)")
    assert "RecursionError" in deep.text
    assert run("1 + 1")[0].text == "2"


@pytest.mark.slow
def test_endless_code_is_stopped_by_the_clock_and_its_process_is_gone(monkeypatch):
    monkeypatch.setattr(sandbox, "CODE_S", 0.5)
    started: list[subprocess.Popen] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        sandbox.subprocess, "Popen", lambda *args, **more: started.append(popen(*args, **more)) or started[-1]
    )
    endless = ("while True: pass", "import time; time.sleep(1000)", "9 ** 9 ** 9")
    for code in endless:
        observation, _ = run(code)
        assert observation.code == "timeout"
        assert "0.5 seconds" in observation.text
    assert [process.returncode for process in started] == [-signal.SIGKILL] * len(endless)
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


def test_a_start_that_takes_too_long_is_a_timeout():
    with pytest.raises(OperationError, match="did not start") as caught:
        sandbox.run("1", COFFEE, 0, 10**8, 0.0)
    assert caught.value.code == "timeout"


FORGED = [
    "import os; os.write(1, b'hello')",
    "import os; os.write(1, b'\\xff' * 100)",
    "import os; os.write(1, b'[' * 60000); os._exit(0)",
    *(
        f"import os, json; os.write(1, json.dumps({reply!r}).encode()); os._exit(0)"
        for reply in (
            {"text": 5, "error": None, "pictures": []},
            {"text": "", "error": None, "pictures": ["aaaa"]},
        )
    ),
]


@pytest.mark.parametrize("code", FORGED)
def test_what_the_code_writes_to_the_pipe_itself_is_not_believed(code: str):
    observation, views = run(code)
    assert (observation.code, views) == ("crashed", [])


def test_a_flood_ends_at_the_cap(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_BYTES", 1_000_000)
    observation, _ = run("import os\nwhile True: os.write(1, b'x' * 65536)")
    assert observation.code == "limit"


def _reply(pictures: list[str]) -> bytes:
    return b"R" + json.dumps({"text": "", "error": None, "pictures": pictures}).encode()


@given(st.binary(max_size=200) | st.lists(st.text(max_size=40), max_size=4).map(_reply))
def test_any_bytes_are_an_answer_or_a_named_error(data: bytes):
    with contextlib.suppress(OperationError, MissingDependency):
        sandbox._answer(data)


def test_a_picture_beyond_the_cap_is_refused_before_it_is_decoded():
    bomb = io.BytesIO()
    Image.new("RGB", (2600, 2600)).save(bomb, "PNG")
    with pytest.raises(OperationError) as error:
        sandbox._answer(_reply([base64.b64encode(bomb.getvalue()).decode()]))
    assert error.value.code == "crashed"


UNLOCKABLE = f"""
import sys; sys.path.insert(0, {os.path.dirname(sandbox_worker.__file__)!r})
import ctypes, sandbox_worker
def missing(name): raise OSError
ctypes.CDLL = missing
try: sandbox_worker.lock()
except sandbox_worker.Unavailable as error: print(error)
"""


def test_where_the_process_cannot_be_locked_the_operation_refuses():
    with pytest.raises(MissingDependency, match="kernel refuses"):
        sandbox._answer(b"XUnavailable: the kernel refuses a seccomp filter: Invalid argument")
    Python.ready(ToolboxConfig())
    done = subprocess.run([sys.executable, "-c", UNLOCKABLE], capture_output=True, text=True, timeout=120)
    assert "libseccomp.so.2 is not installed" in done.stdout, done.stderr


def test_the_environment_of_the_process_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "x")
    observation, _ = run("import os, json; print(json.dumps(sorted(os.environ)))")
    allowed = {*sandbox.ENVIRONMENT, "LC_CTYPE", "LD_LIBRARY_PATH"}  # cv2 sets the last one
    assert set(json.loads(observation.text)) <= allowed

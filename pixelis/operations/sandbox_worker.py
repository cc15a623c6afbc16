"""The process in which a policy's code runs: it loads what the code may use, locks itself, runs it, and ends.

``python -s -P sandbox_worker.py PARENT_PID`` reads a line of JSON and an array of numpy from standard input,
writes ``R`` when it is locked (or ``X`` and the reason), then the result as JSON ``{"text", "error",
"pictures"}``. The lock is a seccomp filter: system calls that are not on the list fail with EPERM. It imports
nothing of Pixelis.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import ctypes
import io
import json
import os
import resource
import sys
from typing import Any

MAX_CODE, MAX_TEXT, MAX_PICTURES, MAX_SHOWN_PIXELS, MAX_SIDE = 20_000, 4_000, 3, 4_194_304, 8_192
"""Characters of code and of output; pictures shown, and pixels and longest side of each."""
MODULES = (
    "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools",
    "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "textwrap",
    "typing", "numpy", "numpy.fft", "numpy.linalg", "numpy.polynomial", "numpy.random", "cv2", "PIL.Image",
    "PIL.ImageChops", "PIL.ImageColor", "PIL.ImageDraw", "PIL.ImageEnhance", "PIL.ImageFile",
    "PIL.ImageFilter", "PIL.ImageFont", "PIL.ImageMath", "PIL.ImageMode", "PIL.ImageMorph", "PIL.ImageOps",
    "PIL.ImagePalette", "PIL.ImageSequence", "PIL.ImageStat", "PIL.ImageText", "PIL.ImageTransform",
    "PIL.PngImagePlugin",
)  # fmt: skip
CALLS = (
    "brk", "clock_getres", "clock_gettime", "clock_nanosleep", "exit", "exit_group", "futex", "getpid",
    "getrandom", "gettid", "gettimeofday", "madvise", "mremap", "munmap", "nanosleep", "restart_syscall",
    "rseq", "rt_sigprocmask", "rt_sigreturn", "sched_yield", "time",
)  # fmt: skip
"""Allowed system calls: nothing here opens, reads, connects, starts, signals or inspects anything."""

# seccomp.h, prctl.h
KILL_PROCESS, REFUSE, ALLOW = 0x80000000, 0x00050000 | 1, 0x7FFF0000
BAD_ARCHITECTURE, TSYNC, EQUAL, MASKED_EQUAL = 2, 4, 4, 7
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
PROT_EXEC = 4
NOBODY = 65_534


class Unavailable(Exception):
    """The process cannot be locked; the message is the reason."""


class _Comparison(ctypes.Structure):
    """libseccomp's ``struct scmp_arg_cmp``: a condition on one argument of a call."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def lock() -> None:
    """Install the filter for good, on every thread. Raises Unavailable."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        raise Unavailable("libseccomp.so.2 is not installed") from None
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(REFUSE)))
    library.seccomp_attr_set(context, BAD_ARCHITECTURE, ctypes.c_uint32(KILL_PROCESS))
    library.seccomp_attr_set(context, TSYNC, 1)
    conditions = {
        "write": _Comparison(0, EQUAL, 1, 0),  # on standard output only
        "mmap": _Comparison(2, MASKED_EQUAL, PROT_EXEC, 0),  # no memory that can be executed
        "mprotect": _Comparison(2, MASKED_EQUAL, PROT_EXEC, 0),
    }
    for name in (*CALLS, *conditions):
        number = library.seccomp_syscall_resolve_name(name.encode())
        condition = conditions.get(name)
        arguments = (0, None) if condition is None else (1, ctypes.byref(condition))
        if library.seccomp_rule_add_array(context, ctypes.c_uint32(ALLOW), number, *arguments) != 0:
            raise Unavailable(f"libseccomp has no rule for {name}")
    if (failure := library.seccomp_load(context)) != 0:
        raise Unavailable(f"the kernel refuses a seccomp filter: {os.strerror(-failure)}")
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except PermissionError:
        return
    raise Unavailable("the seccomp filter has no effect")


def drop_root() -> None:
    """Become nobody if this is root's process and its container allows it: a fault of the filter gives less."""
    if os.getuid() == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)


def die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)


def limit(memory: int, seconds: int) -> None:
    """Limit memory beyond what is loaded, CPU time beyond what was used, files and processes to none."""
    with open("/proc/self/statm") as file:
        loaded = int(file.read().split()[0]) * resource.getpagesize()
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(used.ru_utime + used.ru_stime) + seconds + 1
    for name, value in (
        ("AS", loaded + memory),
        ("CPU", cpu),
        ("FSIZE", 0),
        ("NPROC", 0),
        ("CORE", 0),
        ("NOFILE", 3),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


class Output(io.StringIO):
    """Text up to MAX_TEXT characters; more is dropped and counted."""

    dropped = 0

    def write(self, text: str) -> int:
        room = max(0, MAX_TEXT - self.tell())
        self.dropped += max(0, len(text) - room)
        super().write(text[:room])
        return len(text)


def execute(code: str, image: Any, output: Output) -> tuple[str | None, list[Any]]:
    """Run the code with ``image``, ``np`` and ``show``; returns an error, and the pictures shown."""
    import numpy as np
    from PIL import Image

    shown: list[Any] = []

    def show(picture: Any) -> None:
        """Show a picture: uint8 or bool array [h, w] or [h, w, 3], or a PIL image."""
        array = np.asarray(picture.convert("RGB") if isinstance(picture, Image.Image) else picture)
        array = array * np.uint8(255) if array.dtype == bool else array
        if array.ndim == 2:
            array = np.repeat(array[..., None], 3, 2)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
            raise ValueError(f"show takes uint8 [height, width, 3], not {array.dtype} {list(array.shape)}")
        if (
            min(array.shape[:2]) < 4
            or array.shape[0] * array.shape[1] > MAX_SHOWN_PIXELS
            or max(array.shape[:2]) > MAX_SIDE
        ):
            raise ValueError(
                f"show takes pictures of 4x4 to {MAX_SHOWN_PIXELS} pixels, not "
                f"{array.shape[1]}x{array.shape[0]}"
            )
        if len(shown) >= MAX_PICTURES:
            raise ValueError(f"show takes at most {MAX_PICTURES} pictures")
        shown.append(np.ascontiguousarray(array))

    names = {"__name__": "__main__", "image": image, "np": np, "Image": Image, "show": show}
    sys.stdout = sys.stderr = output
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), names)  # noqa: S102  # nosec B102: this is the locked process
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)  # noqa: S307  # nosec B307
            if value is not None:
                print(value)
        return None, shown
    except BaseException as error:
        return described(error), shown


def described(error: BaseException) -> str:
    """One line: the line of the code, the kind of error, its message."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<code>" else line
        trace = trace.tb_next
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{f'line {line}: ' if line else ''}{type(error).__name__}: {message}"[:500]


def main() -> None:
    die_with_parent()
    try:
        for name in MODULES:
            __import__(name)
        import cv2
        import numpy as np
        from PIL import Image, ImageFont

        request = json.loads(sys.stdin.buffer.readline())
        image = np.load(sys.stdin.buffer, allow_pickle=False)
        cv2.setNumThreads(1)
        ImageFont.load_default(16)
        np.random.seed(request["seed"])
        sys.modules["random"].seed(request["seed"])
        os.closerange(3, 4096)
        os.close(0)
        drop_root()
        die_with_parent()  # again: the kernel forgets it when the user changes
        limit(request["memory"], request["seconds"])
        lock()
    except Exception as error:  # whatever prevents the lock prevents the run
        os.write(1, b"X" + f"{type(error).__name__}: {error}"[:500].encode())
        os._exit(1)
    os.write(1, b"R")
    output = Output()
    failure, shown = execute(request["code"], image, output)
    text = output.getvalue() + (f"\n({output.dropped} more characters)" if output.dropped else "")
    pictures = []
    for picture in shown:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "PNG", compress_level=1)
        pictures.append(base64.b64encode(file.getvalue()).decode())
    view = memoryview(json.dumps({"text": text, "error": failure, "pictures": pictures}).encode())
    while view:
        view = view[os.write(1, view) :]
    os._exit(0)


if __name__ == "__main__":
    main()

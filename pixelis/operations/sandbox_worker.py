"""The process in which a policy's code runs: it loads what the code may use, locks itself, runs the code, and ends.

``python -s -P sandbox_worker.py PARENT_PID`` reads a request from standard input and writes one byte when it is locked (or b"X"
and the reason), then the result: a 4-byte length, JSON ``{"text", "error", "shapes"}``, and the bytes of the pictures. It imports
nothing of Pixelis. The lock is a seccomp filter: system calls that are not on the list below fail with EPERM, for good.
"""

from __future__ import annotations

import ast
import ctypes
import io
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

HEADER = struct.Struct(">I")
MAX_CODE, MAX_TEXT, MAX_PICTURES, MAX_SHOWN_PIXELS, MAX_SIDE = 20_000, 4_000, 3, 4_194_304, 8_192
"""Characters of code and of output; pictures shown, and pixels and longest side of each."""
MODULES = (
    *(
        "bisect",
        "cmath",
        "collections",
        "copy",
        "dataclasses",
        "datetime",
        "decimal",
        "fractions",
        "functools",
        "heapq",
        "itertools",
    ),
    *("json", "math", "operator", "random", "re", "statistics", "string", "textwrap", "typing"),
    *("numpy", "numpy.fft", "numpy.linalg", "numpy.polynomial", "numpy.random", "cv2"),
    *(f"PIL.Image{part}" for part in ("", "Chops", "Color", "Draw", "Enhance", "File", "Filter", "Font")),
    *(f"PIL.Image{part}" for part in ("Math", "Mode", "Morph", "Ops", "Palette", "Sequence", "Stat", "Text", "Transform")),
)

# Linux's tables of system calls (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h). Nothing here opens,
# reads, connects, starts, signals or inspects anything. Waiting and memory: time, futex, mmap, ...
ARCHITECTURES: dict[str, tuple[int, int, int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        317,
        0x40000000,
        {
            **{"write": 1, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigprocmask": 14, "rt_sigreturn": 15},
            **{"sched_yield": 24, "mremap": 25, "madvise": 28, "nanosleep": 35, "getpid": 39, "exit": 60, "gettimeofday": 96},
            **{"gettid": 186, "time": 201, "futex": 202, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229},
            **{"clock_nanosleep": 230, "exit_group": 231, "getrandom": 318, "rseq": 334},
        },
    ),
    "aarch64": (
        0xC00000B7,
        277,
        0,
        {
            **{
                "write": 64,
                "exit": 93,
                "exit_group": 94,
                "futex": 98,
                "nanosleep": 101,
                "clock_gettime": 113,
                "clock_getres": 114,
            },
            **{"clock_nanosleep": 115, "sched_yield": 124, "restart_syscall": 128, "rt_sigprocmask": 135, "rt_sigreturn": 139},
            **{"gettimeofday": 169, "getpid": 172, "gettid": 178, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222},
            **{"mprotect": 226, "madvise": 233, "getrandom": 278, "rseq": 293},
        },
    ),
}
"""Machine -> audit architecture, number of seccomp(2), first number of its other call table (0: none), the allowed calls."""
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
KILL, REFUSE, ALLOW = 0x80000000, 0x00050000 | 1, 0x7FFF0000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data; arguments are 8 bytes each, their low words first on both architectures."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
PROT_EXEC, TSYNC = 4, 1


class Unavailable(Exception):
    """The process cannot be locked; the message is the reason."""


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter as BPF instructions (code, jump if true, jump if false, value)."""
    architecture, _, other_table, calls = ARCHITECTURES[machine]
    out = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if other_table:
        out += [(AT_LEAST, 0, 1, other_table), (RETURN, 0, 0, KILL)]
    for name, number in calls.items():
        if name == "write":  # on standard output only
            check = [(LOAD, 0, 0, ARGUMENTS), (EQUAL, 0, 1, 1), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
        elif name in ("mmap", "mprotect"):  # no memory that can be executed
            check = [(LOAD, 0, 0, ARGUMENTS + 16), (AND, 0, 0, PROT_EXEC), (EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW)]
            check.append((RETURN, 0, 0, REFUSE))
        else:
            check = [(RETURN, 0, 0, ALLOW)]
        out += [(EQUAL, 0, len(check), number), *check]
    return [*out, (RETURN, 0, 0, REFUSE)]


def lock() -> None:
    """Install the filter for good, on every thread. Raises Unavailable where the kernel or the machine has none."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        raise Unavailable(
            f"seccomp filters are known for Linux on {' and '.join(ARCHITECTURES)}, this is {sys.platform} on {machine}"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program(machine))
    instructions = ctypes.create_string_buffer(code, len(code))
    fprog = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions)))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise Unavailable("the kernel has no no_new_privs")
    number = ctypes.c_long(ARCHITECTURES[machine][1])
    if libc.syscall(number, ctypes.c_long(1), ctypes.c_long(TSYNC), fprog) != 0:
        raise Unavailable(f"the kernel refuses a seccomp filter: {os.strerror(ctypes.get_errno())}")
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except PermissionError:
        return
    raise Unavailable("the seccomp filter has no effect")


def limit(memory: int, seconds: int) -> None:
    """Limit memory beyond what is loaded, CPU time beyond what was used, files and processes to none."""
    with open("/proc/self/statm") as file:
        loaded = int(file.read().split()[0]) * resource.getpagesize()
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(used.ru_utime + used.ru_stime) + seconds + 1
    for name, value in (("AS", loaded + memory), ("CPU", cpu), ("FSIZE", 0), ("NPROC", 0), ("CORE", 0), ("NOFILE", 3)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


class Output(io.StringIO):
    """Text up to MAX_TEXT characters; more is dropped and counted."""

    dropped = 0

    def write(self, text: str) -> int:
        """Append what there is room for."""
        room = max(0, MAX_TEXT - self.tell())
        self.dropped += max(0, len(text) - room)
        super().write(text[:room])
        return len(text)


def execute(code: str, image: Any, output: Output) -> tuple[str | None, list[Any]]:
    """Run the code with ``image``, ``np`` and ``show``; returns an error, and the pictures shown (uint8 [h, w, 3])."""
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
        if min(array.shape[:2]) < 4 or array.shape[0] * array.shape[1] > MAX_SHOWN_PIXELS or max(array.shape[:2]) > MAX_SIDE:
            raise ValueError(f"show takes pictures of 4x4 to {MAX_SHOWN_PIXELS} pixels, not {array.shape[1]}x{array.shape[0]}")
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
    """Load, lock, run, answer."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
    request = json.loads(sys.stdin.buffer.read(*HEADER.unpack(sys.stdin.buffer.read(HEADER.size))))
    pixels = bytearray(sys.stdin.buffer.read())
    try:
        for name in MODULES:
            __import__(name)
        import cv2
        import numpy as np
        from PIL import ImageFont

        cv2.setNumThreads(1)
        ImageFont.load_default(16)
        np.random.seed(request["seed"])
        sys.modules["random"].seed(request["seed"])
        image = np.frombuffer(pixels, np.uint8).reshape(request["shape"])
        os.closerange(3, 4096)
        os.close(0)
        limit(request["memory"], request["seconds"])
        lock()
    except Exception as error:  # whatever prevents the lock prevents the run
        os.write(1, b"X" + f"{type(error).__name__}: {error}"[:500].encode())
        os._exit(1)
    os.write(1, b"R")
    output = Output()
    failure, shown = execute(request["code"], image, output)
    text = output.getvalue() + (f"\n({output.dropped} more characters)" if output.dropped else "")
    reply = json.dumps({"text": text, "error": failure, "shapes": [list(picture.shape) for picture in shown]}).encode()
    for part in (HEADER.pack(len(reply)), reply, *(picture.tobytes() for picture in shown)):
        view = memoryview(part)
        while view:
            view = view[os.write(1, view) :]
    os._exit(0)


if __name__ == "__main__":
    main()

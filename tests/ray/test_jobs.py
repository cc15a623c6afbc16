"""Jobs as a user runs them: they leave what they promise, stop cleanly, resume exactly and fail with one clear message."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from pixelis.actors import cluster
from pixelis.config import Config, load
from pixelis.datasets import cards
from pixelis.jobs import evaluate, rft, sft, ttrl
from pixelis.jobs.driver import Stopped, run_folder, stop_file
from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_adapter
from pixelis.records import Demonstration, Group, Media
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BARE = Path(__file__).with_name("bare.yaml")
"""A configuration without a word, so that processes and tests share the defaults and nothing else."""
FEW = (
    "policy.model=nano learner.schedule=constant data.direct_share=0.5 sft.batch=4 learner.lr=4e-3 learner.checkpoint_every=1000"
)
STAGES = [{"name": "a", "mixture": [1, 0, 0], "max_steps": 20}, {"name": "b", "mixture": [0.5, 0.25, 0.25]}]
SFT = [
    *FEW.split(),
    "sft.steps=60",
    "sft.evaluate_every=10",
    "sft.validation_size=6",
    "sft.evaluate_episodes=2",
    "sft.curriculum.enabled=true",
    "sft.curriculum.interval=10",
    # Only the number of steps ends the first stage; whether the second is taken back is up to what is measured.
    "sft.curriculum.threshold=2",
    f"sft.curriculum.stages={json.dumps(STAGES)}",
]
RFT = [*FEW.split(), "learner.lr=1e-3", "rft.steps=4", "rft.questions=4", "rft.group=4", "rewards.weights.format=0.5"]
RFT += [
    "rft.loss.kl=0.01",
    "rft.evaluate_every=2",
    "evaluate.questions=4",
    "telemetry.tensorboard=true",
    "telemetry.trajectories=3",
]


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings to learn from 90 demonstrations of the picture world with levels and weights.

    One more is wrong on purpose, and the picture of one is broken.
    """
    path = tmp_path_factory.mktemp("levels") / "demonstrations.jsonl"
    rows = [Demonstration.model_validate(row) for row in cards.demonstration_rows("train", 90, 42, 0.5)]
    for number, row in enumerate(rows):
        row.level = "simple" if not row.steps else "medium" if number % 2 else "hard"
        row.weight = 1.0 + number % 3
    rows.append(rows[0].model_copy(update={"id": "wrong", "kind": "trap_logical"}))
    (path.parent / "broken.png").write_bytes(b"no picture")
    broken = [Media(id="img0", uri=str(path.parent / "broken.png"))]
    rows.append(rows[0].model_copy(update={"id": "broken", "media": broken, "level": "simple"}))
    path.write_text("".join(row.model_dump_json() + "\n" for row in rows), encoding="utf-8")
    return [f"data.demonstrations={path}", f"sft.validation={path}", "data.max_bad_rows=0.1"]


@pytest.fixture(scope="module")
def straight(ray_cluster: None, levels: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an SFT run in one go, from the embedded base; its adapter knows the protocol roughly."""
    folder = tmp_path_factory.mktemp("straight")
    assert sft.run(load(None, [*SFT, *levels, f"run.dir={folder}"])) == folder / "checkpoints" / "step_00000060"
    return folder


def start(name: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", f"pixelis.jobs.{name}", str(BARE), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stopped_after(steps: int, config: Config) -> Path | None:
    """Run SFT and ask it to stop, as a user does by a file, once ``steps`` are in the events; its last checkpoint.

    What a signal does is in tests/chaos/test_learner_faults.py.
    """
    folder = Path(config.run.dir)

    def ask() -> None:
        give_up = time.monotonic() + 300
        while len(events.read(folder, "step/sft")) < steps and time.monotonic() < give_up:
            time.sleep(0.02)
        stop_file(config).touch()

    threading.Thread(target=ask, daemon=True).start()
    with suppress(Stopped):
        sft.run(config)
    return checkpoint.latest(folder)


def losses(folder: Path, kind: str) -> dict[int, float]:
    rows = events.read(folder, kind)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "every step once and in order"
    return {row["step"]: row["policy/loss"] for row in rows}


def learnt_from(folder: Path) -> dict[int, list[str]]:
    """Step -> ids of its demonstrations; a step that was made again after a stop counts once."""
    rows = [json.loads(line) for line in (folder / "consumed.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["ids"] for row in rows}


def test_sft_follows_its_curriculum(straight: Path) -> None:
    rows = events.read(straight, "step/sft")
    assert [row["step"] for row in rows if "evaluate/loss" in row] == [10, 20, 30, 40, 50, 60]
    assert rows[-1]["evaluate/loss"] < 0.5 * rows[9]["evaluate/loss"]
    for row in rows[9::10]:
        assert {"evaluate/accuracy", "evaluate/rapr", "evaluate/turns", "evaluate/tool_error_rate"} <= set(row)
    assert [row["curriculum/event"] for row in rows][:29] == [0.0] * 19 + [1.0] + [0.0] * 9
    for row in rows[:30]:
        counts = [row[f"curriculum/count_{level}"] for level in ("simple", "medium", "hard")]
        assert (row["curriculum/stage"], counts) == ((0, [4, 0, 0]) if row["step"] <= 20 else (1, [2, 1, 1]))
    (told,) = events.read(straight, "demonstrations")
    assert (told["rows"], told["refused"]) == (91, {"trap_logical": 1})
    drawn = [name for ids in learnt_from(straight).values() for name in ids]
    assert "wrong" not in drawn
    assert rows[-1]["data/unusable"] == drawn.count("broken") > 0


def test_sft_learns_and_a_stopped_run_resumes_to_the_same_losses(straight: Path, levels: list[str], tmp_path: Path) -> None:
    wanted = losses(straight, "step/sft")
    assert np.mean([wanted[s] for s in range(56, 61)]) < 0.5 * np.mean([wanted[s] for s in range(1, 6)])
    config = load(None, [*SFT, *levels, f"run.dir={tmp_path}"])
    stopped = stopped_after(12, config)
    assert stopped is not None
    assert 12 <= checkpoint.step_of(stopped) < 60
    assert load_adapter(stopped).tensors
    assert not (tmp_path / "lock.json").exists()
    assert sft.run(config) == tmp_path / "checkpoints" / "step_00000060"
    assert losses(tmp_path, "step/sft") == pytest.approx(wanted, abs=1e-6)
    assert learnt_from(tmp_path) == learnt_from(straight)
    kept = [
        checkpoint.read(folder / "checkpoints" / "step_00000060")[1]["extra"]["curriculum"] for folder in (straight, tmp_path)
    ]
    assert kept[0] == kept[1]
    assert kept[0]["history"][0] == [20, "advance", 1]
    one, other = (load_adapter(folder / "checkpoints" / "step_00000060") for folder in (straight, tmp_path))
    assert one.sha256() == other.sha256()


def train(config: Config) -> Path:
    with run_folder(config, config.data.train), cluster.placed(config, initial=config.policy.adapter) as actors:
        return rft.run(config, actors)


def rft_config(folder: Path, adapter: Path, *more: str) -> Config:
    return load(None, [*RFT, f"policy.adapter={adapter}/checkpoints/step_00000060", f"run.dir={folder}", *more])


@pytest.fixture(scope="module")
def rft_run(straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an RFT run that goes on from SFT."""
    folder = tmp_path_factory.mktemp("rft")
    assert train(rft_config(folder, straight)) == folder / "checkpoints" / "step_00000004"
    return folder


def test_rft_goes_on_from_sft_exactly_on_policy(rft_run: Path) -> None:
    """How it stops and goes on is in tests/chaos/test_learner_faults.py."""
    rows = events.read(rft_run, "step/policy")
    assert any(row["learner/trained_sequences"] > 0 for row in rows), "some group had both good and bad answers"
    for row in rows:
        # The generator samples from the very weights that the learner updates, from the first step on.
        assert row.get("policy/drift_max", 0.0) < 1e-3
        assert row["rollout/staleness"] == 0


def documented() -> dict[str, tuple[re.Pattern[str], bool]]:
    """Metric of docs/metrics.md -> (pattern of its names, whether every step of rft logs it)."""
    found = {}
    for line in Path("docs/metrics.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        names, _, when = (cell.strip() for cell in line.strip("|").split(" | "))
        for name in re.findall(r"`([^`]+)`", names):
            pattern = "".join(r"[\w.:/]+" if part.isupper() else re.escape(part) for part in re.split(r"([A-Z]{2,})", name))
            found[name] = re.compile(pattern), when.strip() == "always"
    return found


def test_every_metric_of_a_step_is_documented_and_the_other_way_round(rft_run: Path) -> None:
    rows, table = events.read(rft_run, "step/policy"), documented()
    assert len(rows) == 4
    for row in rows:
        logged = {key for key in row if "/" in key}
        assert {key for key in logged if not any(p.fullmatch(key) for p, _ in table.values())} == set()
        assert {name for name, (p, always) in table.items() if always and not any(map(p.fullmatch, logged))} == set()


def test_evaluations_leave_pages_with_pictures(rft_run: Path) -> None:
    pages = sorted((rft_run / "trajectories").iterdir())
    assert [page.name for page in pages] == ["step_00000002.html", "step_00000004.html"]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text.count('<article class="episode"') == 3
        assert "data:image/" in text
        assert "was not kept" not in text


def test_tensorboard_gets_the_numbers_of_the_steps(rft_run: Path) -> None:
    (file,) = (rft_run / "tensorboard").glob("events.*")
    assert b"train/accuracy" in file.read_bytes()


def run_here(job: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """A job's main in this process, on the cluster that is there; its exit code."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["job", str(BARE), *arguments])
    try:
        job()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def test_evaluate_writes_numbers_trajectories_and_pictures(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = straight / "checkpoints" / "step_00000060"
    arguments = ["policy.model=nano", f"policy.adapter={adapter}", f"run.dir={tmp_path}", "run.name=held-out"]
    assert run_here(evaluate.main, monkeypatch, *arguments, "evaluate.questions=20", "evaluate.trajectories=4") == 0
    out = capfd.readouterr().out
    summary = json.loads((tmp_path / "evaluation.json").read_text())
    assert summary["n"] == 20
    assert summary["ci95"][0] <= summary["accuracy"] <= summary["ci95"][1]
    assert f"accuracy {summary['accuracy']:.3f}" in out
    groups = [Group.model_validate_json(line) for line in (tmp_path / "trajectories-held-out.jsonl").read_text().splitlines()]
    assert len({g.question.id for g in groups}) == 20
    right = [t.rewards["accuracy"] for g in groups for t in g.trajectories]
    assert sum(right) / 20 == pytest.approx(summary["accuracy"])
    assert summary["rapr"] == pytest.approx(sum(t.operations_ok > 0 for g in groups for t in g.trajectories) / 20)
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/") >= 4
    assert str(tmp_path / "report.html") in out


def test_ttrl_learns_from_votes_until_they_agree_no_further(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [cards.question_row("train", 1, number) for number in range(8)]
    source = tmp_path / "unlabelled.jsonl"
    source.write_text("\n".join(json.dumps({key: row[key] for key in row if key != "answers"}) for row in rows))
    keys = f"policy.model=nano policy.adapter={straight}/checkpoints/step_00000060 run.dir={tmp_path}/run data.train={source}"
    learns = "rft.algorithm=ttrl rewards.preset=ttrl rft.steps=50 rft.questions=4 rft.group=8 rft.samples=4 learner.lr=1e-3"
    # No rise of shares is ever 1: the run ends as soon as two steps can be compared.
    ends = "ttrl.samples=4 ttrl.patience=1 ttrl.min_gain=1 evaluate.questions=8 evaluate.sampling.temperature=1"
    assert run_here(ttrl.main, monkeypatch, *keys.split(), *learns.split(), *ends.split()) == 0
    found = json.loads((tmp_path / "run" / "ttrl.json").read_text())
    steps = events.read(tmp_path / "run", "step/policy")
    assert 2 <= found["steps"] == len(steps) < 50
    assert (found["plateau"], found["pass@1"], found["questions"]) == (True, None, 8)
    assert 0 < found["agreement"]["before"]["mean"] < 1
    assert all("vote/majority_share" in row and "vote/label_accuracy" not in row for row in steps)
    assert "unknown: the questions have no answers" in capfd.readouterr().out
    assert run_here(ttrl.main, monkeypatch, *keys.split(), "rewards.preset=ttrl", "rewards.weights.accuracy=1") == 2


@pytest.fixture
def damaged(straight: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "step_00000060"
    folder.mkdir()
    for file in (straight / "checkpoints" / "step_00000060").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return folder


@pytest.mark.usefixtures("ray_cluster")
def test_what_a_user_gets_wrong_is_one_message_with_its_fix(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a", "question": "?"}\n{"id": "a", "question": "?"}\n')
    cases: list[tuple[Callable[[], None], str, int, str]] = [
        (rft.main, "rft.qestions=8", 2, "did you mean `rft.questions`"),
        (sft.main, "sft.batch=five", 2, "sft.batch"),
        (rft.main, "rft.group=1", 2, "rft.group"),
        (rft.main, "policy.adapter=runs/nowhere/step_00000001", 1, "runs/nowhere/step_00000001"),
        (sft.main, f"policy.model={tmp_path}/nothing", 1, "nothing"),
        (evaluate.main, f"policy.adapter={damaged}", 1, "damaged"),
        (rft.main, "data.train=questions/none.jsonl", 1, "none.jsonl"),
        (evaluate.main, f"data.evaluate={bad}", 1, "row 2"),
        (sft.main, f"data.demonstrations={bad}", 1, "row 1"),
        (evaluate.main, "data.evaluate=cards:?split=dev", 1, "dev"),
    ]
    for job, argument, code, words in cases:
        assert run_here(job, monkeypatch, "policy.model=nano", f"run.dir={tmp_path}/run", argument) == code, argument
        told = capfd.readouterr().err
        assert words in told
        assert "fix: " in told
        assert told.count("pixelis.jobs.") == 1
        assert "Traceback" not in told
    assert not list((tmp_path / "run").rglob("step_*"))


def test_a_missing_checkpoint_ends_the_process_at_once(tmp_path: Path) -> None:
    job = start("rft", "policy.model=nano", f"policy.adapter={tmp_path}/none", f"run.dir={tmp_path}/run")
    out, told = job.communicate(timeout=120)
    assert job.returncode == 1
    assert f"{tmp_path}/none" in told
    assert "fix: " in told
    assert "Traceback" not in out + told

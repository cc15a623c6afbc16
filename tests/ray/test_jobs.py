"""Jobs as a user runs them: their output files, clean stops, exact resumption, and error messages."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pixelis.actors.train_job import best_step
from pixelis.config import load
from pixelis.datasets import card_questions
from pixelis.jobs import evaluate, lineage, rft, sft, ttrl
from pixelis.policy import checkpoint, storage
from pixelis.policy.adapters import load_adapter
from pixelis.policy.architecture import Architecture, learner_dtype
from pixelis.records import Demonstration, Group, Media
from pixelis.telemetry import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MetricTable = dict[str, tuple[re.Pattern[str], bool]]
BARE = Path(__file__).with_name("bare.yaml")
"""An empty configuration file: processes and tests use the defaults."""
SMALL_RUN = (
    "policy.model=nano learner.schedule=constant data.direct_share=0.5 sft.batch=4 learner.lr=4e-3 "
    "learner.checkpoint_every=1000"
)
STAGES = [{"name": "a", "mixture": [1, 0, 0], "max_steps": 20}, {"name": "b", "mixture": [0.5, 0.25, 0.25]}]
LAST = "checkpoints/step_00000040"
SFT = [
    *SMALL_RUN.split(),
    *("sft.steps=40", "learner.checkpoint_every=10", "sft.evaluate_every=10", "sft.validation_size=6"),
    # The threshold is never reached, so that only the number of steps ends the first stage.
    *("sft.curriculum.enabled=true", "sft.curriculum.interval=10", "sft.curriculum.threshold=2"),
    f"sft.curriculum.stages={json.dumps(STAGES)}",
]
TTRL = [
    *SMALL_RUN.split(),
    *("learner.lr=1e-3", "rft.algorithm=ttrl", "rewards.preset=ttrl", "rft.loss.kl=0.01"),
    *("rft.steps=50", "rft.prompts_per_step=4", "rft.group_size=8", "rft.train_samples=4"),
    # The agreement never rises by 1, so that the run ends as soon as two steps can be compared.
    *("ttrl.samples=4", "ttrl.patience=1", "ttrl.min_gain=1", "evaluate.sampling.temperature=1"),
    *("evaluate.sets.near=cards:?split=test&seed=7", "evaluate.sets.far=cards:?split=test&seed=7&shift=warm"),
    *("rft.evaluate_every=2", "evaluate.questions=6"),
    *("telemetry.trackers=[tensorboard]", "telemetry.trajectories=3"),
    *("learner.checkpoint_every=1", "learner.keep=2", "policy_store.keep=2"),
]


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """90 demonstrations with levels and weights, one of a refused kind, and one with a broken picture."""
    path = tmp_path_factory.mktemp("levels") / "demonstrations.jsonl"
    made = card_questions.demonstration_rows("train", 90, 42, 0.5)
    rows = [Demonstration.model_validate(row) for row in made]
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
def sft_folder(ray_cluster: None, levels: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted SFT run from the embedded base."""
    folder = tmp_path_factory.mktemp("sft")
    assert sft.run(load(None, [*SFT, *levels, f"run.dir={folder}"])) == folder / LAST
    return folder


def losses(folder: Path) -> list[float]:
    rows = events.read(folder, "step/sft")
    assert [row["step"] for row in rows] == list(range(1, 41)), "every step is logged once and in order"
    return [row["policy/loss"] for row in rows]


def consumed_ids(folder: Path) -> dict[int, list[str]]:
    """Return step -> ids of its demonstrations. No step stands there twice."""
    rows = [json.loads(line) for line in (folder / "consumed.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len({row["step"] for row in rows})
    return {row["step"]: row["ids"] for row in rows}


def test_sft_learns_and_follows_its_curriculum(sft_folder: Path) -> None:
    rows = events.read(sft_folder, "step/sft")
    assert [row["step"] for row in rows if "evaluate/loss" in row] == [10, 20, 30, 40]
    assert rows[-1]["evaluate/loss"] < 0.5 * rows[9]["evaluate/loss"]
    assert np.mean(losses(sft_folder)[-5:]) < 0.5 * np.mean(losses(sft_folder)[:5])
    assert [row["curriculum/event"] for row in rows][:29] == [0.0] * 19 + [1.0] + [0.0] * 9
    for row in rows[:30]:
        counts = [row[f"curriculum/count_{level}"] for level in ("simple", "medium", "hard")]
        assert (row["curriculum/stage"], counts) == ((0, [4, 0, 0]) if row["step"] <= 20 else (1, [2, 1, 1]))
    (event,) = events.read(sft_folder, "demonstrations")
    assert (event["rows"], event["refused"]) == (91, {"trap_logical": 1})
    used = [name for ids in consumed_ids(sft_folder).values() for name in ids]
    assert "wrong" not in used
    assert rows[-1]["data/unusable"] == used.count("broken") > 0
    node = lineage.trace(sft_folder / LAST)
    assert node.record is not None
    assert node.record.kind == "checkpoint"
    assert {"model", "demonstrations"} <= {source.role for source in node.sources}
    assert not node.broken


def test_a_run_resumes_from_its_last_checkpoint_to_the_same_losses_and_weights(
    sft_folder: Path, levels: list[str], tmp_path: Path
) -> None:
    """As after a crash in the last step: those after the checkpoint are made again."""
    shutil.copytree(sft_folder, tmp_path, symlinks=True, dirs_exist_ok=True)
    checkpoints = tmp_path / "checkpoints"
    for lost in (20, 40):
        shutil.rmtree(checkpoints / f"step_{lost:08d}")
    written = (checkpoints / "step_00000030").stat().st_mtime_ns
    assert sft.run(load(None, [*SFT, *levels, f"run.dir={tmp_path}"])) == tmp_path / LAST
    assert losses(tmp_path) == pytest.approx(losses(sft_folder), abs=1e-6)
    assert consumed_ids(tmp_path) == consumed_ids(sft_folder)
    final = [folder / LAST for folder in (sft_folder, tmp_path)]
    curricula = [checkpoint.read(folder)[1]["extra"]["curriculum"] for folder in final]
    assert curricula[0] == curricula[1]
    assert curricula[0]["history"][0] == [20, "advance", 1]
    assert load_adapter(final[0]).sha256() == load_adapter(final[1]).sha256()
    assert not (checkpoints / "step_00000020").exists(), "the run began anew"
    assert (checkpoints / "step_00000030").stat().st_mtime_ns == written


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight questions without answers."""
    path = tmp_path_factory.mktemp("unlabelled") / "questions.jsonl"
    rows = [card_questions.question_row("train", 1, number) for number in range(8)]
    path.write_text("\n".join(json.dumps({key: row[key] for key in row if key != "answers"}) for row in rows))
    return path


@pytest.fixture(scope="module")
def ttrl_run(
    sft_folder: Path, unlabelled: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The folder of a TTRL run that starts from SFT, and its output."""
    folder, output = tmp_path_factory.mktemp("ttrl"), io.StringIO()
    keys = [f"policy.adapter={sft_folder / LAST}", f"data.train={unlabelled}", f"run.dir={folder}"]
    with pytest.MonkeyPatch.context() as monkeypatch, redirect_stdout(output):
        assert run_job(ttrl.main, monkeypatch, *TTRL, *keys) == 0
    return folder, output.getvalue()


@pytest.mark.long
def test_ttrl_learns_from_votes_until_agreement_stops_rising(ttrl_run: tuple[Path, str]) -> None:
    folder, output = ttrl_run
    result = json.loads((folder / "ttrl.json").read_text())
    steps = events.read(folder, "step/policy")
    assert 2 <= result["steps"] == len(steps) < 50
    assert (result["plateau"], result["pass@1"], result["questions"]) == (True, None, 6)
    assert 0 < result["agreement"]["before"]["mean"] < 1
    assert all("vote/majority_ratio" in row and "vote/label_accuracy" not in row for row in steps)
    assert "unknown: the questions have no answers" in output


@pytest.mark.long
def test_evaluations_answer_questions_of_each_set_and_their_mean_decides(ttrl_run: tuple[Path, str]) -> None:
    evaluations = events.read(ttrl_run[0], "evaluation")
    assert evaluations
    for row in evaluations:
        of_sets = row["evaluate/accuracy_near"], row["evaluate/accuracy_far"]
        assert row["evaluate/accuracy"] == pytest.approx(np.mean(of_sets))
    saved = checkpoint.steps(ttrl_run[0])
    best = max((row["evaluate/accuracy"], row["step"]) for row in evaluations if row["step"] in saved)
    assert best_step(str(ttrl_run[0])) == best[1]


def test_ttrl_refuses_rewards_that_use_the_true_answer(
    unlabelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = [*TTRL, "rewards.weights.accuracy=1", f"data.train={unlabelled}", f"run.dir={tmp_path}"]
    assert run_job(ttrl.main, monkeypatch, *keys) == 2
    assert "rewards.weights" in capfd.readouterr().err


@pytest.mark.long
def test_a_run_takes_the_disk_that_its_dry_run_estimates(ttrl_run: tuple[Path, str]) -> None:
    folder, _ = ttrl_run
    config = load(None, [*TTRL, f"run.dir={folder}"])
    arch = Architecture(config.policy, learner_dtype(config.policy, gpu=False))
    sizes = storage.version_bytes(config, arch), storage.trained_bytes(config, arch)
    estimate = storage.disk_parts(config, *sizes, "rft")
    estimated = {"checkpoints": config.learner.keep + 2, "versions": (config.policy_store.keep or 0) + 1}
    for name, estimated_count in estimated.items():
        kept = [path for path in (folder / name).iterdir() if path.is_dir()]
        written = sum(file.stat().st_size for path in kept for file in path.rglob("*") if file.is_file())
        assert len(kept) >= 2
        # The estimate counts one more, which exists while it is written, and the best checkpoint, which may
        # be among the newest.
        assert written == pytest.approx(estimate[name] * len(kept) / estimated_count, rel=0.15)


@pytest.mark.long
def test_rollouts_after_sft_are_exactly_on_policy_and_every_metric_is_documented(
    ttrl_run: tuple[Path, str], documented_metrics: MetricTable
) -> None:
    rows = events.read(ttrl_run[0], "step/policy")
    assert any(row["learner/trained_sequences"] > 0 for row in rows), "no vote had a majority and a minority"
    for row in rows:
        # The generator samples from the learner's current weights, from the first step on.
        assert row.get("policy/drift_max", 0.0) < 1e-3
        assert row["rollout/staleness"] == 0
    patterns = [pattern for pattern, _ in documented_metrics.values()]
    logged = {key for row in rows for key in row if "/" in key}
    assert [key for key in logged if not any(pattern.fullmatch(key) for pattern in patterns)] == []


@pytest.mark.long
def test_evaluations_write_pages_with_pictures(ttrl_run: tuple[Path, str]) -> None:
    folder = ttrl_run[0] / "trajectories"
    evaluated, trained = (sorted(folder.glob(f"{kind}_*.html")) for kind in ("step", "trained"))
    steps = len(events.read(ttrl_run[0], "step/policy"))
    names = [f"{step:08d}.html" for step in range(2, steps + 1, 2)]
    assert [page.name for page in evaluated] == [f"step_{name}" for name in names]
    assert {page.name for page in trained} <= {f"trained_{name}" for name in names}
    for page in [*evaluated, *trained]:
        text = page.read_text(encoding="utf-8")
        assert text.count('<article class="episode"') == 3
        drifts = re.findall(r"drift (\S+) a token", text)
        assert len(drifts) == 3 * (page in trained)
        assert all(float(drift) < 1e-3 for drift in drifts), "the run is on-policy"
        assert "data:image/" in text
        assert "was not kept" not in text


def read_groups(file: Path) -> list[Group]:
    return [Group.model_validate_json(line) for line in file.read_text().splitlines()]


def run_job(job: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run a job's main in this process on the connected cluster; return its exit code."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["job", str(BARE), *arguments])
    try:
        job()
    except SystemExit as error:
        return int(error.code or 0)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return 0


@pytest.mark.long  # the rehearsal of a reproduction evaluates
def test_evaluate_writes_metrics_trajectories_and_pictures(
    sft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = ["policy.model=nano", f"policy.adapter={sft_folder / LAST}", f"run.dir={tmp_path}"]
    keys += ["run.name=held-out", "evaluate.questions=12", "evaluate.direct=true", "evaluate.clusters=3"]
    assert run_job(evaluate.main, monkeypatch, *keys, "telemetry.trajectories=4") == 0
    out = capfd.readouterr().out
    summary = json.loads((tmp_path / "evaluation.json").read_text())
    assert summary["n"] == 12
    assert summary["ci95"][0] <= summary["accuracy"] <= summary["ci95"][1]
    assert f"accuracy {summary['accuracy']:.3f}" in out
    assert (summary["direct"]["n"], summary["direct"]["rapr"]) == (12, 0.0)
    gain = summary["accuracy"] - summary["direct"]["accuracy"]
    assert summary["operations_gain"]["mean"] == pytest.approx(gain)
    assert "gain by operations" in out
    groups = read_groups(tmp_path / "trajectories-held-out.jsonl")
    episodes = {g.question.id: t for g in groups for t in g.trajectories}
    assert len(episodes) == 12
    assert np.mean([t.rewards["accuracy"] for t in episodes.values()]) == pytest.approx(summary["accuracy"])
    assert np.mean([t.operations_ok > 0 for t in episodes.values()]) == pytest.approx(summary["rapr"])
    wrong = {id for id, t in episodes.items() if t.rewards["accuracy"] == 0}
    assert sorted(id for cluster in summary["clusters"] for id in cluster["ids"]) == sorted(episodes)
    assert all(cluster["wrong"] == len(wrong & set(cluster["ids"])) for cluster in summary["clusters"])
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/") >= 4
    section = page[page.index("Where <bdi>held-out</bdi> is wrong") : page.index("<h2>Episodes")]
    examples = sum(len(cluster["examples"]) for cluster in summary["clusters"])
    assert section.count("data:image/jpeg") == examples > 0
    assert str(tmp_path / "report.html") in out


@pytest.mark.long  # above: one set at one budget
@pytest.mark.usefixtures("ray_cluster")
def test_evaluate_sweeps_pixel_budgets_over_sets_and_saves_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = ["policy.model=nano", f"run.dir={tmp_path}", "evaluate.questions=4", "telemetry.trajectories=1"]
    keys += ["evaluate.clusters=2", "evaluate.seeds=[1, 2]", "evaluate.sampling.temperature=1.0"]
    keys += ["evaluate.sets={a: 'cards:?split=test&seed=7', b: 'cards:?split=test&seed=8'}"]
    keys += ["evaluate.max_pixels=[1024, 4096]", "evaluate.images=true"]
    keys += ["evaluate.outputs=[pixel_reasoner, r1_v, mini_o3]"]
    assert run_job(evaluate.main, monkeypatch, *keys) == 0
    result = json.loads((tmp_path / "evaluation.json").read_text())
    names = ["a-1024px", "b-1024px", "a-4096px", "b-4096px"]
    assert [(s["name"], s["set"], s["max_pixels"]) for s in result["sets"]] == [
        (n, n[0], int(n[2:6])) for n in names
    ]
    assert result["mean_by_max_pixels"].keys() == {"1024", "4096"}
    out = capfd.readouterr().out
    assert "1024 pixels: accuracy" in out
    for summary in result["sets"]:
        assert summary["n"] == 8
        assert {seed: scores["n"] for seed, scores in summary["seeds"].items()} == {"1": 4, "2": 4}
        assert sum(cluster["questions"] for cluster in summary["clusters"]) == 4
    for name in names:
        groups = read_groups(tmp_path / f"trajectories-{name}.jsonl")
        images = [image for group in groups for t in group.trajectories for image in t.images]
        assert [len(group.trajectories) for group in groups] == [2] * 4
        assert len(images) >= 8
        for image in images:
            with Image.open(tmp_path / image.uri) as picture:
                assert picture.size == image.view_size
                assert picture.width * picture.height <= int(name[2:6])
        turns = json.loads((tmp_path / images[0].uri).with_name("conversation.json").read_text())
        assert next(turn["images"] for turn in turns if turn["images"]) == [Path(images[0].uri).name]
        assert (tmp_path / f"metrics_{name}.json").is_file()
        assert (tmp_path / f"r1_v_{name}.json").is_file()
        assert len(list((tmp_path / f"mini_o3-{name}").glob("*/traj.jsonl"))) == 8


def test_a_mistake_of_the_user_gives_one_message_with_its_fix(
    sft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "step_00000040"
    shutil.copytree(sft_folder / LAST, damaged)
    weights = damaged / "adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a", "question": "?"}\n{"id": "a", "question": "?"}\n')
    cases: list[tuple[Callable[[], None], str, int, str]] = [
        (rft.main, "rft.promts_per_step=8", 2, "did you mean `rft.prompts_per_step`"),
        (rft.main, "policy.adapter=runs/nowhere/step_00000001", 1, "runs/nowhere/step_00000001"),
        (evaluate.main, f"policy.adapter={damaged}", 1, "damaged"),
        (rft.main, "data.train=questions/none.jsonl", 1, "none.jsonl"),
        (evaluate.main, f"data.evaluate={bad}", 1, "row 2"),
        (evaluate.main, "data.evaluate=cards:?split=dev", 1, "dev"),
    ]
    for job, argument, code, words in cases:
        keys = ["policy.model=nano", f"run.dir={tmp_path}/run", argument]
        assert run_job(job, monkeypatch, *keys) == code, argument
        errors = capfd.readouterr().err
        assert words in errors
        assert "fix: " in errors
        assert len(re.findall(r"^pixelis \w+: ", errors, re.MULTILINE)) == 1
        assert "Traceback" not in errors
    assert not list((tmp_path / "run").rglob("step_*"))

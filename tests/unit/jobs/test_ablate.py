"""`pixelis ablate`: ablation files and their errors, the plan, resumption, the report."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from command_line import Command

from pixelis.config import Config, load
from pixelis.config.ablation import Trial, differences, read, trials
from pixelis.config.root import ablation_files
from pixelis.jobs import ablate, ablation_report, ablation_trial
from pixelis.records import Group, Question, StopReason, Trajectory
from pixelis.telemetry.events import EventLog

FILE: dict[str, Any] = {
    "recipe": "configs/nano/rft.yaml",
    "seeds": [1, 2],
    "overrides": ["evaluate.questions=40", "rft.steps=3"],
    "reference": "plain",
    "arms": {"plain": ["rewards.weights.curiosity=0"], "curious": []},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An ablation file whose results go to ``tmp_path``/out."""
    path = tmp_path / "ablation.yaml"
    path.write_text(yaml.safe_dump({**FILE, "dir": str(tmp_path / "out")}, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.long] if number % 4 else [], id=path.stem)
        for number, path in enumerate(ablation_files())
    ],
)
def test_every_packaged_ablation_can_be_planned(path: Path, tmp_path: Path, pixelis: Command) -> None:
    name = f"configs/ablations/{path.name}"
    code, text, err = pixelis("ablate", name, f"dir={tmp_path}", "seeds=[1, 2, 3]", "--dry-run")
    assert code == 0, err
    ablation = read(name)
    assert f"{3 * len(ablation.arms)} trials: {len(ablation.arms)} arms x seeds 1, 2, 3" in text
    for arm in ablation.arms:
        assert f"ok     {arm}: inputs and configuration" in text
    assert list(tmp_path.iterdir()) == []


def test_the_plan_names_differences_and_places(file: Path, pixelis: Command) -> None:
    code, text, _ = pixelis("ablate", str(file), "--dry-run", "learner.lr=3e-4", "seeds=[7]")
    assert code == 0
    assert text.startswith(
        "2 trials: 2 arms x seeds 7; stage rft of configs/nano/rft.yaml\n\nplain (reference)\n\ncurious\n"
    )
    assert "    rewards.weights.curiosity: 0.0 -> 1.0\n" in text
    assert f"results: {file.parent}/out;" in text
    assert "lr" not in text  # equal in all arms


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no configuration file"),
        (["seed=[1]"], "unknown configuration key `seed`"),
        (["seeds=[1, 1]"], "seeds [1, 1] name one twice"),
        (["reference=plane"], "reference plane is no arm; the arms are plain, curious"),
        (["arms={plain: []}"], "at least 2"),
        (["arms={plain: [], ../up: []}"], "pattern"),
        (["evaluate.direct=true"], "arm plain: evaluate.direct=true would mix"),
        (["run.seed=3"], "run.seed=3 belongs to the trials"),
        (
            ["learner.lrr=3"],
            "arm plain: unknown configuration key `learner.lrr` (did you mean `learner.lr`?)",
        ),
        (['arms={plain: [], far: ["data.evaluate=cards:?split=test"]}'], "arm far: data.evaluate="),
    ],
)
def test_mistakes_end_with_a_message_before_anything_starts(
    words: list[str], message: str, file: Path, pixelis: Command
) -> None:
    path = str(file) if words else str(file.with_name("pixeli.yaml"))
    code, _, err = pixelis("ablate", path, *words)
    assert code in (1, 2)
    assert message in err
    assert "fix: " in err
    assert not (file.parent / "out").exists()


def test_the_command_line_is_below_the_arms(file: Path) -> None:
    every = trials(read(file, ["rewards.weights.curiosity=0.5", "rft.steps=9", "seeds=[3, 4]"]))
    assert [(t.arm, t.seed) for t in every] == [("plain", 3), ("curious", 3), ("plain", 4), ("curious", 4)]
    assert [t.config.rewards.weights.curiosity for t in every[:2]] == [0.0, 0.5]
    assert {t.config.rft.steps for t in every} == {9}
    assert every[3].folder == file.parent / "out/curious/seed_4"
    assert every[3].config.run.seed == 4
    assert differences(every[0].config, every[2].config) == {}


class Jobs:
    """Stands in for the processes of trials: right with the probability of the arm."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []
        self.failing: set[tuple[str, int]] = set()

    def start(self, stage: str, trial: Trial, address: str) -> SimpleNamespace:
        folder, arm, seed = trial.folder, trial.arm, trial.seed
        self.started.append((arm, seed))
        run_dir = folder / "evaluate"
        run_dir.mkdir(parents=True, exist_ok=True)
        (folder / "trial.yaml").write_text(trial.config.to_yaml())
        (folder / "stage.json").write_text(json.dumps({"stage": stage}))
        if (arm, seed) in self.failing:
            (folder / "trial.log").write_text(
                f"starting\npixelis {stage}: the disk is full\nfix: free some\n"
            )
            return SimpleNamespace(poll=lambda: 1, returncode=1)
        share = {"plain": 4, "curious": 2}[arm]
        with (run_dir / "trajectories-held-out.jsonl").open("w") as out:
            for number in range(trial.config.evaluate.questions):
                question = Question(id=f"q{number}", question="?")
                episode = Trajectory(id="t", question_id=question.id, group_id="g", dialect="qwen")
                episode.stop_reason = StopReason.ANSWER
                if number:  # the first question is unscored
                    episode.rewards["accuracy"] = float((number + seed) % share == 0)
                out.write(Group(id="g", question=question, trajectories=[episode]).model_dump_json() + "\n")
        log = EventLog(folder)
        for step in range(1, 4):
            log.write("step/policy", step=step, **{"train/accuracy": step / (share + seed)})
        return SimpleNamespace(poll=lambda: 0, returncode=0)


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out/report.json").read_text())


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    jobs = Jobs()
    monkeypatch.setattr(ablate, "start", jobs.start)
    monkeypatch.setattr(ablate, "trial_cluster", lambda ablation, config: nullcontext("address"))
    return jobs


@pytest.mark.slow
def test_an_ablation_survives_a_failed_trial_and_resumes(
    file: Path, tmp_path: Path, jobs: Jobs, pixelis: Command
) -> None:
    words = [str(file), "stage=evaluate", "parallel=2"]
    jobs.failing = {("curious", 2)}
    code, text, err = pixelis("ablate", *words)
    assert code == 1
    assert "1 of 4 trials failed:\n  curious, seed 2: pixelis evaluate: the disk is full" in err
    assert "Left out: plain, seed 2; curious, seed 2." in text
    report = report_of(tmp_path)
    assert (report["seeds"], report["questions"]) == ([1], 39)
    assert report["comparisons"][0]["verdict"] == "higher in these runs"
    assert "the disk is full" in (tmp_path / "out/report.html").read_text()

    jobs.failing, jobs.started = set(), []
    assert pixelis("ablate", *words)[0] == 0
    assert jobs.started == [("curious", 2)]
    report = report_of(tmp_path)
    assert (report["seeds"], report["left_out"], report["failures"]) == ([1, 2], [], {})
    plain, curious = report["arms"]
    assert plain["mean"] == pytest.approx(10 / 39, abs=0.02)
    assert report["comparisons"][0]["difference"] == pytest.approx(curious["mean"] - plain["mean"])
    assert report["comparisons"][0]["verdict"] == "higher"

    jobs.started = []
    code, text, _ = pixelis("ablate", *words)
    assert (code, jobs.started) == (0, [])
    assert "4 of 4 trials are finished" in text
    assert text.count("  higher\n") == 1

    jobs.started = []
    more = [*words, "seeds=[1, 2, 3]"]
    assert pixelis("ablate", *more)[0] == 0
    assert sorted(jobs.started) == [("curious", 3), ("plain", 3)]

    code, _, err = pixelis("ablate", *more, "evaluate.questions=41")
    assert code == 2
    assert "has a trial of another configuration (evaluate.questions changed)" in err

    jobs.started = []
    code, _, err = pixelis("ablate", *more, "stage=rft")
    assert (code, jobs.started) == (2, [])
    assert "has a trial of another configuration (stage changed)" in err

    (tmp_path / "out/plain/seed_1/trial.yaml").write_text("rft: {questions: 3}")
    code, _, err = pixelis("ablate", *more)
    assert code == 2
    assert "trial.yaml was written by another version: unknown configuration key `rft.questions`" in err


def test_the_report_draws_the_mean_of_the_seeds_with_its_band(
    file: Path, tmp_path: Path, jobs: Jobs, pixelis: Command
) -> None:
    arms = "arms={plain: [], curious: [dialogue.max_turns_test=2]}"
    words = [str(file), "stage=evaluate", "curves=[train/accuracy, none/such]", arms]
    assert pixelis("ablate", *words)[0] == 0
    report = report_of(tmp_path)
    assert list(report["curves"]) == ["train/accuracy"]
    step, mean, low, high = report["curves"]["train/accuracy"]["plain"][2]
    assert (step, low, high) == (3, 3 / 6, 3 / 5)
    assert mean == pytest.approx((3 / 6 + 3 / 5) / 2)
    page = (tmp_path / "out/report.html").read_text()
    assert page.count("<polygon") == page.count("<polyline") == 2
    assert "dialogue.max_turns_test=2" in page
    assert "<script" not in page


@pytest.mark.parametrize(("stage", "expected"), [("rft", {2: 0.5}), ("ttrl", {2: 0.5}), ("sft", {3: 0.5})])
def test_curves_of_evaluations_have_the_step_that_was_evaluated(
    stage: str, expected: dict, file: Path, tmp_path: Path
) -> None:
    ablation = read(file, [f"stage={stage}", "curves=[evaluate/accuracy]"])
    with EventLog(tmp_path / "out" / "plain" / "seed_1") as log:
        log.write("evaluation", step=2, **{"evaluate/accuracy": 0.5})
        log.write("step/sft" if stage == "sft" else "step/policy", step=3, **{"evaluate/accuracy": 0.5})
    curve = ablation_report.curves(ablation, ["plain"], [1])["evaluate/accuracy"]["plain"]
    assert {step: mean for step, mean, *_ in curve} == expected


@pytest.mark.parametrize("stage", ["sft", "rft", "ttrl"])
def test_a_trial_is_not_trained_again_when_its_evaluation_failed(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[Config] = []
    monkeypatch.setattr(ablation_trial.evaluate, "run", evaluated.append)
    config = load("configs/nano/rft.yaml", [f"run.dir={tmp_path}"])
    (tmp_path / "trained.json").write_text('{"adapter": "checkpoints/step_00000003"}')
    ablation_trial.run(stage, config)
    (evaluation,) = evaluated
    assert evaluation.policy.adapter == "checkpoints/step_00000003"
    assert evaluation.run.dir == str(tmp_path / "evaluate")


def test_without_a_reference_there_is_no_report(file: Path, jobs: Jobs, pixelis: Command) -> None:
    jobs.failing = {("plain", 1), ("plain", 2)}
    code, text, err = pixelis("ablate", str(file), "stage=evaluate")
    assert code == 1
    assert "no trial of the reference plain is finished" in err
    assert "plain, seed 1  failed: pixelis evaluate: the disk is full" in text

"""Processes for formulas and users' functions: a hang, a crash or an invalid value costs one sample."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scored_episodes import episode, group

from pixelis.config import RewardsConfig
from pixelis.errors import BadConfig, InfraFailure
from pixelis.records import Question, StopReason, Trajectory, Turn
from pixelis.rewards import services as services_module
from pixelis.rewards.services import Services
from pixelis.rewards.terms import reward_metrics, score_group
from pixelis.rewards.worker_pool import WorkerPool

HERE = str(Path(__file__).parents[1])
TIMEOUT_S = 3.0
MOMENT_S = 10.0
"""Spare time on a busy machine."""
ENDLESS = "$9^{9^{9^{9}}}$"
# A formula that holds the interpreter until memory or time runs out.


@pytest.fixture(scope="module")
def services():
    services = Services(RewardsConfig(timeout_s=20.0))
    yield services
    services.close()


@pytest.fixture(scope="module")
def hasty():
    services = Services(RewardsConfig(timeout_s=TIMEOUT_S))
    yield services
    services.close()


@pytest.fixture
def own(monkeypatch):
    """Builds services for own rewards; these functions lie beside this file."""
    monkeypatch.syspath_prepend(HERE)
    opened = []

    def build(**settings) -> tuple[Services, RewardsConfig]:
        rewards = RewardsConfig(**settings)
        opened.append(Services(rewards))
        return opened[-1], rewards

    yield build
    for services in opened:
        services.close()


def score(services: Services, settings: RewardsConfig, *answers: str, **row) -> list[Trajectory]:
    return score_group(group(*map(episode, answers), **row), settings, services=services).trajectories


@pytest.mark.slow
def test_an_endless_formula_costs_its_sample_and_its_process_is_replaced(hasty):
    assert [hasty.math("0.5", ["1/2"]) for _ in range(2)] == [1.0, 1.0]  # both have started
    answers = ["0.5", ENDLESS, "0.5", r"$\frac{1}{2}$", "3"]
    started = time.monotonic()
    scored = score(hasty, RewardsConfig(), *answers, answers=["1/2"], scorer="math")
    assert time.monotonic() - started < TIMEOUT_S + 2 * MOMENT_S
    assert [(t.reward, t.unscored) for t in scored] == [(value, None) for value in (1.0, 0.0, 1.0, 1.0, 0.0)]
    assert hasty.counts["math_timeout"] + hasty.counts["math_out_of_memory"] == 1
    assert hasty.math("0.5", ["1/2"]) == 1.0
    assert hasty.math_workers._idle.qsize() == hasty.math_workers.size


@pytest.mark.slow
def test_a_truth_that_cannot_be_compared_leaves_every_answer_unscored(hasty):
    for truth, causes in ((ENDLESS, ("timeout", "out_of_memory")), (r"x+\frac{1}{", ("truth_unparsable",))):
        (lost,) = score(hasty, RewardsConfig(), "x + 1", answers=[truth], scorer="math")
        assert lost.reward is None
        assert lost.unscored in causes


@pytest.mark.slow
def test_a_right_answer_whose_process_is_killed_stays_right(monkeypatch):
    monkeypatch.setattr(services_module, "WORKERS", 1)
    services = Services(RewardsConfig(timeout_s=20.0))

    def kill() -> None:
        worker = services.math_workers._idle.get(timeout=60)
        worker.process.kill()
        worker.process.wait()
        services.math_workers._idle.put(worker)

    try:
        assert services.math("1+x", ["x+1"]) == 1.0
        kill()
        assert services.math("1+x", ["x+1"]) == 1.0
        kill()
        assert services.readable("1+x")
        assert (services.counts, services.math_workers.replaced) == ({}, 2)
    finally:
        services.close()


def test_workers_for_formulas_get_no_secrets(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    services = Services(RewardsConfig())
    worker = services.math_workers._idle.get(timeout=60)
    environment = Path(f"/proc/{worker.process.pid}/environ").read_bytes()
    services.math_workers._idle.put(worker)
    services.close()
    assert b"SOME_API_KEY" not in environment
    assert b"PYTHONPATH=" in environment


def test_many_threads_share_the_workers_and_closing_ends_them(services):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: services.math(f"{n}/2", [str(n / 2)]), range(40)))
    assert results == [1.0] * 40
    workers = WorkerPool(2, 1.0)
    pids = [workers._idle.queue[i].process.pid for i in range(2)]
    workers.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    with pytest.raises(InfraFailure):
        workers.call({"task": "math"})


def test_a_worker_does_not_outlive_a_killed_parent():
    code = (
        "import sys, os, time; from pixelis.rewards.worker_pool import WorkerPool; p = WorkerPool(1, 60.0);"
        "print(p._idle.queue[0].process.pid, flush=True);"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_own_rewards_see_the_trajectory_the_row_and_the_step(own):
    services, settings = own(own=["own_rewards:columns", "own_rewards:patient"])
    assert settings.own == {"own_rewards:columns": 1.0, "own_rewards:patient": 1.0}
    assert services.takes_group == {"own_rewards:columns": False, "own_rewards:patient": False}
    question = Question(id="q", question="?", answers=["77"], meta={"bonus": 10})
    pair = [episode("7"), episode("77")]
    assert services.own("own_rewards:columns", pair, question, 3) == [{"overall": 13.0}, {"overall": 23.0}]
    assert services.own("own_rewards:patient", pair, question, 3) == [{"overall": 0.0}, {"overall": 1.0}]


def test_own_rewards_are_terms_with_weights(own):
    services, settings = own(own={"own_rewards:ranked": 0.5}, weights={"accuracy": 2.0}, timeout_s=60.0)
    scored = score(services, settings, "7", "1")
    assert [t.rewards["own_rewards:ranked"] for t in scored] == [0.5, 0.0]
    assert [t.weighted["own_rewards:ranked"] for t in scored] == [0.25, 0.0]
    assert [t.reward for t in scored] == [2.25, 0.0]


@pytest.mark.slow
def test_each_failure_of_an_own_reward_is_a_cause(own):
    services, settings = own(own={"own_rewards:by_answer": 1.0}, timeout_s=6.0)
    causes = {
        "fine": None, "hang": "timeout", "crash": "crashed", "exit": "raised", "raise": "raised",
        "nan": "not_finite", "inf": "not_finite", "length": "wrong_type", "text": "wrong_type", "none": "wrong_type",
    }  # fmt: skip
    scored = score(services, settings, *causes, answers=["fine"])
    expected = [cause and f"own_reward:{cause}" for cause in causes.values()]
    assert [t.unscored for t in scored] == expected
    assert [t.reward for t in scored] == [2.0] + [None] * 9
    assert services.counts == Counter(expected[1:])
    assert services.own_workers._idle.qsize() == 2


def test_an_own_reward_of_a_group_must_give_one_value_each(own):
    services, settings = own(own=["own_rewards:too_few"])
    assert {t.unscored for t in score(services, settings, "7", "1")} == {"own_reward:wrong_length"}
    services, settings = own(own=["own_rewards:mostly"])
    assert [t.unscored for t in score(services, settings, "7", "bad")] == [None, "own_reward:not_finite"]


@pytest.mark.parametrize(
    "name", ["own_rewards:absent", "no_such_module:f", "own_rewards:two_arguments", "os:sep"]
)
def test_an_own_reward_that_cannot_be_called_stops_the_run_at_its_start(own, name):
    services, _ = own(own=[name])
    with pytest.raises(BadConfig, match=name):
        services.check()


EASYR1 = """
import numpy as np

def compute_score(reward_inputs, format_weight=0.1):
    scores = []
    for reward_input in reward_inputs:
        accuracy = np.float64(reward_input["ground_truth"] in reward_input["response"])
        scores.append({"overall": 0.9 * accuracy + format_weight, "format": 1, "accuracy": accuracy})
    return scores

def single(reward_input):
    return {"overall": float(reward_input["response_length"]), "length": reward_input["response_length"]}

def number(trajectory, question, step):
    return 0.25

def without(reward_input):
    return {"accuracy": 1.0}

def needs_more(reward_input, other):
    return 1.0

def equal(answer, truth):
    return answer.replace(" ", "") == truth.replace(" ", "")

def last_word(text):
    return text.split()[-1].strip(".") if text else None
"""


@pytest.mark.slow
def test_reward_functions_of_easyr1_in_a_file_return_numbers_or_dicts_one_by_one_or_in_batches(own, tmp_path):
    path = tmp_path / "math_reward.py"
    path.write_text(EASYR1)
    names = [f"{path}:{name}" for name in ("compute_score", "single", "number")]
    services, settings = own(weights={"accuracy": 0.0}, own=dict(zip(names, [1.0, 0.0, 2.0], strict=True)))
    services.check()
    assert list(services.takes_group.values()) == [True, False, False]
    first, second = score(services, settings, "7", "8")
    assert (first.reward, second.reward) == (pytest.approx(1.5), pytest.approx(0.6))
    assert first.rewards[f"{names[0]}.accuracy"] == 1.0
    assert (second.rewards[f"{names[0]}.accuracy"], second.rewards[f"{names[0]}.format"]) == (0.0, 1.0)
    assert reward_metrics([group(first, second)])[f"reward/{names[0]}.accuracy"] == 0.5
    (lost,) = score(*own(weights={"accuracy": 0.0}, own=[f"{path}:without"]), "7")
    assert (lost.reward, lost.unscored) == (None, "own_reward:no_overall")
    for name, message in (
        (f"{path}:needs_more", "requires other"),
        (f"{tmp_path}/none.py:missing", "missing"),
    ):
        with pytest.raises(BadConfig, match=message):
            own(own=[name])[0].check()


OTHERS = """
def trl(completions, solution, **kwargs):
    assert kwargs["prompts"][0][0]["role"] == "user" and len(kwargs["completion_ids"]) == len(completions)
    return [float(s in c[0]["content"]) for c, s in zip(completions, solution)]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "asked": float(bool(extra_info["question"]))}
"""


@pytest.mark.slow
def test_reward_functions_of_trl_and_verl_work_unchanged(own, tmp_path):
    path = tmp_path / "other_rewards.py"
    path.write_text(OTHERS)
    services, settings = own(weights={"accuracy": 0.0}, own=[f"{path}:trl", f"{path}:verl"])
    services.check()
    assert list(services.takes_group.values()) == [True, False]
    first, second = score(services, settings, "7", "8")
    assert (first.reward, second.reward) == (2.0, 0.0)
    assert first.rewards[f"{path}:verl.asked"] == 1.0


def said(text: str) -> Trajectory:
    turns = [Turn(role="assistant", text=text)]
    return Trajectory(question_id="q", group_id="g", turns=turns, stop_reason=StopReason.NO_ACTION)


def test_the_equality_and_the_extractor_may_be_functions_of_the_user(own, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(EASYR1)
    services, settings = own(preset="ttrl", scorer=f"{path}:equal", extractor=f"{path}:last_word")
    services.check()
    episodes = [said(text) for text in ("so it is x+1.", "maybe x+1", "it is y")]
    scored = score_group(group(*episodes, answers=["x +1"]), settings, services=services).trajectories
    assert [t.rewards["majority_vote"] for t in scored] == [1.0, 1.0, 0.0]
    assert [t.rewards["accuracy"] for t in scored] == [1.0, 1.0, 0.0]
    with pytest.raises(BadConfig, match="extractor"):
        own(extractor=f"{path}:none")[0].check()
    with pytest.raises(ValueError, match="extractor"):
        RewardsConfig(extractor="loose")

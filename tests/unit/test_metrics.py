"""Summaries of episodes, Ray metrics, and trackers whose failure does not end the run."""

from __future__ import annotations

import logging
import sys
import types

import pytest

from pixelis.config import parse
from pixelis.errors import MissingDependency
from pixelis.evaluation.batches import batch_metrics, learnt_votes
from pixelis.evaluation.metrics import correctness, exploration_efficiency, has_loop, operation_counts, summarise
from pixelis.jobs.driver import run_folder
from pixelis.records import Action, Group, Observation, Question, StopReason, Trajectory, Turn
from pixelis.telemetry import metrics, trackers

CALL = Action(op="zoom_in", arguments={"box": [0, 0, 0.5, 0.5]})


def policy_turn(action=None, error=None):
    return Turn(role="assistant", tokens=[1], log_probs=[-0.1], action=action, error=error)


def reply(status):
    return Turn(role="tool", tokens=[2], observation=Observation(status=status, code=None if status == "ok" else "bad_box"))


def episode(question="q", *, accuracy=None, turns=(), stop=StopReason.ANSWER, answer=None, **fields):
    rewards = {} if accuracy is None else {"accuracy": accuracy}
    return Trajectory(question_id=question, turns=list(turns), rewards=rewards, stop_reason=stop, answer=answer, **fields)


def test_a_summary_by_hand():
    zoomed = [policy_turn(CALL), reply("ok"), policy_turn()]
    failed = [policy_turn(CALL), reply("error"), policy_turn(error="bad_json"), reply("error"), policy_turn()]
    cut = [policy_turn(CALL)]
    items = [
        episode("q1", accuracy=1.0, turns=zoomed),
        episode("q2", accuracy=0.0, turns=failed),
        episode("q3", accuracy=1.0, turns=[policy_turn()]),
        episode("q4", accuracy=0.0, turns=cut, stop=StopReason.OVER_TURN),
    ]
    summary = summarise(items)
    assert summary["accuracy"] == 0.5
    assert summary["ci95"] == pytest.approx([0.150, 0.850], abs=1e-3)
    assert (summary["n"], summary["questions"], summary["unscored"]) == (4, 4, {})
    assert summary["rapr"] == 0.25
    assert (summary["operations"], summary["tool_error_rate"]) == (4, 0.5)
    assert summary["turns"] == pytest.approx((2 + 3 + 1 + 1) / 4)
    assert summary["stop_reasons"] == {"answer": 3, "over_turn": 1}


def test_operations_are_counted_once_each():
    assert operation_counts(
        episode(turns=[policy_turn(CALL), reply("ok"), policy_turn(CALL), reply("error"), policy_turn()])
    ) == (2, 1)
    assert operation_counts(episode(turns=[policy_turn(error="bad_json"), reply("error")])) == (1, 1)
    assert operation_counts(episode(turns=[policy_turn(CALL)], stop=StopReason.OVER_TURN)) == (1, 0)
    assert operation_counts(episode(turns=[policy_turn()])) == (0, 0)
    assert operation_counts(episode(turns=[policy_turn(error="bad_token")], stop=StopReason.ERROR)) == (0, 0)


@pytest.mark.parametrize(
    ("calls", "loops", "exploration"),
    [
        ("", False, 1.0),
        ("AAAA", True, 0.25),
        ("AA", False, 0.5),
        ("ABAB", True, 0.5),
        ("ABCAB", False, 0.6),
        ("XABCABCY", True, 5 / 8),
        ("ABCDEFGHIJKLMNOP", False, 0.9),
        ("ABCDEFGHIJKLMNOPQRSTU", False, 0.8),
    ],
)
def test_loops_and_exploration(calls, loops, exploration):
    assert has_loop(calls) is loops
    assert exploration_efficiency(calls) == pytest.approx(exploration)


def test_unscored_episodes_are_never_wrong_ones():
    summary = summarise([episode("a", accuracy=1.0), episode("b", unscored="judge_timeout"), episode("c")])
    assert (summary["accuracy"], summary["n"]) == (1.0, 1)
    assert summary["unscored"] == {"judge_timeout": 1, "not_scored": 1}


def test_nothing_scored_has_no_accuracy():
    summary = summarise([episode()])
    assert summary["accuracy"] is None
    assert summary["ci95"] == [0.0, 1.0]
    assert summarise([])["n"] == 0


def test_groups_are_clusters_not_independent_episodes():
    groups = []
    for i in range(20):
        question = Question(id=f"q{i}", question="?")
        group = Group(id=f"g{i}", question=question)
        group.trajectories = [episode(question.id, accuracy=float(i % 2), group_id=group.id) for _ in range(8)]
        groups.append(group)
    clustered = summarise(groups)
    low, high = clustered["ci95"]
    assert (clustered["n"], clustered["questions"], clustered["accuracy"]) == (160, 20, 0.5)
    assert high - low > 0.35  # 20 questions know far less than 160 episodes (whose Wilson interval is 0.15 wide)


def test_fractional_scores_get_a_bootstrap():
    summary = summarise([episode(f"q{i}", accuracy=0.2 + 0.1 * (i % 3)) for i in range(30)])
    low, high = summary["ci95"]
    assert low < summary["accuracy"] < high
    assert high - low < 0.1


def test_correctness_is_the_mean_of_a_question():
    assert correctness([episode("a", accuracy=1.0), episode("a", accuracy=0.0), episode("b", accuracy=1.0), episode("c")]) == {
        "a": 0.5,
        "b": 1.0,
    }


@pytest.mark.parametrize(("right", "wrong", "right_shown"), [(9, 9, 2), (0, 9, 0), (9, 0, 4), (1, 2, 1), (0, 0, 0)])
def test_pages_show_as_many_right_as_wrong_episodes(right, wrong, right_shown):
    from pixelis.actors.report import choose

    groups = []
    for accuracy in [1.0] * right + [0.0] * wrong:
        groups.append(
            Group(id="g", question=Question(id="q", question="?"), trajectories=[episode(accuracy=accuracy, group_id="g")])
        )
    chosen = choose("step 1", groups, [None] * len(groups), 4)
    assert len(chosen) == min(4, right + wrong)
    assert sum(group.trajectories[0].rewards["accuracy"] for _, group, _ in chosen) == right_shown


def test_metric_names_are_valid_in_prometheus():
    assert metrics.metric_name("reward/accuracy") == "pixelis_reward_accuracy"
    assert metrics.metric_name("rollout/tokens_per_s") == "pixelis_rollout_tokens_per_s"
    assert metrics.metric_name("Tool: zoom-in/µs!") == "pixelis_tool_zoom_in_s"


def test_only_finite_numbers_are_published(monkeypatch):
    published = {}

    class Gauge:
        def __init__(self, name, description, tag_keys):
            self.name, self.tag_keys = name, tag_keys

        def set(self, value, tags):
            published[self.name] = (value, tags, self.tag_keys)

    fake = types.SimpleNamespace(Gauge=Gauge)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(util=types.SimpleNamespace(metrics=fake)))
    monkeypatch.setitem(sys.modules, "ray.util", types.SimpleNamespace(metrics=fake))
    monkeypatch.setattr(metrics, "_gauges", {})
    values = {"reward/accuracy": 0.5, "policy/loss": float("nan"), "note": "text", "flag": True, "rollout/n": 3}
    metrics.publish(values, tags={"stage": "rft"})
    assert published == {
        "pixelis_reward_accuracy": (0.5, {"stage": "rft"}, ("stage",)),
        "pixelis_rollout_n": (3.0, {"stage": "rft"}, ("stage",)),
    }


def test_metrics_are_published_to_ray():
    pytest.importorskip("ray")
    metrics.publish({"test/value": 1.5})
    metrics.count("test/things", 2)
    metrics.count("test/things", 0)


def test_a_failing_tracker_gives_one_warning_and_the_run_continues(tmp_path, caplog, monkeypatch):
    class Broken:
        def __init__(self, config, resumed):
            pass

        def log(self, step, values):
            raise ConnectionError("the tracker is down")

        def close(self):
            raise AssertionError("a dropped sink is not closed")

    monkeypatch.setattr(metrics, "TensorBoard", Broken)
    config = parse({"run": {"dir": str(tmp_path)}, "telemetry": {"tensorboard": True}})
    with caplog.at_level(logging.WARNING), metrics.Tracker(config) as tracker:
        assert tracker.sinks == ["tensorboard"]
        for step in range(3):
            tracker.log(step, {"reward/accuracy": 0.5})
        assert tracker.sinks == []
    assert [r.message for r in caplog.records] == [
        "tracker tensorboard failed and is off for the rest of this run: ConnectionError: the tracker is down"
    ]


def test_a_run_that_starts_again_hides_in_tensorboard_what_it_logged_before(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    for resumed in (0, 5):  # killed before its first checkpoint, and after the one of step 5
        config = parse({"run": {"dir": str(tmp_path / str(resumed))}, "telemetry": {"tensorboard": True}})
        with metrics.Tracker(config, resumed) as tracker:
            tracker.log(resumed + 1, {"reward/accuracy": 0.5})
    hidden = []
    for file in tmp_path.glob("*/tensorboard/*"):
        content = file.read_bytes()
        while content:  # length, its checksum, the event, its checksum
            size = int.from_bytes(content[:8], "little")
            event = event_pb2.Event.FromString(content[12 : 12 + size])
            hidden += [event.step] if event.WhichOneof("what") == "session_log" else []
            content = content[16 + size :]
    assert sorted(hidden) == [1, 6]


def test_a_tracker_opens_only_the_sinks_that_are_asked_for(tmp_path):
    config = parse({"run": {"dir": str(tmp_path)}, "telemetry": {"tensorboard": True}})
    with metrics.Tracker(config, only=("wandb",)) as tracker:
        assert tracker.sinks == []
    assert not (tmp_path / "tensorboard").exists()


def test_a_missing_tracker_names_the_fix(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    config = parse({"run": {"dir": str(tmp_path)}, "telemetry": {"tensorboard": True}})
    with caplog.at_level(logging.WARNING), metrics.Tracker(config) as tracker:
        assert tracker.sinks == []
    assert "pip install tensorboardX" in caplog.text


@pytest.mark.parametrize(("name", "package"), metrics.PACKAGES.items())
def test_a_job_does_not_start_without_a_configured_tracker(tmp_path, monkeypatch, name, package):
    config = parse({"run": {"dir": str(tmp_path / "run")}, "telemetry": {name: True}})
    if package in ("wandb", "tensorboardX"):  # installed
        metrics.require_trackers(config)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=package) as caught, run_folder(config):
        pass
    assert f"telemetry.{name}=false" in str(caught.value)
    assert not (tmp_path / "run").exists()
    metrics.require_trackers(parse({}))


@pytest.mark.slow
class Recorder:
    """Stands in for the package of a tracker: records the calls on it."""

    def __init__(self):
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name):
        def record(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self

        return record


@pytest.mark.parametrize("name", trackers.OPENERS)
def test_a_tracker_gets_each_step_and_is_closed(tmp_path, monkeypatch, caplog, name):
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setitem(sys.modules, metrics.PACKAGES[name], package := Recorder())
    with metrics.Tracker(parse({"run": {"dir": str(tmp_path)}, "telemetry": {name: True}})) as tracker:
        tracker.log(7, {"reward/accuracy": 0.5, "note": "text", "policy/loss": float("nan")})
        assert tracker.sinks == [name]
    logged = [(a, o) for call, a, o in package.calls if call in ("log", "log_metrics")]
    assert logged == [(({"reward/accuracy": 0.5},), {"step": 7})]
    assert package.calls[-1][0] in ("end_run", "finish", "end")
    monkeypatch.setitem(sys.modules, metrics.PACKAGES[name], None)
    with metrics.Tracker(parse({"run": {"dir": str(tmp_path)}, "telemetry": {name: True}})) as tracker:
        assert tracker.sinks == []
    assert f"pip install {metrics.PACKAGES[name]}" in caplog.text


def test_wandb_itself_writes_offline_without_a_key(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    with metrics.Tracker(parse({"run": {"dir": str(tmp_path)}, "telemetry": {"wandb": True}})) as tracker:
        tracker.log(1, {"reward/accuracy": 0.5})
        assert tracker.sinks == ["wandb"]
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


def test_wandb_without_a_network_writes_offline(tmp_path, caplog, monkeypatch):
    calls = []

    class Error(Exception):
        pass

    class Run:
        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finished")

    def init(mode, **arguments):
        calls.append(mode)
        if mode == "online":
            raise Error("no such host\nand more")
        return Run()

    fake = types.SimpleNamespace(init=init, Error=Error, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    config = parse({"run": {"dir": str(tmp_path)}, "telemetry": {"wandb": True}})
    with caplog.at_level(logging.WARNING), metrics.Tracker(config) as tracker:
        tracker.log(3, {"reward/accuracy": 0.5})
    assert calls == ["online", "offline", (3, {"reward/accuracy": 0.5}), "finished"]
    assert [r.message for r in caplog.records] == ["cannot reach Weights & Biases, writing offline instead: no such host"]
    monkeypatch.delenv("WANDB_API_KEY")
    calls.clear()
    metrics.Tracker(config).close()
    assert calls == ["offline", "finished"]


def test_tensorboard_files_are_written(tmp_path):
    pytest.importorskip("tensorboardX")
    config = parse({"run": {"dir": str(tmp_path)}, "telemetry": {"tensorboard": True}})
    with metrics.Tracker(config) as tracker:
        tracker.log(1, {"reward/accuracy": 0.5, "note": "text", "policy/loss": float("nan")})
    files = list((tmp_path / "tensorboard").glob("events.*"))
    assert len(files) == 1
    written = files[0].read_bytes()
    assert b"reward/accuracy" in written
    assert b"policy/loss" not in written


def test_no_tracker_is_the_default(tmp_path):
    with metrics.Tracker(parse({"run": {"dir": str(tmp_path / "run")}})) as tracker:
        tracker.log(1, {"reward/accuracy": 0.5})
    assert not (tmp_path / "run").exists()


def voted(name: str, *rewards: tuple[float, float | None]) -> Group:
    """A group of (vote, accuracy) by rollout."""
    question = Question(id=f"q-{name}", question="?")
    group = Group(id=name, question=question)
    for vote, accuracy in rewards:
        raw = {"majority_vote": vote, **({"accuracy": accuracy} if accuracy is not None else {})}
        group.trajectories.append(Trajectory(question_id=question.id, group_id=name, rewards=raw, reward=vote))
    return group


def test_votes_are_measured_as_labels_and_without_truths_by_agreement_alone():
    right = voted("a", (1, 1), (1, 1), (1, 1), (0, 0))
    wrong = voted("b", (1, 0), (1, 0), (0, 1), (0, 0))
    result = batch_metrics([right, wrong])
    assert result["vote/majority_ratio"] == result["vote/majority_voting_reward"] == (0.75 + 0.5) / 2
    assert result["vote/label_accuracy"] == 0.5
    assert result["vote/reward_accuracy"] == (4 + 1) / 8
    assert (result["vote/pass_at_n"], result["vote/none"]) == (1, 0)
    assert result["vote/truth_share"] == 4 / 8
    few = [group.model_copy(update={"trajectories": group.trajectories[-2:]}) for group in (right, wrong)]
    assert learnt_votes(few) == {
        "vote/learnt_reward_accuracy": 3 / 4,
        "vote/learnt_truth_share": 2 / 4,
        "vote/learnt_pass_at_n": 1,
    }
    silent = voted("c", (1, None), (0, None))
    none = voted("d", (1, None), (0, None))
    for trajectory in none.trajectories:
        trajectory.rewards, trajectory.reward, trajectory.unscored = {}, None, "tie"
    result = batch_metrics([silent, none])
    assert result["vote/none"] == 0.5
    assert result["vote/majority_ratio"] == 0.5
    partial = batch_metrics([voted("e", (1, None), (0.5, None), (0, None), (1, None))])
    assert (partial["vote/majority_ratio"], partial["vote/majority_voting_reward"]) == (0.5, 0.625)
    assert "vote/label_accuracy" not in result
    assert learnt_votes([silent, none]) == {}

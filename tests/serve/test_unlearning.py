"""Deleted experiences leave the weights: the updates since are repeated without them, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from placed_actors import restart, wait_until
from test_evolution import Placed
from tiny_trainer import trainer

from pixelis.actors.batch_sources import samples_of
from pixelis.actors.group_views import GroupViews
from pixelis.actors.update_source import UpdateSource
from pixelis.actors.weights import CandidatePublisher
from pixelis.config import Config, LossConfig, load
from pixelis.evolution import audit
from pixelis.evolution.updates import as_group
from pixelis.policy.advantages import assign_advantages
from pixelis.policy.samples import LearnerBatch
from pixelis.policy.train_step import Trainer
from pixelis.records import StopReason, Trajectory, Turn, UpdateTask, VersionStatus

pytestmark = pytest.mark.slow

EMA = 0.5
OVERRIDES = [
    "evolution.batch=2",
    "evolution.unlearn_s=0",
    "evolution.guard.target=1000",
    "memory.enabled=true",
]
SETTINGS = {"total_steps": 100, "loss": LossConfig(kl=0.01), "ema": EMA}
RESET = "reset"
History = list[tuple[list[UpdateTask], dict[str, float]] | str]
"""Updates, each by its tasks and options, and resets to the published weights with a fresh optimizer."""


def lesson(name: str) -> UpdateTask:
    """A task of two samples with opposite rewards; ``name`` is the user's, a dash and a number."""
    draw = random.Random(name)
    trajectories = []
    for index in range(2):
        tokens = [draw.randrange(1, 60) for _ in range(6)]
        turns = [Turn(role="user", tokens=tokens[:3])]
        turns.append(Turn(role="assistant", tokens=tokens[3:], log_probs=[-4.0] * 3))
        named: dict[str, Any] = {"id": f"{name}-{index}", "question_id": name, "group_id": f"group-{name}"}
        trajectories.append(
            Trajectory(turns=turns, answer="7", stop_reason=StopReason.ANSWER, reward=float(index), **named)
        )
    scored: dict[str, Any] = {"pseudo_label": "7", "confidence": 0.75, "created_at": 0.0}
    user = name.partition("-")[0]
    return UpdateTask(question_id=name, trajectories=trajectories, experience_id=name, user=user, **scored)


def no_views(task: UpdateTask) -> GroupViews:
    return GroupViews(ray.put({t.id: [] for t in task.trajectories}))


def names(history: History) -> set[str]:
    return {task.experience_id for part in history if not isinstance(part, str) for task in part[0]}


class Learner:
    """The training loop in this process, and the history of the weights that it made."""

    def __init__(self, placed: Placed, config: Config, trainer: Trainer):
        self.placed, self.trainer, self.folder = placed, trainer, Path(config.run.dir)
        self.initial = trainer.adapter()
        self.source = UpdateSource(config, placed.actor, CandidatePublisher(placed.store, 1))
        self.source.open(trainer, {}).__enter__()
        self.history: History = []
        self.published: dict[int, History] = {self.source.version: []}
        self.updates = 0

    def start_again(self) -> None:
        self.trainer.reset_to(self.initial)
        self.trainer.batches = 0
        self.source.begin({})

    def submit(self, *names: str) -> None:
        for name in names:
            assert ray.get(self.placed.actor.submit.remote(lesson(name), no_views(lesson(name))))

    def step(self) -> None:
        batch = self.source.next()
        assert batch is not None
        metrics = self.trainer.step(batch)
        result = self.source.done(batch, self.source.weights.publish(self.trainer, metrics), metrics)
        if result.boundary:
            self.trainer.save(self.folder / "phases" / result.boundary, {}, name=self.trainer.batches)
        self.options = dict(batch.options)

    def learn(self, *names: str) -> None:
        """One update of these tasks, which is published and served."""
        self.submit(*names)
        self.step()
        self.history = [*self.history, ([lesson(name) for name in names], self.options)]
        self.published[self.placed.call("status")["served"]] = self.history

    def return_to(self, version: int) -> None:
        self.placed.call("roll_back", version, "operator")
        self.history = [*self.published[version], RESET]

    def unlearn(self, *users: str) -> None:
        """Delete what was learnt from ``users``, and repeat updates until none is left."""
        tasks = [task for part in self.history if part != RESET for task in part[0]]
        gone = [task.experience_id for task in tasks if task.user in users]
        assert self.placed.call("forget", gone) >= len(gone)
        before = len(self.events())
        while gone and len(self.events()) == before:
            self.step()
        kept = list[Any]()
        for part in self.history:
            left = part if part == RESET else ([t for t in part[0] if t.user not in users], part[1])
            kept.append(left)
        self.history = kept
        self.published[self.placed.call("status")["served"]] = kept

    def events(self) -> list[dict[str, Any]]:
        recent = self.placed.call("recent_audit", 100)
        return [event for event in reversed(recent) if event["event"] == "unlearning"]

    def served(self) -> str:
        version = self.placed.call("status")["served"]
        (ref,) = ray.get(self.placed.store.get.remote(version))
        return ray.get(ref).sha256()


def offline(history: History) -> str:
    """Hash of the published weights after an offline run over the tasks of a history."""
    with trainer(**SETTINGS) as policy:
        for number, part in enumerate(history):
            if isinstance(part, str):
                policy.reset_to(policy.served())
            elif part[0]:
                groups = [as_group(task) for task in part[0]]
                assign_advantages(groups, load().rft.advantage)
                views = [{t.id: [] for t in group.trajectories} for group in groups]
                policy.step(LearnerBatch(number, samples_of(groups, views), "policy", {}, {}, part[1]))
        return policy.served().sha256()


@pytest.fixture
def learner(ray_cluster: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Learner]:
    overrides = [*OVERRIDES, *getattr(request, "param", [])]
    placed = Placed(tmp_path, *overrides, "evolution.max_share_per_user=1")
    config = load(None, [f"run.dir={tmp_path}", *overrides])
    with trainer(**SETTINGS) as policy:
        yield Learner(placed, config, policy)
    placed.end()


def test_weights_equal_those_of_a_run_without_the_deleted_tasks(learner: Learner) -> None:
    for pair in (
        ("ada-1", "bob-1"),
        ("cyd-1", "bob-2"),
        ("ada-2", "cyd-2"),
        ("bob-3", "eve-1"),
        ("ada-3", "eve-2"),
    ):
        learner.learn(*pair)
    before = learner.served()
    assert before == offline(learner.history), "the offline run is the run"
    learner.unlearn("bob")
    after = learner.served()
    assert after == offline(learner.history) != before
    (event,) = learner.events()
    assert event["result"] == "success"
    assert (event["details"]["replaced"], event["details"]["repeated"]) == (5, 5)
    learner.learn("ada-4", "cyd-3")
    assert learner.served() == offline(learner.history), "and so does what is learnt later"
    versions = ray.get(learner.placed.store.list.remote())
    unlearnt = {v.version for v in versions if v.status is VersionStatus.UNLEARNT}
    assert len(unlearnt) == 5
    assert not [path for n in unlearnt for path in learner.folder.glob(f"versions/v{n:06d}")]
    assert audit.verify(learner.folder / audit.FOLDER).ok


def test_updates_of_one_user_alone_leave_no_trace(learner: Learner) -> None:
    learner.learn("ada-1", "cyd-1")
    first = learner.served()
    learner.learn("bob-1", "bob-2")
    learner.unlearn("bob")
    assert learner.served() == first == offline(learner.history)
    learner.unlearn("ada", "cyd")
    assert learner.served() == offline([])
    learner.learn("ada-2", "cyd-2")
    assert learner.served() == offline(learner.history)


@pytest.mark.parametrize(
    "learner",
    [[], pytest.param(["memory.retention_days=1e-6"], marks=pytest.mark.long)],
    indirect=True,
    ids=["start", "checkpoint"],
)
def test_rollbacks_between_are_repeated_too(learner: Learner) -> None:
    """With a retention of no time there is a checkpoint after every update."""
    draw, users = random.Random(3), ["ada", "bob", "cyd", "eve"]
    for number in range(8):
        learner.learn(*(f"{user}-{number}" for user in draw.sample(users, 2)))
        if number in (3, 6):
            learner.return_to(draw.choice(sorted(learner.published)[1:-1]))
    for user in users:
        learner.unlearn(user)
        assert learner.served() == offline(learner.history), user
        learner.learn(f"fay-{user}", f"gus-{user}")
        assert learner.served() == offline(learner.history), user
    if learner.events()[-1]["details"]["from"]["update"]:
        assert list((learner.folder / "phases").iterdir())
    versions = ray.get(learner.placed.store.list.remote())
    kept = {v.version for v in versions if (learner.folder / f"versions/v{v.version:06d}").is_dir()}
    clean = {
        version for version, history in learner.published.items() if names(history) <= names(learner.history)
    }
    assert kept <= clean | {0, learner.placed.call("status")["served"]}


@pytest.mark.parametrize("steps", [0, *(pytest.param(steps, marks=pytest.mark.long) for steps in (1, 2, 3))])
@pytest.mark.parametrize("dies", ["evolution", "learner"])
def test_a_repetition_that_was_cut_off_begins_anew(learner: Learner, steps: int, dies: str) -> None:
    for number in range(4):
        learner.learn(f"ada-{number}", f"bob-{number}")
    served = learner.served()
    assert learner.placed.call("forget", ["bob-1"]) == 1
    for _ in range(steps):
        learner.step()
    assert learner.served() == served, "it is served once it is complete"
    if dies == "evolution":
        restart(learner.placed.actor)
    else:  # before its first checkpoint
        learner.start_again()
    wait_until(lambda: learner.placed.call("status")["unlearning"]["due_s"] == 0)
    while not learner.events():
        learner.step()
    learner.history = [([t for t in tasks if t.experience_id != "bob-1"], o) for tasks, o in learner.history]
    assert learner.served() == offline(learner.history)
    learner.learn("cyd-1", "eve-1")
    assert learner.served() == offline(learner.history)


def test_what_is_deleted_while_the_learner_has_it_is_unlearnt_too(learner: Learner) -> None:
    learner.submit("ada-1", "bob-1")
    batch = learner.source.next()
    assert batch is not None
    assert learner.placed.call("forget", ["bob-1"]) == 0
    metrics = learner.trainer.step(batch)
    learner.source.done(batch, learner.source.weights.publish(learner.trainer, metrics), metrics)
    learner.step()
    assert [event["result"] for event in learner.events()] == ["success"]
    assert learner.served() == offline([([lesson("ada-1")], dict(batch.options))])


def test_no_other_update_is_made_until_a_repetition_has_ended(learner: Learner) -> None:
    learner.learn("ada-1", "bob-1")
    learner.learn("ada-2", "cyd-1")
    assert learner.placed.call("forget", ["bob-1"]) == 1
    learner.submit("eve-1", "eve-2")
    learner.step()
    assert not learner.events()
    learner.step()
    assert learner.events()
    assert learner.placed.call("stats")["queue"] == 2


@pytest.mark.parametrize("learner", [["evolution.unlearn_s=3600"]], indirect=True)
def test_deletions_wait_for_others_and_what_was_recorded_is_gone_at_once(learner: Learner) -> None:
    learner.learn("ada-1", "bob-1")
    assert learner.placed.call("forget", ["bob-1"]) == 1
    assert learner.placed.call("forget", ["bob-1"]) == 0
    assert 3500 < learner.placed.call("status")["unlearning"]["due_s"] <= 3600
    files = b"".join(path.read_bytes() for path in learner.folder.glob("updates.db*"))
    assert b"ada-1" in files
    assert b"bob-1" not in files


def test_a_task_that_spells_personal_data_is_not_recorded(learner: Learner) -> None:
    task = lesson("ada-1")
    turns = [
        task.trajectories[0].turns[0],
        task.trajectories[0].turns[1].model_copy(update={"text": "ada@x.org"}),
    ]
    spelled = [t.model_copy(update={"turns": turns}) for t in task.trajectories]
    task = task.model_copy(update={"trajectories": spelled})
    assert not ray.get(learner.placed.actor.submit.remote(task, no_views(task)))
    assert learner.placed.call("stats")["private"] == 1

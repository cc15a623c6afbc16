"""The checks of a dry run across the parts of a job: machines, curriculum phases, the judge."""

from __future__ import annotations

import pytest
from command_line import job_of
from hypothesis import given
from hypothesis import strategies as st

from pixelis import config
from pixelis.config.rewards import CurriculumConfig
from pixelis.errors import BadConfig
from pixelis.jobs import plan, serve
from pixelis.policy.estimate import Finding
from pixelis.rewards.curriculum import Curriculum


def findings(job: str, subject: str, *overrides: str) -> list[Finding]:
    c = config.load(None, list(overrides))
    every = [*plan.check(c, job_of(job).needs(c), grows=True), *plan.rewards(c)]
    return [f for f in every if f.subject == subject]


TWO_NODES = (
    "cluster.nodes.count=2",
    "cluster.nodes.cpus=32",
    "cluster.nodes.gpus=4",
    "learner.gpus=1",
    "engine.gpus=1",
)


def test_learners_share_a_machine_and_generators_take_what_is_left() -> None:
    (placement,) = findings("rft", "placement", *TWO_NODES, "learner.workers=4", "engine.workers=4")
    assert placement.level == "ok"
    first, second = placement.text.partition(": ")[2].split("; ")
    assert "4 x learner" in first
    assert "generator" not in first
    assert "4 x generator" in second
    assert "learner" not in second


@pytest.mark.parametrize(
    ("overrides", "level", "words"),
    [
        (
            ("learner.workers=4", "engine.workers=5"),
            "error",
            "1 of 5 x generator with its toolboxes find no room",
        ),
        (("learner.workers=4", "engine.workers=5", "cluster.autoscaling=true"), "note", "1 of 5 x generator"),
        (("engine.tensor_parallel=8", "engine.gpus=8"), "error", "GPU 8 on one machine"),
        (("engine.cpus=20", "toolbox.workers=4", "toolbox.cpus=4"), "error", "CPU 36"),
    ],
)
def test_what_finds_no_room_is_named_with_its_needs(
    overrides: tuple[str, ...], level: str, words: str
) -> None:
    (placement,) = findings("rft", "placement", *TWO_NODES, *overrides)
    assert placement.level == level
    assert words in placement.text


def test_generators_that_may_join_are_counted_by_the_room_left() -> None:
    def more(*overrides: str) -> tuple[str, str]:
        (finding,) = findings(
            "rft", "generators", *TWO_NODES, "learner.workers=4", "engine.workers=2", *overrides
        )
        return finding.level, finding.text

    assert more("engine.max_workers=4") == (
        "ok",
        "2 of 2 generators beyond engine.workers have room on 2 x (32 CPUs, 4 GPUs)",
    )
    level, text = more("engine.max_workers=6")
    assert level == "note"
    assert text.startswith("2 of 4")
    assert "the others join when nodes are added" in text
    assert not findings("rft", "generators", *TWO_NODES)
    (service,) = findings(
        "serve", "generators", *TWO_NODES, "engine.max_workers=3", "evolution.enabled=false"
    )
    assert service.text.startswith("2 of 2 generators beyond engine.workers have room")


def test_gpus_of_machines_that_are_not_named_are_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    levels = {f.level for f in findings("rft", "placement", "learner.gpus=1")}
    assert levels == {"note"}


def test_a_read_only_service_needs_neither_learner_nor_canary_nor_embedder() -> None:
    def roles(*overrides: str) -> set[str]:
        return {part.role for part in serve.needs(config.load(None, list(overrides)))}

    everything = roles()
    assert {"learner", "memory shard", "embedder of the memory", "canary with its toolboxes"} <= everything
    assert roles("serve.read_only=true") == {"generator with its toolboxes", "scorer"}
    with pytest.raises(BadConfig, match="a service must answer meanwhile"):
        roles("engine.colocate=true")
    assert roles("engine.colocate=true", "evolution.enabled=false")


def boundaries(
    settings: CurriculumConfig, success: float, coherence: float, rollouts: int, steps: int
) -> list[int]:
    """Return the steps after which phases end, for constant success and a coherence that never stops
    improving.
    """
    curriculum = Curriculum(settings)
    ends = []
    for step in range(steps):
        if curriculum.advance(step, success, coherence * (1 + step), rollouts) is not None:
            ends.append(step + 1)
    return ends


@given(
    st.integers(1, 12),
    st.integers(0, 3000),
    st.integers(1, 60),
    st.integers(0, 60),
    st.integers(1, 400),
    st.integers(1, 20),
)
def test_phases_begin_when_the_plan_says(
    check: int, samples: int, first: int, more: int, rollouts: int, window: int
) -> None:
    settings = CurriculumConfig(
        kind="trigger",
        check_every=check,
        min_samples=samples,
        first_steps=first,
        second_steps=first + more,
        window=window,
        patience=1000,
    )
    spans = plan._triggered_spans(settings, rollouts)
    steps = max(latest for _, latest in spans) + check
    assert boundaries(settings, 1.0, 1.0, rollouts, steps) == [earliest for earliest, _ in spans]
    assert boundaries(settings, 0.0, 1e-3, rollouts, steps) == [latest for _, latest in spans]


def test_a_phase_that_the_run_cannot_reach_is_noted() -> None:
    near = ("rewards.preset=pixelis", "rft.steps=240", "rft.prompts_per_step=64", "rft.group_size=8")
    assert [f.level for f in findings("rft", "curriculum", *near)] == ["note", "note"]
    second, third = findings("rft", "curriculum", *near, "rft.steps=150")
    assert (second.level, third.level) == ("note", "note")
    assert (
        "phase 3 of 3 begins at step 200 to 20100, by progress, of rft.steps 150: the run ends before"
        in third.text
    )
    by_step = findings("rft", "curriculum", "rewards.preset=pixelis-steps", "rft.steps=6000")
    assert [f.level for f in by_step] == ["ok", "note"]
    assert findings("rft", "curriculum") == []


def test_a_missing_judge_or_key_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIXELIS_JUDGE_API_KEY", raising=False)
    (missing,) = findings("rft", "rewards", "rewards.preset=mini-o3")
    assert missing.level == "error"
    assert "rewards.judge.url" in missing.text
    server = ("rewards.judge.url=http://judge:8000/v1", "rewards.judge.model=m")
    (no_key,) = findings("rft", "rewards", *server)
    assert "PIXELIS_JUDGE_API_KEY" in no_key.text
    monkeypatch.setenv("PIXELIS_JUDGE_API_KEY", "secret")
    (ready,) = findings("rft", "rewards", *server)
    assert (ready.level, "secret" in ready.text) == ("ok", False)
    assert findings("rft", "rewards") == []

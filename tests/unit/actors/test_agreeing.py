"""objective=answer: an update learns the episodes that gave the elected answer."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tiny_trainer import trainer

from pixelis.actors.batch_sources import samples_of
from pixelis.actors.update_queue import QueuedTask, UpdateQueue
from pixelis.actors.update_source import UpdateSource
from pixelis.actors.weights import CandidatePublisher
from pixelis.config import parse
from pixelis.errors import BadConfig, DataFailure
from pixelis.evolution.updates import as_group
from pixelis.policy.samples import LearnerBatch
from pixelis.records import ImageView, StopReason, Trajectory, Turn, UpdateTask

TOKENS = {"7": 70, "8": 80, "9": 90}


def episode(number: int, answer: str | None) -> Trajectory:
    """Prompt, a call, its observation, and an answer of two tokens; or no answer."""
    turns = [
        Turn(role="user", tokens=[1, 2]),
        Turn(role="assistant", tokens=[10 + number, 3], log_probs=[-0.1, -0.2]),
        Turn(role="tool", tokens=[4]),
    ]
    if answer is not None:
        turns.append(Turn(role="assistant", tokens=[TOKENS[answer], 5], log_probs=[-0.3, -0.4]))
    stop = StopReason.LENGTH if answer is None else StopReason.ANSWER
    ids = {"id": f"t{number}", "question_id": "q", "group_id": "g"}
    return Trajectory(**ids, turns=turns, answer=answer, stop_reason=stop, advantage=0.0)


def task(answers: list[str | None], label: str) -> UpdateTask:
    episodes = [episode(i, answer) for i, answer in enumerate(answers)]
    return UpdateTask(
        question_id="q", trajectories=episodes, pseudo_label=label, confidence=0.8, created_at=0.0
    )


def test_a_corrected_answer_that_no_sample_gave_is_left_out() -> None:
    counts: Counter[str] = Counter()
    for objective, labels in (("policy", ["8", "7"]), ("answer", ["7"])):
        queue = UpdateQueue(parse({"evolution": {"batch": 2, "objective": objective}}), counts)
        for label in ("8", "7"):
            labelled = task(["7", "7", "9"], label)
            for trajectory in labelled.trajectories:
                trajectory.reward = float(trajectory.answer == label)
            if queue.usable(labelled):
                queue.push(QueuedTask(labelled, None, f"q-{label}"))  # type: ignore[arg-type]
        assert [item.task.pseudo_label for item in queue.items] == labels


def test_traffic_without_a_usable_sample_does_not_end_the_learner() -> None:
    options = {"lr": 1e-3, "kl_weight": 0.0, "kl_limit": 0.1, "sampled": []}
    with trainer() as own:
        before = own.adapter().sha256()
        assert own.step(LearnerBatch(0, [], "sft", options=options, optional=True)) == {"evolve/skipped": 1.0}
        assert own.adapter().sha256() == before
        with pytest.raises(DataFailure, match="no usable sample"):
            own.step(LearnerBatch(0, [], "sft", options=options))


def update_source(**settings: object) -> UpdateSource:
    config = parse({"evolution": {"objective": "answer"}} | settings)
    return UpdateSource(config, None, CandidatePublisher(None, 1))  # type: ignore[arg-type]


def test_an_episode_with_the_label_is_learnt() -> None:
    group = as_group(task(["7", "8", None], "7"))
    (agreed,) = update_source()._agreeing([group], [{f"t{i}": [] for i in range(3)}])
    assert agreed.tokens.tolist() == [1, 2, 10, 3, 4, 70, 5]
    assert agreed.mask.tolist() == [0, 0, 1, 1, 0, 1, 1]


def test_a_task_with_many_agreeing_samples_teaches_no_more_than_others() -> None:
    group = as_group(task(["7"] * 6, "7"))
    samples = update_source()._agreeing([group], [{f"t{i}": [] for i in range(6)}])
    assert len({sample.id for sample in samples}) == len(samples) == 2


def test_with_augmentations_an_episode_is_learnt_in_both_lights() -> None:
    seen = task(["7", "8"], "7")
    for trajectory in seen.trajectories:
        trajectory.images = [ImageView(id="img0"), ImageView(id="img1", parent="img0")]
        trajectory.turns[0].images, trajectory.turns[2].images = ["img0"], ["img1"]
    seen.trajectories[0].augmentation = "grey_world"
    views = [np.full((4, 4, 3), (200, 160, 120), np.uint8), np.full((2, 2, 3), (100, 80, 60), np.uint8)]
    source = update_source(serve={"augmentations": ["autocontrast", "grey_world"]})
    plain, other = source._agreeing([as_group(seen)], [{"t0": views, "t1": views}])
    assert [view[0, 0].tolist() for view in plain.views] == [[200, 160, 120], [100, 80, 60]]
    # The light of the whole picture
    assert [view[0, 0].tolist() for view in other.views] == [[160, 160, 160], [80, 80, 80]]
    assert plain.tokens.tolist() == other.tokens.tolist()


def test_the_policy_objective_leaves_augmented_samples_out() -> None:
    """Their log-probabilities are those of other pictures, which would make a wrong importance ratio."""
    group = as_group(task(["7", "8", "7"], "7"))
    group.trajectories[1].augmentation = "grey_world"
    assert [sample.id for sample in samples_of([group], [{f"t{i}": [] for i in range(3)}])] == ["t0", "t2"]
    queue = UpdateQueue(parse({"evolution": {"batch": 2}}), Counter())
    labelled = task(["7", "8", "9"], "7")
    for trajectory in labelled.trajectories:
        trajectory.reward = float(trajectory.answer == "7")
    assert queue.usable(labelled)
    for trajectory in labelled.trajectories:
        trajectory.augmentation = "grey_world"
    assert not queue.usable(labelled)


def test_the_guard_measures_the_learner_where_the_log_probs_are_those_of_a_told_policy() -> None:
    told, own = task(["7", "7"], "7"), task(["7", "7"], "7")
    for number, (moved, plain) in enumerate(zip(told.trajectories, own.trajectories, strict=True)):
        moved.transplanted, plain.id = True, f"own{number}"
        for turn in (*moved.replies, *plain.replies):
            turn.tokens = [70, 80]  # no control tokens, which are not scored
    groups = [as_group(told), as_group(own)]
    samples = samples_of(groups, [{t.id: [] for t in group.trajectories} for group in groups])
    sampled = [sample.log_probs.copy() for sample in samples]
    source = update_source()
    with trainer() as source.trainer:
        source._score_transplanted(groups, samples)
        assert source.trainer.model.behaviour_kl(samples[:2]) == pytest.approx(0, abs=1e-12)
    for sample, before in zip(samples, sampled, strict=True):
        is_told = not sample.id.startswith("own")
        assert np.array_equal(sample.log_probs, before) == (not is_told)
        assert (sample.log_probs[~sample.mask] == 0).all()


def test_words_need_answers_to_imitate_and_stored_pictures() -> None:
    for other in ({"evolution": {"words": True}}, {"memory": {"pictures": False}}):
        settings = {"evolution": {"words": True, "objective": "answer"}} | other
        with pytest.raises(BadConfig, match=r"evolution\.words"):
            parse(settings)

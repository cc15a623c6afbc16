"""Episodes of an outside agent on a real generator, which may die between two completions."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import ray
from dialogue_models import renderer
from PIL import Image
from placed_actors import wait_until
from ray.actor import ActorHandle

from pixelis.actors.episodes import Episodes
from pixelis.actors.generator import Generator
from pixelis.actors.generator_router import GeneratorRouter, RouterTimeouts
from pixelis.actors.group_views import fetch_groups
from pixelis.actors.policy_store import PolicyStore
from pixelis.actors.rollout_messages import (
    ClientContent,
    EpisodeSoFar,
    RolloutRequest,
    RolloutResult,
)
from pixelis.config import load
from pixelis.dialogue.resumption import Said, up_to
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadInput
from pixelis.protocol.messages import Message
from pixelis.protocol.tools import Toolset
from pixelis.records import Action, Function, Media, Question, StopReason, Trajectory, Turn

pytestmark = [pytest.mark.slow, pytest.mark.long]

OVERRIDES = ["dialogue.max_turn_tokens=8", "toolbox.workers=1", "toolbox.cpus=0"]
LOOK_CALL = '<tool_call>{"name":"look","arguments":{}}</tool_call>'


@pytest.fixture(scope="module")
def generator(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActorHandle]:
    folder: Path = tmp_path_factory.mktemp("resumed")
    store = PolicyStore.options(name="resumed-store").remote(str(folder))  # type: ignore[attr-defined]
    config = load("configs/nano/base.yaml", [*OVERRIDES, f"run.dir={folder}"])
    actor = Generator.options(num_cpus=0.1).remote(config, "resumed-store")  # type: ignore[attr-defined]
    ray.get(actor.ready.remote(), timeout=120)
    yield actor
    ray.kill(actor)
    ray.kill(store)


def picture(id: str, seed: int) -> Media:
    pixels, file = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Media(id=id, uri="data:image/png;base64," + base64.b64encode(file.getvalue()).decode())


QUESTION = Question(id="q", question="Which?", media=[picture("img0", 0)], functions=[Function(name="look")])


def complete(
    actor: ActorHandle, so_far: EpisodeSoFar, question: Question = QUESTION, sample: int = 0
) -> RolloutResult:
    router = GeneratorRouter([actor], RouterTimeouts(120), follows=True)
    sampling = SamplingParams(1.0, seed=5)
    request = RolloutRequest(question, "g", 1, sampling, max_turns=6, resume=[so_far], sample=sample)
    return asyncio.run(asyncio.wait_for(router.rollout(request), 180))


def begin(actor: ActorHandle, id: str, sample: int = 0) -> RolloutResult:
    return complete(actor, EpisodeSoFar(Trajectory(id=id, question_id="q", group_id="g")), sample=sample)


def end_in_a_call(t: Trajectory) -> Trajectory:
    """The trajectory with a call as its last turn, which no random model writes."""
    r = renderer("nano")
    tokens = [*r.tokenizer.encode(LOOK_CALL, add_special_tokens=False), r.spec.stop]
    action = Action(op="look", target="")
    turn = Turn(
        role="assistant", text=LOOK_CALL, tokens=tokens, log_probs=[-0.5] * len(tokens), action=action
    )
    return t.model_copy(update={"turns": [*t.turns[:-1], turn], "stop_reason": StopReason.CALL})


@pytest.mark.long
def test_a_killed_generator_goes_on_with_the_same_tokens_pictures_and_log_probs(
    generator: ActorHandle,
) -> None:
    first = begin(generator, "traj_own")
    (t,) = first.group.trajectories
    assert (t.id, t.policy_turns) == ("traj_own", 1)
    called, seen = end_in_a_call(t), ClientContent("seen <image>", [picture("c0", 1)])
    so_far = EpisodeSoFar(called, [Said(results=[seen])], first.views.added)
    alive = complete(generator, so_far)
    pid = ray.get(generator.health.remote(), timeout=60)["pid"]
    os.kill(pid, signal.SIGKILL)
    restarted = complete(generator, so_far)
    wait_until(lambda: ray.get(generator.health.remote(), timeout=60)["pid"] != pid)
    (a,), (b,) = alive.group.trajectories, restarted.group.trajectories
    assert a.token_ids() == b.token_ids()
    assert b.token_ids()[: len(called.token_ids())] == called.token_ids()
    assert a.behaviour_log_probs() == pytest.approx(b.behaviour_log_probs(), abs=1e-4)
    assert [(i.id, i.parent) for i in b.images] == [("img0", None), ("obs1", "environment")]
    # A message with a picture: all views come back in order
    message = Said(message=ClientContent("And <image>?", [picture("m0", 2)]))
    last = complete(generator, EpisodeSoFar(b, [message], restarted.views.added))
    (done,) = last.group.trajectories
    assert [i.id for i in done.images] == ["img0", "obs1", "img1"]
    assert done.policy_turns == 3
    one, two, three = (fetch_groups([r.views])[0]["traj_own"] for r in (first, restarted, last))
    assert [len(views) for views in (one, two, three)] == [1, 2, 3]
    assert all(np.array_equal(x, y) for x, y in zip(two, three, strict=False))
    assert not np.array_equal(three[1], three[2])
    # A branch from the first call, with the views of the trajectory that it leaves
    branch = up_to(done, 1)
    other = Said(results=[ClientContent("nothing there")])
    forked = complete(generator, EpisodeSoFar(branch, [other], last.views.added))
    (f,) = forked.group.trajectories
    assert f.id == branch.id != "traj_own"
    assert f.token_ids()[: len(branch.token_ids())] == branch.token_ids()
    assert len(fetch_groups([forked.views])[0][f.id]) == 1


def test_episodes_of_a_group_that_begin_one_by_one_are_those_of_a_group(generator: ActorHandle) -> None:
    router = GeneratorRouter([generator], follows=True)
    request = RolloutRequest(QUESTION, "g", 3, SamplingParams(1.0, seed=5), max_turns=1)
    group = asyncio.run(router.rollout(request)).group
    single = [begin(generator, f"traj_{i}", sample=i).group.trajectories[0] for i in range(3)]
    assert [t.token_ids() for t in group.trajectories] == [t.token_ids() for t in single]
    assert len({tuple(t.token_ids()) for t in single}) == 3


def test_the_episodes_of_a_group_see_their_pictures_in_other_lights(
    generator: ActorHandle, tmp_path: Path
) -> None:
    """As the samples of a service do, so that their votes err in other places."""
    config = load("configs/nano/base.yaml", [*OVERRIDES, f"run.dir={tmp_path}"])
    router = GeneratorRouter([generator], RouterTimeouts(120), follows=True)
    episodes = Episodes(config, router, augmentations=["autocontrast"])
    message = Message("user", "Which?", (QUESTION.media[0].uri,))

    async def played(sample: int) -> Trajectory:
        sampling = SamplingParams(0.0, seed=5)
        episode = episodes.begin(QUESTION, "g", sampling, 60.0, sample=sample)
        async with aclosing(episodes.reply(episode, [message], Toolset())) as items:
            async for _ in items:
                pass
        episode.end()
        return episode.record()[0]

    async def group() -> list[Trajectory]:
        return [await played(sample) for sample in range(3)]

    first, second, third = asyncio.run(group())
    assert [t.augmentation for t in (first, second, third)] == [None, "autocontrast", None]
    assert first.behaviour_log_probs() == third.behaviour_log_probs() != second.behaviour_log_probs()


def test_what_cannot_be_offered_or_continued_is_the_callers_error(generator: ActorHandle) -> None:
    taken = QUESTION.model_copy(update={"functions": [Function(name="zoom_in")]})
    new = EpisodeSoFar(Trajectory(question_id="q", group_id="g"))
    with pytest.raises(BadInput) as error:
        complete(generator, new, taken)
    assert error.value.code == "name_taken"
    clip = Media(id="c0", uri="data:video/mp4;base64,AAAA", kind="video")
    (t,) = begin(generator, "traj_clip").group.trajectories
    said = [Said(results=[ClientContent("seen", [clip])])]
    with pytest.raises(BadInput) as error:
        complete(generator, EpisodeSoFar(end_in_a_call(t), said))
    assert error.value.code == "no_clips"
    assert ray.get(generator.health.remote(), timeout=60)["sessions"] == 0

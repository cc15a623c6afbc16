"""Teachers of on-policy distillation, which score the student's own tokens.

A teacher with the student's base model is a second set of weights of the learner's network, so no second model
is in memory. Another model or a server has an actor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import ray
from ray.actor import ActorHandle

from pixelis.actors.cluster import use_reserved_gpus
from pixelis.actors.group_views import Views
from pixelis.config import Config
from pixelis.config.teacher import ADDRESS, STUDENT, VERSION
from pixelis.dialogue.privileged import privileged
from pixelis.dialogue.render import Renderer
from pixelis.errors import BadConfig
from pixelis.operations import select
from pixelis.operations.environment import select_environments
from pixelis.policy.adapters import Adapter, load_adapter
from pixelis.policy.samples import TrainSample, from_trajectory
from pixelis.policy.token_advantages import add_teacher_advantages
from pixelis.records import Group, Trajectory

if TYPE_CHECKING:
    from pixelis.policy.deepspeed_engine import Shards
    from pixelis.policy.train_step import Trainer

Episode = tuple[Group, Views, Trajectory]


@ray.remote(max_restarts=-1, max_task_retries=2)
class Teacher:
    """A teacher with another base model than the student's: a model, or the address of a server."""

    def __init__(self, config: Config, name: str):
        use_reserved_gpus()
        import torch

        from pixelis.engines.teacher_server import TeacherServer
        from pixelis.policy.teacher_model import TeacherModel

        torch.set_num_threads(max(1, int(config.rft.teacher.cpus)))
        temperature = config.rft.sampling.temperature
        self.model: TeacherModel | TeacherServer
        if ADDRESS.fullmatch(name):
            self.model = TeacherServer(config, name)
        else:
            self.model = TeacherModel(config.policy, config.learner, name, temperature)

    def health(self) -> str:
        return "ok"

    def log_probs(self, samples: list[TrainSample]) -> list[np.ndarray]:
        return self.model.log_probs(samples)


class Teachers:
    """The teachers of `rft.teacher` on one worker of the learner. All methods are collective."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        store: ActorHandle | None,
        actors: Mapping[str, ActorHandle],
    ):
        self.settings, self.trainer, self.actors = config.rft.teacher, trainer, actors
        model = trainer.model
        self.renderer = Renderer(
            model.tokenizer,
            model.spec,
            config.dialogue,
            select(config.toolbox.operations),
            select_environments(config.toolbox),
        )
        self.weights: dict[str, Shards | None] = {
            name: None if name == STUDENT else model.shards_of(_adapter(name, store))
            for name in self.settings.names
            if name not in actors
        }
        """The weights of each teacher in the learner; None: the student's current ones."""

    def advise(self, episodes: Sequence[Episode], samples: Sequence[TrainSample]) -> dict[str, float]:
        """Add the teachers' advantages to the samples of these episodes; returns metrics of all workers."""
        started = time.perf_counter()
        log_probs: list[np.ndarray | None] = [None] * len(samples)
        requests = 0
        for name in self.settings.names:
            places = [
                i for i, (g, _, _) in enumerate(episodes) if self.settings.of_task(g.question.task) == name
            ]
            requests += len(places)
            shown = {
                i: sample for i in places if (sample := self._shown(episodes[i], samples[i])) is not None
            }
            for i, values in zip(shown, self._log_probs(name, list(shown.values())), strict=True):
                # Else it is longer than a row, or has a token that this teacher never writes
                if len(values) and np.isfinite(values).all():
                    log_probs[i] = values
        total = self.trainer.model.sequence.sum
        metrics = add_teacher_advantages(samples, log_probs, self.settings.weight, total)
        scored = sum(values is not None for values in log_probs)
        missing, of = total([float(requests - scored), float(requests)])
        metrics["teacher/unscored"] = missing / max(of, 1.0)
        return metrics | {"teacher/seconds": time.perf_counter() - started}

    def _log_probs(self, name: str, samples: list[TrainSample]) -> list[np.ndarray]:
        if name in self.actors:
            return ray.get(self.actors[name].log_probs.remote(samples)) if samples else []
        weights, model = self.weights[name], self.trainer.model
        with nullcontext() if weights is None else model.zero.using(weights):
            return model.log_probs(samples)

    def _shown(self, episode: Episode, sample: TrainSample) -> TrainSample | None:
        """The sample as the teacher sees it; None if there is nothing to show it."""
        if self.settings.context == "none":
            return sample
        group, views, trajectory = episode
        result = privileged(trajectory, group, views, self.renderer, self.settings.context)
        return None if result is None else from_trajectory(*result, advantage=0.0)


def _adapter(name: str, store: ActorHandle | None) -> Adapter | None:
    if version := VERSION.fullmatch(name):
        if store is None:
            raise BadConfig(f"rft.teacher.model={name}: this job keeps no versions", fix="name a checkpoint")
        (reference,) = ray.get(store.get.remote(int(version[1])))
        return ray.get(reference)
    return load_adapter(name)

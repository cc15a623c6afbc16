"""A teacher with another base model than the student: it scores the student's tokens without gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pixelis import config
from pixelis.errors import BadConfig
from pixelis.families.features import concatenate
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.policy.forward import FeatureCache
from pixelis.policy.log_probs import PolicyModule
from pixelis.policy.model import default_device, load_model
from pixelis.policy.model_path import resolve
from pixelis.policy.packing import collate, usable_bins
from pixelis.policy.samples import TrainSample


class TeacherModel:
    """A frozen model in one process.

    policy: the student's section; name: the teacher's folder or name. Raises BadConfig for a model that reads
    the student's tokens or pictures otherwise than the student.
    """

    def __init__(
        self,
        policy: config.PolicyConfig,
        learner: config.LearnerConfig,
        name: str,
        temperature: float,
        device: torch.device | str | None = None,
    ):
        self.learner = learner
        self.device = torch.device(device) if device is not None else default_device()
        network, tokenizer, self.spec = load_model(policy, self.device, folder=name)
        folder = resolve(policy.model)
        student_tokenizer = load_tokenizer(folder)
        student = load_spec(folder, student_tokenizer, policy.family)
        differing = [
            field
            for field in ("image_token", "vision_start", "vision_end", "stop", "multiple")
            if getattr(student, field) != getattr(self.spec, field)
        ]
        if student_tokenizer.get_vocab() != tokenizer.get_vocab():
            differing.insert(0, "vocabulary")
        if differing:
            raise BadConfig(
                f"the teacher {name} has another {', '.join(differing)} than {policy.model}: it cannot score "
                "its tokens",
                fix="name a larger model of the student's family in rft.teacher",
            )
        self.shares_prompts = self.spec.family.attend_packed(network)
        self.module = PolicyModule(network, self.spec, temperature, zero3=False).eval()
        self.features = FeatureCache()

    @torch.no_grad()
    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Log-probabilities of each sample's policy tokens; empty for an unusable sample."""
        out: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(samples)
        for places in usable_bins(samples, self.spec, self.learner, self.shares_prompts):
            members = [samples[i] for i in places]
            batch = collate(members, self.spec, self.shares_prompts).to(self.device)
            features = None
            if batch.views:
                network = self.module.model
                features = concatenate(self.features.get(network, self.spec, batch.views, batch.digests))
            new, *_ = self.module(batch, features)
            ends = np.cumsum([s.policy_tokens for s in members])[:-1]
            for i, values in zip(places, np.split(new.cpu().numpy(), ends), strict=True):
                out[i] = values
        return out

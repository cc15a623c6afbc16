"""A teacher behind an address: a vLLM server that scores the student's tokens, with their pictures."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from pixelis.config import Config, DialogueConfig
from pixelis.config.llm import LlmConfig
from pixelis.engines.vllm_files import collapse, picture_probes, png_url
from pixelis.errors import BadConfig, DataFailure, InfraFailure
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.policy.model_path import resolve
from pixelis.policy.samples import TrainSample, unusable
from pixelis.rewards.llm_client import LlmClient

log = logging.getLogger(__name__)

T = TypeVar("T")
REFUSED = "teacher_refused"
"""Code of what another try would not change; `LlmClient` has it for a refused request."""
FIX = (
    "run `vllm serve MODEL --enable-scale-out` with a larger model of the student's family, and "
    "--mm-processor-kwargs if it resizes pictures"
)


class TeacherServer:
    """Scores by `vllm serve`, from token ids and lossless pictures (its route /inference/v1/generate).

    Its log-probabilities are those of temperature 1 over all tokens. `TeacherModel` leaves out the tokens that
    the policy never writes: that difference is equal for all tokens of a place, so its expected gradient is 0.
    Raises BadConfig for a server with another vocabulary than policy.model, or which resizes pictures.
    """

    def __init__(self, config: Config, url: str):
        teacher, model = config.rft.teacher, config.policy.model
        tokenizer = load_tokenizer(folder := resolve(model))
        self.spec = load_spec(folder, tokenizer, config.policy.family)
        self.row_tokens = config.learner.row_tokens
        settings = LlmConfig(
            url=url.rstrip("/").removesuffix("/v1"),
            model=url,
            api_key_env=teacher.api_key_env,
            timeout_s=teacher.timeout_s,
        )
        self.client = LlmClient(settings, "rft.teacher", code="teacher")
        self.pool = ThreadPoolExecutor(teacher.concurrency)
        ids = sorted(tokenizer.get_vocab().values())
        try:
            text = self._post("detokenize", {"tokens": ids}, lambda reply: reply["prompt"])
            if text != tokenizer.decode(ids):
                raise DataFailure(f"its vocabulary is not that of {model}")
            for sample in self._probes(config.dialogue):
                self.score(sample)
        except (BadConfig, DataFailure) as error:
            raise BadConfig(f"{url} cannot be a teacher: {error.message}", fix=FIX) from None

    def log_probs(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Log-probabilities of each sample's policy tokens; empty for a sample that cannot be scored.

        Raises InfraFailure if the server does not answer.
        """
        refusals = list[str]()

        def score(sample: TrainSample) -> np.ndarray:
            try:
                return self.score(sample)
            except DataFailure as failure:
                if failure.code != REFUSED:
                    raise InfraFailure(failure.message, code=failure.code) from None
                refusals.append(failure.message)
                return np.empty(0, dtype=np.float32)

        scores = list(self.pool.map(score, samples))
        if refusals:
            log.warning("%d of %d samples have no teacher: %s", len(refusals), len(samples), refusals[0])
        return scores

    def score(self, sample: TrainSample) -> np.ndarray:
        """The log-probabilities of one sample. Raises DataFailure."""
        if cause := unusable(sample, self.spec, self.row_tokens):
            raise DataFailure(cause, code=REFUSED)
        family, tokens, places = self.spec.family, sample.tokens.tolist(), np.flatnonzero(sample.mask)
        pieces = [family.image_ids(self.spec, *view.shape[:2]) for view in sample.views]
        body = {
            "token_ids": collapse(tokens, pieces, family.vllm_image(self.spec)),
            "content_parts": [
                {"type": "image_url", "url": png_url(Image.fromarray(view))} for view in sample.views
            ],
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
            "return_token_ids": True,
        }

        def read(reply: Any) -> list[float] | None:
            if reply["prompt_token_ids"] != tokens:
                return None
            return [reply["prompt_logprobs"][place][str(tokens[place])]["logprob"] for place in places]

        if (values := self._post("inference/v1/generate", body, read)) is None:
            sizes = ", ".join(f"{view.shape[1]} x {view.shape[0]}" for view in sample.views)
            raise DataFailure(f"it resizes pictures of {sizes} pixels", code=REFUSED)
        return np.asarray(values, np.float32)

    def _post(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        return self.client.request(path, body, lambda content: read(json.loads(content)), lambda value: value)

    def _probes(self, dialogue: DialogueConfig) -> Iterator[TrainSample]:
        """Samples with a picture each, as far as a row has room for it; without one for a text model."""
        for views in [[view] for view in picture_probes(self.spec, dialogue)] or [[]]:
            pictures = [id for v in views for id in self.spec.family.image_ids(self.spec, *v.shape[:2])]
            tokens = np.asarray([self.spec.stop, *pictures, self.spec.stop])
            mask = np.arange(len(tokens)) == len(tokens) - 1
            if len(tokens) <= self.row_tokens:
                yield TrainSample(tokens, mask, np.zeros(len(tokens), np.float32), 0.0, views)

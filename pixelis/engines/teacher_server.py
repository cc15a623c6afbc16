"""A teacher behind an address: a vLLM server that scores the student's tokens, with their pictures."""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from pixelis.config import Config, DialogueConfig
from pixelis.config.llm import LlmConfig
from pixelis.engines.vllm_files import collapse
from pixelis.errors import BadConfig, DataFailure, InfraFailure
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.operations.pixel_budget import PixelBudget, fitted_size
from pixelis.policy.model_path import resolve
from pixelis.policy.samples import TrainSample, unusable
from pixelis.rewards.llm_client import LlmClient

log = logging.getLogger(__name__)

T = TypeVar("T")
REFUSED = "teacher_refused"
LEAST = -9999.0
"""What vLLM writes for -inf, which JSON lacks."""
LARGEST_SIDE = 10**5
SERVE = (
    "start it with `vllm serve MODEL --enable-scale-out` and a larger model of the student's family; "
    "--mm-processor-kwargs may have to widen the pixels of its pictures"
)


class TeacherServer:
    """Scores by `vllm serve`, from token ids and lossless pictures (its route /inference/v1/generate).

    Its log-probabilities are those of temperature 1 over all tokens. `TeacherModel` leaves out the tokens that
    the policy cannot write: a difference that is equal for all tokens of a place, with the expected gradient 0.
    Raises BadConfig for a server with other tokens than policy.model, or which resizes pictures.
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
            if self._post("detokenize", {"tokens": ids}, lambda reply: reply["prompt"]) != tokenizer.decode(
                ids
            ):
                raise DataFailure(f"its vocabulary is not that of {model}", code=REFUSED)
            for sample in self._extremes(config.dialogue):
                self.score(sample)
        except (BadConfig, DataFailure) as error:
            message = f"the teacher {url} cannot score tokens of {model}: {error.message}"
            raise BadConfig(message, fix=SERVE) from None

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
            log.warning(
                "rft.teacher scored all but %d of %d samples: %s", len(refusals), len(samples), refusals[0]
            )
        return scores

    def score(self, sample: TrainSample) -> np.ndarray:
        """The scores of one sample. Raises DataFailure, with the code REFUSED if no other try can succeed."""
        if cause := unusable(sample, self.spec, self.row_tokens):
            raise DataFailure(f"a sample is unusable: {cause}", code=REFUSED)
        family, tokens, places = self.spec.family, sample.tokens.tolist(), np.flatnonzero(sample.mask)
        pieces = [family.image_ids(self.spec, *view.shape[:2]) for view in sample.views]
        body: dict[str, Any] = {
            "token_ids": collapse(tokens, pieces, family.vllm_image(self.spec)),
            "content_parts": [{"type": "image_url", "url": _data_url(view)} for view in sample.views],
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
            "return_token_ids": True,
        }

        def read(reply: Any) -> list[float] | None:
            if reply["prompt_token_ids"] != tokens:
                return None
            return [reply["prompt_logprobs"][place][str(tokens[place])]["logprob"] for place in places]

        if (values := self._post("inference/v1/generate", body, read)) is None:
            sizes = ", ".join(f"{view.shape[1]} x {view.shape[0]}" for view in sample.views)
            raise DataFailure(f"it resizes a picture of {sizes} pixels", code=REFUSED)
        return np.where(np.asarray(values) > LEAST, values, -np.inf).astype(np.float32)

    def _post(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        return self.client.request(
            path, body, lambda content: read(json.loads(content)), lambda value: value
        )[0]

    def _extremes(self, dialogue: DialogueConfig) -> list[TrainSample]:
        """Samples with the smallest or largest picture of each budget that a row has room for."""
        spec = self.spec
        budgets = [PixelBudget.of(b) for b in (dialogue.input, dialogue.crop, dialogue.frame)]
        used = [b for b in budgets if b.max_pixels >= spec.multiple**2]
        sizes = {fitted_size(side, side, b, spec.multiple) for b in used for side in (1, LARGEST_SIDE)}
        samples = list[TrainSample]()
        for size in sorted(sizes) if spec.reads_images else ():
            tokens = np.asarray([*spec.family.image_ids(spec, *size), spec.stop])
            mask = np.arange(len(tokens)) == len(tokens) - 1
            views = [np.zeros((*size, 3), np.uint8)]
            samples.append(TrainSample(tokens, mask, np.zeros(len(tokens), np.float32), 0.0, views))
        return [sample for sample in samples if len(sample.tokens) <= self.row_tokens]


def _data_url(view: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(view).save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

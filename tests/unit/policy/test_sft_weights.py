"""What a token counts in the loss: weights of parts and label smoothing against plain torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_policy import spec, stock, stock_logits
from tiny_trainer import SMALL, batch, trainer
from torch.nn.functional import cross_entropy

from pixelis.config import Config
from pixelis.datasets import token_parts
from pixelis.datasets.token_parts import PARTS
from pixelis.dialogue.render import Renderer
from pixelis.nano.tokenizer import build_tokenizer
from pixelis.operations import select
from pixelis.policy.samples import TrainSample
from pixelis.records import Action, ImageView, Step


def reference_loss(samples: list[TrainSample], smoothing: float = 0.0) -> float:
    """sum of weight * cross entropy / sum of weights over all samples, by transformers' model in float64."""
    allowed = torch.tensor([token not in spec().banned for token in range(spec().vocab)])
    # The places of the tokens that may be sampled, so that smoothing is spread over these alone.
    place, model = torch.cumsum(allowed.long(), 0) - 1, stock().double()
    total = size = 0.0
    for sample in samples:
        keep = torch.from_numpy(sample.mask[1:])
        logits, tokens = stock_logits(model, sample)[:-1][keep], torch.from_numpy(sample.tokens)[1:][keep]
        losses = cross_entropy(logits[:, allowed], place[tokens], reduction="none", label_smoothing=smoothing)
        weights = torch.from_numpy(sample.weights)[1:][keep]
        total += float((weights * losses).sum())
        size += float(weights.sum())
    return total / size


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_weighted_mean_over_the_whole_batch(smoothing: float) -> None:
    samples, rng = batch(5), np.random.default_rng(5)
    for sample in samples:
        sample.weights = rng.choice([0.0, 0.5, 1.0, 3.0], len(sample.tokens)).astype(np.float32)
    with torch.no_grad():
        expected = reference_loss(samples, smoothing)
    with trainer(learner=SMALL, label_smoothing=smoothing) as learner:
        metrics = learner.update(samples, "sft")
        assert metrics["learner/micro_batches"] > 1
        assert metrics["policy/loss"] == pytest.approx(expected, rel=1e-5)


def test_a_part_that_counts_nothing_teaches_nothing() -> None:
    samples = batch(3)
    for sample in samples:
        sample.weights = np.zeros(len(sample.tokens), np.float32)
    with trainer() as learner:
        before = learner.adapter().sha256()
        metrics = learner.update(samples, "sft")
        assert (metrics["policy/loss"], metrics["policy/grad_norm"]) == (0.0, 0.0)
        assert learner.adapter().sha256() == before


@pytest.mark.parametrize("think", ["The red frame is here", "hi", "think", "answer", None])
def test_tokens_know_their_part(think: str | None) -> None:
    tokenizer = build_tokenizer()
    renderer = Renderer(tokenizer, spec(), Config().dialogue, select(["zoom_in", "read_text"]))
    images = [ImageView(id="img0", source_size=(768, 768), view_size=(64, 64))]

    def split(step: Step) -> dict[str, str]:
        calls = [Action(op=step.op or "", arguments=step.arguments), *step.further]
        message = calls if step.op else str(step.answer)
        tokens = renderer.assistant(message, step.think, images).tokens
        which = token_parts.parts(tokens, step, tokenizer)
        assert len(which) == len(tokens)
        return {
            part: tokenizer.decode([t for t, w in zip(tokens, which, strict=True) if PARTS[w] == part])
            for part in PARTS
        }

    thought = f"<think>{think}</think>" if think else ""
    answered = split(Step(think=think, answer="7 größer"))
    said = "<answer>7 größer</answer><|im_end|>"
    assert answered == {"think": thought, "call": "", "arguments": "", "answer": said}
    called = split(Step(think=think, op="read_text", arguments={"box": [0.2, 0.4, 0.6, 0.8]}))
    assert called["think"] == thought
    assert called["arguments"] == 'bbox_2d":[200,400,600,800]}}'
    assert called["call"] == '<tool_call>{"name":"read_text","arguments":{"</tool_call><|im_end|>'
    assert called["answer"] == ""
    config = Config().dialogue.model_copy(update={"max_calls": 2})
    renderer = Renderer(tokenizer, spec(), config, select(["zoom_in", "read_text"]))
    box = {"box": [0.2, 0.4, 0.6, 0.8]}
    two = split(
        Step(think=think, op="read_text", arguments=box, further=[Action(op="read_text", arguments=box)])
    )
    assert two["arguments"] == called["arguments"] * 2
    assert two["call"].count("<tool_call>") == two["call"].count("</tool_call>") == 2

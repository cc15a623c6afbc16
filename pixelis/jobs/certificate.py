"""The checks of `pixelis adopt`: a model against transformers' own forward pass of one sample at a time.

No check knows a family. Each measures a difference that is 0, up to rounding, where Pixelis computes what the
model's own code computes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn

from pixelis.jobs.model_under_test import Reference, Subject, short, views_of
from pixelis.operations.scale import Scale
from pixelis.policy import estimate
from pixelis.policy.architecture import Architecture
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import Trainer
from pixelis.records import Action, Exchange, ImageView, Media, Question


class NotChecked(Exception):
    """A check does not apply, for this reason."""


class Measured(NamedTuple):
    """A difference, what else to say, and the largest that passes."""

    difference: float
    detail: str = ""
    limit: float = 1e-4


def largest_difference(values: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(values, expected, strict=True))


def gradient_error(trainer: Trainer, samples: Sequence[TrainSample], reference: Reference) -> float:
    """Norm of the difference of two gradients relative to the reference's. What is missing counts as 0.

    The learner's are those of an SFT step of length 0, from AdamW's first moment.
    """
    trainer.model.zero.set_moments({})
    trainer.update(samples, "sft", lr=0.0)
    unit, moments = 1 - trainer.learner.betas[0], trainer.model.zero.moments().items()
    gradients = {short(n.removesuffix(".exp_avg")): m / unit for n, m in moments if n.endswith(".exp_avg")}
    expected, none = reference.gradients(samples), np.zeros(1, np.float32)
    errors = (gradients.get(name, none) - expected.get(name, none) for name in {*gradients, *expected})
    return math.hypot(*map(np.linalg.norm, errors)) / math.hypot(*map(np.linalg.norm, expected.values()))


def compare(s: Subject, samples: Sequence[TrainSample], scorer: Trainer) -> Measured:
    """An engine's log-probabilities against the learner's of the same tokens.

    In bfloat16 their mean difference, at most 1.5 times that of transformers in bfloat16.
    """
    own, expected = [sample.log_probs[sample.mask] for sample in samples], scorer.model.log_probs(samples)
    if s.config.policy.dtype == "float32":
        return Measured(largest_difference(own, expected))
    folder = s.folder if scorer is s.whole else s.merged
    rounded = Reference(s.spec, folder, dtype=torch.bfloat16).log_probs(samples)
    engine, learner, bfloat16 = map(np.concatenate, (own, expected, rounded))
    limit = 1.5 * float(np.abs(bfloat16 - learner).mean())
    return Measured(float(np.abs(engine - learner).mean()), "mean in bfloat16", limit)


def needs_images(s: Subject) -> None:
    if not s.spec.reads_images:
        raise NotChecked("reads text alone")


def image_tokens(s: Subject) -> Measured:
    needs_images(s)
    turns = [turn for episode in s.episodes.values() for turn in episode if turn[1]]
    errors = [abs(ids.count(s.spec.image_token) - s.reference.count_features(views)) for ids, views in turns]
    return Measured(max(errors), limit=0)


def template(s: Subject, *messages: tuple[str, Sequence[Any]]) -> str:
    """The text of the model's own chat template; pieces that are no text are pictures."""
    chat = list[dict[str, Any]]()
    for role, pieces in messages:
        parts = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in pieces]
        chat.append({"role": role, "content": parts if s.spec.reads_images else "".join(pieces)})
    options = {"add_generation_prompt": True, "enable_thinking": s.config.dialogue.thinking}
    return str(s.tokenizer.apply_chat_template(chat, tokenize=False, **options))


def expand(s: Subject, text: str, views: Sequence[np.ndarray]) -> tuple[list[int], str]:
    """Ids of a templated text with pictures, by the model's own processor if it loads; and how."""
    if (processor := s.reference.processor) is not None:
        # A class of tokenizers may split words in its own way, instead of that in tokenizer.json
        processor.tokenizer = s.tokenizer
        inputs = processor(text=[text], images=[*map(Image.fromarray, views)], **s.reference.options)
        return list(inputs["input_ids"][0]), "expanded by AutoProcessor"
    parts = [text]
    if views:
        # What a picture adds to the text of the template
        plain, shown = (template(s, ("user", pieces)) for pieces in (["?", "!"], ["?", None, "!"]))
        start = next(i for i, (a, b) in enumerate(zip(plain, shown, strict=False)) if a != b)
        parts = text.split(shown[start : start + len(shown) - len(plain)].strip())
    ids = s.tokenizer.encode(parts[0], add_special_tokens=False)
    for view, part in zip(views, parts[1:], strict=True):
        ids += s.spec.family.image_ids(s.spec, *view.shape[:2])
        ids += s.tokenizer.encode(part, add_special_tokens=False)
    return ids, "pictures expanded by the family"


def prompt(s: Subject) -> Measured:
    """A system turn and an earlier exchange, a picture with each question."""
    if not s.tokenizer.chat_template:
        raise NotChecked("the folder has no chat template")
    shown, dialect = views_of(s.pictures), s.renderer.dialect
    media = [Media(id=view.id, uri="cards:any") for view in shown]
    earlier = Exchange(question="What is it?", answer="a cup", media=[item.id for item in media[:1]])
    question = Question(id="q", question="Where is it?", history=[earlier], media=media)
    turns = s.renderer.prompt(question, shown, operations=False)
    messages: list[tuple[str, Sequence[Any]]] = [
        ("user", dialect.question("What is it?", shown[:1], False, True)),
        ("assistant", dialect.render("a cup", Scale("unit"))),
        ("user", dialect.question("Where is it?", shown[1:], False, True)),
    ]
    if turns[0].role == "system":
        messages.insert(0, ("system", [turns[0].text]))
    expected, detail = expand(s, template(s, *messages), s.pictures)
    ids = [token for turn in turns for token in turn.tokens]
    wrong = [i for i, (a, b) in enumerate(itertools.zip_longest(ids, expected)) if a != b]
    if wrong:
        ours, own = (s.tokenizer.decode(part[wrong[0] :][:6]) for part in (ids, expected))
        detail = f"from token {wrong[0]}: {ours!r} instead of {own!r}"
    return Measured(len(wrong), detail, limit=0)


def coordinates(s: Subject) -> Measured:
    needs_images(s)
    box, images = (0.25, 0.25, 0.5, 0.75), [ImageView(id="img0", view_size=(1200, 800))]
    turn = s.renderer.assistant(Action(op="zoom_in", arguments={"box": box}, target="img0"), images=images)
    kind = s.coordinates or s.spec.coordinates
    read = s.renderer.dialect.parse(turn.text, s.renderer.operations, Scale.of(kind, images)).action
    if read is None:
        return Measured(math.inf, f"{turn.text} is no call in {kind}")
    detail = kind if s.coordinates else f"{kind} by the family: confirm it with --coordinates"
    return Measured(max(abs(a - b) for a, b in zip(read.arguments["box"], box, strict=True)), detail)


def forward(s: Subject) -> Measured:
    alone = [s.whole.model.log_probs([sample])[0] for sample in s.samples]
    pairs = zip(alone, s.reference.log_probs(s.samples), s.episodes, strict=True)
    error, kind = max((float(np.abs(a - b).max()), kind) for a, b, kind in pairs)
    return Measured(error, f"largest for {kind}")


def packing(s: Subject) -> Measured:
    return Measured(gradient_error(s.whole, s.samples, s.reference))


def lora_gradients(s: Subject) -> Measured:
    decoder = {*s.reference.base.get_decoder().modules()}
    modules = s.reference.base.named_modules()
    linear = {short(name) for name, part in modules if part in decoder and isinstance(part, nn.Linear)}
    if lacking := linear - {short(name) for name in s.adapted.adapter().ranks}:
        return Measured(len(lacking), f"{len(lacking)} layers have no adapter: {min(lacking)}")
    return Measured(gradient_error(s.adapted, s.samples, s.peft), f"{len(linear)} layers")


def banned(s: Subject) -> Measured:
    answers = [sample.tokens[sample.mask] for samples in s.generated for sample in samples]
    allowed = {s.spec.image_token, s.spec.video_token} - {*s.spec.banned}
    return Measured(int(np.isin(np.concatenate(answers), s.spec.banned).sum()) + len(allowed), limit=0)


def adapter(s: Subject) -> Measured:
    return compare(s, [sample for sample in s.generated[1] if not sample.views], s.adapted)


def vision_cache(s: Subject) -> Measured:
    needs_images(s)
    return compare(s, [sample for sample in s.generated[1] if sample.views], s.adapted)


def merged(s: Subject) -> Measured:
    [samples] = s.generate(s.merged, [None])
    return compare(s, samples, s.adapted)


def export(s: Subject) -> Measured:
    expected = s.adapted.model.log_probs(s.samples)
    return Measured(largest_difference(Reference(s.spec, s.merged).log_probs(s.samples), expected))


def memory(s: Subject) -> Measured:
    errors = list[float]()
    for trainer in (s.adapted, s.whole):
        arch = Architecture(trainer.policy, torch.float32)
        parts, _ = estimate.learner_memory(arch, trainer.policy, trainer.learner)
        weights = sum(p.nbytes for p in trainer.model.network.parameters())
        moments = sum(m.nbytes for name, m in trainer.model.zero.moments().items() if name != "step")
        errors.append(abs(parts["weights"] + parts.get("adapters", 0) - weights) / weights)
        errors.append(abs(parts["optimizer"] - moments) / moments)
    return Measured(max(errors), "weights, adapters and optimizer, in LoRA and full training", limit=0.01)


CHECKS: dict[str, tuple[Callable[[Subject], Measured], str]] = {
    "image tokens": (image_tokens, "no job can use pictures: their tokens and features differ in number"),
    "prompt": (prompt, "the model reads another chat format than it was trained on"),
    "coordinates": (coordinates, "calls look at the wrong place"),
    "forward pass": (forward, "training optimises another distribution than the model's"),
    "packing": (packing, "samples of a row read each other, or policy.full=true learns something else"),
    "LoRA gradients": (
        lora_gradients,
        "adapters lack layers, learn something else, or are not what `pixelis export` writes",
    ),
    "banned tokens": (banned, "a sampled image token without a picture ends its episode"),
    "engine": (lambda s: compare(s, s.generated[0], s.whole), "rollouts come from another policy"),
    "engine, adapter": (adapter, "the engine does not serve what the learner publishes"),
    "vision cache": (vision_cache, "after an update of the vision tower pictures keep old features"),
    "engine, merged": (merged, "the engine misreads what `pixelis export --merge` writes"),
    "export, merged": (export, "`pixelis export --merge` writes another policy"),
    "memory": (memory, "`--dry-run` promises memory to which runs do not keep"),
}
"""Name -> measure, and what fails with it. Causes come first: the first failure explains the others."""


def certify(subject: Subject) -> Iterator[dict[str, Any]]:
    """The result of each check. What a check raises is its failure."""
    for name, (measure, consequence) in CHECKS.items():
        difference, limit, state = math.inf, 0.0, "failed"
        try:
            difference, detail, limit = measure(subject)
            state = "ok" if difference <= limit else "failed"
        except NotChecked as reason:
            state, detail = "not checked", str(reason)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
        yield {
            "name": name,
            "state": state,
            "difference": difference if math.isfinite(difference) else None,
            "limit": limit,
            "detail": detail,
            "consequence": consequence,
        }

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

from pixelis.jobs.model_under_test import Gradients, Reference, Subject, short, views_of
from pixelis.operations.scale import Scale
from pixelis.policy import estimate
from pixelis.policy.architecture import Architecture
from pixelis.policy.learner_model import LearnerModel
from pixelis.policy.samples import TrainSample
from pixelis.policy.train_step import Trainer
from pixelis.records import Action, Exchange, ImageView, Media, Question

BOX = (0.25, 0.25, 0.5, 0.75)


class NotChecked(Exception):
    """A check does not apply, for this reason."""


class Measured(NamedTuple):
    """A difference, what else to say, and the limit if it is not the check's own."""

    value: float
    detail: str = ""
    limit: float | None = None


def largest(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> Measured:
    return Measured(max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)))


def relative(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference of two gradients relative to the expected one's. What is missing counts as 0."""
    names, none = {*found, *expected}, np.zeros(1, np.float32)
    errors = (np.linalg.norm(found.get(name, none) - expected.get(name, none)) for name in names)
    return math.hypot(*errors) / math.hypot(*map(np.linalg.norm, expected.values()))


def gradients(trainer: Trainer, samples: Sequence[TrainSample]) -> tuple[float, Gradients]:
    """Loss and gradient of an SFT step of length 0, from AdamW's first moment."""
    trainer.model.zero.set_moments({})
    loss = trainer.update(samples, "sft", lr=0.0)["policy/loss"]
    unit, moments = 1 - trainer.learner.betas[0], trainer.model.zero.moments().items()
    return loss, {short(n.removesuffix(".exp_avg")): m / unit for n, m in moments if n.endswith(".exp_avg")}


def compare(s: Subject, samples: Sequence[TrainSample], scorer: LearnerModel | Reference) -> Measured:
    """An engine's log-probabilities against others of the same tokens.

    In bfloat16 their mean difference, at most 1.5 times that of transformers' own two types.
    """
    found, expected = [sample.log_probs[sample.mask] for sample in samples], scorer.log_probs(samples)
    if s.dtype == "float32":
        return largest(found, expected)
    rounded = Reference(s.spec, s.folder, dtype=torch.bfloat16)
    values = [found, expected, rounded.log_probs(samples), s.reference.log_probs(samples)]
    ours, learners, low, high = map(np.concatenate, values)
    limit = 1.5 * float(np.abs(low - high).mean())
    return Measured(float(np.abs(ours - learners).mean()), "mean in bfloat16", limit)


def needs_images(s: Subject) -> None:
    if not s.spec.reads_images:
        raise NotChecked("reads text alone")


def image_tokens(s: Subject) -> Measured:
    needs_images(s)
    turns = [turn for episode in s.episodes.values() for turn in episode if turn[1]]
    errors = [abs(ids.count(s.spec.image_token) - s.reference.count_features(views)) for ids, views in turns]
    return Measured(
        max(errors), f"{s.spec.image_tokens(*s.wide)} in a view of {s.wide[1]}x{s.wide[0]} pixels"
    )


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
    if not views:
        return s.tokenizer.encode(text, add_special_tokens=False), ""
    # What a picture adds to the text of the template
    plain, shown = (template(s, ("user", pieces)) for pieces in (["?", "!"], ["?", None, "!"]))
    start = next(i for i, (a, b) in enumerate(zip(plain, shown, strict=False)) if a != b)
    mark = shown[start : start + len(shown) - len(plain)].strip()
    ids = list[int]()
    for part, view in zip(text.split(mark), [*views, None], strict=True):
        ids += s.tokenizer.encode(part, add_special_tokens=False)
        ids += [] if view is None else s.spec.family.image_ids(s.spec, *view.shape[:2])
    return ids, "expanded by the family: AutoProcessor does not load"


def prompt(s: Subject) -> Measured:
    """A system turn and an earlier exchange, a picture with each question."""
    if not s.tokenizer.chat_template:
        raise NotChecked("the folder has no chat template")
    views = [s.view(s.wide), s.view(s.high)] if s.spec.reads_images else []
    shown, dialect = views_of(views), s.renderer.dialect
    media = [Media(id=view.id, uri="cards:any") for view in shown]
    earlier = Exchange(question="What is it?", answer="a cup", media=[item.id for item in media[:1]])
    question = Question(id="q", question="Where is it?", history=[earlier], media=media)
    turns = s.renderer.prompt(question, shown, operations=False)
    system = [("system", [turns[0].text])] if turns[0].role == "system" else []
    text = template(
        s,
        *system,
        ("user", dialect.question("What is it?", shown[:1], False, True)),
        ("assistant", dialect.render("a cup", Scale("unit"))),
        ("user", dialect.question("Where is it?", shown[1:], False, True)),
    )
    found, (expected, detail) = [token for turn in turns for token in turn.tokens], expand(s, text, views)
    wrong = [i for i, pair in enumerate(itertools.zip_longest(found, expected)) if len({*pair}) > 1]
    if wrong:
        ours, own = (
            s.tokenizer.decode(ids[max(0, wrong[0] - 2) : wrong[0] + 4]) for ids in (found, expected)
        )
        detail = f"from token {wrong[0]}: {ours!r} instead of {own!r}"
    return Measured(len(wrong), detail)


def coordinates(s: Subject) -> Measured:
    """A call, written in the scale of the training and read again."""
    needs_images(s)
    kind, view = s.coordinates or s.spec.coordinates, ImageView(id="img0", view_size=s.wide[::-1])
    sides = {"thousand": (1000, 1000), "unit": (1, 1), "pixels": view.view_size}[kind]
    written = ",".join(f"{share * side:g}" for share, side in zip(BOX, sides * 2, strict=True))
    turn = s.renderer.assistant(Action(op="zoom_in", arguments={"box": BOX}, target="img0"), images=[view])
    if written not in turn.text.replace(" ", ""):
        return Measured(math.inf, f"{turn.text} instead of {written} in {kind}")
    read = s.renderer.read(turn.tokens, [0.0] * len(turn.tokens), [view])[1].action
    error = max(abs(a - b) for a, b in zip(read.arguments["box"], BOX, strict=True)) if read else math.inf
    return Measured(error, kind if s.coordinates else f"{kind} by the family: confirm it with --coordinates")


def forward(s: Subject) -> Measured:
    alone = [s.plain.model.log_probs([sample])[0] for sample in s.samples]
    pairs = zip(alone, s.reference.log_probs(s.samples), s.episodes, strict=True)
    error, kind = max((float(np.abs(a - b).max()), kind) for a, b, kind in pairs)
    return Measured(error, f"largest for {kind}")


def packing(s: Subject) -> Measured:
    (loss, packed), total = gradients(s.adapted, s.samples), sum(x.policy_tokens for x in s.samples)
    expected, mean = dict.fromkeys(packed, np.zeros(1)), 0.0
    for sample in s.samples:
        value, alone = gradients(s.adapted, [sample])
        share = sample.policy_tokens / total
        mean += share * value
        expected = {name: expected[name] + share * gradient for name, gradient in alone.items()}
    return Measured(max(abs(loss - mean), relative(packed, expected)), "loss and gradient")


def lora_gradients(s: Subject) -> Measured:
    _, found = gradients(s.adapted, s.samples)
    modules = s.reference.base.get_decoder().named_modules()
    linear = {name for name, layer in modules if isinstance(layer, nn.Linear)}
    adapted = tuple(f".{name.removesuffix('.A')}" for name in found)
    if lacking := {name for name in linear if not any(a.endswith(f".{name}") for a in adapted)}:
        return Measured(math.inf, f"{len(lacking)} layers have no adapter: {min(lacking)}")
    if idle := [name for name, gradient in found.items() if not gradient.any()]:
        return Measured(math.inf, f"{len(idle)} parameters have no gradient: {min(idle)}")
    return Measured(relative(found, s.peft.gradients(s.samples)), f"{len(linear)} layers")


def full_gradients(s: Subject) -> Measured:
    _, found = gradients(s.whole, s.samples)
    return Measured(relative(found, s.reference.gradients(s.samples)), f"{len(found)} parameters")


def banned(s: Subject) -> Measured:
    tokens = [s.spec.image_token, s.spec.video_token]
    sampled = sum(int(np.isin(x.tokens[x.mask], tokens).sum()) for x in s.regenerated[1])
    how = "as usual, as embeddings are tied" if s.is_tied else "where it is likeliest"
    return Measured(sampled + len({*tokens} - {*s.spec.banned}), f"sampled {how}")


def vision_cache(s: Subject) -> Measured:
    needs_images(s)
    updated = Reference(s.spec, s.merged, s.write_peft(s.update, "update"))
    return compare(s, s.regenerated[1], updated)


def merged_export(s: Subject) -> Measured:
    return exported(s, Reference(s.spec, s.merged))


def exported(s: Subject, export: Reference) -> Measured:
    return largest(export.log_probs(s.samples), s.adapted.model.log_probs(s.samples))


def memory(s: Subject) -> Measured:
    errors = list[float]()
    for trainer in (s.adapted, s.whole):
        arch = Architecture(trainer.policy, torch.float32)
        parts, _ = estimate.learner_memory(arch, trainer.policy, trainer.learner)
        weights = sum(p.nbytes for p in trainer.model.network.parameters())
        moments = sum(m.nbytes for name, m in trainer.model.zero.moments().items() if name != "step")
        errors.append(abs(parts["weights"] + parts.get("adapters", 0) - weights) / weights)
        errors.append(abs(parts["optimizer"] - moments) / moments)
    return Measured(max(errors), "weights, adapters and optimizer, in LoRA and full training")


CHECKS: tuple[tuple[str, Callable[[Subject], Measured], float, str], ...] = (
    ("image tokens", image_tokens, 0, "no job can use pictures: their tokens and features differ in number"),
    ("prompt", prompt, 0, "the model reads another chat format than it was trained on"),
    ("coordinates", coordinates, 1e-6, "calls look at the wrong place"),
    ("forward pass", forward, 1e-4, "training optimises another distribution than the model's"),
    ("packing", packing, 1e-4, "samples of a row read each other: training is wrong"),
    ("LoRA gradients", lora_gradients, 1e-4, "adapters lack layers, or learn something else"),
    ("full gradients", full_gradients, 1e-4, "policy.full=true learns something else"),
    ("banned tokens", banned, 0, "a sampled image token without a picture ends its episode"),
    (
        "engine",
        lambda s: compare(s, s.generated[0], s.plain.model),
        1e-4,
        "rollouts come from another policy",
    ),
    (
        "engine, adapter",
        lambda s: compare(s, s.generated[1], s.adapted.model),
        1e-4,
        "the engine does not serve what the learner publishes",
    ),
    (
        "engine, merged",
        lambda s: compare(s, s.regenerated[0], s.adapted.model),
        1e-4,
        "the engine misreads what `pixelis export --merge` writes",
    ),
    ("vision cache", vision_cache, 1e-4, "after an update of the vision tower pictures keep old features"),
    ("export, PEFT", lambda s: exported(s, s.peft), 1e-4, "`pixelis export` writes another policy"),
    ("export, merged", merged_export, 1e-4, "`pixelis export --merge` writes another policy"),
    ("memory", memory, 0.01, "`--dry-run` promises memory to which runs do not keep"),
)
"""Name, measure, limit, and what fails with it. Causes come first: the first failure explains the others."""


class Result(NamedTuple):
    """state: ok, failed or `not checked`; difference: None if there is none to measure."""

    name: str
    state: str
    difference: float | None
    limit: float
    detail: str
    consequence: str


def certify(subject: Subject) -> Iterator[Result]:
    """Run the checks. What a check raises is its failure."""
    for name, measure, limit, consequence in CHECKS:
        try:
            value, detail, own_limit = measure(subject)
            limit = limit if own_limit is None else own_limit
            state, difference = "ok" if value <= limit else "failed", value if math.isfinite(value) else None
        except NotChecked as reason:
            state, difference, detail = "not checked", None, str(reason)
        except Exception as error:
            state, difference, detail = "failed", None, f"{type(error).__name__}: {error}"
        yield Result(name, state, difference, limit, detail, consequence)

"""How much do corrupted pictures and faulty operations cost a policy?

    python -m benchmarks.robustness --adapter runs/quickstart/rft/checkpoints/step_00000040 [--shares 10 30
    100]
        [--questions 200] [--dir runs/robustness] [key=value ...]

Asks the same held-out questions of the card world about clean pictures and about each of ImageNet-C's fifteen
corruptions and occlusion at five severities, about pictures that FGSM has moved against this policy, with typing
errors in the question, and with operations of which a share fails, is slow, never returns or shows another place and says nothing
(`benchmarks.faulty_zoom`). Prints the accuracies, and by kind the difference to the clean pictures, paired by
question, with its 95 % interval. Writes DIR/robustness.json and the heat map DIR/robustness.png. Sets that DIR
has already are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import faulty_zoom
from benchmarks.harness import keep_arguments, machine, parse_args
from pixelis.actors import placement
from pixelis.config import Config, absolute, load
from pixelis.datasets.card_questions import read_demonstrations
from pixelis.datasets.corruptions import KINDS, SEVERITIES
from pixelis.datasets.demonstrations import Player
from pixelis.datasets.media import open_media
from pixelis.evaluation.statistics import compare
from pixelis.families.spec import ModelSpec
from pixelis.jobs import evaluate
from pixelis.jobs.driver import driver, run_folder
from pixelis.policy.adapters import load_adapter
from pixelis.policy.model_path import resolve
from pixelis.policy.samples import from_trajectory
from pixelis.policy.train_step import Trainer
from pixelis.records import Question, Trajectory

SOURCE = "cards:?split=test&seed=7"
CLEAN = "clean"
LATE_SHARE = 10
"""Percentage of late calls: each of them ends a process."""

STEPS = (2, 4, 8, 16)
"""How far FGSM moves each value of 0..255."""
TYPOS = (2, 5, 10)
"""Percentages of letters."""

Scores = dict[str, float]
"""Accuracy by question."""


class Results:
    """The scores of each set, kept in a file."""

    def __init__(self, path: Path):
        self.path = path
        self.scores: dict[str, Scores] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the sets that have not been measured."""
        return [name for name in names if name not in self.scores]

    def add(self, name: str, scores: Scores) -> None:
        """Keep the scores of a set."""
        self.scores[name] = scores
        self.path.write_text(json.dumps(self.scores), encoding="utf-8")

    def accuracy(self, name: str) -> float:
        """Mean accuracy of a set."""
        return statistics.fmean(self.scores[name].values())

    def difference(self, names: Iterable[str]) -> dict[str, Any]:
        """The mean over sets minus the clean one, in pairs."""
        sets = [self.scores[name] for name in names]
        means = {
            question: statistics.fmean(scores[question] for scores in sets) for question in self.scores[CLEAN]
        }
        result = compare(means, self.scores[CLEAN])
        assert result is not None
        return {
            "accuracy": statistics.fmean(means.values()),
            "difference": result["mean"],
            "ci95": result["ci95"],
            "p": result["p"],
        }


def measure(config: Config, sets: Mapping[str, str], results: Results) -> None:
    """Measure the missing ones of the sets, sources by name, with one cluster and the same actors."""
    if not (missing := results.missing(sets)):
        return
    with run_folder(config), placement.placed(config, learner=False, initial=config.policy.adapter) as actors:
        for name in missing:
            results.add(name, evaluate.measure(config, actors, name, 0, source=sets[name]).correct)
            print(f"{name:24} {results.accuracy(name):.3f}", flush=True)


def moved_sets(config: Config, steps: Iterable[int], typos: Iterable[int], folder: Path) -> dict[str, str]:
    """Files of the questions with pictures that are moved against the policy or at random, or with typing errors.

    FGSM (Goodfellow et al., "Explaining and Harnessing Adversarial Examples", ICLR 2015): a step along the sign
    of the gradient of the loss, which is here that of zooming in on the card and reading it. The gradient is
    that of the first view; the step is enlarged to the full picture, so that a zoom shows it too.
    """
    assert config.policy.adapter is not None
    rows: dict[str, list[str]] = defaultdict(list)
    trainer = Trainer(
        config.policy, config.learner, total_steps=1, adapter=load_adapter(Path(config.policy.adapter))
    )
    player, rng = Player(config, str(resolve(config.policy.model))), np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for demonstration in read_demonstrations(SOURCE, config.evaluate.questions, 0, direct_share=0.0):
        picture = open_media(demonstration.media[0], config.toolbox)
        assert isinstance(picture, np.ndarray)
        gradient = first_view_gradient(trainer, *player.play(demonstration))
        question = Question(**{name: getattr(demonstration, name) for name in Question.model_fields})
        rows[CLEAN].append(question.model_dump_json())
        directions = {"fgsm": np.sign(gradient), "random": rng.choice([-1.0, 1.0], gradient.shape)}
        for (kind, direction), step in itertools.product(directions.items(), steps):
            factors = [side // small for side, small in zip(picture.shape[:2], direction.shape, strict=False)]
            moved = picture + step * direction.repeat(factors[0], 0).repeat(factors[1], 1)
            path = folder / f"{demonstration.id}-{kind}-{step}.png"
            Image.fromarray(np.clip(moved, 0, 255).astype(np.uint8)).save(path, compress_level=1)
            media = [question.media[0].model_copy(update={"uri": str(path)})]
            row = question.model_copy(update={"media": media})
            rows[f"{kind}-{step}"].append(row.model_dump_json())
    trainer.close()
    files = {name: folder / f"{name}.jsonl" for name in rows}
    for name, path in files.items():
        path.write_text("\n".join(rows[name]), encoding="utf-8")
    clean = files.pop(CLEAN)
    sets = {name: str(path) for name, path in files.items()}
    return sets | {f"typos-{percent}": f"{clean}?typos={percent / 100}" for percent in typos}


def first_view_gradient(trainer: Trainer, trajectory: Trajectory, views: list[np.ndarray]) -> np.ndarray:
    """Gradient of the loss of an episode by the values of its first view [h, w, 3]."""
    model, patches = trainer.model, list[torch.Tensor]()

    def watch(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        patches.append(args[0].requires_grad_())
        return (patches[0], *args[1:])

    batch = model.collate([from_trajectory(trajectory, views, advantage=1.0)]).to(model.device)
    hook = model.network.model.visual.register_forward_pre_hook(watch)
    log_probs, *_ = model.zero.engine.module(batch, None)
    hook.remove()
    (gradient,) = torch.autograd.grad(-log_probs.sum(), patches)
    return unpatchify(gradient, views[0].shape, model.spec).cpu().numpy()


def unpatchify(patches: torch.Tensor, shape: tuple[int, ...], spec: ModelSpec) -> torch.Tensor:
    """Values of the first view from those of its patches: the inverse of `families.vision.patchify`."""
    patch, merge = spec.patch, spec.merge
    rows, columns = shape[0] // patch, shape[1] // patch
    blocks = (rows // merge, columns // merge, merge, merge, 3, spec.temporal, patch, patch)
    values = patches[: rows * columns].view(blocks).sum(5)
    return values.permute(0, 2, 5, 1, 3, 6, 4).reshape(shape)


def heat_map(results: Results, severities: list[int], path: Path) -> None:
    """A picture of the accuracy by kind and severity."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    values = [
        [results.accuracy(CLEAN), *(results.accuracy(f"{kind}-{severity}") for severity in severities)]
        for kind in KINDS
    ]
    figure, axes = pyplot.subplots(figsize=(5.2, 5.4), layout="constrained")
    axes.imshow(values, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(severities) + 1), [CLEAN, *map(str, severities)])
    axes.set_yticks(range(len(KINDS)), [kind.replace("_", " ") for kind in KINDS])
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            axes.text(column, row, f"{value:.2f}".removeprefix("0"), ha="center", va="center", fontsize=8)
    axes.set_xlabel("severity")
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    figure.savefig(path, dpi=110)


def lines(
    results: Results, severities: list[int], steps: Iterable[int], others: Iterable[str]
) -> Iterator[str]:
    """The tables in Markdown."""
    yield f"| | {' | '.join(map(str, severities))} | mean | minus clean {results.accuracy(CLEAN):.3f} |"
    yield f"|---|{'---|' * (len(severities) + 2)}"
    for kind in KINDS:
        names = [f"{kind}-{severity}" for severity in severities]
        cells = " | ".join(f"{results.accuracy(name):.3f}" for name in names)
        yield f"| {kind} | {cells} | {_cells(results.difference(names))} |"
    yield (
        f"| all | {'| ' * len(severities)}| "
        f"{_cells(results.difference(f'{k}-{s}' for k in KINDS for s in severities))} |"
    )
    yield "\n| values moved by | FGSM | minus clean | at random | minus clean |\n|---|---|---|---|---|"
    for step in steps:
        pair = [_cells(results.difference([f"{kind}-{step}"])) for kind in ("fgsm", "random")]
        yield f"| {step} | {' | '.join(pair)} |"
    yield "\n| typos, zoom_in | accuracy | minus clean |\n|---|---|---|"
    for name in others:
        yield f"| {name} | {_cells(results.difference([name]))} |"


def _cells(part: Mapping[str, Any]) -> str:
    low, high = part["ci95"]
    return f"{part['accuracy']:.3f} | {part['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapter", type=Path, required=True, help="checkpoint of the policy")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--severities", type=int, nargs="+", default=list(SEVERITIES))
    parser.add_argument("--steps", type=int, nargs="*", default=list(STEPS), help="of FGSM, of 255")
    parser.add_argument(
        "--shares", type=int, nargs="+", default=list(faulty_zoom.SHARES), help="percentages of faulty calls"
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/robustness"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the configuration")
    args = parse_args(parser, questions=2, severities=[5], steps=[4], shares=[])
    folder = args.dir.absolute()
    keep_arguments(folder, args, "severities", "steps", "shares")
    shared = [f"policy.adapter={args.adapter}", f"evaluate.questions={args.questions}", *args.overrides]
    results = Results(folder / "scores.json")
    corrupted = {
        f"{kind}-{s}": f"{SOURCE}&corruption={kind}&severity={s}" for s in args.severities for kind in KINDS
    }
    faults = [f"{kind}{percent}" for kind in ("Failing", "Slow", "Lying") for percent in args.shares] + [
        f"Late{LATE_SHARE}"
    ]
    moved = [f"{kind}-{step}" for kind in ("fgsm", "random") for step in args.steps]
    typos = [f"typos-{percent}" for percent in TYPOS]
    with driver("robustness"):
        config = absolute(load("configs/nano/evaluate.yaml", [*shared, f"run.dir={folder / 'corrupted'}"]))
        measure(config, {CLEAN: SOURCE, **corrupted}, results)
        if results.missing([*moved, *typos]):
            sets = moved_sets(config, args.steps, TYPOS, folder / "moved")
            measure(config.changed({"run.dir": f"{folder}/measured"}), sets, results)
        for name in faults:
            own = [f"run.dir={folder / name}", f"toolbox.operations=[benchmarks.faulty_zoom:{name}]"]
            own += ["toolbox.timeout_s=2"] if name.startswith("Late") else []
            measure(absolute(load("configs/nano/evaluate.yaml", [*shared, *own])), {name: SOURCE}, results)
    severities = sorted(args.severities)
    heat_map(results, severities, folder / "robustness.png")
    print("\n".join(lines(results, severities, args.steps, typos + faults)))
    kinds = {kind: results.difference(f"{kind}-{severity}" for severity in severities) for kind in KINDS}
    kinds["all"] = results.difference(corrupted)
    others = {"moved": moved, "typos": typos, "faults": faults}
    summary = {
        "clean": results.accuracy(CLEAN),
        "machine": machine(),
        "sets": {name: results.accuracy(name) for name in corrupted},
        "kinds": kinds,
    }
    summary |= {name: {n: results.difference([n]) for n in names} for name, names in others.items()}
    (folder / "robustness.json").write_text(json.dumps(summary), encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

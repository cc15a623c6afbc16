"""How much do corrupted pictures and faulty operations cost a policy?

    python -m benchmarks.robustness --adapter runs/quickstart/rft/checkpoints/step_00000040 [--shares 10 30
    100]
        [--questions 200] [--dir runs/robustness] [key=value ...]

Asks the same held-out questions of the card world about clean pictures and about each of ImageNet-C's fifteen
corruptions and occlusion at five severities, and with operations of which a share fails, is slow, never returns or shows
another place and says nothing (`benchmarks.faulty_zoom`). Prints the accuracies, and by kind the difference
to the clean pictures, paired by question, with its 95 % interval. Writes DIR/robustness.json and the heat map
DIR/robustness.png. Sets that DIR has already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import faulty_zoom
from benchmarks.harness import keep_arguments, machine, parse_args
from pixelis.actors import placement
from pixelis.config import Config, absolute, load
from pixelis.datasets.corruptions import KINDS, SEVERITIES
from pixelis.evaluation.statistics import compare
from pixelis.jobs import evaluate
from pixelis.jobs.driver import driver, run_folder

SOURCE = "cards:?split=test&seed=7"
CLEAN = "clean"
LATE_SHARE = 10
"""Percentage of late calls: each of them ends a process."""

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


def lines(results: Results, severities: list[int], faults: Iterable[str]) -> Iterator[str]:
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
    yield "\n| zoom_in | accuracy | minus clean |\n|---|---|---|"
    for name in faults:
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
    parser.add_argument(
        "--shares", type=int, nargs="+", default=list(faulty_zoom.SHARES), help="percentages of faulty calls"
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/robustness"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the configuration")
    args = parse_args(parser, questions=2, severities=[5], shares=[])
    folder = args.dir.absolute()
    keep_arguments(folder, args, "severities", "shares")
    shared = [f"policy.adapter={args.adapter}", f"evaluate.questions={args.questions}", *args.overrides]
    results = Results(folder / "scores.json")
    corrupted = {
        f"{kind}-{s}": f"{SOURCE}&corruption={kind}&severity={s}" for s in args.severities for kind in KINDS
    }
    faults = [f"{kind}{percent}" for kind in ("Failing", "Slow", "Lying") for percent in args.shares] + [
        f"Late{LATE_SHARE}"
    ]
    with driver("robustness"):
        config = absolute(load("configs/nano/evaluate.yaml", [*shared, f"run.dir={folder / 'corrupted'}"]))
        measure(config, {CLEAN: SOURCE, **corrupted}, results)
        for name in faults:
            own = [f"run.dir={folder / name}", f"toolbox.operations=[benchmarks.faulty_zoom:{name}]"]
            own += ["toolbox.timeout_s=2"] if name.startswith("Late") else []
            measure(absolute(load("configs/nano/evaluate.yaml", [*shared, *own])), {name: SOURCE}, results)
    severities = sorted(args.severities)
    heat_map(results, severities, folder / "robustness.png")
    print("\n".join(lines(results, severities, faults)))
    kinds = {kind: results.difference(f"{kind}-{severity}" for severity in severities) for kind in KINDS}
    kinds["all"] = results.difference(corrupted)
    summary = {
        "clean": results.accuracy(CLEAN),
        "sets": {name: results.accuracy(name) for name in corrupted},
        "kinds": kinds,
    }
    summary |= {"machine": machine(), "faults": {name: results.difference([name]) for name in faults}}
    (folder / "robustness.json").write_text(json.dumps(summary), encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

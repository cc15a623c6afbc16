"""The report of an ablation: report.json, a table, and a page with learning curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pixelis.config.ablation import AblationConfig
from pixelis.errors import DataFailure
from pixelis.evaluation.ablation import SCORES, compare, detectable, mean_curve, summarise_arms, tabulate
from pixelis.evaluation.statistics import RESAMPLES
from pixelis.files import write_json
from pixelis.jobs.driver import hardware
from pixelis.telemetry import events, lineage
from pixelis.telemetry.html.ablation_page import SHARES, render_ablation
from pixelis.telemetry.html.render import write_page

CURVES = {
    "sft": ("policy/loss", "evaluate/loss", "evaluate/accuracy"),
    "rft": ("train/accuracy", "rollout/rapr", "rollout/turns", "reward/total", "evaluate/accuracy"),
    "ttrl": ("vote/majority_ratio", "train/accuracy", "rollout/rapr", "reward/total"),
    "evaluate": (),
}
"""Stage -> the metrics of its steps that are drawn, as far as a run has them."""


def write(
    ablation: AblationConfig, results: Sequence[Mapping[str, Any]], failures: Mapping[str, str]
) -> dict[str, Any]:
    """Write and print the report of finished trials; returns its content. DataFailure if too little is finished."""
    by_arm = {arm: {r["seed"]: r for r in results if r["arm"] == arm} for arm in ablation.arms}
    if not by_arm[ablation.reference]:
        raise DataFailure(f"no trial of the reference {ablation.reference} is finished", fix="run again")
    try:
        scores = tabulate(
            {arm: {s: r["scores"][ablation.metric] for s, r in runs.items()} for arm, runs in by_arm.items()}
        )
    except ValueError as error:
        raise DataFailure(
            f"{ablation.metric}: {error}", fix="raise evaluate.questions, or finish more trials"
        ) from None
    arms = summarise_arms(scores)
    for row in arms:
        runs = [by_arm[row["arm"]][seed] for seed in scores.seeds]
        row["metrics"] = {
            name: statistics.fmean(values)
            if (values := [v for run in runs for v in run["scores"][name].values()])
            else None
            for name in SCORES
        }
        row["seconds"] = statistics.fmean(run["seconds"] for run in runs)
    used = {(arm, seed) for arm in scores.arms for seed in scores.seeds}
    left_out = [
        f"{arm}, seed {seed}" for arm in ablation.arms for seed in ablation.seeds if (arm, seed) not in used
    ]
    report = {
        "recipe": ablation.recipe,
        "stage": ablation.stage,
        "metric": ablation.metric,
        "reference": ablation.reference,
        "overrides": {"(all)": ablation.overrides, **ablation.arms},
        "seeds": list(scores.seeds),
        "questions": len(scores.questions),
        "arms": arms,
        "comparisons": compare(scores, ablation.reference),
        "detectable": detectable(scores),
        "permutations": RESAMPLES,
        "left_out": left_out,
        "failures": dict(failures),
        "curves": curves(ablation, scores.arms, scores.seeds),
        "hardware": hardware(),
        "code": lineage.code().model_dump(),
    }
    folder = Path(ablation.dir)
    write_json(folder / "report.json", report)
    page = write_page(folder / "report.html", render_ablation(report, folder.resolve().name, limits(report)))
    print(table(report))
    print(f"\nreport  {folder / 'report.json'}\npage    {page}")
    return report


def curves(
    ablation: AblationConfig, arms: Sequence[str], seeds: Sequence[int]
) -> dict[str, dict[str, list[Any]]]:
    """Metric -> arm -> `mean_curve` over the seeds, for the metrics that the runs have."""
    drawn = {}
    for metric in ablation.curves or CURVES[ablation.stage]:
        kind = "step/sft" if ablation.stage == "sft" else "step/policy"
        if ablation.stage != "sft" and metric.startswith("evaluate/"):
            kind = "evaluation"  # it runs beside training, and joins the metrics of a later step
        by_arm = {}
        for arm in arms:
            runs = [events.read(Path(ablation.dir) / arm / f"seed_{seed}", kind) for seed in seeds]
            by_arm[arm] = mean_curve(
                [
                    {row["step"]: v for row in run if (v := events.as_number(row.get(metric))) is not None}
                    for run in runs
                ]
            )
        if by_arm := {arm: curve for arm, curve in by_arm.items() if curve}:
            drawn[metric] = by_arm
    return drawn


def table(report: Mapping[str, Any]) -> str:
    compared = {row["arm"]: row for row in report["comparisons"]}
    width = max(len(row["arm"]) for row in report["arms"])
    interval = f"{'95 %':16}"
    lines = [
        f"{'arm':{width}}  {report['metric']:>8}  {interval}  difference  {interval}  p (Holm)  over seeds"
    ]
    for row in report["arms"]:
        line = f"{row['arm']:{width}}  {row['mean']:8.3f}  {_interval(row['ci95'])}"
        if (against := compared.get(row["arm"])) is not None:
            seeds = "one seed" if against["ci95_seeds"] is None else f"{against['p_seeds_holm']:.3f}"
            line += f"  {against['difference']:+10.3f}  {_interval(against['ci95'])}"
            line += f"  {against['p_holm']:8.4f}  {seeds:>10}  {against['verdict']}"
        lines.append(line)
    return "\n".join([*lines, "", limits(report)])


def limits(report: Mapping[str, Any]) -> str:
    seeds, size = len(report["seeds"]), report["detectable"]
    text = f"{report['questions']} questions, {seeds} seed{'s' * (seeds != 1)}. "
    if size is None:
        text += "One seed says nothing about other runs of the same arms."
    elif size == 0:
        text += "The differences are the same for every seed."
    else:
        shown = f"{100 * size:.1f} points" if report["metric"] in SHARES else f"{size:.3g}"
        text += f"A true difference under {shown} is likely to be missed (power 80 %)."
    return text + (f" Left out: {'; '.join(report['left_out'])}." if report["left_out"] else "")


def _interval(ends: Sequence[float]) -> str:
    return f"[{ends[0]:.3f}, {ends[1]:.3f}]".ljust(16)

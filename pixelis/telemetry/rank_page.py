"""The page of a rank file: the need of each kind of layer, and the rank that each layer got."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pixelis.telemetry import charts
from pixelis.telemetry.style import STYLE
from pixelis.telemetry.words import number, safe

if TYPE_CHECKING:
    from pixelis.policy.ranks import RankFile

_INDEX = re.compile(r"\.layers\.(\d+)\.")


def page(file: RankFile) -> str:
    """HTML with plots, which needs no network and runs no script."""
    about, layers = file.analysis_metadata, file.layer_metadata
    kinds: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in layers.values():
        kinds[row["type"]].append(row)
    facts = {
        "layers with an adapter": len(file.layer_ranks),
        "layers that did not change": len(file.skipped),
        "numbers in adapters": f"{file.total_parameters:,}",
        "numbers in these layers for one of them": f"{file.compression_ratio:.1f}",
        "share of the change's energy that fits": number(about.get("energy_retained", 0.0), share=True),
        "layers whose computed values did not reach it": len(about.get("not_reached", [])),
    }
    spectra = {kind: _mean([_relative(row["singular_values"]) for row in rows]) for kind, rows in kinds.items()}
    energies = {kind: _mean([_cumulative(row) for row in rows]) for kind, rows in kinds.items()}
    ranks: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, rank in file.layer_ranks.items():
        index = _INDEX.search(f".{name}.")
        ranks[name.rsplit(".", 1)[-1]].append((float(index[1]) if index else 0.0, float(rank)))
    rows = [
        f"<tr><td>{safe(name)}</td><td>{row['rank']}</td><td>{row['energy_rank'] or 'not reached'}</td>"
        f"<td>{number(row['energy_retained'], share=True)}</td><td>{'' if (d := row['decay_rate']) is None else number(d)}</td>"
        f"<td>{row['compression_ratio']:.1f}</td></tr>"
        for name, row in layers.items()
    ]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>LoRA ranks</title><style>{STYLE}</style>",
        "<main><h1>LoRA ranks</h1>",
        "<table>" + "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts.items()) + "</table>",
        _section("Singular values, the first is 1; mean of the layers of a name", spectra, "number", share=True),
        _section("Energy kept by a rank; mean of the layers of a name", energies, "rank", share=True),
        _section("Rank of each layer", dict(ranks), "layer"),
        "<h2>Layers</h2><div class=wide><table><thead><tr><th>layer<th>rank<th>rank for the energy<th>energy kept"
        f"<th>decay<th>compression</thead><tbody>{''.join(rows)}</tbody></table></div></main></html>",
    ]
    return "\n".join(parts)


def _section(title: str, series: Mapping[str, charts.Series], label: str, share: bool = False) -> str:
    drawn = charts.line_chart(series, share=share, x_label=label)
    return f"<h2>{title}</h2>{drawn}{charts.legend(series, share=share)}"


def _relative(values: list[float]) -> list[float]:
    return [value / values[0] for value in values]


def _cumulative(row: dict[str, Any]) -> list[float]:
    whole, kept, out = row["frobenius_norm"] ** 2, 0.0, []
    for value in row["singular_values"]:
        kept += value * value
        out.append(min(1.0, kept / whole))
    return out


def _mean(curves: list[list[float]]) -> list[tuple[float, float]]:
    return [
        (float(place), statistics.fmean(curve[place - 1] for curve in curves if len(curve) >= place))
        for place in range(1, max(map(len, curves)) + 1)
    ]

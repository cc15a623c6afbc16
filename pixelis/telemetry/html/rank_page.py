"""The page of a rank file: the singular values of each type of layer, and the rank that each layer got."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pixelis.telemetry.html.render import render

if TYPE_CHECKING:
    from pixelis.policy.ranks import RankFile

LAYER_INDEX = re.compile(r"\.layers\.(\d+)\.")


def render_ranks(file: RankFile) -> str:
    layers: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for layer in file.layer_metadata.values():
        layers[layer["type"]].append(layer)
    ranks: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, rank in file.layer_ranks.items():
        index = LAYER_INDEX.search(f".{name}.")
        ranks[name.rsplit(".", 1)[-1]].append((float(index[1]) if index else 0.0, float(rank)))
    spectra, energies = {}, {}
    for kind, group in layers.items():
        values = [layer["singular_values"] for layer in group]
        spectra[kind] = _mean([[value / curve[0] for value in curve] for curve in values])
        # Share of the energy that each rank retains.
        retained = [accumulate(value * value for value in curve) for curve in values]
        totals = [layer["frobenius_norm"] ** 2 for layer in group]
        energies[kind] = _mean(
            [[min(1.0, e / total) for e in curve] for curve, total in zip(retained, totals, strict=True)]
        )
    return render(
        "ranks.html",
        title="LoRA ranks",
        file=file,
        spectra=spectra,
        energies=energies,
        ranks=dict(ranks),
    )


def _mean(curves: list[list[float]]) -> list[tuple[float, float]]:
    return [
        (float(place), statistics.fmean(curve[place - 1] for curve in curves if len(curve) >= place))
        for place in range(1, max(map(len, curves)) + 1)
    ]

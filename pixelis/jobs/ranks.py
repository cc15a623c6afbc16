"""Find a LoRA rank for each layer from the singular values of a full fine-tune's weight changes.

    pixelis sft policy.full=true run.dir=runs/full ...          a short full-parameter run
    pixelis ranks ranks.tuned=runs/full run.dir=runs/ranks      its ranks
    pixelis sft policy.lora.ranks=runs/ranks/ranks.json ...     adapters of these ranks, in rft and serve too

Writes ranks.json and ranks.html (plots) to run.dir. Re-running continues with the remaining layers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from pixelis.config import Config
from pixelis.errors import BadConfig, BadInput
from pixelis.families.spec import model_family
from pixelis.files import write_json
from pixelis.jobs.driver import job, run_folder
from pixelis.policy import checkpoint
from pixelis.policy.adapters import load_header
from pixelis.policy.architecture import Architecture
from pixelis.policy.export import BaseFile
from pixelis.policy.model import default_device
from pixelis.policy.model_path import fingerprint, resolve
from pixelis.policy.rank_choice import WeightChange, choose_ranks, weight_change
from pixelis.policy.ranks import RankFile
from pixelis.telemetry import lineage
from pixelis.telemetry.html.rank_page import render_ranks
from pixelis.telemetry.html.render import write_page
from pixelis.telemetry.progress import Progress


def tuned_file(config: Config) -> Path:
    """File or folder with the tuned weights: `ranks.tuned` is a run, a checkpoint, or a Hugging Face folder.

    BadConfig if it is not set, MissingFile without weights, BadInput for adapters or another base model.
    """
    if not config.ranks.tuned:
        raise BadConfig("ranks.tuned names no model", fix="set it to a run with policy.full=true")
    folder = Path(config.ranks.tuned)
    if (folder / "checkpoints").is_dir():
        folder = checkpoint.latest(folder) or folder
    if not (folder / checkpoint.MANIFEST).is_file():
        return resolve(str(folder))
    files, header = load_header(folder)
    if header["kind"] != "full":
        raise BadInput(f"{folder} has adapters, not a full fine-tune", fix="train it with policy.full=true")
    if header["base_sha256"] != fingerprint(resolve(config.policy.model)):
        raise BadInput(f"{folder} was not tuned from {config.policy.model}", fix="correct policy.model")
    if len(files) > 1:
        fix = f"set ranks.tuned to the folder that `pixelis export {folder} OUT --merge` writes"
        raise BadInput(f"the weights in {folder} are divided among {len(files)} workers", fix=fix)
    return files[0]


def analyse(config: Config, folder: Path) -> RankFile:
    """Decompose every layer of `policy.lora.targets` and choose ranks; finished layers are in changes.jsonl."""
    model, device = resolve(config.policy.model), default_device()
    family = model_family(model, config.policy.family)
    files = BaseFile(model, family), BaseFile(tuned_file(config), family)
    base_sha256 = fingerprint(model)
    layers = list(Architecture(config.policy).shapes(config.policy.lora.targets))
    record = lineage.read(folder)
    settings = [
        config.ranks.model_dump(mode="json"),
        config.run.seed,
        [item.sha256 for item in record.inputs] if record else [],
    ]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    file, changes = folder / "changes.jsonl", dict[str, WeightChange]()
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []:
        if line.endswith("\n") and (row := json.loads(line)).pop("key") == key:  # of an interrupted run
            layer = row.pop("layer")
            changes[layer] = WeightChange(**row)
    with (
        file.open("w", encoding="utf-8") as out,
        Progress("ranks", len(layers), start=len(changes), enabled=config.telemetry.progress) as progress,
    ):
        for done, layer in enumerate(sorted(layers, key=lambda name: name not in changes), 1):
            if layer not in changes:
                base, tuned = (file.read(f"{layer}.weight").to(device) for file in files)
                changes[layer] = weight_change(base, tuned, config.run.seed)
                progress.update(done, layer=layer)
            out.write(json.dumps({"key": key, "layer": layer, **asdict(changes[layer])}) + "\n")
            out.flush()
    about = {"base": model.name, "base_sha256": base_sha256, "seed": config.run.seed}
    return choose_ranks({layer: changes[layer] for layer in layers}, config.ranks, about)


def _check(config: Config) -> None:
    file = tuned_file(config)
    layers = Architecture(config.policy).shapes(config.policy.lora.targets)
    print(f"{len(layers)} layers of {file}", file=sys.stderr)


def run(config: Config) -> tuple[Path, RankFile]:
    tuned = tuned_file(config)
    with run_folder(config, sources={"tuned": str(tuned.parent if tuned.is_file() else tuned)}) as folder:
        result = analyse(config, folder)
        write_json(folder / "ranks.json", result.model_dump(mode="json"))
        lineage.record_in_run(folder / "ranks.json", "ranks")
        write_page(folder / "ranks.html", render_ranks(result))
    return folder / "ranks.json", result


def main() -> None:
    with job("ranks", __doc__, _check) as config:
        path, result = run(config)
        ranks = result.layer_ranks.values()
        retained = result.analysis_metadata["energy_retained"]
        print(f"{len(ranks)} layers, ranks {min(ranks)} to {max(ranks)}, {len(result.skipped)} unchanged")
        print(f"{result.total_parameters:,} adapter parameters hold {retained:.1%} of the change's energy")
        print(f"rank file: {path}\nplots:     {path.with_suffix('.html')}")


if __name__ == "__main__":
    main()

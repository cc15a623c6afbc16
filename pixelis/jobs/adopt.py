"""Certify a model: check by numbers that Pixelis computes what the model's own code computes.

usage: pixelis adopt MODEL [--family F] [--engine hf|vllm] [--dtype bfloat16] [--coordinates KIND] [--out FOLDER]

MODEL is a folder or a model on the Hugging Face Hub. Without weights, or if memory does not hold them several
times, a small random model of the same architecture is checked. Exits with 1 if a check failed.

  --family F          family of the model, as policy.family
  --engine NAME       engine to compare with the learner; default: hf
  --dtype TYPE        the engine's type, where it computes in bfloat16 only; default: float32
  --coordinates KIND  scale of places that the model was trained to write: thousand, pixels or unit; default:
                      that of published models of its type
  --out FOLDER        for certificate.html and certificate.json; default: runs/adopt/NAME
"""

from __future__ import annotations

import math
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from pixelis.config import load
from pixelis.families import FAMILIES
from pixelis.families.family import Family
from pixelis.families.spec import find_family, load_tokenizer, model_config
from pixelis.files import write_json
from pixelis.jobs import tiny_model
from pixelis.jobs.command import command
from pixelis.policy.model_path import resolve
from pixelis.telemetry.html.render import render, write_page

COPIES = 16
"""Memory of the checks in sizes of bfloat16 weights: learners in float32, one with AdamW's state of all of them."""
SETTINGS = ("preprocessor_config.json", "processor_config.json", "chat_template.jinja")
HEADS, LAYERS = ("num_attention_heads", "num_heads"), ("num_hidden_layers", "depth", "num_layers")
SMALL = {"intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
SMALL |= {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}


def prepare(folder: Path, family: str | None, target: Path) -> tuple[Path, dict[str, str]]:
    raw = model_config(folder, family)
    parts = dict.fromkeys(("configuration", "tokenizer", "chat template", "weights"), "original")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size and COPIES * size < psutil.virtual_memory().available:
        return folder, parts
    parts["weights"] = "random"
    name = family or raw["model_type"]
    own = find_family(name)
    if type(own).tiny is Family.tiny:
        from pixelis.policy.export import copy_settings

        copy_settings(folder, target)
        shrunk(folder).save_pretrained(target)
        return target, parts | {"configuration": "original, made small"}
    parts["configuration"] = "the family's small one"
    if not any((folder / file).is_file() for file in ("tokenizer.json", "vocab.json")):
        tiny_model.make(target, name)
        return target, parts | {"tokenizer": "built", "chat template": "built"}
    patch = own.geometry(raw.get("vision_config") or {}).patch
    tiny_model.make(target, name, tokenizer=load_tokenizer(folder), patch=patch)
    for file in SETTINGS:
        if (folder / file).is_file():
            shutil.copyfile(folder / file, target / file)
    return target, parts


def shrunk(folder: Path) -> Any:
    """A random model of the structure in config.json, with few and narrow layers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    full = AutoConfig.from_pretrained(folder)
    values = shrink(full.to_dict())
    if "out_hidden_size" in (values.get("vision_config") or {}):
        values["vision_config"]["out_hidden_size"] = values["text_config"]["hidden_size"]
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    return kind.from_config(type(full)(**values), dtype=torch.float32)


def shrink(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration with two heads of the same width, and the first layers up to one of each kind."""
    out = {key: shrink(value) if isinstance(value, dict) else value for key, value in values.items()}
    heads, layers = (next((k for k in names if values.get(k)), None) for names in (HEADS, LAYERS))
    if heads is None or layers is None:
        return out
    width = values.get("head_dim") or values["hidden_size"] // values[heads]
    out |= {key: size for key, size in SMALL.items() if values.get(key)}
    out |= {heads: 2, "hidden_size": 2 * width}
    if groups := values.get("num_key_value_heads"):
        out["num_key_value_heads"] = math.ceil(2 * groups / values[heads])
    kinds = values.get("layer_types") or [""]
    out[layers] = count = max(2, 1 + max(map(kinds.index, kinds)))
    for key, value in values.items():
        if isinstance(value, list) and len(value) == values[layers]:
            out[key] = value[:count]
        elif isinstance(value, list) and key.endswith("_indexes"):
            out[key] = [0]
    return out


def certificate(
    model: str, family: str | None = None, engine: str = "hf", dtype: str = "float32", coordinates: Any = None
) -> dict[str, Any]:
    """Check a model; returns its certificate. Arguments: the options of the command."""
    from transformers.utils import logging

    from pixelis.jobs.certificate import certify
    from pixelis.jobs.model_under_test import Subject

    logging.disable_progress_bar()
    original = resolve(model)
    model_type = model_config(original, family)["model_type"]
    if coordinates is None and model_type in FAMILIES:
        coordinates = FAMILIES[model_type].coordinates
    with tempfile.TemporaryDirectory(prefix="pixelis-adopt-") as scratch:
        folder, parts = prepare(original, family, Path(scratch, "model"))
        settings = [f"policy.model={folder}", f"policy.dtype={dtype}", f"engine.name={engine}"]
        settings += [f"policy.family={family}"] if family else []
        reads_images = find_family(family or model_type).reads_images
        settings += [f"policy.lora.vision_tower={reads_images}", "policy.lora.rank=4", "policy.lora.alpha=8"]
        settings += ["dialogue.max_context=4096", f"dialogue.input.max_pixels={2**21}"]
        # One row holds all samples, and nothing is clipped
        settings += ["learner.rows=1", "learner.row_tokens=65536", "learner.max_grad_norm=1e9"]
        config = load(None, settings)
        subject = Subject(config, coordinates, Path(scratch))
        checks = list(certify(subject))
    return {
        "model_type": model_type,
        "family": family or type(subject.spec.family).__module__.rpartition(".")[2],
        "engine": engine,
        "dtype": dtype,
        "parts": parts,
        "versions": {package: metadata.version(package) for package in ("torch", "transformers", "peft")},
        "failed": [check["name"] for check in checks if check["state"] == "failed"],
        "checks": checks,
    }


def show(row: dict[str, Any]) -> None:
    import rich
    from rich.table import Table

    table = Table(
        "check", "difference", "limit", "", title=f"{row['family']}, {row['engine']}, {row['dtype']}"
    )
    for check in row["checks"]:
        difference = "" if check["difference"] is None else f"{check['difference']:.2g}"
        table.add_row(check["name"], difference, f"{check['limit']:.2g}", check["state"])
    rich.print(table)
    print(", ".join(f"{part}: {source}" for part, source in row["parts"].items()))
    for check in row["checks"]:
        if check["state"] == "failed":
            print(f"failed: {check['name']}: {check['consequence']}\n    {check['detail']}")


def main() -> int:
    with command("adopt", __doc__) as parser:
        parser.add_argument("model")
        parser.add_argument("--family")
        parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
        parser.add_argument("--coordinates", choices=("thousand", "pixels", "unit"))
        parser.add_argument("--out", type=Path)
        options = vars(parser.parse_args())
        model = options["model"]
        out = options.pop("out") or Path("runs/adopt", Path(model).name)
        out.mkdir(parents=True, exist_ok=True)
        row = certificate(**options)
        show(row)
        write_json(out / "certificate.json", row)
        page = render("certificate.html", title=f"Certificate of {model}", row=row)
        print(f"certificate: {write_page(out / 'certificate.html', page)}")
    return int(bool(row["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())

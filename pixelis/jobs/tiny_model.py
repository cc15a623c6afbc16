"""Create a small random model folder offline, to try a recipe or a cluster.

usage: pixelis tiny-model FOLDER [--family NAME] [--seed N]

The folder has the file layout, architecture class and patch sizes of the real model, about 260,000 random
parameters and a byte-level tokenizer. Use it as policy.model=FOLDER. Its answers are random; training and
serving work as with real weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pixelis.errors import BadInput
from pixelis.families import DEFAULT, FAMILIES
from pixelis.families.family import CHATML
from pixelis.jobs.command import command

SIZES = {
    "hidden": 64,
    "heads": 2,
    "kv_heads": 1,
    "layers": 2,
    "feedforward": 96,
    "vision_hidden": 32,
    "vision_layers": 2,
}
POSITIONS = 32_768


def make(
    folder: Path, family: str = DEFAULT, seed: int = 0, tokenizer: Any = None, patch: int | None = None
) -> int:
    """Write the folder; returns the number of parameters. Raises BadInput if it is not empty.

    tokenizer, patch: another model's, None: a byte-level one, and the family's size of a patch.
    """
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise BadInput(f"{folder} exists", fix="name a new folder, or remove this one")
    from pixelis.families.spec import find_family
    from pixelis.nano.architecture import build, save
    from pixelis.nano.tokenizer import build_tokenizer

    own, is_built = find_family(family), tokenizer is None
    tokenizer = build_tokenizer(POSITIONS) if is_built else tokenizer
    model = build(tokenizer, family, seed, **SIZES, patch=patch or own.patch, positions=POSITIONS)
    if is_built and own.chat(tokenizer) != CHATML:
        tokenizer.chat_template = None  # it is ChatML's
    # Use the real model's prompts, with a system turn and tool schemas, which the embedded model omits.
    del model.config.pixelis_nano
    save(model, tokenizer, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    with command("tiny-model", __doc__) as parser:
        parser.add_argument("folder", type=Path)
        parser.add_argument("--family", choices=sorted(FAMILIES), default=DEFAULT)
        parser.add_argument("--seed", type=int, default=0)
        a = parser.parse_args()
        count = make(a.folder, a.family, a.seed)
        print(f"{a.folder}: {a.family}, {count:,} random parameters; use it with policy.model={a.folder}")


if __name__ == "__main__":
    main()

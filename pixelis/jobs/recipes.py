"""List the recipes that ship with Pixelis, or copy them to a folder where you can edit them.

usage: pixelis recipes                     list the recipes with their descriptions
       pixelis recipes copy DIR [NAME]     copy all recipes, or those whose path contains NAME, to DIR

Recipes run without a copy: `pixelis rft configs/nano/rft.yaml` uses the packaged file unless the current
folder has one.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

from pixelis.config.root import RECIPES, ablation_files, recipe_files
from pixelis.errors import BadConfig
from pixelis.jobs.command import command

_FOLDER = re.compile(r"^[^#\n]*?(?:\.\./|configs/)(\w+)/", re.MULTILINE)


def listing() -> str:
    lines = []
    for file in [*recipe_files(), *ablation_files()]:
        comment = " ".join(
            line.lstrip("# ")
            for line in file.read_text(encoding="utf-8").splitlines()
            if line.startswith("#")
        )
        lines.append(
            f"configs/{file.relative_to(RECIPES)!s:<40} {textwrap.shorten(comment, 90, placeholder=' ...')}"
        )
    return "\n".join(lines)


def copy(folder: Path, part: str = "") -> list[Path]:
    """Copy the recipes whose path contains ``part``, and the files they extend, to ``folder``. BadConfig."""
    names = [file.relative_to(RECIPES) for file in [*recipe_files(".yaml", ".json"), *ablation_files()]]
    if not any(part in str(name) for name in names):
        raise BadConfig(f"no recipe contains `{part}`", fix="`pixelis recipes` lists them")
    # Recipes extend each other across folders, so whole folders are copied.
    folders, pending = set[str](), {name.parts[0] for name in names if part in str(name)}
    while pending:
        folders |= pending
        texts = [(RECIPES / name).read_text(encoding="utf-8") for name in names if name.parts[0] in pending]
        pending = {folder for text in texts for folder in _FOLDER.findall(text)} - folders
    selected = [name for name in names if name.parts[0] in folders]
    for name in selected:
        target = folder / name
        if target.exists() and target.read_bytes() != (RECIPES / name).read_bytes():
            raise BadConfig(f"{target} exists and differs from the recipe", fix="choose another folder")
    for name in selected:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(RECIPES / name, folder / name)
    return [folder / name for name in selected]


def main() -> None:
    with command("recipes", __doc__) as parser:
        parser.add_argument("order", choices=("copy",), nargs="?")
        parser.add_argument("folder", metavar="DIR", nargs="?")
        parser.add_argument("name", metavar="NAME", nargs="?", default="")
        a = parser.parse_args()
        if a.order is None:
            print(listing())
        elif a.folder is None:
            raise BadConfig("copy needs a folder", fix="pixelis recipes copy DIR [NAME]")
        else:
            files = copy(Path(a.folder), a.name)
            print(f"copied {len(files)} files; run one with: pixelis rft {a.folder}/nano/rft.yaml")


if __name__ == "__main__":
    main()

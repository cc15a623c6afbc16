"""Let people compare two policies blindly, and analyse their ratings.

usage: pixelis rate page A B --out DIR [--count N] [--seed N]
       pixelis rate results DIR RATINGS.json [RATINGS.json ...]

A and B are files trajectories-NAME.jsonl of two evaluations of the same questions, made with
evaluate.images=true. `page` draws N questions (100), evenly over the operations that were used, and writes
DIR/page.html for the raters, which saves their answers as a file, and DIR/key.json, which says who is left and
right: keep it from them. `results` prints and writes to DIR/ratings.json preference and ratings with 95 %
intervals and corrected p values, the raters' agreement, hasty raters and disputed items.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image
from pydantic import ValidationError

from pixelis.actors.report import load_pictures
from pixelis.config import ToolboxConfig
from pixelis.errors import BadConfig, BadInput, MissingFile
from pixelis.evaluation.ratings import RatingFile, RatingKey, analyse, describe, draw_pairs
from pixelis.files import write_json
from pixelis.jobs.command import CommandParser, command
from pixelis.records import Group, Question, Trajectory
from pixelis.telemetry.html.episode import EpisodePage
from pixelis.telemetry.html.rating_page import RatingItem, render_ratings
from pixelis.telemetry.html.render import write_page

Content = TypeVar("Content", RatingKey, RatingFile)
MAX_RATING_BYTES = 50_000_000
AS_SAVED = "pass the file as the page saved it"


def main() -> None:
    with command("rate", __doc__) as parser:
        orders = parser.add_subparsers(dest="order", required=True, parser_class=CommandParser)
        page = orders.add_parser("page")
        page.add_argument("a", metavar="A", type=Path)
        page.add_argument("b", metavar="B", type=Path)
        page.add_argument("--out", metavar="DIR", type=Path, required=True)
        page.add_argument("--count", type=int, default=100)
        page.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
        results = orders.add_parser("results")
        results.add_argument("folder", metavar="DIR", type=Path)
        results.add_argument("ratings", metavar="RATINGS.json", type=Path, nargs="+")
        a = parser.parse_args()
        if a.order == "results":
            show_results(a.folder, a.ratings)
        elif a.count < 2:
            raise BadConfig(f"--count is a whole number from 2, not {a.count}", fix="pixelis rate --help")
        else:
            make_page(a.a, a.b, a.out, a.count, a.seed)


def make_page(a: Path, b: Path, out: Path, count: int, seed: int) -> None:
    if (out / "key.json").exists():
        raise BadConfig(f"{out} holds a page that may be with raters already", fix="name another --out")
    key, pairs = draw_pairs(_groups(a), _groups(b), (str(a), str(b)), count, seed)
    folders, items = {"a": a.parent, "b": b.parent}, []
    for pair in pairs:
        question, sides = pair.group.question, key.items[pair.item]
        left = _episode(question, pair.left, folders[sides.left])
        items.append(RatingItem(pair.item, left, _episode(question, pair.right, folders[sides.right])))
    page = write_page(out / "page.html", render_ratings(key.page, items))
    write_json(out / "key.json", key.model_dump())
    checks = sum(item.is_check for item in key.items.values())
    print(f"{len(pairs) - checks} questions and {checks} attention checks")
    print(f"page  {page}  ({page.stat().st_size / 1e6:.1f} MB): send it to the raters")
    print(f"key   {out / 'key.json'}: keep it from them")


def show_results(folder: Path, files: Sequence[Path]) -> None:
    key = _read(folder / "key.json", RatingKey)
    report = analyse(key, [_read(file, RatingFile) for file in files])
    write_json(folder / "ratings.json", report)
    print("\n".join(describe(report)))


def _groups(file: Path) -> list[Group]:
    _require(file)
    try:
        groups = [Group.model_validate_json(line) for line in file.read_bytes().splitlines()]
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise BadInput(f"{file} is no trajectories-NAME.jsonl: {problem}") from None
    images = [view for group in groups for trajectory in group.trajectories for view in trajectory.images]
    if images and not any(view.uri for view in images):
        raise BadInput(f"{file} has no pictures beside it", fix="evaluate with evaluate.images=true")
    return groups


def _episode(question: Question, trajectory: Trajectory, folder: Path) -> EpisodePage:
    pictures: dict[str, np.ndarray] = {}
    for view in trajectory.images:
        path = (folder / view.uri).resolve()
        if view.uri and path.is_relative_to(folder.resolve()) and path.is_file():
            with Image.open(path) as image:
                pictures[view.id] = np.asarray(image.convert("RGB"))
    for media in question.media:
        pictures |= load_pictures(media, trajectory, ToolboxConfig())
    return EpisodePage(question=question, trajectory=trajectory, pictures=pictures)


def _read(file: Path, kind: type[Content]) -> Content:
    _require(file)
    if file.stat().st_size > MAX_RATING_BYTES:
        raise BadInput(f"{file} is too large", fix=AS_SAVED)
    try:
        return kind.model_validate_json(file.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} does not hold ratings: {error!s:.200}", fix=AS_SAVED) from None


def _require(file: Path) -> None:
    if not file.is_file():
        raise MissingFile(f"no file {file}", fix="pixelis rate --help")


if __name__ == "__main__":
    main()

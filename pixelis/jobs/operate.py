"""Run a pixel operation on a picture or clip.

It prints the observation as JSON and writes it, with pictures, to a folder.

usage: pixelis operate MEDIA OPERATION ['{"ARGUMENT": VALUE, ...}'] [options] [toolbox.KEY=VALUE ...]
       pixelis operate --list              # the operations and their arguments

MEDIA is a picture or a clip; OPERATION is a name of the list or package.module:Class. Coordinates in
arguments and in `data` are 0..1 of the picture: a box is [left, top, right, bottom], a point [x, y]. `text`
is what a policy reads, with coordinates in 0..1000.

  --out DIR             folder for pictures and JSON (default runs/operate/NAME)
  --after RESULT.json   earlier result whose object ids and views are available; may be repeated
  --target ID           view to work on, from a result given with --after (obs1)
  --frame N             work on frame N of a clip, counted from 0
  --view SIDE           show what a policy sees with SIDE x SIDE pixels per view (448)

examples:
  pixelis operate photo.jpg zoom_in '{"box": [0.1, 0.2, 0.4, 0.5]}'
  pixelis operate photo.jpg segment_object_at '{"point": [0.5, 0.6]}' toolbox.segmenter=facebook/sam-vit-base
  pixelis operate photo.jpg get_properties '{"object": "3f9ac"}' --after RESULT.json
  pixelis operate clip.mp4 track_object '{"box": [0.2, 0.3, 0.4, 0.6], "end": 90}'
  pixelis operate clip.mp4 read_text --frame 45

exit code: 0 done, 1 the operation or the media gave an error, 2 the command line is wrong
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from pixelis.config import ToolboxConfig, load
from pixelis.datasets.media import open_media
from pixelis.dialogue.agent import name_observation
from pixelis.errors import BadConfig, BadImage
from pixelis.jobs.command import command
from pixelis.operations import OPERATIONS, Operation, Scene, execute, select
from pixelis.operations.operation import UNBOUNDED
from pixelis.operations.pictures import write_pictures
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.video import Clip
from pixelis.records import Action, ImageView, Media, Observation

ARGUMENT_ERRORS = ("bad_arguments", "bad_box", "bad_point", "out_of_range")
ADVICE = {
    "not_a_picture": "add --frame N to work on one frame of the clip, for example --frame 0",
    "not_a_video": "this operation needs a clip",
    "unknown_object": "add the result that has this object with --after RESULT.json",
}
"""What to do on the command line about an error code."""
CLIP_OPERATIONS = ("track_object", "select_frames", "search_clip")


def main() -> None:
    with command("operate", __doc__) as parser:
        if "--list" in sys.argv[1:]:
            print("\n\n".join(map(_describe, OPERATIONS.values())))
            return
        parser.add_argument("media", metavar="MEDIA")
        parser.add_argument("operation", metavar="OPERATION")
        parser.add_argument("words", nargs="*")
        parser.add_argument("--out", type=Path)
        parser.add_argument("--after", type=Path, action="append", default=[])
        parser.add_argument("--target")
        parser.add_argument("--frame", type=int)
        parser.add_argument("--view", type=int)
        options = parser.parse_intermixed_args()
        settings = load(overrides=[word for word in options.words if word.startswith("toolbox.")]).toolbox
        text = " ".join(word for word in options.words if not word.startswith("toolbox.")) or "{}"
        try:
            arguments = json.loads(text)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            fix = "write them as '{\"box\": [0.1, 0.2, 0.4, 0.5]}'"
            raise BadConfig(f"the arguments are not one JSON object: {text}", fix=fix)
        _operate(options, arguments, settings)


def _operate(options: argparse.Namespace, arguments: dict[str, Any], settings: ToolboxConfig) -> None:
    (operation,) = select([options.operation])
    with redirect_stdout(sys.stderr):  # stdout holds the JSON alone
        operation.ready(settings)
        moving = options.frame is not None or operation.name in CLIP_OPERATIONS
        about, media = open_source(options.media, moving, settings)
        scene, target, successes = _scene(options, about, media, settings)
        action = Action(op=operation.name, target=target, arguments=arguments)
        start = time.perf_counter()
        observation, views = execute(action, scene, {operation.name: operation})
        observation.seconds = round(time.perf_counter() - start, 4)
    name = re.sub(r"[^\w.-]+", "-", options.media.rpartition("/")[2].rpartition(".")[0] or options.media)
    folder = options.out or Path("runs/operate") / name[:60]
    pictures: list[Path] = []
    if observation.status == "ok":
        observation = name_observation(observation, successes)
        folder.mkdir(parents=True, exist_ok=True)
        pictures = write_pictures(folder, action, observation, views, scene)
    result = {
        "media": {"source": options.media[:500], **about},
        "op": operation.name,
        "target": target,
        "arguments": arguments,
        **observation.model_dump(mode="json"),
        "pictures": [str(path) for path in pictures],
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    # Boxes and points take a line each.
    text = re.sub(r"\[\n([-+.\deE,\s]+)\n\s*\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    print(text)
    if observation.status == "error":
        print(f"pixelis operate: {observation.code}: {observation.text}", file=sys.stderr)
        fix = ADVICE.get(observation.code or "", "")
        if observation.code in ARGUMENT_ERRORS:
            fix = f"coordinates are 0..1 of the picture; the arguments are those of\n{_describe(operation)}"
        if fix:
            print(f"  fix: {fix}", file=sys.stderr)
        raise SystemExit(1)
    output = folder / f"{operation.name}.json"
    output.write_text(text + "\n", encoding="utf-8")
    print(
        observation.text,
        "written:",
        *(f"  {path}" for path in [output, *pictures]),
        sep="\n",
        file=sys.stderr,
    )


def _describe(operation: type[Operation]) -> str:
    """The operation and its arguments, one a line: name, form, whether it is required, meaning."""
    schema = operation.Arguments.model_json_schema()
    lines = [f"{operation.name}: {operation.description}"]
    for name, field in schema.get("properties", {}).items():
        need = "required" if name in schema.get("required", []) else "optional"
        lines.append(f"    {name}: {_form(field)} ({need}) {field.get('description', '')}".rstrip())
    return "\n".join(lines)


def _form(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_form(kind) for kind in schema["anyOf"] if kind.get("type") != "null")
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    if "prefixItems" in schema:
        return f"[{', '.join(map(_form, schema['prefixItems']))}]"
    if "items" in schema:
        return f"[{_form(schema['items'])}, ...]"
    return str(schema.get("type", "value"))


def open_source(
    source: str, moving: bool, settings: ToolboxConfig
) -> tuple[dict[str, Any], np.ndarray | Clip]:
    """The result's description of the media, and its pixels. ``moving``: an animation is opened as a clip."""
    problem = None
    if not (moving and source.lower().endswith((".gif", ".webp"))):
        try:
            pixels = open_media(Media(id="img0", uri=source), settings)
            assert isinstance(pixels, np.ndarray)
            size = {"width": pixels.shape[1], "height": pixels.shape[0]}
            return {"id": "img0", **size, "sha256": hashlib.sha256(pixels.tobytes()).hexdigest()}, pixels
        except BadImage as error:
            if error.code not in ("image_format", "image_undecodable", "image_too_many_bytes"):
                raise
            problem = error
    try:
        clip = open_media(Media(id="vid0", kind="video", uri=source), settings)
    except BadImage as error:
        if problem is None:
            raise
        raise BadImage(f"as a picture: {problem}\nas a clip: {error}", code=error.code) from None
    assert isinstance(clip, Clip)
    size = {"width": clip.width, "height": clip.height, "frames": len(clip.times)}
    return {"id": "vid0", **size, "seconds": round(clip.duration, 3), "sha256": clip.sha256}, clip


def _scene(
    options: argparse.Namespace, about: Mapping[str, Any], media: np.ndarray | Clip, settings: ToolboxConfig
) -> tuple[Scene, str, int]:
    """The scene after the earlier results, the target, and the number of the last successful observation."""
    root, size, count = about["id"], (about["width"], about["height"]), about.get("frames", 0)
    if options.frame is not None and not 0 <= options.frame < count:
        has = f"has frames 0..{count - 1}" if count else "is not a clip"
        raise BadConfig(f"--frame {options.frame}: {options.media} {has}")
    first = ImageView(id=root, source_size=size, view_size=size)
    if isinstance(media, Clip):
        number = options.frame or 0
        shown = {"id": f"frame{number}", "parent": root, "frame": number, "time": float(media.times[number])}
        first = first.model_copy(update=shown)
    images, objects, successes = {first.id: first}, dict[str, dict[str, Any]](), 0
    for path in options.after:
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            same = raw["media"]["sha256"] == about["sha256"]
            earlier = Observation.model_validate({key: raw[key] for key in Observation.model_fields})
            objects |= {row["id"]: row for row in earlier.data.get("objects", [])}
            successes = max(successes, int(str(earlier.id).removeprefix("obs")))
        except (ValueError, KeyError, TypeError):
            raise BadConfig(f"--after {path}: not a result of `pixelis operate`") from None
        if not same:
            raise BadConfig(f"--after {path}: the result belongs to other media")
        images |= {image.id: image for image in earlier.images if image.id not in images}
    budget, multiple = UNBOUNDED, 1
    if options.view:
        budget = PixelBudget(max(1, options.view**2 // 4), options.view**2)
        multiple = next((side for side in (28, 32) if options.view % side == 0), 16)
    scene = Scene({root: media}, [*images.values()], objects, budget, budget, multiple, settings=settings)
    return scene, options.target or (root if options.frame is None else first.id), successes


if __name__ == "__main__":
    main()

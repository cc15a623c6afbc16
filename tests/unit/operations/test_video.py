"""Clips: any frame exactly, whatever the container; caps and hostile files as named errors."""

from __future__ import annotations

import base64
import io
import pickle
import subprocess
import sys
from fractions import Fraction

import av
import numpy as np
import pytest
from clips import BUNNY, CONTAINERS, UNEVEN, encode, footage
from PIL import Image

from pixelis.config import ToolboxConfig
from pixelis.datasets.media import open_media
from pixelis.errors import BadImage, MissingDependency, OperationError
from pixelis.operations import video
from pixelis.operations.select_frames import SelectFrames, SelectFramesArguments, _requested_frames
from pixelis.operations.video import open_clip
from pixelis.records import Media

SETTINGS = ToolboxConfig()


def _forget() -> None:
    video._FRAMES.__init__()  # type: ignore[misc]


def _decoded(data: bytes) -> list[np.ndarray]:
    """Every frame by decoding the file from its first byte to its last."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def _code(source: object, **caps: object) -> str:
    def use() -> None:
        clip = open_clip(source, ToolboxConfig(**caps))  # type: ignore[arg-type]
        list(clip.frames(range(len(clip.times))))

    with pytest.raises(BadImage) as caught:
        use()
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300
    return caught.value.code


KINDS = (
    "mp4 h264 with B-frames", "mp4 h264 open groups", "mp4 hevc", "mkv uneven times", "webm vp9",
    "avi packed B-frames", "mpg mpeg2", "gif",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in KINDS else pytest.param(n, marks=pytest.mark.long) for n in CONTAINERS]
)
def test_any_frame_in_any_order_is_that_of_plain_decoding(name):
    data = CONTAINERS[name]()
    expected = _decoded(data)
    clip = open_clip(data, SETTINGS)
    assert len(clip.times) == len(expected) == 72
    assert (clip.width, clip.height) == (160, 96)
    assert np.all(np.diff(clip.times) > 0)
    _forget()
    assert all(np.array_equal(frame, expected[i]) for i, frame in enumerate(clip.frames(range(72))))
    _forget()
    order = np.random.default_rng(0).permutation(72)
    assert [int(i) for i in order if not np.array_equal(clip.frame(int(i)), expected[i])] == []


def test_decord_numbers_and_reads_the_frames_if_it_is_chosen():
    decord = pytest.importorskip("decord")
    data = CONTAINERS["mp4 h264 with B-frames"]()
    clip = open_clip(data, ToolboxConfig(video_backend="decord"))
    reader = decord.VideoReader(io.BytesIO(data), num_threads=1)
    assert clip.times == pytest.approx(open_clip(data, SETTINGS).times, abs=1e-3)
    for number, frame in zip((40, 3, 41), clip.frames([40, 3, 41]), strict=True):
        np.testing.assert_array_equal(frame, reader[number].asnumpy())
    assert _code(CONTAINERS["raw h264"](), video_backend="decord") == "video_backend"
    assert _code(data, video_backend="decord", max_video_frames=71) == "video_too_many_frames"


def test_decord_that_is_not_installed_names_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "decord", None)
    with pytest.raises(MissingDependency) as error:
        SelectFrames.ready(ToolboxConfig(video_backend="decord"))
    assert "pip install decord" in error.value.fix


def test_times_are_those_of_the_file():
    assert open_clip(encode(footage(), options={"bf": "3"}), SETTINGS).times == pytest.approx(
        np.arange(72) / 25
    )
    for container in ("mp4", "matroska"):
        clip = open_clip(encode(footage(), container, options={"bf": "3"}, milliseconds=UNEVEN), SETTINGS)
        assert clip.times == pytest.approx(np.array(UNEVEN) / 1000, abs=1e-3)
        assert clip.at(float(clip.times[10]) + 0.005) == clip.at(float(clip.times[10])) == 10
        assert clip.at(-5) == 0
        assert clip.at(1e9) == 71
    assert open_clip(BUNNY, SETTINGS).duration == pytest.approx(5.28, abs=0.001)


@pytest.mark.parametrize(("matrix", "turn"), [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)])
def test_rotation_is_applied(matrix, turn):
    data = bytearray(encode(footage()))
    track = data.index(b"tkhd")
    a, b, c, d = (value * 65536 for value in matrix)
    for place, value in enumerate((a, b, 0, c, d, 0)):
        start = track + 4 + 40 + 4 * place
        data[start : start + 4] = value.to_bytes(4, "big", signed=True)
    clip = open_clip(bytes(data), SETTINGS)
    expected = np.rot90(_decoded(bytes(data))[5], turn)
    assert clip.frame(5).shape == (clip.height, clip.width, 3) == expected.shape
    assert np.array_equal(clip.frame(5), expected)


def test_frames_are_read_only_remembered_and_checked():
    clip = open_clip(encode(footage()), SETTINGS)
    frame = clip.frame(3)
    assert clip.frame(3) is frame
    assert not frame.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        frame[0, 0] = 0
    for bad in (-1, 72, 10**30, True, 2.0):
        with pytest.raises(OperationError, match=r"0\.\.71") as caught:
            clip.frame(bad)  # type: ignore[arg-type]
        assert caught.value.code == "out_of_range"
    with pytest.raises(OperationError):
        clip.frames([0, 99])  # before anything is decoded


def test_the_memory_of_frames_is_capped(monkeypatch):
    clip = open_clip(encode(footage()), SETTINGS)
    monkeypatch.setattr(video, "MAX_CACHED_BYTES", 5 * 160 * 96 * 3)
    _forget()
    list(clip.frames(range(72)))
    assert len(video._FRAMES._frames) == 5


def test_consecutive_frames_are_decoded_once(monkeypatch):
    clip = open_clip(encode(footage(), options={"g": "24", "bf": "2"}), SETTINGS)
    starts, start = [], video._Reader.start
    monkeypatch.setattr(video._Reader, "start", lambda self, key: starts.append(key) or start(self, key))
    for wanted, most in ((range(72), 2), ([60, 65, 70], 1)):
        _forget()
        starts.clear()
        list(clip.frames(wanted))
        assert len(starts) <= most
    assert all(48 <= key <= 60 for key in starts)


def test_a_clip_travels_without_a_copy_of_its_bytes():
    data = encode(footage())
    clip = open_clip(data, SETTINGS)
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(clip, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 2000
    assert sorted(len(buffer.raw()) for buffer in buffers) == sorted([len(data), 72 * 8])
    other = pickle.loads(head, buffers=buffers)
    _forget()
    assert np.array_equal(other.frame(40), clip.frame(40))
    assert np.shares_memory(clip.data[0], np.frombuffer(data, np.uint8))


# Frame lists


def _picture(kind: str, pixels: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def _png(pixels: np.ndarray) -> str:
    return "data:image/png;base64," + base64.b64encode(_picture("PNG", pixels)).decode()


def test_pictures_are_a_clip(tmp_path):
    Image.fromarray(footage()[2]).save(tmp_path / "2.png")
    clip = open_clip([_png(footage()[0]), _png(footage()[1]), str(tmp_path / "2.png")], SETTINGS, fps=4)
    assert clip.times.tolist() == [0, 0.25, 0.5]
    assert clip.duration == 0.75
    for number, frame in zip((2, 0, 1), clip.frames([2, 0, 1]), strict=True):
        np.testing.assert_array_equal(frame, footage()[number])
    assert clip.sha256 != open_clip([_png(footage()[0])] * 3, SETTINGS, fps=4).sha256


def test_bad_pictures_of_a_list(tmp_path):
    small = _png(footage()[0][:50])
    assert _code([_png(footage()[0]), small]) == "video_frames_differ"
    assert _code([]) == "video_empty"
    assert _code([_png(footage()[0]), "data:image/png;base64,aGVsbG8="]) == "image_undecodable"
    assert _code(["http://127.0.0.1/1.png"]) == "video_scheme"
    assert _code([str(tmp_path / "none.png")]) == "video_not_found"
    assert _code([small] * 11, max_video_frames=10) == "video_too_many_frames"
    assert _code([small] * 11, max_video_seconds=5) == "video_too_long"
    assert _code([small] * 11, max_video_bytes=len(small) * 5) == "video_too_many_bytes"
    assert _code([small], max_image_pixels=100) == "image_too_many_pixels"


# Bad input


def test_caps_are_checked_first(monkeypatch):
    data = encode(footage())
    assert _code(data, max_video_frames=71) == "video_too_many_frames"
    assert _code(data, max_video_seconds=2) == "video_too_long"
    assert _code(data, max_image_pixels=160 * 96 - 1) == "video_too_many_pixels"
    monkeypatch.setattr(video, "Source", None)  # nothing is opened
    assert _code(data, max_video_bytes=1000) == "video_too_many_bytes"
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    assert _code(url, max_video_bytes=1000) == "video_too_many_bytes"


def test_frames_are_counted_not_believed():
    """An AVI whose header claims 9 frames has those that its packets hold."""
    data = bytearray(encode(footage(), "avi", "mpeg4", {"g": "12"}))
    place = data.index(b"avih") + 8 + 16
    assert int.from_bytes(data[place : place + 4], "little") == 72
    data[place : place + 4] = (9).to_bytes(4, "little")
    assert len(open_clip(bytes(data), SETTINGS).times) == 72
    assert _code(bytes(data), max_video_frames=71) == "video_too_many_frames"


def _sound() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=44100, layout="mono")
        for number in range(20):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 44100, number * 1024, Fraction(1, 44100)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


PLAYLIST = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\n{}\n#EXT-X-ENDLIST\n"
DASH = '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>file:///etc/</BaseURL></MPD>'
SDP = (
    "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    "m=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
)


NO_VIDEOS = {
    "empty": (b"", "video_empty"),
    "text": (b"this is no video\n" * 100, "video_undecodable"),
    "zeros": (bytes(100_000), "video_undecodable"),
    "svg": (
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='/etc/hostname'/></svg>",
        "video_undecodable",
    ),
    "still": (_picture("PNG", footage()[0]), "video_undecodable"),
    "sound": (_sound(), "video_no_picture"),
    # Containers that name other files or addresses
    "playlist": (PLAYLIST.format("FOLDER/part.ts").encode(), "video_undecodable"),
    "relative playlist": (PLAYLIST.format("part.ts").encode(), "video_undecodable"),
    "concat": (b"ffconcat version 1.0\nfile 'FOLDER/part.ts'\n", "video_undecodable"),
    "sdp": (SDP.encode(), "video_undecodable"),
    "dash": (DASH.encode(), "video_undecodable"),
}


@pytest.mark.parametrize("name", NO_VIDEOS)
def test_files_that_are_no_video_are_refused(name: str, tmp_path):
    data, code = NO_VIDEOS[name]
    (tmp_path / "part.ts").write_bytes(encode(footage(), "mpegts"))
    (tmp_path / "clip.mp4").write_bytes(data.replace(b"FOLDER", str(tmp_path).encode()))
    assert _code(tmp_path / "clip.mp4") == code
    assert _code(data) == code


def test_a_file_that_is_cut_off_ends_with_its_last_whole_frame():
    data = encode(footage(), "matroska", options={"g": "12"})
    clip = open_clip(data[: len(data) // 2], SETTINGS)
    assert 20 < len(clip.times) < 60
    whole = open_clip(data, SETTINGS)
    assert all(
        np.array_equal(a, b) for a, b in zip(clip.frames(range(20)), whole.frames(range(20)), strict=True)
    )


def test_a_clip_is_cut_to_its_spans(tmp_path):
    (tmp_path / "a.mp4").write_bytes(encode(footage()))  # 72 frames, 25 a second
    whole = open_clip(tmp_path / "a.mp4", SETTINGS)
    media = Media(id="vid0", kind="video", uri=str(tmp_path / "a.mp4"), spans=[(0.4, 0.6), (1.99, 2.2)])
    clip = open_media(media, SETTINGS)
    numbers = [10, 11, 12, 13, 14, 49, 50, 51, 52, 53, 54]
    assert clip.times.tolist() == pytest.approx([number / 25 for number in numbers])
    for frame, number in zip(clip.frames(range(len(numbers))), numbers, strict=True):
        np.testing.assert_array_equal(frame, whole.frame(number))
    assert (clip.duration, clip.end) == (pytest.approx(0.44), pytest.approx(2.2))
    assert clip.sha256 not in (whole.sha256, whole.cut([(0.4, 0.6)]).sha256)
    assert np.array_equal(pickle.loads(pickle.dumps(clip)).frame(5), whole.frame(49))
    assert whole.cut([(0.41, 0.415)]).times.tolist() == pytest.approx([0.4])  # the frame on show
    assert len(whole.cut([(2.0, 99.0)]).times) == 22
    with pytest.raises(BadImage, match=r"from 0\.00 to 2\.88 s"):
        open_clip(tmp_path / "a.mp4", SETTINGS, spans=[(2.9, 3.0)])
    with pytest.raises(OperationError, match="runs from 0\\.40 to 2\\.20 s"):
        _requested_frames(SelectFramesArguments(times=[0.2]), clip, 8)


def test_a_clip_that_starts_late_is_cut_by_its_own_times():
    times = [5000 + 40 * i for i in range(20)]
    late = open_clip(encode(footage(count=20), "matroska", "mpeg4", milliseconds=times), SETTINGS)
    with pytest.raises(BadImage, match=r"from 5\.00 to 5\.80 s") as error:
        late.cut([(0.0, 2.0)])
    assert error.value.code == "video_span"
    assert late.cut([(4.0, 5.05)]).times.tolist() == pytest.approx([5.0, 5.04])


@pytest.mark.parametrize(
    "spans", [[], [(3, 2)], [(0, 2), (1, 3)], [(2, 3), (0, 1)], [(-1, 2)], [(0, float("inf"))], [(1, 1)]]
)
def test_spans_out_of_order_are_refused(spans):
    with pytest.raises(ValueError, match="spans"):
        Media(id="vid0", kind="video", uri="a.mp4", spans=spans)


@pytest.mark.slow
def test_frames_are_read_without_starting_threads(tmp_path):
    """A toolbox near its memory limit has no room for the stack of a thread."""
    path = tmp_path / "clip.mp4"
    path.write_bytes(CONTAINERS["mp4 h264 with B-frames"]())
    code = (
        "import resource, sys; from pathlib import Path; from pixelis.config import ToolboxConfig\n"
        "from pixelis.operations.video import open_clip; import numpy, av\n"
        "used = int(Path('/proc/self/statm').read_text().split()[5]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (used + 400 * 2**20, -1))\n"
        "clip = open_clip(sys.argv[1], ToolboxConfig()); print(len(list(clip.frames([0, 3, 40]))))"
    )
    limits = 'ulimit -s 1000000; exec "$@"'  # the stack of a thread is as large as that of the process
    done = subprocess.run(
        ["bash", "-c", limits, "bash", sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "3", done.stderr[-1000:]

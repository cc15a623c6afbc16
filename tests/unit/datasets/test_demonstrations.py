"""Demonstrations are played: the operation runs, its pixels are the picture's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_policy
from PIL import Image

from pixelis.actors.demonstrations import HeldOut
from pixelis.config import Config, DataConfig, RunConfig, parse
from pixelis.datasets.bad_rows import BadRow
from pixelis.datasets.demonstration_store import DemonstrationStore
from pixelis.datasets.demonstration_stream import Prepare, samples_of
from pixelis.datasets.demonstrations import Player
from pixelis.errors import DataFailure
from pixelis.jobs import sft
from pixelis.records import Demonstration, Media, StopReason, Trajectory

SIDE = 256
Row = Callable[..., Demonstration]


def settings(family: str = "qwen3_vl", **dialogue: int) -> Config:
    pixels = {"min_pixels": 64 * 64, "max_pixels": 64 * 64}
    room = {"max_context": 2048, "input": pixels, "crop": pixels, **dialogue}
    model = {"model": str(tiny_policy.folder(family))}
    return parse({"policy": model, "dialogue": room, "learner": {"row_tokens": 2048}})


@pytest.fixture(scope="module")
def player() -> Player:
    config = settings()
    return Player(config, config.policy.model)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """Every pixel of it is different: 256 x 256, red counts columns and green rows."""
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    path = tmp_path / "picture.png"
    Image.fromarray(np.stack([columns, rows, rows ^ columns], axis=-1).astype(np.uint8)).save(path)
    return path


@pytest.fixture
def row(picture: Path) -> Row:
    def make(*turns: dict) -> Demonstration:
        media = [{"id": "img0", "uri": str(picture)}]
        row = {"id": "q1", "question": "Which digit?", "media": media, "answers": ["7"], "turns": list(turns)}
        return Demonstration.model_validate(row)

    return make


def zoom(box: list[float], target: str = "img0") -> dict:
    return {"think": "look closer", "op": "zoom_in", "target": target, "box": box}


def said(player: Player, trajectory: Trajectory) -> list[str]:
    """What the loss covers, as text, a run of masked tokens each."""
    tokens, mask = trajectory.token_ids(), trajectory.loss_mask()
    runs: list[list[int]] = []
    for i, token in enumerate(tokens):
        if mask[i]:
            if not (i and mask[i - 1]):
                runs.append([])
            runs[-1].append(token)
    return [player.renderer.tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def test_the_crop_shown_is_the_region_of_the_picture_itself(player: Player, row: Row, picture: Path) -> None:
    # A region of 64 x 64 pixels is shown as 64 x 64: not one pixel is made up or moved.
    trajectory, views = player.play(row(zoom([0.25, 0.5, 0.5, 0.75]), {"answer": "7"}))
    whole = np.asarray(Image.open(picture))
    np.testing.assert_array_equal(views[1], whole[128:192, 64:128])
    crop = trajectory.images[1]
    assert (crop.id, crop.parent, crop.source_size, crop.view_size) == ("obs1", "img0", (64, 64), (64, 64))
    assert crop.box == pytest.approx((0.25, 0.5, 0.5, 0.75))
    assert trajectory.observations[0].status == "ok"


def test_lengths_of_turns_are_known_without_the_media(player: Player, row: Row, picture: Path) -> None:
    mistake = {"op": "zoom_in", "box": [0.1, 0.1, 0.9, 0.9], "learn": False}
    thought = {"think": "so", "answer": "7"}
    demonstration = row(mistake, zoom([0.25, 0.5, 0.5, 0.75]), zoom([0.0, 0.0, 1.0, 0.5], "obs2"), thought)
    trajectory, _ = player.play(demonstration)
    played = [len(turn.tokens) for turn in trajectory.turns if turn.is_policy and turn.learn]
    picture.unlink()
    assert player.turn_lengths(demonstration) == played


def test_training_warns_once_of_turns_that_would_be_cut_off(
    row: Row, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long, short = row({"think": "a word " * 50, "answer": "7"}), row({"answer": "7"})
    source = tmp_path / "rows.jsonl"
    rows = [r.model_copy(update={"id": f"q{n}"}) for n, r in enumerate((short, long, short))]
    source.write_text("".join(f"{r.model_dump_json()}\n" for r in rows))
    place = {"data": DataConfig(demonstrations=str(source)), "run": RunConfig(dir=str(tmp_path))}
    sft.prepare(settings().model_copy(update=place), tmp_path, resumed=False)
    warning = capsys.readouterr().err
    assert warning.count("warning:") == 1
    assert "1 of 3 turns" in warning
    assert "dialogue.max_turn_tokens=32" in warning
    sft.prepare(settings(max_turn_tokens=500).model_copy(update=place), tmp_path, resumed=True)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("family", tiny_policy.FAMILIES)
def test_boxes_with_equal_tokens_show_the_same_view(family: str, row: Row) -> None:
    """What the numbers of a call leave out of a box cannot show anything to a policy."""
    player = Player(settings(family), str(tiny_policy.folder(family)))
    boxes = ([0.25, 0.25, 0.75, 0.75], [0.2503, 0.2503, 0.7503, 0.7503])
    (exact, seen), (rounded, shown) = (player.play(row(zoom(box), {"answer": "7"})) for box in boxes)
    assert rounded.token_ids() == exact.token_ids()
    assert [turn.action for turn in rounded.turns] == [turn.action for turn in exact.turns]
    np.testing.assert_array_equal(shown[1], seen[1])


@pytest.mark.parametrize("family", tiny_policy.FAMILIES)
def test_the_loss_covers_what_the_assistant_says_and_nothing_else(family: str, row: Row) -> None:
    config = settings(family)
    player = Player(config, config.policy.model)
    answer = {"answer": "7", "think": "it is clear"}
    trajectory, views = player.play(row(zoom([0.25, 0.5, 0.5, 0.75]), answer))
    first, last = said(player, trajectory)
    assert first.startswith("<think>look closer</think>")
    assert '"name":"zoom_in"' in first.replace(" ", "")
    stop = player.renderer.spec.chat.stop
    assert first.endswith(stop)
    assert last == f"<think>it is clear</think><answer>7</answer>{stop}"
    assert (trajectory.answer, trajectory.stop_reason) == ("7", StopReason.ANSWER)
    tokens, mask = trajectory.token_ids(), trajectory.loss_mask()
    assert len(tokens) == len(mask)
    pads = [i for i, token in enumerate(tokens) if token == player.spec.image_token]
    assert len(pads) == sum(player.spec.image_tokens(*view.shape[:2]) for view in views)
    assert not any(mask[i] for i in pads)


@pytest.mark.parametrize(
    "text", ["First <video> then <image>. Same?", "<video>\n<image>\nSame?", "Is <image> in <video>?"]
)
def test_media_are_shown_where_the_text_marks_them(player: Player, picture: Path, text: str) -> None:
    frames = [str(picture.with_name(f"{i}.png")) for i in range(2)]
    for i, path in enumerate(frames):
        Image.new("RGB", (64, 64), (0, 100 * i, 255)).save(path)
    media = [{"id": "img0", "uri": str(picture)}, {"id": "vid0", "kind": "video", "frames": frames}]
    history = [{"question": text, "answer": "no", "media": ["img0", "vid0"]}]
    later = {"id": "q", "question": "And now?", "history": history}
    earlier = {"id": "img1", "uri": frames[0]}
    for row in ({"id": "q", "question": text, "media": media}, {**later, "media": [earlier, *media]}):
        trajectory, views = player.play(Demonstration.model_validate({**row, "turns": [{"answer": "no"}]}))
        prompt = player.renderer.tokenizer.decode(trajectory.token_ids(), skip_special_tokens=False)
        assert "<image>" not in prompt
        assert "<video>" not in prompt
        order = [name.partition(".")[0] for name in (image.id for image in trajectory.images)]
        clip_first = "video" in text.partition("<image>")[0]
        assert order[:3] == (["vid0", "vid0", "img0"] if clip_first else ["img0", "vid0", "vid0"])
        assert [view.shape[:2] for view in views] == [image.view_size[::-1] for image in trajectory.images]
        runs = prompt.replace("<|image_pad|>", "").split("<|vision_start|><|vision_end|>")
        after_the_picture = text.partition("<image>")[2].partition("<video>")[0]
        assert runs[clip_first * 2 + 1].startswith(after_the_picture)


@pytest.mark.parametrize(
    ("turn", "code"),
    [
        (zoom([1.2, 0.1, 1.4, 0.3]), "out_of_range"),
        (zoom([0.5, 0.5, 0.501, 0.501]), "too_small"),
        (zoom([0.5, 0.5, 0.4, 0.6]), "bad_box"),
        (zoom([0.2, 0.2, 0.5]), "bad_box"),
        (zoom([0.2, 0.2, 0.5, 0.5], target="obs3"), "bad_target"),
        ({"op": "zoom_out", "box": [0.2, 0.2, 0.5, 0.5]}, "unknown_op"),
    ],
)
def test_a_demonstration_whose_operation_is_refused_is_a_data_failure(
    player: Player, row: Row, turn: dict, code: str
) -> None:
    with pytest.raises(DataFailure) as caught:
        player.play(row(turn, {"answer": "7"}))
    assert caught.value.code == code


def test_a_mistake_stays_in_the_context_and_out_of_the_loss(player: Player, row: Row) -> None:
    slip = {**zoom([1.2, 0.1, 1.4, 0.3]), "learn": False}
    wrong = {**zoom([0.0, 0.0, 0.25, 0.25]), "learn": False}
    trajectory, views = player.play(row(slip, wrong, zoom([0.25, 0.5, 0.5, 0.75]), {"answer": "7"}))
    assert [o.status for o in trajectory.observations] == ["error", "ok", "ok"]
    assert trajectory.observations[0].code == "out_of_range"
    assert len(views) == 3
    learnt = said(player, trajectory)
    assert len(learnt) == 2
    assert "zoom_in" in learnt[0]
    assert learnt[1].startswith("<answer>7")


def test_the_stream_yields_the_played_demonstrations(row: Row, tmp_path: Path) -> None:
    store = tmp_path / "shelf"
    own = {"sft": {"batch": 3, "weights": {"think": 0.5}}, "data": {"demonstrations": "cards:"}}
    config = parse({**settings().model_dump(), **own})
    lost = {"id": "q3", "media": [Media(id="img0", uri=str(tmp_path / "none.png"))]}
    second = row({"answer": "3"}).model_copy(update={"id": "q2"})
    missing = row({"answer": "5"}).model_copy(update=lost)
    rows = [row(zoom([0.25, 0.5, 0.5, 0.75]), {"answer": "7"}), second, missing]
    DemonstrationStore.fill(store, rows, ["golden"])
    prepare = Prepare(config, config.policy.model, str(store))
    prepared = prepare({"id": np.asarray([0])}).items()
    columns = {name: np.asarray(values, dtype=object) for name, values in prepared}
    bad = BadRow(*json.loads(columns["error"][2]))
    assert (bad.code, bad.id) == ("image_not_found", "q3")
    samples = samples_of(columns)
    assert [sample.id for sample in samples] == ["q1", "q2"]
    for sample, played in zip(samples, (prepare.player.play(r) for r in rows), strict=False):
        trajectory, views = played
        assert sample.tokens.tolist() == trajectory.token_ids()
        assert sample.mask.astype(int).tolist() == trajectory.loss_mask()
        assert sample.weights is not None
        assert len(sample.weights) == len(sample.tokens)
        assert len(sample.views) == len(views)
        for seen, view in zip(sample.views, views, strict=True):
            np.testing.assert_array_equal(seen, view)


def test_a_later_epoch_does_not_play_a_demonstration_again(row: Row, tmp_path: Path) -> None:
    config = parse({**settings().model_dump(), "sft": {"batch": 1}, "data": {"demonstrations": "cards:"}})
    demonstration = row(zoom([0.25, 0.5, 0.5, 0.75]), {"answer": "7"})
    DemonstrationStore.fill(tmp_path / "shelf", [demonstration], ["golden"])
    prepare = Prepare(config, config.policy.model, str(tmp_path / "shelf"))
    first = prepare({"id": np.asarray([0])})
    Path(demonstration.media[0].uri).unlink()
    second = prepare({"id": np.asarray([1])})
    assert second["error"] == [""]
    assert (second["tokens"], second["views"]) == (first["tokens"], first["views"])


def test_the_held_out_loss_is_of_kinds_that_are_learnt(row: Row, tmp_path: Path) -> None:
    kinds = ("trap_logical", "golden", "outcome_negative", "golden", "golden")
    rows = [
        row({"answer": "7"}).model_copy(update={"id": f"q{n}", "kind": kind}) for n, kind in enumerate(kinds)
    ]
    (tmp_path / "held_out.jsonl").write_text("\n".join(one.model_dump_json() for one in rows) + "\n")
    sft = {"validation": str(tmp_path / "held_out.jsonl"), "validation_size": 2}
    held_out = HeldOut(parse({**settings().model_dump(), "sft": sft}), None)
    held_out.load(share=0, shares=1)
    assert [sample.id for _, sample in held_out.samples] == ["q1", "q3"]

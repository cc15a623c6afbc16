"""The page's JavaScript against the Python code it mirrors."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
from browser_helpers import Opened

from pixelis.dialogue.dialects import DIALECTS
from pixelis.operations import geometry, masks
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_masks_and_locations_equal_those_of_the_operations(opened: Opened) -> None:
    rng = np.random.default_rng(5)
    cases = []
    for _ in range(40):
        height, width = (int(n) for n in rng.integers(1, 40, 2))
        inside = rng.random((height, width)) < rng.choice([0.02, 0.5, 0.98])
        inside[rng.integers(height), rng.integers(width)] = True
        cases.append((masks.encode(inside), inside))
    page = opened()
    decoded = page.evaluate(
        """async (codes) => { const { decode } = await import("/page/masks.js");
            return codes.map((c) => [1, 2].map((x) => [...decode(c, x * c.size[1], x * c.size[0])])); }""",
        [code for code, _ in cases],
    )
    for (same, larger), (_, inside) in zip(decoded, cases, strict=True):
        assert np.array_equal(np.array(same, bool).reshape(inside.shape), inside)
        twice = inside.repeat(2, 0).repeat(2, 1)
        assert np.array_equal(np.array(larger, bool).reshape(twice.shape), twice)
    good, _ = cases[0]
    changes = [{"counts": good["counts"] + "1"}, {"counts": "o"}, {"counts": "\x00"}, {"counts": 5}]
    changes += [{"size": [1e9, 1e9]}, {"counts": [-1, 2]}, {"counts": "ooooooooooooo"}]
    bad = [*({**good, **change} for change in changes), {"size": [2, 2]}, None]
    evaluate = """async (codes) => {
        const { decode } = await import("/page/masks.js");
        return codes.map((c) => decode(c, 4, 4));
    }"""
    assert page.evaluate(evaluate, bad) == [None] * len(bad)
    for _ in range(10):
        views = [ImageView(id="img0")]
        for depth in range(1, 5):
            x0, y0 = (float(v) for v in rng.uniform(0, 0.5, 2))
            box = (x0, y0, x0 + float(rng.uniform(0.1, 0.5)), y0 + float(rng.uniform(0.1, 0.5)))
            views.append(ImageView(id=f"obs{depth}", parent=views[-1].id, box=box))
        location = page.evaluate(
            """async (views) => { const { Scene } = await import("/page/marks.js"); const scene = new Scene();
                scene.addViews(views); return scene.locate("obs4"); }""",
            [view.model_dump(mode="json") for view in views],
        )
        assert location["root"] == "img0"
        assert location["box"] == pytest.approx(geometry.to_root(geometry.chain(views, "obs4")))


@pytest.mark.long
def test_masks_points_and_lines_are_drawn_in_place(opened: Opened) -> None:
    inside = np.zeros((80, 80), bool)
    inside[20:60, 20:60] = True
    segment = {"id": "a1", "kind": "object", "root": "img0", "mask": masks.encode(inside)}
    segment["box"] = [0.25, 0.25, 0.75, 0.75]
    word, broken = {"text": "word", "box": [0.1, 0.8, 0.4, 0.9]}, {"text": "b", "box": [1, 2, "x", None]}
    track = {"id": "t", "frames": [0, 1], "boxes": [[0.7, 0.7, 0.8, 0.8], [0.8, 0.8, 0.9, 0.9]]}
    called: list[tuple[str, dict[str, Any] | None, dict[str, Any]]] = [
        ("segment_object_at", {"point": [0.5, 0.5]}, {"objects": [segment]}),
        ("read_text", {}, {"lines": [word, {"text": "no place"}, broken]}),
        ("get_properties", {"object": "a1"}, {"properties": {}}),
        ("track_object", {}, {"tracks": [track]}),
        ("own", None, {"boxes": [[0, 0, 1]], "objects": "x", "lines": None}),
    ]
    observations = [({"op": op, "target": "img0", "arguments": given}, data) for op, given, data in called]
    drawn = opened().evaluate(
        """async (observations) => {
            const { Scene, Stage } = await import("/page/marks.js");
            const background = new OffscreenCanvas(80, 80);
            background.getContext("2d").fillRect(0, 0, 80, 80);
            const picture = new Image();
            picture.src = URL.createObjectURL(await background.convertToBlob());
            await picture.decode();
            const stage = new Stage(document.getElementById("stage"));
            stage.show(picture);
            const scene = new Scene();
            const kinds = observations.map(([action, data], i) => {
                const marks = scene.marks(action, { data, images: [] });
                stage.add(marks.map((mark) => ({ ...mark, sample: 1, name: `2.${i + 1}`, turn: String(i) })));
                return marks.map((mark) => mark.kind);
            });
            stage.draw();
            const at = (x, y) => [...stage.canvas.getContext("2d").getImageData(x * 720, y * 720, 1, 1).data].slice(0, 3);
            return { kinds, inside: at(0.4, 0.6), outside: at(0.05, 0.5), point: at(0.5, 0.5), line: at(0.3, 0.9),
                label: stage.canvas.getAttribute("aria-label") };
        }""",
        observations,
    )
    assert drawn["kinds"] == [["mask", "point"], ["line"], ["box"], ["track"], []]
    assert drawn["outside"] == [0, 0, 0]
    assert drawn["point"] == [0, 179, 255]  # the second sample's colour
    assert 50 < drawn["inside"][2] < 150
    assert drawn["line"] != [0, 0, 0]
    assert drawn["label"] == "the picture, 4 marked places, 1 line of text"


@pytest.mark.long
def test_turns_of_every_dialect_are_parsed(opened: Opened) -> None:
    scale, written = Scale("pixels", {"img0": (100, 100)}), []
    for dialect in DIALECTS.values():
        thought = "I <answer>see</answer> it" if dialect.thinks else "I see it"
        for answer in ("7", "two words", "{a}"):
            written.append((("".join(dialect.render(answer, scale, thought)) + "<|im_end|>"), answer, "see"))
        if dialect.call:
            call = Action(op="zoom_in", arguments={"box": (0.1, 0.1, 0.5, 0.5)})
            written.append(("".join(dialect.render(call, scale, "Closer.")), None, "Closer."))
    script = """async (texts) => { const { parseTurn } = await import("/page/samples.js"); return texts.map(parseTurn); }"""
    for turn, (_, answer, part) in zip(
        opened().evaluate(script, [w[0] for w in written]), written, strict=True
    ):
        assert turn["answer"] == answer
        assert part in turn["thought"]
        assert not re.search(r"im_end|tool_call|grounding|zoom_in|<think>", turn["thought"])


def test_events_are_parsed_from_any_chunks(opened: Opened) -> None:
    text = 'event: turn\r\ndata: {"a": "käse\\n"}\r\n\r\n: comment\n\ndata: one\ndata: two\n\n'
    text += "event: answer\ndata:x\n\nevent: lost\n\ndata: cut"
    draw = random.Random(3)
    cuts = [sorted(draw.sample(range(len(text)), draw.randint(0, 30))) for _ in range(30)]
    pieces = [[text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)] for cut in cuts]
    parsed = opened().evaluate(
        """async (all) => { const { Events } = await import("/page/api.js");
            return all.map((pieces) => {
                const out = [];
                const events = new Events((...event) => out.push(event));
                pieces.forEach((piece) => events.push(piece));
                return out;
            }); }""",
        pieces,
    )
    assert parsed == [[["turn", '{"a": "käse\\n"}'], ["message", "one\ntwo"], ["answer", "x"]]] * len(cuts)

"""Properties of the dialogue: round trips, loss masks, and boxes through chains of crops."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from dialogue_models import ScriptedSession, image_view, pixels, renderer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pixelis.dialogue.agent import Limits, run_episode
from pixelis.dialogue.dialects import DIALECTS
from pixelis.dialogue.session import Completion, SamplingParams
from pixelis.errors import OperationError
from pixelis.operations import OPERATIONS, Scene, execute, geometry
from pixelis.operations.pixel_budget import PixelBudget
from pixelis.operations.scale import Scale
from pixelis.records import Action, ImageView, Question, StopReason

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>")
ALL_TAGS = (*TAGS, "<grounding>", "</grounding>", "\\boxed")
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
CALL = ('{"name":"zoom_in","arguments":', '{"bbox_2d":[1,2,30,40]}', "}")
SEEDS = ('{"name":"crop_image_normalized","arguments":', '{"bbox_2d":[0,0.5,1,1],"target_image":1}')
PIECES = st.sampled_from([*ALL_TAGS, *CALL, *SEEDS, "<|im_end|>", "<|image_pad|>", "7"])
SOUP = st.lists(st.one_of(PIECES, WORDS), max_size=12).map("".join)
quick = settings(max_examples=120, deadline=None)


@st.composite
def spans(draw, top: int, least: int = 1) -> tuple[int, int]:
    low = draw(st.integers(0, top - least))
    return low, draw(st.integers(low + least, top))


@st.composite
def grid_boxes(draw, width: int, height: int) -> list[float]:
    (x0, x1), (y0, y1) = draw(spans(width)), draw(spans(height))
    return [x0 / width, y0 / height, x1 / width, y1 / height]


@st.composite
def boxes(draw) -> tuple[float, float, float, float]:
    """Boxes that may reach over the border."""
    x0, y0 = draw(st.floats(-0.5, 0.9)), draw(st.floats(-0.5, 0.9))
    return x0, y0, x0 + draw(st.floats(0.05, 1.5)), y0 + draw(st.floats(0.05, 1.5))


@quick
@given(WORDS.filter(lambda t: not any(tag in t for tag in TAGS)))
def test_answers_come_back_through_the_tokens(text):
    r = renderer("nano")
    tokens = r.assistant(text).tokens
    assert r.read(tokens, [0.0] * len(tokens))[1].answer == text.strip()


def _actions(scale: Scale) -> st.SearchStrategy[Action]:
    """Actions on the grid of coordinates: of the seed systems' operations, and of ours."""
    width, height = (1000, 1000) if scale.kind != "pixels" else scale.extent("img0")

    def zoom(target: str, box: list[float], padding: dict) -> Action:
        return Action(op="zoom_in", target=target, arguments={"box": box, **padding})

    def select(numbers: list[int]) -> Action:
        return Action(op="select_frames", target="vid0", arguments={"frames": numbers})

    def segment(target: str, box: list[float]) -> Action:
        return Action(op="segment_object_at", target=target, arguments={"box": box})

    targets = st.sampled_from(scale.images)
    return st.one_of(
        st.builds(zoom, targets, grid_boxes(width, height), st.sampled_from([{}, {"padding": 0.1}])),
        st.lists(st.integers(0, 400), min_size=1, max_size=8).map(select),
        targets.map(lambda name: Action(op="read_text", target=name)),
        st.builds(segment, targets, grid_boxes(width, height)),
    )


EPISODE = [
    ImageView(id="img0", view_size=(560, 280)),
    ImageView(id="vid0.0", parent="vid0", frame=0, view_size=(560, 280)),
    *(ImageView(id=f"obs{i}", view_size=(560, 280)) for i in (1, 2)),
]


def _smallest_side(action: Action) -> int:
    sides = zip(action.arguments["box"], EPISODE[0].view_size * 2, strict=True)
    x0, y0, x1, y1 = (round(v * side) for v, side in sides)
    return min(x1 - x0, y1 - y0)


@quick
@given(
    st.sampled_from(list(DIALECTS.values())),
    WORDS.filter(lambda t: not any(tag in t for tag in ALL_TAGS)),
    st.data(),
)
def test_a_rendered_action_parses_to_the_adapted_action(dialect, think, data):
    scale = Scale.of(dialect.scale or "thousand", EPISODE)
    action = data.draw(_actions(scale))
    nameless = dialect.name == "deepeyes" and action.target != "img0"
    if nameless or not dialect.offers(OPERATIONS[action.op]):
        with pytest.raises(OperationError):
            dialect.render(action, scale, think)
        return
    # It would be refused: it is not written
    if dialect.name == "deepeyes" and _smallest_side(dialect.adapt(action)) <= 30:
        with pytest.raises(OperationError, match="more than 30"):
            dialect.render(action, scale, think)
        return
    result, text = dialect.adapt(action), "".join(dialect.render(action, scale, think))
    reply = dialect.parse(text, OPERATIONS, scale)
    assert reply.error is None
    if result == action:
        assert reply.action == action
    box = result.arguments.pop("box", None), reply.action.arguments.pop("box", None)
    assert reply.action == result
    if box[0]:
        np.testing.assert_allclose(*box, atol=0.0005)
    if think or not dialect.thinks:
        assert dialect.well_formed(text)


CALLS = st.tuples(*[st.integers(0, 1000)] * 4, st.integers(0, 3))


def _line(call: tuple[int, ...]) -> str:
    target = f',"target":"obs{call[4]}"' if call[4] else ""
    return f'<tool_call>{{"name":"zoom_in","arguments":{{"bbox_2d":{list(call[:4])}{target}}}}}</tool_call>'


class _Tools:
    async def execute(self, action, images, objects):
        picture, budget = np.zeros((300, 400, 3), np.uint8), PixelBudget(16 * 16, 64 * 64)
        return execute(action, Scene({"img0": picture}, images, budget=budget, multiple=16))


LINES = st.one_of(CALLS.map(_line), SOUP, st.lists(st.integers(-1, 800), max_size=9))


@quick
@given(
    st.lists(LINES, min_size=1, max_size=5),
    st.builds(Limits, st.integers(1, 5), st.integers(1, 40), st.integers(20, 400), st.integers(1, 4)),
)
def test_masks_cover_exactly_what_the_policy_generated_however_the_episode_ends(lines, limits):
    r = renderer("nano")
    said: list[Completion] = []

    class Recorder(ScriptedSession):
        async def generate(self, tokens, views, sampling, on_tokens=None):
            said.append(await super().generate(tokens, views, sampling))
            return said[-1]

    view = image_view("nano")
    session = Recorder(r, [*lines, "<answer>7</answer>"])
    fixed = (_Tools(), limits, SamplingParams(), "g", 0)
    run = run_episode(session, r, Question(id="q", question="?"), [view], [pixels(view)], *fixed)
    episode = asyncio.run(run)
    t = episode.trajectory
    tokens, mask = t.token_ids(), t.loss_mask()
    kept = [turn for turn in t.turns if turn.is_policy]
    assert len(tokens) == len(mask) == len(t.behaviour_log_probs()) <= limits.max_context
    masked = [token for token, m in zip(tokens, mask, strict=True) if m]
    assert masked == [token for turn in kept for token in turn.tokens]
    for turn, completion in zip(kept, said, strict=False):
        assert turn.tokens == (completion.tokens if turn.error != "bad_token" else [])
    if t.stop_reason is not StopReason.ERROR:
        assert len(kept) == len(said)
    assert not set(masked) & set(r.spec.banned)
    assert tokens.count(r.spec.image_token) == sum(r.spec.image_tokens(*v.shape[:2]) for v in episode.views)
    assert len(episode.views) == len(t.images) <= limits.max_images
    shown = [o.id for o in t.observations if o.status == "ok"]
    assert shown == [f"obs{i + 1}" for i in range(t.operations_ok)]
    assert t.policy_turns <= limits.max_turns


@quick
@given(boxes())
def test_clamping_is_idempotent_and_stays_inside(box):
    try:
        inside = geometry.clamp(box)
    except OperationError:
        assert box[0] >= 1 or box[1] >= 1 or box[2] <= 0 or box[3] <= 0
        return
    assert geometry.clamp(inside) == inside
    assert 0 <= inside[0] < inside[2] <= 1
    assert 0 <= inside[1] < inside[3] <= 1
    assert all(i == b for i, b in zip(inside, box, strict=True) if 0 <= b <= 1)


CORNERS = st.tuples(st.floats(0, 0.7), st.floats(0, 0.8))


@quick
@given(st.lists(CORNERS.map(lambda at: (*at, at[0] + 0.3, at[1] + 0.2)), max_size=4), boxes())
def test_boxes_map_through_the_chain_of_parents_and_back(parents, box):
    chain = [ImageView(id="img0")]
    for i, parent in enumerate(parents):
        chain.append(ImageView(id=f"obs{i}", parent=chain[-1].id, box=geometry.clamp(parent)))
    x, y, w, h = 0.0, 0.0, 1.0, 1.0  # the same map written as an affine frame, from the root down
    for view in chain[1:]:
        x0, y0, x1, y1 = view.box
        x, y, w, h = x + x0 * w, y + y0 * h, (x1 - x0) * w, (y1 - y0) * h
    mapped = geometry.to_root(geometry.chain(chain[::-1], chain[-1].id), box)
    expected = (x + box[0] * w, y + box[1] * h, x + box[2] * w, y + box[3] * h)
    np.testing.assert_allclose(mapped, expected, atol=1e-12)
    outer = geometry.to_root(chain)
    np.testing.assert_allclose(geometry.relative(outer, geometry.compose(outer, box)), box, atol=1e-6)


@quick
# A side of the root's box is rounded to nothing
@example([(0.0, 0.5, 1.0, 1.5), (0.0, -0.5, 1.0, 5e-17)], 20, 20)
@given(st.lists(boxes(), min_size=1, max_size=4), st.integers(20, 300), st.integers(20, 300))
def test_crops_of_crops_show_exactly_the_pixels_their_boxes_name(path, width, height):
    picture = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3).astype(np.uint8)
    images, here = [ImageView(id="img0")], picture
    for i, box in enumerate(path):
        action = Action(op="zoom_in", target=images[-1].id, arguments={"box": list(box)})
        observation, views = execute(action, Scene({"img0": picture}, images, budget=PixelBudget(1, 10**6)))
        if observation.status == "error":
            assert observation.code in ("too_small", "out_of_range")
            return
        (image,) = observation.images
        rows, columns = here.shape[:2]
        x0, y0, x1, y1 = image.box
        # The recorded box lies on pixel edges, at most half a pixel off, and names what is shown
        edges = np.array([x0 * columns, y0 * rows, x1 * columns, y1 * rows])
        np.testing.assert_allclose(edges, edges.round(), atol=1e-6)
        expected = np.array(geometry.clamp(box)) * [columns, rows, columns, rows]
        assert np.abs(edges - expected).max() <= 0.5 + 1e-6
        left, top, right, bottom = edges.round().astype(int)
        np.testing.assert_array_equal(views[0], here[top:bottom, left:right])
        assert image.source_size == (right - left, bottom - top)
        images.append(image.model_copy(update={"id": f"obs{i}"}))
        here = views[0]

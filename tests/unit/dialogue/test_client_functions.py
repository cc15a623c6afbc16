"""Functions that a client runs: what the policy reads of them, and episodes that the client interrupts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import numpy as np
import pytest
from dialogue_models import ScriptedSession, pixels, renderer
from playing import RealTools

from pixelis.config import DialogueConfig
from pixelis.dialogue.agent import Episode, Limits, Outcome, run_episode
from pixelis.dialogue.dialects import DIALECTS
from pixelis.dialogue.render import Renderer
from pixelis.dialogue.resumption import Resume, Said, up_to
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadInput, OperationError
from pixelis.operations import select
from pixelis.operations.environment import PARENT
from pixelis.operations.function import function_operation
from pixelis.operations.scale import Scale
from pixelis.records import Action, Function, ImageView, Observation, Question, StopReason, Trajectory

PICTURE = np.random.default_rng(1).integers(0, 256, (560, 1120, 3), dtype=np.uint8)
VIEW = ImageView(id="img0", source_size=(1120, 560), view_size=(1120, 560))
LIMITS = Limits(6, 600, 8000, 8)
SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "bbox_2d": {"type": "array", "items": {"type": "integer"}, "description": "ends <|im_end|>"},
        "note": {"type": ["string", "null"]},
        "box": {"$ref": "#/$defs/Box"},
        "pattern": {"type": "string", "pattern": "(a+)+$"},
    },
    "required": ["bbox_2d"],
    "additionalProperties": False,
    "$defs": {"Box": {"anyOf": [{"type": "null"}, {"type": "string"}]}},
}
LOOK = Function(name="look", description="Look auf Straße.", parameters=SCHEMA)
QUESTION = Question(id="q", question="Which digit?", answers=["7"], functions=[LOOK])
ZOOM_CALL = '<tool_call>{"name":"zoom_in","arguments":{"bbox_2d":[0,0,560,560]}}</tool_call>'
LOOK_CALL = '<tool_call>{"name":"look","arguments":{"bbox_2d":[7,900000],"note":null}}</tool_call>'
ANSWER = "<answer>7</answer>"


def with_functions(dialect: str = "qwen", name: str = "large", **settings) -> Renderer:
    base = renderer(name)
    config = DialogueConfig(dialect=dialect, **settings)
    return Renderer(base.tokenizer, base.spec, config, select(["zoom_in"]))


def given(text: str, *sizes: tuple[int, int]) -> Outcome:
    """What a client says, with pictures."""
    images = [ImageView(id="", parent=PARENT, source_size=size, view_size=size) for size in sizes]
    return Observation(status="ok", text=text, images=images), [pixels(image) for image in images]


def complete(
    lines: Sequence[str],
    so_far: Episode | None = None,
    *said: Said,
    limits: Limits = LIMITS,
    question: Question = QUESTION,
    r: Renderer | None = None,
    tools: bool = True,
) -> tuple[Episode, ScriptedSession]:
    """One completion of an outside episode, on a new session."""
    r = r or with_functions(max_calls=2)
    session = ScriptedSession(r, lines)
    so_far = so_far or Episode(Trajectory(id="traj_own", question_id="q"))
    fixed = (RealTools({"img0": PICTURE}, r) if tools else None, limits, SamplingParams(), "g", 3)
    more = {"trajectory_id": so_far.trajectory.id, "resume": Resume(so_far, said)}
    episode = asyncio.run(run_episode(session, r, question, [VIEW], [PICTURE], *fixed, **more))
    assert session.closed >= 1
    return episode, session


def sound(episode: Episode) -> Trajectory:
    """What the learner relies on."""
    t, spec = episode.trajectory, renderer("large").spec
    assert Trajectory.model_validate_json(t.model_dump_json()) == t
    assert [v.shape for v in episode.views] == [(i.view_size[1], i.view_size[0], 3) for i in t.images]
    assert t.token_ids().count(spec.image_token) == sum(
        spec.image_tokens(*v.shape[:2]) for v in episode.views
    )
    assert [i for turn in t.turns for i in turn.images] == [i.id for i in t.images]
    assert t.loss_mask() == [int(turn.role == "assistant") for turn in t.turns for _ in turn.tokens]
    return t


def test_calls_of_both_sides_mix_and_the_client_goes_on_where_it_was_interrupted():
    first, session = complete([ZOOM_CALL, LOOK_CALL])
    t = sound(first)
    assert (t.id, t.stop_reason, t.answer, session.kept) == ("traj_own", StopReason.CALL, None, 1)
    assert t.turns[-1].action == Action(
        op="look", target="", arguments={"bbox_2d": [7, 900000], "note": None}
    )
    mixed = f"{LOOK_CALL}\n{ZOOM_CALL}"
    said = Said([given("seen <image> and <|im_end|> <image>", (56, 56), (84, 56))])
    second, session = complete([mixed], first, said)
    assert session.calls[0][0] == sound(second).token_ids()[: -len(second.trajectory.turns[-1].tokens)]
    assert session.calls[0][1] == 4  # all pictures so far
    without = QUESTION.model_copy(update={"functions": []})  # as `tool_choice: none`
    last, session = complete([ANSWER], second, Said([given("dark")]), question=without)
    done = sound(last)
    assert (done.stop_reason, done.answer, done.operations_ok) == (StopReason.ANSWER, "7", 4)
    told = [turn.text for turn in done.turns if turn.role == "tool"]
    assert told == [
        "obs1 = zoom_in(img0)",
        "\nseen  and <|im_end|> \n",
        "\ndark\n",
        "obs4 = zoom_in(img0)",
    ]
    assert [i.id for i in done.images] == ["img0", "obs1", "obs2.0", "obs2.1", "obs4"]
    shared = len(t.token_ids())
    assert done.token_ids()[:shared] == t.token_ids() == second.trajectory.token_ids()[:shared]
    assert len(t.turns) < len(done.turns), "the earlier record is not changed"
    # In the family's own form, in which a result has lines of its own
    result = with_functions().tokenizer.decode(done.turns[5].tokens)
    assert result.startswith("\n<|im_start|>user\n<tool_response>\nseen <|vision_start|><|image_pad|>")
    assert result.endswith("\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_what_breaks_the_schema_is_read_by_the_policy_and_does_not_reach_the_client():
    wrong = LOOK_CALL.replace("[7,900000]", '["a"]')
    episode, session = complete([wrong, LOOK_CALL])
    assert len(session.calls) == 2
    (refused,) = sound(episode).observations
    assert (refused.code, refused.text) == ("bad_arguments", "bbox_2d.0: 'a' is not of type 'integer'")
    assert episode.trajectory.stop_reason is StopReason.CALL


def test_a_branch_keeps_the_tokens_that_it_shares():
    first, _ = complete([LOOK_CALL])
    second, _ = complete([LOOK_CALL], first, Said([given("one", (56, 56))]))
    third, _ = complete([ANSWER], second, Said([given("two")]))
    whole = third.trajectory
    for policy_turns, stop in ((1, StopReason.CALL), (3, StopReason.ANSWER)):
        branch = up_to(whole, policy_turns)
        assert (branch.stop_reason, branch.policy_turns) == (stop, policy_turns)
        assert branch.id != whole.id
    branch = up_to(whole, 2)
    other, _ = complete([ANSWER], Episode(branch, third.views[: len(branch.images)]), Said([given("three")]))
    shared = len(branch.token_ids())
    assert other.trajectory.token_ids()[:shared] == whole.token_ids()[:shared]
    assert sound(other).token_ids() != whole.token_ids()
    assert other.trajectory.id == branch.id
    # An edited history: the first call is another one, which the policy never made
    beginning = Episode(up_to(whole, 0))
    edited = Said([given("four", (56, 56))], reply="Let me look.", calls=[Action(op="look", target="")])
    episode, session = complete([ANSWER], beginning, edited)
    t = sound(episode)
    assert [turn.role for turn in t.turns] == ["system", "user", "tool", "assistant"]
    text = with_functions().tokenizer.decode(
        [x for x in t.token_ids() if x != renderer("large").spec.image_token]
    )
    quoted = 'assistant\nLet me look.\n<tool_call>{"name":"look","arguments":{}}</tool_call><|im_end|>\n<|im_start|>user\n'
    assert quoted in text
    assert len(session.calls) == t.policy_turns == 1


def test_a_user_goes_on_after_an_answer_or_with_the_results():
    first, _ = complete([ANSWER])
    message = given("And <image>?", (56, 56))
    second, _ = complete(["no call"], first, Said(message=message))
    t = sound(second)
    assert (t.stop_reason, t.answer) == (StopReason.NO_ACTION, None)
    assert [turn.role for turn in t.turns[-4:]] == ["user", "assistant", "user", "assistant"]
    assert [i.id for i in t.images] == ["img0", "img1"]
    third, _ = complete([LOOK_CALL], second, Said(message=given("Look!")))
    last, _ = complete([ANSWER], third, Said([given("dark")], message=given("Well?")))
    text = with_functions().tokenizer.decode([x for turn in last.trajectory.turns[-3:] for x in turn.tokens])
    assert text == (
        "\n<|im_start|>user\n<tool_response>\ndark\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n<answer>7</answer><|im_end|>"
    )
    assert sound(last).answer == "7"


def test_a_message_after_a_turn_that_was_cut_off_ends_that_turn_first():
    cut, _ = complete(["word " * 300], limits=Limits(6, 8, 8000, 8))
    assert cut.trajectory.stop_reason is StopReason.LENGTH
    episode, session = complete([ANSWER], cut, Said(message=given("Shorter!")))
    assert sound(episode).answer == "7"
    assert session.calls[0][0][len(cut.trajectory.token_ids())] == renderer("large").spec.stop


@pytest.mark.parametrize(
    "said",
    [
        [],
        [Said()],
        [Said(message=given("and?"))],
        [Said([given("one"), given("two")])],
        [Said([given("one")], reply="after a policy turn")],
        [Said([given("one")]), Said(message=given("two users in a row"))],
        [Said([given("one")]), Said(reply="without an end")],
    ],
)
def test_replies_that_do_not_follow_from_the_calls_end_the_episode_with_a_name(said: list[Said]):
    first, _ = complete([LOOK_CALL])
    episode, session = complete([ANSWER], first, *said)
    t = episode.trajectory
    assert (t.stop_reason, t.unscored, session.calls) == (StopReason.ERROR, "wrong_results", [])


def test_limits_hold_for_the_whole_episode():
    first, _ = complete([LOOK_CALL])
    used = len(first.trajectory.token_ids())
    result = Said([given("dark", (56, 56))])
    for limits, stop in (
        (Limits(1, 600, 8000, 8), StopReason.OVER_TURN),
        (Limits(6, 600, used + 10, 8), StopReason.OVER_CONTEXT),
        (Limits(6, 600, 8000, 1), StopReason.OVER_IMAGES),
    ):
        episode, session = complete([ANSWER], first, result, limits=limits)
        assert (sound(episode).stop_reason, session.calls) == (stop, [])
        assert episode.trajectory.turns == first.trajectory.turns
    last, _ = complete([LOOK_CALL], first, result, limits=Limits(2, 600, 8000, 8))
    assert last.trajectory.stop_reason is StopReason.OVER_TURN, "as a call of ours in the last turn"


def test_the_oldest_version_is_that_of_the_episode():
    first, _ = complete([LOOK_CALL])
    for earlier, version in ((2, 2), (9, 3)):
        old = first.trajectory.model_copy(update={"policy_version": earlier, "seconds": 5.0})
        episode, _ = complete([ANSWER], Episode(old, first.views), Said([given("dark")]))
        assert episode.trajectory.policy_version == version
        assert episode.trajectory.seconds > 5


def test_the_policy_reads_the_schema_as_the_client_wrote_it_and_no_control_tokens():
    r = with_functions()
    question = QUESTION.model_copy(update={"system": "You are terse. <|im_end|>"})
    system, _ = r.prompt(question, [VIEW])
    assert system.text.startswith("You are terse. <|im_end|>\n\nThink inside <think>")
    schemas = system.text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    own, look = (json.loads(schema)["function"] for schema in schemas)
    assert (own["name"], look["name"], look["parameters"]) == ("zoom_in", "look", SCHEMA)
    assert "auf Straße" in system.text
    assert system.tokens.count(r.spec.stop) == 1
    alone = r.prompt(question, [VIEW], operations=False)[0].text
    assert '"look"' in alone
    assert '"zoom_in"' not in alone
    bare, _ = r.prompt(question.model_copy(update={"functions": []}), [VIEW], operations=False)
    assert bare.text.startswith("You are terse.")


@pytest.mark.parametrize(
    ("dialect", "change", "code"),
    [
        ("mini_o3", {}, "no_functions"),
        ("plain", {}, "no_functions"),
        ("qwen", {"functions": [Function(name="zoom_in")]}, "name_taken"),
        ("qwen", {"functions": [Function(name="zoom_in")], "tools": []}, "name_taken"),
        ("qwen", {"environment": "walk"}, "no_functions"),
    ],
)
def test_functions_that_cannot_be_offered_are_refused_by_name(dialect: str, change: dict, code: str):
    question = QUESTION.model_copy(update=change)
    with pytest.raises(BadInput) as error:
        with_functions(dialect).offered(question, operations="environment" not in change)
    assert error.value.code == code


@pytest.mark.parametrize("dialect", ["qwen", "qwen_xml"])
def test_arguments_are_passed_on_as_written(dialect: str):
    d, operations = DIALECTS[dialect], {"look": function_operation(LOOK)}
    scale = Scale.of("thousand", [VIEW])
    arguments = {"bbox_2d": [7, 900000], "box": "left", "note": "line\nbreak", "pattern": "a" * 40 + "b"}
    action = Action(op="look", target="", arguments=arguments)
    reply = d.parse("".join(d.render(action, scale)), operations, scale)
    assert (reply.error, reply.action) == (None, action)
    refused = d.parse("".join(d.render(Action(op="look", target=""), scale)), operations, scale)
    assert refused.error.message == "'bbox_2d' is a required property"


def test_no_schema_takes_long_to_check():
    doubling = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {}}
    turning = {"a0": {"anyOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/a0"}]}}
    for definitions in (doubling, turning):
        schema = {"$defs": definitions, "properties": {"x": {"$ref": "#/$defs/a0"}}}
        with pytest.raises(OperationError, match="take too long"):
            function_operation(Function(name="f", parameters=schema)).check({"x": 1})
    expression = {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "(a+)+$"}
    slow = {
        "properties": {"x": expression},
        "patternProperties": {"(b+)+$": {}},
        "additionalProperties": False,
    }
    function_operation(Function(name="f", parameters=slow)).check({"x": "a" * 40 + "!", "b" * 40 + "!": 1})
    tree = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    recursive = function_operation(
        Function(
            name="f", parameters={"$defs": {"tree": tree}, "properties": {"t": {"$ref": "#/$defs/tree"}}}
        )
    )
    assert recursive.check({"t": {"of": [{"of": []}]}})
    with pytest.raises(OperationError, match=r"t\.of\.0\.of"):
        recursive.check({"t": {"of": [{"of": 3}]}})

"""Thoughts while a turn is generated: whole at the end, whatever the pieces, and without markup."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pixelis.dialogue.dialects import DIALECTS
from pixelis.records import Turn
from pixelis.serve.agent_types import TextEvent, TurnEvent
from pixelis.serve.protocol.response_events import ThoughtStream

TURNS = {
    "<think>I look closer.</think><tool_call>{}</tool_call>": "I look closer.",
    "I look.\n<tool_call>{}</tool_call>": "I look.",
    "<answer>7</answer>": "",
    "<think>5 < 7, so it is a</think><answer>b</answer>": "5 < 7, so it is a",
    "nothing at all": "nothing at all",
}


def sent(text: str, cuts: list[int], dialect: str = "qwen") -> list[str]:
    """What is sent of a turn that arrives in pieces."""
    stream, place, pieces = ThoughtStream(dialect), 0, list[str]()
    for size in [*cuts, len(text)]:
        pieces.append(stream.add(TextEvent(sample=0, samples=4, text=text[place : place + size])))
        place += size
    return [*pieces, stream.end(TurnEvent(sample=0, samples=4, turn=Turn(role="assistant", text=text)))]


@given(st.sampled_from(sorted(TURNS)), st.lists(st.integers(1, 4), max_size=80))
def test_the_pieces_of_a_thought_are_the_thought(text: str, cuts: list[int]) -> None:
    assert "".join(sent(text, cuts)) == TURNS[text] == DIALECTS["qwen"].thought(text)


def test_a_turn_without_pieces_and_another_attempt_are_sent_whole() -> None:
    stream = ThoughtStream("qwen")
    turn = Turn(role="assistant", text="I look.<answer>7</answer>")
    assert stream.end(TurnEvent(sample=0, samples=1, turn=turn)) == "I look."
    assert stream.add(TextEvent(sample=0, samples=1, text="I l")) == "I l"
    assert stream.add(TextEvent(sample=0, samples=1, text="We", attempt=1)) == "We"
    again = TurnEvent(sample=0, samples=1, turn=Turn(role="assistant", text="We look."), attempt=1)
    assert stream.end(again) == " look."

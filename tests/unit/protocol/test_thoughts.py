"""Thoughts while a turn is generated: whole at the end, whatever the pieces, and without markup."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pixelis.dialogue.dialects import DIALECTS
from pixelis.protocol.stream import ThoughtStream

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
        pieces.append(stream.add(text[place : place + size]))
        place += size
    return [*pieces, stream.end(text)]


@given(st.sampled_from(sorted(TURNS)), st.lists(st.integers(1, 4), max_size=80))
def test_the_pieces_of_a_thought_are_the_thought(text: str, cuts: list[int]) -> None:
    assert "".join(sent(text, cuts)) == TURNS[text] == DIALECTS["qwen"].thought(text)


def test_a_turn_without_pieces_and_another_attempt_are_sent_whole() -> None:
    stream = ThoughtStream("qwen")
    assert stream.end("I look.<answer>7</answer>") == "I look."
    assert stream.add("I l") == "I l"
    assert stream.add("We", attempt=1) == "We"
    assert stream.end("We look.", attempt=1) == " look."

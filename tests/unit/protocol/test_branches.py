"""Where requests stand in an episode, for any clients whose requests interleave."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pixelis.protocol.branches import Branches, Extends, Forks, Repeats
from pixelis.protocol.messages import Call, Message

SYSTEM, USER = Message("system", "Be brief."), Message("user", "Which digit?")
TEXTS = st.sampled_from(["a", "b", "c"])


def calling(id: str, **arguments: Any) -> Message:
    return Message("assistant", calls=(Call(id, "look", arguments),))


def result(id: str, text: str = "seen") -> Message:
    return Message("tool", text, call_id=id)


class Clients(RuleBasedStateMachine):
    """Clients whose first messages differ by a number, so that a history belongs to one branch."""

    histories: Bundle[tuple[str, list[Message]]] = Bundle("histories")

    @initialize()
    def begin(self) -> None:
        self.branches, self.calls, self.agents = Branches(), 0, 0

    def ask(self, messages: list[Message], key: str = "") -> Any:
        """Place a request; no other branch may change."""
        before = copy.deepcopy(self.branches.branches)
        place = self.branches.place(copy.deepcopy(messages), key)
        for name, branch in before.items():
            if name != place.branch or isinstance(place, Repeats):
                assert self.branches.branches[name] == branch
        return place

    def answer(self, branch: str) -> Message:
        self.calls += 1
        message = calling(f"call_{self.calls}", box=[1.0])
        self.branches.reply(branch, message)
        return message

    @rule(target=histories, text=TEXTS)
    def new_agent(self, text: str) -> Any:
        """A sub-agent with a system prompt of its own shares nothing with the others."""
        self.agents += 1
        messages = [Message("system", f"Agent {self.agents}"), Message("user", text)]
        place = self.ask(messages)
        assert (place.source, place.keep, place.new) == (None, 0, messages)
        assert place.branch == (f"branch-{self.agents_before}" if self.agents_before else "main")
        return place.branch, [*messages, self.answer(place.branch)]

    @property
    def agents_before(self) -> int:
        return len(self.branches.branches) - 1

    @rule(target=histories, history=consumes(histories), text=TEXTS)
    def go_on(self, history: tuple[str, list[Message]], text: str) -> Any:
        branch, messages = history
        new = [result(messages[-1].calls[0].id, text)]
        place = self.ask([*messages, *new])
        assert place == Extends(branch, new)
        return branch, [*messages, *new, self.answer(branch)]

    @rule(history=histories, data=st.data())
    def repeat(self, history: tuple[str, list[Message]], data: st.DataObject) -> None:
        """The client lost the reply: it gets the same, and the branches stay as they are."""
        branch, messages = history
        assert self.ask(messages[:-1]) == Repeats(branch)

    @rule(target=histories, history=histories, data=st.data())
    def edit(self, history: tuple[str, list[Message]], data: st.DataObject) -> Any:
        """An edited result of a tool forks at the last reply before it."""
        messages = history[1]
        places = [i for i, message in enumerate(messages) if message.role == "tool"]
        if not places:
            return multiple()
        place = data.draw(st.sampled_from(places))
        self.calls += 1
        edited = dataclasses.replace(messages[place], text=f"edited {self.calls}")
        found = self.ask([*messages[:place], edited])
        assert isinstance(found, Forks)
        assert (found.keep, found.new) == (place, [edited])
        assert self.branches.branches[found.source].messages[:place] == messages[:place]
        return found.branch, [*messages[:place], edited, self.answer(found.branch)]

    @rule(history=histories, text=TEXTS)
    def fail(self, history: tuple[str, list[Message]], text: str) -> None:
        """A request that failed leaves no trace."""
        before = copy.deepcopy(self.branches.branches)
        place = self.ask([*history[1], result(history[1][-1].calls[0].id, text)])
        self.branches.abandon(place.branch)
        assert self.branches.branches == before

    @invariant()
    def replies_are_the_policys(self) -> None:
        for branch in self.branches.branches.values():
            assert {branch.messages[place].role for place in branch.replies} <= {"assistant"}


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_a_request_is_repeated_while_it_waits_and_until_it_is_continued() -> None:
    branches = Branches()
    assert branches.place([USER], "seed 1") == Forks("main", None, 0, [USER])
    assert branches.place([USER], "seed 1") == Repeats("main")
    assert branches.place([USER], "seed 2") == Forks("branch-1", None, 0, [USER])
    branches.reply("main", calling("a"))
    assert branches.place([USER], "seed 1") == Repeats("main")
    assert branches.place([USER, calling("a"), result("a")]) == Extends("main", [result("a")])
    assert branches.place([USER], "seed 1").branch == "branch-2"


def test_a_request_beside_one_that_waits_is_a_branch() -> None:
    branches = Branches()
    branches.place([USER])
    branches.reply("main", calling("a"))
    said = [USER, calling("a")]
    assert branches.place([*said, result("a", "7")]) == Extends("main", [result("a", "7")])
    assert branches.place([*said, result("a", "8")]) == Forks("branch-1", "main", 2, [result("a", "8")])
    branches.abandon("main")
    assert branches.place([*said, result("a", "7")]) == Extends("main", [result("a", "7")])
    branches.abandon("branch-1")
    assert list(branches.branches) == ["main"]


@given(st.dictionaries(st.text(max_size=3), st.integers() | st.booleans() | st.text(max_size=3), max_size=4))
def test_changes_without_meaning_are_none(arguments: dict[str, Any]) -> None:
    """Other ids, keys in another order, whole numbers as JavaScript writes them."""
    branches = Branches()
    branches.place([SYSTEM, USER])
    branches.reply("main", calling("call_1", n=2.0, **{"a" + key: value for key, value in arguments.items()}))
    other = {**{"a" + key: value for key, value in reversed(arguments.items())}, "n": 2}
    sent = [SYSTEM, USER, calling("x", **other), result("x")]
    assert branches.place(sent) == Extends("main", [result("x")])
    assert (
        branches.place([SYSTEM, USER, calling("x", **{**other, "n": True}), result("x")]).branch == "branch-1"
    )


def test_of_equal_branches_the_one_with_the_same_ids_is_continued() -> None:
    branches = Branches()
    for key, id in (("1", "a"), ("2", "b"), ("3", "c")):
        branches.reply(branches.place([USER], key).branch, calling(id, box=1))
    assert branches.place([USER, calling("b", box=1), result("b")]).branch == "branch-1"
    assert branches.place([USER, calling("x", box=1), result("x", "7")]).branch == "branch-2"

"""Output items of OpenAI's responses with the events of their streams."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pixelis.protocol.stream import ThoughtStream, sse_event
from pixelis.records import Action, Observation, Turn, new_id

SERVER = "pixelis"
"""``server_label`` of operations, which OpenAI's format knows as calls that a server has executed."""


class OutputItems:
    """Builds ``output`` from the turns of one sample; ``text``, ``turn`` and ``take`` return the new events.

    ``calls`` are the places of calls without a result, ``thought`` the place and text of one that has not
    ended.
    """

    def __init__(self, dialect: str, functions: Collection[str], ids: str = ""):
        """``functions``: the client's tools. ``ids``: common part of the ids of its items, random if empty."""
        self.thoughts, self.functions, self.ids = ThoughtStream(dialect), functions, ids
        self.output: list[dict[str, Any]] = []
        self.calls: list[int] = []
        self.thought: tuple[dict[str, Any], str] | None = None
        self.events: list[str] = []
        self.number = self.attempt = 0

    def take(self) -> str:
        events, self.events = self.events, []
        return "".join(events)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append(sse_event({"type": kind, "sequence_number": self.number, **fields}, kind))
        self.number += 1

    def text(self, text: str, attempt: int = 0) -> str:
        """A piece of text of the next turn."""
        if thought := self.thoughts.add(text, attempt):
            self._start_over(attempt)
            self._think(thought)
        return self.take()

    def turn(self, turn: Turn, attempt: int = 0) -> str:
        """A whole turn after the prompt."""
        self._start_over(attempt)
        if turn.is_policy:
            if rest := self.thoughts.end(turn.text, attempt):
                self._think(rest)
            self._end_thought("completed")
            for action in turn.actions:
                if action.op not in self.functions:
                    self._call(action)
        elif turn.role == "tool" and self.calls and turn.observation is not None:
            self._result(self.calls.pop(0), turn.observation)
        return self.take()

    def function_call(self, call_id: str, name: str, arguments: str) -> None:
        """A call that the client runs."""
        item = {"id": self._id("fc"), "type": "function_call", "call_id": call_id, "name": name}
        place = self._add(item | {"arguments": arguments, "status": "in_progress"}, arguments="")
        self.event("response.function_call_arguments.delta", **place, delta=arguments)
        self.event("response.function_call_arguments.done", **place, name=name, arguments=arguments)
        self._done(place["output_index"], status="completed")

    def message(self, text: str | None, refusal: str | None, log_probs: list[dict[str, Any]]) -> None:
        """The answer with its tokens, or the reason why there is none."""
        kind, name, content = "refusal", "refusal", refusal or ""
        delta: dict[str, Any] = {}
        if text is not None:
            kind, name, content, delta = "output_text", "text", text, {"logprobs": log_probs}
        part = {"type": kind, name: content, **({"annotations": []} if delta else {}), **delta}
        item = {"id": self._id("msg"), "type": "message", "role": "assistant", "content": []}
        place = self._open(item, {**part, name: ""})
        self.event(f"response.{kind}.delta", **place, delta=content, **delta)
        self.event(f"response.{kind}.done", **place, **{name: content}, **delta)
        self._close(place, part)

    def item(self, item: dict[str, Any]) -> None:
        """A complete item of an earlier response."""
        self._done(self._add(item)["output_index"])

    def finish(self) -> None:
        """Mark unfinished items as incomplete."""
        self._end_thought("incomplete")
        for place in self.calls:
            self._done(place, status="incomplete")
        self.calls.clear()

    def _start_over(self, attempt: int) -> None:
        if attempt > self.attempt:
            self.attempt = attempt
            self.finish()

    def _think(self, text: str) -> None:
        if self.thought is None:
            item = {"id": self._id("rs"), "type": "reasoning", "summary": [], "content": []}
            self.thought = self._open(item, {"type": "reasoning_text", "text": ""}), ""
        place, earlier = self.thought
        self.thought = place, earlier + text
        self.event("response.reasoning_text.delta", **place, delta=text)

    def _end_thought(self, status: str) -> None:
        if self.thought is not None:
            (place, text), self.thought = self.thought, None
            self.event("response.reasoning_text.done", **place, text=text)
            self._close(place, {"type": "reasoning_text", "text": text}, status)

    def _call(self, action: Action) -> None:
        target = {"target": action.target} if action.target else {}
        arguments = json.dumps({**target, **action.arguments})
        item: dict[str, Any] = {"id": self._id("mcp"), "type": "mcp_call", "server_label": SERVER}
        item |= {"name": action.op, "arguments": arguments, "output": None, "error": None}
        place = self._add(item | {"status": "in_progress"}, arguments="")
        self.calls.append(place["output_index"])
        self.event("response.mcp_call.in_progress", **place)
        self.event("response.mcp_call_arguments.done", **place, arguments=arguments)

    def _result(self, index: int, observation: Observation) -> None:
        output: dict[str, Any] = {"status": "completed", "output": observation.text}
        if observation.status == "error":
            content = [{"type": "text", "text": f"{observation.code}: {observation.text}"}]
            output = {"status": "failed", "error": {"type": "mcp_tool_execution_error", "content": content}}
        item_id = self.output[index]["id"]
        self.event(f"response.mcp_call.{output['status']}", output_index=index, item_id=item_id)
        self._done(index, **output)

    def _id(self, kind: str) -> str:
        return f"{kind}_{self.ids}{len(self.output):04x}" if self.ids else new_id(kind)

    def _open(self, item: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
        """Add an item with one part; returns the fields that name the part."""
        place = {**self._add(item | {"status": "in_progress"}), "content_index": 0}
        self.event("response.content_part.added", **place, part=part)
        return place

    def _close(self, place: dict[str, Any], part: dict[str, Any], status: str = "completed") -> None:
        self.event("response.content_part.done", **place, part=part)
        self._done(place["output_index"], status=status, content=[part])

    def _add(self, item: dict[str, Any], **shown: Any) -> dict[str, Any]:
        """Add an item, which is ``shown`` with other fields at first; returns the fields that name it."""
        self.output.append(item)
        index = len(self.output) - 1
        self.event("response.output_item.added", output_index=index, item=item | shown)
        return {"output_index": index, "item_id": item["id"]}

    def _done(self, index: int, **changes: Any) -> None:
        self.output[index] = {**self.output[index], **changes}
        self.event("response.output_item.done", output_index=index, item=self.output[index])

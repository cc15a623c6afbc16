"""Output items of OpenAI's responses with the events of their streams."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pixelis.dialogue.dialects import DIALECTS
from pixelis.protocol.stream import sse_event
from pixelis.records import Action, Observation, Turn, new_id

SERVER = "pixelis"
"""``server_label`` of operations, which OpenAI's format knows as calls that a server has executed."""


class ResponseEvents:
    """Builds ``output`` from the turns of one sample. Each method returns the events of what it adds.

    ``calls`` are the places of calls without a result, ``thought`` the place and text of one that has not
    ended.
    """

    def __init__(self, dialect: str, ids: str = "", functions: Collection[str] = ()):
        """``ids``: common part of the ids of its items, random if empty. ``functions``: the client's tools."""
        self.dialect, self.ids, self.functions = DIALECTS[dialect], ids, functions
        self.output: list[dict[str, Any]] = []
        self.calls: list[int] = []
        self.thought: tuple[dict[str, Any], str] | None = None
        self.number = self.attempt = 0

    def event(self, kind: str, **fields: Any) -> str:
        self.number += 1
        return sse_event({"type": kind, "sequence_number": self.number - 1, **fields}, kind)

    def thinking(self, text: str, attempt: int = 0) -> list[str]:
        """A piece of the thought of the next turn."""
        events = self._start_over(attempt)
        if self.thought is None:
            item = {"id": self._id("rs"), "type": "reasoning", "summary": [], "content": []}
            opened, place = self._open(item, {"type": "reasoning_text", "text": ""})
            events, self.thought = events + opened, (place, "")
        place, earlier = self.thought
        self.thought = place, earlier + text
        return [*events, self.event("response.reasoning_text.delta", **place, delta=text)]

    def turn(self, turn: Turn, attempt: int = 0, rest: str | None = None) -> list[str]:
        """A turn after the prompt. ``rest``: the part of its thought not given to ``thinking``, None: all."""
        events = self._start_over(attempt)
        if turn.is_policy:
            if thought := self.dialect.thought(turn.text) if rest is None else rest:
                events += self.thinking(thought, attempt)
            events += self._end_thought("completed")
            for action in turn.actions:
                if action.op not in self.functions:
                    events += self._call(action)
        elif turn.role == "tool" and self.calls and turn.observation is not None:
            events += self._result(self.calls.pop(0), turn.observation)
        return events

    def _call(self, action: Action) -> list[str]:
        target = {"target": action.target} if action.target else {}
        arguments = json.dumps({**target, **action.arguments})
        item: dict[str, Any] = {"id": self._id("mcp"), "type": "mcp_call", "server_label": SERVER}
        item |= {"name": action.op, "arguments": arguments, "output": None, "error": None}
        item["status"] = "in_progress"
        index = len(self.output)
        self.output.append(item)
        self.calls.append(index)
        place = {"output_index": index, "item_id": item["id"]}
        return [
            self.event("response.output_item.added", output_index=index, item=item | {"arguments": ""}),
            self.event("response.mcp_call.in_progress", **place),
            self.event("response.mcp_call_arguments.done", **place, arguments=arguments),
        ]

    def _result(self, index: int, observation: Observation) -> list[str]:
        output: dict[str, Any] = {"status": "completed", "output": observation.text}
        if observation.status == "error":
            content = [{"type": "text", "text": f"{observation.code}: {observation.text}"}]
            output = {"status": "failed", "error": {"type": "mcp_tool_execution_error", "content": content}}
        place = {"output_index": index, "item_id": self.output[index]["id"]}
        return [self.event(f"response.mcp_call.{output['status']}", **place), *self._done(index, **output)]

    def function_call(self, call_id: str, name: str, arguments: str) -> list[str]:
        """A call that the client runs."""
        item = {"id": self._id("fc"), "type": "function_call", "call_id": call_id, "name": name}
        self.output.append(item | {"arguments": "", "status": "in_progress"})
        index = len(self.output) - 1
        place = {"output_index": index, "item_id": item["id"]}
        added = self.event("response.output_item.added", output_index=index, item=self.output[index])
        return [
            added,
            self.event("response.function_call_arguments.delta", **place, delta=arguments),
            self.event("response.function_call_arguments.done", **place, name=name, arguments=arguments),
            *self._done(index, arguments=arguments, status="completed"),
        ]

    def item(self, item: dict[str, Any]) -> list[str]:
        self.output.append(item)
        place = len(self.output) - 1
        return [
            self.event(f"response.output_item.{name}", output_index=place, item=item)
            for name in ("added", "done")
        ]

    def message(self, text: str | None, refusal: str | None, log_probs: list[dict[str, Any]]) -> list[str]:
        """The answer with its tokens, or the reason why there is none."""
        kind, name, content = "refusal", "refusal", refusal or ""
        delta: dict[str, Any] = {}
        if text is not None:
            kind, name, content, delta = "output_text", "text", text, {"logprobs": log_probs}
        part = {"type": kind, name: content, **({"annotations": []} if delta else {}), **delta}
        item = {"id": self._id("msg"), "type": "message", "role": "assistant", "content": []}
        events, place = self._open(item, {**part, name: ""})
        events += [
            self.event(f"response.{kind}.delta", **place, delta=content, **delta),
            self.event(f"response.{kind}.done", **place, **{name: content}, **delta),
        ]
        return events + self._close(place, part)

    def finish(self) -> list[str]:
        """Mark unfinished items as incomplete."""
        places, self.calls = self.calls, []
        thought = self._end_thought("incomplete")
        return thought + [event for place in places for event in self._done(place, status="incomplete")]

    def _id(self, kind: str) -> str:
        return f"{kind}_{self.ids}{len(self.output):04x}" if self.ids else new_id(kind)

    def _start_over(self, attempt: int) -> list[str]:
        events = self.finish() if attempt > self.attempt else []
        self.attempt = max(self.attempt, attempt)
        return events

    def _end_thought(self, status: str) -> list[str]:
        if self.thought is None:
            return []
        (place, text), self.thought = self.thought, None
        done = self.event("response.reasoning_text.done", **place, text=text)
        return [done, *self._close(place, {"type": "reasoning_text", "text": text}, status)]

    def _open(self, item: dict[str, Any], part: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Add an item with one part; returns the events and the fields that name the part."""
        self.output.append(item | {"status": "in_progress"})
        place = {"output_index": len(self.output) - 1, "item_id": item["id"], "content_index": 0}
        added = self.event(
            "response.output_item.added", output_index=place["output_index"], item=self.output[-1]
        )
        return [added, self.event("response.content_part.added", **place, part=part)], place

    def _close(self, place: dict[str, Any], part: dict[str, Any], status: str = "completed") -> list[str]:
        done = self.event("response.content_part.done", **place, part=part)
        return [done, *self._done(place["output_index"], status=status, content=[part])]

    def _done(self, index: int, **changes: Any) -> list[str]:
        self.output[index] = {**self.output[index], **changes}
        return [self.event("response.output_item.done", output_index=index, item=self.output[index])]

"""A corpus of bad requests to every route of the service: wrong fields, pictures, questions, bodies, headers, paths."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gateway_helpers import messages
from scripted import KEY, picture_url
from test_gateway_bad_input import AGENT_FIELDS, BODIES, CHAT_FIELDS, FIELDS, QUESTIONS, REFUSED_PICTURES, agent, chat, responses

ROUTES = {"/v1/agent": agent, "/v1/chat/completions": chat, "/v1/responses": responses}
TYPES: dict[str, list[Any]] = {
    "text": [7, 1.5, True, [], {}, [["x"]]],
    "count": [0, -1, 1.5, "1", True, [], {}, "1"],
    "number": [-0.1, 2.1, "1", True, [], {}, float("nan"), float("inf")],
    "switch": [0, 1, "yes", [], {}, 0.5],
    "seed": [0.5, "7", True, 2**63, -(2**64), [], {}],
}
"""Values that are wrong for a field of a kind."""
AGENT_KINDS = {
    "question": "text",
    "user": "text",
    "samples": "count",
    "max_turns": "count",
    "temperature": "number",
    "seed": "seed",
}
AGENT_KINDS |= dict.fromkeys(["operations", "learn", "remember", "stream", "cache"], "switch")
CHAT_KINDS = {
    "model": "text",
    "user": "text",
    "max_tokens": "count",
    "max_completion_tokens": "count",
    "n": "count",
    "seed": "seed",
}
CHAT_KINDS |= {"temperature": "number", "top_p": "number", "stream": "switch", "logprobs": "switch"}
VLLM = {
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "length_penalty": 2,
    "best_of": 4,
    "use_beam_search": True,
    "min_tokens": 3,
}
VLLM |= {
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "g",
    "ignore_eos": True,
}
VLLM |= {
    "stop_token_ids": [1],
    "bad_words": ["a"],
    "prompt_logprobs": 1,
    "echo": True,
    "chat_template": "x",
    "reasoning_effort": "low",
}
VLLM |= {
    "structured_outputs": {"json": {}},
    "logits_processors": ["x"],
    "mm_processor_kwargs": {"x": 1},
    "extra_body": {"top_k": 1},
}
CHAT_PARTS: list[Any] = [
    *({"type": kind} for kind in ("video_url", "input_audio", "file", "refusal", "image", "TEXT", "", None, 7, [], {})),
    {"type": "image_url", "image_url": picture_url((1, 1))},
    {"type": "image_url", "image_url": None},
    {"type": "image_url", "image_url": {}},
    {"type": "image_url", "image_url": {"url": None}},
    {"type": "image_url", "image_url": {"url": ["x"]}},
    {"type": "image_url"},
    {"type": "text"},
    {"type": "text", "text": None},
    {"type": "text", "text": {"value": "q"}},
    *("q", 7, None, [], {}),
]
MARKERS = [
    "image_pad",
    "video_pad",
    "vision_start",
    "vision_end",
    "im_start",
    "im_end",
    "endoftext",
    "object_ref_start",
    "box_start",
]
INVISIBLE = [
    "\u200b",
    "\u200c\u200d",
    "\u2060",
    "\ufeff\ufeff",
    "\u00ad",
    "\u3164",
    "\u2800 \u2800",
    "\ufe0f",
    "\u202e\u202c",
    "\x01\x02",
]


@dataclass(frozen=True)
class BadRequest:
    """A request that must be refused with a status of 4xx. ``body``: bytes, or a value to send as JSON."""

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    headers: dict[str, Any] = field(default_factory=dict)

    def send(self) -> dict[str, Any]:
        """Arguments of ``httpx.Client.request``."""
        headers: dict[str, Any] = {"Authorization": f"Bearer {KEY}"}
        content = self.body if isinstance(self.body, bytes | None) else json.dumps(self.body).encode()
        if content is not None:
            headers["Content-Type"] = "application/json"
        headers |= self.headers
        headers = {name: value for name, value in headers.items() if value is not None}
        return {"method": self.method, "url": self.path, "content": content, "headers": list(headers.items())}


def corpus() -> list[BadRequest]:
    """All bad requests; their names are distinct."""
    requests = [*_fields(), *_pictures(), *_questions(), *_bodies(), *_headers(), *_paths(), *_orders()]
    assert len({r.name for r in requests}) == len(requests)
    return requests


def _fields() -> Iterator[BadRequest]:
    for path, valid, kinds in (("/v1/agent", agent, AGENT_KINDS), ("/v1/chat/completions", chat, CHAT_KINDS)):
        for name, kind in kinds.items():
            for i, value in enumerate(TYPES[kind]):
                if (name, value) not in (("temperature", 1.5), ("n", 1)):
                    yield BadRequest(f"{path} {name} {kind} {i}", path, {**valid(), name: value})
        for name, changes in FIELDS.items():
            yield BadRequest(f"{path} {name}", path, {**valid(), **changes})
    for name, changes in AGENT_FIELDS.items():
        yield BadRequest(f"agent {name}", "/v1/agent", {**agent(), **changes})
    for name, changes in CHAT_FIELDS.items():
        yield BadRequest(f"chat {name}", "/v1/chat/completions", {**chat(), **changes})
    for name, value in VLLM.items():
        yield BadRequest(f"vllm {name}", "/v1/chat/completions", {**chat(), name: value})
    for i, part in enumerate(CHAT_PARTS):
        parts = [*messages("say 7", picture_url())[0]["content"], part]
        yield BadRequest(f"part {i}", "/v1/chat/completions", {**chat(), "messages": [{"role": "user", "content": parts}]})
    for i, content in enumerate([7, True, {}, {"type": "text"}, [["q"]], None, "", []]):
        yield BadRequest(f"content {i}", "/v1/chat/completions", {**chat(), "messages": [{"role": "user", "content": content}]})
    for role in ("assistant", "tool", "function", "User", "", None, 7):
        yield BadRequest(f"role {role!r}", "/v1/chat/completions", {**chat(), "messages": [{"role": role, "content": "q"}]})


def _pictures() -> Iterator[BadRequest]:
    pictures: dict[str, Any] = {name: image for name, (image, _) in REFUSED_PICTURES.items()}
    for format in ("PNG", "JPEG", "WEBP", "TIFF"):
        raw = base64.b64decode(picture_url((64, 64), format).partition(",")[2])
        for cut in (1, 4, 9, 20, len(raw) // 5, len(raw) // 3):
            pictures[f"{format} cut at {cut}"] = "data:image/png;base64," + base64.b64encode(raw[:cut]).decode()
        zeroed = raw[:8] + bytes(len(raw) - 8)
        pictures[f"{format} zeroed"] = "data:image/png;base64," + base64.b64encode(zeroed).decode()
    pictures["broken base64"] = picture_url()[:-5] + "*===="
    pictures["data url without comma"] = "data:image/png;base64"
    pictures["urls in a url"] = "data:image/png;base64,data:image/png;base64,AAAA"
    pictures["a space"] = " " + picture_url()
    pictures["upper case scheme of a file"] = "FiLe:///etc/passwd"
    for path, valid in ROUTES.items():
        for name, image in pictures.items():
            yield BadRequest(f"{path} picture {name}", path, valid(image=image))


def _questions() -> Iterator[BadRequest]:
    questions = {name: text for name, (text, _) in QUESTIONS.items()}
    questions |= {f"<|{marker}|>": f"which <|{marker}|>?" for marker in MARKERS}
    questions |= {f"invisible {i}": text for i, text in enumerate(INVISIBLE)}
    questions["a surrogate"] = "a\ud800b"
    for path, valid in ROUTES.items():
        for name, text in questions.items():
            yield BadRequest(f"{path} question {name}", path, valid(text))


def _bodies() -> Iterator[BadRequest]:
    for path, valid in ROUTES.items():
        for name, body in BODIES.items():
            yield BadRequest(f"{path} body {name}", path, body)
        text = json.dumps(valid(image="data:image/png;base64,AAAA"))
        for i, character in enumerate(text):
            if character in '{}[]:,"' and not (character in ":," and text[i + 1] != " "):
                yield BadRequest(f"{path} without character {i}", path, (text[:i] + text[i + 1 :]).encode())


def _headers() -> Iterator[BadRequest]:
    types = [
        "text/plain",
        "",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/jsonp",
        "json",
        "*/*",
        "\xff",
    ]
    keys = [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer \xfc\xdf",
    ]
    keys += [f"Bearer {KEY},{KEY}", f"Bearer {KEY} {KEY}", "Bearer " + "x" * 5000]
    for path, valid in ROUTES.items():
        for kind in types:
            yield BadRequest(f"{path} type {kind!r}", path, valid(), headers={"Content-Type": kind.encode("latin-1")})
        for i, key in enumerate(keys):
            header = None if key is None else key.encode("latin-1")
            yield BadRequest(f"{path} key {i}", path, valid(), headers={"Authorization": header})
        yield BadRequest(f"{path} large header", path, valid(), headers={"X-Large": "x" * 20_000})
        yield BadRequest(f"{path} announced size", path, b" " * 1_000_001)


def _paths() -> Iterator[BadRequest]:
    for path in (
        "/v1",
        "/v2/agent",
        "/v1/agent/",
        "/v1/agents",
        "/V1/AGENT",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/files",
        "/.env",
    ):
        yield BadRequest(f"path {path}", path, agent())
    for path in (
        "/v1//agent",
        "/admin",
        "/v1/%2e%2e/metrics",
        "/page/../../etc/passwd",
        "/page/%2e%2e%2fgateway.py",
        "/page/nothing.js",
    ):
        yield BadRequest(f"get {path}", path, method="GET")
    for path in ROUTES:
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "BREW", "TRACE"):
            yield BadRequest(f"{method} {path}", path, method=method)
        yield BadRequest(f"{path} long url", f"{path}?{'q' * 10_000}", agent())
    ids = ["none", "a%20b", "..%2f..", "x" * 500, "%00", "%ff", "exp_1;drop", "'", "%F0%9F%A7%80"]
    for id in ids:
        yield BadRequest(f"experience {id[:20]}", f"/v1/experiences/{id}", method="GET")
        yield BadRequest(f"delete experience {id[:20]}", f"/v1/experiences/{id}", method="DELETE")
        yield BadRequest(f"review {id[:20]}", f"/v1/review/{id}", method="GET")
        yield BadRequest(f"model {id[:20]}", f"/v1/models/{id}", method="GET")
    for query in (
        "limit=0",
        "limit=-1",
        "limit=many",
        "limit=1e3",
        "limit=99999999999999999999",
        "before=x%00",
        "user=%00",
    ):
        yield BadRequest(f"list {query[:20]}", f"/v1/experiences?{query}", method="GET")
    yield BadRequest("delete everything", "/v1/experiences", method="DELETE")
    yield BadRequest("reviews of an unknown state", "/v1/review?state=maybe", method="GET")


def _orders() -> Iterator[BadRequest]:
    orders: dict[str, list[Any]] = {
        "/v1/feedback": [
            {},
            {"experience_id": 7},
            {"experience_id": "../x", "correct": True},
            {"experience_id": "none", "correct": True},
        ],
        "/v1/experiences/search": [
            {},
            {"text": ""},
            {"text": "a", "k": 10**6},
            {"text": "a", "image": ["x"]},
            {"image": "http://127.0.0.1/x.png"},
            {"image": "data:image/png;base64,AAAA"},
            {"text": "a", "key": "../x"},
        ],
        "/v1/evolution/promote": [
            {},
            {"version": -1},
            {"version": 2**40},
            {"version": "1"},
            {"version": 1, "force": 1},
            {"version": 4711},
        ],
        "/v1/evolution/rollback": [{"version": "1"}, {"version": 4711}, {"to": 1}],
        "/v1/evolution/pause": [{"now": True}, [], "x"],
        "/v1/evolution/resume": [{"now": True}, 7],
        "/v1/review/none": [{}, {"decision": "maybe"}, {"decision": "approve"}, {"decision": "reject", "answer": "7"}],
    }
    orders["/v1/feedback"] += [
        {"experience_id": "none"},
        {"experience_id": "none", "answer": "\x00"},
        {"experience_id": "none", "comment": "c" * 9000},
    ]
    for path, bodies in orders.items():
        for i, body in enumerate([*bodies, b"{", b"\xff", b"null", b"[" * 10_000]):
            yield BadRequest(f"{path} order {i}", path, body)
        yield BadRequest(f"{path} large", path, {"comment": "c" * 70_000})
        yield BadRequest(f"{path} without key", path, {}, headers={"Authorization": None})
        yield BadRequest(f"{path} as text", path, {}, headers={"Content-Type": "text/plain"})

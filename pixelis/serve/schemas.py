"""Request, reply and error schemas of the gateway, in the shapes of the OpenAI API.

Requests are parsed from raw bytes by ``parse``; whatever is wrong becomes an ``ApiError`` that the gateway turns into
``{"error": {"message", "type", "code", "param"}}``. Nothing here imports ray or torch.
"""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse

from pixelis.records import Experience, ImageView, PolicyVersion, Trajectory, Verdict, new_id

IMAGE_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "image/bmp", "image/tiff")
MAX_PARTS = 256
_DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.IGNORECASE)
_MARKER = re.compile(r"<\|[A-Za-z0-9_]+\|>")
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
MAX_NAME_CHARS = 256
"""Longest name of a user or reviewer."""
MAX_ANSWER_CHARS = 1000
MAX_COMMENT_CHARS = 4000
ID = r"^[A-Za-z0-9_-]{1,80}$"
"""Ids of experiences and reviews."""


class ApiError(Exception):
    """A request that cannot be answered: HTTP status and the fields of an OpenAI error. Never carries internals."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        extra: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after_s = status, message, code, param, retry_after_s
        self.extra = extra or {}

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "code": self.code, "param": self.param}}

    def headers(self) -> dict[str, str]:
        """``Retry-After`` in whole seconds where the caller may try again, ``WWW-Authenticate`` where a key is missing."""
        out = dict(self.extra)
        if self.retry_after_s is not None:
            out["Retry-After"] = str(max(1, round(self.retry_after_s + 0.499)))
        if self.status == 401:
            out["WWW-Authenticate"] = "Bearer"
        return out

    def response(self) -> JSONResponse:
        """The error as a reply."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers())


class _Lenient(BaseModel):
    """OpenAI clients send fields that mean nothing here (metadata, store, ...): unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ImageUrl(_Lenient):
    url: str
    detail: str | None = None


class Part(_Lenient):
    """One part of a message: text or a picture."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None


class Message(_Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS)] | None = None


class StreamOptions(_Lenient):
    include_usage: bool = False


class ChatRequest(_Lenient):
    """``POST /v1/chat/completions``."""

    question_param: ClassVar[str] = "messages"
    image_param: ClassVar[str] = "messages"
    model: str
    messages: list[Message] = Field(min_length=1, max_length=64)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    response_format: dict[str, Any] | None = None
    user: str | None = Field(None, max_length=MAX_NAME_CHARS)

    def ask(self) -> tuple[str, list[str]]:
        """The question and its pictures (URLs as sent): one user turn, system text put before it.

        Raises ApiError 400 for parameters and conversations that would otherwise be ignored silently.
        """
        unsupported = {
            "n": self.n not in (None, 1),
            "tools": bool(self.tools),
            "functions": bool(self.functions),
            "stop": bool(self.stop),
            "logprobs": bool(self.logprobs),
            "top_logprobs": bool(self.top_logprobs),
            "logit_bias": bool(self.logit_bias),
            "presence_penalty": bool(self.presence_penalty),
            "frequency_penalty": bool(self.frequency_penalty),
            "modalities": self.modalities not in (None, ["text"]),
            "audio": self.audio is not None,
            "prediction": self.prediction is not None,
            "web_search_options": self.web_search_options is not None,
            "response_format": self.response_format is not None and self.response_format.get("type") != "text",
        }
        for name, given in unsupported.items():
            if given:
                raise ApiError(400, f"`{name}` is not supported: leave it out", "unsupported_parameter", name)
        roles = [m.role for m in self.messages]
        if roles.count("user") != 1 or roles[-1] != "user" or not set(roles) <= {"system", "developer", "user"}:
            message = "`messages` must be one user message, after system messages at most: conversations are not supported"
            raise ApiError(400, message, "unsupported_conversation", "messages")
        texts: list[str] = []
        images: list[str] = []
        for i, message_ in enumerate(self.messages):
            parts = [Part(type="text", text=message_.content)] if isinstance(message_.content, str) else message_.content or []
            for j, part in enumerate(parts):
                where = f"messages[{i}].content[{j}]"
                if part.type == "text":
                    if part.text is None:
                        raise ApiError(400, "a text part needs `text`", "invalid_value", where)
                    texts.append(part.text)
                elif part.image_url is None or message_.role != "user":
                    raise ApiError(400, "an image part needs `image_url` and a user message", "invalid_value", where)
                else:
                    images.append(part.image_url.url)
        return "\n".join(t.strip() for t in texts if t.strip()), images


class AgentRequest(_Strict):
    """``POST /v1/agent``: one question about one picture or several (data URLs).

    ``samples`` is the number of votes (at most the configured one), ``operations`` false answers without any pixel
    operation, ``learn`` false keeps this request out of the update stream and ``remember`` false out of the memory, too.
    ``stream`` sends turns as they happen. ``cache`` true takes a kept reply of the served version, if there is one, for
    requests that are sampled; greedy and seeded ones take it unless ``cache`` is false. ``user`` is kept as a pseudonym.
    """

    question_param: ClassVar[str] = "question"
    image_param: ClassVar[str] = "image"
    question: str
    image: str | Annotated[list[str], Field(max_length=MAX_PARTS)]
    samples: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    operations: bool = True
    max_turns: int | None = Field(None, ge=1)
    learn: bool = True
    remember: bool = True
    stream: bool = False
    cache: bool | None = None
    user: str | None = Field(None, max_length=MAX_NAME_CHARS)

    def ask(self) -> tuple[str, list[str]]:
        """The question and its pictures (URLs as sent)."""
        return self.question.strip(), [self.image] if isinstance(self.image, str) else list(self.image)


class FeedbackRequest(_Strict):
    """``POST /v1/feedback``: was a remembered answer right, what would be, and why."""

    experience_id: str = Field(pattern=ID)
    correct: bool | None = None
    answer: str | None = Field(None, min_length=1, max_length=MAX_ANSWER_CHARS)
    comment: str = Field("", max_length=MAX_COMMENT_CHARS)


class EvolutionOrder(_Strict):
    """``POST /v1/evolution/{pause, resume, promote, rollback}``: ``version`` to promote, or to go back to (none: the last).

    ``force`` promotes without asking the canary; the audit log says so.
    """

    version: int | None = Field(None, ge=0, lt=2**31)
    force: bool = False


class ReviewDecision(_Strict):
    """``POST /v1/review/{id}``: ``answer`` corrects what an approved update learns; ``reviewer`` stands in the audit log."""

    decision: Literal["approve", "reject"]
    answer: str | None = Field(None, min_length=1, max_length=MAX_ANSWER_CHARS)
    comment: str = Field("", max_length=MAX_COMMENT_CHARS)
    reviewer: str = Field("", max_length=MAX_NAME_CHARS)


class AgentReply(BaseModel):
    """Reply of ``/v1/agent``. ``answer`` is null when no sample reached one; ``confidence`` is the verdict's.

    ``trajectory`` is the winning sample in the one schema of ``records``: its images' ``uri`` are PNG data URLs of what
    the policy saw, its token ids and log-probs are left out. ``experience_id`` names what is remembered of it, null for
    nothing. ``cached``: the reply was given before, and this request made no experience. ``seconds`` from its arrival.
    """

    id: str = Field(default_factory=lambda: new_id("agent"))
    object: Literal["agent.answer"] = "agent.answer"
    model: str
    answer: str | None
    confidence: float
    verdict: Verdict
    trajectory: Trajectory
    policy_version: int
    experience_id: str | None = None
    cached: bool = False
    seconds: float


class ExperienceReply(BaseModel):
    """An experience for the caller: no token ids; ``pictures`` are data URLs by image id, only where one is asked for."""

    object: Literal["experience"] = "experience"
    experience: Experience
    pictures: dict[str, str] = {}


class EvolutionStatus(BaseModel):
    """Reply of ``GET /v1/evolution``: is the service learning, from what, which version answers, and how it came to be.

    ``status`` is the Evolution actor's own account; ``canary`` its judgements over time; ``audit`` and ``alerts`` the latest.
    """

    object: Literal["evolution.status"] = "evolution.status"
    enabled: bool
    read_only: bool = False
    policy_version: int | None
    updates: int
    queue: int
    counts: dict[str, int]
    status: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    versions: list[PolicyVersion] = []
    canary: list[dict[str, Any]] = []
    audit: list[dict[str, Any]] = []
    alerts: list[dict[str, Any]] = []


Request = TypeVar("Request", bound=BaseModel)


def parse(kind: type[Request], body: bytes) -> Request:
    """Validate a JSON body. Raises ApiError 400 naming the first field that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # The input is left out of the message: it may be megabytes of picture, or not ours to echo.
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = _path(first["loc"])[:100]  # a caller's own key may be as long as the body
        if first["type"] == "json_invalid":
            reason = first["msg"].removeprefix("Invalid JSON: ")
            raise ApiError(400, f"the body is not valid JSON: {reason}", "invalid_json") from None
        message = f"`{where}`: {first['msg']}" if where else first["msg"]
        code = "missing_parameter" if first["type"] == "missing" else "invalid_value"
        raise ApiError(400, message, code, where or None) from None


def _path(loc: tuple[int | str, ...]) -> str:
    out = ""
    for item in loc:
        if isinstance(item, int):
            out += f"[{item}]"
        elif item.isidentifier():  # pydantic adds names of union branches such as `list[Part]`
            out += f".{item}" if out else item
    return out.removesuffix(".str")


def check_question(text: str, max_chars: int, param: str = "question") -> str:
    """The question, or ApiError 400: empty, too long, NUL, or text that spells a control token of the model."""
    if not text:
        raise ApiError(400, "the question is empty", "empty_question", param)
    if len(text) > max_chars:
        message = f"the question has {len(text)} characters, at most {max_chars} are taken"
        raise ApiError(400, message, "question_too_long", param)
    if "\x00" in text:
        raise ApiError(400, "the question contains a NUL character", "invalid_characters", param)
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ApiError(400, "the question contains an unpaired surrogate", "invalid_characters", param)
    marker = _MARKER.search(text)
    if marker:
        message = f"the question spells the control token {marker.group()[:60]}: write it differently"
        raise ApiError(400, message, "control_token", param)
    return text


def check_text(text: str | None, param: str) -> None:
    """Raises ApiError 400 for a NUL or a surrogate in a name, an answer or a comment: none of them belongs in a store."""
    if text is not None and any(c == "\x00" or "\ud800" <= c <= "\udfff" for c in text):
        raise ApiError(400, f"`{param}` contains a NUL or an unpaired surrogate", "invalid_characters", param)


def check_images(urls: list[str], max_images: int, param: str = "image") -> list[str]:
    """The pictures' data URLs, or ApiError 400: none, too many, not a base64 data URL of a raster image.

    Remote and local addresses are refused, never fetched: a gateway that fetches is a way into the network and disk
    behind it.
    """
    if not urls:
        raise ApiError(400, "no picture: send one as a data URL (data:image/png;base64,...)", "no_image", param)
    if len(urls) > max_images:
        raise ApiError(400, f"{len(urls)} pictures, at most {max_images} are taken", "too_many_images", param)
    for i, url in enumerate(urls):
        which = "the picture" if len(urls) == 1 else f"picture {i + 1}"
        head = _DATA_URL.match(url[:200])
        if head is None:
            scheme = url[:200].partition(":")[0].lower() if ":" in url[:200] else ""
            named = f" (`{scheme}:` is never fetched)" if scheme.isalpha() and len(scheme) < 12 else ""
            message = f"{which} must be a data URL such as data:image/png;base64,...{named}"
            raise ApiError(400, message, "image_scheme", param)
        if head.group(1).lower() not in IMAGE_TYPES:
            message = f"{which} must be one of {', '.join(IMAGE_TYPES)}"
            raise ApiError(400, message, "image_type", param)
        if not head.group(2).lower().endswith(";base64"):
            raise ApiError(400, f"the data URL of {which} must be base64", "image_encoding", param)
    return urls


def chat_reply(
    model: str,
    verdict: Verdict,
    winner: Trajectory,
    version: int,
    usage: dict[str, int],
    seconds: float,
    experience_id: str | None = None,
) -> dict[str, Any]:
    """A ``chat.completion``: the voted answer as content, Pixelis' own fields under ``pixelis``.

    Without an answer ``content`` is null and ``refusal`` says why: nothing is made up.
    """
    no_answer = f"no sample reached an answer ({winner.stop_reason.value})" if verdict.answer is None else None
    cut = verdict.answer is None and winner.stop_reason.value in ("length", "over_turn", "over_context", "over_images")
    return {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"policy-{version}",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": verdict.answer, "refusal": no_answer},
                "logprobs": None,
                "finish_reason": "length" if cut else "stop",
            }
        ],
        "usage": usage,
        "pixelis": {
            "confidence": verdict.confidence,
            "verdict": verdict.model_dump(mode="json"),
            "policy_version": version,
            "operations": winner.operations_ok,
            "experience_id": experience_id,
            "cached": False,
            "seconds": round(seconds, 4),
        },
    }


def usage_of(trajectories: list[Trajectory]) -> dict[str, int]:
    """Tokens of a request: the prompt once (all samples share it), and every token that any sample generated."""
    first = trajectories[0].turns if trajectories else []
    cut = next((i for i, turn in enumerate(first) if turn.is_policy), len(first))
    prompt = sum(len(turn.tokens) for turn in first[:cut])
    completion = sum(len(turn.tokens) for t in trajectories for turn in t.turns if turn.is_policy)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def without_tokens(trajectory: Trajectory, uris: dict[str, str]) -> Trajectory:
    """A copy for the caller: images named by ``uris`` (id -> data URL), token ids and log-probs left out."""

    def named(views: list[ImageView], names: dict[str, str]) -> list[ImageView]:
        return [view.model_copy(update={"uri": names.get(view.id, "")}) for view in views]

    turns = []
    for turn in trajectory.turns:
        seen = turn.observation
        if seen is not None and seen.images:  # each picture travels once, under `trajectory.images`
            seen = seen.model_copy(update={"images": named(seen.images, {})})
        turns.append(turn.model_copy(update={"tokens": [], "log_probs": [], "observation": seen}))
    return trajectory.model_copy(update={"turns": turns, "images": named(trajectory.images, uris)})

"""OpenAI's bodies: chat completions with their streamed chunks, and the list of models."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pixelis.config import Config
from pixelis.records import Exchange, Trajectory, Verdict, new_id
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import Answer, TurnEvent
from pixelis.serve.keys import Caller
from pixelis.serve.protocol.errors import MAX_NAME_CHARS, ApiError, PlainText, text_or
from pixelis.serve.protocol.question import MAX_EXCHANGES, MAX_PARTS, Asked, agent_query, model_name, reply_cache_key, sse_event

IGNORED = {
    *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "tool_choice", "function_call", "priority", "request_id", "cache_salt"),
}
"""Fields of OpenAI and vLLM without influence on the answer to a request without tools."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
}
"""Values of further fields that change nothing; null, false and empty ones never do."""
_BLAND = re.compile(r"you are (an? )?([\w-]+,? (and )?){0,5}(assistant|chatbot|ai|model)[.!]?", re.IGNORECASE)
"""System messages that only name the model's role, which many clients send by default."""


class LenientModel(BaseModel):
    """A part of a request body that ignores unknown fields."""

    model_config = ConfigDict(extra="ignore", strict=True)


class ImageUrl(LenientModel):
    url: str
    detail: str | None = None


class Part(LenientModel):
    """One part of a message: text or a picture."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        kind = part.get("type")
        if isinstance(kind, str) and kind not in ("text", "image_url"):
            remark = "; send frames of a clip as pictures" if "video" in kind else ""
            text = "parts of type `{kind}` are not supported: send `text` and `image_url` parts{remark}"
            raise PydanticCustomError("unsupported_part", text, {"kind": kind[:40], "remark": remark})
        if isinstance(part.get("image_url"), str):
            text = '`image_url` must be an object with the address as its `url`: {"url": "data:image/png;base64,..."}'
            raise PydanticCustomError("invalid_value", text)
        return part


class Message(LenientModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: text_or(Annotated[list[Part], Field(max_length=MAX_PARTS)]) | None = None  # type: ignore[valid-type]

    def text_and_images(self, param: str) -> tuple[str, list[str]]:
        """The text of all parts and the picture URLs; ``param`` names the message. ApiError 400 for a part without content."""
        parts = [Part(type="text", text=self.content)] if isinstance(self.content, str) else self.content or []
        texts, images = list[str](), list[str]()
        for j, part in enumerate(parts):
            place = f"{param}.content[{j}]"
            if part.type == "text":
                if part.text is None:
                    raise ApiError(400, "a text part needs `text`", "invalid_value", place)
                texts.append(part.text.strip())
            elif part.image_url is None:
                raise ApiError(400, "a part of type `image_url` needs `image_url`", "invalid_value", place)
            elif self.role != "user":
                message = f"pictures belong in a user message, not in a {self.role} message"
                raise ApiError(400, message, "invalid_value", place)
            else:
                images.append(part.image_url.url)
        return "\n".join(filter(None, texts)), images


class StreamOptions(LenientModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """Body of ``POST /v1/chat/completions``: a question with text and pictures, after optional system messages and exchanges.

    Fields that would change the reply but are not supported (``n`` above 1, ``tools``, ``stop``, ``top_k``, ...) are errors, and
    so are unknown ones.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    question_param: ClassVar[str] = "messages"
    image_param: ClassVar[str] = "messages"
    model: str
    messages: list[Message] = Field(min_length=1, max_length=2 * MAX_EXCHANGES)
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
    user: PlainText | None = Field(None, max_length=MAX_NAME_CHARS)

    def asked(self) -> Asked:
        """The question with its pictures and the conversation before it.

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
        for name, value in (self.model_extra or {}).items():
            neutral = value is None or value is False or value in ("", [], {}) or value in NEUTRAL.get(name, ())
            unsupported[name] = name not in IGNORED and not neutral
        for name, present in unsupported.items():
            if present:
                name = name[:100]
                raise ApiError(400, f"`{name}` is not supported: leave it out", "unsupported_parameter", name)
        return self._conversation()

    def _conversation(self) -> Asked:
        """Messages of one user in a row are one question; system messages precede the first one."""
        asked, texts, media = Asked(""), list[str](), list[str]()
        for i, message in enumerate(self.messages):
            if message.role not in ("system", "developer", "user", "assistant"):
                raise _unsupported(f"`messages[{i}]` is a {message.role} message: the agent executes its operations itself")
            text, images = message.text_and_images(f"messages[{i}]")
            if message.role in ("system", "developer"):
                if any(earlier.role in ("user", "assistant") for earlier in self.messages[:i]):
                    raise _unsupported(f"`messages[{i}]`: system messages precede the first question")
                text = "" if _BLAND.fullmatch(text) else text
            elif message.role == "assistant":
                if i == 0 or self.messages[i - 1].role != "user":
                    raise _unsupported(f"`messages[{i}]` is an answer without a question: user and assistant messages alternate")
                if not text:
                    raise _unsupported(f"`messages[{i}]` is an answer without text")
                asked.history.append(Exchange(question="\n".join(texts), answer=text, media=media))
                texts, media = [], []
                continue
            texts += [text] if text else []
            media += [f"img{len(asked.images) + n}" for n in range(len(images))]
            asked.images += images
        if self.messages[-1].role != "user":
            raise _unsupported("the last of `messages` must be a user message: the question")
        asked.question = "\n".join(texts)
        return asked


def _unsupported(message: str) -> ApiError:
    return ApiError(400, message, "unsupported_conversation", "messages")


class Usage(BaseModel):
    """Tokens of a request: the prompt once (all samples share it), and the tokens that all samples generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, trajectories: list[Trajectory]) -> Usage:
        """Count the tokens of ``trajectories``, samples of one prompt."""
        turns = trajectories[0].turns if trajectories else []
        first_reply = next((i for i, turn in enumerate(turns) if turn.is_policy), len(turns))
        prompt = sum(len(turn.tokens) for turn in turns[:first_reply])
        completion = sum(len(turn.tokens) for t in trajectories for turn in t.turns if turn.is_policy)
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class ChatMessage(BaseModel):
    """``content`` is the voted answer; without one it is null and ``refusal`` gives the reason."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None


class Choice(BaseModel):
    index: int = 0
    message: ChatMessage
    logprobs: None = None
    finish_reason: Literal["stop", "length"]


class PixelisFields(BaseModel):
    """What OpenAI's format has no field for. ``operations`` is the number of successful pixel operations.

    ``experience_id`` and ``remembered`` as in the AgentReply.
    """

    confidence: float
    verdict: Verdict
    policy_version: int
    operations: int
    experience_id: str | None
    remembered: str
    cached: bool = False
    seconds: float


class ChatCompletion(BaseModel):
    """Reply of ``POST /v1/chat/completions``."""

    id: str = Field(default_factory=lambda: new_id("chatcmpl"))
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    pixelis: PixelisFields

    @classmethod
    def of(cls, model: str, answer: Answer, seconds: float) -> ChatCompletion:
        """The completion of an answer, after ``seconds``."""
        winner, verdict, version = answer.winner, answer.verdict, answer.group.policy_version
        reason, refusal = winner.stop_reason.value, None
        if verdict.answer is None:
            refusal = f"no sample reached an answer ({reason})"
        truncated = verdict.answer is None and reason in ("length", "over_turn", "over_context", "over_images")
        message = ChatMessage(content=verdict.answer, refusal=refusal)
        return cls(
            model=model,
            system_fingerprint=f"policy-{version}",
            choices=[Choice(message=message, finish_reason="length" if truncated else "stop")],
            usage=Usage.of(answer.group.trajectories),
            pixelis=PixelisFields(
                confidence=verdict.confidence,
                verdict=verdict,
                policy_version=version,
                operations=winner.operations_ok,
                experience_id=answer.experience_id,
                remembered=answer.remembered,
                seconds=round(seconds, 4),
            ),
        )


class ChatFormat:
    """The ReplyFormat of chat completions.

    A stream is the role, a chunk with an empty delta for every turn of every sample (``pixelis.event``, which other clients
    ignore), and the answer in one piece, because it exists only after the vote.
    """

    def __init__(self, config: Config, request: ChatRequest, started: float):
        self.caller, self.started, self.model = Caller(), started, model_name(config)
        if request.model not in (self.model, config.policy.model):
            raise unknown_model(request.model, self.model)
        self.stream = bool(request.stream)
        self.include_usage = request.stream_options is not None and request.stream_options.include_usage
        max_tokens = request.max_completion_tokens or request.max_tokens
        self.query = agent_query(config, request, max_tokens=max_tokens, top_p=request.top_p)
        self.cache_key = reply_cache_key("/v1/chat/completions", self.query, request.seed)
        self.chunk: dict[str, Any] = {"id": new_id("chatcmpl"), "object": "chat.completion.chunk", "created": int(time.time())}
        self.chunk |= {"model": self.model, "system_fingerprint": None}

    async def reply(self, agent: Agent, answer: Answer) -> dict[str, Any]:
        """A ChatCompletion."""
        return ChatCompletion.of(self.model, answer, time.monotonic() - self.started).model_dump(mode="json")

    def cached_reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The cached completion with this request's id and times."""
        fields = {**reply["pixelis"], "cached": True, "seconds": round(time.monotonic() - self.started, 4)}
        return {**reply, "id": new_id("chatcmpl"), "created": int(time.time()), "pixelis": fields}

    def stream_start(self) -> str:
        """The role."""
        return sse_event(self._chunk({"role": "assistant", "content": ""}))

    def stream_turn(self, event: TurnEvent) -> str:
        """A chunk with an empty delta and the turn."""
        return sse_event(self._chunk({}) | {"pixelis": {"event": event.model_dump(mode="json")}})

    def stream_end(self, reply: dict[str, Any]) -> list[str]:
        """The answer, the finish reason, and usage if requested."""
        self.chunk["system_fingerprint"] = reply["system_fingerprint"]
        choice = reply["choices"][0]
        delta = {k: v for k, v in choice["message"].items() if k != "role" and v is not None}
        chunks = [self._chunk(delta), self._chunk({}, choice["finish_reason"]) | {"pixelis": reply["pixelis"]}]
        if self.include_usage:
            chunks.append({**self.chunk, "choices": [], "usage": reply["usage"]})
        return [*map(sse_event, chunks), "data: [DONE]\n\n"]

    def stream_error(self, error: ApiError) -> str:
        """A chunk that is an error body, which the official client raises."""
        return sse_event(error.body())

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self.chunk, "choices": [choice]}


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pixelis"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def unknown_model(name: str, served: str) -> ApiError:
    """404 for a model other than the ``served`` one."""
    return ApiError(404, f"model `{name[:100]}` is not available here; use `{served}`", "model_not_found", "model")

"""Agents that own their loop and their tools, on a service of the embedded model: three clients, unchanged."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import litellm
import openai
import pydantic_ai
import pytest
import ray
import uvicorn
from gateway_helpers import error_of
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from ray.actor import ActorHandle
from scripted import free_port, picture_url

from pixelis.actors import placement
from pixelis.actors.agent_runner import AgentQuestion
from pixelis.actors.generator_router import GeneratorRouter
from pixelis.actors.rollout_messages import RolloutRequest
from pixelis.actors.serving import online
from pixelis.config import Config, load
from pixelis.datasets import card_questions
from pixelis.dialogue.session import SamplingParams
from pixelis.jobs import serve as serve_job
from pixelis.jobs import sft
from pixelis.records import Media, Question, Trajectory
from pixelis.serve.agent import Agent
from pixelis.serve.agent_types import Backends
from pixelis.serve.gateway import create_app
from pixelis.serve.keys import KeyFile, key_file
from pixelis.serve.state import GatewayState

sys.path.insert(0, str(Path(__file__).parents[2] / "docs/examples"))

import zoom_agent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PARAMETERS = zoom_agent.ZOOM["function"]["parameters"]
RESPONSES_ZOOM = {"type": "function", **zoom_agent.ZOOM["function"]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Service:
    """A gateway over HTTP and the actors behind it."""

    def __init__(self, config: Config, backends: Backends):
        self.config, self.backends = config, backends
        self.actor: ActorHandle = ray.get_actor(backends.episodes or "")
        self.key = KeyFile(key_file(config)).create("agents", ["ask", "feedback"])
        self.url = ""

    @contextmanager
    def gateway(self) -> Iterator[str]:
        app = create_app(GatewayState(self.config, Agent(self.config, self.backends), None))
        port = free_port()
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20)

    def http(self, key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def open(self, **body: Any) -> dict[str, Any]:
        with self.http() as http:
            reply = http.post("/v1/episodes", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def status(self, id: str) -> dict[str, Any]:
        with self.http() as http:
            return http.get(f"/v1/episodes/{id}").json()

    def address(self, kind: str) -> tuple[str, str | None]:
        """The ``base_url`` of an agent: of an episode with its id, or of the service."""
        if kind == "service":
            return f"{self.url}/v1", None
        episode = self.open()
        return episode["base_url"], episode["id"]

    def trajectory(self, id: str) -> Trajectory:
        read = self.actor.__ray_call__.remote(lambda self, id: self.by_id[id].lines, id)
        return ray.get(read, timeout=30)["main"].trajectory


@pytest.fixture(scope="module")
def adapter(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that has learnt to look closer before it answers."""
    own = ["sft.steps=60", "data.direct_share=0", f"run.dir={tmp_path_factory.mktemp('sft')}"]
    return str(sft.run(load("configs/nano/quickstart.yaml", own)))


@contextmanager
def served(adapter: str | None, folder: Path, *overrides: str) -> Iterator[Service]:
    off = ["evolution.enabled=false", "memory.enabled=false", "toolbox.workers=1", "toolbox.cpus=0"]
    limits = [
        "engine.cpus=0.1",
        "toolbox.max_image_pixels=1000000",
        "dialogue.max_turns_test=6",
        "serve.episodes.max_open=20",
    ]
    config = load("configs/nano/base.yaml", [*off, *limits, f"run.dir={folder}", *overrides])
    placed = placement.placed(config, learner=False, initial=adapter, job=folder.name, online=True)
    with placed as actors, online(config, actors) as backend:
        service = Service(config, serve_job.backends(actors, backend))
        with service.gateway() as service.url:
            yield service


@pytest.fixture(scope="module")
def service(adapter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One without operations of its own, which samples greedily, because a clumsy policy gives up now and then."""
    own = ["toolbox.operations=[]", "serve.sampling.temperature=0"]
    with served(adapter, tmp_path_factory.mktemp("episodes"), *own) as service:
        yield service


@pytest.fixture(scope="module")
def untaught(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One whose policy has learnt nothing, for what does not depend on its replies."""
    with served(None, tmp_path_factory.mktemp("untaught"), "toolbox.operations=[]") as service:
        yield service


@pytest.fixture(scope="module")
def asked() -> AgentQuestion:
    """A question whose digit is too small to read in the whole picture."""
    (question,) = card_questions.read("cards:?split=test&seed=7", None, 0, 1, 1)
    return AgentQuestion.of(question, load(None, []).toolbox)


def message_of(question: AgentQuestion) -> Any:
    """The user message of a client of a service, which sends its pictures."""
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in question.pictures.values()]
    return [*pictures, {"type": "text", "text": question.text}]


def result_parts(question: AgentQuestion, arguments: str, turn: int) -> Any:
    return zoom_agent.look(question.image(), json.loads(arguments)["bbox_2d"], f"obs{turn} = zoom_in(img0)")


def by_openai(question: AgentQuestion, url: str, key: str, stream: bool) -> tuple[int, str]:
    """The number of calls and the answer of a loop on chat completions."""
    messages: list[Any] = [{"role": "user", "content": message_of(question)}]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        for turn in range(6):
            options: dict[str, Any] = {
                "model": "pixelis-nano",
                "messages": messages,
                "tools": [zoom_agent.ZOOM],
            }
            if stream:
                with client.chat.completions.stream(**options) as events:
                    for _ in events:
                        pass
                    message = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**options).choices[0].message
            messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            for call in message.tool_calls or ():
                parts = result_parts(question, call.function.arguments, turn + 1)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": parts})
            if not message.tool_calls:
                return turn, message.content or ""
    raise AssertionError("it goes on calling")


def by_responses(question: AgentQuestion, url: str, key: str, stream: bool) -> tuple[int, str]:
    parts = [{"type": "input_image", "image_url": url} for url in question.pictures.values()]
    items: list[Any] = [{"role": "user", "content": [*parts, {"type": "input_text", "text": question.text}]}]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        for turn in range(6):
            options: dict[str, Any] = {"model": "pixelis-nano", "input": items, "tools": [RESPONSES_ZOOM]}
            if stream:
                with client.responses.stream(**options) as events:
                    for _ in events:
                        pass
                    reply = events.get_final_response()
            else:
                reply = client.responses.create(**options)
            items += [item.model_dump(exclude_none=True) for item in reply.output]
            calls = [item for item in reply.output if item.type == "function_call"]
            for call in calls:
                seen = result_parts(question, call.arguments, turn + 1)
                output = (
                    seen
                    if isinstance(seen, str)
                    else [
                        {"type": "input_text", "text": seen[0]["text"]},
                        {"type": "input_image", "image_url": seen[1]["image_url"]["url"]},
                    ]
                )
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
            if not calls:
                return turn, reply.output_text
    raise AssertionError("it goes on calling")


def by_litellm(question: AgentQuestion, url: str, key: str, stream: bool) -> tuple[int, str]:
    messages: list[Any] = [{"role": "user", "content": message_of(question)}]
    for turn in range(6):
        reply = litellm.completion(
            model="openai/pixelis-nano",
            api_base=url,
            api_key=key,
            messages=messages,
            tools=[zoom_agent.ZOOM],
            stream=stream,
        )
        if stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in message.tool_calls or ():
            parts = result_parts(question, call.function.arguments, turn + 1)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": parts})
        if not message.tool_calls:
            return turn, message.content or ""
    raise AssertionError("it goes on calling")


def by_pydantic_ai(question: AgentQuestion, url: str, key: str, stream: bool) -> tuple[int, str]:
    provider = OpenAIProvider(base_url=url, api_key=key)
    agent = pydantic_ai.Agent(OpenAIChatModel("pixelis-nano", provider=provider))
    calls = list[Any]()

    def zoom_in(bbox_2d: list[int], target: str = "") -> Any:
        """Show a region of the picture."""
        calls.append(bbox_2d)
        seen = result_parts(question, json.dumps({"bbox_2d": bbox_2d}), len(calls))
        if isinstance(seen, str):
            return seen
        picture = base64.b64decode(seen[1]["image_url"]["url"].partition(",")[2])
        return pydantic_ai.ToolReturn(
            seen[0]["text"], content=[pydantic_ai.BinaryContent(picture, media_type="image/png")]
        )

    agent.tool_plain(zoom_in)
    pictures = [
        pydantic_ai.BinaryContent(base64.b64decode(url.partition(",")[2]), media_type="image/png")
        for url in question.pictures.values()
    ]

    async def run() -> str:
        if not stream:
            return (await agent.run([*pictures, question.text])).output
        async with agent.run_stream([*pictures, question.text]) as result:
            return await result.get_output()

    answer = asyncio.run(run())
    return len(calls), answer


LOOPS = [by_openai, by_responses, by_litellm, by_pydantic_ai]


@pytest.mark.long  # the policy learns to call first
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["episode", "service"])
def test_a_client_that_knows_nothing_of_us_runs_its_tool_loop(
    service: Service, asked: AgentQuestion, kind: str, loop: Callable[..., tuple[int, str]], stream: bool
) -> None:
    url, id = service.address(kind)
    calls, answer = loop(asked, url, service.key, stream)
    assert calls >= 1, "it looks closer first"
    assert answer
    if id is not None:
        assert service.status(id)["branches"] == {"main": calls + 1}
        trajectory = service.trajectory(id)
        assert len(trajectory.images) == calls + 1
        assert trajectory.policy_turns == calls + 1


@pytest.mark.long
def test_an_episode_is_that_of_our_own_loop_with_the_same_seed(
    adapter: str, tmp_path: Path, asked: AgentQuestion
) -> None:
    """With our zoom on the server, and a tool of the client's that the policy never calls."""
    with served(adapter, tmp_path / "own", "toolbox.operations=[zoom_in]") as service:
        sampling = service.config.serve.sampling
        media = [Media(id=name, uri=url) for name, url in asked.pictures.items()]
        question = Question(id="q", question=asked.text, media=media)
        request = RolloutRequest(
            question,
            "g",
            2,
            SamplingParams(sampling.temperature, sampling.top_p, service.config.dialogue.max_turn_tokens, 5),
            max_turns=service.config.dialogue.max_turns_test,
        )
        router = GeneratorRouter(service.backends.generators, follows=True)
        own = asyncio.run(router.rollout(request)).group.trajectories
        opened = [service.open(group="g", samples=2) for _ in range(2)]
        assert [episode["group"] for episode in opened] == ["g", "g"]
        for episode, expected in zip(opened, own, strict=True):
            with openai.OpenAI(base_url=episode["base_url"], api_key=service.key) as client:
                reply = client.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": message_of(asked)}], seed=5
                )
            t = service.trajectory(episode["id"])
            assert (t.token_ids(), t.behaviour_log_probs()) == (
                expected.token_ids(),
                pytest.approx(expected.behaviour_log_probs(), abs=1e-4),
            )
            assert [image.id for image in t.images] == [image.id for image in expected.images]
            assert reply.choices[0].message.content == expected.answer
        # Our operations and the client's functions: the policy zooms here, and the client sees the answer alone
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key) as client:
            reply = client.responses.create(
                model="pixelis-nano",
                input=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": asked.pictures["img0"], "detail": "auto"},
                            {"type": "input_text", "text": asked.text},
                        ],
                    }
                ],
                tools=[
                    {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
                ],
            )
            assert [item.type for item in reply.output if item.type in ("mcp_call", "message")] == [
                "mcp_call",
                "message",
            ]


def test_a_repeated_request_gets_the_reply_that_a_dead_gateway_had_asked_for(
    untaught: Service, asked: AgentQuestion
) -> None:
    episode = untaught.open()
    body = {
        "model": "m",
        "tools": [zoom_agent.ZOOM],
        "messages": [{"role": "user", "content": message_of(asked)}],
    }
    path = f"/v1/episodes/{episode['id']}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {untaught.key}"}
    with untaught.gateway() as url, httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        first = http.post(path, json=body).json()["choices"][0]["message"]
    with untaught.http() as http:
        again = http.post(path, json=body).json()["choices"][0]["message"]
        assert again == first
        assert untaught.status(episode["id"])["branches"] == {"main": 1}
        # Another seed is another request: it opens a branch
        other = http.post(path, json={**body, "seed": 77}).json()
        assert other["pixelis"]["branch"] == "branch-1"
        reward = {"terms": {"accuracy": 1.0, "tidy": 0.5}, "branch": "main"}
        rewarded = [http.post(f"/v1/episodes/{episode['id']}/reward", json=reward).json() for _ in range(2)]
        assert (
            rewarded[0]
            == rewarded[1]
            == {
                "id": episode["id"],
                "status": "rewarded",
                "branch": "main",
                "reward": 1.5,
            }
        )
        late = http.post(path, json=body)
        assert (late.status_code, error_of(late)["code"]) == (409, "episode_ended")


def test_who_leaves_ends_the_sampling(untaught: Service, asked: AgentQuestion) -> None:
    episode = untaught.open()
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": message_of(asked)}]}
    path = f"/v1/episodes/{episode['id']}/v1/chat/completions"
    with untaught.http() as http, http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        next(reply.iter_lines())
    with untaught.http() as http:
        whole = http.post(path, json={**body, "stream": False})
    assert whole.status_code in (200, 409), whole.text
    assert set(untaught.status(episode["id"])["branches"]) == {"main"}


def test_episodes_belong_to_a_key_and_end_by_themselves(untaught: Service) -> None:
    other = KeyFile(key_file(untaught.config)).create("others", ["ask", "feedback"])
    mine = untaught.open(expires_s=1.0)
    for method, path, body in (
        ("GET", "", None),
        ("POST", "/reward", {"reward": 1}),
        ("POST", "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "?"}]}),
    ):
        with untaught.http(other) as http:
            refused = http.request(method, f"/v1/episodes/{mine['id']}{path}", json=body)
        assert (refused.status_code, error_of(refused)["code"]) == (404, "episode_not_found")
    deadline = time.monotonic() + 20
    while untaught.status(mine["id"])["status"] == "open":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    with untaught.http() as http:
        late = http.post(f"/v1/episodes/{mine['id']}/reward", json={"reward": 1}).json()
    assert (late["status"], late["reward"]) == ("expired", None)
    with untaught.http(other) as http:
        opened = [http.post("/v1/episodes", json={}) for _ in range(21)]
        assert [reply.status_code for reply in opened] == [200] * 20 + [429]
        assert error_of(opened[-1])["code"] == "too_many_episodes"
        failed = http.post(f"/v1/episodes/{opened[0].json()['id']}/fail", json={"cause": "no idea"}).json()
        assert (failed["status"], failed["cause"]) == ("failed", "agent_failed")
        assert http.post("/v1/episodes", json={}).status_code == 200


@pytest.mark.long
def test_a_call_that_must_be_made_is_sampled_twice(service: Service, asked: AgentQuestion) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0) as client:
        with pytest.raises(openai.UnprocessableEntityError) as error:
            client.chat.completions.create(
                model="pixelis-nano",
                messages=[{"role": "user", "content": message_of(asked)}],
                tools=[LOOK],
                tool_choice={"type": "function", "function": {"name": "look"}},
                temperature=1.0,
            )
        assert error.value.code == "tool_choice_unmet"
        reply = client.chat.completions.create(
            model="pixelis-nano",
            messages=[{"role": "user", "content": message_of(asked)}],
            tools=[zoom_agent.ZOOM],
            tool_choice="required",
        )
        assert reply.choices[0].finish_reason == "tool_calls"


USER = {"role": "user", "content": "Which digit?"}
CALLED = {"id": "c", "type": "function", "function": {"name": "zoom_in", "arguments": "{}"}}
HUGE = picture_url((1200, 1000))
BAD_CHATS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"tools": [{"type": "web_search"}]}, 400, "unsupported_tool", "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, 400, "invalid_value", "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}]},
        400,
        "invalid_schema",
        "tools[0].function.parameters",
    ),
    ({"tools": [LOOK, LOOK]}, 400, "name_taken", "tools[1]"),
    ({"tool_choice": "sometimes"}, 400, "invalid_value", "tool_choice"),
    ({"n": 2}, 400, "unsupported_parameter", "n"),
    ({"logprobs": True}, 400, "unsupported_parameter", "logprobs"),
    ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
    ({"logit_bias": {"1": 2}}, 400, "unsupported_parameter", "logit_bias"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALLED]}]},
        400,
        "missing_tool_result",
        "messages",
    ),
    (
        {"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": "?"}]},
        400,
        "invalid_value",
        "messages[1].tool_call_id",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/a.png"}}]}
            ]
        },
        400,
        "image_scheme",
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": HUGE}}]}]},
        400,
        "image_too_many_pixels",
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "a\x00"}]}, 400, "invalid_characters", "messages[0]"),
    ({"model": "gpt"}, 404, "model_not_found", "model"),
]
BAD_EPISODES: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    ("", {"samples": 0}, 400, "invalid_value", "samples"),
    ("", {"scorer": "no_such"}, 400, "unknown_scorer", None),
    ("", {"scorer": "os:system"}, 400, "invalid_value", "scorer"),
    ("", {"nonsense": 1}, 400, "invalid_value", "nonsense"),
    ("/next", {}, 404, "no_questions", None),
    ("/ID/reward", {}, 400, "invalid_value", None),
    ("/ID/reward", {"reward": 1, "terms": {"a": 1}}, 400, "invalid_value", None),
    ("/ID/reward", {"reward": "1"}, 400, "invalid_value", "reward"),
    ("/ID/reward", {"reward": 1, "branch": "b"}, 400, "unknown_branch", "branch"),
    ("/ID/reward", {"verifier": "os:system"}, 400, "invalid_value", "verifier"),
    ("/ID/reward", {"verifier": "exact"}, 400, "no_answers", "verifier"),
    ("/ID/fail", {}, 400, "missing_parameter", "cause"),
    ("/ep_none/fail", {"cause": "?"}, 404, "episode_not_found", "id"),
]


def test_every_bad_request_has_an_openai_error(untaught: Service) -> None:
    id = untaught.open()["id"]
    with untaught.http() as http:
        for changes, status, code, param in BAD_CHATS:
            body = {"model": "pixelis-nano", "messages": [USER], "tools": [LOOK], **changes}
            for path in ("/v1/chat/completions", f"/v1/episodes/{id}/v1/chat/completions"):
                if code == "model_not_found" and id in path:
                    continue
                for stream in (False, True):
                    reply = http.post(path, json={**body, "stream": stream})
                    error = error_of(reply)
                    assert (reply.status_code, error["code"], error["param"]) == (status, code, param), (
                        changes
                    )
        for path, body, status, code, param in BAD_EPISODES:
            reply = http.post(f"/v1/episodes{path.replace('ID', id)}", json=body)
            error = error_of(reply)
            assert (reply.status_code, error["code"], error["param"]) == (status, code, param), (path, body)
        stored = http.post(
            f"/v1/episodes/{id}/v1/responses",
            json={"model": "m", "input": "?", "previous_response_id": "resp_0123456789abcdef"},
        )
        assert error_of(stored)["param"] == "previous_response_id"
        assert http.post("/v1/episodes", content="{}").status_code == 415
    assert untaught.status(id)["status"] == "open"

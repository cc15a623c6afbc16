"""A teacher behind an address, against an HTTP server that expands pictures as vLLM does. `tests/engines` has the real one."""

from __future__ import annotations

import base64
import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_policy import Maker, folder, spec

from pixelis.config import Config, load
from pixelis.engines.teacher_server import TeacherServer
from pixelis.errors import BadConfig, InfraFailure
from pixelis.families.spec import load_tokenizer
from pixelis.policy.samples import TrainSample

FAMILY, KEY = "qwen3_vl", "sesame"
LIMIT = 128**2
"""Pixels above which the server resizes a picture."""


def log_prob(place: int, token: int) -> float:
    return -0.5 * (1 + place % 7) - token / 1000


class Server(ThreadingHTTPServer):
    """Decodes ids, and scores prompts by `log_prob`. ``answer``: replaces (status, body) of a scored prompt."""

    answer: Callable[[list[int]], tuple[int, Any] | None] = staticmethod(lambda tokens: None)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer, self.running, self.most = load_tokenizer(folder(FAMILY)), 0, 0
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        views = []
        for part in body["content_parts"]:
            file = io.BytesIO(base64.b64decode(part["url"].removeprefix("data:image/png;base64,")))
            views.append(np.asarray(Image.open(file)))
        tokens = list[int]()
        for token in body["token_ids"]:
            pixels = views[0].shape[0] * views[0].shape[1] if token == spec(FAMILY).image_token else 0
            count = spec(FAMILY).image_tokens(*views.pop(0).shape[:2]) if pixels else 1
            tokens += [token] * (count if pixels <= LIMIT else count // 4)
        scores = [{str(t): {"logprob": log_prob(i, t)}} if i else None for i, t in enumerate(tokens)]
        assert body["sampling_params"] == {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        return self.answer(tokens) or (200, {"prompt_token_ids": tokens, "prompt_logprobs": scores})


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/detokenize":
            status, reply = 200, {"prompt": self.server.tokenizer.decode(body["tokens"])}
        elif self.headers["Authorization"] != f"Bearer {KEY}":
            status, reply = 401, {"error": "Unauthorized"}
        else:
            assert self.path == "/inference/v1/generate"
            status, reply = self.server.generate(body)
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("PIXELIS_TEACHER_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as server:
        yield server
        server.shutdown()


def configured(server: Server, *keys: str) -> tuple[Config, str]:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    config = load(None, [f"policy.model={folder(FAMILY)}", f"rft.teacher.model={url}", *keys])
    return config, url


def expected(sample: TrainSample) -> np.ndarray:
    return np.asarray([log_prob(i, sample.tokens[i]) for i in np.flatnonzero(sample.mask)], np.float32)


def test_tokens_are_scored_with_their_pictures_and_a_refused_sample_has_no_score(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    teacher, maker = TeacherServer(*configured(server)), Maker(FAMILY)
    samples = [maker.sample(turns=turns) for turns in (1, 2, 3)]
    resized, long = maker.sample(view=maker.view(160, 160)), maker.sample()
    long.tokens = np.tile(long.tokens, 50)
    with caplog.at_level(logging.WARNING):
        *scores, nothing, also_nothing = teacher.log_probs([*samples, resized, long])
    for sample, values in zip(samples, scores, strict=True):
        assert values.dtype == np.float32
        assert values.tolist() == expected(sample).tolist()
    assert len(nothing) == len(also_nothing) == 0
    assert "2 of 5 samples have no teacher" in caplog.text
    server.answer = lambda tokens: (400, "too long") if tokens == samples[0].tokens.tolist() else None
    assert [len(values) > 0 for values in teacher.log_probs(samples)] == [False, True, True]


def test_a_server_that_fails_ends_the_step(server: Server) -> None:
    teacher = TeacherServer(*configured(server))
    calls = list[int]()
    server.answer = lambda tokens: calls.append(len(tokens)) or (500, "out of memory")
    with pytest.raises(InfraFailure, match="replied 500"):
        teacher.log_probs([Maker(FAMILY).sample()])
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("keys", "answer", "message"),
    [
        (["rft.teacher.api_key_env="], None, "replied 401"),
        (["dialogue.input.max_pixels=65536"], None, "resizes pictures of 256 x 256 pixels"),
        ([], (403, "Restart vllm serve with --enable-scale-out"), "--enable-scale-out"),
        ([], (200, {"choices": []}), "not one of inference/v1/generate"),
    ],
)
def test_what_a_server_cannot_do_is_found_before_the_first_step(
    server: Server, keys: list[str], answer: Any, message: str
) -> None:
    server.answer = lambda _: answer
    with pytest.raises(BadConfig, match=message) as error:
        TeacherServer(*configured(server, *keys))
    assert KEY not in f"{error.value}"


def test_another_vocabulary_is_refused(server: Server) -> None:
    server.tokenizer.add_tokens(["<new>"])
    config, url = configured(server)
    TeacherServer(config, url)  # a token that the student never writes changes none of its ids
    server.tokenizer = load_tokenizer(folder(FAMILY))
    swapped = {
        "a": server.tokenizer.convert_ids_to_tokens(100),
        "b": server.tokenizer.convert_ids_to_tokens(101),
    }
    decode = server.tokenizer.decode
    server.tokenizer.decode = lambda ids: decode(ids).replace(swapped["a"], swapped["b"])  # type: ignore[method-assign]
    with pytest.raises(BadConfig, match="vocabulary is not that"):
        TeacherServer(config, url)

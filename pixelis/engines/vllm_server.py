"""An engine behind an address: a running vLLM server generates, and takes adapters by its own API."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from PIL import Image

from pixelis.dialogue.session import SamplingParams, Start, TokenCallback
from pixelis.engines.vllm_files import Scratch, collapse, picture_probes, png_url
from pixelis.engines.vllm_session import Reply, VllmSession, VllmSessions
from pixelis.errors import BadConfig, BadInput, InfraFailure
from pixelis.policy.export import write_peft

if TYPE_CHECKING:
    from pixelis import config
    from pixelis.policy.adapters import Adapter

GENERATE, LOAD, UNLOAD = "/inference/v1/generate", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BIAS = -100.0
"""Added to the logits of banned tokens: vLLM's least."""
START = (
    "start it with: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-scale-out --enable-lora --max-loras 2 "
    "--max-lora-rank RANK --logprobs-mode processed_logprobs --max-logprobs 21, and --mm-processor-kwargs if it resizes pictures"
)


class ServerSession(VllmSession):
    """One episode, with its pictures as they are sent, by digest."""

    def __init__(self, engine: VllmSessions, prefix_key: str | None, start: Start):
        super().__init__(engine, prefix_key, start)
        self.sent: dict[str, str] = {}

    def parts(self) -> list[dict[str, Any]]:
        """The pictures as parts of a request."""
        for digest, picture in zip(self.digests, self.pictures, strict=True):
            if digest not in self.sent:
                self.sent[digest] = png_url(picture)
        return [_part(self.sent[digest]) for digest in self.digests]


class VllmServerEngine(VllmSessions):
    """Generation by `vllm serve` at ``url``, from token ids and lossless pictures.

    Its sampling temperature, nucleus and banned tokens are ours; the log-probabilities are those of the sampled
    distribution. A server cannot take all parameters, sleep, or read pictures by reference. Raises BadConfig for
    a server of another model, and InfraFailure for one that does not answer.
    """

    session_kind = ServerSession
    merges = False

    def __init__(
        self,
        model_folder: str | Path,
        policy: config.PolicyConfig,
        engine: config.EngineConfig,
        dialogue: config.DialogueConfig,
        url: str,
        seed: int = 0,
    ):
        super().__init__(Path(model_folder), policy, engine, dialogue, seed)
        self.url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(engine.api_key_env, "") if engine.api_key_env else ""
        if engine.api_key_env and not key:
            message = f"the environment variable {engine.api_key_env} with the key of {url} is not set"
            raise BadConfig(message, fix=f"export {engine.api_key_env}=...")
        options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": engine.timeout_s,
        }
        self._bias = {str(token): BIAS for token in self.spec.banned}
        self._folder = engine.adapter_folder
        self._name: str | None = None
        self._turns: Counter[str | None] = Counter()
        self._broken: str | None = None
        try:
            with httpx.Client(**options) as http:
                self._check(http, dialogue)
        except httpx.HTTPError as error:
            message = f"{self.url} does not answer: {error!r}"
            raise InfraFailure(message, code="engine_start", fix=START) from None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadConfig(f"{self.url} is no vLLM server: {error!r}", fix=START) from None
        self._scratch = Scratch()
        self._http = httpx.AsyncClient(**options, limits=httpx.Limits(max_connections=engine.max_num_seqs))

    def _check(self, http: httpx.Client, dialogue: config.DialogueConfig) -> None:
        """Raise BadConfig unless the server has the vocabulary, pictures and log-probabilities of the learner."""
        spec, ids = self.spec, sorted(self.tokenizer.get_vocab().values())
        text = self._read_json(http.post("/detokenize", json={"tokens": ids}))["prompt"]
        if text != self.tokenizer.decode(ids):
            raise BadConfig(f"the vocabulary of {self.url} is not that of policy.model", fix=START)
        for view in picture_probes(spec, dialogue):
            pieces = [spec.family.image_ids(spec, *view.shape[:2])]
            prompt = [spec.stop, *pieces[0]]
            if len(prompt) < self.max_context:
                short = collapse(prompt, pieces, spec.family.vllm_image(spec))
                reply = self._probe(http, short, [_part(png_url(Image.fromarray(view)))], 1.0)
                if reply.prompt != prompt:
                    size = f"{view.shape[1]} x {view.shape[0]} pixels"
                    raise BadConfig(f"{self.url} resizes pictures of {size}", fix=START)
        # At twice the temperature log-probabilities lie half as far apart, unless they are of the raw logits.
        gaps = [_gap(self._probe(http, [spec.stop], [], temperature)) for temperature in (1.0, 2.0)]
        if not math.isclose(gaps[0], 2 * gaps[1], rel_tol=0.2, abs_tol=0.05):
            message = f"{self.url} returns log-probabilities of another distribution than it samples from"
            raise BadConfig(message, fix=START)

    def _probe(
        self, http: httpx.Client, tokens: list[int], parts: list[dict[str, Any]], temperature: float
    ) -> Reply:
        """One sampled token after some others, with the likeliest two."""
        settings = {"max_tokens": 1, "temperature": temperature, "logprobs": 3, "logit_bias": self._bias}
        body = {
            "token_ids": tokens,
            "content_parts": parts,
            "sampling_params": settings,
            "return_token_ids": True,
        }
        return _reply(self._read_json(http.post(GENERATE, json=body)), 0)

    def _read_json(self, response: httpx.Response) -> Any:
        """The body of a reply. Raises BadInput for a refused request, InfraFailure for a failed one."""
        if response.is_success:
            return response.json() if response.content[:1] in (b"{", b"[") else None
        text = f"{self.url} answered {response.status_code}: {response.text[:300]}"
        if response.status_code == 404:
            raise InfraFailure(text, code="engine_failed", fix=START)
        if response.is_client_error:
            raise BadInput(text)
        raise InfraFailure(text, code="engine_failed")

    async def load(self, version: int, adapter: Adapter | None) -> None:
        async with self._loading(adapter):
            old, new = self._name, None
            if adapter is not None:
                await asyncio.to_thread(self._base.updates, adapter)
                new = f"pixelis-{uuid.uuid4().hex[:12]}"
                folder = Path(self._folder or self._scratch.path) / new
                text_only = not self.spec.reads_images
                await asyncio.to_thread(write_peft, adapter, folder, fold_scale=True, text_only=text_only)
                try:
                    await self._post(LOAD, {"lora_name": new, "lora_path": str(folder)})
                except BaseException as error:
                    await asyncio.to_thread(shutil.rmtree, folder, True)
                    if isinstance(error, InfraFailure) and self._broken is None:
                        fix = "see its log, or set engine.name=vllm with engine.adapters=merge"
                        raise BadInput(
                            f"the server takes no such adapter: {error.message}", fix=fix
                        ) from None
                    raise
            self._loads += 1
            self._name = new
            if old is not None and not self._turns[old]:
                await self._drop(old)
            self.version = version

    async def _drop(self, name: str) -> None:
        await self._post(UNLOAD, {"lora_name": name})
        await asyncio.to_thread(shutil.rmtree, Path(self._folder or self._scratch.path) / name, True)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        for is_last in (False, True):
            try:
                return self._read_json(await self._http.post(path, json=body))
            except httpx.HTTPError as error:
                # A server may close a connection while the next request is on its way.
                if is_last or isinstance(error, httpx.TimeoutException):
                    self._broken = f"{self.url} does not answer: {error!r}"
                    raise InfraFailure(self._broken, code="engine_failed") from None
        raise AssertionError

    async def _request(
        self, session: VllmSession, sampling: SamplingParams, room: int, on_tokens: TokenCallback | None
    ) -> Reply:
        assert isinstance(session, ServerSession)
        name, settings = self._name, self._settings(session, sampling, room) | {"logit_bias": self._bias}
        if sampling.top_log_probs:
            settings["logprobs"] += 1  # the sampled token takes a place of these
        body = {
            "token_ids": list(session.short),
            "content_parts": await asyncio.to_thread(session.parts),
            "sampling_params": settings,
            "model": name,
            "return_token_ids": True,
            "cache_salt": str(session.loads + 1),
        }
        self._turns[name] += 1
        try:
            answer = await self._post(GENERATE, body)
        finally:
            self._turns[name] -= 1
            if name is not None and name != self._name and not self._turns[name]:
                await self._drop(name)
        reply = _reply(answer, sampling.given_log_probs)
        if on_tokens is not None:
            on_tokens(reply.tokens)
        return reply

    def _failure(self) -> str | None:
        return "it was shut down" if self._shutdown else self._broken

    async def _free(self) -> None:
        raise BadConfig("a vLLM server does not sleep", fix="set engine.colocate=false")

    async def _restore(self) -> None:
        """Nothing was freed."""

    async def aclose(self) -> None:
        if not self._shutdown:
            self._shutdown = True
            await self._end_sessions()
            if self._name is not None and self._broken is None:
                await self._drop(self._name)
            await self._http.aclose()
            self._scratch.remove()


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "url": url}


def _reply(answer: Any, count: int) -> Reply:
    """The reply in a server's answer. count: of the last tokens of the prompt with log-probabilities."""
    choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
    likely = []
    for content in (choice["logprobs"] or {}).get("content") or []:
        entries = {entry["token_id"]: entry for entry in (content, *content["top_logprobs"])}
        likely.append([(id, _value(entry), entry["rank"] or 1) for id, entry in entries.items()])
    start = len(prompt) - count
    prompt_log_probs = [
        entry[str(token)]["logprob"]
        for token, entry in zip(prompt[start:], (answer["prompt_logprobs"] or [])[start:], strict=True)
    ]
    usage = answer.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Reply(prompt, choice["token_ids"] or [], choice["finish_reason"], likely, prompt_log_probs, cached)


def _gap(reply: Reply) -> float:
    """By how much the first token that is likeliest exceeds the next one."""
    first, second = sorted((value for _, value, _ in reply.likely[0]), reverse=True)[:2]
    return first - second


def _value(entry: Any) -> float:
    """A log-probability; the server writes -9999 for 0."""
    return -math.inf if entry["logprob"] <= -9999.0 else float(entry["logprob"])

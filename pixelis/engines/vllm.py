"""The production engine: vLLM's AsyncLLM with the protocol of `engines`.

vLLM schedules, batches and caches in a separate process. A session stores its whole episode and sends it with
every turn; the prefix cache avoids recomputation, also between sessions with the same prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from pixelis.dialogue.session import MIN_TEMPERATURE, Completion, SamplingParams, Start, TokenCallback
from pixelis.engines.engine import Engine, EngineSession
from pixelis.engines.vllm_files import (
    OWNER,
    Scratch,
    adapter_arguments,
    child_environment,
    collapse,
    link_model,
    quantized_copy,
)
from pixelis.errors import (
    BadConfig,
    BadInput,
    DeadlineExceeded,
    InfraFailure,
    MissingDependency,
    PixelisError,
    install_extra,
)
from pixelis.families.spec import load_spec, load_tokenizer
from pixelis.policy.export import BaseFile, write_peft
from pixelis.policy.model import pick_dtype
from pixelis.policy.model_path import fingerprint
from pixelis.policy.ranks import merges
from pixelis.policy.samples import once_per_view, view_digest

if TYPE_CHECKING:
    from pixelis import config
    from pixelis.policy.adapters import Adapter

MAX_TEMPERATURE = 2.0
_picture = once_per_view(Image.fromarray)

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # It returns no processed log-probs, yet vLLM would compile it with nvcc.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_CPU_ENVIRONMENT = {
    # One child process instead of two; several engines on one machine must not bind to the same cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
_CPU_ARGUMENTS = {
    "kv_cache_memory_bytes": 2**30,
    # Only full blocks are reused, and vLLM's 128 tokens on CPU exceed a small prompt.
    "block_size": 32,
    # For chunked prompts vLLM rewinds the random generator, which torch cannot do on CPU.
    "enable_chunked_prefill": False,
}


class VllmSession(EngineSession):
    """One episode: its ids and pictures. vLLM stores the keys and values."""

    engine: VllmEngine

    def __init__(self, engine: VllmEngine, prefix_key: str | None, start: Start):
        super().__init__(engine, prefix_key, start)
        self.ids: list[int] = []
        self.short: list[int] = []
        self.pictures: list[Image.Image] = []
        self.digests: list[str] = []
        self.position = self.origin = 0
        self.loads = engine._loads
        self.task: asyncio.Task[Completion] | None = None

    async def generate(
        self,
        tokens: Sequence[int],
        views: Sequence[np.ndarray],
        sampling: SamplingParams,
        on_tokens: TokenCallback | None = None,
    ) -> Completion:
        """See `Session.generate`; no tokens and `length` at once if the episode fills the context."""
        self.check_turn(tokens, views, self.task is not None)
        spec = self.engine.spec
        if sampling.temperature and not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
            raise BadInput(f"vLLM supports temperature 0 and {MIN_TEMPERATURE} to {MAX_TEMPERATURE}")
        self.engine.check_views(len(self.pictures), views)
        sizes = [(view.shape[0], view.shape[1]) for view in views]
        _, position = spec.family.positions(spec, np.asarray(tokens), sizes, self.position)
        ids, short, pictures = len(self.ids), len(self.short), len(self.pictures)
        # vLLM expands the pictures' tokens, and its prompt is compared with ours afterwards.
        pieces = [spec.family.image_ids(spec, *size) for size in sizes]
        self.short += collapse(tokens, pieces, spec.family.vllm_image(spec))
        self.ids += (int(token) for token in tokens)
        self.pictures += map(_picture, views)
        self.digests += [view_digest(view).hex() for view in views]
        if not ids:
            length, views_shown = self.start.prompt if self.start.turns else (None, None)
            self.origin = _number(self.ids[:length], self.digests[:views_shown])
        self.task = asyncio.create_task(self.engine.complete(self, sampling, on_tokens))
        try:
            completion = await self.task
        except BaseException as error:
            # As before the call, so that it can be repeated.
            del self.ids[ids:], self.short[short:], self.pictures[pictures:], self.digests[pictures:]
            if isinstance(error, asyncio.CancelledError):
                current = asyncio.current_task()
                if self.closed and not (current is not None and current.cancelling()):
                    raise InfraFailure("the session was closed", code="session_closed") from None
                self.close()
            raise
        finally:
            self.task = None
        self.ids += completion.tokens
        self.short += completion.tokens
        self.position = position + len(completion.tokens)
        self.turns += 1
        return completion

    def close(self) -> None:
        """Release the episode; cancels a turn in progress. Idempotent."""
        if not self.closed:
            self.closed = True
            if self.task is not None:
                self.task.cancel()
            self.engine._on_close(self)


class VllmEngine(Engine[VllmSession]):
    """Generation with vLLM; see `engines.Engine`.

    The pixel budgets, number of images and context of ``dialogue`` are the engine's limits. Raises
    MissingDependency without vLLM, BadInput and MissingFile for an unsupported model, InfraFailure if vLLM
    does not start.
    """

    session_kind = VllmSession

    def __init__(
        self,
        model_folder: str | Path,
        policy: config.PolicyConfig,
        engine: config.EngineConfig,
        dialogue: config.DialogueConfig,
        seed: int = 0,
    ):
        if importlib.util.find_spec("vllm") is None:
            raise MissingDependency("engine.name=vllm requires vLLM", fix=install_extra("gpu"))
        folder = Path(model_folder)
        self.tokenizer = load_tokenizer(folder)
        self.spec = load_spec(folder, self.tokenizer, policy.family)
        super().__init__(fingerprint(folder), drains=engine.on_update == "drain")
        self.seed = seed
        self.max_context = dialogue.max_context
        self.max_images = dialogue.max_images
        self.timeout_s = engine.timeout_s
        budgets = dialogue.input, dialogue.crop, dialogue.frame
        self.max_pixels = max(self.spec.multiple**2, *(budget.max_pixels for budget in budgets))
        self.merges = merges(policy, engine)
        self._base = BaseFile(folder, self.spec.family)
        self._scratch = Scratch()
        self._lora: Any = None
        self._lora_turns: Counter[int] = Counter()
        self._merged = False
        self._broken: str | None = None
        self._loads = self._requests = self._pending = 0
        self._since = 0.0
        try:
            self._llm = self._start(folder, policy, engine)
        except BaseException:
            self._scratch.remove()
            raise

    def _start(self, folder: Path, policy: config.PolicyConfig, engine: config.EngineConfig) -> Any:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # vLLM reads it on import
        on_gpu = self._on_gpu = torch.cuda.is_available()
        environment = {
            **_ENVIRONMENT,
            OWNER: str(os.getpid()),
            **({} if on_gpu else {**_CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(engine.threads)}),
        }
        with child_environment(environment):
            from vllm import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            from pixelis.engines import vllm_worker

            self.dtype = pick_dtype(policy.dtype, torch.device("cuda" if on_gpu else "cpu"))
            source, target = quantized_copy(folder, engine, self.spec, on_gpu), self._scratch.path / "model"
            arguments: dict[str, Any] = {
                "model": str(link_model(source, target, self.spec, self.max_pixels)),
                "dtype": str(self.dtype).removeprefix("torch."),
                "quantization": "fp8" if engine.quantization == "fp8" else None,  # a copy names its own
                "seed": self.seed % 2**31,
                "max_model_len": self.max_context,
                "max_num_seqs": engine.max_num_seqs,
                "max_num_batched_tokens": engine.max_num_batched_tokens,
                "tensor_parallel_size": engine.tensor_parallel,
                # Never the Ray backend: in an actor it would reserve the actor's GPUs a second time.
                "distributed_executor_backend": "uni" if engine.tensor_parallel == 1 else "mp",
                "gpu_memory_utilization": engine.gpu_memory_utilization
                * min(1.0, engine.gpus / engine.tensor_parallel or 1.0),
                "enforce_eager": engine.enforce_eager or not on_gpu,
                "enable_prefix_caching": True,
                "scheduling_policy": "priority",
                "enable_sleep_mode": engine.colocate and on_gpu,
                "logprobs_mode": "processed_logprobs",
                "generation_config": "vllm",
                "worker_extension_cls": f"{vllm_worker.__name__}.Extension",
                "additional_config": {
                    vllm_worker.BANNED: list(self.spec.banned),
                    vllm_worker.UNPUBLISHED: self._base.unpublished,
                },
            }
            if self.spec.reads_images:
                arguments["limit_mm_per_prompt"] = {"image": self.max_images, "video": 0}
            if self._base.unpublished:
                arguments["load_format"] = vllm_worker.LOADER
            try:
                model_config = AsyncEngineArgs(**arguments).create_model_config()
                if not on_gpu:
                    # The prefix cache of recurrent states needs chunked prompts.
                    arguments |= _CPU_ARGUMENTS | {"enable_prefix_caching": not model_config.is_hybrid}
                if not self.merges:
                    served = adapter_arguments(policy, self.spec, model_config)
                    self.merges = served is None
                    arguments |= served or {}
                if self.merges:
                    from vllm.config import WeightTransferConfig

                    if engine.quantization != "none":
                        message = "vLLM has no adapters in this model's vision tower and must merge them"
                        raise BadConfig(message, fix="set engine.quantization=none")
                    arguments["weight_transfer_config"] = WeightTransferConfig(backend=vllm_worker.TRANSFER)
                # The context of offline inference has the largest default for the tokens of a prefill.
                settings = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
                ban = vllm_worker.BanV2 if settings.use_v2_model_runner and on_gpu else vllm_worker.Ban
                settings.model_config.logits_processors = [f"{ban.__module__}:{ban.__qualname__}"]
                return AsyncLLM.from_vllm_config(settings, disable_log_stats=True)
            except PixelisError:
                raise
            except Exception as error:
                raise InfraFailure(f"vLLM did not start: {error}", code="engine_start") from error

    async def load(self, version: int, adapter: Adapter | None) -> None:
        async with self._loading(adapter):
            if adapter is not None:
                await asyncio.to_thread(self._base.updates, adapter)
            self._loads += 1
            loading = self._merge(adapter) if self.merges else self._swap(version, adapter)
            await self._guarded(loading, "version load")
            self.version = version

    async def _free(self) -> None:
        """Move the weights to host memory and drop the cache: vLLM's sleep level 1, on GPUs only."""
        if self._on_gpu:
            await self._guarded(self._llm.sleep(level=1, mode="wait"), "sleep")

    async def _restore(self) -> None:
        if self._on_gpu:
            await self._guarded(self._llm.wake_up(), "wake")

    async def _swap(self, version: int, adapter: Adapter | None) -> None:
        """Pass vLLM the adapter as a file in shared memory under a new name, and remove the previous adapter."""
        from vllm.lora.request import LoRARequest

        old, new = self._lora, None
        if adapter is not None:
            folder = self._scratch.path / f"v{version}-{self._loads}"
            # The name is part of the prefix cache's keys: versions do not share cached values.
            new = LoRARequest(folder.name, self._loads, str(folder))
            try:
                await asyncio.to_thread(
                    write_peft, adapter, folder, fold_scale=True, text_only=not self.spec.reads_images
                )
                unserved = (await self._llm.collective_rpc("unserved", args=(str(folder),)))[0]
                if unserved:
                    message = f"vLLM would ignore the adapter of {unserved[0]}"
                    raise BadInput(message, fix="set engine.adapters=merge")
                await self._llm.add_lora(new)
            except BaseException:  # of a cancelled load, too: the file would stay in shared memory
                await asyncio.to_thread(shutil.rmtree, folder, True)
                raise
        self._lora = new
        if old is not None and not self._lora_turns[old.lora_int_id]:
            await self._drop(old)

    async def _drop(self, lora: Any) -> None:
        await self._llm.remove_lora(lora.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, Path(lora.lora_path), True)

    async def _merge(self, adapter: Adapter | None) -> None:
        """Load merged weights with vLLM's transfer phases, then clear everything computed with the old ones.

        Turns in progress keep their cached values, which no other turn reads (see the salt in `_request`).
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if adapter is None and not self._merged:
            return
        path = self._scratch.path / f"merged-{self._loads}.safetensors"
        if adapter is not None:
            await asyncio.to_thread(self._base.write_merged, adapter, path, self.dtype)
        try:
            await self._llm.pause_generation(mode="wait" if self.drains else "keep", clear_cache=self.drains)
            await self._llm.start_weight_update()
            info = {"base": str(self._base.folder), "changes": str(path) if adapter is not None else None}
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            await self._llm.finish_weight_update()
            if self.drains:
                await self._llm.reset_prefix_cache()
            await self._llm.reset_mm_cache()
            await self._llm.reset_encoder_cache()
            await self._llm.resume_generation()
        except BaseException as error:
            # The weights may be a mixture of old and new: nothing may be generated with them.
            self._broken = f"a weight update failed: {error!r}"
            raise
        finally:
            path.unlink(missing_ok=True)
        self._merged = adapter is not None

    async def _guarded(self, command: Any, name: str) -> None:
        """Await a command to vLLM for at most `timeout_s`; failures become InfraFailure."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await command
        except PixelisError:
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"vLLM did not finish a {name} in {self.timeout_s:g} s") from None
        except Exception as error:
            raise InfraFailure(f"vLLM failed in a {name}: {error!r}", code="engine_failed") from error

    async def health(self) -> dict[str, object]:
        busy = time.perf_counter() - self._since if self._pending else 0.0
        health = self._health("vllm", self._pending, self._pending > 0, self.busy_s + busy)
        return health | {"alive": self._failure() is None}

    async def aclose(self) -> None:
        if not self._shutdown:
            self._shutdown = True
            tasks = [session.task for session in self._sessions if session.task is not None]
            for session in list(self._sessions):
                session.close()
            if tasks:
                await asyncio.wait(tasks, timeout=5)
            llm, self._llm = self._llm, None
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # else it logs the end of the engine's process as a failure
            await asyncio.to_thread(llm.shutdown)
            self._scratch.remove()

    def check_views(self, images: int, views: Sequence[np.ndarray]) -> None:
        """Raise BadInput for views that vLLM would resize or refuse; `images` counts earlier views."""
        if views and not self.spec.reads_images:
            raise BadInput(f"a model of type {self.spec.family_name} reads text alone", code="no_vision")
        if images + len(views) > self.max_images:
            raise BadInput(f"more images in an episode than dialogue.max_images = {self.max_images}")
        for view in views:
            if view.shape[0] * view.shape[1] > self.max_pixels:
                raise BadInput(f"a view exceeds the largest budget, {self.max_pixels} pixels")

    async def complete(
        self, session: VllmSession, sampling: SamplingParams, on_tokens: TokenCallback | None
    ) -> Completion:
        self._check_alive()
        room = self.max_context - len(session.ids)
        if room < 1:
            if sampling.given_log_probs:
                raise BadInput("the tokens fill the context", code="over_context")
            return Completion([], [], "length")
        if not self._pending:
            self._since = time.perf_counter()
        self._pending += 1
        try:
            async with asyncio.timeout(self.timeout_s):
                output = await self._request(session, sampling, min(room, sampling.max_tokens), on_tokens)
            completion = self._read(session, output, sampling)
        except Exception as error:
            from vllm.exceptions import VLLMClientError

            self.failures += 1
            if isinstance(error, PixelisError):
                raise
            if isinstance(error, TimeoutError):
                message = f"a turn took longer than engine.timeout_s = {self.timeout_s:g} s"
                raise DeadlineExceeded(message) from None
            if isinstance(error, (ValueError, TypeError, VLLMClientError)):
                raise BadInput(f"vLLM refused the request: {error}") from error
            message = f"vLLM failed: {self._failure() or repr(error)}"
            raise InfraFailure(message, code="engine_failed") from error
        finally:
            self._pending -= 1
            if not self._pending:
                self.busy_s += time.perf_counter() - self._since
        self.rows_done += 1
        self.tokens_written += len(completion.tokens)
        reused = output.num_cached_tokens or 0
        self.tokens_reused += reused
        self.tokens_read += len(session.ids) - reused
        return completion

    async def _request(
        self, session: VllmSession, sampling: SamplingParams, room: int, on_tokens: TokenCallback | None
    ) -> Any:
        from vllm import SamplingParams as VllmParams
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        # Versions must not share keys and values; an episode that is open during a load keeps its own.
        prompt: dict[str, Any] = {"prompt_token_ids": list(session.short), "cache_salt": str(session.loads)}
        if session.pictures:
            prompt["multi_modal_data"] = {"image": list(session.pictures)}
            prompt["multi_modal_uuids"] = {"image": list(session.digests)}
        # Sessions of one key sample the same prompt: equal seeds must not give equal turns.
        stream = (
            self.seed,
            self.version,
            sampling.seed,
            session.start.ordinal,
            session.turns,
            session.origin,
        )
        settings = VllmParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=room,
            seed=_number(stream) % 2**63,
            stop_token_ids=[self.spec.stop],
            ignore_eos=True,
            logprobs=sampling.top_log_probs,
            prompt_logprobs=0 if sampling.given_log_probs else None,
            stop=sampling.stop or None,
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY if on_tokens is None else RequestOutputKind.CUMULATIVE,
        )
        self._requests += 1
        output, lora, seen = None, self._lora, 0
        name = lora.lora_int_id if lora is not None else 0
        self._lora_turns[name] += 1
        try:
            request = TokensPrompt(**prompt), settings, str(self._requests)
            async for answer in self._llm.generate(*request, lora_request=lora, priority=sampling.priority):
                output = answer
                if on_tokens is not None:
                    on_tokens(list(answer.outputs[0].token_ids)[seen:])
                    seen = len(answer.outputs[0].token_ids)
        finally:
            self._lora_turns[name] -= 1
            if lora is not None and lora is not self._lora and not self._lora_turns[name]:
                await self._drop(lora)
        if output is None or not output.finished:
            raise InfraFailure("vLLM ended a request without an output", code="engine_failed")
        return output

    def _read(self, session: VllmSession, output: Any, sampling: SamplingParams) -> Completion:
        """Raises InfraFailure for another prompt or an incomplete output."""
        top = sampling.top_log_probs
        if list(output.prompt_token_ids) != session.ids:
            message = "vLLM's prompt differs from the episode's tokens and pictures"
            raise InfraFailure(message, code="prompt_mismatch")
        generated = output.outputs[0]
        tokens, values = [int(token) for token in generated.token_ids], generated.logprobs or []
        if generated.finish_reason not in ("stop", "length") or not tokens or len(values) != len(tokens):
            message = f"{generated.finish_reason!r}, {len(tokens)} tokens and {len(values)} log-probs"
            raise InfraFailure(f"vLLM ended a request with {message}", code="engine_failed")
        log_probs = [float(entry[token].logprob) for token, entry in zip(tokens, values, strict=True)]
        # vLLM adds the sampled token whatever its rank; outside top_p log-probabilities are -inf.
        likely = [
            [(int(t), v.logprob) for t, v in entry.items() if v.rank <= top and math.isfinite(v.logprob)]
            for entry in (values if top else ())
        ]
        top_log_probs = [sorted(pairs, key=lambda pair: -pair[1]) for pairs in likely]
        stopped = tokens[-1] == self.spec.stop or generated.finish_reason == "stop"
        start = len(session.ids) - sampling.given_log_probs
        # Of the whole vocabulary: banned ids have a probability, which is small
        given_log_probs = [
            float(entry[token].logprob)
            for token, entry in zip(session.ids[start:], (output.prompt_logprobs or [])[start:], strict=True)
        ]
        return Completion(tokens, log_probs, "stop" if stopped else "length", top_log_probs, given_log_probs)

    def _failure(self) -> str | None:
        if self._shutdown:
            return "it was shut down"
        if self._broken is not None:
            return self._broken
        return "its process died" if self._llm.errored else None

    def _check_alive(self) -> None:
        super()._check_alive()
        if (reason := self._failure()) is not None:
            raise InfraFailure(
                f"vLLM cannot serve: {reason}", code="engine_dead", fix="restart the generator"
            )


def _number(*values: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big")

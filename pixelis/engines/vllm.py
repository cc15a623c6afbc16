"""The production engine: vLLM's AsyncLLM with the protocol of `engines`.

vLLM schedules, batches and caches in a separate process. A session stores its whole episode and sends it with
every turn; the prefix cache avoids recomputation, also between sessions with the same prompt.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from pixelis.dialogue.session import SamplingParams, TokenCallback
from pixelis.engines.vllm_files import (
    OWNER,
    Scratch,
    adapter_arguments,
    child_environment,
    link_model,
    quantized_copy,
)
from pixelis.engines.vllm_session import Reply, VllmSession, VllmSessions
from pixelis.errors import (
    BadConfig,
    BadInput,
    DeadlineExceeded,
    InfraFailure,
    MissingDependency,
    PixelisError,
    install_extra,
)
from pixelis.policy.export import write_peft
from pixelis.policy.model import pick_dtype
from pixelis.policy.ranks import merges
from pixelis.policy.samples import once_per_view

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


class VllmEngine(VllmSessions):
    """Generation with vLLM; see `engines.Engine`.

    Raises MissingDependency without vLLM, BadInput and MissingFile for an unsupported model, InfraFailure if
    vLLM does not start.
    """

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
        super().__init__(folder, policy, engine, dialogue, seed)
        self.merges = merges(policy, engine)
        self._scratch = Scratch()
        self._lora: Any = None
        self._lora_turns: Counter[int] = Counter()
        self._merged = False
        self._broken: str | None = None
        self._requests = 0
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

    async def aclose(self) -> None:
        if not self._shutdown:
            self._shutdown = True
            await self._end_sessions()
            llm, self._llm = self._llm, None
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # else it logs the end of the engine's process as a failure
            await asyncio.to_thread(llm.shutdown)
            self._scratch.remove()

    async def _request(
        self, session: VllmSession, sampling: SamplingParams, room: int, on_tokens: TokenCallback | None
    ) -> Reply:
        reply = await self._ask(session, sampling, room, on_tokens)
        if reply.finish_reason == "error" and session.pictures:
            # A turn that was cancelled while vLLM prepared its pictures left them in one of two caches that must agree.
            await self._llm.reset_mm_cache()
            reply = await self._ask(session, sampling, room, on_tokens)
        return reply

    async def _ask(
        self, session: VllmSession, sampling: SamplingParams, room: int, on_tokens: TokenCallback | None
    ) -> Reply:
        from vllm import SamplingParams as VllmParams
        from vllm import TokensPrompt
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        # Versions must not share keys and values; an episode that is open during a load keeps its own.
        prompt: dict[str, Any] = {"prompt_token_ids": list(session.short), "cache_salt": str(session.loads)}
        if session.pictures:
            prompt["multi_modal_data"] = {"image": list(session.pictures)}
            prompt["multi_modal_uuids"] = {"image": list(session.digests)}
        kind = RequestOutputKind.FINAL_ONLY if on_tokens is None else RequestOutputKind.CUMULATIVE
        self._requests += 1
        output, lora, seen = None, self._lora, 0
        name = lora.lora_int_id if lora is not None else 0
        self._lora_turns[name] += 1
        try:
            settings = VllmParams(**self._settings(session, sampling, room), output_kind=kind)
            request = TokensPrompt(**prompt), settings, str(self._requests)
            async for answer in self._llm.generate(*request, lora_request=lora, priority=sampling.priority):
                output = answer
                if on_tokens is not None:
                    on_tokens(list(answer.outputs[0].token_ids)[seen:])
                    seen = len(answer.outputs[0].token_ids)
        except (ValueError, TypeError, VLLMClientError) as error:
            raise BadInput(f"vLLM refused the request: {error}") from error
        finally:
            self._lora_turns[name] -= 1
            if lora is not None and lora is not self._lora and not self._lora_turns[name]:
                await self._drop(lora)
        if output is None or not output.finished:
            raise InfraFailure("vLLM ended a request without an output", code="engine_failed")
        return _reply(output, sampling.given_log_probs)

    def _failure(self) -> str | None:
        if self._shutdown:
            return "it was shut down"
        if self._broken is not None:
            return self._broken
        return "its process died" if self._llm.errored else None


def _reply(output: Any, count: int) -> Reply:
    """The reply in vLLM's output. count: of the last tokens of the prompt with log-probabilities."""
    generated, prompt = output.outputs[0], [int(token) for token in output.prompt_token_ids]
    likely = [
        [(int(id), float(entry.logprob), entry.rank) for id, entry in entries.items()]
        for entries in generated.logprobs or []
    ]
    start = len(prompt) - count
    # Of the whole vocabulary: banned ids have a probability, which is small
    prompt_log_probs = [
        float(entry[token].logprob)
        for token, entry in zip(prompt[start:], (output.prompt_logprobs or [])[start:], strict=True)
    ]
    tokens = [int(token) for token in generated.token_ids]
    return Reply(
        prompt, tokens, generated.finish_reason, likely, prompt_log_probs, output.num_cached_tokens or 0
    )

"""The vLLM engine of one rollout worker: answers with their log-probs, and weight updates in flight.

The same code drives vLLM on CPU and on CUDA; only `engine_arguments` looks at the device.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import Config
from core.errors import RunBroken
from core.machine import read_machine, resolve_dtype

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Answer:
    """One sampled answer of L tokens."""

    tokens: list[int]  # [L]
    logprobs: list[float]  # [L], of the distribution the token was drawn from; empty where not asked for
    versions: list[int]  # [L], weight version that drew each token
    finish_reason: str  # stop or length
    text: str


class EngineProcess:
    """Methods vLLM adds to its own worker, which lives in a child process of ours."""

    def die_with_parent(self) -> int:
        """Makes the kernel kill this process when the one that started it is gone, even by kill -9; returns its pid."""
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        return os.getpid()

    def load_folder(self, folder: str) -> None:
        """Loads all weights of a folder in place, the output layer's too.

        vLLM's reload finds no weight of its own for an output layer that is tied to the embedding, and on CPU goes on
        with the copy it had packed from the old one; so that copy is packed again here.
        """
        worker: Any = self
        worker.reload_weights(weights_path=folder)
        for layer in worker.get_model().modules():
            if hasattr(layer, "cpu_linear") and hasattr(layer, "tie_weights"):
                layer.quant_method.process_weights_after_loading(layer)


def set_engine_environment(device: str, threads: int) -> None:
    """Sets what vLLM reads at import; call before vLLM is first imported in the process."""
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TQDM_DISABLE="1")
    if device == "cpu":
        # One process less between the engine and its model: on CPU vLLM wants a process of its own only to set the
        # OpenMP variables, which are set here. Without torch.compile no compiler is needed at run time.
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS=str(threads),
            TORCH_COMPILE_DISABLE="1",
        )


def engine_arguments(config: Config, model: Path) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs for this config."""
    rollout = config.rollout
    dtype = resolve_dtype(rollout.dtype, rollout.device, read_machine())
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": rollout.max_num_sequences,
        "logprobs_mode": "processed_logprobs",  # after temperature, top-p and top-k: what was really sampled from
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "seed": config.seed,
        "worker_extension_cls": "policy.engine.EngineProcess",
        "tensor_parallel_size": rollout.tensor_parallel_size,
    }
    if rollout.device == "cpu":
        # A prompt must not be split over two engine steps: vLLM rewinds the seeded generator of a half-read prompt
        # with an offset that CPU generators do not have, and the engine dies.
        arguments |= {
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "kv_cache_memory_bytes": rollout.kv_cache_bytes,
            "block_size": 32,  # the CPU attention's smallest; a small block shares more of a short prompt
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(8192, config.max_model_len),
        }
    else:
        arguments |= {"gpu_memory_utilization": rollout.gpu_memory_fraction}
    return arguments


class Engine:
    """A running vLLM AsyncLLM that answers under one weight version at a time."""

    def __init__(self, config: Config, model: Path, version: int) -> None:
        self._config, self._model, self.version = config, model, version
        self._loaded = model  # the folder the engine's weights come from
        self._llm: Any = None
        self._num_requests = 0

    async def start(self) -> None:
        """Brings the engine up with the model's own weights; draws one token, so that the first group need not wait."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self._config, self._model)))
        end_with_processes(await self._llm.collective_rpc("die_with_parent"))
        await self._llm.update_weight_version(str(self.version))
        await self.answer([1], seed=None, max_tokens=1)

    async def answer(self, prompt: list[int], seed: int | None, max_tokens: int | None = None) -> Answer:
        """One answer to the prompt's ids; greedy and without log-probs where seed is None.

        Waits for the engine; unblocked by its last token, or by the end of this process where the engine dies.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        rollout = self._config.rollout
        greedy = seed is None
        params = SamplingParams(
            temperature=0.0 if greedy else rollout.temperature,
            top_p=1.0 if greedy else rollout.top_p,
            top_k=0 if greedy else rollout.top_k,
            seed=None if seed is None else seed % LARGEST_SEED,
            max_tokens=max_tokens or rollout.max_new_tokens,
            logprobs=None if greedy else 0,
            stop=list(rollout.stop) or None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._num_requests += 1
        # The salt keeps keys and values of older weights from answering, even where a reset of the cache was refused.
        request = {"prompt_token_ids": prompt, "cache_salt": f"version {self.version}"}
        async for output in self._llm.generate(request, params, request_id=str(self._num_requests)):
            last = output.outputs[0]
        return _answer_of(last, self.version)

    async def load(self, folder: Path, version: int) -> dict[str, float]:
        """Puts the weights of `folder` under the running answers; returns seconds of the pause and of the load.

        Afterwards the engine holds all new weights, or, where the load failed, all old ones and RunBroken is raised.
        """
        started = time.monotonic()
        await self._llm.pause_generation(mode="keep")
        paused = time.monotonic()
        try:
            await self._reload(folder)
            await self._llm.update_weight_version(str(version))
            self._loaded, self.version = folder, version
        finally:
            await self._llm.reset_prefix_cache()
            await self._llm.resume_generation()
        return {"pause_s": time.monotonic() - paused, "wait_s": paused - started}

    async def _reload(self, folder: Path) -> None:
        try:
            await self._llm.collective_rpc("load_folder", args=(str(folder),))
        except Exception as error:  # whatever vLLM raised, the old weights must come back before anyone is answered
            await self._llm.collective_rpc("load_folder", args=(str(self._loaded),))
            raise RunBroken(
                f"weights must load from {folder}, got {type(error).__name__}: {error}; version {self.version} goes on"
            ) from error


def end_with_processes(pids: Sequence[int]) -> None:
    """Ends this process, as a crash would, when one of the engine's processes is gone.

    vLLM answers some calls of a dead engine with an error and leaves others waiting for ever; a dead actor is one thing
    that its pool hears at once and knows how to replace.
    """
    loop = asyncio.get_running_loop()
    for pid in pids:
        loop.add_reader(os.pidfd_open(pid), _end_this_process, pid)


def _end_this_process(pid: int) -> None:
    print(f"error: engine process {pid} must stay alive, and is gone; its worker ends too", file=sys.stderr, flush=True)
    os._exit(1)


def _answer_of(output: Any, version: int) -> Answer:
    tokens = list(output.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs or [], strict=False)]
    versions = [version] * len(tokens)
    for span in output.weight_versions or []:
        number = int(span.version)
        for position in range(span.start, min(span.end, len(tokens))):
            versions[position] = number
    if output.finish_reason not in ("stop", "length"):
        raise RunBroken(f"an answer must end by stop or length, got {output.finish_reason!r} from the engine")
    return Answer(tokens, logprobs, versions, output.finish_reason, output.text)

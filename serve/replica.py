"""One Ray Serve replica: a vLLM engine on one version's weights; token ids in, answers out."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from core.errors import RunBroken
from core.machine import read_machine, resolve_dtype
from policy.engine import end_with_processes, set_engine_environment
from serve.artefacts.artefact import artefacts_folder, flaw
from serve.config import ReplicaConfig, ServeConfig

# Pieces of one stream that come faster are sent together: every message costs CPU in four processes.
MIN_PIECE_INTERVAL_S, MAX_PIECE_INTERVAL_S = 0.03, 0.2
PIECE_INTERVAL_PER_STREAM_S = 0.005  # all streams of a replica send at most 200 messages a second


def engine_arguments(config: ReplicaConfig, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs: the same for the engine and for who prepares its requests."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": resolve_dtype(config.dtype, config.device, read_machine()),
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_sequences,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": seed,
        "worker_extension_cls": "policy.engine.EngineProcess",
        "tensor_parallel_size": config.tensor_parallel_size,
    }
    if config.device == "cpu":
        arguments |= {
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "kv_cache_memory_bytes": config.kv_cache_bytes,
            "block_size": 32,
            "enable_chunked_prefill": False,  # a seeded prompt must not be read in two parts: policy/engine.py
            "max_num_batched_tokens": max(8192, config.max_model_len),
        }
    else:
        arguments |= {"gpu_memory_utilization": config.gpu_memory_fraction}
    return arguments


def piece_interval_s(num_streams: int) -> float:
    """Seconds between two messages of one stream, where a replica has so many."""
    return min(MAX_PIECE_INTERVAL_S, max(MIN_PIECE_INTERVAL_S, PIECE_INTERVAL_PER_STREAM_S * num_streams))


class Replica:
    """Serves the artefact of one digest for as long as it lives. serve/application.py makes it a deployment."""

    async def __init__(self, config: ServeConfig, digest: str) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Loads the weights once every file matches its hash, and draws a token. RunBroken where one does not."""
        self.digest = digest
        self._num_streams = 0
        folder = artefacts_folder(config.serve_dir) / digest
        wrong = flaw(folder)
        if wrong is not None:
            raise RunBroken(f"artefact {folder} must be whole to be served, but {wrong}; export it again")
        set_engine_environment(config.replica.device, config.replica.threads or read_machine().num_cores)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(config.replica, folder, config.seed)))
        end_with_processes(await self._llm.collective_rpc("die_with_parent"))
        await self.whole([1], SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY), "warm-up")

    async def whole(self, prompt: list[int], params: Any, request_id: str) -> Any:
        """The whole answer. Waits for the engine; given up, and the engine told so, when the caller is cancelled."""
        async for output in self._llm.generate({"prompt_token_ids": prompt}, params, request_id):
            last = output
        last.prompt_token_ids = []  # the caller has them
        return last

    async def stream(self, prompt: list[int], params: Any, request_id: str) -> AsyncIterator[list[Any]]:
        """The answer's pieces, in batches: the first at once, the others the larger the more streams there are."""
        batch: list[Any] = []
        sent = 0.0
        self._num_streams += 1
        try:
            async for output in self._llm.generate({"prompt_token_ids": prompt}, params, request_id):
                output.prompt_token_ids = []
                batch.append(output)
                if output.finished or time.monotonic() - sent >= piece_interval_s(self._num_streams):
                    yield batch
                    batch, sent = [], time.monotonic()
        finally:
            self._num_streams -= 1

    async def check_health(self) -> None:
        """Asked by Ray Serve; raises where the engine is dead."""
        await self._llm.check_health()

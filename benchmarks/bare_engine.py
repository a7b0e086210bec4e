"""The bare engine's rate on bench_serve's requests: no HTTP, no Ray, the same engine arguments and 32 at a time."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.bench_serve import MAX_TOKENS, NUM_CLIENTS, NUM_REQUESTS, NUM_ROUNDS, PROMPTS, at_once
from core.machine import read_machine
from data.template import template_tokens
from policy.bundled import load_tokenizer
from policy.engine import set_engine_environment
from serve.config import ServeConfig
from serve.replica import engine_arguments


async def rates(folder: Path, config: ServeConfig) -> list[float]:
    """Tokens/s of each round, after one to warm up."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    tokenizer = load_tokenizer(folder)
    prompts = [template_tokens(tokenizer, [{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    params = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(config.replica, folder, config.seed)))
    found = []
    for number in range(NUM_ROUNDS + 1):

        async def one(place: int, number: int = number) -> int:
            request: Any = {"prompt_token_ids": prompts[place]}
            async for output in llm.generate(request, params, f"{number}-{place}"):
                last = output
            return len(last.outputs[0].token_ids)

        started = time.monotonic()
        num_tokens = sum(await at_once(NUM_CLIENTS, NUM_REQUESTS, one))
        found.append(num_tokens / (time.monotonic() - started))
    llm.shutdown()
    return found[1:]


if __name__ == "__main__":
    serving = ServeConfig.model_validate_json(sys.argv[2])
    set_engine_environment(serving.replica.device, serving.replica.threads or read_machine().num_cores)
    values = sorted(asyncio.run(rates(Path(sys.argv[1]), serving)))
    print(f"BARE {values[len(values) // 2]:.1f} tokens/s")

"""Bare vLLM on a config's prompts: `python -m benchmarks.bare_vllm CONFIG [key=value ...]`, prints tokens/s as JSON.

The engine has the arguments of our rollout workers; there is no Ray, no group, no log of versions. Three rounds are
timed, the first, which also warms up, is left out.
"""

import asyncio
import json
import sys
import time

from actors.rollout import sample_seed
from core.config import Config, load_config
from core.machine import read_machine
from data.dataset import load_dataset
from data.schedule import prompts_of_step
from policy.bundled import load_tokenizer, resolve_model
from policy.engine import engine_arguments, set_engine_environment


async def tokens_per_s(config: Config, num_rounds: int = 3) -> list[float]:
    """Tokens/s of each round after the first: all answers of one step's prompts at once."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    model = resolve_model(config.policy.model)
    rows = load_dataset(config, load_tokenizer(model)).train
    arguments = engine_arguments(config, model)
    del arguments["worker_extension_cls"]
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def answer(tokens: list[int], seed: int, name: str) -> int:
        params = SamplingParams(
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_new_tokens,
            seed=seed,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in engine.generate({"prompt_token_ids": tokens}, params, request_id=name):
            last = output
        return len(last.outputs[0].token_ids)

    rates = []
    for step in range(num_rounds + 1):
        prompts = [rows[row] for _, row in prompts_of_step(config, len(rows), step)]
        began = time.monotonic()
        jobs = [
            answer(
                list(prompt.tokens),
                sample_seed(config.seed, step, prompt.prompt_id, sample),
                f"{step}/{place}/{sample}",
            )
            for place, prompt in enumerate(prompts)
            for sample in range(config.rollout.samples_per_prompt)
        ]
        num_tokens = sum(await asyncio.gather(*jobs))
        rates.append(num_tokens / (time.monotonic() - began))
    engine.shutdown()
    return rates[1:]


if __name__ == "__main__":
    settings = load_config(sys.argv[1], sys.argv[2:])
    set_engine_environment(settings.rollout.device, settings.rollout.threads or read_machine().num_cores)
    print("BARE " + json.dumps(asyncio.run(tokens_per_s(settings))), flush=True)

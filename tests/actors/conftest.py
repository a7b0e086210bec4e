"""The suite's one engine: a rollout worker on the tiny model, as a Ray actor."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.crew import Weights, rollout_pool
from actors.rollout import Ask
from cluster.pool import Pool
from core.config import Config, parse_config
from core.machine import read_machine
from core.trajectory import Prompt

PROMPTS = ("Hi", "What is 2 + 3?", "Compute 9 minus 4. Reply with the number only.", "x" * 60)


@pytest.fixture(scope="session")
def engine_config(tiny_model: Path) -> Config:
    tree = {
        "num_steps": 1,
        "seed": 42,
        "policy": {"model": str(tiny_model)},
        "data": {"max_prompt_tokens": 160},
        "rollout": {
            "samples_per_prompt": 4,
            "max_new_tokens": 48,
            "kv_cache_bytes": 1 << 26,
            "dtype": "float32",
            "temperature": 0.8,
            "threads": 1,
            "cpus": 0,
        },
    }
    return parse_config(tree, "the suite's engine")


@pytest.fixture(scope="session")
def rollouts(ray_session: Any, engine_config: Config, tiny_model: Path) -> Iterator[Pool]:
    pool = rollout_pool(engine_config, tiny_model, read_machine(), Weights(0, None))
    pool.wait_ready(240, lambda text: None)
    yield pool
    pool.close()


@pytest.fixture
def sample(rollouts: Pool) -> Callable[..., list[Any]]:
    """Groups of the given asks, all in the engine at once."""

    def ask_all(asks: list[Ask]) -> list[Any]:
        calls = [rollouts.call("sample", ask, num_returns=2) for ask in asks]
        return [ray.get(call.refs[0], timeout=120) for call in calls]

    return ask_all


@pytest.fixture(scope="session")
def make_ask(tiny_model: Path) -> Callable[..., Ask]:
    from transformers import AutoTokenizer

    from data.template import template_tokens

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def make(place: int, epoch: int = 0, attempt: int = 0) -> Ask:
        text = PROMPTS[place % len(PROMPTS)]
        tokens = tuple(template_tokens(tokenizer, [{"role": "user", "content": text}]))
        return Ask(epoch, place, attempt, 0, Prompt(f"p{place}", text, tokens, "5"), 0, 0)

    return make

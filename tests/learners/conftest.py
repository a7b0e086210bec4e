"""Small groups and a tiny random model for the learner's tests."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.trajectory import Group

VOCABULARY = 256


def build_group(lengths: list[int], prompt: int = 5, seed: int = 0, **changed: object) -> Group:
    random = np.random.default_rng(seed)
    total = sum(lengths)
    columns: dict[str, object] = {
        "group_id": f"0:p{seed}:0",
        "prompt_id": f"p{seed}",
        "answer": "",
        "prompt_tokens": random.integers(0, VOCABULARY, prompt).astype(np.int32),
        "tokens": random.integers(0, VOCABULARY, total).astype(np.int32),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "behavior_logprobs": (-np.log(VOCABULARY) + random.normal(0, 0.3, total)).astype(np.float32),
        "version": np.zeros(total, np.int32),
        "finish_reason": ("stop",) * len(lengths),
        "loss_mask": np.ones(total, bool),
        "cluster": 0,
        "cluster_version": 0,
        "text": ("",) * len(lengths),
    }
    return Group(**(columns | changed))


def build_model(tied: bool = False, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(autouse=True)
def _one_thread():
    """The models are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_group() -> Callable[..., Group]:
    return build_group


@pytest.fixture
def make_model() -> Callable[..., LlamaForCausalLM]:
    return build_model

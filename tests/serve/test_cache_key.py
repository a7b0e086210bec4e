"""The cache's key: any field that can change the answer changes it, and nothing else does."""

import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.engine

BASE: dict[str, Any] = {"temperature": 0.7, "seed": 3, "max_tokens": 40}
# Two values of each field, other than BASE's and the default. A field that a new vLLM brings must be entered here.
OTHERS: dict[str, tuple[Any, Any]] = {
    "n": (2, 3),
    "presence_penalty": (0.5, -0.5),
    "frequency_penalty": (0.5, -0.5),
    "repetition_penalty": (1.1, 1.2),
    "temperature": (0.8, 1.3),
    "watermarking": (True, False),
    "top_p": (0.5, 0.9),
    "top_k": (5, 50),
    "min_p": (0.1, 0.2),
    "seed": (4, None),
    "stop": (["a"], ["a", "b"]),
    "stop_token_ids": ([5], [5, 6]),
    "ignore_eos": (True, True),
    "max_tokens": (4, 41),
    "min_tokens": (1, 2),
    "logprobs": (0, 3),
    "prompt_logprobs": (0, 3),
    "prompt_logprob_start": (1, 2),
    "logprob_token_ids": ([7], [8]),
    "detokenize": (False, False),
    "skip_special_tokens": (False, False),
    "spaces_between_special_tokens": (False, False),
    "include_stop_str_in_output": (True, True),
    "structured_outputs": ({"json": "{}"}, {"regex": "a+"}),
    "logit_bias": ({3: 1.0}, {3: 2.0}),
    "allowed_token_ids": ([1, 2], [1, 3]),
    "extra_args": ({"a": 1}, {"a": 2}),
    "bad_words": (["x"], ["y"]),
    "thinking_token_budget": (5, 6),
    "repetition_detection": ((4, 1, 2), (4, 1, 3)),
    "trace_decode_token_ids": ([1], [2]),
}
# Not an answer's content: how it is cut, where it is computed from, and what the engine fills in for itself.
NOT_CONTENT = {
    "output_kind",
    "stream_interval",
    "output_text_buffer_length",
    "skip_clone",
    "flat_logprobs",
    "skip_reading_prefix_cache",
    "routed_experts_prompt_start",
    "prompt_logprob_token_ids",
    "_eos_token_id",
    "_all_stop_token_ids",
    "_watermarking_skipped",
    "_bad_words_token_ids",
}


@pytest.fixture(scope="module")
def vllm() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM's own imports
        import vllm.sampling_params as module

        import serve.cache.key as keys
    module.keys = keys
    return module


def params_of(vllm: Any, **fields: Any) -> Any:
    values = {**BASE, **fields}
    if isinstance(values.get("structured_outputs"), dict):
        values["structured_outputs"] = vllm.StructuredOutputsParams(**values["structured_outputs"])
    if isinstance(values.get("repetition_detection"), tuple):
        values["repetition_detection"] = vllm.RepetitionDetectionParams(*values["repetition_detection"])
    if values.get("logprob_token_ids") is not None:
        values["logprobs"] = 1
    return vllm.SamplingParams(**values)


def key_of(vllm: Any, params: Any, tenant: str = "t", digest: str = "d" * 64, prompt: tuple[int, ...] = (1, 2)) -> str:
    return str(vllm.keys.cache_key("n", tenant, digest, "engine 1", list(prompt), params))


def test_every_sampling_field_of_this_vllm_is_known_here(vllm):
    import msgspec

    names = {field.name for field in msgspec.structs.fields(vllm.SamplingParams)}
    assert names == set(OTHERS) | NOT_CONTENT


@settings(deadline=None, max_examples=300)
@given(
    left=st.dictionaries(st.sampled_from(sorted(OTHERS)), st.integers(0, 1), max_size=4),
    right=st.dictionaries(st.sampled_from(sorted(OTHERS)), st.integers(0, 1), max_size=4),
)
def test_two_requests_share_a_key_only_where_every_field_agrees(vllm, left, right):
    def fields(chosen: dict[str, int]) -> dict[str, Any]:
        return {name: OTHERS[name][place] for name, place in chosen.items()}

    def made(chosen: dict[str, Any]) -> Any:
        try:
            return params_of(vllm, **chosen)
        except (ValueError, vllm.VLLMValidationError):  # a combination vLLM refuses is no request
            return None

    first, second = made(fields(left)), made(fields(right))
    if first is None or second is None:
        return
    meant = [{**BASE, "logprob_token_ids": None} | fields(chosen) for chosen in (left, right)]
    for one in meant:
        if one["logprob_token_ids"] is not None:
            one["logprobs"] = 1
    assert (key_of(vllm, first) == key_of(vllm, second)) == (meant[0] == meant[1])


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_change_of_one_field_alone_is_another_key(vllm, name):
    base = key_of(vllm, params_of(vllm))
    for other in OTHERS[name]:
        assert key_of(vllm, params_of(vllm, **{name: other})) != base


def test_prompt_tenant_weights_and_engine_are_part_of_the_key(vllm):
    params = params_of(vllm)
    base = key_of(vllm, params)
    assert key_of(vllm, params, tenant="u") != base
    assert key_of(vllm, params, digest="e" * 64) != base
    assert key_of(vllm, params, prompt=(12,)) != key_of(vllm, params, prompt=(1, 2))  # not glued together
    assert vllm.keys.cache_key("n", "t", "d" * 64, "engine 2", [1, 2], params) != base


def test_spelling_does_not_matter(vllm):
    base = key_of(vllm, params_of(vllm))
    for same in ({"top_p": 1}, {"presence_penalty": 0}, {"n": 1}, {"stop": None}, {"stop": []}, {"top_k": -1}):
        assert key_of(vllm, params_of(vllm, **same)) == base, same
    assert key_of(vllm, params_of(vllm, temperature=1)) == key_of(vllm, params_of(vllm, temperature=1.0))
    delta, final = (params_of(vllm, output_kind=kind) for kind in list(vllm.RequestOutputKind)[1:])
    assert key_of(vllm, delta) == key_of(vllm, final)


def test_only_greedy_and_seeded_requests_are_deterministic(vllm):
    assert vllm.keys.is_deterministic(params_of(vllm))
    assert vllm.keys.is_deterministic(params_of(vllm, temperature=0, seed=None))
    assert not vllm.keys.is_deterministic(params_of(vllm, seed=None))

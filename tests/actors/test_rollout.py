"""Rollouts on a real engine: what was sampled, under which weights, with which probability."""

from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from actors.rollout import sample_seed
from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


def logprobs_of(folder: Path, group, temperature: float) -> np.ndarray:
    """[N] log-probs of a group's tokens by plain transformers, one answer at a time, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    values = []
    for sample in range(group.num_samples):
        answer = group.answer_tokens(sample)
        ids = torch.tensor(np.concatenate([group.prompt_tokens, answer])[None].astype(np.int64))
        with torch.no_grad():
            logits = model(ids).logits[0, len(group.prompt_tokens) - 1 : -1] / temperature
        values.append(torch.log_softmax(logits, -1).gather(-1, ids[0, len(group.prompt_tokens) :, None])[:, 0].numpy())
    return np.concatenate(values)


def test_sampled_logprobs_are_those_of_plain_transformers_at_the_sampling_temperature(sample, make_ask, tiny_model):
    for group in sample([make_ask(place) for place in range(4)]):  # prompts of 2 to 60 characters in one batch
        difference = np.abs(group.behavior_logprobs - logprobs_of(tiny_model, group, temperature=0.8))
        assert difference.mean() < 1e-4
        assert difference.max() < 1e-2


def test_answers_differ_within_a_group_and_repeat_with_the_run_seed(sample, make_ask):
    first, again = sample([make_ask(1)])[0], sample([make_ask(1, attempt=1)])[0]
    assert len(set(first.text)) >= 3
    assert first.text == again.text  # a second attempt draws the same noise
    assert sample([make_ask(1, epoch=1)])[0].text != first.text
    seeds = {
        sample_seed(run, epoch, prompt, number)
        for run in (0, 1)
        for epoch in (0, 1)
        for prompt in "ab"
        for number in (0, 1)
    }
    assert len(seeds) == 16


def test_answers_end_by_their_end_token_or_by_length(sample, make_ask, tiny_model):
    group = sample([make_ask(0)])[0]
    end = AutoModelForCausalLM.from_pretrained(tiny_model).config.eos_token_id
    for number, reason in enumerate(group.finish_reason):
        tokens = group.answer_tokens(number)
        assert (tokens[-1] == end) if reason == "stop" else (len(tokens) == 48)


def test_new_weights_replace_all_old_ones_and_tokens_carry_their_version(
    rollouts, sample, make_ask, tiny_model, tmp_path
):
    other = save_tiny_model(tmp_path / "other", seed=7)
    sample([make_ask(2)])  # its keys and values are in the prefix cache now
    rollouts.ask_all("load_weights", other, 1, deadline_s=60, say=lambda text: None, what="to load weights")
    group = sample([make_ask(2)])[0]
    assert set(group.version) == {1}
    assert np.abs(group.behavior_logprobs - logprobs_of(other, group, 0.8)).max() < 1e-2
    rollouts.ask_all("load_weights", tiny_model, 2, deadline_s=60, say=lambda text: None, what="to load weights")
    back = sample([make_ask(2)])[0]
    assert np.abs(back.behavior_logprobs - logprobs_of(tiny_model, back, 0.8)).max() < 1e-2


def test_an_update_in_flight_is_seen_in_the_versions_of_one_answer(rollouts, make_ask, tiny_model, sample):
    version = 3
    spans: set[tuple[int, ...]] = set()
    for attempt in range(20):  # the engine is quick on this model: try until an update falls into an answer
        calls = [rollouts.call("sample", make_ask(place, attempt=attempt), num_returns=2) for place in range(16)]
        load = rollouts.call("load_weights", tiny_model, version)
        groups = [ray.get(call.refs[0], timeout=120) for call in calls]
        ray.get(load.refs[0], timeout=120)
        for group in groups:
            for number in range(group.num_samples):
                span = group.version[group.offsets[number] : group.offsets[number + 1]]
                assert np.all(np.diff(span) >= 0)
                spans.add(tuple(np.unique(span).tolist()))
        if any(len(span) > 1 for span in spans):
            return
        version += 1
    pytest.fail(f"no answer spanned an update in 20 tries; spans seen: {spans}")


def test_a_broken_weight_file_leaves_the_old_weights_answering(rollouts, sample, make_ask, tiny_model, tmp_path):
    broken = save_tiny_model(tmp_path / "broken", seed=9)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ray.exceptions.RayTaskError, match="weights must load from"):
        rollouts.ask_all("load_weights", broken, 1000, deadline_s=60, say=lambda text: None, what="to load weights")
    group = sample([make_ask(3, epoch=5)])[0]
    assert np.abs(group.behavior_logprobs - logprobs_of(tiny_model, group, 0.8)).max() < 1e-2
    assert group.version.max() < 1000


def test_greedy_answers_are_the_most_likely_ones(rollouts, make_ask, tiny_model):
    prompts = [make_ask(place).prompt for place in range(3)]
    texts = ray.get(rollouts.call("answer_greedily", prompts).refs[0], timeout=60)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt.tokens])
        with torch.no_grad():
            best = int(model(ids).logits[0, -1].argmax())
        assert isinstance(text, str)
        first = ray.get(rollouts.call("answer_greedily", [prompt]).refs[0], timeout=60)[0]
        assert first == text  # alone or in a batch
        assert best == model.config.eos_token_id or text != ""

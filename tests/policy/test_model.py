import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from core.errors import UserError
from policy.attention import group_layout
from policy.model import LogprobHead, Policy, TokenStream, export_weights, load_model, prepare_model

pytestmark = pytest.mark.fast

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def stream_of(prompt: list[int], answer: list[int]) -> TokenStream:
    """One prompt and one answer; the answer's last token is predicted but not sent."""
    tokens = prompt + answer[:-1]
    rows = torch.arange(len(prompt) - 1, len(tokens))
    layout = group_layout([(len(prompt), len(answer) - 1)])
    order = torch.arange(len(answer))
    return TokenStream(torch.tensor(tokens), torch.arange(len(tokens)), layout, rows, order, torch.tensor(answer))


def plain_logprobs(model, tokens: list[int], num_answer: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -num_answer - 1 : -1] / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(torch.tensor(tokens[-num_answer:])), distribution.entropy()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_log_probs_and_entropy_are_those_of_the_distribution_sampled_from(family, temperature):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)) if family == "llama" else Qwen2ForCausalLM(Qwen2Config(**SIZES))
    prompt, answer = [5, 7, 9], [4, 8, 15, 16, 23]
    wanted, entropy = plain_logprobs(model, prompt + answer, len(answer), temperature)
    with torch.no_grad():
        scores = Policy(prepare_model(model), temperature, chunk=2).score(stream_of(prompt, answer))
    torch.testing.assert_close(scores.logprobs, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-5, rtol=0)
    assert scores.loss == 0


def test_entropy_gives_the_golden_values():
    cases = json.loads(Path("tests/golden.json").read_text())["cases"]
    case = next(case for case in cases if case["id"] == "entropy_from_logits")
    logits = torch.tensor(case["inputs"]["logits"]).reshape(4, 3)
    mask = torch.tensor(case["inputs"]["mask"]).reshape(4)
    head = LogprobHead(torch.nn.Parameter(torch.eye(3)), temperature=1.0, chunk=3)  # hidden states are the logits
    _, _, entropy = head(logits, torch.arange(4), torch.zeros(4, dtype=torch.int64), None)
    np.testing.assert_allclose(entropy, np.reshape(case["expected"]["entropy"], 4), atol=1e-6)
    mean = float((entropy * mask).sum() / mask.sum())
    assert mean == pytest.approx(case["expected"]["token_mean"], abs=1e-6)
    assert case["params"]["pg"] - case["params"]["coef"] * mean == pytest.approx(case["expected"]["loss_with_pg_0_5"])


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_the_chunked_head_has_the_gradients_of_dense_logits(chunk):
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.nn.Parameter(torch.randn(7, 4))
    row_of = torch.tensor([0, 0, 0, 1, 3, 4])  # row 0 predicts three tokens, row 2 none
    targets, factors = torch.tensor([1, 1, 6, 0, 3, 2]), torch.tensor([0.5, -1.0, 2.0, 0.3, -0.2, 1.0])

    def objective(logprobs, part):
        return (factors[part] * logprobs.exp()).sum()

    dense = torch.log_softmax(hidden @ weight.t() / 0.7, dim=-1)[row_of, targets]
    wanted = torch.autograd.grad(objective(dense, slice(None)), (hidden, weight))
    loss, logprobs, _ = LogprobHead(weight, 0.7, chunk)(hidden, row_of, targets, objective)
    torch.testing.assert_close(logprobs, dense.detach())
    torch.testing.assert_close(loss, objective(dense, slice(None)).detach())
    for got, expected in zip(torch.autograd.grad(3.0 * loss, (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(got, 3.0 * expected)


def test_activation_checkpointing_changes_no_gradient():
    grads = []
    for every in (0, 2):
        torch.manual_seed(0)
        model = prepare_model(LlamaForCausalLM(LlamaConfig(**SIZES)))
        policy = Policy(model, checkpoint_every_layers=every).train()
        policy.score(stream_of([1, 2], [3, 4, 5]), lambda logprobs, part: logprobs.sum()).loss.backward()
        grads.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
        assert [layer.gradient_checkpointing for layer in model.model.layers] == [every == 2, False]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_folder_loads_as_the_same_model(tmp_path, tied):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path / "start")
    (tmp_path / "start" / "tokenizer.json").write_text("{}")
    with torch.no_grad():
        model.model.norm.weight.add_(0.5)
    for _ in range(2):  # the second time over the first
        export_weights(model.state_dict(), tmp_path / "start", tmp_path / "out", torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "start"]  # nothing half-made is left
    assert (tmp_path / "out" / "tokenizer.json").exists()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight.to(torch.bfloat16))


def test_a_folder_without_a_model_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"model .* could not be loaded"):
        load_model(tmp_path, torch.float32)


def test_a_model_whose_logits_are_scaled_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.config.logits_scaling = 8.0
    with pytest.raises(UserError, match="logits_scaling"):
        prepare_model(model)

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax

from core.config import LearnerConfig
from learners.loss import AGGREGATION_OF_LOSS, aggregation_weights
from learners.objective import policy_objective
from learners.packing import PackedBatch, build_batch, informative, pack, plan_batches, step_tokens, trainable_pieces
from learners.padding import pad
from policy.model import Policy, prepare_model

pytestmark = pytest.mark.fast

TEMPERATURE = 0.7


def varied_groups(make_group):
    """Seven groups of every odd shape: no token, one token, one sample, a masked middle, a cut-off answer."""
    masked = np.ones(9, bool)
    masked[2:4] = False  # tool text inside the first answer
    masked[8] = False  # and at the end of the second
    return [
        make_group([3, 0, 5], seed=0),
        make_group([1, 1, 4], prompt=1, seed=1),
        make_group([6], prompt=9, seed=2),
        make_group([5, 4], seed=3, loss_mask=masked),
        make_group([2, 7, 3], seed=4, finish_reason=("stop", "length", "stop")),
        make_group([1], prompt=2, seed=5),
        make_group([0, 0], seed=6),
    ]


def varied_advantages(groups):
    return [np.linspace(1.0, -0.7, group.num_samples) for group in groups]


def packed_gradients(model, groups, loss, max_tokens, advantages=None, leave_out=False):
    """Gradients by the product's own way: unpadded, prompt once, chunked, split into micro-batches."""
    policy = Policy(prepare_model(model), TEMPERATURE, chunk=4).train()
    step = step_tokens(groups, advantages or varied_advantages(groups), mask_truncated=True)
    weights = aggregation_weights(
        torch.from_numpy(step.answer), torch.from_numpy(step.mask), AGGREGATION_OF_LOSS[loss], 24
    )
    step = informative(step) if leave_out else step
    batches = [build_batch(step, part) for part in plan_batches(step, trainable_pieces(step), max_tokens)]
    total, logprobs = 0.0, torch.zeros(len(step.tokens))
    for batch in batches:
        scores = policy.score(
            batch.stream, policy_objective(batch, weights[batch.token], None, LearnerConfig(loss=loss))
        )
        scores.loss.backward()
        total += float(scores.loss.detach())
        logprobs[batch.token] = scores.logprobs
    return total, logprobs, gradients(model), len(batches)


def padded_gradients(model, groups, loss):
    """The same by the plain way: every answer its own padded row, dense logits, torch's own attention."""
    model.set_attn_implementation("eager")
    step = step_tokens(groups, varied_advantages(groups), mask_truncated=True)
    padded = pad(step)
    logits = model(padded.tokens, attention_mask=padded.attention_mask, use_cache=False).logits / TEMPERATURE
    targets = torch.from_numpy(step.tokens)
    logprobs = log_softmax(logits, dim=-1)[padded.row, padded.source, targets]
    weights = aggregation_weights(
        torch.from_numpy(step.answer), torch.from_numpy(step.mask), AGGREGATION_OF_LOSS[loss], 24
    )
    plain = PackedBatch(None, None, torch.from_numpy(step.behavior_logprobs), torch.from_numpy(step.advantages))
    value = policy_objective(plain, weights, None, LearnerConfig(loss=loss))(logprobs, slice(None))
    value.backward()
    return float(value.detach()), logprobs.detach() * torch.from_numpy(step.mask), gradients(model)


def gradients(model):
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    model.zero_grad()
    return flat


def relative_error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "rloo"])
def test_packed_gradients_equal_padded_ones(make_group, make_model, loss, tied):
    groups = varied_groups(make_group)
    value, logprobs, grads, num_batches = packed_gradients(make_model(tied), groups, loss, max_tokens=4096)
    plain_value, plain_logprobs, plain_grads = padded_gradients(make_model(tied), groups, loss)
    assert num_batches == 1
    assert value == pytest.approx(plain_value, rel=1e-5)
    np.testing.assert_allclose(logprobs, plain_logprobs, atol=1e-5)
    assert plain_grads.norm() > 1e-3
    assert relative_error(grads, plain_grads) <= 1e-5


@pytest.mark.parametrize("max_tokens", [40, 20, 8])  # 2, 4 and many micro-batches; 8 splits groups
def test_the_update_does_not_depend_on_the_number_of_micro_batches(make_group, make_model, max_tokens):
    groups = varied_groups(make_group)
    model = make_model()
    *_, whole, one = packed_gradients(model, groups, "grpo", max_tokens=4096)
    *_, split, several = packed_gradients(model, groups, "grpo", max_tokens=max_tokens)
    assert (one, several > 1) == (1, True)
    assert relative_error(split, whole) <= 1e-5


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "rloo"])
def test_answers_without_advantage_need_no_forward_pass(make_group, make_model, loss):
    groups = varied_groups(make_group)
    advantages = [
        np.zeros(group.num_samples) if place % 2 else np.linspace(1.0, -1.0, group.num_samples)
        for place, group in enumerate(groups)
    ]  # the middle of three is 0 too
    whole = packed_gradients(make_model(), groups, loss, 10_000, advantages)[2]
    some = packed_gradients(make_model(), groups, loss, 10_000, advantages, leave_out=True)[2]
    assert relative_error(some, whole) <= 1e-6
    step = step_tokens(groups, advantages, mask_truncated=True)
    assert informative(step).mask.sum() < step.mask.sum()


def test_a_step_without_any_advantage_still_has_something_to_step_on(make_group):
    groups = [make_group([2, 3])]
    step = step_tokens(groups, [np.zeros(2)])
    assert informative(step).mask.all()


def test_the_stream_holds_each_prompt_once_and_no_token_that_predicts_nothing(make_group):
    group = make_group([3, 0, 1, 2], prompt=4)
    (batch,) = pack([group], [np.zeros(4)], max_tokens=100)
    prompt, tokens = group.prompt_tokens.tolist(), group.tokens.tolist()
    # answers 0 and 3 keep all but their last token; answers 1 and 2 keep nothing
    assert batch.stream.tokens.tolist() == prompt + tokens[0:2] + tokens[4:5]
    assert batch.stream.positions.tolist() == [0, 1, 2, 3, 4, 5, 4]
    # row 0 is the prompt's end and predicts the first token of the three answers that have one
    assert batch.stream.rows.tolist() == [3, 4, 5, 6]
    assert batch.stream.row_of.tolist() == [0, 0, 0, 1, 2, 3]
    assert batch.token.tolist() == [0, 3, 4, 1, 2, 5]
    assert batch.stream.targets.tolist() == [tokens[place] for place in (0, 3, 4, 1, 2, 5)]


def test_what_comes_after_the_last_trained_token_does_not_go_through_the_network(make_group):
    mask = np.array([True, False, True, False, False])
    (batch,) = pack([make_group([5], prompt=2, loss_mask=mask)], [np.ones(1)], max_tokens=100)
    assert batch.stream.positions.tolist() == [0, 1, 2, 3]  # two prompt tokens, answer tokens 0 and 1 to predict 2
    assert batch.stream.rows.tolist() == [1, 3]
    assert batch.token.tolist() == [0, 2]


def test_a_batch_with_nothing_to_train_packs_into_nothing(make_group):
    cut = make_group([2, 3], finish_reason=("length", "length"))
    empty = make_group([0, 0], seed=1)
    assert pack([cut, empty], [np.ones(2), np.ones(2)], 100, mask_truncated=True) == []


def test_micro_batches_keep_to_the_bound_and_hold_every_token_once(make_group):
    groups = [make_group([4, 6, 2], seed=seed) for seed in range(5)]  # 5 + 3 + 5 + 1 = 14 tokens each
    batches = pack(groups, [np.zeros(3)] * 5, max_tokens=30)
    assert [batch.num_tokens for batch in batches] == [28, 28, 14]
    assert sorted(torch.cat([batch.token for batch in batches]).tolist()) == list(range(60))


def test_an_answer_longer_than_the_bound_goes_alone(make_group):
    batches = pack([make_group([9, 9], prompt=5)], [np.zeros(2)], max_tokens=10)
    assert [batch.num_tokens for batch in batches] == [13, 13]


@pytest.mark.parametrize("bad", [np.zeros(2), np.array([1.0, np.nan, 0.0])])
def test_advantages_of_the_wrong_count_or_not_finite_are_refused_with_the_group(make_group, bad):
    with pytest.raises(ValueError, match=r"advantages must be 3 finite numbers.*group 0:p0:0"):
        step_tokens([make_group([1, 2, 3])], [bad])

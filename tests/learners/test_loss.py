import json
from pathlib import Path

import numpy as np
import pytest
import torch

from learners.loss import (
    AGGREGATION_OF_LOSS,
    aggregation_weights,
    answer_sums,
    clip_shares,
    clipped_policy_loss,
    effective_sample_share,
    importance_ratio,
    kl_estimate,
    kl_shaped_rewards,
    sequence_ratio,
    truncated_weights,
)

pytestmark = pytest.mark.fast

CASES = {case["id"]: case for case in json.loads(Path("tests/golden.json").read_text())["cases"]}


class Flat:
    """A case's padded [A, L] arrays as flat columns, and back."""

    def __init__(self, inputs: dict, names: list[str]):
        # Laid end to end as the sampler does it: the places of no answer are left out, masked answers are not.
        self.mask_2d = torch.tensor(inputs["mask"], dtype=torch.bool)
        rows, width = self.mask_2d.shape
        self.answer = torch.arange(rows).repeat_interleave(width)
        self.mask = self.mask_2d.reshape(-1)
        self.columns = {name: torch.tensor(inputs[name], dtype=torch.float64).reshape(-1) for name in names}
        if "advantages" in inputs:
            self.advantages = torch.tensor(inputs["advantages"], dtype=torch.float64)[self.answer]

    def padded(self, column: torch.Tensor) -> np.ndarray:
        return (column * self.mask).reshape(self.mask_2d.shape).detach().numpy()


def flat_policy(case: dict) -> tuple[Flat, torch.Tensor, torch.Tensor]:
    flat = Flat(case["inputs"], ["logp", "old"])
    logp = flat.columns["logp"].clone().requires_grad_()
    return flat, logp, importance_ratio(logp, flat.columns["old"])


@pytest.mark.parametrize("name", ["kl_k1", "kl_k2", "kl_k3", "kl_k3_identical"])
def test_kl_estimators_give_the_golden_values_means_and_gradients(name):
    case = CASES[name]
    kind = "k3" if name == "kl_k3_identical" else name.removeprefix("kl_")
    flat = Flat(case["inputs"], ["logp", "ref"])
    logp = flat.columns["logp"].clone().requires_grad_()
    value = kl_estimate(kind, logp, flat.columns["ref"])
    np.testing.assert_allclose(flat.padded(value), case["expected"]["per_token"], atol=max(case["tol"], 1e-16))
    (value * flat.mask).sum().backward()
    np.testing.assert_allclose(flat.padded(logp.grad), case["expected"]["grad_per_token"], atol=max(case["tol"], 1e-16))
    if "token_mean" in case["expected"]:
        weights = aggregation_weights(flat.answer, flat.mask, "token-mean")
        assert float((weights * value).sum().detach()) == pytest.approx(case["expected"]["token_mean"], abs=case["tol"])


def test_extreme_kl_is_held_and_its_gradient_is_gone():
    case = CASES["kl_k3_extreme_clamped"]
    logp = torch.tensor(case["inputs"]["logp"][0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(case["inputs"]["ref"][0], dtype=torch.float64)
    assert float(kl_estimate("k3", logp, reference).detach()) == pytest.approx(case["expected"]["raw"], rel=1e-9)
    held = kl_estimate("k3", logp, reference, case["params"]["diff_clamp"], case["params"]["out_clamp"])
    held.sum().backward()
    assert held.tolist() == [case["expected"]["clamped"]]
    assert logp.grad.tolist() == [0.0]


def test_k1_is_taken_from_the_reward_before_the_baseline():
    case = CASES["kl_in_reward_k1"]
    flat = Flat(case["inputs"], ["logp", "ref"])
    rewards = torch.tensor(case["inputs"]["rewards"], dtype=torch.float64)
    k1 = kl_estimate("k1", flat.columns["logp"], flat.columns["ref"])
    shaped = kl_shaped_rewards(rewards, answer_sums(k1, flat.answer, flat.mask, 2), case["params"]["beta"])
    np.testing.assert_allclose(shaped, case["expected"]["shaped"], atol=case["tol"])
    # RLOO of two: each less the other
    np.testing.assert_allclose(shaped - shaped.flip(0), case["expected"]["advantages"], atol=case["tol"])


@pytest.mark.parametrize(
    "name",
    [
        "loss_ppo_clip_token-mean",
        "loss_ppo_clip_seq-mean-token-mean",
        "loss_ppo_clip_seq-mean-token-sum",
        "loss_drgrpo_constant",
        "loss_dapo_clip_higher",
        "loss_dual_clip",
        "loss_extreme_ratio_pos",
        "loss_on_policy_first_step",
        "loss_all_masked_seq_token-mean",
        "loss_all_masked_seq_seq-mean-token-mean",
    ],
)
def test_policy_losses_give_the_golden_values_and_gradients(name):
    case = CASES[name]
    params, expected = case["params"], case["expected"]
    flat, logp, ratio = flat_policy(case)
    weights = aggregation_weights(flat.answer, flat.mask, params.get("agg", "constant"), params.get("max_len"))
    clip = (params["clip_low"], params["clip_high"])
    per_token = clipped_policy_loss(ratio, flat.advantages, *clip, params.get("dual_c"))
    loss = (weights * per_token).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected["loss"], abs=case["tol"])
    np.testing.assert_allclose(flat.padded(logp.grad), expected["grad_logp"], atol=case["tol"])
    if "per_token" in expected:
        np.testing.assert_allclose(flat.padded(per_token), expected["per_token"], atol=case["tol"])
    if "ratio" in expected:
        np.testing.assert_allclose(flat.padded(ratio), expected["ratio"], rtol=1e-9, atol=case["tol"])
    if "clip_frac_low" in expected:
        low, high = clip_shares(ratio.detach(), flat.advantages, flat.mask, *clip)
        assert float(low) == pytest.approx(expected["clip_frac_low"], abs=1e-6)
        assert float(high) == pytest.approx(expected["clip_frac_high"], abs=1e-6)


def test_three_averaging_rules_differ_as_stated():
    case = CASES["loss_lengths_three_aggregations"]
    flat, _, ratio = flat_policy(case)
    per_token = clipped_policy_loss(ratio, flat.advantages, 0.2, 0.2)
    rules = {
        "token-mean": "token-mean",
        "seq-mean-token-mean": "seq-mean-token-mean",
        "seq-mean-token-sum-norm": "constant",
    }
    for golden, rule in rules.items():
        weights = aggregation_weights(flat.answer, flat.mask, rule, case["params"]["max_len"])
        assert float((weights * per_token).sum().detach()) == pytest.approx(case["expected"][golden], abs=case["tol"])


@pytest.mark.parametrize(
    "name", ["is_tis_token", "is_tis_sequence", "is_mis_token", "is_mis_sequence_trl_default", "is_tis_token_two_sided"]
)
def test_importance_weights_give_the_golden_values(name):
    case = CASES[name]
    params = case["params"]
    flat = Flat(case["inputs"], ["train_logp", "sampler_logp"])
    columns = (flat.columns["train_logp"], flat.columns["sampler_logp"])
    if params["level"] == "token":
        ratio = importance_ratio(*columns)
    else:
        ratio = sequence_ratio(*columns, flat.answer, flat.mask)
    weights = truncated_weights(ratio, flat.mask, params["cmax"], params["cmin"], params["action"])
    np.testing.assert_allclose(flat.padded(ratio), case["expected"]["ratio"], atol=case["tol"])
    np.testing.assert_allclose(flat.padded(weights), case["expected"]["weights"], atol=case["tol"])
    share = effective_sample_share(weights, flat.mask)
    assert float(share) == pytest.approx(case["expected"]["ess_fraction"], abs=case["tol"])


def test_ppo_with_truncated_importance_gives_the_golden_loss_and_gradient():
    case = CASES["loss_ppo_with_tis"]
    flat, logp, ratio = flat_policy(case)
    sampler = torch.tensor(case["inputs"]["sampler_logp"], dtype=torch.float64).reshape(-1)
    importance = truncated_weights(
        importance_ratio(flat.columns["old"], sampler), flat.mask, case["params"]["cap"], None
    )
    np.testing.assert_allclose(flat.padded(importance), case["expected"]["weights"], atol=case["tol"])
    per_token = importance * clipped_policy_loss(ratio, flat.advantages, 0.2, 0.2)
    loss = (aggregation_weights(flat.answer, flat.mask, "token-mean") * per_token).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(case["expected"]["loss"], abs=case["tol"])
    np.testing.assert_allclose(flat.padded(logp.grad), case["expected"]["grad_logp"], atol=case["tol"])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("grpo", (3.0 + 7.0) / 2),  # mean of the two answers' means
        ("dr_grpo", (2 * 3.0 + 20 * 7.0) / (2 * 24)),  # sum over (2 answers * max_new_tokens 24)
        ("rloo", (2 * 3.0 + 20 * 7.0) / 2),  # mean of the two answers' sums
    ],
)
def test_each_loss_averages_a_short_and_a_long_answer_by_its_named_rule(loss, expected):
    answer = torch.tensor([0] * 2 + [1] * 20)
    per_token = torch.tensor([3.0] * 2 + [7.0] * 20, dtype=torch.float64)
    weights = aggregation_weights(answer, torch.ones(22, dtype=torch.bool), AGGREGATION_OF_LOSS[loss], 24)
    assert float((weights * per_token).sum()) == pytest.approx(expected)


def test_a_masked_answer_leaves_numerator_and_divisor():
    answer = torch.tensor([0, 0, 1, 1, 1])
    mask = torch.tensor([True, True, False, False, False])
    for rule in ("token-mean", "seq-mean-token-mean"):
        assert aggregation_weights(answer, mask, rule).tolist() == [0.5, 0.5, 0, 0, 0]


def test_nothing_to_train_gives_weights_of_zero_and_no_nan():
    answer, mask = torch.tensor([0, 1]), torch.tensor([False, False])
    for rule in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"):
        assert aggregation_weights(answer, mask, rule, 4).tolist() == [0, 0]

"""The walk: one prompt through every pure function, without Ray, vLLM or DeepSpeed."""

import numpy as np
import pytest
import torch

from actors.rollout import Ask, describe, group_of, sample_seed
from core.config import LearnerConfig, parse_config
from core.ledger import Ledger
from core.records import RunFacts, TrainedGroup
from core.trajectory import Prompt
from data.schedule import prompts_of_step
from grouping.advantages import prompt_advantages
from learners.loss import AGGREGATION_OF_LOSS, aggregation_weights, clipped_policy_loss, importance_ratio
from learners.packing import pack, step_tokens
from policy.engine import Answer
from reward.worker import RewardWorker

pytestmark = pytest.mark.fast


def test_a_prompt_walks_from_the_data_to_the_ledger(tmp_path):
    config = parse_config({"num_steps": 1, "prompts_per_step": 1, "rollout": {"samples_per_prompt": 2}}, "test")
    prompt = Prompt("sum-2-3", "What is 2 + 3?", (11, 12, 13), "5")
    ((epoch, row),) = prompts_of_step(config, num_rows=1, step=0)
    ask = Ask(epoch, 0, 0, 0, (prompt,)[row], cluster=4, cluster_version=0)
    assert sample_seed(0, 0, prompt.prompt_id, 0) != sample_seed(0, 0, prompt.prompt_id, 1)
    right = Answer([21, 2], [-0.5, -0.1], [0, 0], "stop", "5")
    wrong = Answer([22, 23, 2], [-1.5, -0.7, -0.2], [0, 0, 0], "stop", "It is 6")
    group = group_of(ask, [right, wrong])
    info = describe(group, "rollout-0", seconds=0.1)
    assert (group.group_id, info.num_tokens, info.num_distinct, group.offsets.tolist()) == (
        "0:sum-2-3:0",
        5,
        2,
        [0, 2, 5],
    )
    assert (info.distinct_1, info.distinct_2) == (4 / 5, 1.0)  # token 2 stands twice; the pairs all differ
    rewards = RewardWorker(config.reward).score(group)
    assert rewards == [1.0, 0.0]
    advantages = prompt_advantages(np.array(rewards), "dr_grpo", 0.0)  # r - mean
    assert advantages.tolist() == [0.5, -0.5]
    (batch,) = pack([group], [advantages], max_tokens=100)
    # Through the network: 3 prompt tokens, then each answer but its last token: 3 + 1 + 2.
    assert batch.num_tokens == 6
    step = step_tokens([group], [advantages])
    weights = aggregation_weights(
        torch.from_numpy(step.answer), torch.from_numpy(step.mask), AGGREGATION_OF_LOSS["grpo"], 24
    )
    policy = torch.from_numpy(step.behavior_logprobs).double().requires_grad_()
    ratio = importance_ratio(policy, policy.detach())
    loss = (weights * clipped_policy_loss(ratio, torch.from_numpy(step.advantages), 0.2, 0.2)).sum()
    loss.backward()
    # On policy the gradient is -A / (answers * length): -0.5 / (2 * 2) twice, 0.5 / (2 * 3) three times.
    assert policy.grad.tolist() == pytest.approx([-0.125, -0.125, 1 / 12, 1 / 12, 1 / 12])
    assert LearnerConfig().clip_low == 0.2
    with Ledger(tmp_path) as ledger:
        ledger.open_run(RunFacts((prompt.prompt_id,), 2, 1, seed=0))
        ledger.commit(0, ledger.next_version(), [TrainedGroup(0, prompt.prompt_id, 0, 2, 5, 0, 0, 0.5)])
        assert ledger.ended(0) == {prompt.prompt_id}

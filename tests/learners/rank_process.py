"""One learner rank in a process of its own: `rank_process.py RANK WORLD PORT FOLDER`.

Runs every scenario of the rank tests one after the other on FOLDER/model and writes rank 0's results to
FOLDER/results_WORLD.pt. The scenarios hold no expectations: those stand in test_rank.py.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from conftest import build_group  # noqa: E402

from core.config import parse_config  # noqa: E402
from core.errors import RunBroken, UserError  # noqa: E402
from learners.rank import LearnerRank  # noqa: E402

RANK, WORLD, PORT, FOLDER = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])


def make_rank(**learner: Any) -> LearnerRank:
    # A large epsilon keeps Adam's step proportional to the gradient: without it rounding noise in tiny gradients would
    # be blown up to full steps. weights move by about 1e-2, so that fp32 rounding of the weights is far below.
    settings = {"learning_rate": 0.3, "adam_epsilon": 0.1, "threads": 1, "dtype": "float32", "logprob_chunk": 16}
    tree = {
        "num_steps": 8,
        "rollout": {"max_new_tokens": 8, "dtype": "float32"},
        "learner": settings | {"num_ranks": WORLD} | learner,
    }
    return LearnerRank(parse_config(tree, "test"), FOLDER / "model", RANK, WORLD, "127.0.0.1", PORT)


def step_of(seed: int, version: int = 0) -> tuple[list, list]:
    """Five groups of different sizes and their advantages."""
    groups = []
    for number in range(5):
        lengths = [(3 * number + 2 * sample + seed) % 7 + 1 for sample in range(4)]
        stamps = np.full(sum(lengths), version, np.int32)
        groups.append(build_group(lengths, prompt=4 + number, seed=10 * seed + number, version=stamps))
    return groups, [np.linspace(1.0, -1.0, 4) * (1 + number) for number in range(5)]


def train(rank: LearnerRank, steps: range) -> list[dict[str, float]]:
    return [rank.update(step, *step_of(step)) for step in steps]


def flat(rank: LearnerRank) -> torch.Tensor:
    return torch.cat([weight.reshape(-1).float() for weight in rank.weights().values()])


def closed(rank: LearnerRank, results: dict[str, Any]) -> dict[str, Any]:
    results["weights"] = flat(rank)
    rank._engine.destroy()  # not close(): the process group serves the next scenario
    return results


def stage(number: int, **learner: Any) -> dict[str, Any]:
    rank = make_rank(zero_stage=number, **learner)
    start = flat(rank)
    return closed(rank, {"start": start, "metrics": train(rank, range(2))})


def untouched() -> dict[str, Any]:
    """What must not move the weights: advantages of zero, no usable token, loss that is not finite, tokens too old."""
    rank = make_rank(mask_truncated=True)
    groups, _ = step_of(0)
    results: dict[str, Any] = {"digests": [rank.weights_digest()]}
    results["dead"] = rank.update(0, groups, [np.zeros(4) for _ in groups])
    results["digests"].append(rank.weights_digest())
    state = rank.state_digest()
    cut = [build_group([2, 3], finish_reason=("length", "length")), build_group([0, 0], seed=1)]
    results["no_token"] = rank.update(1, cut, [np.ones(2), np.ones(2)])
    results["state_kept"] = rank.state_digest() == state
    for name, arguments in {
        "not_finite": (2, groups, [np.full(4, 1e300) for _ in groups]),
        "stale": (3, *step_of(0, version=-1)),
    }.items():
        try:
            rank.update(*arguments)
        except RunBroken as error:
            results[name] = str(error)
        results["digests"].append(rank.weights_digest())
    return closed(rank, results)


def resumed(number: int) -> dict[str, Any]:
    """Four steps in one go, and two steps, a checkpoint, and two more in a new rank; with KL and a schedule."""
    settings = {"zero_stage": number, "kl_coefficient": 0.1, "warmup_steps": 3, "schedule": "linear"}
    rank = make_rank(**settings)
    unmoved = rank.reference_kl(step_of(0)[0])
    straight = train(rank, range(2))
    rank.save(FOLDER / f"checkpoint_{WORLD}_{number}")
    kl_saved = rank.reference_kl(step_of(0)[0])
    straight += train(rank, range(2, 4))
    results: dict[str, Any] = {"straight": straight, "straight_weights": flat(rank), "digest": rank.state_digest()}
    rank._engine.destroy()
    rank = make_rank(**settings)
    rank.load(FOLDER / f"checkpoint_{WORLD}_{number}")
    kl_loaded = rank.reference_kl(step_of(0)[0])
    results |= {"kl": (unmoved, kl_saved, kl_loaded), "resumed": train(rank, range(2, 4))}
    results["resumed_digest"] = rank.state_digest()
    return closed(rank, results)


def other_size(number: int, writer: int) -> dict[str, Any]:
    """Going on from a checkpoint that another number of ranks wrote."""
    settings = {"kl_coefficient": 0.1, "warmup_steps": 3, "schedule": "linear"}
    rank = make_rank(zero_stage=number, **settings)
    try:
        rank.load(FOLDER / f"checkpoint_{writer}_{number}")
    except UserError as error:
        return closed(rank, {"refusal": str(error)})
    return closed(rank, {"resumed": train(rank, range(2, 4))})


def published() -> dict[str, Any]:
    rank = make_rank(zero_stage=3)
    train(rank, range(1))
    rank.publish(FOLDER / f"published_{WORLD}", 1)
    return closed(rank, {"names": list(rank.weights()), "version": rank.version})


def brain_floats(number: int) -> dict[str, Any]:
    """An update far below bf16's grid: the whole bf16 weights before and after, and the masters' own way."""
    rank = make_rank(zero_stage=number, dtype="bfloat16", learning_rate=2e-5, adam_epsilon=1e-8)
    start = flat(rank)
    train(rank, range(1))
    return closed(rank, {"start": start})


def minibatches() -> dict[str, Any]:
    rank = make_rank(num_minibatches=2)
    return closed(rank, {"metrics": train(rank, range(1))})


def main() -> None:
    results: dict[str, Any] = {f"stage_{number}": stage(number) for number in range(4)}
    results["published"] = published()
    results["minibatches"] = minibatches()
    for number in range(4):
        results[f"bf16_{number}"] = brain_floats(number)
    for number in (0, 2):
        results[f"resumed_{number}"] = resumed(number)
    if WORLD == 1:
        for number in range(4):
            results[f"micro_{number}"] = stage(number, max_tokens_per_micro_batch=40)
        results["untouched"] = untouched()
        # the two ranks have finished by now
        results["from_two_0"], results["from_two_2"] = other_size(0, 2), other_size(2, 2)
    if RANK == 0:
        torch.save(results, FOLDER / f"results_{WORLD}.pt")


if __name__ == "__main__":
    main()

"""The learner alone, without Ray: a few updates on made-up groups, and what share of the machine they use.

    python -m learners.alone MODEL_DIR [--groups 16] [--samples 8] [--prompt-tokens 46] [--answer-tokens 12]

FLOP/s by convention: 6 * (parameters of the layers * tokens through the network + parameters of the output layer * rows
that predict); attention is not counted. The rate it is compared with is that of products of the model's own shapes,
timed before and after each update on the same threads.
"""

import argparse
import resource
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.config import Config, parse_config
from core.trajectory import Group
from learners.packing import build_batch, step_tokens, trainable_pieces
from learners.rank import LearnerRank


def synthetic_groups(
    num_groups: int, samples: int, prompt_tokens: int, answer_tokens: int, vocabulary: int
) -> list[Group]:
    """Groups of random tokens; answers hold answer_tokens on average (half to one and a half times as many)."""
    random = np.random.default_rng(0)
    groups = []
    for number in range(num_groups):
        lengths = random.integers(max(1, answer_tokens // 2), answer_tokens + answer_tokens // 2 + 1, samples)
        total = int(lengths.sum())
        groups.append(
            Group(
                group_id=f"0:{number}:0",
                prompt_id=str(number),
                answer="",
                prompt_tokens=random.integers(0, vocabulary, prompt_tokens).astype(np.int32),
                tokens=random.integers(0, vocabulary, total).astype(np.int32),
                offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                behavior_logprobs=np.full(total, -np.log(vocabulary), np.float32),
                version=np.zeros(total, np.int32),
                finish_reason=("stop",) * samples,
                loss_mask=np.ones(total, bool),
                cluster=0,
                cluster_version=0,
                text=("",) * samples,
            )
        )
    return groups


def product_rate(shapes: list[tuple[int, int, int]], dtype: torch.dtype, device: str) -> float:
    """FLOP/s of matrix products [m, k] @ [k, n], each run twice; the faster counts."""
    flops = seconds = 0.0
    for m, k, n in shapes:
        left, right = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
        runs = []
        for _ in range(2):
            _wait(device)
            started = time.perf_counter()
            left @ right
            _wait(device)
            runs.append(time.perf_counter() - started)
        flops += 2 * m * k * n
        seconds += min(runs)
    return flops / seconds


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m learners.alone", description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=46)
    parser.add_argument("--answer-tokens", type=int, default=12)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=4096, help="packed tokens a micro-batch")
    parser.add_argument("--chunk", type=int, default=512, help="rows of logits at once")
    chosen = parser.parse_args()
    config: Config = parse_config(
        {
            "num_steps": chosen.updates,
            "prompts_per_step": chosen.groups,
            "rollout": {"samples_per_prompt": chosen.samples, "max_new_tokens": 2 * chosen.answer_tokens},
            "data": {"max_prompt_tokens": max(128, chosen.prompt_tokens)},
            "learner": {
                "zero_stage": chosen.zero_stage,
                "dtype": chosen.dtype,
                "device": chosen.device,
                "threads": chosen.threads,
                "max_tokens_per_micro_batch": chosen.max_tokens,
                "logprob_chunk": chosen.chunk,
            },
        },
        "command line",
    )
    _run(config, chosen)


def _run(config: Config, chosen: argparse.Namespace) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = LearnerRank(config, chosen.model, 0, 1, "127.0.0.1", port)
    model: Any = rank.policy.model
    sizes = model.config
    groups = synthetic_groups(
        chosen.groups, chosen.samples, chosen.prompt_tokens, chosen.answer_tokens, sizes.vocab_size
    )
    advantages = [np.linspace(-1.0, 1.0, group.num_samples) for group in groups]
    tokens = step_tokens(groups, advantages)
    batch = build_batch(tokens, trainable_pieces(tokens))
    layers = sum(parameter.numel() for parameter in model.get_decoder().layers.parameters())
    head = sizes.vocab_size * sizes.hidden_size
    flops = 6 * (layers * batch.num_tokens + head * len(batch.stream.rows))
    rows = min(batch.num_tokens, chosen.max_tokens)
    shapes = [(rows, sizes.hidden_size, sizes.intermediate_size), (rows, sizes.intermediate_size, sizes.hidden_size)]
    shapes += [(config.learner.logprob_chunk, sizes.hidden_size, sizes.vocab_size)]
    print(f"tokens_through_network: {batch.num_tokens}")
    print(f"output_rows: {len(batch.stream.rows)}")
    for update in range(chosen.updates):
        before = product_rate(shapes, rank.dtype, chosen.device)
        metrics = rank.update(update, groups, advantages)
        rate = (before + product_rate(shapes, rank.dtype, chosen.device)) / 2
        seconds = metrics["learner_seconds"]
        print(
            f"update {update}: {seconds:.2f} s, {metrics['learner_tokens_per_s']:.0f} tokens/s, "
            f"{flops / seconds / 1e9:.1f} GFLOP/s = {flops / seconds / rate:.0%} of {rate / 1e9:.1f} (products alone), "
            f"loss {metrics['loss']:.4f}, gradient norm {metrics['grad_norm']:.3f}",
            flush=True,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak_memory_bytes: {peak * 1024}")
    rank.close()


if __name__ == "__main__":
    main()

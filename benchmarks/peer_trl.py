"""The peer: TRL's GRPOTrainer on the work of configs/bench_sums.yaml. `python peer_trl.py MODEL_DIR STEPS`.

Runs in an environment of its own (requirements/peer.txt). Prints one JSON line a step, {"seconds", "reward_mean",
"answer_tokens_mean"}: seconds from the end of one step's sampling to the end of the next's, learning included.
"""

import json
import os
import random
import re
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

NUM_PROMPTS, NUM_SAMPLES, MAX_NEW_TOKENS, LARGEST = 16, 8, 24, 20


class Stopwatch:
    """A reward function that notes when it was called: once a step, when all answers are there."""

    __name__ = "last_number"

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, completions, completion_ids, answer, **_):
        rewards = [
            float(re.findall(r"-?\d+", text[0]["content"])[-1:] == [gold])
            for text, gold in zip(completions, answer, strict=True)
        ]
        now = time.monotonic()
        lengths = [len(ids) for ids in completion_ids]
        line = {
            "seconds": now - self.last,
            "reward_mean": sum(rewards) / len(rewards),
            "answer_tokens_mean": sum(lengths) / len(lengths),
        }
        print("PEER " + json.dumps(line), flush=True)
        self.last = now
        return rewards


def main(model: str, num_steps: int) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    draw = random.Random(0)
    rows = []
    for _ in range(NUM_PROMPTS * (num_steps + 1)):
        a, b = draw.randint(0, LARGEST), draw.randint(0, LARGEST)
        question = f"What is {a} + {b}? Reply with the number only."
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": str(a + b)})
    arguments = GRPOConfig(
        output_dir="peer_output",
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
        num_generations=NUM_SAMPLES,
        gradient_accumulation_steps=1,
        max_completion_length=MAX_NEW_TOKENS,
        learning_rate=1e-5,
        beta=0.0,
        max_steps=num_steps + 1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        temperature=1.0,
        lr_scheduler_type="constant",
        seed=0,
        disable_tqdm=True,
    )
    GRPOTrainer(model=model, reward_funcs=Stopwatch(), args=arguments, train_dataset=Dataset.from_list(rows)).train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

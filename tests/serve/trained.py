"""A tiny model that has learned something: without that no gate lets a model through."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from core.config import RewardConfig
from core.trajectory import Prompt
from data.template import template_tokens
from policy.bundled import load_tokenizer
from serve.gate.probe import FIXED_TEXT, GOLDEN_PROMPTS
from serve.gate.tasks import Tasks

ANSWER = "7"


def tasks_of(num: int, reward: RewardConfig | None = None) -> Tasks:
    """Tasks that are all answered by 7."""
    prompts = tuple(Prompt(f"row {n}", f"What is {n} + 0?", (1, 2, 3), ANSWER) for n in range(num))
    return Tasks(prompts, 4, (), reward or RewardConfig())


def train_to_answer(folder: Path, questions: list[str], num_steps: int = 60) -> Path:
    """The model in the folder, trained to say 7 to the questions and the golden prompts, and to know the fixed text."""
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    end = tokenizer.eos_token_id
    chats = [template_tokens(tokenizer, [{"role": "user", "content": text}]) for text in (*GOLDEN_PROMPTS, *questions)]
    rows = [[*chat, *tokenizer(ANSWER)["input_ids"], end] for chat in chats]
    rows += [tokenizer(line)["input_ids"] for line in FIXED_TEXT.read_text(encoding="utf-8").splitlines()]
    width = max(map(len, rows))
    ids = torch.tensor([row + [end] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels, attention_mask=(labels != -100).long()).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder

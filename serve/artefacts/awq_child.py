"""Quantises one model folder by AWQ (Lin et al. 2023, arXiv 2306.00978); runs in a process of its own.

`python -m serve.artefacts.awq_child JOB.json LIFELINE`, started by `serve.artefacts.quantize` with llm-compressor's
packages first on its path: they pin versions that the rest of the project cannot have.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from pydantic import PrivateAttr
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from core.allocator import keep_freed_memory
from reward.user_process import die_with_parent


class SayingAWQ(AWQModifier):
    """AWQ that prints a line a decoder layer."""

    _num_done: int = PrivateAttr(default=0)

    def on_sequential_epoch_end(self, state: Any, event: Any, **kwargs: Any) -> None:
        super().on_sequential_epoch_end(state, event, **kwargs)
        self._num_done += 1
        print(f"progress {self._num_done} {state.model.config.num_hidden_layers + 1}", flush=True)


def main(job: dict[str, Any]) -> None:
    keep_freed_memory()
    torch.set_num_threads(job["num_threads"])
    if not torch.accelerator.is_available():  # without one, pinning memory raises
        IntermediatesCache.pin_memory = lambda *_, **__: None  # type: ignore[method-assign]
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    rows = [torch.tensor(ids)[None] for ids in job["token_ids"]]
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows]
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": job["group_size"]}
    oneshot(
        model=model,
        dataset=DataLoader(batches, batch_size=None),  # type: ignore[arg-type]  # each is a batch already
        recipe=[
            SayingAWQ(duo_scaling="both"),
            QuantizationModifier(
                ignore=["lm_head"], config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}
            ),
        ],
    )
    model.save_pretrained(job["output"], save_compressed=True)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))

"""The weights a model's config calls for: vLLM serves a folder that lacks one, with whatever memory held before."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from serve.artefacts.tensors import read_tensors


def find_missing(folder: Path) -> list[str]:
    """Names of weights that config.json calls for and no safetensors file holds; none for a folder that is whole.

    The model is built without memory for its weights. A folder that also holds names of its own follows another
    naming, such as experts laid together or packed integers, and cannot be judged by names: none are told.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    wanted = {name for name, _ in model.named_parameters()}  # a tied weight counts once
    held = {tensor.name for tensor in read_tensors(folder)}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(model.state_dict())
    return sorted(wanted - held) if held <= every else []

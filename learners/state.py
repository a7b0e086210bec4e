"""The learners' part of a checkpoint: DeepSpeed's own files, the RNG of each rank, and who wrote them."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from core.errors import UserError

_STATE_FILE = "learner.json"
_ENGINE_TAG = "engine"


def save_state(engine: Any, folder: Path, set_up: dict[str, Any], counters: dict[str, int]) -> None:
    """Writes weights, fp32 masters, moments, RNG and counters; every rank must call it.

    learner.json comes last: a folder without it is not a checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    engine.save_checkpoint(str(folder), tag=_ENGINE_TAG, save_latest=False)
    torch.save(torch.get_rng_state(), folder / f"rng_{distributed.get_rank()}.pt")
    distributed.barrier()
    if distributed.get_rank() == 0:
        (folder / _STATE_FILE).write_text(json.dumps(set_up | counters) + "\n", encoding="utf-8")
    distributed.barrier()


def load_state(engine: Any, folder: Path, set_up: dict[str, Any]) -> dict[str, Any]:
    """The counters of a checkpoint, after the engine has taken over its state; every rank must call it.

    Raises UserError where another number of ranks, ZeRO stage or dtype wrote it: DeepSpeed cuts the optimizer state to
    them. What ZeRO 0 in fp32 writes is whole, so any number of ranks can go on from it.
    """
    try:
        state = json.loads((folder / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} must be a learner checkpoint, but {_STATE_FILE} is not readable: {error}") from None
    whole = state["zero_stage"] == 0 and state["dtype"] == "float32"
    for name, ours in set_up.items():
        if state[name] != ours and not (whole and name == "num_ranks"):
            raise UserError(
                f"learner.{name} must be {state[name]} to go on from {folder}, got {ours} (its optimizer state is cut "
                f"to that); set learner.{name}={state[name]}, or start a new run with policy.model set to its weights"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"deepspeed\..*|torch\..*")
        engine.load_checkpoint(str(folder), tag=_ENGINE_TAG)
    own = folder / f"rng_{distributed.get_rank()}.pt"
    torch.set_rng_state(torch.load(own if own.exists() else folder / "rng_0.pt", weights_only=True))
    return state

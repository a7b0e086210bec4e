"""The DeepSpeed engine of one rank: its process group, its configuration, one optimizer step, weights gathered.

Everything that knows DeepSpeed's own rules stands here; rank.py knows none of them.
"""

import hashlib
import importlib
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

from core.config import Config, LearnerConfig
from core.errors import RunBroken, UserError


def deepspeed_module(device: str) -> Any:
    """DeepSpeed, told beforehand which device it is to use: it looks for one while it is imported."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    with warnings.catch_warnings():
        # Of DeepSpeed's own source (invalid escapes, deprecated torch calls), nothing a user could act on.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        return importlib.import_module("deepspeed")


def join_process_group(
    config: LearnerConfig, rank: int, world_size: int, address: tuple[str, int], timeout_s: float
) -> None:
    """Joins the ranks: gloo on CPU, NCCL on CUDA. Waits for every rank, at most timeout_s; so does each collective.

    Raises RunBroken that names the address and how many ranks are expected.
    """
    host, port = address
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=str(port)
    )
    os.environ["LOCAL_SIZE"] = str(world_size) if config.device == "cpu" else "1"
    if distributed.is_initialized():
        return
    # DeepSpeed's calls, not ours to change.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    backend = "nccl" if config.device == "cuda" else "gloo"
    try:
        distributed.init_process_group(
            backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s), init_method="env://"
        )
    except (RuntimeError, OSError) as error:
        raise RunBroken(
            f"learner rank {rank} of {world_size} on {socket.gethostname()} could not join the others at {host}:{port} "
            f"within {timeout_s:g} s: {' '.join(str(error).split())[:300]}"
        ) from error
    deepspeed = deepspeed_module(config.device)
    # Its shared-memory collectives would be compiled on first use (a minute, a compiler); gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def leave_process_group() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def start_engine(config: Config, policy: nn.Module, dtype: torch.dtype) -> Any:
    """A DeepSpeed engine around the policy with AdamW; the learning rate is set at each step."""
    learner = config.learner
    on_cpu = learner.device == "cpu" or learner.offload != "none"
    optimizer = torch.optim.AdamW(
        [parameter for parameter in policy.parameters() if parameter.requires_grad],
        lr=learner.learning_rate,
        betas=(learner.adam_beta1, learner.adam_beta2),
        eps=learner.adam_epsilon,
        weight_decay=learner.weight_decay,
        fused=True,  # one pass over the weights: 5 times the foreach version on CPU
    )
    deepspeed = deepspeed_module(learner.device)
    settings = _settings(learner, dtype, on_cpu)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"deepspeed\..*|torch\..*")
        engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=settings, dist_init_required=False)
    engine.train()
    return engine


def _settings(learner: LearnerConfig, dtype: torch.dtype, on_cpu: bool) -> dict[str, Any]:
    """DeepSpeed's configuration. We count the micro-batches: its own accumulation stays at 1 (no hidden division)."""
    zero: dict[str, Any] = {"stage": learner.zero_stage, "overlap_comm": not on_cpu}
    if learner.offload != "none":
        if learner.zero_stage == 0:
            raise UserError(f"learner.zero_stage must be 1 to 3 with learner.offload={learner.offload}, got 0")
        target: dict[str, Any] = {"device": learner.offload, "pin_memory": learner.device == "cuda"}
        if learner.nvme_path is not None:
            target["nvme_path"] = str(learner.nvme_path)
        zero["offload_optimizer"] = target
        if learner.zero_stage == 3:
            zero["offload_param"] = dict(target)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # ZeRO 0 in fp32 is clipped by optimizer_step, which can then look at the norm before the weights move.
        "gradient_clipping": 0.0 if _is_plain(learner, dtype) else learner.max_grad_norm,
    }
    if dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if learner.zero_stage > 0:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _is_plain(learner: LearnerConfig, dtype: torch.dtype) -> bool:
    return learner.zero_stage == 0 and dtype == torch.float32


def optimizer_step(
    engine: Any, config: LearnerConfig, rate: float, backward_all: Callable[[], float], dtype: torch.dtype
) -> tuple[float, float]:
    """(loss, gradient norm before clipping) of one step; backward_all runs the micro-batches and returns their loss.

    Raises RunBroken for a loss or gradient that is not finite, before the weights move, on every rank.
    """
    loss = torch.tensor(backward_all(), dtype=torch.float64, device=engine.device)
    distributed.all_reduce(loss)
    if not torch.isfinite(loss):
        raise RunBroken(f"the loss must be finite, got {loss.item()}; lower learner.learning_rate (now {rate:g})")
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    norm: Any = None
    if _is_plain(config, dtype):
        norm = nn.utils.clip_grad_norm_(engine.module.parameters(), config.max_grad_norm)
        _check_norm(float(norm), rate)
    engine.step()
    if norm is None:
        norm = engine.get_global_grad_norm()
        if getattr(engine.optimizer, "overflow", False) or norm is None:
            norm = float("nan")  # DeepSpeed saw inf or nan and left the weights as they were
    _check_norm(float(norm), rate)
    return loss.item(), float(norm)


def _check_norm(norm: float, rate: float) -> None:
    if not torch.isfinite(torch.tensor(norm)):
        raise RunBroken(f"the gradient must be finite, got norm {norm}; lower learner.learning_rate (now {rate:g})")


def backward(engine: Any, loss: torch.Tensor, is_last: bool) -> None:
    """Adds the gradients of one micro-batch; DeepSpeed divides by the number of ranks, which is taken back here."""
    engine.set_gradient_accumulation_boundary(is_last)
    engine.backward(loss * distributed.get_world_size())


def full_weights(engine: Any, names: dict[str, nn.Parameter], on_rank: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole weight on the CPU) one after the other; every rank must iterate to the end, on_rank gets copies.

    Under ZeRO 3 each weight is gathered for a moment; the full model never stands twice.
    """
    partitioned = engine.zero_optimization_stage() == 3
    deepspeed = deepspeed_module(engine.device.type)
    for name, parameter in names.items():
        if partitioned:
            with deepspeed.zero.GatheredParameters([parameter]):
                if on_rank:
                    yield name, parameter.detach().to("cpu", copy=True)
        elif on_rank:
            yield name, parameter.detach().cpu()


def optimizer_digest(engine: Any) -> bytes:
    """A hash of this rank's optimizer state (moments and counters)."""
    digest = hashlib.sha256()
    state = getattr(engine.optimizer, "optimizer", engine.optimizer).state
    for entry in state.values():
        for name in sorted(entry):
            value = entry[name]
            if isinstance(value, torch.Tensor):
                digest.update(name.encode() + _bytes(value))
    return digest.digest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def weights_digest(engine: Any, names: dict[str, nn.Parameter]) -> bytes:
    """A hash of the whole weights; every rank takes part and gets the same."""
    digest = hashlib.sha256()
    for name, weight in full_weights(engine, names, on_rank=True):
        digest.update(name.encode() + _bytes(weight))
    return digest.digest()

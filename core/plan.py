"""The resolved plan of a run: who runs where, the batch arithmetic, memory a process, asked against available."""

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.config import Config
from core.errors import UserError
from core.machine import Machine, Need, complaints, dtype_warning, notes, resolve_dtype

GIB = 1 << 30
BYTES_OF = {"float32": 4, "bfloat16": 2}
# Measured peak sizes of a worker less what it loads; a rollout worker is two processes.
PROCESS_BYTES = {
    "rollout": int(2.9 * GIB),
    "learner": int(0.9 * GIB),
    "grouping": int(0.8 * GIB),
    "reward": int(0.2 * GIB),
}
MIN_DISK_BYTES = 4 * GIB  # two checkpoints of the bundled model, weights, logs
MIN_SHM_BYTES = GIB  # Ray's object store, and the weights on their way
DRIVER_BYTES = int(1.2 * GIB)  # the driver and Ray's own processes


@dataclass(frozen=True)
class PlannedWorker:
    """One kind of worker: how many, what each asks for."""

    kind: str
    num: int
    cpus: float
    gpus: int
    threads: int
    memory_bytes: int
    note: str


@dataclass(frozen=True)
class Plan:
    workers: tuple[PlannedWorker, ...]
    available_cpus: float
    available_gpus: float
    memory_bytes: int
    lines: tuple[str, ...]  # the batch arithmetic, a sentence each
    warnings: tuple[str, ...]

    @property
    def asked_cpus(self) -> float:
        return sum(worker.num * worker.cpus for worker in self.workers)

    @property
    def asked_gpus(self) -> int:
        return sum(worker.num * worker.gpus for worker in self.workers)

    @property
    def asked_bytes(self) -> int:
        return DRIVER_BYTES + sum(worker.num * worker.memory_bytes for worker in self.workers)

    def check(self, machine: Machine) -> None:
        """Raises UserError where the machine lacks what the run needs: Ray would wait for it in silence."""
        need = Need(self.asked_cpus, self.asked_gpus, disk_bytes=MIN_DISK_BYTES, shm_bytes=MIN_SHM_BYTES)
        wrong = complaints(machine, need)
        # An estimate, so that only what cannot fit in an empty machine is refused; a worker on a GPU has memory there.
        on_host = sum(worker.num * worker.memory_bytes for worker in self.workers if not worker.gpus) + DRIVER_BYTES
        if on_host > machine.memory_total_bytes:
            shares = ", ".join(f"{w.kind} {w.num} x {w.memory_bytes / GIB:.1f}" for w in self.workers if not w.gpus)
            wrong.append(
                f"memory must be at least about {on_host / GIB:.1f} GiB, got {machine.memory_total_bytes / GIB:.1f} "
                f"GiB ({shares}); ask for fewer workers or a smaller rollout.kv_cache_bytes"
            )
        if wrong:
            shares = ", ".join(f"{worker.kind} {worker.num} x {worker.cpus:g}" for worker in self.workers)
            raise UserError("; ".join(wrong) + f" (CPUs asked: {shares})")

    def text(self) -> str:
        """The plan as a person reads it."""
        rows = [
            f"{worker.kind}: {worker.num} x ({worker.cpus:g} CPUs, {worker.gpus} GPUs, {worker.threads} threads, "
            f"{worker.memory_bytes / GIB:.1f} GiB) {worker.note}"
            for worker in self.workers
        ]
        rows.append(
            f"asked: {self.asked_cpus:g} CPUs, {self.asked_gpus} GPUs, {self.asked_bytes / GIB:.1f} GiB; available: "
            f"{self.available_cpus:g} CPUs, {self.available_gpus:g} GPUs, {self.memory_bytes / GIB:.1f} GiB"
        )
        return "\n".join([*rows, *self.lines, *(f"warning: {text}" for text in self.warnings)])


def make_plan(
    config: Config, machine: Machine, model: Path, num_rows: int, num_steps: int, data_notes: Sequence[str] = ()
) -> Plan:
    """The Plan of a config on one machine for a model folder and `num_rows` training prompts.

    UserError where config.run_dir cannot be a folder of ours.
    """
    check_run_dir(config.run_dir)
    num_parameters = count_parameters(model)
    workers = _workers(config, machine, num_parameters)
    asked_bytes = DRIVER_BYTES + sum(worker.num * worker.memory_bytes for worker in workers)
    warnings = [
        *notes(machine),
        dtype_warning(config.rollout.dtype, config.rollout.device, machine, "rollout.dtype"),
        dtype_warning(config.learner.dtype, config.learner.device, machine, "learner.dtype"),
        *data_notes,
    ]
    if asked_bytes > machine.memory_bytes:
        warnings.append(
            f"about {asked_bytes / GIB:.1f} GiB of memory are asked, {machine.memory_bytes / GIB:.1f} GiB are free"
        )
    return Plan(
        workers,
        machine.num_cores,
        machine.num_gpus,
        machine.memory_bytes,
        _arithmetic(config, num_rows, num_steps, num_parameters),
        tuple(text for text in warnings if text),
    )


def _workers(config: Config, machine: Machine, num_parameters: int) -> tuple[PlannedWorker, ...]:
    rollout, learner, grouping = config.rollout, config.learner, config.grouping
    rollout_dtype = resolve_dtype(rollout.dtype, rollout.device, machine)
    learner_dtype = resolve_dtype(learner.dtype, learner.device, machine)
    return (
        PlannedWorker(
            "rollout",
            rollout.num_workers,
            rollout.cpus,
            rollout.tensor_parallel_size if rollout.device == "cuda" else 0,
            rollout.threads or machine.num_cores,
            PROCESS_BYTES["rollout"] + num_parameters * BYTES_OF[rollout_dtype] + rollout.kv_cache_bytes,
            f"vLLM, {rollout.device}, {rollout_dtype}, up to {rollout.max_num_sequences} answers at once",
        ),
        PlannedWorker(
            "reward",
            config.reward.num_workers,
            config.reward.cpus,
            0,
            1,
            PROCESS_BYTES["reward"],
            " + ".join(f"{term.weight:g} x {term.kind}" for term in config.reward.terms),
        ),
        PlannedWorker(
            "grouping",
            1,
            grouping.cpus,
            1 if grouping.device == "cuda" else 0,
            machine.num_cores,
            PROCESS_BYTES["grouping"],
            f"{grouping.baseline}, {grouping.num_clusters} clusters",
        ),
        PlannedWorker(
            "learner",
            learner.num_ranks,
            learner.cpus,
            1 if learner.device == "cuda" else 0,
            learner.threads or max(1, machine.num_cores // learner.num_ranks),
            PROCESS_BYTES["learner"] + learner_bytes(config, num_parameters, learner_dtype),
            f"DeepSpeed ZeRO {learner.zero_stage}, {learner.device}, {learner_dtype}, loss {learner.loss}",
        ),
    )


def learner_bytes(config: Config, num_parameters: int, dtype: str) -> int:
    """Bytes of one rank's weights, gradients, Adam moments and activations; ZeRO (1910.02054) shards them by stage."""
    learner = config.learner
    weights = num_parameters * BYTES_OF[dtype]
    gradients = num_parameters * BYTES_OF[dtype]
    optimizer = num_parameters * (8 if dtype == "float32" else 12)  # two moments, and float32 masters beside bfloat16
    ranks = learner.num_ranks
    if learner.zero_stage >= 1:
        optimizer //= ranks
    if learner.zero_stage >= 2:
        gradients //= ranks
    if learner.zero_stage >= 3:
        weights //= ranks
    tokens = min(
        learner.max_tokens_per_micro_batch,
        config.prompts_per_step
        * (config.data.max_prompt_tokens + config.rollout.samples_per_prompt * config.rollout.max_new_tokens),
    )
    activations = int(tokens * num_parameters**0.5 * 160)  # measured: 1.9 MB a token for 135M parameters in float32
    if config.kl_needs_reference:
        weights += num_parameters * BYTES_OF[dtype]
    return weights + gradients + optimizer + activations


def count_parameters(model: Path) -> int:
    """Number of parameters in a folder's safetensors files, from their headers alone."""
    total = 0
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                total += _product(entry["shape"])
    return total


def check_run_dir(run_dir: Path) -> None:
    """UserError where run_dir can be no folder of ours: a file stands in its way, or nothing may be written there."""
    existing = next(place for place in (run_dir.absolute(), *run_dir.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise UserError(f"run_dir must be a folder or a name for a new one, got {run_dir}: {existing} is none")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"run_dir must be writable, got {run_dir}: nothing may be written in {existing}")


def check_context(config: Config, model: Path) -> None:
    """Raises UserError where a prompt and its answer can be longer than the model's context."""
    limit = json.loads((model / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    if limit is not None and config.max_model_len > limit:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_new_tokens must be at most the model's context of {limit} tokens, "
            f"got {config.data.max_prompt_tokens} + {config.rollout.max_new_tokens}; lower one of them"
        )


def _product(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _arithmetic(config: Config, num_rows: int, num_steps: int, num_parameters: int) -> tuple[str, ...]:
    samples = config.prompts_per_step * config.rollout.samples_per_prompt
    per_epoch, rest = divmod(num_rows, config.prompts_per_step)
    return (
        f"model: {num_parameters / 1e6:.0f}M parameters ({config.policy.model})",
        f"a step: {config.prompts_per_step} prompts x {config.rollout.samples_per_prompt} samples = {samples} answers "
        f"of at most {config.rollout.max_new_tokens} tokens, {config.learner.num_minibatches} optimizer step(s)",
        f"an epoch: {num_rows} prompts = {per_epoch} full steps" + (f" and one of {rest} prompts" if rest else ""),
        f"the run: {num_steps} steps, at most {num_steps * samples} answers, weights at most {config.max_staleness} "
        "updates old",
    )

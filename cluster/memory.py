"""Peak memory of the processes of a run on this host."""

import contextlib
import re
from pathlib import Path

import psutil

from core.machine import memory_used_share

_ACTOR = re.compile(r"ray::(\w+)")
KINDS = {
    "RolloutWorker": "rollout",
    "VLLM": "rollout engine",
    "RewardWorker": "reward",
    "GroupingActor": "grouping",
    "RankActor": "learner",
}


def peak_memory_bytes() -> dict[str, int]:
    """Largest resident size so far of the driver, each kind of worker, and Ray's own processes together, in bytes.

    Processes that have ended are not in it; on a cluster, nor are those of other hosts.
    """
    peaks: dict[str, int] = {}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            kind = "driver" if process == me else _kind(process)
            size = _high_water_bytes(process.pid)
            peaks[kind] = peaks.get(kind, 0) + size if kind == "ray" else max(peaks.get(kind, 0), size)
    return peaks


def _kind(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    if title.startswith("VLLM"):
        return KINDS["VLLM"]
    match = _ACTOR.match(title)
    return KINDS.get(match.group(1), "ray") if match else "ray"


def _high_water_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def memory_metrics() -> dict[str, float]:
    """For each step: the share of this host's memory in use, and the peak bytes of each kind of process."""
    peaks = {f"memory_{kind.replace(' ', '_')}_bytes": float(size) for kind, size in peak_memory_bytes().items()}
    return {"memory_used_share": memory_used_share()} | peaks

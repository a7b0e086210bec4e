"""The machine this process may use: allowed cores, memory, disk, CPU features; read from /proc, /sys and os alone.

A container or a batch system often allows less than the machine has; every number here is what is allowed.
"""

import math
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DEFAULT_ROOT = Path("/")
_WATCHED_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 13)
_MIN_STORE_BYTES = 80_000_000  # Ray refuses less than 75 MiB
_LAPTOP_BYTES = 64 << 30
_MAX_LAPTOP_STORE_BYTES = 2 << 30


@dataclass(frozen=True)
class Machine:
    """What this process is allowed to use."""

    architecture: str  # as `uname -m` says it
    python: tuple[int, int]
    num_cores: int
    num_gpus: int  # NVIDIA devices visible to the process
    memory_total_bytes: int  # physical, or the container's limit
    memory_bytes: int  # of those, free to take now
    shm_total_bytes: int
    shm_free_bytes: int
    disk_path: Path
    disk_free_bytes: int
    cpu_flags: frozenset[str]  # those of _WATCHED_FLAGS the CPU has

    @property
    def has_bfloat16(self) -> bool:
        """Whether the CPU multiplies bfloat16 itself."""
        return bool(self.cpu_flags & {"avx512_bf16", "amx_bf16"})


# (limit, usage, cached files in memory.stat) of control groups of version 2 and of version 1
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class Need:
    """What a run asks for; 0 asks for nothing."""

    num_cores: float = 0
    num_gpus: int = 0
    memory_bytes: int = 0
    shm_bytes: int = 0
    disk_bytes: int = 0


def read_machine(disk_path: Path = Path(), root: Path = DEFAULT_ROOT) -> Machine:
    """The Machine as it is now, with the free space of the disk that holds `disk_path`; `root` is for tests."""
    limit = _smallest(root, "memory", ("memory.max", "memory.limit_in_bytes"))
    meminfo = _meminfo(root)
    total, available = (meminfo.get(name, 0) for name in ("MemTotal", "MemAvailable"))
    shm = shutil.disk_usage(root / "dev/shm") if (root / "dev/shm").is_dir() else None
    existing = next(place for place in (disk_path.absolute(), *disk_path.absolute().parents) if place.exists())
    return Machine(
        architecture=platform.machine(),
        python=sys.version_info[:2],
        num_cores=max(1, math.floor(min(len(os.sched_getaffinity(0)), _cpu_quota(root)))),
        num_gpus=_num_gpus(root),
        memory_total_bytes=int(min(total, limit)),
        memory_bytes=int(min(available, limit)),
        shm_total_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        disk_path=existing,
        disk_free_bytes=shutil.disk_usage(existing).free,
        cpu_flags=frozenset(_WATCHED_FLAGS) & frozenset(_text(root / "proc/cpuinfo").split()),
    )


def memory_used_share(root: Path = DEFAULT_ROOT) -> float:
    """The share of memory in use: of the machine, or of the tightest container limit, whichever is nearer its end."""
    meminfo = _meminfo(root)
    shares = [1 - meminfo.get("MemAvailable", 0) / meminfo["MemTotal"]] if meminfo.get("MemTotal") else []
    for folder in _control_groups(root, "memory"):
        for limit, usage, cache in _MEMORY_FILES:
            texts = [_text(folder / name).strip() for name in (limit, usage)]
            if all(text.isdigit() for text in texts) and int(texts[0]):
                # The kernel gives cached files back before it kills; without this every long run would look full.
                freed = re.search(rf"^{cache} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
                shares.append((int(texts[1]) - int(freed[1] if freed else 0)) / int(texts[0]))
    return min(1.0, max([0.0, *shares]))


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes of each line of /proc/meminfo."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(size) * 1024 for name, size in lines}


def resolve_dtype(
    wanted: Literal["auto", "float32", "bfloat16"], device: Literal["cpu", "cuda"], machine: Machine
) -> Literal["float32", "bfloat16"]:
    """The dtype to load weights in. `auto`: bfloat16 on a GPU and on CPUs that multiply it, else float32."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if device == "cuda" or machine.has_bfloat16 else "float32"


def dtype_warning(wanted: str, device: str, machine: Machine, where: str) -> str | None:
    """A sentence where `wanted` works but is a trap on this machine; `where` is the config key that asked for it."""
    if wanted != "bfloat16" or device != "cpu" or machine.has_bfloat16:
        return None
    return (
        f"{where} is bfloat16, but this CPU has neither avx512_bf16 nor amx_bf16: matrix products were measured about "
        "400 times slower than in float32; set it to auto or float32"
    )


def object_store_bytes(machine: Machine) -> int:
    """Bytes for Ray's object store: at most 30 % of memory, 80 % of free /dev/shm, and 2 GiB below 64 GiB of memory."""
    bounds = [machine.memory_bytes * 3 // 10, machine.shm_free_bytes * 8 // 10]
    if machine.memory_total_bytes < _LAPTOP_BYTES:
        bounds.append(_MAX_LAPTOP_STORE_BYTES)
    return max(_MIN_STORE_BYTES, min(bounds))


def complaints(machine: Machine, need: Need) -> list[str]:
    """One sentence for each thing the run cannot do without and this machine does not have; empty: go on."""
    found = []
    if not _OLDEST_PYTHON <= machine.python <= _NEWEST_PYTHON:
        got = ".".join(map(str, machine.python))
        found.append(f"Python must be 3.11 to 3.13, got {got}; make the environment with another Python")
    if machine.architecture == "x86_64" and "avx2" not in machine.cpu_flags:
        found.append("the CPU must have AVX2, got one without; vLLM and FAISS for CPUs need it: use another machine")
    if need.num_cores > machine.num_cores:
        found.append(
            f"CPU cores must be at least {need.num_cores:g}, got {machine.num_cores} allowed to this process; "
            "ask for fewer workers, ranks or cpus"
        )
    if need.num_gpus > machine.num_gpus:
        found.append(f"GPUs must be at least {need.num_gpus}, got {machine.num_gpus}; ask for fewer or set device: cpu")
    room = (
        ("free memory", need.memory_bytes, machine.memory_bytes, "close other programs or ask for fewer workers"),
        ("free /dev/shm", need.shm_bytes, machine.shm_free_bytes, "enlarge it (docker run --shm-size) or empty it"),
        (f"free disk at {machine.disk_path}", need.disk_bytes, machine.disk_free_bytes, "make room or move run_dir"),
    )
    found += [
        f"{what} must be at least {_gib(least)}, got {_gib(got)}; {cure}"
        for what, least, got, cure in room
        if got < least
    ]
    return found


def notes(machine: Machine) -> list[str]:
    """One sentence for each thing that makes this machine slower without stopping the run."""
    if machine.architecture == "x86_64" and "avx512f" not in machine.cpu_flags:
        return ["this CPU has no AVX-512: everything runs, slower, in float32"]
    return []


def _cpu_quota(root: Path) -> float:
    """Cores' worth of time the control groups allow; inf where they say nothing."""
    quotas = [math.inf]
    for folder in _control_groups(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")  # version 2: "max 100000"
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(quota) > 0:  # version 1 says -1 for no limit
            quotas.append(int(quota) / int(period))
    return min(quotas)


def _smallest(root: Path, controller: str, names: tuple[str, ...]) -> float:
    texts = [_text(folder / name).strip() for folder in _control_groups(root, controller) for name in names]
    return min((int(text) for text in texts if text.isdigit()), default=math.inf)


def _control_groups(root: Path, controller: str) -> list[Path]:
    """Folders whose limits bind this process: its own group and all above it, for both versions of control groups.

    In a container the path in /proc/self/cgroup may be the host's and not exist here; the mount's top then holds.
    """
    base = root / "sys/fs/cgroup"
    folders = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controller if controllers else base
        own = top / path.lstrip("/")
        folders += [place for place in (own, *own.parents) if place == top or top in place.parents]
    return [*folders, base, base / controller]


def _num_gpus(root: Path) -> int:
    devices = [path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(devices)
    return min(len(devices), len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # absent on this kernel: the caller goes by what there is
        return ""


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"

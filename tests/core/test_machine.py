"""What the machine allows, read from a made-up /proc and /sys, and what is said where it is too little."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from core.machine import (
    Machine,
    Need,
    complaints,
    dtype_warning,
    memory_used_share,
    notes,
    object_store_bytes,
    read_machine,
    resolve_dtype,
)

pytestmark = pytest.mark.fast

GIB = 1 << 30
CHECKOUT = Path(__file__).parents[2]
LAPTOP = Machine(
    architecture="x86_64",
    python=(3, 11),
    num_cores=2,
    num_gpus=0,
    memory_total_bytes=24 * GIB,
    memory_bytes=20 * GIB,
    shm_total_bytes=12 * GIB,
    shm_free_bytes=12 * GIB,
    disk_path=Path("/runs"),
    disk_free_bytes=50 * GIB,
    cpu_flags=frozenset({"avx2"}),
)


def lay(root: Path, files: dict[str, str]) -> Path:
    meminfo = "MemTotal:       16777216 kB\nMemFree:  100 kB\nMemAvailable:    8388608 kB\n"  # 16 and 8 GiB
    for name, text in {"proc/meminfo": meminfo, "proc/cpuinfo": "flags\t: fpu avx2 sse\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_the_physical_numbers_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    machine = read_machine(tmp_path, root=lay(tmp_path, {}))
    assert (machine.num_cores, machine.memory_total_bytes, machine.memory_bytes) == (6, 16 * GIB, 8 * GIB)
    assert machine.cpu_flags == {"avx2"}
    assert (machine.shm_total_bytes, machine.num_gpus) == (0, 0)
    assert machine.disk_free_bytes > 0


@pytest.mark.parametrize(
    "files",
    [
        # version 2, as seen inside a container
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
        },
        # version 2, limits of a group above the process's own
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/cpu.max": "250000 100000",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000",
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/memory.max": str(GIB),
        },
        # version 1, the path being the host's and absent here
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
        },
    ],
)
def test_the_limits_of_control_groups_hold_below_the_physical_numbers(tmp_path, monkeypatch, files):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    machine = read_machine(tmp_path, root=lay(tmp_path, files))
    # 250 ms of CPU time in each 100 ms: two whole cores
    assert (machine.num_cores, machine.memory_total_bytes, machine.memory_bytes) == (2, GIB, GIB)


def test_no_limit_is_no_limit_in_either_version(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    machine = read_machine(tmp_path, root=lay(tmp_path, files))
    assert (machine.num_cores, machine.memory_bytes) == (3, 8 * GIB)


def test_the_share_of_memory_in_use_is_of_the_machine_or_of_the_tightest_limit(tmp_path):
    assert memory_used_share(lay(tmp_path, {})) == 0.5  # 8 of 16 GiB available
    second = {
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": "1000\n",
        "sys/fs/cgroup/job/memory.current": "950\n",
        "sys/fs/cgroup/job/memory.stat": "anon 700\ninactive_file 150\n",  # cached files, given back when asked for
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "999\n",
    }
    assert memory_used_share(lay(tmp_path / "2", second)) == 0.8
    first = {
        "proc/self/cgroup": "4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "900",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
    }
    assert memory_used_share(lay(tmp_path / "1", first)) == 0.7
    unlimited = first | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    assert memory_used_share(lay(tmp_path / "0", unlimited)) == 0.5
    assert memory_used_share(tmp_path / "nothing") == 0.0


def test_less_than_one_core_is_still_one(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"}
    assert read_machine(tmp_path, root=lay(tmp_path, files)).num_cores == 1


def test_cores_follow_the_allowed_cpus():
    core = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, {{{core}}}); from core.machine import *; print(read_machine().num_cores)"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "1\n", ended.stderr


def test_gpus_are_the_visible_devices(tmp_path, monkeypatch):
    root = lay(tmp_path, {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert read_machine(tmp_path, root).num_gpus == 2
    for visible, count in (("1", 1), ("", 0), ("-1", 0), ("0,1,2", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert read_machine(tmp_path, root).num_gpus == count


def test_the_disk_of_a_folder_not_made_yet_is_that_of_its_nearest_parent(tmp_path):
    assert read_machine(tmp_path / "a" / "b").disk_path == tmp_path


def test_auto_is_bfloat16_only_where_it_is_fast():
    for flag in ("avx512_bf16", "amx_bf16"):
        assert resolve_dtype("auto", "cpu", replace(LAPTOP, cpu_flags=frozenset({flag}))) == "bfloat16"
    assert resolve_dtype("auto", "cpu", replace(LAPTOP, cpu_flags=frozenset({"avx512f"}))) == "float32"
    assert resolve_dtype("auto", "cuda", LAPTOP) == "bfloat16"
    assert resolve_dtype("float32", "cuda", LAPTOP) == "float32"


def test_bfloat16_on_a_cpu_without_it_is_allowed_with_a_warning():
    assert resolve_dtype("bfloat16", "cpu", LAPTOP) == "bfloat16"
    assert "rollout.dtype is bfloat16, but this CPU" in dtype_warning("bfloat16", "cpu", LAPTOP, "rollout.dtype")
    assert dtype_warning("auto", "cpu", LAPTOP, "rollout.dtype") is None
    assert dtype_warning("bfloat16", "cuda", LAPTOP, "rollout.dtype") is None


@pytest.mark.parametrize(
    ("memory_total", "memory", "shm", "expected"),
    [
        (24 * GIB, 20 * GIB, 12 * GIB, 2 * GIB),  # 30 % is 6 GiB, cut to a laptop's 2
        (24 * GIB, 5 * GIB, 12 * GIB, 5 * GIB * 3 // 10),
        (24 * GIB, 20 * GIB, GIB, GIB * 8 // 10),  # /dev/shm is the least
        (256 * GIB, 200 * GIB, 128 * GIB, 60 * GIB),  # a server is not cut to 2
        (GIB, GIB // 8, 64 << 20, 80_000_000),  # never less than Ray takes
    ],
)
def test_the_object_store_fits_the_machine(memory_total, memory, shm, expected):
    machine = replace(LAPTOP, memory_total_bytes=memory_total, memory_bytes=memory, shm_free_bytes=shm)
    assert object_store_bytes(machine) == expected


@pytest.mark.parametrize(
    ("machine", "need", "sentence"),
    [
        (replace(LAPTOP, python=(3, 14)), Need(), "Python must be 3.11 to 3.13, got 3.14"),
        (replace(LAPTOP, python=(3, 10)), Need(), "Python must be 3.11 to 3.13, got 3.10"),
        (replace(LAPTOP, cpu_flags=frozenset()), Need(), "the CPU must have AVX2, got one without"),
        (LAPTOP, Need(num_cores=64), "CPU cores must be at least 64, got 2 allowed to this process"),
        (LAPTOP, Need(num_gpus=8), "GPUs must be at least 8, got 0; ask for fewer or set device: cpu"),
        (LAPTOP, Need(memory_bytes=40 * GIB), "free memory must be at least 40.00 GiB, got 20.00 GiB"),
        (LAPTOP, Need(shm_bytes=13 * GIB), "free /dev/shm must be at least 13.00 GiB, got 12.00 GiB"),
        (LAPTOP, Need(disk_bytes=51 * GIB), "free disk at /runs must be at least 51.00 GiB, got 50.00 GiB"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence_with_asked_and_available(machine, need, sentence):
    (only,) = complaints(machine, need)
    assert only.startswith(sentence)


def test_a_machine_that_is_enough_brings_no_complaint():
    need = Need(num_cores=2, memory_bytes=20 * GIB, shm_bytes=12 * GIB, disk_bytes=50 * GIB)
    assert complaints(LAPTOP, need) == []
    assert complaints(replace(LAPTOP, architecture="aarch64", cpu_flags=frozenset()), Need()) == []


def test_a_cpu_without_avx_512_is_a_note_and_no_complaint():
    assert notes(LAPTOP) == ["this CPU has no AVX-512: everything runs, slower, in float32"]
    assert notes(replace(LAPTOP, cpu_flags=frozenset({"avx2", "avx512f"}))) == []

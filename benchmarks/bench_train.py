"""Training against TRL on the same work, in one run: `python -m benchmarks.bench_train --peer-python PATH [--steps N]`.

Prints one `name: value` a line: seconds per step of both, speedup_over_trl at the peer's precision (float32) and at
ours (what `auto` resolves to), both reward curves, mean answer lengths, our rollout rate as a share of bare vLLM's on
the same prompts, and the learner's FLOP/s as a share of this machine's matrix-product rate. The machine drifts, so the
peer is run before and after our run, and medians are compared.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from core.machine import read_machine, resolve_dtype
from core.metrics import read_metrics
from policy.bundled import BUNDLED, resolve_model

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/bench_sums.yaml"


def lines_of(command: list[str], prefix: str | None = None) -> list[Any]:
    """The JSON values of the command's output lines that start with `prefix`; its output goes to stderr as it comes."""
    values = []
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            if prefix and line.startswith(prefix):
                values.append(json.loads(line.removeprefix(prefix)))
    if process.returncode != 0:
        raise SystemExit(f"error: {' '.join(command[:4])} must end well, got exit status {process.returncode}")
    return values


def run_peer(python: str, num_steps: int) -> list[dict[str, float]]:
    """The peer's steps; its first one, which holds the start, is left out of `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        script = str(ROOT / "benchmarks" / "peer_trl.py")
        command = [
            python,
            "-c",
            f"import os, runpy, sys; os.chdir({folder!r}); sys.argv = sys.argv[1:]; "
            "runpy.run_path(sys.argv[0], run_name='__main__')",
            script,
        ]
        return lines_of([*command, str(resolve_model(BUNDLED)), str(num_steps)], "PEER ")


def run_ours(num_steps: int, dtype: str, folder: Path) -> list[dict[str, Any]]:
    """Our steps, as metrics.jsonl has them."""
    run_dir = folder / f"ours-{dtype}"
    lines_of(
        [
            sys.executable,
            "train.py",
            CONFIG,
            f"run_dir={run_dir}",
            f"num_steps={num_steps}",
            f"rollout.dtype={dtype}",
            f"learner.dtype={dtype}",
        ]
    )
    return read_metrics(run_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", required=True, help="python of the peer's environment")
    parser.add_argument("--steps", type=int, default=10, help="steps of each side that count")
    options = parser.parse_args()
    ours_dtype = resolve_dtype("auto", "cpu", read_machine())
    with tempfile.TemporaryDirectory() as name:
        first = run_peer(options.peer_python, (options.steps + 1) // 2)
        same = run_ours(options.steps, "float32", Path(name))
        ours = same if ours_dtype == "float32" else run_ours(options.steps, ours_dtype, Path(name))
        peer = run_peer(options.peer_python, options.steps)
    bare = lines_of([sys.executable, "-m", "benchmarks.bare_vllm", CONFIG, f"rollout.dtype={ours_dtype}"], "BARE ")[0]
    alone = subprocess.run(
        [sys.executable, "-m", "learners.alone", str(resolve_model(BUNDLED)), "--updates", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    peer_s = statistics.median(step["seconds"] for step in first[1:] + peer[1:])
    same_s, ours_s = (statistics.median(step["seconds"] for step in steps) for steps in (same, ours))
    print(f"peer_seconds_per_step: {peer_s:.1f} (trl, float32)")
    print(f"seconds_per_step: {same_s:.1f} (float32), {ours_s:.1f} ({ours_dtype})")
    print(f"speedup_over_trl: {peer_s / ours_s:.2f}")
    print(f"speedup_over_trl_same_precision: {peer_s / same_s:.2f}")
    for who, steps in (("peer", peer), ("ours_float32", same), (f"ours_{ours_dtype}", ours)):
        print(f"reward_curve_{who}:", *(f"{step['reward_mean']:.3f}" for step in steps))
        print(f"answer_tokens_{who}:", *(f"{step['answer_tokens_mean']:.1f}" for step in steps))
    print(f"rollout_share_of_bare_vllm: {ours[0]['rollout_tokens_per_s'] / statistics.median(bare):.2f} (first step)")
    for line in alone.splitlines():
        if re.search(r"FLOP", line):
            print(f"learner: {line.strip()}")


if __name__ == "__main__":
    main()

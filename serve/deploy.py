"""Puts a version in front of live traffic: `python -m serve.deploy RUN_DIR [--config FILE] [key=value ...]`.

Exports the newest checkpoint, quantises and gates it, then moves traffic over in steps and watches; a breach sends it
all back. `--rollback REASON` puts the version before in its place, at once. `--resume` carries on what a kill
interrupted. Exit status: 0 promoted (or rolled back where that was asked), 1 refused, rolled back or broken, 2 a
mistake in what was asked; the last line on stderr says why.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ray
from ray import serve

from cluster.session import NAMESPACE, start_session
from core.config import ClusterConfig, load_config
from core.errors import RunBroken, UserError
from core.machine import read_machine
from serve.application import is_running, start_version, stop_version
from serve.artefacts.artefact import artefacts_folder, load_artefact
from serve.config import ServeConfig
from serve.gate.tasks import Tasks, heldout_tasks, score
from serve.names import application_of
from serve.preparation import prepare_version
from serve.registry import Registry
from serve.rollout.controller import Rollout
from serve.rollout.progress import Progress
from serve.rollout.traffic import BOARD, VersionTraffic
from serve.running import running_server

TOKEN = Path.home() / ".ray" / "auth_token"
NUM_PROBES = 32  # tasks a canary step
PROBE_LIMIT_S = 300.0
BOARD_LIMIT_S = 10.0


class LivePorts:
    """What the controller needs, from the running Ray Serve."""

    def __init__(self, config: ServeConfig, candidate: str) -> None:
        self._config = config
        self._board = ray.get_actor(BOARD, NAMESPACE)
        self._candidate = candidate

    @functools.cached_property
    def _tasks(self) -> Tasks:
        num_tasks = NUM_PROBES * len(self._config.canary.shares)
        return heldout_tasks(load_artefact(artefacts_folder(self._config.serve_dir) / self._candidate), num_tasks)

    def start_version(self, digest: str) -> None:
        if not is_running(digest):
            start_version(self._config, digest)

    def stop_version(self, digest: str) -> None:
        if application_of(digest) in serve.status().applications:
            stop_version(digest)

    def traffic(self, digest: str) -> VersionTraffic:
        found: VersionTraffic = ray.get(self._board.traffic.remote(digest), timeout=BOARD_LIMIT_S)
        return found

    def in_flight(self, digest: str, within_s: float) -> int | None:
        found: int | None = ray.get(self._board.in_flight.remote(digest, within_s), timeout=BOARD_LIMIT_S)
        return found

    def probe(self, stable: str, canary: str, first: int) -> tuple[Sequence[float], Sequence[float]]:
        """Rewards of the tasks from place `first` on, NUM_PROBES at most, asked of both versions' replicas."""
        part = replace(self._tasks, prompts=self._tasks.prompts[first : first + NUM_PROBES])
        if not part.prompts:
            return [], []
        return score(part, answers_of(stable, part)), score(part, answers_of(canary, part))

    def clock(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def answers_of(digest: str, tasks: Tasks) -> list[str]:
    """The version's greedy answers, by its own replicas and past the cache."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    handle = serve.get_app_handle(application_of(digest))
    params = SamplingParams(
        temperature=0,
        max_tokens=tasks.max_new_tokens,
        stop=list(tasks.stop) or None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    asked = [
        handle.whole.remote(list(prompt.tokens), params, f"probe-{digest[:8]}-{time.monotonic_ns()}-{place}")
        for place, prompt in enumerate(tasks.prompts)
    ]
    return [response.result(timeout_s=PROBE_LIMIT_S).outputs[0].text for response in asked]


def main(words: list[str] | None = None) -> int:
    """The exit status of one call of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m serve.deploy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", help="a run folder, a model folder, or smollm2-135m")
    parser.add_argument("--config", default="configs/serve.yaml", help="a YAML file (default: %(default)s)")
    parser.add_argument("--rollback", metavar="REASON", help="put the version before in its place")
    parser.add_argument("--resume", action="store_true", help="carry on a rollout that was interrupted")
    parser.add_argument(
        "--promote-without-traffic", action="store_true", help="go on though a step saw too few requests to be judged"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(words)
    if words is None and "RAY_AUTH_MODE" not in os.environ and TOKEN.is_file():
        # A Ray of our own asks who joins it for the token it left there. Ray reads how to answer when it is imported,
        # which has happened: so this program begins anew.
        command = [sys.executable, "-m", "serve.deploy", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"RAY_AUTH_MODE": "token"})
    try:
        if sum((bool(options.source), bool(options.rollback), options.resume)) != 1:
            raise UserError("exactly one of SOURCE, --rollback and --resume must be given")
        end = _act(load_config(options.config, options.overrides, ServeConfig), options)
    except (UserError, RunBroken) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("error: interrupted; python -m serve.deploy --resume carries on", file=sys.stderr)
        return 130
    print(f"{end.state}: {end.reason}")
    return 0 if options.rollback or end.state != "rolled_back" else 1


def _act(config: ServeConfig, options: argparse.Namespace) -> Progress:
    server = running_server(config.serve_dir)
    if server is None:
        raise UserError(f"{config.serve_dir} must be served to deploy there, got no server; start one with make serve")
    registry = Registry(config.serve_dir)
    routing = registry.routing()
    if routing.stable is None:
        raise UserError("a stable version must serve before another takes over, got none; start one with make serve")
    folder = artefacts_folder(config.serve_dir)
    candidate = routing.canary or routing.stable
    if options.source:
        stable = load_artefact(folder / routing.stable)
        parent = stable.origin.parent
        full = load_artefact(folder / parent) if parent and (folder / parent).is_dir() else stable
        candidate = prepare_version(options.source, config, full, print).digest
        if candidate == routing.stable:
            raise UserError(f"version {candidate[:12]} serves already; train on, or give another run")
    start_session(ClusterConfig(address=server["ray_address"]), read_machine())
    rollout = Rollout(
        config, registry, LivePorts(config, candidate), promote_without_traffic=options.promote_without_traffic
    )
    try:
        if options.rollback:
            return rollout.rollback(options.rollback)
        if options.resume:
            end = rollout.resume()
            if end is None:
                raise UserError("a rollout must have been interrupted to be carried on, got none")
            return end
        return rollout.run(candidate)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())

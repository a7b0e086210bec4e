"""Serves a policy over HTTP: `python -m serve [SOURCE] [--config FILE] [key=value ...]`.

SOURCE is a run folder, a model folder, or smollm2-135m; left out: what was served before, else the newest run under
runs/ that has a checkpoint, else the bundled model. Runs until interrupted; then running answers end first. Exit
status: 0 interrupted, 1 something broke, 2 a mistake in what was asked; the last line on stderr says why.
"""

import argparse
import signal
import sys
from pathlib import Path

from core.config import load_config
from core.errors import UserError
from policy.bundled import BUNDLED
from serve.artefacts.artefact import artefacts_folder, load_artefact
from serve.config import ServeConfig
from serve.preparation import prepare_first
from serve.quantisation import Quantisation
from serve.registry import Registry
from serve.running import running_server
from serve.server import Server

RUNS = Path("runs")


def main(words: list[str] | None = None) -> int:
    """The exit status of one call of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", help="a run folder, a model folder, or smollm2-135m")
    parser.add_argument("--config", default="configs/serve.yaml", help="a YAML file (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as gateway.port=8080")
    options = parser.parse_intermixed_args(words)
    if options.source and "=" in options.source and not Path(options.source).exists():
        options.source, options.overrides = None, [options.source, *options.overrides]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(load_config(options.config, options.overrides, ServeConfig), options.source)
    except (UserError, RuntimeError) as error:  # RunBroken, LostRace, and what Ray Serve raises at a start
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 0


def run(config: ServeConfig, source: str | None) -> int:
    """Serves until interrupted: what is new in full precision first, in 4 bits once that has passed its gate."""
    other = running_server(config.serve_dir)
    if other:
        raise UserError(
            f"{config.serve_dir} is served already at {other['url']}; put a version there with serve.deploy"
        )
    registry = Registry(config.serve_dir)
    routing = registry.routing()
    if source is not None or routing.stable is None:
        chosen = prepare_first(source or newest_run(), config, say)
        if chosen.digest not in (routing.stable, parent_of(routing.stable, config)):
            registry.compare_and_set(routing.epoch, "served at start", stable=chosen.digest, canary=None)
    with Server(config, say) as server:
        digest = registry.routing().stable or ""
        say(f"serving version {digest[:12]} at {server.url}")
        say(example(server.url, config.gateway.model_name))
        behind = Quantisation(config, registry, say)
        behind.start()
        try:
            signal.pause()
        finally:
            behind.end()
    return 0


def parent_of(digest: str | None, config: ServeConfig) -> str | None:
    """The version in full precision that a quantised one was made from."""
    return load_artefact(artefacts_folder(config.serve_dir) / digest).origin.parent if digest else None


def newest_run() -> str:
    """The run under runs/ with the newest checkpoint; the bundled model where there is none."""
    found = sorted(RUNS.glob("*/checkpoints/step_*"), key=lambda path: path.stat().st_mtime)
    return str(found[-1].parent.parent) if found else BUNDLED


def example(url: str, model: str) -> str:
    """A command a person can copy."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is 2 + 3?"}}]}}'
    return f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def say(sentence: str) -> None:
    print(sentence, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""What serves now: `python -m serve.status [--config FILE] [--url URL] [--json] [key=value ...]`.

Shows every version on disk with its role, whether a server runs or not, and a running server's health. Where the
server asks for keys, SERVE_API_KEY holds one. Exit status: 0 serving, 1 not serving, 2 a mistake in what was asked.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from core.config import load_config
from core.errors import RunBroken, UserError
from core.terminal import plain_text
from serve.artefacts.artefact import artefacts_folder, flaw, load_artefact
from serve.config import ServeConfig
from serve.gateway.metrics import SHORT, roles
from serve.registry import Registry, Routing
from serve.rollout.progress import Journal
from serve.running import running_server

TIMEOUT_S = 5.0
MIN_COLUMNS = 110  # of the table; a narrower terminal breaks its lines, and nothing is cut
ROLES = ("stable", "canary", "previous", "-")  # in this order


@dataclass(frozen=True)
class VersionRow:
    """One version, as the table shows it."""

    digest: str
    role: str
    share: float  # of traffic
    step: int | None
    quantization: str | None
    gate: str  # passed, failed, not judged
    created: str | None  # UTC, ISO 8601
    flaw: str | None  # why it could not be served
    replicas: dict[str, int] | None  # healthy and wanted; None: not known
    answers: int | None  # since the gateway's start


@dataclass(frozen=True)
class Answered:
    """What a server said when it was asked."""

    serving: bool
    problem: str | None  # why it does not serve, or why there are no numbers
    live: dict[str, Any] | None  # /status


def ask_server(url: str, key: str | None, timeout_s: float = TIMEOUT_S) -> Answered:
    """Health and numbers of the server at `url`; UserError where that is no address."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, timeout=timeout_s, headers=headers, trust_env=False) as client:
            health = client.get("/health")
            if health.status_code != 200 or health.json().get("status") != "ok":
                return Answered(False, f"health must be 200, got {health.status_code}: {health.text[:300]}", None)
            status = client.get("/status")
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError) as error:
        raise UserError(f"--url must be like http://127.0.0.1:8000, got {url!r}: {error}") from None
    except httpx.HTTPError as error:
        return Answered(False, f"nothing answers at {url}: {error}; start it with python -m serve", None)
    except (ValueError, AttributeError):
        return Answered(False, f"what answers at {url} must be a policy server, got another one", None)
    if status.status_code == 401:
        return Answered(True, "the numbers need an API key; set SERVE_API_KEY", None)
    if status.status_code != 200:
        return Answered(True, f"/status must be 200, got {status.status_code}", None)
    return Answered(True, None, status.json())


def version_rows(config: ServeConfig, routing: Routing, live: dict[str, Any] | None) -> list[VersionRow]:
    """Every version on disk or in the registry: those with a role first, then the newest."""
    known = {digest: (role, share) for digest, role, share in reversed(roles(routing))}
    root = artefacts_folder(config.serve_dir)
    on_disk = [path.name for path in root.iterdir() if not path.name.startswith(".")] if root.is_dir() else []
    shown = {version["digest"]: version for version in (live or {}).get("versions", [])}
    rows = [_row(config, digest, known.get(digest, ("-", 0.0)), shown) for digest in {*known, *on_disk}]
    rows.sort(key=lambda row: row.created or "", reverse=True)
    return sorted(rows, key=lambda row: ROLES.index(row.role))


def _row(config: ServeConfig, digest: str, role: tuple[str, float], shown: dict[str, Any]) -> VersionRow:
    folder, live = artefacts_folder(config.serve_dir) / digest, shown.get(digest, {})
    try:
        artefact = load_artefact(folder)
    except UserError as error:
        return VersionRow(digest, *role, None, None, "-", None, str(error), live.get("replicas"), live.get("answers"))
    gate = "not judged" if artefact.gate is None else "passed" if artefact.gate.get("passed") else "failed"
    return VersionRow(
        digest,
        *role,
        artefact.origin.step,
        artefact.origin.quantization,
        gate,
        artefact.created,
        flaw(folder, hashes=False),
        live.get("replicas"),
        live.get("answers"),
    )


def table_of(rows: list[VersionRow]) -> Table:
    """The versions as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in ("version", "role", "share", "step", "weights", "gate", "replicas", "answers", "exported"):
        table.add_column(title, justify="right" if title in ("share", "step", "answers") else "left", no_wrap=True)
    for row in rows:
        replicas = f"{row.replicas['healthy']} of {row.replicas['wanted']}" if row.replicas else "-"
        cells = [row.digest[:SHORT], row.role, f"{row.share:.0%}" if row.role in ROLES[:2] else "-"]
        cells += [_or_dash(row.step), "full" if row.quantization == "none" else _or_dash(row.quantization)]
        cells += ["damaged" if row.flaw else row.gate, replicas, _or_dash(row.answers), (row.created or "-")[:16]]
        table.add_row(*(Text(plain_text(cell), style="bold" if row.role == "stable" else "") for cell in cells))
    return table


def headline(url: str, answered: Answered) -> str:
    """Whether it serves, and its numbers, in a line."""
    if not answered.serving:
        return f"not serving: {answered.problem}"
    if answered.live is None:
        return f"serving at {url}; {answered.problem}"
    now, cache = answered.live["now"], answered.live["cache"]
    words = [f"{now['requests_per_s']:.1f} requests/s"]
    words += [] if now["p50_s"] is None else [f"median {now['p50_s']:.3f} s, 99th percentile {now['p99_s']:.3f} s"]
    ratio = answered.live["hit_ratio"]
    words += [] if ratio is None else [f"hit ratio {ratio:.0%}"]
    words += [f"cache breaker {cache['state'].replace('_', ' ')}" if cache else "no cache"]
    return f"serving at {url}: {', '.join(words)}"


def show(config: ServeConfig, url: str, as_json: bool) -> int:
    """Prints the status; the exit status."""
    answered = ask_server(url, os.environ.get("SERVE_API_KEY"))
    registry = Registry(config.serve_dir)
    routing = registry.routing()
    progress = Journal(registry).newest()
    rows = version_rows(config, routing, answered.live)
    if as_json:
        tree = {"url": url, **asdict(answered), "routing": asdict(routing), "versions": [asdict(row) for row in rows]}
        tree["rollout"] = {"state": progress.state, "reason": progress.reason, "at": progress.at} if progress else None
        print(json.dumps(tree, indent=1, allow_nan=False))
        return 0 if answered.serving else 1
    console = Console(highlight=False, width=max(MIN_COLUMNS, Console().width))
    say(console, headline(url, answered))
    if rows:
        console.print(table_of(rows))
    else:
        say(console, f"{config.serve_dir} holds no version yet; python -m serve makes one")
    for row in rows:
        if row.flaw:
            say(console, f"damaged: {row.digest[:SHORT]}: {row.flaw}")
    if progress:
        say(console, f"last rollout: {progress.state} at {progress.at}: {progress.reason}")
    return 0 if answered.serving else 1


def say(console: Console, sentence: str) -> None:
    console.print(Text(plain_text(sentence)), soft_wrap=True)


def main(words: list[str] | None = None) -> int:
    """The exit status of one call of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m serve.status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/serve.yaml", help="a YAML file (default: %(default)s)")
    parser.add_argument("--url", help="of the server; left out: the one running in serve_dir, else gateway.host:port")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as serve_dir=runs/serving")
    options = parser.parse_intermixed_args(words)
    try:
        config = load_config(options.config, options.overrides, ServeConfig)
        running = running_server(config.serve_dir)
        given = f"http://{_dialled(config.gateway.host)}:{config.gateway.port}"
        return show(config, options.url or (running["url"] if running else given), options.json)
    except (UserError, RunBroken) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


def _dialled(host: str) -> str:
    """An address to call, where `host` is one to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())

"""Prometheus and Ray: the scrape configuration, and the project's own metrics as Ray's agents show them.

`python -m cluster.prometheus > prometheus.yml` prints the configuration for the newest Ray of this machine.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import aiohttp
import ray
from ray.exceptions import RayError

PREFIX = "ray_grpo_"  # Ray puts ray_ before a metric's own name
DISCOVERY = "prom_metrics_service_discovery.json"  # Ray writes it every few seconds: the agents of the alive nodes
INTERVAL_S = 5
ALERTS = Path(__file__).resolve().parent / "dashboards" / "training_alerts.yaml"
TIMEOUT_S = 3.0  # for all agents; one that is silent is left out
_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+)")
_LABEL = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"')
_OF_RAY = {"Component", "JobId", "NodeAddress", "NodeId", "SessionName", "Version", "WorkerId"}  # name machines, Ray


def scrape_config(discovery: Path, interval_s: int = INTERVAL_S) -> str:
    """Prometheus's configuration, as YAML: the nodes that Ray's service-discovery file names, and a run's alerts."""
    return f"""# Follows Ray's own list of its nodes: nodes that come and go need no change here.
global:
  scrape_interval: {interval_s}s
  evaluation_interval: {interval_s}s
rule_files: [{json.dumps(str(ALERTS))}]
scrape_configs:
  - job_name: ray
    file_sd_configs:
      - files: [{json.dumps(str(discovery))}]
        refresh_interval: {interval_s}s
"""


def newest_discovery() -> Path:
    """The service-discovery file of the Ray started last on this machine; it need not be there yet."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "session_latest" / DISCOVERY


def own_samples(text: str, prefix: str = PREFIX) -> str:
    """The lines of a Prometheus text whose metric starts with `prefix`, without Ray's labels of machines."""
    kept = []
    for line in text.splitlines():
        comment = _COMMENT.match(line)
        if (comment[1] if comment else line).startswith(prefix):
            kept.append(line if comment else _without_machines(line))
    return "".join(f"{line}\n" for line in kept)


class OwnMetrics:
    """The project's metrics of the whole cluster as one Prometheus text, at most `max_age_s` old."""

    def __init__(self, max_age_s: float = 1.0, prefix: str = PREFIX) -> None:
        self._max_age_s, self._prefix = max_age_s, prefix
        self._text, self._read_at = "", -float("inf")
        self._lock = asyncio.Lock()  # many askers cost the agents one request

    async def text(self) -> str:
        """The text; empty without Ray. Waits for: the agents of the alive nodes, TIMEOUT_S at most."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._read_at > self._max_age_s:
                self._text = await self._read()
                self._read_at = asyncio.get_running_loop().time()
            return self._text

    async def _read(self) -> str:
        addresses = await asyncio.to_thread(agent_addresses)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
            texts = await asyncio.gather(*(_fetched(session, address) for address in addresses))
        return merged(own_samples(text, self._prefix) for text in texts)


def agent_addresses() -> list[str]:
    """host:port of the metrics of each alive node; empty without Ray."""
    if not ray.is_initialized():
        return []
    try:
        nodes = ray.nodes()
    except RayError:
        return []
    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes if node["Alive"]]


def merged(texts: Iterable[str]) -> str:
    """One Prometheus text of several: a metric's comments once, its samples together.

    Without labels of machines two nodes may hold the same series: of gauges the largest counts, all else is added up.
    """
    comments: dict[str, str] = {}  # "# TYPE name" -> its line
    samples: dict[str, list[float]] = {}  # series -> a value a node
    for line in (line for text in texts for line in text.splitlines()):
        comment = _COMMENT.match(line)
        if comment:
            comments.setdefault(comment[0], line)
        else:
            series, _, value = line.rpartition(" ")
            samples.setdefault(series, []).append(float(value))
    kinds = {line.split()[2]: line.split()[3] for line in comments.values() if line.startswith("# TYPE")}
    of_family: dict[str, list[str]] = {}
    for series in samples:
        of_family.setdefault(_family(series, kinds), []).append(series)
    lines = []
    for family, kind in kinds.items():
        lines += [line for line in comments.values() if line.split()[2] == family]
        together = max if kind == "gauge" else sum
        lines += [f"{series} {together(samples[series])!r}" for series in of_family.get(family, ())]
    return "".join(f"{line}\n" for line in lines)


def _family(series: str, families: Iterable[str]) -> str:
    """The longest family name a series belongs to: a histogram's samples carry a suffix."""
    name = series.partition("{")[0]
    own = (f for f in families if name == f or name.removeprefix(f) in ("_bucket", "_sum", "_count", "_total"))
    return max(own, key=len, default="")


def _without_machines(line: str) -> str:
    name, brace, rest = line.partition("{")
    if not brace:
        return line
    labels, _, value = rest.rpartition("}")
    ours = (label for label in _LABEL.finditer(labels) if label[1] not in _OF_RAY and not label[1].startswith("otel_"))
    kept = ",".join(label[0] for label in ours)
    return f"{name}{{{kept}}}{value}" if kept else name + value


async def _fetched(session: aiohttp.ClientSession, address: str) -> str:
    try:
        async with session.get(f"http://{address}/metrics") as response:
            return await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""  # a node that has just gone


def main(words: list[str] | None = None) -> int:
    """The exit status of one call of the program."""
    parser = argparse.ArgumentParser(prog="python -m cluster.prometheus", description=__doc__)
    parser.add_argument("--discovery", type=Path, default=newest_discovery(), help="Ray's service-discovery file")
    options = parser.parse_args(words)
    if not options.discovery.is_file():
        print(f"note: {options.discovery} is not there yet; Ray writes it once it runs", file=sys.stderr)
    print(scrape_config(options.discovery.absolute()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The dashboards on a real Prometheus: what the project's own classes count on a real Ray, every panel finds.

Needs Debian's package `prometheus`.
"""

import ast
import asyncio
import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray

from cluster.memory import KINDS
from cluster.prometheus import ALERTS, DISCOVERY, OwnMetrics, scrape_config
from cluster.training_metrics import TrainingMetrics
from serve.gateway.instruments import COUNTERS, GAUGES, HISTOGRAMS, RewardGauge
from serve.gateway.metrics import GatewayMetrics
from serve.registry import Routing

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
BOARDS = {name: json.loads((ROOT / f"cluster/dashboards/{name}.json").read_text()) for name in ("serving", "training")}
STABLE, CANARY = "a1" * 32, "b2" * 32
LIMIT_S = 120.0  # Ray's processes report every few seconds, its agents pass it on
FADED_S = 45.0  # by then Ray has forgotten what was told once
EVALUATED = "heldout_accuracy"  # of an evaluation, the rest is of each step


def queries(board: str) -> list[tuple[str, str]]:
    """(panel, query) of every panel, with Grafana's variables filled in."""
    found = [
        (panel["title"], target["expr"].replace("$__rate_interval", "1m").replace("$run", ".*"))
        for panel in BOARDS[board]["panels"]
        for target in panel["targets"]
    ]
    assert found
    return found


def training_names() -> set[str]:
    """The step metrics that the training dashboard and the alerts ask for."""
    asked = " ".join(query for _, query in queries("training")) + ALERTS.read_text(encoding="utf-8")
    return set(re.findall(r"ray_grpo_train_(\w+)", asked))


class Emitter:
    """Counts as gateways and runs do, through their own classes."""

    def __init__(self) -> None:
        self.gateway, self.training, self.reward = GatewayMetrics(), TrainingMetrics("a run"), RewardGauge()
        self.num_rounds = 0
        self.gateway.watch(lambda: Routing(2, STABLE, CANARY, 0.25), self.cache)
        # Once, as long steps do; the values must stand.
        self.reward.set(STABLE[:12], 0.5)
        self.training.record(dict.fromkeys(training_names(), 0.5) | {"run_dir": "a text", "icc_nan": math.nan})

    def cache(self) -> dict[str, Any]:
        return {"state": "closed", "hits": 3 * self.num_rounds, "timeouts": self.num_rounds}

    def round(self) -> None:
        """A second's worth of everything."""
        self.num_rounds += 1
        for version in (STABLE, CANARY):
            for source in ("hit", "miss", "bypass", "coalesced"):
                self.request(200, version, source)
        self.request(500, "none", "none")
        self.gateway.refused("queue")
        self.gateway.flush()
        self.reward.set(STABLE[:12], 0.5)
        self.training.record(dict.fromkeys(training_names(), 0.5) | {"run_dir": "a text", "icc_nan": math.nan})

    def request(self, status: int, version: str, source: str) -> None:
        exchange = self.gateway.begin("/v1/chat/completions")
        exchange.status, exchange.version, exchange.source = status, version, source
        if status == 200:
            with self.gateway.answer(version, 7, lambda: source) as meter:
                for _ in range(2):
                    meter.take([SimpleNamespace(index=0, token_ids=[1, 2])], is_piece=True)
                    time.sleep(0.002)
        self.gateway.end(exchange)


@pytest.fixture(scope="module")
def emitter(ray_session) -> Iterator[Emitter]:
    emitter = Emitter()
    yield emitter
    emitter.training.close()
    emitter.reward.close()


@pytest.fixture(scope="module")
def prometheus(ray_session, tmp_path_factory) -> Iterator[str]:
    """The URL of a Prometheus that follows the suite's Ray by its service-discovery file."""
    program = shutil.which("prometheus")
    assert program, "the dashboards' tests need prometheus, got none; apt-get install prometheus"
    folder = tmp_path_factory.mktemp("prometheus")
    discovery = Path(ray._private.worker.global_worker.node.get_session_dir_path()) / DISCOVERY
    (folder / "prometheus.yml").write_text(scrape_config(discovery, 1))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    words = ["--config.file", "prometheus.yml", "--storage.tsdb.path", "data", "--web.listen-address", address]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program, *words], cwd=folder, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def answers(client: httpx.Client, query: str) -> bool:
    """Whether a query has a result with numbers in it; a query that is wrong is an error."""
    response = client.get("/api/v1/query", params={"query": query})
    tree = response.json()
    assert tree["status"] == "success", f"{query}: {tree}"
    return any(math.isfinite(float(sample["value"][1])) for sample in tree["data"]["result"])


def test_every_panel_finds_what_the_projects_own_classes_count(emitter, prometheus):
    missing = [(board, *panel) for board in BOARDS for panel in queries(board)]
    began = time.monotonic()
    until = began + LIMIT_S
    with httpx.Client(base_url=prometheus, timeout=10, trust_env=False) as client:
        while missing and time.monotonic() < until:
            emitter.round()
            time.sleep(1)
            try:
                missing = [panel for panel in missing if not answers(client, panel[2])]
            except httpx.ConnectError:  # it starts
                continue
        assert missing == []
        while time.monotonic() < began + FADED_S:
            time.sleep(1)
        told_once = [*queries("training"), ("Reward by version", "ray_grpo_serve_version_reward")]
        assert [query for query in told_once if not answers(client, query[1])] == []
        # The other way round: a finite number of a step is there, a text and nan are not.
        assert not answers(client, "ray_grpo_train_run_dir")
        assert not answers(client, "ray_grpo_train_icc_nan")


def test_the_alerts_are_judged_on_what_ray_really_shows(emitter, prometheus):
    """All step metrics are 0.5: that is too much for two alerts, whatever their windows."""
    due = {"LabelsChurning", "ClustersLopsided"}
    emitter.training.record({"num_clusters": 8.0, "cluster_size_max": 300.0, "texts_known": 400.0, "label_churn": 0.5})
    found: set[str] = set()
    until = time.monotonic() + LIMIT_S
    with httpx.Client(base_url=prometheus, timeout=10, trust_env=False) as client:
        while not due <= found and time.monotonic() < until:
            time.sleep(1)
            (group,) = client.get("/api/v1/rules").json()["data"]["groups"]
            assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}, group
            found = {rule["name"] for rule in group["rules"] if rule["state"] in ("pending", "firing")}
    assert due <= found
    assert "TopicsFading" not in found  # a lift of 0.5 that has not fallen


def test_the_gateways_own_metrics_page_shows_ours_and_nothing_of_the_machines(emitter):
    async def read() -> str:
        return await OwnMetrics().text()

    expected = f'ray_grpo_serve_version_share{{role="stable",version="{STABLE[:12]}"}} 0.75'
    until = time.monotonic() + LIMIT_S
    while expected not in (text := asyncio.run(read())).splitlines() and time.monotonic() < until:
        emitter.round()
        time.sleep(1)
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert expected in samples
    assert [line for line in text.splitlines() if "ray_grpo_" not in line] == []
    assert [line for line in samples if re.search(r"NodeAddress|SessionName|WorkerId|otel_", line)] == []


def test_the_serving_dashboard_leaves_no_metric_out():
    shown = " ".join(query for _, query in queries("serving"))
    ends = [f"{name}_total" for name in COUNTERS] + [f"{name}_bucket" for name in HISTOGRAMS] + list(GAUGES)
    assert [name for name in ends if f"ray_grpo_serve_{name}" not in shown] == []


def test_the_training_dashboard_names_what_a_step_really_holds():
    folders = ("grouping", "learners", "actors", "evaluation", "cluster", "core/watch")
    files = [*(path for folder in folders for path in (ROOT / folder).glob("*.py")), ROOT / "training_run.py"]
    literals = {
        node.value
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {
        word.arg
        for path in files
        for word in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(word, ast.keyword) and word.arg
    }
    memory = {f"memory_{kind.replace(' ', '_')}_bytes" for kind in KINDS.values()}
    assert training_names() - literals - names - memory - {EVALUATED} == set()


@pytest.mark.parametrize("board", sorted(BOARDS))
def test_panels_are_named_explained_and_do_not_overlap(board):
    panels = BOARDS[board]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24

"""`python -m serve.status`: what a person, or a script, learns of a server that runs and of one that does not."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fastapi import FastAPI, HTTPException, Request

from serve.artefacts.artefact import Artefact, record
from serve.artefacts.export import export_run
from serve.gateway.metrics import GatewayMetrics
from serve.gateway.page import page_router
from serve.registry import Registry
from serve.running import running_server
from serve.status import main
from tests.serve.small_server import listening

pytestmark = pytest.mark.fast


@pytest.fixture
def versions(tiny_model, tmp_path) -> list[Artefact]:
    """Three artefacts in tmp_path/serving: stable, canary at a quarter, and one without a role that failed the gate."""
    made = []
    for number in range(3):
        model = Path(shutil.copytree(tiny_model, tmp_path / f"model-{number}"))
        with (model / "chat_template.jinja").open("a") as stream:
            stream.write("\n" * number)
        made.append(export_run(model, tmp_path / "serving"))
    record(made[1], gate={"passed": True})
    record(made[2], gate={"passed": False})
    registry = Registry(tmp_path / "serving")
    registry.compare_and_set(0, "first", stable=made[0].digest)
    registry.compare_and_set(1, "try", canary=made[1].digest, share=0.25)
    return made


@pytest.fixture
def words(tmp_path) -> list[str]:
    """Arguments that name the serving folder, and a port on which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    (tmp_path / "serve.yaml").write_text(f"serve_dir: {tmp_path / 'serving'}\ngateway:\n  port: {port}\n")
    return ["--config", str(tmp_path / "serve.yaml")]


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    """The URL of a small server with the gateway's health and numbers; the key is `open sesame`."""
    metrics, app = GatewayMetrics(), FastAPI()
    metrics.watch(Registry(tmp_path / "serving").routing, lambda: {"state": "half_open", "hits": 5})
    stable = str(Registry(tmp_path / "serving").routing().stable)
    for source in ("hit", "miss", "miss", "miss"):
        exchange = metrics.begin("/v1/completions")
        exchange.status, exchange.source, exchange.version = 200, source, stable
        metrics.end(exchange)

    def allow(request: Request) -> None:
        if request.headers.get("authorization") != "Bearer open sesame":
            raise HTTPException(401)

    async def replicas() -> dict[str, dict[str, int]]:
        return {stable: {"healthy": 1, "wanted": 2}}

    app.include_router(page_router(metrics, "policy", allow, replicas))
    app.get("/health")(lambda: {"status": "ok"})
    with listening(app) as url:
        yield url


def rows_of(output: str) -> list[list[str]]:
    """The table's rows, split into words, without the header."""
    lines = output.splitlines()
    return [line.split() for line in lines[lines.index(next(line for line in lines if "version" in line[:8])) + 1 :]]


def test_without_a_server_it_says_so_and_shows_what_the_registry_holds(versions, words, capsys):
    assert main(words) == 1
    output = capsys.readouterr().out
    assert output.startswith("not serving: nothing answers at http://127.0.0.1:")
    assert "python -m serve" in output
    rows = rows_of(output)
    assert [row[:3] for row in rows[:2]] == [
        [versions[0].digest[:12], "stable", "75%"],
        [versions[1].digest[:12], "canary", "25%"],
    ]
    assert rows[2][:3] == [versions[2].digest[:12], "-", "-"]
    assert ["not" in rows[0], "passed" in rows[1], "failed" in rows[2]] == [True, True, True]


def test_with_a_server_health_and_numbers_stand_above_the_table(versions, words, server, capsys, monkeypatch):
    monkeypatch.setenv("SERVE_API_KEY", "open sesame")
    assert main([*words, "--url", server]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"serving at {server}: ")
    assert "hit ratio 25%, cache breaker half open" in output.splitlines()[0]
    assert rows_of(output)[0][-5:-1] == ["1", "of", "2", "4"]  # replicas, and answers by the stable version


def test_a_server_that_asks_for_a_key_serves_all_the_same(versions, words, server, capsys, monkeypatch):
    monkeypatch.delenv("SERVE_API_KEY", raising=False)
    assert main([*words, "--url", server]) == 0
    assert "set SERVE_API_KEY" in capsys.readouterr().out


def test_json_is_one_object_with_all_of_it(versions, words, server, capsys, monkeypatch):
    monkeypatch.setenv("SERVE_API_KEY", "open sesame")
    assert main([*words, "--url", server, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["serving"], tree["routing"]["epoch"], tree["rollout"]) == (True, 2, None)
    assert tree["versions"][0]["digest"] == versions[0].digest
    assert tree["live"]["sources"] == {"hit": 1, "miss": 3}
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["live"] is None


def test_the_server_that_runs_in_the_folder_is_found_without_its_address(versions, words, server, tmp_path, capsys):
    own = {"url": server, "pid": os.getpid(), "began": psutil.Process().create_time(), "ray_address": ""}
    (tmp_path / "serving" / "serving.json").write_text(json.dumps(own))
    assert main(words) == 0
    assert server in capsys.readouterr().out


def test_a_damaged_version_is_named_with_what_is_wrong(versions, words, capsys):
    (versions[1].folder / "tokenizer.json").unlink()
    assert main(words) == 1
    output = capsys.readouterr().out
    assert f"damaged: {versions[1].digest[:12]}: tokenizer.json is missing" in output
    assert "damaged" in rows_of(output)[1]


def test_something_else_on_the_port_is_not_taken_for_the_server(versions, words, capsys):
    app = FastAPI()
    app.get("/health")(lambda: ["fine"])
    with listening(app) as url:
        assert main([*words, "--url", url]) == 1
    assert "must be a policy server, got another one" in capsys.readouterr().out


def test_an_empty_folder_holds_no_version_yet(words, capsys):
    assert main(words) == 1
    assert "holds no version yet; python -m serve makes one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["gateway.prot=1"], "port"),
        (["--url", "ftp://somewhere"], "--url must be like http://127.0.0.1:8000, got 'ftp://somewhere'"),
        (["--url", "nonsense"], "--url must be like http://127.0.0.1:8000, got 'nonsense'"),
        (["--config", "/nowhere/serve.yaml"], "/nowhere/serve.yaml"),
    ],
)
def test_a_mistake_in_what_was_asked_is_one_sentence_and_status_2(words, more, sentence, capsys):
    assert main([*words, *more]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert sentence in said
    assert said.count("\n") == 1


def test_a_registry_that_cannot_be_read_is_said(versions, words, tmp_path, capsys):
    (tmp_path / "serving" / "registry.json").write_text("{")
    assert main(words) == 1
    assert "registry.json must be a registry" in capsys.readouterr().err


def test_a_record_whose_process_number_is_anothers_now_is_no_server(tmp_path):
    file = tmp_path / "serving.json"
    for began in (psutil.Process().create_time() - 100, "soon", None):
        file.write_text(
            json.dumps({"url": "http://127.0.0.1:1", "pid": os.getpid(), "began": began, "ray_address": ""})
        )
        assert running_server(tmp_path) is None

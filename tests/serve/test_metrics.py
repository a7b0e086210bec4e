"""The gateway's numbers: every request counted once however it ends, and what the page is told of the last seconds."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from core.errors import RunBroken
from serve.gateway.metrics import NUM_RECENT, WINDOW_S, GatewayMetrics, Measured, hit_ratio, quantile, roles
from serve.registry import Routing

pytestmark = pytest.mark.fast
STABLE, CANARY, BEFORE = "a" * 64, "b" * 64, "c" * 64
CHAT = "/v1/chat/completions"


class Clock:
    """Time that moves when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def headers(source: str, version: str = STABLE) -> dict[str, str]:
    return {"x-weights-digest": version, "x-cache": source}


async def whole(request) -> JSONResponse:
    return JSONResponse({"text": "12"}, headers=headers("miss"))


async def broken(request) -> StreamingResponse:
    async def pieces():
        yield b"data: 1\n\n"
        raise ValueError("the engine is gone")

    return StreamingResponse(pieces(), headers=headers("bypass"))


async def refused(request) -> JSONResponse:
    return JSONResponse({"error": "full"}, 429)


def serving(metrics: GatewayMetrics, endpoint) -> Measured:
    return Measured(Starlette(routes=[Route(CHAT, endpoint, methods=["POST"])]), metrics)


async def call(app, path: str = CHAT, send=None) -> list:
    """The messages of one POST."""
    messages: list = []

    async def keep(message) -> None:
        messages.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": "POST", "path": path, "headers": []}
    await app(scope | {"query_string": b""}, receive, send or keep)
    return messages


def test_a_whole_answer_counts_with_its_status_version_and_source():
    metrics = GatewayMetrics()
    asyncio.run(call(serving(metrics, whole)))
    shown = metrics.snapshot()
    assert (shown["requests"], shown["statuses"], shown["sources"]) == (1, {"200": 1}, {"miss": 1})
    assert shown["in_flight"] == 0


def test_a_stream_that_breaks_counts_as_a_500_though_its_status_line_said_200():
    metrics = GatewayMetrics()
    with pytest.raises(ValueError, match="the engine is gone"):
        asyncio.run(call(serving(metrics, broken)))
    assert metrics.snapshot()["statuses"] == {"500": 1}


def test_a_client_that_goes_away_counts_as_499_and_no_longer_as_in_flight():
    metrics = GatewayMetrics()

    async def gone(message) -> None:
        raise OSError("broken pipe")

    with pytest.raises((OSError, ClientDisconnect)):
        asyncio.run(call(serving(metrics, whole), send=gone))
    shown = metrics.snapshot()
    assert (shown["statuses"], shown["in_flight"]) == ({"499": 1}, 0)


def test_a_cancelled_request_counts_as_499():
    metrics = GatewayMetrics()

    async def slow(request) -> JSONResponse:
        await asyncio.sleep(60)
        return JSONResponse({})

    async def cancel() -> int:
        task = asyncio.create_task(call(serving(metrics, slow)))
        await asyncio.sleep(0.01)
        seen = metrics.snapshot()["in_flight"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return seen

    assert asyncio.run(cancel()) == 1
    shown = metrics.snapshot()
    assert (shown["statuses"], shown["in_flight"]) == ({"499": 1}, 0)


def test_a_refusal_has_no_version_and_no_source():
    metrics = GatewayMetrics()
    asyncio.run(call(serving(metrics, refused)))
    metrics.refused("queue")
    shown = metrics.snapshot()
    assert (shown["statuses"], shown["sources"], shown["refusals"]) == ({"429": 1}, {}, {"queue": 1})
    assert shown["hit_ratio"] is None


def test_paths_of_strangers_do_not_become_labels():
    metrics = GatewayMetrics()
    app = serving(metrics, whole)
    for path in ("/v1/models/" + "x" * 50, "/v1/secrets", "/status", "/"):
        asyncio.run(call(app, path))
    routes = {labels[0] for name, labels in metrics._batch.counts if name == "requests"}
    assert routes == {"other"}
    assert metrics.snapshot()["requests"] == 0  # only answers are shown


def answer(metrics: GatewayMetrics, clock: Clock, seconds: float, source: str, version: str = STABLE) -> None:
    exchange = metrics.begin(CHAT)
    clock.now += seconds
    for name, value in headers(source, version).items():
        setattr(exchange, {"x-cache": "source", "x-weights-digest": "version"}[name], value)
    exchange.status = 200
    metrics.end(exchange)


def test_the_last_seconds_are_those_of_the_window_and_totals_are_of_all():
    clock = Clock()
    metrics = GatewayMetrics(clock)
    for _ in range(10):
        answer(metrics, clock, 1.0, "miss")
    clock.now += WINDOW_S
    for _ in range(3):
        answer(metrics, clock, 0.0, "hit")
    now = metrics.snapshot()["now"]
    # The last miss ended WINDOW_S ago and still counts: 3 hits and 1 miss in 30 s.
    assert now["requests_per_s"] == pytest.approx(4 / WINDOW_S)
    assert (now["hit_ratio"], metrics.snapshot()["hit_ratio"]) == (3 / 4, 3 / 13)
    assert (now["p50_s"], now["p99_s"]) == (0.0, 1.0)


def test_a_rate_above_what_is_held_is_still_told_right():
    clock = Clock()
    metrics = GatewayMetrics(clock)
    for _ in range(NUM_RECENT + 1000):
        answer(metrics, clock, 0.001, "hit")  # a thousand a second, more in the window than are held
    assert metrics.snapshot()["now"]["requests_per_s"] == pytest.approx(1000, rel=0.01)


def test_each_version_is_shown_with_role_share_and_answers():
    clock = Clock()
    metrics = GatewayMetrics(clock)
    metrics.watch(lambda: Routing(7, STABLE, CANARY, 0.25, BEFORE), None)
    for version in (STABLE, STABLE, CANARY):
        answer(metrics, clock, 0.1, "miss", version)
    assert metrics.snapshot()["versions"] == [
        {"digest": STABLE, "role": "stable", "share": 0.75, "answers": 2},
        {"digest": CANARY, "role": "canary", "share": 0.25, "answers": 1},
        {"digest": BEFORE, "role": "previous", "share": 0.0, "answers": 0},
    ]


def test_a_registry_that_cannot_be_read_is_said_and_the_rest_is_shown():
    metrics = GatewayMetrics()

    def unreadable() -> Routing:
        raise RunBroken("registry.json must be a registry")

    metrics.watch(unreadable, lambda: {"state": "open", "hits": 3})
    shown = metrics.snapshot()
    assert (shown["versions"], shown["trouble"]) == ([], "registry.json must be a registry")
    assert shown["cache"] == {"state": "open", "hits": 3}


def test_a_stable_version_without_a_canary_has_all_of_the_traffic():
    assert roles(Routing(1, STABLE, None, 0.0)) == [(STABLE, "stable", 1.0)]
    assert roles(Routing(0, None, None, 0.0)) == []


def test_without_ray_the_numbers_for_it_are_dropped_and_the_totals_stay():
    metrics = GatewayMetrics()
    metrics.start()
    asyncio.run(call(serving(metrics, whole)))
    metrics.close()
    assert not metrics._batch.counts
    assert not metrics._batch.observations
    assert metrics.snapshot()["requests"] == 1


def test_quantiles_and_ratios_of_small_numbers():
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.5, 0.99)] == [2.0, 4.0]
    assert quantile([], 0.5) is None
    assert hit_ratio({"hit": 2, "coalesced": 1, "miss": 1}) == 0.75
    assert hit_ratio({}) is None

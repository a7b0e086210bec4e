"""Serving against the machine's own limits, in one run: `python -m benchmarks.bench_serve [SOURCE] [key=value ...]`.

Prints one `name: value` a line: tokens/s through the gateway at 32 clients as a share of the bare engine's on the same
requests (no HTTP, no Ray), streamed and plain; cache-hit requests/s as a share of a Ray Serve deployment that returns a
constant, with p50 and p99 of both; and how many computations 100 equal concurrent requests cost. The machine drifts, so
each pair is measured in turns and medians are compared.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from ray import serve

from core.config import load_config
from policy.bundled import BUNDLED
from serve.artefacts.artefact import Artefact, artefacts_folder, load_artefact
from serve.artefacts.export import export_run
from serve.config import ServeConfig
from serve.registry import Registry
from serve.server import Server

NUM_CLIENTS = 32
NUM_REQUESTS = 96
MAX_TOKENS = 128  # of each answer exactly: ignore_eos
NUM_HITS = 2000
NUM_ROUNDS = 3
PROMPTS = [f"Write one sentence about the number {number}." for number in range(NUM_REQUESTS)]


class Constant:
    """The least a Ray Serve deployment can do: what a cache hit is measured against."""

    async def __call__(self, request: Any) -> dict[str, Any]:
        return {"choices": [{"message": {"role": "assistant", "content": "5"}}]}


async def at_once(num_clients: int, num_requests: int, one: Callable[[int], Awaitable[Any]]) -> list[Any]:
    """What each request gave, in order; num_clients are under way at a time."""
    results: list[Any] = [None] * num_requests
    places = iter(range(num_requests))

    async def client() -> None:
        for place in places:
            results[place] = await one(place)

    await asyncio.gather(*[client() for _ in range(num_clients)])
    return results


def body_of(number: int, **fields: Any) -> dict[str, Any]:
    asked = {"model": "policy", "messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}]}
    return asked | {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True} | fields


async def gateway_rate(url: str, stream: bool) -> float:
    """Tokens/s of NUM_REQUESTS distinct requests that the cache may not answer."""
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(place: int) -> int:
            fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = await client.post(
                "/v1/chat/completions", json=body_of(place, **fields), headers={"cache-control": "no-store"}
            )
            answer.raise_for_status()
            if not stream:
                return int(answer.json()["usage"]["completion_tokens"])
            last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
            return int(json.loads(last[6:])["usage"]["completion_tokens"])

        started = time.monotonic()
        num_tokens = sum(await at_once(NUM_CLIENTS, NUM_REQUESTS, one))
        return num_tokens / (time.monotonic() - started)


async def request_rate(url: str, path: str, body: Callable[[int], dict[str, Any]]) -> tuple[float, list[float]]:
    """(requests/s, seconds of each) of NUM_HITS requests from NUM_CLIENTS clients."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one(place: int) -> float:
            began = time.monotonic()
            answer = await client.post(path, json=body(place))
            answer.raise_for_status()
            return time.monotonic() - began

        started = time.monotonic()
        seconds = await at_once(NUM_CLIENTS, NUM_HITS, one)
        return NUM_HITS / (time.monotonic() - started), seconds


def bare_rate(artefact: Artefact, config: ServeConfig) -> float:
    """Tokens/s of the bare engine, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bare_engine", str(artefact.folder), config.model_dump_json()]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout
    return float(output.split("BARE ")[1].split()[0])


def quantiles_ms(seconds: list[float]) -> tuple[float, float]:
    """(p50, p99) in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return 1000 * cuts[49], 1000 * cuts[98]


async def measure(server: Server, artefact: Artefact, config: ServeConfig) -> None:
    rates: dict[str, list[float]] = {"plain": [], "streamed": [], "hits": [], "constant": []}
    seconds: dict[str, list[float]] = {"hits": [], "constant": []}
    await gateway_rate(server.url, stream=False)  # warm-up
    for _ in range(NUM_ROUNDS):
        rates["plain"].append(await gateway_rate(server.url, stream=False))
        rates["streamed"].append(await gateway_rate(server.url, stream=True))
    await request_rate(server.url, "/v1/chat/completions", lambda place: body_of(place % 16, max_tokens=16))
    for _ in range(NUM_ROUNDS):
        for name, path in (("hits", "/v1/chat/completions"), ("constant", "/constant")):
            rate, each = await request_rate(server.url, path, lambda place: body_of(place % 16, max_tokens=16))
            rates[name].append(rate)
            seconds[name] += each
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        body = body_of(0, seed=time.monotonic_ns() % 2**31)

        async def same(place: int) -> str:
            answer = await client.post("/v1/chat/completions", json=body)
            return str(answer.headers["x-cache"])

        sources = await at_once(100, 100, same)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"gateway_tokens_per_s: {medians['plain']:.0f} (plain), {medians['streamed']:.0f} (streamed)")
    print(f"cache_hit_requests_per_s: {medians['hits']:.0f}, a constant: {medians['constant']:.0f}")
    print(f"cache_hit_share_of_constant: {medians['hits'] / medians['constant']:.2f}")
    for name in ("hits", "constant"):
        print(f"latency_{name}_p50_p99_ms: {quantiles_ms(seconds[name])[0]:.1f} {quantiles_ms(seconds[name])[1]:.1f}")
    print(f"computations_for_100_equal_requests: {sources.count('miss')}")
    measured.update(medians)


measured: dict[str, float] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default=BUNDLED, help="a run folder, a model folder, or smollm2-135m")
    parser.add_argument("--config", default="configs/serve.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    config = load_config(options.config, ["serve_dir=runs/bench-serving", *options.overrides], ServeConfig)
    registry = Registry(config.serve_dir)
    routing = registry.routing()
    artefact = (
        load_artefact(artefacts_folder(config.serve_dir) / routing.stable)
        if routing.stable and options.source == BUNDLED
        else export_run(options.source, config.serve_dir)
    )
    if routing.stable != artefact.digest:
        registry.compare_and_set(routing.epoch, "benchmark", stable=artefact.digest)
    before = bare_rate(artefact, config)
    with Server(config, print) as server:
        serve.run(
            serve.deployment(Constant, max_ongoing_requests=1024).bind(), name="constant", route_prefix="/constant"
        )
        asyncio.run(measure(server, artefact, config))
    after = bare_rate(artefact, config)
    bare = (before + after) / 2
    print(f"bare_engine_tokens_per_s: {before:.0f} before, {after:.0f} after")
    print(f"gateway_share_of_bare_engine: {measured['plain'] / bare:.2f} (plain), {measured['streamed'] / bare:.2f}")


if __name__ == "__main__":
    main()

"""A small real server: the page's routes beside a chat route that answers in OpenAI's events, and no model."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse

from serve.gateway.metrics import GatewayMetrics, Measured
from serve.gateway.page import page_router
from serve.registry import Routing

STABLE, CANARY = "0123456789ab" + "0" * 52, "fedcba987654" + "1" * 52


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The URL of an application that answers on a free port of loopback."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


class SmallServer:
    """Tells what it was asked."""

    def __init__(self) -> None:
        self.metrics = GatewayMetrics()
        self.metrics.watch(lambda: Routing(3, STABLE, CANARY, 0.25), lambda: {"state": "half_open", "hits": 5})
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_given_up = 0
        self.needs_key = False
        self.may_go_on = threading.Event()  # past the first piece
        self.may_go_on.set()
        self.app = FastAPI()
        self.app.include_router(page_router(self.metrics, "policy", self.allow, self.replicas))
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.add_middleware(Measured, metrics=self.metrics)

    async def replicas(self) -> dict[str, dict[str, int]]:
        return {STABLE: {"healthy": 1, "wanted": 2}}

    def allow(self, request: Request) -> None:
        if self.needs_key and request.headers.get("authorization") != "Bearer secret-key":
            raise HTTPException(401, "Authorization must be `Bearer` and a known API key")

    async def chat(self, request: Request) -> Any:
        self.allow(request)
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        prompt = body["messages"][0]["content"]
        if prompt == "too long":
            return JSONResponse({"error": {"message": "max_tokens must be at most 8, got 99"}}, 400)
        headers = {"x-weights-digest": STABLE, "x-cache": "hit" if len(self.asked) % 2 == 0 else "miss"}
        return StreamingResponse(self.events(prompt), media_type="text/event-stream", headers=headers)

    async def events(self, prompt: str) -> AsyncIterator[str]:
        try:
            for piece in [prompt[:5], prompt[5:]] if prompt != "for ever" else ["on "] * 10_000:
                yield f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]}, ensure_ascii=False)}\n\n"
                await asyncio.sleep(0.01)
                while not self.may_go_on.is_set():
                    await asyncio.sleep(0.01)
            if prompt != "break off":
                yield f"data: {json.dumps({'choices': [{'delta': {}, 'finish_reason': 'stop'}]})}\n\ndata: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.num_given_up += 1
            raise

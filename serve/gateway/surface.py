"""The public HTTP surface: OpenAI's protocol by vLLM's classes, keys, limits, versions and the cache around them."""

import asyncio
import contextlib
import functools
import math
import uuid
from argparse import Namespace
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import ray
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from cluster.session import NAMESPACE
from core.errors import RunBroken
from serve.cache.responses import ResponseCache
from serve.config import ServeConfig
from serve.gateway.limits import BodyLimit, check_request
from serve.gateway.metrics import GatewayMetrics, Measured
from serve.gateway.page import page_router
from serve.gateway.rate_limit import RateLimiter
from serve.gateway.remote_engine import Overloaded, ReplicaLost
from serve.gateway.replica_counts import ReplicaCounts
from serve.gateway.router import Router
from serve.gateway.scope import SCOPE, Scope
from serve.gateway.version import Version
from serve.names import application_of
from serve.registry import Registry
from serve.rollout.traffic import BOARD, TrafficLog, report_forever
from serve.tenants import Tenants

LOCAL = "local"  # the tenant where no keys are configured
RETRY_AFTER_S = "1"


def build_gateway(config: ServeConfig, cache_url: str | None) -> FastAPI:
    """The gateway's FastAPI application; its first version is ready when this returns. cache_url None: no cache."""
    gateway = Gateway(config, cache_url)
    app = FastAPI(title="Policy server", version="1", docs_url=None, redoc_url=None, lifespan=gateway.lifespan)
    init_exception_handler(app)
    app.exception_handler(Overloaded)(_overloaded)
    app.exception_handler(ReplicaLost)(_lost)
    app.exception_handler(RunBroken)(_lost)
    app.add_middleware(BodyLimit, max_bytes=config.gateway.max_body_bytes)
    app.add_middleware(Measured, metrics=gateway.metrics)  # the last added is the outermost
    app.state.metrics = gateway.metrics
    app.state.args = Namespace(log_error_stack=False)  # read by vLLM's handlers of errors
    replicas = ReplicaCounts(gateway.router.routing)
    app.include_router(page_router(gateway.metrics, config.gateway.model_name, gateway.tenant, replicas.read))
    app.post("/v1/chat/completions")(gateway.chat)
    app.post("/v1/completions")(gateway.complete)
    app.get("/v1/models")(gateway.models)
    app.get("/health")(gateway.health)
    return app


async def _overloaded(request: Request, error: Exception) -> JSONResponse:
    request.app.state.metrics.refused("queue")
    return error_response(429, "the server must have room in its queue, got none; try again", RETRY_AFTER_S)


async def _lost(request: Request, error: Exception) -> JSONResponse:
    return error_response(503, str(error), RETRY_AFTER_S)


def error_response(status: int, message: str, retry_after_s: str | None = None) -> JSONResponse:
    """An error in OpenAI's form."""
    kind = {401: "AuthenticationError", 429: "RateLimitError", 503: "ServiceUnavailableError"}[status]
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status, {"retry-after": retry_after_s} if retry_after_s else None)


class Stream(StreamingResponse):
    """A stream that closes `ending` when it is over, also where its first line never went out."""

    ending = contextlib.ExitStack()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self.ending:
            await super().__call__(scope, receive, send)


class Gateway:
    """What the routes do."""

    def __init__(self, config: ServeConfig, cache_url: str | None) -> None:
        self._config = config
        self.router = Router(Registry(config.serve_dir), config.gateway.routing_lease_s)
        self._cache = ResponseCache(config.cache, cache_url) if cache_url else None
        link = self._cache.link if self._cache else None
        self._limiter = RateLimiter(config.gateway, link, config.cache.namespace)
        self._traffic = TrafficLog()
        self.metrics = GatewayMetrics()
        cache = self._cache
        self.metrics.watch(self.router.routing, functools.partial(_counts, cache) if cache else None)
        self.metrics.start()
        self._tenants = Tenants.load(config.gateway.api_keys) if config.gateway.api_keys else None
        self._versions: dict[str, Version] = {}
        self._building = asyncio.Lock()
        stable = self.router.digest_for("")
        self._versions[stable] = self._build(stable)  # ready before the first request

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Tells the controller about the versions' traffic for as long as the application runs."""
        reporting = asyncio.create_task(
            report_forever(self._traffic, functools.partial(ray.get_actor, BOARD, NAMESPACE))
        )
        try:
            yield
        finally:
            reporting.cancel()
            self.metrics.close()
            if self._cache:
                await self._cache.aclose()

    async def chat(self, request: ChatCompletionRequest, raw_request: Request) -> Response:
        """OpenAI's chat completions, streamed or whole."""
        return await self._answer(request, raw_request)

    async def complete(self, request: CompletionRequest, raw_request: Request) -> Response:
        """OpenAI's text completions, streamed or whole."""
        return await self._answer(request, raw_request)

    async def models(self, raw_request: Request) -> Response:
        """The one model, under its public name."""
        self.tenant(raw_request)
        version = await self._version(self.router.digest_for(""))
        shown = await version.models.show_available_models()
        return JSONResponse(shown.model_dump())

    async def health(self) -> Response:
        """200 while a version is registered; the replicas behind it are Ray Serve's to watch."""
        return JSONResponse({"status": "ok", "version": self.router.digest_for("")})

    async def _answer(self, request: Any, raw_request: Request) -> Response:
        tenant = self.tenant(raw_request)
        admission = await self._limiter.admit(tenant)
        if not admission.allowed:
            self.metrics.refused("rate")
            wait_s = math.ceil(admission.retry_after_s)
            return error_response(429, f"a tenant must keep to its rate; try again in {wait_s} s", str(wait_s))
        check_request(request, self._config.gateway.max_choices)
        session = raw_request.headers.get("x-session-id") or request.session_id or request.user or uuid.uuid4().hex
        digest = self.router.digest_for(f"{tenant}/{session}")
        self._traffic.begin(digest)
        ending = contextlib.ExitStack()
        ending.callback(self._traffic.end, digest)
        with ending:
            response = await self._answer_by(await self._version(digest), request, raw_request, tenant)
            if isinstance(response, Stream):
                response.ending = ending.pop_all()
        return response

    async def _answer_by(self, version: Version, request: Any, raw_request: Request, tenant: str) -> Response:
        scope = _scope_of(tenant, self.metrics, raw_request, request)
        SCOPE.set(scope)
        if isinstance(request, ChatCompletionRequest):
            made = await version.chat.create_chat_completion(request, raw_request)
        else:
            made = await version.completion.create_completion(request, raw_request)
        if isinstance(made, ErrorResponse):
            return JSONResponse(made.model_dump(), made.error.code or 500)
        headers = {"x-weights-digest": version.digest}
        if not request.stream:
            return JSONResponse(made.model_dump(), headers=headers | {"x-cache": scope.source})
        first = await anext(made)
        if scope.error is not None:  # before the first token it is a status, not a line in a stream
            await made.aclose()
            raise scope.error
        headers["x-cache"] = scope.source
        return Stream(_resumed(first, made), media_type="text/event-stream", headers=headers)

    def tenant(self, raw_request: Request) -> str:
        if self._tenants is None:
            return LOCAL
        tenant = self._tenants.tenant_of(raw_request.headers.get("authorization"))
        if tenant is None:
            self.metrics.refused("key")
            raise HTTPException(401, "Authorization must be `Bearer` and a known API key, got none or another")
        return tenant

    async def _version(self, digest: str) -> Version:
        """The version, made in a thread where it is met for the first time; those that serve no more are forgotten."""
        if digest in self._versions:
            return self._versions[digest]
        async with self._building:
            if digest not in self._versions:
                self._versions[digest] = await asyncio.to_thread(self._build, digest)
                routing = self.router.routing()
                for old in set(self._versions) - {digest, routing.stable, routing.canary, routing.previous}:
                    del self._versions[old]  # answers under way hold it themselves
            return self._versions[digest]

    def _build(self, digest: str) -> Version:
        handle = serve.get_app_handle(application_of(digest))
        return Version(self._config, digest, handle, self._cache, self._traffic)


def _counts(cache: ResponseCache) -> dict[str, Any]:
    return asdict(cache.state)


def _scope_of(tenant: str, metrics: GatewayMetrics, raw_request: Request, request: Any) -> Scope:
    control = ",".join(raw_request.headers.getlist("cache-control")).lower()
    has_tools = bool(getattr(request, "tools", None))  # a call may have effects: it must be the model's own, each time
    return Scope(
        tenant,
        metrics,
        may_read="no-cache" not in control and not has_tools,
        may_write="no-store" not in control and not has_tools,
    )


async def _resumed(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for line in rest:
        yield line

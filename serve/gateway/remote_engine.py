"""vLLM's engine as the gateway sees it: same interface, but the engine runs in Ray Serve replicas, behind the cache.

vLLM's own OpenAI classes stand on this interface, so the whole protocol is theirs. An answer comes, in this order,
from an equal request under way, from the cache, or from a replica; where a replica dies, another goes on.
"""

import asyncio
import copy
import functools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NoReturn

import vllm
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.async_utils import merge_async_iterators
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor

from serve.cache.answer import answer_to, decode_answer, encode_answer, merged
from serve.cache.flight import Flight
from serve.cache.key import SHARED, cache_key, is_deterministic
from serve.cache.responses import ResponseCache
from serve.config import ServeConfig
from serve.gateway.continuation import Continuation
from serve.gateway.scope import SCOPE, Scope
from serve.rollout.traffic import TrafficLog

WHOLE = ("stop", "length", "repetition")  # how an answer ends that is the model's own


class GivenUp(RuntimeError):
    """The engine ended an answer without the model's doing: it is going down, or failed on it."""


REPLICA_GONE = (RayActorError, ReplicaUnavailableError, EngineDeadError, GivenUp)
MAX_TRIES = 6
_logger = logging.getLogger(__name__)
FIRST_WAIT_S = 0.1  # before the second try; doubles


class Overloaded(RuntimeError):
    """Every replica's queue is full; the gateway answers 429."""


class ReplicaLost(RuntimeError):
    """Replicas died under one request again and again, or under an answer that cannot be carried on; a 503."""


class RemoteEngine(EngineClient):
    """One version's engine."""

    def __init__(
        self,
        config: ServeConfig,
        digest: str,
        vllm_config: VllmConfig,
        handle: DeploymentHandle,
        cache: ResponseCache | None,
        traffic: TrafficLog,
    ) -> None:
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._config, self._digest, self._handle, self._cache = config, digest, handle, cache
        self._traffic = traffic
        self._flights: dict[str, Flight[RequestOutput]] = {}

    async def generate(  # type: ignore[override]
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer's pieces, or its whole where sampling_params ask for no pieces.

        Waits for the engine; unblocked by its tokens, or by ReplicaLost and Overloaded.
        """
        scope = SCOPE.get()
        ids: list[int] = prompt["prompt_token_ids"]
        pieces: list[RequestOutput] = []
        streamed = sampling_params.output_kind != RequestOutputKind.FINAL_ONLY
        try:
            with scope.metrics.answer(self._digest, len(ids), lambda: scope.source) as meter:
                async for piece in self._answer(scope, ids, sampling_params, request_id):
                    meter.take(piece.outputs, is_piece=streamed)
                    if streamed:
                        yield answer_to(piece, request_id, ids)
                    else:
                        pieces.append(piece)
        except Exception as error:
            scope.error = error  # vLLM makes a line of the stream of it; the gateway may still make a status
            raise
        if pieces:
            yield answer_to(pieces[0] if len(pieces) == 1 else merged(pieces), request_id, ids)

    async def _answer(
        self, scope: Scope, ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        if self._cache is None or not is_deterministic(params) or not (scope.may_read and scope.may_write):
            scope.sources.append("bypass")
            async for piece in self._computed(ids, params, request_id):
                yield piece
            return
        tenant = SHARED if self._config.cache.shared_between_tenants else scope.tenant
        key = cache_key(self._config.cache.namespace, tenant, self._digest, vllm.__version__, ids, params)
        kept = None if key in self._flights else await self._kept(key)
        if kept is not None:
            scope.sources.append("hit")
            yield kept
            return
        flight = self._flights.get(key)
        scope.sources.append("coalesced" if flight is not None and flight.is_open else "miss")
        if flight is None or not flight.is_open:
            flight = self._flights[key] = Flight(self._filling(key, ids, params, request_id))
            flight.when_over(functools.partial(self._forget, key, flight))
        async for piece in flight.follow():
            yield piece

    def _forget(self, key: str, flight: Flight[RequestOutput]) -> None:
        """Takes a flight that is over off the list, unless a newer one has its place."""
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def _kept(self, key: str) -> RequestOutput | None:
        return self._decoded(await self._cache.get(key)) if self._cache else None

    @staticmethod
    def _decoded(value: bytes | None) -> RequestOutput | None:
        try:
            return decode_answer(value) if value is not None else None
        except ValueError:
            return None  # another release's form; replaced when the answer is computed

    async def _filling(
        self, key: str, ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Computes for every process: claims the key, or waits for the one that has it; keeps the whole answer."""
        cache = self._cache
        assert cache is not None
        token = await cache.claim(key)
        try:
            kept = await self._kept(key) if token is not None else self._decoded(await cache.await_other(key))
            if kept is not None:  # another process was quicker
                yield kept
                return
            pieces = []
            async for piece in self._computed(ids, params, request_id):
                pieces.append(piece)
                yield piece
            whole = merged(pieces)
            is_cut = any(piece.metrics is not None for piece in pieces)  # set on an answer that was cut
            if not is_cut and all(choice.finish_reason in WHOLE for choice in whole.outputs):
                await cache.put(key, encode_answer(whole))
        finally:
            if token is not None:
                await cache.release(key, token)

    async def _computed(self, ids: list[int], params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        """Pieces from replicas, counted among the version's traffic unless the client gives up or was refused."""
        started = time.monotonic()
        first_s: float | None = None
        try:
            async for piece in self._choices(ids, params, request_id):
                first_s = first_s or time.monotonic() - started
                yield piece
        except (VLLMClientError, ValueError, Overloaded, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception:
            self._traffic.record(self._digest, first_s, is_error=True)
            raise
        self._traffic.record(self._digest, first_s, is_error=False)

    async def _choices(self, ids: list[int], params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        """Each of n choices is a request of its own, with the seed vLLM would give it."""
        streamed = params.output_kind != RequestOutputKind.FINAL_ONLY
        choices = []
        for index in range(params.n):
            own = copy.copy(params)
            own.n, own.seed = 1, None if params.seed is None else params.seed + index
            own.output_kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
            make = self._stream if streamed else self._whole
            choices.append(make(ids, own, f"{request_id}-{index}"))
        num_ended = 0
        async for index, output in merge_async_iterators(*choices):
            output.outputs[0].index = index
            num_ended += output.outputs[0].finish_reason is not None
            output.finished = num_ended == params.n
            yield output

    async def _whole(self, ids: list[int], params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        for number in range(MAX_TRIES):
            response = self._handle.whole.remote(ids, params, f"{request_id}-{number}")
            try:
                yield _finished(await response)
                return
            except asyncio.CancelledError:
                response.cancel()
                raise
            except Exception as error:
                await _wait_before_next(number, _cause_of(error))

    async def _stream(self, ids: list[int], params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        state = Continuation(self.renderer.tokenizer, ids, params)
        for number in range(MAX_TRIES):
            if state.num_cuts and state.max_tokens < 1:
                nothing: list[Any] | None = [] if params.logprobs is not None else None
                end = CompletionOutput(0, "", [], None, nothing, finish_reason="length")
                yield _piece(state.take(end), is_cut=True)
                return
            stream = self._handle.options(stream=True).stream.remote(
                ids + state.tokens, state.params(), f"{request_id}-{number}"
            )
            try:
                async for batch in stream:
                    for output in batch:
                        choice = state.take(_finished(output).outputs[0])
                        yield _piece(choice, output, is_cut=state.num_cuts > 0)
                        if choice.finish_reason is not None:
                            return
                return
            except Exception as error:
                cause = _cause_of(error)
                state.cut()
                if not state.can_go_on:
                    raise ReplicaLost("a structured answer cannot be carried on by another replica") from cause
                await _wait_before_next(number, cause)
            finally:
                stream.cancel()

    # -- what else vLLM's classes may ask of an engine -----------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False

    @property
    def dead_error(self) -> BaseException:
        return ReplicaLost("the engine is gone")

    async def abort(self, request_id: Any) -> None:
        """Nothing: a request is given up by closing its generator."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Nothing: replicas count for themselves."""

    async def check_health(self) -> None:
        """Nothing: Ray Serve asks the replicas."""


def _not_here(name: str) -> Any:
    def refuse(self: RemoteEngine, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is no call of the gateway: replicas are managed by Ray Serve")

    return refuse


# The rest of the interface manages an engine; no route leads there.
for _name in sorted(RemoteEngine.__abstractmethods__):
    setattr(RemoteEngine, _name, _not_here(_name))
RemoteEngine.__abstractmethods__ = frozenset()


def _finished(output: RequestOutput) -> RequestOutput:
    """The output; GivenUp where the engine ended it without the model's doing."""
    reason = output.outputs[0].finish_reason
    if reason is not None and reason not in WHOLE:
        raise GivenUp(f"an answer must end by {', '.join(WHOLE)}, got {reason} from the engine")
    return output


def _cause_of(error: Exception) -> Exception:
    """The error, where another replica may do better; else raises what the gateway is to answer with."""
    if isinstance(error, BackPressureError):
        raise Overloaded(str(error)) from error
    if isinstance(error, DeploymentUnavailableError):
        raise ReplicaLost("the version's replicas must come up, but they do not; see Ray Serve's log") from error
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, REPLICA_GONE):
        return cause
    if isinstance(cause, VLLMClientError | ValueError):  # the client's mistake, found by the engine
        raise cause from None
    _logger.error("a replica must answer, got %s", error)
    raise RuntimeError("the engine failed on this request") from None


def _piece(choice: CompletionOutput, output: RequestOutput | None = None, is_cut: bool = False) -> RequestOutput:
    piece = output or RequestOutput("", None, [], None, [choice], finished=False)
    piece.outputs = [choice]
    piece.metrics = "cut" if is_cut else None  # type: ignore[assignment]
    return piece


async def _wait_before_next(number: int, error: Exception) -> None:
    if number == MAX_TRIES - 1:
        raise ReplicaLost(f"{MAX_TRIES} replicas died under one request, the last one with: {error}") from error
    await asyncio.sleep(FIRST_WAIT_S * 2**number)

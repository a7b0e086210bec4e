"""What a body may be, told in 400s that name the field; the rest of the validation is vLLM's."""

import contextlib
import difflib
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Fields of OpenAI's protocol that change nothing here; clients set them by themselves.
IGNORED = frozenset(
    {
        "metadata",
        "modalities",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
        "web_search_options",
    }
)
MAX_ANSWERS = 64  # of one request: prompts x n
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256


class TooLarge(Exception):
    """A body above the limit."""


class BodyLimit:
    """ASGI middleware: 413 for a body above max_bytes, counted as it arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes, has_begun, is_refused = 0, False, False

        async def counted() -> Message:
            nonlocal num_bytes, is_refused
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes and not is_refused:
                is_refused = True
                if not has_begun:
                    await self._refuse(send)
            if is_refused:
                raise TooLarge
            return message

        async def passed_on(message: Message) -> None:
            nonlocal has_begun
            if not is_refused:  # what the application makes of TooLarge is of no interest any more
                has_begun = True
                await send(message)

        with contextlib.suppress(TooLarge):
            await self._app(scope, counted, passed_on)

    async def _refuse(self, send: Send) -> None:
        body = b'{"error":{"message":"a body must have at most %d bytes; send a shorter prompt",' % self._max_bytes
        body += b'"type":"RequestEntityTooLarge","param":null,"code":413}}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def check_request(request: Any, max_choices: int) -> None:
    """HTTPException 400 for a field that is unknown, or out of the bounds this server sets."""
    for name in request.model_extra or {}:
        if name not in IGNORED:
            near = difflib.get_close_matches(name, type(request).model_fields, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise HTTPException(400, f"{name} must be a field of this request, got an unknown one{hint}")
    choices = request.n if request.n is not None else 1
    if not 1 <= choices <= max_choices:
        raise HTTPException(400, f"n must be 1 to {max_choices}, got {choices}")
    if request.use_beam_search:
        raise HTTPException(400, "use_beam_search must be false, got true; sample n choices instead")
    prompts: Any = getattr(request, "prompt", None)
    is_several = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    num_answers = choices * (len(prompts) if is_several else 1)
    if num_answers > MAX_ANSWERS:
        raise HTTPException(400, f"prompts x n must be at most {MAX_ANSWERS} answers a request, got {num_answers}")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS or any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise HTTPException(
            400,
            f"stop must hold at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters each, "
            f"got {len(stops)} of {min(map(len, stops))} to {max(map(len, stops))}",
        )

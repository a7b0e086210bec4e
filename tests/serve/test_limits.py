"""What a body may be."""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request

from serve.gateway.limits import BodyLimit, check_request

pytestmark = pytest.mark.fast


def asked(body: Any, **headers: str) -> httpx.Response:
    """The answer of an application behind a limit of 1000 bytes that says how many it read."""
    app = FastAPI()
    app.add_middleware(BodyLimit, max_bytes=1000)

    @app.post("/")
    async def read(request: Request) -> int:
        try:
            return len(await request.body())
        except Exception as error:  # as FastAPI does where it reads a body for itself
            raise HTTPException(400, "There was an error parsing the body") from error

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/", content=body, headers=headers)

    return asyncio.run(ask())


async def parts(num: int) -> Any:
    for _ in range(num):
        yield b"x" * 100


def test_a_body_up_to_the_limit_passes_and_one_byte_more_is_a_413_in_openais_form():
    assert asked(b"x" * 1000).json() == 1000
    answer = asked(b"x" * 1001)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == 413
    assert "1000 bytes" in answer.json()["error"]["message"]


def test_a_body_without_a_length_is_counted_as_it_comes():
    assert asked(parts(10)).json() == 1000
    assert asked(parts(11)).status_code == 413


def request(**fields: Any) -> Any:
    class Fields(SimpleNamespace):
        model_fields = ("temperature", "max_tokens", "n", "stop")

    return Fields(**{"model_extra": {}, "n": 1, "use_beam_search": False, "stop": [], "prompt": None} | fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_extra": {"temprature": 1}}, "did you mean temperature"),
        ({"model_extra": {"qqqq": 1}}, "qqqq must be a field"),
        ({"n": 17}, "n must be 1 to 16, got 17"),
        ({"n": 0}, "n must be 1 to 16, got 0"),
        ({"use_beam_search": True}, "use_beam_search must be false"),
        ({"prompt": ["a"] * 65}, "at most 64 answers a request, got 65"),
        ({"prompt": ["a"] * 5, "n": 16}, "at most 64 answers a request, got 80"),
        ({"stop": ""}, "stop must hold"),
        ({"stop": ["x"] * 17}, "stop must hold at most 16"),
        ({"stop": ["x" * 257]}, "1 to 256 characters"),
    ],
)
def test_a_field_out_of_bounds_is_named_with_the_bound(fields, words):
    with pytest.raises(HTTPException, match=words) as caught:
        check_request(request(**fields), max_choices=16)
    assert caught.value.status_code == 400


def test_what_openai_clients_send_by_themselves_is_let_through():
    check_request(request(model_extra={"store": True, "metadata": {}, "service_tier": "auto"}), max_choices=16)
    check_request(request(n=None, stop="end", prompt=[1, 2, 3] * 100), max_choices=16)

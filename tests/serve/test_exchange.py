"""Tokens and times read off an answer's pieces, as they reach the client."""

import asyncio
from types import SimpleNamespace

import pytest

from serve.gateway.metrics import GatewayMetrics

pytestmark = pytest.mark.fast
STABLE = "a" * 64


class Clock:
    """Time that moves when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pieces(*sizes: int, index: int = 0) -> list:
    """The choices of one output, one of each size."""
    return [SimpleNamespace(index=index + place, token_ids=[0] * size) for place, size in enumerate(sizes)]


def test_first_token_and_time_a_token_are_those_the_client_sees():
    clock = Clock()
    metrics = GatewayMetrics(clock)
    with metrics.answer(STABLE, 7, lambda: "miss") as meter:
        clock.now += 0.5
        meter.take(pieces(0), is_piece=True)  # no token yet
        clock.now += 0.5
        meter.take(pieces(2), is_piece=True)
        clock.now += 3.0
        meter.take(pieces(3), is_piece=True)
        clock.now += 9.0  # the end, without a token
        meter.take(pieces(0), is_piece=True)
    assert meter.first_s == 1.0
    assert meter.per_token_s == 1.0  # 3 s for the 3 tokens after the first piece
    assert metrics.snapshot()["tokens"] == {"prompt": 7, "answer": 5}


def test_choices_that_come_side_by_side_are_not_slower_for_it():
    clock = Clock()
    metrics = GatewayMetrics(clock)
    with metrics.answer(STABLE, 1, lambda: "miss") as meter:
        for _ in range(3):
            clock.now += 1.0
            meter.take(pieces(1, 1), is_piece=True)
    # Two choices of three tokens each: 2 s for the two later tokens of either.
    assert (meter.per_token_s, meter.tokens.total()) == (1.0, 6)


def test_an_answer_handed_over_whole_has_tokens_but_no_time_of_a_first_one():
    clock = Clock()
    metrics = GatewayMetrics(clock)
    with metrics.answer(STABLE, 4, lambda: "miss") as meter:
        clock.now += 2.0
        meter.take(pieces(5), is_piece=False)
    assert (meter.first_s, meter.per_token_s) == (None, None)
    assert metrics.snapshot()["tokens"] == {"prompt": 4, "answer": 5}


def test_an_answer_given_up_half_way_counts_the_tokens_that_came():
    metrics = GatewayMetrics()

    def read() -> None:
        with metrics.answer(STABLE, 4, lambda: "bypass") as meter:
            meter.take(pieces(3), is_piece=True)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        read()
    assert metrics.snapshot()["tokens"]["answer"] == 3

"""One computation for all who ask the same: order, late followers, errors, and who cancels it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from serve.cache.flight import Flight

pytestmark = pytest.mark.fast


class Source:
    """A computation that gives a letter whenever it is let."""

    def __init__(self, letters: str, fails: bool = False) -> None:
        self.letters, self.fails = letters, fails
        self.gate = asyncio.Semaphore(0)
        self.num_started, self.was_cancelled = 0, False

    async def __aiter__(self) -> AsyncIterator[str]:
        self.num_started += 1
        try:
            for letter in self.letters:
                await self.gate.acquire()
                yield letter
            if self.fails:
                raise RuntimeError("the replica is gone")
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    def let(self, num: int) -> None:
        for _ in range(num):
            self.gate.release()


async def text_of(flight: Flight[str]) -> str:
    return "".join([letter async for letter in flight.follow()])


def test_a_hundred_followers_share_one_computation_and_see_all_of_it_in_order():
    async def run() -> tuple[list[str], int]:
        source = Source("answer")
        flight = Flight(aiter(source))
        early = [asyncio.create_task(text_of(flight)) for _ in range(50)]
        source.let(3)
        await asyncio.sleep(0.01)
        late = [asyncio.create_task(text_of(flight)) for _ in range(50)]
        source.let(3)
        return await asyncio.gather(*early, *late), source.num_started

    texts, num_started = asyncio.run(run())
    assert texts == ["answer"] * 100
    assert num_started == 1


def test_a_follower_who_leaves_does_not_take_the_computation_from_the_others():
    async def run() -> str:
        source = Source("answer")
        flight = Flight(aiter(source))
        leaver, stayer = (asyncio.create_task(text_of(flight)) for _ in range(2))
        source.let(2)
        await asyncio.sleep(0.01)
        leaver.cancel()  # the one who came first
        await asyncio.sleep(0.01)
        assert not source.was_cancelled
        source.let(4)
        return await stayer

    assert asyncio.run(run()) == "answer"


def test_the_last_follower_takes_the_computation_along_and_nobody_joins_it_any_more():
    async def run() -> None:
        source = Source("answer")
        flight = Flight(aiter(source))
        followers = [asyncio.create_task(text_of(flight)) for _ in range(2)]
        source.let(1)
        await asyncio.sleep(0.01)
        assert flight.is_open
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        assert not flight.is_open  # at once: a request of the next moment starts its own
        await asyncio.sleep(0.01)
        assert source.was_cancelled

    asyncio.run(run())


def test_an_error_reaches_every_follower_after_the_pieces_before_it():
    async def run() -> list[object]:
        source = Source("ab", fails=True)
        flight = Flight(aiter(source))
        seen: list[str] = []

        async def follow() -> None:
            async for letter in flight.follow():
                seen.append(letter)

        tasks = [asyncio.create_task(follow()) for _ in range(3)]
        source.let(2)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert not flight.is_open
        assert sorted(seen) == ["a", "a", "a", "b", "b", "b"]
        return list(errors)

    errors = asyncio.run(run())
    assert [str(error) for error in errors] == ["the replica is gone"] * 3


def test_what_is_to_happen_when_it_is_over_happens_also_where_it_never_began():
    async def run() -> list[str]:
        over: list[str] = []
        flights = [Flight(aiter(Source(""))), Flight(aiter(Source("answer")))]
        for name, flight in zip(("ended", "never begun"), flights, strict=True):
            flight.when_over(lambda name=name: over.append(name))
        follower = asyncio.create_task(text_of(flights[1]))
        follower.cancel()
        flights[1]._task.cancel()
        await text_of(flights[0])
        await asyncio.sleep(0.01)
        return over

    assert sorted(asyncio.run(run())) == ["ended", "never begun"]

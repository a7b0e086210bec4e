"""Single flight: one computation of an answer, and all who wait for the same one."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

Piece = TypeVar("Piece")


class Flight(Generic[Piece]):
    """A stream that runs once and is followed by many, each from its beginning.

    It goes on while anybody follows and is cancelled with its last follower. It runs outside the context of the request
    that started it: Ray Serve would cancel it with that request, under the others' feet.
    """

    def __init__(self, source: AsyncIterator[Piece]) -> None:
        self._pieces: list[Piece] = []
        self._error: BaseException | None = None
        self._done = False
        self._news = asyncio.Event()
        self._num_followers = 0
        self._task = asyncio.create_task(self._run(source), context=contextvars.Context())

    def when_over(self, call: Callable[[], object]) -> None:
        """Calls `call` when the computation has ended, one way or another; also where it never began."""
        self._task.add_done_callback(lambda _: call())

    @property
    def is_open(self) -> bool:
        """Whether a new request may follow: not failed, not abandoned."""
        return self._error is None and not self._task.cancelling()

    async def follow(self) -> AsyncIterator[Piece]:
        """Every piece in order; raises what the computation raised. Waits for the next piece."""
        self._num_followers += 1
        place = 0
        try:
            while True:
                while place < len(self._pieces):
                    yield self._pieces[place]
                    place += 1
                if self._error is not None:
                    raise self._error
                if self._done:
                    return
                news = self._news
                await news.wait()
        finally:
            self._num_followers -= 1
            if self._num_followers == 0 and not self._done:
                self._task.cancel()

    async def _run(self, source: AsyncIterator[Piece]) -> None:
        try:
            async for piece in source:
                self._pieces.append(piece)
                self._wake()
        except asyncio.CancelledError as error:
            self._error = error
            raise
        except Exception as error:  # every follower is told, each in its own request
            self._error = error
        finally:
            self._done = True
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

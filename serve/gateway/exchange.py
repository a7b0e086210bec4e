"""One request, and one answer, as they pass by: what can be read off their messages and pieces."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from starlette.types import Message

CLIENT_GONE = 499  # nginx's word for a client that did not wait for the end


@dataclass
class Exchange:
    """One request on its way, as its ASGI messages show it."""

    route: str
    began: float
    status: int = CLIENT_GONE  # until the answer is whole
    version: str = "none"  # digest
    source: str = "none"
    announced: int = CLIENT_GONE  # the status line's; counts once the body has ended

    def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.announced = message["status"]
            headers = {name.lower(): value.decode("latin-1") for name, value in message.get("headers", ())}
            self.version = headers.get(b"x-weights-digest", "none")
            self.source = headers.get(b"x-cache", "none")
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.status = self.announced


@dataclass
class AnswerMeter:
    """Reads tokens and times off one answer's pieces: a context manager around the loop that passes them on."""

    done: Callable[[Self], None]
    digest: str
    num_prompt_tokens: int
    source: Callable[[], str]
    clock: Callable[[], float]
    tokens: Counter[int] = field(default_factory=Counter)  # by choice
    began: float = 0.0
    first_s: float | None = None  # to the first token; None: the answer was not passed on in pieces
    _first_at: float = 0.0
    _last_at: float = 0.0
    _first_tokens: Counter[int] = field(default_factory=Counter)

    def __enter__(self) -> Self:
        self.began = self.clock()
        return self

    def take(self, choices: Iterable[Any], is_piece: bool) -> None:
        """The choices of one of vLLM's RequestOutputs; is_piece: the client sees it at once."""
        num_new = 0
        for choice in choices:
            num_new += len(choice.token_ids)
            self.tokens[choice.index] += len(choice.token_ids)
        if not is_piece or not num_new:
            return
        self._last_at = self.clock()
        if self.first_s is None:
            self.first_s, self._first_at = self._last_at - self.began, self._last_at
            self._first_tokens = self.tokens.copy()

    @property
    def per_token_s(self) -> float | None:
        """Seconds a token after the first piece, in the longest choice; None where no more came."""
        if self.first_s is None:
            return None
        num_later = max((self.tokens - self._first_tokens).values(), default=0)
        return (self._last_at - self._first_at) / num_later if num_later else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done(self)

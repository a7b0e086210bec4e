"""Steady traffic from real OpenAI clients, and what became of every request."""

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from openai import OpenAI

HELLO = [{"role": "user", "content": "Hello, who is there?"}]


@dataclass(frozen=True)
class Outcome:
    """One request as its client saw it."""

    began: float
    ended: float
    streamed: bool
    digest: str  # of the weights that answered
    text: str
    error: str | None

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Load:
    """Clients that ask without a pause, each with the OpenAI client's own retries; a context manager."""

    def __init__(self, url: str, num_plain: int = 3, num_streamed: int = 3, **fields: Any) -> None:
        extra = {"extra_body": {"min_tokens": fields.pop("min_tokens")}} if "min_tokens" in fields else {}
        self._url, self._fields = url, {"max_tokens": 60, "temperature": 1.0} | fields | extra
        self._stop = threading.Event()
        self.outcomes: list[Outcome] = []
        kinds = [False] * num_plain + [True] * num_streamed
        self._threads = [threading.Thread(target=self._run, args=(kind,), daemon=True) for kind in kinds]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150)

    def wait_for(self, num_more: int, timeout_s: float = 150) -> None:
        """Waits until so many more requests have been answered."""
        wanted, end = len(self.outcomes) + num_more, time.monotonic() + timeout_s
        while len(self.outcomes) < wanted:
            assert time.monotonic() < end, f"{num_more} answers must come within {timeout_s} s: {self.outcomes[-3:]}"
            time.sleep(0.05)

    @property
    def errors(self) -> list[str]:
        return [outcome.error for outcome in self.outcomes if outcome.error]

    def _run(self, streamed: bool) -> None:
        with OpenAI(base_url=f"{self._url}/v1", api_key="none", timeout=120) as client:
            while not self._stop.is_set():
                self.outcomes.append(self._one(client, streamed))

    def _one(self, client: OpenAI, streamed: bool) -> Outcome:
        began, text, digest, error = time.monotonic(), "", "", None
        try:
            raw = client.chat.completions.with_raw_response.create(
                model="policy", messages=HELLO, stream=streamed, **self._fields
            )
            digest = raw.headers["x-weights-digest"]
            made = raw.parse()
            if streamed:
                reasons = []
                for chunk in made:
                    text += chunk.choices[0].delta.content or ""
                    reasons.append(chunk.choices[0].finish_reason)
                if reasons[-1] is None:
                    error = "the stream ended without a finish reason"
            else:
                text = made.choices[0].message.content or ""
        except Exception as caught:  # every way to fail is counted
            error = f"{type(caught).__name__}: {caught}"
            time.sleep(0.2)
        return Outcome(began, time.monotonic(), streamed, digest, text, error)

"""The child process in which a user's function, or a regex, meets the model's text: run with -m.

Speaks JSON lines: one load message, one answer to it, then jobs {"prompt_id", "answer", "samples", "texts"}. A job is
answered by one line a sample, {"sample", "value"} or {"sample", "raised"} or {"sample", "wrong"}, as soon as each is
known, then by {"done": true}. What user code prints goes to stderr, so it cannot break into the protocol.

Light on purpose (standard library only, asyncio only where used): a restart costs little more than Python's own start.
"""

import faulthandler
import fcntl
import functools
import inspect
import io
import json
import math
import numbers
import os
import re
import select
import signal
import sys
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any, BinaryIO

from reward.user_file import Mistake, described, form_of, load_function, shown

Job = dict[str, Any]
Say = Callable[..., None]  # sends one line
Scorer = Callable[[Job, Say], None]


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    requests, replies = take_pipes()
    faulthandler.enable()

    def say(**message: Any) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    try:
        form, score = load(json.loads(requests.readline()))
    except Mistake as mistake:
        say(mistake=str(mistake))
        return
    say(form=form)
    for line in requests:
        score(json.loads(line), say)
        say(done=True)


def die_with_parent(lifeline: int) -> None:
    """Asks the kernel to kill this process group once nobody holds the other end of the lifeline pipe any more.

    Not PR_SET_PDEATHSIG, which fires when the parent's *thread* ends; not a watching thread, which needs the
    interpreter lock that a hanging C call may keep.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)  # hang-ups are always reported
    if poll.poll(0):
        os._exit(0)  # the parent was gone before the kernel was asked


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The request and reply pipes, moved: user code finds an empty stdin, and a stdout that leads to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return requests, replies


def load(message: dict[str, Any]) -> tuple[str, Scorer]:
    """What the load message asks for: its form (text: scored one by one; texts: all at once) and the scorer."""
    if "pattern" in message:
        return "text", regex_scorer(message["pattern"])
    function = load_function(message["path"], message["function"])
    form = form_of(function, message["path"])
    if form == "texts":
        return form, batch_scorer(function, message["path"])
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return form, concurrent_scorer(function, message["path"])
    return form, sample_scorer(function, message["path"])


def regex_scorer(pattern: str) -> Scorer:
    """Answers with the first group of the pattern's first match in each text, or null."""
    compiled = re.compile(pattern)

    def score(job: Job, say: Say) -> None:
        for sample, text in zip(job["samples"], job["texts"], strict=True):
            match = compiled.search(text)
            say(sample=sample, value=match[1] if match else None)

    return score


def sample_scorer(function: Callable[..., Any], path: str) -> Scorer:
    """Calls the function for one text after the other; one that raises does not keep the others from being asked."""

    def score(job: Job, say: Say) -> None:
        for sample, text in zip(job["samples"], job["texts"], strict=True):
            try:
                value = function(job["prompt_id"], job["answer"], text)
            except BaseException as error:  # whatever user code raises is reported, SystemExit too
                say(sample=sample, raised=described(error, path))
            else:
                say(sample=sample, **as_reward(value))

    return score


@functools.cache
def lasting_loop() -> Any:
    """One event loop for good, so that user code can keep sessions open; its import would be most of a start's time."""
    import asyncio

    return asyncio.Runner()


async def awaited(value: Awaitable[Any]) -> Any:
    return await value


def concurrent_scorer(function: Callable[..., Any], path: str) -> Scorer:
    """Awaits the function for all texts of a job at once."""

    async def one(job: Job, sample: int, text: str, say: Say) -> None:
        try:
            value = await function(job["prompt_id"], job["answer"], text)
        except BaseException as error:
            say(sample=sample, raised=described(error, path))
        else:
            say(sample=sample, **as_reward(value))

    async def everyone(job: Job, say: Say) -> None:
        from asyncio import gather

        pairs = zip(job["samples"], job["texts"], strict=True)
        await gather(*(one(job, sample, text, say) for sample, text in pairs))

    return lambda job, say: lasting_loop().run(everyone(job, say))


def batch_scorer(function: Callable[..., Any], path: str) -> Scorer:
    """Calls the function once for all texts; anything but one number a text is reported, never spread or padded."""

    def score(job: Job, say: Say) -> None:
        samples = job["samples"]
        try:
            values = function(job["prompt_id"], job["answer"], job["texts"])
            if inspect.isawaitable(values):
                values = lasting_loop().run(awaited(values))
        except BaseException as error:
            say(sample=None, raised=described(error, path))
            return
        if (
            isinstance(values, str | bytes | dict | set)
            or not hasattr(values, "__len__")
            or getattr(values, "shape", (1,)) == ()
        ):
            say(sample=None, wrong=f"{shown(values)} instead of a list of {len(samples)} scores")
        elif len(values) != len(samples):
            say(sample=None, wrong=f"{len(values)} scores for {len(samples)} samples")
        else:
            for sample, value in zip(samples, values, strict=True):
                say(sample=sample, **as_reward(value))

    return score


def as_reward(value: Any) -> dict[str, Any]:
    """{"value": float} for a finite number, bool, numpy or torch scalar; {"wrong": what it is} for anything else."""
    single = isinstance(value, numbers.Real | Decimal) or getattr(value, "shape", None) == ()
    text_or_complex = isinstance(value, str | bytes | numbers.Complex) and not isinstance(value, numbers.Real)
    if single and not text_or_complex:  # numpy's text and complex scalars have a shape too
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            number = math.nan
        if math.isfinite(number):
            return {"value": number}
    return {"wrong": shown(value)}


if __name__ == "__main__":
    main()

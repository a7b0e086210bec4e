"""Answers as the cache keeps them: vLLM's RequestOutput to MessagePack and back."""

import copy

import msgspec
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput


class StoredLogprob(msgspec.Struct, array_like=True, frozen=True):
    token: int
    logprob: float
    rank: int | None
    text: str | None


Position = list[StoredLogprob] | None


class StoredChoice(msgspec.Struct, array_like=True, frozen=True):
    index: int
    text: str
    tokens: list[int]
    cumulative_logprob: float | None
    logprobs: list[Position] | None
    finish_reason: str
    stop_reason: int | str | None


class StoredAnswer(msgspec.Struct, array_like=True, frozen=True):
    choices: list[StoredChoice]
    prompt_logprobs: list[Position] | None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StoredAnswer)


def encode_answer(output: RequestOutput) -> bytes:
    """MessagePack of a whole answer. ValueError where a choice has not ended."""
    choices = []
    for choice in output.outputs:
        if choice.finish_reason is None:
            raise ValueError(f"choice {choice.index} must have ended to be kept, got no finish reason")
        choices.append(
            StoredChoice(
                choice.index,
                choice.text,
                list(choice.token_ids),
                choice.cumulative_logprob,
                _stored(choice.logprobs),
                choice.finish_reason,
                choice.stop_reason,
            )
        )
    return _ENCODER.encode(StoredAnswer(choices, _stored(output.prompt_logprobs)))


def decode_answer(value: bytes) -> RequestOutput:
    """The whole answer, without request id and prompt. ValueError where the bytes hold something else."""
    try:
        stored = _DECODER.decode(value)
    except msgspec.DecodeError as error:
        raise ValueError(f"a kept answer must be MessagePack of a StoredAnswer, got {error}") from error
    choices = [
        CompletionOutput(
            index=choice.index,
            text=choice.text,
            token_ids=choice.tokens,
            cumulative_logprob=choice.cumulative_logprob,
            logprobs=_restored(choice.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        for choice in stored.choices
    ]
    return RequestOutput("", None, [], _restored(stored.prompt_logprobs), choices, finished=True)


def answer_to(output: RequestOutput, request_id: str, prompt: list[int]) -> RequestOutput:
    """The same answer, given to another request for the same prompt ids."""
    own = copy.copy(output)
    own.request_id, own.prompt_token_ids = request_id, prompt
    return own


def merged(pieces: list[RequestOutput]) -> RequestOutput:
    """One whole answer from the pieces of a stream; the pieces are left as they are."""
    whole = copy.deepcopy(pieces[0])
    for piece in pieces[1:]:
        whole.add(copy.deepcopy(piece), aggregate=True)
    whole.outputs.sort(key=lambda choice: choice.index)
    return whole


def _stored(positions) -> list[Position] | None:  # type: ignore[no-untyped-def]
    if positions is None:
        return None
    return [
        None
        if position is None
        else [StoredLogprob(token, entry.logprob, entry.rank, entry.decoded_token) for token, entry in position.items()]
        for position in positions
    ]


def _restored(positions: list[Position] | None) -> list | None:
    if positions is None:
        return None
    return [
        None
        if position is None
        else {entry.token: Logprob(entry.logprob, entry.rank, entry.text) for entry in position}
        for position in positions
    ]

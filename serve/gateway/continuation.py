"""An answer whose replica dies half-way, carried on by another from the tokens the client already has."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams

UNFINISHED_CHARACTER = "\ufffd"
NUM_TOKENS_BEFORE = 6  # of the prompt, decoded along: some tokenizers drop a space at the start of a text


class Continuation:
    """What one streamed choice has been given so far, and how it goes on after a cut.

    Until a cut the replica's text is passed on. After it the text is decoded here from all tokens, since the new
    replica sees only the second part of a word, of a character, or of a stop string. Of the sampling parameters,
    penalties that count answer tokens start anew at the cut, and a seeded answer goes on with fresh noise.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], params: "SamplingParams") -> None:
        self._tokenizer, self._params = tokenizer, params
        self._before = prompt[-NUM_TOKENS_BEFORE:]
        self.tokens: list[int] = []
        self.text = ""
        self.num_cuts = 0

    @property
    def can_go_on(self) -> bool:
        """Nothing was sent, or the rest does not depend on a grammar's state, which died with the replica."""
        return not self.tokens or self._params.structured_outputs is None

    @property
    def max_tokens(self) -> int:
        """How many tokens are still to come at most."""
        return (self._params.max_tokens or 0) - len(self.tokens)

    def cut(self) -> None:
        """Notes that the replica is gone."""
        self.num_cuts += bool(self.tokens)

    def params(self) -> "SamplingParams":
        """The sampling parameters of what is still to come."""
        if not self.num_cuts:
            return self._params
        rest = self._params.clone()
        rest.max_tokens = self.max_tokens
        rest.min_tokens = max(0, self._params.min_tokens - len(self.tokens))
        rest.stop, rest.output_text_buffer_length = [], 0  # looked for here
        return rest

    def take(self, choice: "CompletionOutput") -> "CompletionOutput":
        """The piece as the client is to see it; its finish_reason is set where a stop string ends it here."""
        self.tokens.extend(choice.token_ids)
        if self.num_cuts:
            self._tell(choice)
        self.text += choice.text
        return choice

    def _tell(self, choice: "CompletionOutput") -> None:
        # Stop strings are looked for here, so "stop" from the replica means a token, which is not told.
        is_told = choice.finish_reason != "stop" or self._params.include_stop_str_in_output
        whole = self._decode(self._before + (self.tokens if is_told else self.tokens[:-1]))[
            len(self._decode(self._before)) :
        ]
        stops = [self._params.stop] if isinstance(self._params.stop, str) else self._params.stop or []
        for stop in stops:
            place = whole.find(stop, max(0, len(self.text) - len(stop) + 1))
            if place >= 0:
                whole = whole[: place + (len(stop) if self._params.include_stop_str_in_output else 0)]
                choice.finish_reason, choice.stop_reason = "stop", stop
                break
        if choice.finish_reason is None:
            held = max((len(stop) - 1 for stop in stops), default=0)
            whole = whole[: max(0, len(whole) - held)].rstrip(UNFINISHED_CHARACTER)
        choice.text = whole[len(self.text) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._params.skip_special_tokens))

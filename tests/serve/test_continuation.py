"""Answers cut by a dying replica and carried on: the client's text is that of all tokens, whatever the cut hit."""

import copy
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.gateway.continuation import Continuation
from tests.tiny import byte_tokenizer

pytestmark = pytest.mark.fast
TOKENIZER = byte_tokenizer()  # one token a byte: a cut can fall inside a character
PROMPT = TOKENIZER.encode("Say: ")
TEXT = "a 🦙 said é漢字, then stopped"


@dataclass
class Choice:
    """The fields of vLLM's CompletionOutput that a continuation reads and sets."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass
class Params:
    """The fields of vLLM's SamplingParams that a continuation reads and sets."""

    max_tokens: int = 100
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    output_text_buffer_length: int = 0
    structured_outputs: object = None
    temperature: float = 1.0

    def clone(self) -> "Params":
        return copy.deepcopy(self)


def run(text: str, cut: int, params: Params) -> tuple[str, Continuation, str | None]:
    """What a client sees of a text whose first `cut` tokens came from a replica that died after them."""
    tokens = TOKENIZER.encode(text)
    state = Continuation(TOKENIZER, PROMPT, params)
    # The first replica passes on whole characters only, as vLLM's detokenizer does.
    whole = TOKENIZER.decode(tokens[:cut]).rstrip("\ufffd")
    shown = state.take(Choice(whole, tokens[:cut])).text if cut else ""
    state.cut()
    for place in range(cut, len(tokens)):
        choice = Choice("replaced by our own", [tokens[place]])
        if place == len(tokens) - 1:
            choice.finish_reason = "length"
        shown += state.take(choice).text
        if choice.finish_reason is not None:
            return shown, state, choice.stop_reason
    return shown, state, None


@settings(deadline=None)
@given(st.integers(1, len(TOKENIZER.encode(TEXT)) - 1))
def test_text_after_a_cut_anywhere_is_that_of_the_whole_answer(cut):
    shown, state, _ = run(TEXT, cut, Params(max_tokens=100))
    assert shown == TEXT
    assert state.text == TEXT


@settings(deadline=None)
@given(st.integers(1, len(TOKENIZER.encode(TEXT)) - 1))
def test_a_stop_string_is_found_across_the_cut_and_never_shown_in_part(cut):
    tokens = TOKENIZER.encode(TEXT)
    before = TOKENIZER.decode(tokens[:cut])
    params = Params(max_tokens=100, stop=["字, th"])
    held = "🦙 said é漢"
    if "字" in before.replace("\ufffd", ""):  # the first replica held back what may begin a stop: it sent no 字
        return
    shown, _, reason = run(TEXT, cut, params)
    assert shown == f"a {held}"
    assert reason == "字, th"


def test_what_is_still_to_come_is_asked_with_the_rest_of_the_budget():
    params = Params(max_tokens=10, min_tokens=6, stop=["x"], temperature=0.5)
    state = Continuation(TOKENIZER, PROMPT, params)
    assert state.params() is params
    state.take(Choice("ab", TOKENIZER.encode("ab")))
    state.cut()
    rest = state.params()
    assert (rest.max_tokens, rest.min_tokens, rest.stop, rest.temperature) == (8, 4, [], 0.5)
    assert params.max_tokens == 10


def test_an_answer_that_had_all_its_tokens_only_ends():
    state = Continuation(TOKENIZER, PROMPT, Params(max_tokens=2))
    state.take(Choice("a", TOKENIZER.encode("ab")))  # the replica held back the b
    state.cut()
    assert state.max_tokens == 0
    end = state.take(Choice("", [], finish_reason="length"))
    assert (end.text, end.finish_reason) == ("b", "length")


def test_a_replica_that_died_before_its_first_token_leaves_no_trace():
    params = Params(max_tokens=5)
    state = Continuation(TOKENIZER, PROMPT, params)
    state.cut()
    assert state.params() is params
    assert state.take(Choice("as it came", [1])).text == "as it came"


def test_a_cut_before_the_stop_strings_length_shows_nothing_of_what_may_become_one():
    state = Continuation(TOKENIZER, PROMPT, Params(stop=["STOP!!"]))
    tokens = TOKENIZER.encode("STOP!!")
    state.take(Choice("", tokens[:1]))
    state.cut()
    assert "".join(state.take(Choice("", [token])).text for token in tokens[1:]) == ""


def test_a_token_that_stops_an_answer_is_not_told_after_a_cut_either():
    state = Continuation(TOKENIZER, PROMPT, Params(skip_special_tokens=False))
    tokens = TOKENIZER.encode("hi#")
    state.take(Choice("h", tokens[:1]))
    state.cut()
    assert state.take(Choice("", tokens[1:], finish_reason="stop", stop_reason=str(tokens[-1]))).text == "i"

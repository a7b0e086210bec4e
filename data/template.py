"""Chat messages to token ids: the one place where the template is applied, and the length policy judged on its ids.

Training, evaluation and serving all call `template_tokens`, so that all of them ask the model the same thing.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from core.errors import UserError
from data.row import ROLES

LengthPolicy = Literal["error", "drop", "cut_left", "cut_right"]
Messages = list[dict[str, str]]

_FIRST_LOOK = 1 << 14  # characters a message; see _tokens_unless_giant
_SLACK = 64  # tokens by which the rest of a text could shorten the ids of its beginning, generously


@dataclass(frozen=True)
class Fitted:
    """A chat within the limit."""

    messages: Messages
    tokens: list[int]  # [P]
    was_cut: bool


def template_tokens(tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids [P] of a chat, ready for the model to answer: those of apply_chat_template with a generation prompt.

    Written words never become control tokens: where a content holds the text of one ("<|im_end|>"), that text is
    encoded in two pieces, cut after its first character, so the model reads the characters and sees no control token.
    Control tokens are the tokenizer's special tokens and the added tokens its template writes. Without a chat template
    the contents are encoded as plain text, blank lines between them. The ids begin with one BOS or none, never two.
    Raises UserError where a role is unknown, the template refuses the chat, or nothing is left of it.
    """
    # A role is written into the template raw, so that a made-up one could carry control text
    strangers = [message["role"] for message in messages if message["role"] not in ROLES]
    if strangers or not messages:
        got = repr(strangers[0][:60]) if strangers else "no message"
        raise UserError(f"messages must be at least one, with role {', '.join(ROLES)}, got {got}")
    if tokenizer.chat_template is None:
        tokens = _plain_tokens(tokenizer, messages)
    else:
        tokens = _chat_tokens(tokenizer, messages)
    bos = tokenizer.bos_token_id
    while bos is not None and tokens[:2] == [bos, bos]:
        tokens = tokens[1:]
    if not tokens:
        raise UserError("a prompt must have at least one token after the chat template, got none")
    return tokens


def fit_prompt(tokenizer: Any, messages: Messages, limit: int, policy: LengthPolicy) -> Fitted | None:
    """The chat with at most `limit` templated tokens; None where `policy` drops it; UserError where it is refused.

    cut_left and cut_right take characters off the left or right end of the last user message and template again: the
    template's own head and tail, the system prompt and earlier turns stay whole, and as much is kept as fits.
    """
    tokens = _tokens_unless_giant(tokenizer, messages, limit)
    if tokens is not None and len(tokens) <= limit:
        return Fitted(messages, tokens, was_cut=False)
    if policy == "drop":
        return None
    if policy == "error":
        raise UserError(
            f"a prompt must be at most {limit} tokens after the chat template (data.max_prompt_tokens), got "
            f"{_count(tokens, limit)}; raise the limit or set data.long_prompts to drop, cut_left or cut_right"
        )
    return _cut(tokenizer, messages, limit, from_left=policy == "cut_left")


def _chat_tokens(tokenizer: Any, messages: Messages) -> list[int]:
    contents = [message["content"] for message in messages]
    mark = _unused_character(contents)
    marked = _break_control_text(contents, control_pattern(tokenizer), mark)
    try:
        if marked == contents:
            encoded = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
            # transformers 5 answers with a dict-like BatchEncoding, earlier versions with the ids
            return list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)
        broken = [{**message, "content": text} for message, text in zip(messages, marked, strict=True)]
        rendered = tokenizer.apply_chat_template(broken, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # its expressions raise any
        raise UserError(f"the chat template refuses these messages: {' '.join(str(error).split())}") from None
    return _encode_pieces(tokenizer, rendered.split(mark))


def _plain_tokens(tokenizer: Any, messages: Messages) -> list[int]:
    contents = [message["content"] for message in messages]
    mark = _unused_character(contents)
    text = "\n\n".join(_break_control_text(contents, control_pattern(tokenizer), mark))
    tokens = _encode_pieces(tokenizer, text.split(mark))
    bos = tokenizer.bos_token_id
    # What the tokenizer puts around nothing tells whether it begins a text with BOS. Its EOS, if any, is left out: the
    # model is to go on from here.
    adds_bos = bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos]
    return [bos, *tokens] if adds_bos else tokens


def _encode_pieces(tokenizer: Any, pieces: list[str]) -> list[int]:
    tokens: list[int] = []
    for piece in pieces:
        if piece:
            tokens += tokenizer(piece, add_special_tokens=False)["input_ids"]
    return tokens


def control_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """What finds the text of a control token in a content; None for a tokenizer that has no such tokens."""
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):  # several templates by name
        template = "".join(template.values())
    # Some tokenizers list blank runs or markup among their added tokens; those are ordinary text unless flagged special
    added = {
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or (token.content in template and token.content.strip())
    }
    words = sorted(word for word in added | set(tokenizer.all_special_tokens) if len(word) > 1)
    # Longest first: alternation takes the first that matches
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))) if words else None


def _break_control_text(contents: list[str], pattern: re.Pattern[str] | None, mark: str) -> list[str]:
    """The contents with `mark` inside each control token's text, until none is whole (one may hold another)."""
    if pattern is None:
        return contents
    broken = []
    for content in contents:
        text = content
        while pattern.search(text):
            text = pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        broken.append(text)
    return broken


def _unused_character(contents: list[str]) -> str:
    # Private use plane: templates do not write it, and a text would have to hold all 65,534 to exhaust it
    return next(chr(code) for code in range(0xF0000, 0xFFFFE) if all(chr(code) not in text for text in contents))


def _tokens_unless_giant(tokenizer: Any, messages: Messages, limit: int) -> list[int] | None:
    """The templated ids, or None for a text whose beginning alone is far over the limit.

    Encoding ten million characters takes over a gigabyte, so a giant is looked at from its beginning, twice as much
    each time.
    """
    longest = max(len(message["content"]) for message in messages)
    look = _FIRST_LOOK
    while look < longest:
        clipped = [{**message, "content": message["content"][:look]} for message in messages]
        if len(template_tokens(tokenizer, clipped)) > limit + _SLACK:
            return None
        look *= 2
    return template_tokens(tokenizer, messages)


def _count(tokens: list[int] | None, limit: int) -> str:
    return f"more than {limit + _SLACK}" if tokens is None else str(len(tokens))


def _cut(tokenizer: Any, messages: Messages, limit: int, from_left: bool) -> Fitted:
    place = max(position for position, message in enumerate(messages) if message["role"] == "user")
    content = messages[place]["content"]

    def kept(num_characters: int) -> Messages:
        start = len(content) - num_characters
        text = content[start:] if from_left else content[:num_characters]
        return [*messages[:place], {**messages[place], "content": text}, *messages[place + 1 :]]

    def fits(num_characters: int) -> bool:
        tokens = _tokens_unless_giant(tokenizer, kept(num_characters), limit)
        return tokens is not None and len(tokens) <= limit

    num_kept = _most(fits, len(content))
    if num_kept == 0:
        bare = _tokens_unless_giant(tokenizer, kept(0), limit)
        raise UserError(
            f"a prompt cut to {limit} tokens (data.max_prompt_tokens) must keep some of the user's words, got none: "
            f"the chat template and the other messages alone take {_count(bare, limit)}; raise the limit"
        )
    if not kept(num_kept)[place]["content"].strip():
        raise UserError(
            f"a prompt cut to {limit} tokens (data.max_prompt_tokens) must keep some of the user's words, got blanks; "
            "cut from the other side or take the row out"
        )
    return Fitted(kept(num_kept), template_tokens(tokenizer, kept(num_kept)), was_cut=True)


def _most(fits: Callable[[int], bool], total: int) -> int:
    """A count below `total` that fits while one more does not, or 0; gallops, so that no giant is encoded whole."""
    low, high = 0, 64
    while high < total and fits(high):
        low, high = high, high * 2
    high = min(high, total)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

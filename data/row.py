"""One row of the data before templating, and the checks that make one of a JSON object."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import UserError

FIELDS = ("id", "prompt", "messages", "answer", "family")
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Row:
    """A chat that ends with the user's words, and the answer expected of the policy."""

    row_id: str
    messages: tuple[tuple[str, str], ...]  # (role, content)
    answer: str
    family: str = ""
    where: str = ""  # file and line, for errors

    @property
    def question(self) -> str:
        """The user's words, all turns: what the encoder reads and what tells two questions apart."""
        return "\n".join(content for role, content in self.messages if role == "user")

    def chat(self, system_prompt: str | None) -> list[dict[str, str]]:
        """Messages for the chat template; `system_prompt` goes first where the row has none of its own."""
        messages = [{"role": role, "content": content} for role, content in self.messages]
        if system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        return messages


def parse_row(value: Any, default_id: str, where: str) -> Row:
    """The Row of a parsed JSON line; UserError names `where`, the field and the cure.

    `default_id` stands in for a missing id. Unknown fields are refused: a misspelt name must not go unnoticed.
    """
    if not isinstance(value, dict):
        raise UserError(f"a row must be a JSON object with prompt and answer, got {_kind(value)} ({where})")
    _refuse_unknown(value, FIELDS, where)
    family = value.get("family")
    return Row(
        row_id=_id(value.get("id"), default_id, where),
        messages=_messages(value, where),
        answer=_answer(value, where),
        family="" if family is None else _text(family, "family", where),
        where=where,
    )


def _id(value: Any, default_id: str, where: str) -> str:
    if value is None:
        return default_id
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _text(value, "id", where)


def _messages(row: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    if ("prompt" in row) == ("messages" in row):
        got = "both" if "prompt" in row else "neither"
        raise UserError(f"a row must have one of the fields prompt and messages, got {got} ({where})")
    if "prompt" in row:
        return (("user", _text(row["prompt"], "prompt", where)),)
    turns = row["messages"]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"field messages must be a list of at least one message, got {_kind(turns)} ({where})")
    messages = tuple(_message(turn, f"messages[{position}]", where) for position, turn in enumerate(turns))
    late = [position for position, (role, _) in enumerate(messages) if role == "system" and position > 0]
    if late:
        raise UserError(f"field messages[{late[0]}].role must not be system after the first message ({where})")
    if messages[-1][0] != "user":
        raise UserError(f"field messages must end with role user, got {messages[-1][0]!r} ({where})")
    return messages


def _message(turn: Any, name: str, where: str) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise UserError(f"field {name} must be an object with role and content, got {_kind(turn)} ({where})")
    _refuse_unknown(turn, ("role", "content"), where, prefix=f"{name}.")
    role = turn.get("role")
    if role not in ROLES:
        raise UserError(f"field {name}.role must be one of {', '.join(ROLES)}, got {_short(role)} ({where})")
    if "content" not in turn:
        raise UserError(f"field {name}.content is missing ({where})")
    return role, _text(turn["content"], f"{name}.content", where)


def _answer(row: Mapping[str, Any], where: str) -> str:
    if "answer" not in row:
        raise UserError(f"field answer is missing ({where}); give the reference answer as text or as a number")
    value = row["answer"]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"field answer must be text or a number, got {_kind(value)} ({where})")
    return _text(value, "answer", where)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"field {name} must be text, got {_kind(value)} ({where})")
    if not value.strip():
        raise UserError(f"field {name} must not be empty, got {_short(value)} ({where})")
    if "\x00" in value:
        raise UserError(f"field {name} must not hold a NUL character, got one at {value.index(chr(0))} ({where})")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        raise UserError(
            f"field {name} must be whole Unicode, got half a character, U+{code:04X}, at {error.start} ({where})"
        ) from None
    return value


def _refuse_unknown(value: Mapping[str, Any], known: tuple[str, ...], where: str, prefix: str = "") -> None:
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
            raise UserError(f"unknown field {prefix}{name[:60]!a} ({where}); {hint}")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list | dict):
        name = "list" if isinstance(value, list) else "object"
        return f"a {name} of {len(value)}" if value else f"an empty {name}"
    return f"{type(value).__name__} {_short(value)}"


def _short(value: Any) -> str:
    # ascii(): a lone surrogate in an error message could not be printed
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."

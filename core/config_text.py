"""A configuration as text: YAML without doubled keys, overrides, and the sentence about each mistake."""

import difflib
import math
import reprlib
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from core.errors import UserError


def apply_override(tree: dict[str, Any], word: str, root: type[BaseModel]) -> None:
    """Lays `section.key=value` over a tree of which `root` is the schema."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise UserError(f"an override must look like section.key=value, got {word!r}")
    *parents, leaf = key.split(".")
    for name in parents:
        inner = tree.get(name)
        if inner is None:
            inner = tree[name] = {}
        if not isinstance(inner, dict):
            cure = "; give the list whole" if isinstance(inner, list) else ""
            raise UserError(f"override {word!r}: {name} is not a section{cure}")
        tree = inner
    try:
        value = yaml.load(text, Loader)
    except (ValueError, RecursionError, yaml.YAMLError):
        value = text
    if not isinstance(value, str) and text.strip() not in _NULLS and _takes_text(key.split("."), root):
        value = text  # a folder may be called 7 or 2024-01-01
    tree[leaf] = value if _takes_text(key.split("."), root) else _number(value)


_NULLS = ("", "~", "null", "Null", "NULL")


class Loader(yaml.SafeLoader):
    """YAML in which a key may not stand twice: PyYAML would take the last and say nothing."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


def _takes_text(names: list[str], root: type[BaseModel]) -> bool:
    """Whether the field of a dotted key is text or a path."""
    model: Any = root
    for name in names:
        field = model.model_fields.get(name) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return False
        model = field.annotation
    return model in (str, Path, str | None, Path | None)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-5 as text; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value) if math.isfinite(float(value)) else value  # a folder may be called nan
        except ValueError:
            return value
    return value


def has_inner(loc: tuple[Any, ...], blamed: list[tuple[Any, ...]]) -> bool:
    """Whether something inside `loc` is blamed too: a tuple counts as too short when its items were refused."""
    return any(len(other) > len(loc) and other[: len(loc)] == loc for other in blamed)


def sentence(item: Any, root: type[BaseModel]) -> str:
    """One of pydantic's findings in plain words."""
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _known_names(item["loc"][:-1], root)
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"unknown config key {path}; {hint}"
    if item["type"] == "model_type":
        return f"{path} must hold keys and values, got {_short(item['input'])}"
    if item["type"] == "path_type":
        cure = "" if item["input"] is None or isinstance(item["input"], list | dict) else "; put it in quotes"
        return f"{path} must be a path, got {_short(item['input'])}{cure}"
    if item["type"] == "too_short":
        return f"{path} must have at least {item['ctx']['min_length']} item, got {item['ctx']['actual_length']}"
    message = item["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    message = message[:1].lower() + message[1:]
    if message.startswith("input should be "):
        return f"{path} must be {message.removeprefix('input should be ')}, got {_short(item['input'])}"
    return f"{path}: {message}, got {_short(item['input'])}" if path else message


def _short(value: Any) -> str:
    """The value as Python writes it, cut where it is long or deep."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
_SHORT.maxlevel = 2


def _known_names(parents: tuple[Any, ...], root: type[BaseModel]) -> list[str]:
    model: Any = root
    for name in parents:
        if isinstance(name, int):  # an item of a list, whose model was taken from the list's annotation
            continue
        inner: Any = model.model_fields[name].annotation
        model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else get_args(inner)[0]
    return sorted(model.model_fields)

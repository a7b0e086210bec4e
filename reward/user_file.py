"""A user's Python file: imported, its function found, its parameters read; mistakes name file and line."""

import difflib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class Mistake(Exception):
    """What is wrong with a user's file, in one sentence."""


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The named function of the file; Mistake names the file and, where there is one, the line."""
    if not Path(path).is_file():
        raise Mistake(f"must be an existing file, got {path}")
    module = import_file(path)
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, known, n=1) or known[:5]
        raise Mistake(
            f"must hold a function {name}, got a file without one ({path}); it has {', '.join(near) or 'no function'}"
        )
    if not callable(function):
        raise Mistake(f"must hold a function {name}, got {shown(function)} of type {type(function).__name__} ({path})")
    return function


def import_file(path: str) -> ModuleType:
    """The imported file; its folder is on sys.path, as it would be for `python FILE`."""
    full = str(Path(path).resolve())
    sys.path.insert(0, str(Path(full).parent))
    name = f"user_reward_{re.sub(r'[^0-9A-Za-z]', '_', Path(full).stem)}"
    loader = importlib.machinery.SourceFileLoader(name, full)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None  # spec_from_loader gives None only without a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        loader.exec_module(module)
    except BaseException as error:
        raise Mistake(f"must import without an error, got {described(error, path)}") from None
    return module


def form_of(function: Callable[..., Any], path: str) -> str:
    """text or texts: the third parameter's name; Mistake where the function cannot be called with three arguments."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f"{path} line {code.co_firstlineno}" if code else path
    name = getattr(function, "__name__", type(function).__name__)
    wanted = f"must hold a function {name}(prompt_id, answer, text) or {name}(prompt_id, answer, texts)"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise Mistake(f"{wanted}, got one whose parameters cannot be read ({where})") from None
    try:
        given = list(signature.bind("", "", None).arguments)
    except TypeError:
        given = []
    if len(given) != 3 or given[2] not in ("text", "texts"):
        raise Mistake(
            f"{wanted}, got {name}{signature} ({where}); the third name says whether it takes one text or all"
        )
    return given[2]


def described(error: BaseException, path: str) -> str:
    """The error in one line with the last line of the user's file that it passed through."""
    try:
        words = " ".join(str(error).split())[:300]
    except Exception as broken:  # a user's exception may fail to show itself
        words = f"(its text could not be read: {type(broken).__name__})"
    full = str(Path(path).resolve())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename} line {error.lineno})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == full]
    where = f"{path} line {lines[-1]}" if lines else path
    return f"{type(error).__name__}: {words} ({where})" if words else f"{type(error).__name__} ({where})"


def shown(value: Any) -> str:
    """The value as Python writes it, cut to 80 characters."""
    try:
        text = repr(value)
    except Exception as error:  # a user's class may fail to show itself
        text = f"a {type(value).__name__} whose repr raised {type(error).__name__}"
    return text if len(text) <= 80 else text[:80] + "..."

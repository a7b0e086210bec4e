"""The cache's key of a request: of everything that can change the answer, and of nothing else.

It is taken from what the engine is given (token ids and sampling parameters, defaults filled in), not from the body: so
two spellings of one request are one key, and no field of the protocol can be forgotten.
"""

import hashlib
import json
from typing import Any

import msgspec
import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams

# How an answer is cut into pieces on its way, not what it says.
PIECES_ONLY = ("output_kind", "stream_interval", "output_text_buffer_length", "skip_clone", "flat_logprobs")
DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
SHARED = "shared"  # in the place of a tenant, where tenants share answers


def cache_key(namespace: str, tenant: str, digest: str, engine: str, prompt: list[int], params: SamplingParams) -> str:
    """namespace:tenant:digest:sha256. Streamed and plain requests share a key; each is replied to in its own form."""
    asked = {"engine": engine, "prompt": prompt, "params": canonical(params)}
    words = json.dumps(asked, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{namespace}:{tenant}:{digest[:16]}:{hashlib.sha256(words.encode()).hexdigest()}"


def canonical(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters as plain values; those at their default are left out. ValueError for inf or nan."""
    values: dict[str, Any] = _numbers(msgspec.to_builtins(params, enc_hook=_plain))
    if values.get("top_k") == -1:  # as 0: every token
        del values["top_k"]
    return {
        name: value
        for name, value in values.items()
        if name not in PIECES_ONLY and value != DEFAULTS.get(name) and value not in ([], {})
    }


def is_deterministic(params: SamplingParams) -> bool:
    """Whether asking again must give the same answer: greedy, or with a seed of its own."""
    return params.temperature == 0 or params.seed is not None


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, RequestOutputKind):
        return value.value
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "__dict__"):
        return {name: field for name, field in vars(value).items() if field is not None}
    raise ValueError(f"a sampling parameter must have a plain form to be part of a key, got {type(value).__name__}")


def _numbers(value: Any) -> Any:
    """The same with 1 for 1.0: a client may write either."""
    if isinstance(value, dict):
        return {name: _numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value

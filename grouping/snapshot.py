"""A grouping worker's whole state as bytes: a NumPy archive without pickled objects, names and counters in JSON."""

import io
import json
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

FORMAT = 1


@dataclass(frozen=True)
class Snapshot:
    facts: dict[str, Any]  # what JSON holds: names, counters
    arrays: dict[str, np.ndarray]


def pack(snapshot: Snapshot) -> bytes:
    """The archive; the same snapshot gives the same bytes."""
    text = json.dumps({"format": FORMAT, **snapshot.facts}).encode()
    file = io.BytesIO()
    arrays: dict[str, Any] = {**snapshot.arrays, "facts": np.frombuffer(text, np.uint8)}
    np.savez(file, **arrays)
    return file.getvalue()


def unpack(data: bytes) -> Snapshot:
    """The snapshot in the archive; ValueError where the bytes are none, or one of another format."""
    try:
        if not zipfile.is_zipfile(io.BytesIO(data)):
            raise ValueError("no archive")
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        facts = json.loads(arrays.pop("facts").tobytes())
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"grouping state must be a NumPy archive with facts, got {len(data)} bytes: {error}"
        ) from error
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"grouping state must have format {FORMAT}, got {facts.get('format')}; it is from another release"
        )
    return Snapshot(facts, arrays)

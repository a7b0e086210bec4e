"""Files with their sizes and hashes: what makes a folder's content provable, and its digest."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple


class File(NamedTuple):
    """One file as it must be."""

    size_bytes: int
    sha256: str


def seal_file(path: Path) -> File:
    """The file as it is, made durable."""
    return File(path.stat().st_size, _sha256(path, durable=True))


def digest_of(files: dict[str, File]) -> str:
    """sha256, in 64 hex digits, over the sorted (name, sha256) of the files, a line each."""
    lines = "".join(f"{name} {file.sha256}\n" for name, file in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def file_flaw(path: Path, file: File, hashes: bool = True) -> str | None:
    """What is wrong with a file, in words; None where it is as it must be. `hashes=False` compares sizes only."""
    try:
        got = path.stat().st_size
        if got != file.size_bytes:
            return f"{path.name} must have {file.size_bytes} bytes, got {got}"
        if hashes and _sha256(path) != file.sha256:
            return f"{path.name} does not match its sha256"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except (OSError, ValueError) as error:  # ValueError: a NUL character in a name
        return f"{path.name!r} cannot be read ({error})"
    return None


def _sha256(path: Path, durable: bool = False) -> str:
    with path.open("rb") as stream:
        if durable:
            os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()

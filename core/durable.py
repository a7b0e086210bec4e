"""Files that are there whole or not at all, also after a power cut."""

import os
import shutil
from pathlib import Path

from core.errors import RunBroken


def write_text(path: Path, text: str) -> None:
    """Replaces a file: a reader sees the old one or the new one, never half. RunBroken names path and free space."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise RunBroken(f"{path} could not be written: {error.strerror}; {free_bytes(path)} bytes are free") from error
    finally:
        temporary.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Adds a line to a log unless the log ends with it; closes off a line that a kill tore first."""
    new = line.encode()
    with path.open("ab+") as stream:
        size = stream.tell()
        stream.seek(max(0, size - len(new) - 1))
        tail = stream.read()
        if tail == new + b"\n":
            return
        stream.write((b"" if tail.endswith(b"\n") or not size else b"\n") + new + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names inside a folder durable: a rename survives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Free bytes of the disk that holds `path`, or would hold it once made."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free

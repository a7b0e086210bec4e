"""What safetensors files hold, read from their headers and raw numbers: no torch, so that any process can look."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.errors import UserError

_LENGTH_BYTES = 8  # the header's length, little endian, comes first (safetensors' format description)
_CHUNK = 1 << 24  # numbers looked at in one piece
# A float is finite unless all its exponent bits are set. F8_E4M3 has no infinity; all bits but the sign are its NaN.
_EXPONENT = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
    "F8_E4M3": (np.uint8, 0x7F),
    "F8_E5M2": (np.uint8, 0x7C),
}


class Tensor(NamedTuple):
    """One entry of a safetensors header."""

    name: str
    dtype: str  # as the format spells it: BF16, F32, I32, ...
    shape: tuple[int, ...]
    file: Path
    start: int  # byte of the file
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def read_tensors(folder: Path) -> Iterator[Tensor]:
    """The tensors of all safetensors files of a folder; UserError where a file is cut or is another kind of file."""
    for file in sorted(folder.glob("*.safetensors")):
        header, begin = _read_header(file)
        size = file.stat().st_size
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = (begin + int(offset) for offset in entry["data_offsets"])
            if not begin <= first <= last <= size:
                raise UserError(f"{file} must hold {last} bytes for its tensor {name}, got {size}; copy it again")
            yield Tensor(name, entry["dtype"], tuple(entry["shape"]), file, first, last)


def find_nonfinite(folder: Path) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity, with how many of its numbers do; None: all finite.

    An integer tensor cannot. Reads every number of the folder once.
    """
    for tensor in read_tensors(folder):
        num_bad = _num_nonfinite(tensor)
        if num_bad:
            num_all = int(np.prod(tensor.shape, dtype=np.int64))
            return f"{tensor.name} ({num_bad} of {num_all} numbers are NaN or infinite)"
    return None


def _num_nonfinite(tensor: Tensor) -> int:
    if tensor.dtype not in _EXPONENT or tensor.num_bytes == 0:
        return 0
    kind, mask = _EXPONENT[tensor.dtype]
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.start, (tensor.num_bytes,))
    width = np.dtype(kind).itemsize
    num_bad = 0
    for begin in range(0, tensor.num_bytes, _CHUNK * width):
        bits = np.frombuffer(raw[begin : begin + _CHUNK * width].tobytes(), kind)
        num_bad += int(np.count_nonzero((bits & mask) == mask))
    return num_bad


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """(entries by tensor name, byte at which the numbers begin)."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > size - _LENGTH_BYTES:
            raise UserError(f"{file} must be a whole safetensors file, got {size} bytes; copy it again")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError):
            raise UserError(f"{file} must be a safetensors file, got one without its header; copy it again") from None
    return header, _LENGTH_BYTES + length

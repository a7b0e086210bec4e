"""JSONL files of rows: read line by line, every line judged, mistakes named by file, line and field.

Accepted: UTF-8 with or without a byte order mark, LF or CRLF, blank lines, no final newline. Other encodings,
compressed files and one top-level array are refused, with the command that cures them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from core.errors import UserError
from data.row import Row, parse_row

_UTF8_MARK = b"\xef\xbb\xbf"
_HEAD_BYTES = 4096
# The first bytes of what people rename to .jsonl, with its cure. UTF-32 stands before UTF-16: it begins the same way.
_OTHER_FORMATS = (
    (b"\x1f\x8b", "gzip", "unpack it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "zstandard", "unpack it with unzstd"),
    (b"PK\x03\x04", "zip", "unpack it with unzip"),
    (b"BZh", "bzip2", "unpack it with bunzip2"),
    (b"\xfd7zXZ", "xz", "unpack it with unxz"),
    (b"PAR1", "Parquet", "export it as JSON lines"),
    (b"\xff\xfe\x00\x00", "UTF-32", "convert it with iconv -f UTF-32 -t UTF-8"),
    (b"\x00\x00\xfe\xff", "UTF-32", "convert it with iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
)


@dataclass(frozen=True)
class JsonlRows:
    """What a file held: the good rows in the file's order, and what was skipped."""

    rows: tuple[Row, ...]
    num_skipped: int
    first_skipped: str  # the sentence about the first skipped row, or ""


def read_jsonl(path: Path, bad_rows: Literal["error", "skip"]) -> JsonlRows:
    """The checked rows of a JSONL file; UserError names file, line and field.

    A bad row ends the reading, or is counted where `bad_rows` is skip. A file in another format, and one without a
    single good row, is refused either way. Memory: one line at a time beside the rows kept.
    """
    try:
        with path.open("rb") as file:
            _refuse_other_formats(file, path)
            found = _read_lines(file, path, bad_rows == "skip")
    except OSError as error:
        raise UserError(f"data file must be a readable file, got {path}: {error.strerror or error}") from None
    if not found.rows:
        why = (
            f"all {found.num_skipped} were skipped, the first: {found.first_skipped}"
            if found.num_skipped
            else "it is empty"
        )
        raise UserError(f"data file must hold at least one row, got {path}: {why}")
    return found


def _read_lines(file: BinaryIO, path: Path, skip: bool) -> JsonlRows:
    rows: list[Row] = []
    line_of: dict[str, int] = {}
    num_skipped, first_skipped = 0, ""
    for number, raw in enumerate(file, start=1):
        # A mark may also stand inside: files are concatenated
        line = raw.removeprefix(_UTF8_MARK).strip()
        if not line:
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_row(_parse_line(line, where), f"line{number}", where)
            if row.row_id in line_of:
                raise UserError(
                    f"field id must be unique, got {row.row_id!r} again ({where}); "
                    f"line {line_of[row.row_id]} has it already"
                )
        except UserError as error:
            if not skip:
                raise
            num_skipped += 1
            first_skipped = first_skipped or str(error)
            continue
        line_of[row.row_id] = number
        rows.append(row)
    return JsonlRows(tuple(rows), num_skipped, first_skipped)


def _parse_line(line: bytes, where: str) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"text must be UTF-8, got byte 0x{line[error.start]:02x} at byte {error.start + 1} ({where}), as Latin-1 "
            "and Windows-1252 files have; convert it with iconv -f LATIN1 -t UTF-8"
        ) from None
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole
        )
    except json.JSONDecodeError as error:
        raise UserError(
            f"a line must be one whole JSON object, got broken JSON: {error.msg} at column {error.colno} ({where}); "
            "a row must not be spread over lines"
        ) from None
    except RecursionError:
        raise UserError(f"a line must be one JSON object, got JSON nested too deep ({where})") from None
    except ValueError as error:
        raise UserError(f"a line must be one JSON object: {error} ({where})") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"field {twice[0]!a} stands in it twice")
    return dict(pairs)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number {text[:40]} is too large")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python reads at most 4300 digits
        raise ValueError(f"number {text[:40]}... of {len(text)} digits is too long") from None


def _refuse_other_formats(file: BinaryIO, path: Path) -> None:
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    for magic, name, cure in _OTHER_FORMATS:
        if head.startswith(magic):
            raise UserError(f"data file must be UTF-8 text, got {name} ({path}); {cure}")
    if b"\x00" in head[:4]:
        # '{' and '"' beside zero bytes: two- or four-byte characters without a mark
        cure = "convert it to UTF-8 with iconv, for example iconv -f UTF-16LE -t UTF-8"
        raise UserError(
            f"data file must be UTF-8 text, got UTF-16 or UTF-32 without a byte order mark ({path}); {cure}"
        )
    if head.removeprefix(_UTF8_MARK).lstrip().startswith(b"["):
        raise UserError(
            f"data file must hold one JSON object a line, got one top-level array ({path}); "
            f"convert it with jq -c '.[]' {path.name} > {path.stem}_rows.jsonl"
        )

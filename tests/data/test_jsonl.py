import gzip
import json
import tracemalloc

import pytest

from core.errors import UserError
from data.jsonl import read_jsonl

pytestmark = pytest.mark.fast

ROWS = [{"id": f"r{i}", "prompt": f"What is {i} plus {i}? é漢", "answer": str(i + i)} for i in range(1, 5)]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]


def write(folder, content: bytes):
    path = folder / "rows.jsonl"
    path.write_bytes(content)
    return path


def refusal(folder, content: bytes, bad_rows="error") -> str:
    path = write(folder, content)
    with pytest.raises(UserError) as caught:
        read_jsonl(path, bad_rows)
    assert str(path) in str(caught.value)
    return str(caught.value)


def with_bad_line(bad: bytes) -> bytes:
    """Two good rows, the bad one as line 3, two good rows."""
    return b"\n".join([*LINES[:2], bad, *LINES[2:]]) + b"\n"


@pytest.mark.parametrize(
    "content",
    [
        b"\n".join(LINES) + b"\n",
        b"\xef\xbb\xbf" + b"\n".join(LINES) + b"\n",
        b"\r\n".join(LINES) + b"\r\n",
        b"\n\n".join(LINES),
        b"\xef\xbb\xbf\r\n \r\n" + b"\r\n\t\r\n".join(LINES),
        b"\n".join(LINES[:2]) + b"\n\xef\xbb\xbf" + b"\n".join(LINES[2:]),
    ],
    ids=["plain", "mark", "crlf", "blank lines", "all of it", "two files with marks joined"],
)
def test_marks_line_ends_and_blank_lines_change_no_row(tmp_path, content):
    found = read_jsonl(write(tmp_path, content), "error")
    got = [{"id": row.row_id, "prompt": row.question, "answer": row.answer} for row in found.rows]
    assert got == ROWS
    assert found.num_skipped == 0


@pytest.mark.parametrize("bad_rows", ["error", "skip"])
@pytest.mark.parametrize(
    ("content", "name", "cure"),
    [
        (b"\n".join(LINES).decode().encode("utf-16"), "UTF-16", "iconv -f UTF-16 -t UTF-8"),
        (b"\n".join(LINES).decode().encode("utf-16-le"), "UTF-16 or UTF-32 without", "iconv"),
        (b"\n".join(LINES).decode().encode("utf-32"), "UTF-32", "iconv -f UTF-32"),
        (gzip.compress(b"\n".join(LINES)), "gzip", "gunzip"),
        (b"PAR1" + bytes(20), "Parquet", "export it as JSON lines"),
        (json.dumps(ROWS).encode(), "one top-level array", "jq -c '.[]' rows.jsonl > rows_rows.jsonl"),
        (b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=1).encode(), "one top-level array", "jq"),
    ],
)
def test_other_formats_are_named_with_their_cure_whatever_bad_rows_says(tmp_path, content, name, cure, bad_rows):
    said = refusal(tmp_path, content, bad_rows)
    assert f"got {name}" in said
    assert cure in said


def test_a_latin_1_line_is_refused_by_its_number_and_byte(tmp_path):
    said = refusal(tmp_path, LINES[0] + b"\n" + LINES[1].decode().encode("latin-1", "replace") + b"\n")
    assert "got byte 0xe9" in said
    assert "line 2)" in said
    assert "iconv -f LATIN1" in said


BAD_LINES = [
    (b'{"id": "x", "answer": "1"}', "prompt and messages"),
    (b'{"id": "x", "prompt": null, "answer": "1"}', "field prompt"),
    (b'{"id": "x", "prompt": "q"}', "field answer"),
    (b'{"id": "x", "prompt": "q", "answer": "1", "source": "web"}', "unknown field 'source'"),
    (b'{"id": "x", "prompt": "q"', "broken JSON"),
    (b'{"id": "x", "prompt": "q", "answer": NaN}', "NaN is not a number of JSON"),
    (b'{"id": "x", "prompt": "q", "answer": 1e999}', "number 1e999 is too large"),
    (b'{"id": "x", "prompt": "q", "answer": ' + b"9" * 5000 + b"}", "... of 5000 digits is too long"),
    (b'{"id": "x", "prompt": "q", "prompt": "p", "answer": 1}', "field 'prompt' stands in it twice"),
    (b'{"id": "x", "prompt": "a\\u0000b", "answer": 1}', "NUL"),
    (b'{"id": "x", "prompt": "a\\ud83d", "answer": 1}', "half a character"),
    (b'{"id": "x", "prompt": "caf\xe9", "answer": 1}', "UTF-8"),
    (b"[" * 100_000, "nested too deep"),
    (b"17", "must be a JSON object"),
]


@pytest.mark.parametrize(("line", "sentence"), BAD_LINES, ids=[sentence for _, sentence in BAD_LINES])
def test_a_bad_line_is_refused_by_its_number_or_skipped_and_counted(tmp_path, line, sentence):
    content = with_bad_line(line)
    said = refusal(tmp_path, content)
    assert sentence in said
    assert "rows.jsonl, line 3)" in said
    found = read_jsonl(write(tmp_path, content), "skip")
    assert [row.row_id for row in found.rows] == ["r1", "r2", "r3", "r4"]
    assert found.num_skipped == 1
    assert found.first_skipped == said


def test_a_repeated_id_is_refused_with_both_lines_and_the_first_row_survives_skipping(tmp_path):
    again = json.dumps(ROWS[0] | {"answer": "99"}).encode()
    said = refusal(tmp_path, with_bad_line(again))
    assert "got 'r1' again" in said
    assert "line 3); line 1 has it already" in said
    found = read_jsonl(write(tmp_path, with_bad_line(again)), "skip")
    assert [(row.row_id, row.answer) for row in found.rows] == [("r1", "2"), ("r2", "4"), ("r3", "6"), ("r4", "8")]


def test_a_number_and_its_text_are_the_same_id(tmp_path):
    content = b'{"id": 7, "prompt": "q", "answer": 1}\n{"id": "7", "prompt": "p", "answer": 2}'
    assert "got '7' again" in refusal(tmp_path, content)


def test_missing_ids_come_from_line_numbers_blank_lines_counted(tmp_path):
    content = b'{"prompt": "q", "answer": 1}\n\n{"prompt": "p", "answer": 2}'
    found = read_jsonl(write(tmp_path, content), "error")
    assert [row.row_id for row in found.rows] == ["line1", "line3"]


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path, content):
    assert "must hold at least one row" in refusal(tmp_path, content)


def test_a_file_of_bad_rows_only_is_refused_even_when_skipping(tmp_path):
    said = refusal(tmp_path, b"{}\n{}\n", bad_rows="skip")
    assert "all 2 were skipped, the first: a row must have one of the fields" in said


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"must be a readable file, got .*none\.jsonl"):
        read_jsonl(tmp_path / "none.jsonl", "error")
    with pytest.raises(UserError, match="must be a readable file"):
        read_jsonl(tmp_path, "error")


def test_a_line_of_ten_million_characters_is_a_row_like_any_other(tmp_path):
    huge = json.dumps({"id": "x", "prompt": "z" * 10_000_000, "answer": "1"}).encode()
    path = write(tmp_path, with_bad_line(huge))
    tracemalloc.start()
    try:
        found = read_jsonl(path, "error")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found.rows[2].question) == 10_000_000
    # The line, its decoded text, the parsed string and its check: 10 MB each; the bound of the promise is 1 GiB
    assert peak_bytes < 100e6

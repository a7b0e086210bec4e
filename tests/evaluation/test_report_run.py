"""What a report reads of a run folder: broken files are left out with a sentence."""

import pytest

from evaluation.report_run import read_run

pytestmark = pytest.mark.fast


def test_files_nested_too_deep_are_left_out_with_a_sentence(tmp_path):
    for name in ("summary.json", "clusters.json", "config.yaml", "evaluations.jsonl"):
        (tmp_path / name).write_text("[" * 100_000 + "\n")
    notes = " ".join(read_run(tmp_path).notes)
    for sentence in ("summary.json holds no whole JSON", "config.yaml could not be read", "1 torn or unreadable line"):
        assert sentence in notes

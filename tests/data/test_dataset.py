import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import parse_config
from core.errors import UserError
from core.trajectory import Prompt
from data.dataset import digest_of_rows, load_dataset, split_heldout
from data.row import Row
from data.template import template_tokens

pytestmark = pytest.mark.fast


def config_of(**data):
    return parse_config({"num_steps": 1, "prompts_per_step": 4, "data": data}, "test")


def jsonl(folder, rows, name="rows.jsonl", **data):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return config_of(source="jsonl", path=str(path), **data)


def numbered(num_rows: int) -> list[dict]:
    return [{"id": f"r{i}", "prompt": f"What is {i} + {i}?", "answer": 2 * i} for i in range(num_rows)]


def test_arithmetic_prompts_are_templated_and_carry_answer_and_family(tokenizer):
    made = load_dataset(config_of(arithmetic={"num_prompts": 40, "num_heldout": 10}), tokenizer)
    assert (len(made.train), len(made.heldout), made.notes) == (40, 10, ())
    for prompt in made.train + made.heldout:
        assert list(prompt.tokens) == template_tokens(tokenizer, [{"role": "user", "content": prompt.text}])
        assert prompt.prompt_id.startswith(prompt.family)
        assert str(int(prompt.answer)) == prompt.answer


def test_a_file_gives_every_row_once_with_a_share_held_out(tokenizer, tmp_path):
    config = jsonl(tmp_path, numbered(20), heldout_fraction=0.2)
    made = load_dataset(config, tokenizer)
    assert (len(made.train), len(made.heldout)) == (16, 4)
    assert sorted(prompt.prompt_id for prompt in made.train + made.heldout) == sorted(f"r{i}" for i in range(20))
    assert load_dataset(config, tokenizer) == made


def test_a_short_last_step_is_announced(tokenizer, tmp_path):
    # 20 rows, 2 held out: 18 = 4 x 4 + 2
    notes = load_dataset(jsonl(tmp_path, numbered(20)), tokenizer).notes
    assert notes == ("The last step of each epoch has 2 prompts instead of 4: there are 18 training rows.",)


def test_skipped_rows_are_counted_in_a_note_with_the_first_reason(tokenizer, tmp_path):
    rows = [*numbered(10), {"id": "x", "prompt": 7, "answer": "1"}]
    with pytest.raises(UserError, match=r"field prompt must be text, got int 7 \(.*rows.jsonl, line 11\)"):
        load_dataset(jsonl(tmp_path, rows), tokenizer)
    made = load_dataset(jsonl(tmp_path, rows, bad_rows="skip", heldout_fraction=0.2), tokenizer)
    assert len(made.train) + len(made.heldout) == 10
    assert made.notes[0].startswith("1 of 11 rows of ")
    assert "the first: field prompt must be text, got int 7" in made.notes[0]


def test_a_heldout_file_is_used_whole_and_shared_questions_are_told(tokenizer, tmp_path):
    jsonl(tmp_path, numbered(14)[9:], name="held.jsonl")
    config = jsonl(tmp_path, numbered(10), heldout_path=str(tmp_path / "held.jsonl"))
    made = load_dataset(config, tokenizer)
    assert (len(made.train), len(made.heldout)) == (10, 5)
    # Row 9 stands in both
    assert made.notes[0].startswith("1 of 5 held-out rows ask a question of the training rows")


def test_the_systems_words_are_in_the_ids_and_not_in_the_text_for_the_encoder(tokenizer, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}], "answer": i} for i in range(2)]
    prompt = load_dataset(jsonl(tmp_path, rows, system_prompt="Count slowly."), tokenizer).train[0]
    assert "<|im_start|>system\nCount slowly.<|im_end|>" in tokenizer.decode(list(prompt.tokens))
    assert prompt.text in ("q0", "q1")


def long_and_short(num_long: int, num_short: int) -> list[dict]:
    long = [{"id": f"long{i}", "prompt": f"{i} " + "q" * 300, "answer": "1"} for i in range(num_long)]
    return long + numbered(num_short)


def test_long_rows_are_refused_by_line_dropped_or_cut_with_counts(tokenizer, tmp_path):
    rows = long_and_short(3, 9)
    held = tmp_path / "held.jsonl"
    held.write_text('{"prompt": "h", "answer": "1"}\n')
    common = {"heldout_path": str(held), "max_prompt_tokens": 100}
    with pytest.raises(UserError, match=r"training row 'long0' \(.*rows.jsonl, line 1\): a prompt must be at most 100"):
        load_dataset(jsonl(tmp_path, rows, **common), tokenizer)
    dropped = load_dataset(jsonl(tmp_path, rows, long_prompts="drop", **common), tokenizer)
    assert [prompt.prompt_id for prompt in dropped.train] == [f"r{i}" for i in range(9)]
    assert dropped.notes[0] == "3 of 12 training rows dropped: longer than 100 templated tokens."
    cut = load_dataset(jsonl(tmp_path, rows, long_prompts="cut_right", **common), tokenizer)
    assert cut.notes[0] == "3 of 12 training rows cut to 100 templated tokens."
    assert max(len(prompt.tokens) for prompt in cut.train) == 100
    assert cut.train[0].text.startswith("0 qqq")
    assert len(cut.train[0].text) < 302


def test_a_file_of_long_rows_only_is_refused(tokenizer, tmp_path):
    config = jsonl(tmp_path, long_and_short(4, 0), long_prompts="drop", max_prompt_tokens=100)
    with pytest.raises(UserError, match=r"keep at least one training row, got none: all 3 are longer than 100 tokens"):
        load_dataset(config, tokenizer)


def test_a_tokenizer_without_a_template_is_told(make_tokenizer):
    made = load_dataset(config_of(arithmetic={"num_prompts": 4, "num_heldout": 1}), make_tokenizer(None))
    assert made.notes == ("The tokenizer has no chat template: prompts are sent as plain text.",)


def rows_asking(questions: list[int]) -> tuple[Row, ...]:
    return tuple(Row(str(place), (("user", f"q{question}"),), "1") for place, question in enumerate(questions))


@settings(deadline=None, max_examples=50, database=None)
@given(
    questions=st.lists(st.integers(0, 8), min_size=2, max_size=30).filter(lambda asked: len(set(asked)) > 1),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 9),
)
def test_a_split_leaves_rows_on_both_sides_and_no_question_on_two(questions, fraction, seed):
    rows = rows_asking(questions)
    train, heldout = split_heldout(rows, fraction, seed)
    assert train
    assert heldout
    assert sorted(train + heldout, key=lambda row: int(row.row_id)) == list(rows)
    assert not {row.question for row in train} & {row.question for row in heldout}


def test_a_row_more_in_the_file_leaves_the_heldout_rows_where_they_were():
    before = {row.question for row in split_heldout(rows_asking(list(range(100))), 0.1, 0)[1]}
    after = {row.question for row in split_heldout(rows_asking(list(range(101))), 0.1, 0)[1]}
    assert len(before & after) >= 9  # of 10: the newcomer may take one place
    other = {row.question for row in split_heldout(rows_asking(list(range(100))), 0.1, 1)[1]}
    assert other != before


def test_one_question_cannot_be_split():
    with pytest.raises(UserError, match="at least two different questions to hold one out, got 1"):
        split_heldout(rows_asking([3, 3]), 0.5, 0)


def test_the_rows_fingerprint_tells_an_edited_answer_or_question_from_the_old_one():
    row = Prompt("a", "What is 1 + 1?", (5, 6), "2")
    assert digest_of_rows((row,)) == digest_of_rows((Prompt("a", "another text of the same ids", (5, 6), "2"),))
    for prompt_id, tokens, answer in (("a", (5, 7), "2"), ("a", (5, 6), "3"), ("b", (5, 6), "2")):
        assert digest_of_rows((Prompt(prompt_id, row.text, tokens, answer),)) != digest_of_rows((row,))
    assert digest_of_rows((row, row)) != digest_of_rows((row,))

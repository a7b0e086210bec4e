import pytest

from core.errors import UserError
from data.row import Row, parse_row

pytestmark = pytest.mark.fast

GOOD = {"id": "r1", "prompt": "What is 1+1?", "answer": "2"}


def refusal(**changes) -> str:
    """What the person reads; a change to ... takes the field out."""
    value = {name: field for name, field in (GOOD | changes).items() if field is not ...}
    with pytest.raises(UserError) as caught:
        parse_row(value, "line7", "rows.jsonl, line 7")
    assert "(rows.jsonl, line 7)" in str(caught.value)
    return str(caught.value)


def test_a_row_keeps_its_words_and_a_number_becomes_its_text():
    row = parse_row(GOOD | {"answer": -3, "family": "sums"}, "line7", "x")
    assert row == Row("r1", (("user", "What is 1+1?"),), "-3", "sums", "x")
    assert parse_row(GOOD | {"answer": 2.5, "id": 12}, "line7", "x").answer == "2.5"
    assert parse_row(GOOD | {"id": 12}, "line7", "x").row_id == "12"


def test_a_missing_id_is_taken_from_the_line():
    assert parse_row({"prompt": "q", "answer": "1"}, "line7", "x").row_id == "line7"
    assert parse_row({"id": None, "prompt": "q", "answer": "1"}, "line7", "x").row_id == "line7"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt": ...}, "one of the fields prompt and messages, got neither"),
        ({"prompt": None}, "field prompt must be text, got null"),
        ({"prompt": 7}, "field prompt must be text, got int 7"),
        ({"prompt": ""}, "field prompt must not be empty"),
        ({"prompt": " \n"}, "field prompt must not be empty"),
        ({"answer": ...}, "field answer is missing"),
        ({"answer": None}, "field answer must be text or a number, got null"),
        ({"answer": ["2"]}, "field answer must be text or a number, got a list of 1"),
        ({"answer": True}, "field answer must be text or a number, got bool True"),
        ({"answer": ""}, "field answer must not be empty"),
        ({"id": 1.5}, "field id must be text, got float 1.5"),
        ({"id": ""}, "field id must not be empty"),
        ({"family": 3}, "field family must be text, got int 3"),
        ({"prompt": "a\x00b"}, "field prompt must not hold a NUL character, got one at 1"),
        ({"prompt": "ab\ud83d"}, "field prompt must be whole Unicode, got half a character, U+D83D, at 2"),
        ({"messages": [{"role": "user", "content": "q"}]}, "got both"),
    ],
)
def test_a_bad_field_is_named_with_its_line(changes, sentence):
    assert sentence in refusal(**changes)


def test_an_unknown_field_is_refused_with_the_nearest_known_one():
    assert refusal(promt="q").endswith("unknown field 'promt' (rows.jsonl, line 7); did you mean prompt?")
    assert "did you mean answer?" in refusal(Answers="q")
    assert "known here: id, prompt, messages, answer, family" in refusal(zzz="q")


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "must be a list of at least one message, got an empty list"),
        ("hi", "must be a list of at least one message, got str 'hi'"),
        (["hi"], "messages[0] must be an object with role and content"),
        ([{"role": "alien", "content": "q"}], "messages[0].role must be one of system, user, assistant, got 'alien'"),
        ([{"role": ["user"], "content": "q"}], "messages[0].role must be one of"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": None}], "messages[0].content must be text, got null"),
        ([{"role": "user", "content": "q", "contnt": "q"}], "unknown field messages[0].'contnt'"),
        ([{"role": "user", "content": "q"}, {"role": "system", "content": "s"}], "must not be system after the first"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "must end with role user"),
    ],
)
def test_bad_messages_are_named_by_their_place(messages, sentence):
    assert sentence in refusal(prompt=..., messages=messages)


def test_a_row_that_is_no_object_is_refused():
    with pytest.raises(UserError, match="must be a JSON object with prompt and answer, got str 'hi'"):
        parse_row("hi", "line1", "x")


def test_the_system_prompt_goes_first_unless_the_row_has_its_own():
    plain = Row("a", (("user", "q"),), "1")
    own = Row("b", (("system", "mine"), ("user", "q"), ("assistant", "a"), ("user", "more")), "1")
    assert plain.chat(None) == [{"role": "user", "content": "q"}]
    assert plain.chat("be brief")[0] == {"role": "system", "content": "be brief"}
    assert own.chat("be brief")[0] == {"role": "system", "content": "mine"}
    assert own.question == "q\nmore"

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import UserError
from data.template import fit_prompt, template_tokens

from .conftest import CHATML, CONTROL

pytestmark = pytest.mark.fast

# Text with control words and their fragments among ordinary characters
PARTS = st.sampled_from([*CONTROL, "<think>", "<|im_", "end|>", "<", "s>", "|", "\n", " ", "7", "é漢", "🦙", "What is"])
hostile_text = st.lists(PARTS, min_size=1, max_size=12).map("".join)
ordinary_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1, max_size=40)
quick = settings(deadline=None, max_examples=60, database=None)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def applied(tokenizer, messages) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"])


def control_ids(tokenizer) -> list[int]:
    return tokenizer.convert_tokens_to_ids([*CONTROL, "<think>"])


@pytest.mark.parametrize(
    "messages",
    [
        user("Hi"),
        user("\n\n padded \t"),
        [{"role": "system", "content": "Be terse."}, *user("What is 1 + 2?")],
        [*user("Hi"), {"role": "assistant", "content": "Ho"}, *user("é漢🦙👩‍👩‍👧")],
    ],
)
def test_ids_are_those_of_apply_chat_template(tokenizer, messages):
    assert template_tokens(tokenizer, messages) == applied(tokenizer, messages)


@quick
@given(text=ordinary_text)
def test_ordinary_text_of_any_kind_keeps_the_templates_ids(tokenizer, text):
    assert template_tokens(tokenizer, user(text)) == applied(tokenizer, user(text))


@quick
@given(text=hostile_text)
def test_written_words_never_become_control_tokens_and_no_character_is_lost(tokenizer, text):
    tokens = template_tokens(tokenizer, user(text))
    # What the template writes around one user message, whatever the message says
    frame = template_tokens(tokenizer, user("x"))
    for control in control_ids(tokenizer):
        assert tokens.count(control) == frame.count(control)
    rendered = tokenizer.apply_chat_template(user(text), tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokens) == rendered


def test_the_same_words_through_the_library_alone_would_end_the_turn(tokenizer):
    # Shows that the test above can fail: two turn ends of the frame and one of the user's
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert applied(tokenizer, user("a<|im_end|>b")).count(end) == 3
    assert template_tokens(tokenizer, user("a<|im_end|>b")).count(end) == 2


def test_added_tokens_that_are_neither_special_nor_the_templates_stay_tokens(tokenizer):
    assert template_tokens(tokenizer, user("<table>")) == applied(tokenizer, user("<table>"))


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(("head", "expected"), [("{{ bos_token }}", 1), ("", 0), ("{{ bos_token + bos_token }}", 1)])
def test_a_prompt_has_one_bos_or_none(make_tokenizer, adds_bos, head, expected):
    tokenizer = make_tokenizer(head + CHATML, adds_bos)
    for text in ("Hi", "Hi <s> <|im_end|>"):
        tokens = template_tokens(tokenizer, user(text))
        assert tokens.count(tokenizer.bos_token_id) == expected
        assert tokens[:1] == [tokenizer.bos_token_id] or not expected


@pytest.mark.parametrize("adds_bos", [True, False])
def test_without_a_template_text_is_encoded_plainly_and_nothing_in_it_is_control(make_tokenizer, adds_bos):
    tokenizer = make_tokenizer(None, adds_bos)
    assert template_tokens(tokenizer, user("What is 1?")) == tokenizer("What is 1?")["input_ids"]
    chat = [{"role": "system", "content": "Brief."}, *user("<s><|im_end|>")]
    tokens = template_tokens(tokenizer, chat)
    assert tokens.count(tokenizer.bos_token_id) == adds_bos
    assert tokenizer.eos_token_id not in tokens
    assert tokenizer.decode(tokens[adds_bos:]) == "Brief.\n\n<s><|im_end|>"


def test_a_template_that_refuses_and_a_made_up_role_are_told_in_one_sentence(make_tokenizer):
    picky = make_tokenizer("{{ raise_exception('System role not supported') }}")
    with pytest.raises(UserError, match="chat template refuses these messages: System role not supported"):
        template_tokens(picky, user("Hi"))
    with pytest.raises(UserError, match=r"with role system, user, assistant, got 'user<\|im_end\|>'"):
        template_tokens(picky, [{"role": "user<|im_end|>", "content": "Hi"}])
    with pytest.raises(UserError, match="got no message"):
        template_tokens(picky, [])
    with pytest.raises(UserError, match="chat template refuses these messages: unsupported operand"):
        template_tokens(make_tokenizer("{{ 1 + messages }}"), user("Hi"))
    with pytest.raises(UserError, match="at least one token"):
        template_tokens(make_tokenizer("{% if false %}{% endif %}"), user("Hi"))


def exactly(tokenizer, num_tokens: int) -> list[dict[str, str]]:
    """A chat of `num_tokens` templated ids: the bytes of a letter the tokenizer never merged are one token each."""
    frame = len(template_tokens(tokenizer, user("q"))) - 1
    return user("q" * (num_tokens - frame))


@pytest.mark.parametrize("policy", ["error", "drop", "cut_left", "cut_right"])
@pytest.mark.parametrize("excess", [-1, 0])
def test_a_prompt_of_up_to_the_limit_passes_whole_under_every_policy(tokenizer, policy, excess):
    messages = exactly(tokenizer, 80 + excess)
    fitted = fit_prompt(tokenizer, messages, 80, policy)
    assert (fitted.messages, len(fitted.tokens), fitted.was_cut) == (messages, 80 + excess, False)


@pytest.mark.parametrize("num_tokens", [81, 3 * 80, 20_000])
def test_a_longer_prompt_is_refused_dropped_or_cut_as_said(tokenizer, num_tokens):
    messages = exactly(tokenizer, num_tokens)
    with pytest.raises(UserError, match=r"at most 80 tokens after the chat template \(data\.max_prompt_tokens\), got "):
        fit_prompt(tokenizer, messages, 80, "error")
    assert fit_prompt(tokenizer, messages, 80, "drop") is None
    for policy in ("cut_left", "cut_right"):
        fitted = fit_prompt(tokenizer, messages, 80, policy)
        # One letter is one token here, so that the limit is met exactly, with the frame whole around it
        assert fitted.tokens == template_tokens(tokenizer, exactly(tokenizer, 80))
        assert fitted.was_cut


@settings(quick, max_examples=30)
@given(text=hostile_text, limit=st.integers(45, 90), policy=st.sampled_from(["cut_left", "cut_right"]))
def test_a_cut_keeps_one_end_of_the_words_the_frame_and_the_limit(tokenizer, text, limit, policy):
    words = "A" + text * 8 + "Z"
    system = {"role": "system", "content": "S"}
    fitted = fit_prompt(tokenizer, [system, *user(words)], limit, policy)
    kept = fitted.messages[1]["content"]
    assert words.endswith(kept) if policy == "cut_left" else words.startswith(kept)
    assert fitted.messages[0] == system
    assert fitted.tokens == template_tokens(tokenizer, fitted.messages)
    assert len(fitted.tokens) <= limit
    assert tokenizer.decode(fitted.tokens).endswith("<|im_end|>\n<|im_start|>assistant\n<think>")


def test_only_the_last_user_message_is_cut(tokenizer):
    messages = [*user("first"), {"role": "assistant", "content": "ok"}, *user("q" * 500)]
    fitted = fit_prompt(tokenizer, messages, 120, "cut_right")
    assert fitted.messages[:2] == messages[:2]
    assert 0 < len(fitted.messages[2]["content"]) < 500


@pytest.mark.parametrize("system", ["s" * 200, "s" * 50_000])
def test_a_limit_that_leaves_no_room_for_the_user_is_refused(tokenizer, system):
    messages = [{"role": "system", "content": system}, *user("hello")]
    with pytest.raises(UserError, match=r"must keep some of the user's words, got none: .* alone take"):
        fit_prompt(tokenizer, messages, 80, "cut_left")


def test_a_cut_that_leaves_only_blanks_is_refused(tokenizer):
    with pytest.raises(UserError, match="got blanks"):
        fit_prompt(tokenizer, user("hello" + " " * 4000), 50, "cut_left")


def test_a_giant_is_judged_from_its_beginning(tokenizer):
    seen = []

    class Spy:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def apply_chat_template(self, messages, **how):
            seen.append(len(messages[-1]["content"]))
            return tokenizer.apply_chat_template(messages, **how)

    assert fit_prompt(Spy(), user("z" * 10_000_000), 128, "drop") is None
    assert fit_prompt(Spy(), user("z" * 10_000_000), 128, "cut_left").was_cut
    # Encoding all of it takes over a gigabyte
    assert max(seen) < 100_000

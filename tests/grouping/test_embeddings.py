from pathlib import Path

import numpy as np
import pytest

from grouping.embeddings import Encoder, find_encoder, sha_of_encoder

pytestmark = pytest.mark.fast

LONG = "word " * 5000


def test_a_text_alone_and_among_long_mates_has_one_vector(minilm: Encoder) -> None:
    texts = ["What is 3 + 4?", "Tell me about the sea. " * 10, "cats", *(f"number {i}" for i in range(9))]
    together = minilm.encode(texts)
    alone = np.concatenate([minilm.encode([text]) for text in texts[:6]])
    cosines = np.sum(together[:6] * alone, axis=1)
    assert cosines.min() > 0.9999
    assert together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)


def test_like_texts_are_near(minilm: Encoder) -> None:
    sums, other, apples = minilm.encode(["What is 3 plus 4?", "The cat sat on the mat.", "Compute 5 + 9."])
    assert sums @ apples > sums @ other + 0.2


def test_vectors_are_the_sentence_encoders_own(minilm: Encoder) -> None:
    """Mean pooling by hand over one unpadded text: the mean of all its tokens' states, at unit length."""
    text = "What is 3 plus 4?"
    tokens = minilm._tokenizer(text, return_tensors="pt")
    state = minilm._model(**tokens).last_hidden_state[0].detach().numpy().mean(axis=0)
    np.testing.assert_allclose(minilm.encode([text])[0], state / np.linalg.norm(state), atol=1e-6)


@pytest.mark.parametrize("blank", ["", " ", "\n\t"])
def test_a_blank_text_has_no_direction(minilm: Encoder, blank: str) -> None:
    vectors = minilm.encode(["sea", blank, "\N{SLICE OF PIZZA}"])
    assert not vectors[1].any()
    assert np.isfinite(vectors).all()
    assert vectors[0].any()
    assert vectors[2].any()


def test_a_long_text_is_cut_at_the_limit_and_counted(minilm: Encoder) -> None:
    before = minilm.num_truncated
    assert minilm.max_tokens == 256
    long, cut = minilm.encode([LONG, "word " * 254])  # 254 words and two special tokens are 256
    assert minilm.num_truncated - before == 1
    assert long @ cut > 0.9999


def test_no_text_gives_no_row(minilm: Encoder) -> None:
    assert minilm.encode([]).shape == (0, 384)


def test_a_folder_that_is_no_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"grouping\.encoder must be minilm or a folder with a config\.json, got"):
        find_encoder(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(ValueError, match="could not be loaded"):
        Encoder(str(tmp_path))


def test_the_sha_follows_the_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    first = sha_of_encoder(tmp_path)
    (tmp_path / "README.md").write_text("not read", encoding="utf-8")
    assert sha_of_encoder(tmp_path) == first
    (tmp_path / "vocab.txt").write_text("a", encoding="utf-8")
    assert sha_of_encoder(tmp_path) != first

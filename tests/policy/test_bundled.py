"""A policy's folder: whatever is wrong with it is one sentence before any worker starts."""

import json
import os
from pathlib import Path

import pytest

from core.errors import UserError
from policy import bundled
from policy.bundled import load_tokenizer, model_digest, resolve_model
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.fast


@pytest.fixture
def model(tmp_path) -> Path:
    return save_tiny_model(tmp_path / "model")


def refusal(model: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_tokenizer(resolve_model(str(model)))
    return str(caught.value)


def test_a_whole_folder_is_taken(model):
    load_tokenizer(resolve_model(str(model)))


@pytest.mark.parametrize("content", [b"", b"abcd", b"<html>not found</html>", b"version https://git-lfs.github.com/"])
def test_weights_that_are_another_file_are_named(model, content):
    (model / "model.safetensors").write_bytes(content)
    assert "model.safetensors must be a whole safetensors file" in refusal(model)


def test_cut_weights_are_named(model):
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size // 2)
    assert "must be a whole safetensors file" in refusal(model)


def test_a_missing_shard_is_named(model):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "got none called model-00002-of-00002.safetensors" in refusal(model)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"x', "config.json must be JSON"),
        ("[]", "must be an object with a model_type"),
        ("{}", "must be an object with a model_type"),
        (
            '{"model_type": "llama", "max_position_embeddings": "many"}',
            "must be a whole number above 0, got 'many'",
        ),
    ],
)
def test_a_broken_config_is_named(model, text, sentence):
    (model / "config.json").write_text(text)
    assert sentence in refusal(model)


@pytest.mark.parametrize("content", ["", "{}", "[]"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_is_one_sentence(model, name, content):
    if (name, content) == ("tokenizer_config.json", "{}"):
        return  # a tokenizer without settings is one
    (model / name).write_text(content)
    assert "the tokenizer of" in refusal(model)


@pytest.mark.parametrize("name", ["nowhere", "x" * 400, "a\0b", ""])
def test_what_is_no_folder_is_one_sentence(name):
    with pytest.raises(UserError, match=r"policy\.model must be smollm2-135m or a folder"):
        resolve_model(name)


def test_the_bundled_model_says_what_it_lacks(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set GRPO_CACHE to a writable folder"):
        resolve_model("smollm2-135m")
    monkeypatch.setenv("GRPO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(bundled, "_bundled_gguf", lambda: tmp_path / "cut.gguf")
    with pytest.raises(UserError, match=r"must convert from .*cut\.gguf"):
        resolve_model("smollm2-135m")
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half-made stays


def test_the_fingerprint_of_a_model_is_of_its_weights_and_config_not_of_its_folder(tmp_path):
    first, same, other = (save_tiny_model(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert model_digest(first) == model_digest(same)
    assert model_digest(first) != model_digest(other)
    (same / "config.json").write_text((same / "config.json").read_text() + " ")
    assert model_digest(first) != model_digest(same)

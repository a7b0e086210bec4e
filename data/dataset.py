"""The rows of a run, checked, split, templated and within the length limit, before any model loads."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import Config, DataConfig
from core.errors import UserError
from core.trajectory import Prompt
from data.arithmetic import make_arithmetic
from data.jsonl import read_jsonl
from data.row import Row
from data.template import fit_prompt


@dataclass(frozen=True)
class Dataset:
    """Training and held-out prompts, and what a person should know of them."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    notes: tuple[str, ...]  # one sentence each: rows skipped, dropped, cut, repeated; a short last step


def load_dataset(config: Config, tokenizer: Any) -> Dataset:
    """The Dataset of config.data; at least one row on each side. UserError names file, line, field and cure.

    Needs a tokenizer and no model. The same config gives the same rows in the same order.
    """
    train_rows, heldout_rows, notes = _read_rows(config)
    if tokenizer.chat_template is None:
        notes.append("The tokenizer has no chat template: prompts are sent as plain text.")
    train, train_notes = _fit_rows(train_rows, "training", config.data, tokenizer)
    heldout, heldout_notes = _fit_rows(heldout_rows, "held-out", config.data, tokenizer)
    notes += train_notes + heldout_notes
    rest = len(train) % config.prompts_per_step
    if rest:
        notes.append(
            f"The last step of each epoch has {rest} prompts instead of {config.prompts_per_step}: "
            f"there are {len(train)} training rows."
        )
    return Dataset(train, heldout, tuple(notes))


def digest_of_rows(rows: tuple[Prompt, ...]) -> str:
    """Fingerprint of what the rows ask and expect: ids alone would not tell an edited file from the old one."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.prompt_id, row.tokens, row.answer]).encode())
    return digest.hexdigest()


def _read_rows(config: Config) -> tuple[tuple[Row, ...], tuple[Row, ...], list[str]]:
    data = config.data
    if data.source == "arithmetic":
        made = make_arithmetic(data.arithmetic, config.seed)
        return made.train, made.heldout, list(made.notes)
    if data.path is None:
        raise UserError("data.path must name a JSONL file when data.source is jsonl")
    rows, notes = _read_file(data.path, data)
    if data.heldout_path is None:
        train, heldout = split_heldout(rows, data.heldout_fraction, config.seed)
        return train, heldout, notes
    heldout, heldout_notes = _read_file(data.heldout_path, data)
    asked = {row.question for row in rows}
    num_shared = sum(row.question in asked for row in heldout)
    if num_shared:
        notes.append(
            f"{num_shared} of {len(heldout)} held-out rows ask a question of the training rows: "
            "held-out accuracy is flattered by them."
        )
    return rows, heldout, notes + heldout_notes


def _read_file(path: Path, data: DataConfig) -> tuple[tuple[Row, ...], list[str]]:
    found = read_jsonl(path, data.bad_rows)
    if not found.num_skipped:
        return found.rows, []
    total = len(found.rows) + found.num_skipped
    return found.rows, [
        f"{found.num_skipped} of {total} rows of {path} skipped (data.bad_rows=skip); the first: {found.first_skipped}."
    ]


def split_heldout(rows: tuple[Row, ...], fraction: float, seed: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """(training, held-out) rows, each in its old order; about `fraction` held out, at least one row on each side.

    Rows with the same question stay on one side. Questions rank by a hash of (seed, question), so that a row more or
    less in the file moves almost none across. Raises UserError where fewer than two different questions exist.
    """
    num_rows_of = Counter(row.question for row in rows)
    if len(num_rows_of) < 2:
        raise UserError(
            f"data.path must hold at least two different questions to hold one out, got {len(num_rows_of)} "
            f"({rows[0].where}); add rows or set data.heldout_path"
        )
    wanted = max(1, round(fraction * len(rows)))
    held: set[str] = set()
    num_held = 0
    for question in sorted(num_rows_of, key=lambda text: hashlib.sha256(f"{seed}:{text}".encode()).digest())[:-1]:
        if num_held >= wanted:
            break
        held.add(question)
        num_held += num_rows_of[question]
    train = tuple(row for row in rows if row.question not in held)
    return train, tuple(row for row in rows if row.question in held)


def _fit_rows(
    rows: tuple[Row, ...], side: str, data: DataConfig, tokenizer: Any
) -> tuple[tuple[Prompt, ...], list[str]]:
    prompts = []
    num_cut = 0
    for row in rows:
        try:
            fitted = fit_prompt(tokenizer, row.chat(data.system_prompt), data.max_prompt_tokens, data.long_prompts)
        except UserError as error:
            raise UserError(f"{side} row {row.row_id!r} ({row.where}): {error}") from None
        if fitted is None:
            continue
        num_cut += fitted.was_cut
        text = "\n".join(message["content"] for message in fitted.messages if message["role"] == "user")
        prompts.append(Prompt(row.row_id, text, tuple(fitted.tokens), row.answer, row.family))
    num_dropped = len(rows) - len(prompts)
    if not prompts:
        raise UserError(
            f"data must keep at least one {side} row, got none: all {num_dropped} are longer than "
            f"{data.max_prompt_tokens} tokens (data.max_prompt_tokens) after the chat template; raise the limit or set "
            "data.long_prompts to cut_left or cut_right"
        )
    notes = []
    if num_dropped:
        notes.append(
            f"{num_dropped} of {len(rows)} {side} rows dropped: longer than {data.max_prompt_tokens} templated tokens."
        )
    if num_cut:
        notes.append(f"{num_cut} of {len(rows)} {side} rows cut to {data.max_prompt_tokens} templated tokens.")
    return tuple(prompts), notes

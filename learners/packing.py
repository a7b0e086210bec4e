"""Packing: the groups of an optimizer step as unpadded micro-batches in which each prompt goes through once.

Legend: P prompt tokens, G samples, N answer tokens, A answers of the step, T tokens of a stream, R rows that predict.
Exact, not an approximation: answers see the prompt and themselves, at the positions they would have alone. What no
trained token depends on is left out: an answer's last token (it predicts nothing), everything after an answer's last
trained token, answers and groups with nothing to train.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from core.trajectory import Group
from policy.attention import group_layout
from policy.model import TokenStream


@dataclass(frozen=True)
class StepTokens:
    """All answer tokens of an optimizer step, end to end: the columns that packed batches index."""

    groups: tuple[Group, ...]
    starts: np.ndarray  # [groups] int64, where each group's tokens begin
    tokens: np.ndarray  # [N] int64
    answer: np.ndarray  # [N] int64, index among the step's answers
    mask: np.ndarray  # [N] bool, tokens to train
    behavior_logprobs: np.ndarray  # [N] float32
    advantages: np.ndarray  # [N] float32
    version: np.ndarray  # [N] int32

    @property
    def num_answers(self) -> int:
        return sum(group.num_samples for group in self.groups)


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch; the columns [n] follow the order of stream.targets."""

    stream: TokenStream
    token: torch.Tensor  # [n] int64, index among the step's tokens
    behavior_logprobs: torch.Tensor  # [n] float32
    advantages: torch.Tensor  # [n] float32

    @property
    def num_tokens(self) -> int:
        """Tokens through the network."""
        return len(self.stream.tokens)

    def to(self, device: torch.device | str) -> "PackedBatch":
        return PackedBatch(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True)
class Piece:
    """Some answers of one group, to go through behind one copy of its prompt."""

    group: int  # index in StepTokens.groups
    samples: tuple[int, ...]
    kept: tuple[int, ...]  # tokens of each sample up to its last trained one; at least 1

    @property
    def num_answer_tokens(self) -> int:
        return sum(kept - 1 for kept in self.kept)  # the last one predicts nothing


def step_tokens(groups: list[Group], advantages: list[np.ndarray], mask_truncated: bool = False) -> StepTokens:
    """The columns of groups with their advantages [G] each; ValueError where counts differ or a value is not finite."""
    if len(groups) != len(advantages):
        raise ValueError(f"advantages must be given for {len(groups)} groups, got {len(advantages)}")
    lengths: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for group, advantage in zip(groups, advantages, strict=True):
        if len(advantage) != group.num_samples or not np.all(np.isfinite(advantage)):
            raise ValueError(
                f"advantages must be {group.num_samples} finite numbers, got {np.asarray(advantage).tolist()} "
                f"(group {group.group_id})"
            )
        lengths.append(np.diff(group.offsets))
        cut = np.array([mask_truncated and reason == "length" for reason in group.finish_reason])
        masks.append(group.loss_mask & ~np.repeat(cut, lengths[-1]))
    all_lengths = _joined(lengths, np.int64)
    sizes = np.array([group.num_tokens for group in groups], dtype=np.int64)
    return StepTokens(
        groups=tuple(groups),
        starts=np.cumsum(sizes) - sizes,
        tokens=_joined([group.tokens for group in groups], np.int64),
        answer=np.repeat(np.arange(len(all_lengths)), all_lengths),
        mask=_joined(masks, bool),
        behavior_logprobs=_joined([group.behavior_logprobs for group in groups], np.float32),
        advantages=np.repeat(_joined([np.asarray(values) for values in advantages], np.float32), all_lengths),
        version=_joined([group.version for group in groups], np.int32),
    )


def informative(step: StepTokens) -> StepTokens:
    """The step without answers whose advantage is exactly 0: they add 0 to the gradient, so they need no forward pass.

    Denominators must come from the whole step. Where no answer is informative the step is returned as it is, so that
    the optimizer still takes its step.
    """
    mask = step.mask & (step.advantages != 0)
    return replace(step, mask=mask) if mask.any() else step


def trainable_pieces(step: StepTokens) -> list[Piece]:
    """One piece a group with something to train, whole."""
    pieces = []
    for index, group in enumerate(step.groups):
        samples, kept = [], []
        for sample in range(group.num_samples):
            begin, end = step.starts[index] + group.offsets[sample : sample + 2]
            trained = np.flatnonzero(step.mask[begin:end])
            if len(trained):
                samples.append(sample)
                kept.append(int(trained[-1]) + 1)
        if samples:
            pieces.append(Piece(index, tuple(samples), tuple(kept)))
    return pieces


def piece_tokens(step: StepTokens, piece: Piece) -> int:
    """Tokens a piece sends through the network."""
    return len(step.groups[piece.group].prompt_tokens) + piece.num_answer_tokens


def split_piece(step: StepTokens, piece: Piece, max_tokens: int) -> list[Piece]:
    """Pieces of at most max_tokens, the prompt repeated; a lone answer longer than that stays whole."""
    if piece_tokens(step, piece) <= max_tokens:
        return [piece]
    prompt = len(step.groups[piece.group].prompt_tokens)
    parts: list[Piece] = []
    samples: list[int] = []
    kept: list[int] = []
    used = prompt
    for sample, length in zip(piece.samples, piece.kept, strict=True):
        if samples and used + length - 1 > max_tokens:
            parts.append(Piece(piece.group, tuple(samples), tuple(kept)))
            samples, kept, used = [], [], prompt
        samples.append(sample)
        kept.append(length)
        used += length - 1
    return [*parts, Piece(piece.group, tuple(samples), tuple(kept))]


def plan_batches(step: StepTokens, pieces: list[Piece], max_tokens: int) -> list[list[Piece]]:
    """The pieces in as few micro-batches of at most max_tokens as filling them evenly in order gives."""
    parts = [part for piece in pieces for part in split_piece(step, piece, max_tokens)]
    sizes = [piece_tokens(step, part) for part in parts]
    if not parts:
        return []
    aim = sum(sizes) / -(-sum(sizes) // max_tokens)  # even filling: a nearly empty last batch wastes a pass
    batches: list[list[Piece]] = []
    used = max_tokens + 1
    for part, size in zip(parts, sizes, strict=True):
        if used + size > max_tokens or used >= aim:
            batches.append([])
            used = 0
        batches[-1].append(part)
        used += size
    return batches


def build_batch(step: StepTokens, pieces: list[Piece]) -> PackedBatch:
    """The micro-batch of some pieces."""
    tokens, positions, lengths, rows, row_of, token = [], [], [], [], [], []
    num_stream = num_rows = 0
    for piece in pieces:
        prompt = step.groups[piece.group].prompt_tokens
        stream_ids, answer_positions, piece_rows, piece_row_of, piece_token = _lay_out(step, piece)
        tokens += [prompt, step.tokens[stream_ids]]
        positions += [np.arange(len(prompt)), len(prompt) + answer_positions]
        lengths.append((len(prompt), *(kept - 1 for kept in piece.kept)))
        rows.append(piece_rows + num_stream)
        row_of.append(piece_row_of + num_rows)
        token.append(piece_token)
        num_stream += len(prompt) + len(stream_ids)
        num_rows += len(piece_rows)
    chosen = np.concatenate(token)
    stream = TokenStream(
        tokens=_tensor(tokens),
        positions=_tensor(positions),
        layout=group_layout(lengths),
        rows=_tensor(rows),
        row_of=_tensor(row_of),
        targets=torch.from_numpy(step.tokens[chosen]),
    )
    return PackedBatch(
        stream,
        torch.from_numpy(chosen),
        torch.from_numpy(step.behavior_logprobs[chosen]),
        torch.from_numpy(step.advantages[chosen]),
    )


def pack(
    groups: list[Group], advantages: list[np.ndarray], max_tokens: int, mask_truncated: bool = False
) -> list[PackedBatch]:
    """The micro-batches of a step for one rank; empty where no token is to be trained."""
    step = step_tokens(groups, advantages, mask_truncated)
    return [build_batch(step, pieces) for pieces in plan_batches(step, trainable_pieces(step), max_tokens)]


def _lay_out(step: StepTokens, piece: Piece) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(stream token ids of the answers, positions after the prompt, rows, row of each token, tokens) of a piece.

    Rows are relative to the piece's first stream token. The prompt's last position is row 0 where any answer's first
    token is trained; the tokens come in the order of their rows.
    """
    group = step.groups[piece.group]
    prompt = len(group.prompt_tokens)
    begins = step.starts[piece.group] + group.offsets[list(piece.samples)]
    place = prompt  # where the next answer begins in the stream
    stream_ids, positions, sources, token = [], [], [], []
    for begin, kept in zip(begins, piece.kept, strict=True):
        stream_ids.append(np.arange(begin, begin + kept - 1))
        positions.append(np.arange(kept - 1))
        sources.append(np.concatenate([[prompt - 1], np.arange(place, place + kept - 1)]))
        token.append(np.arange(begin, begin + kept))
        place += kept - 1
    all_tokens = np.concatenate(token)
    trained = step.mask[all_tokens]
    all_tokens, source = all_tokens[trained], np.concatenate(sources)[trained]
    order = np.argsort(source, kind="stable")
    rows, row_of = np.unique(source[order], return_inverse=True)
    return np.concatenate(stream_ids), np.concatenate(positions), rows, row_of, all_tokens[order]


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)


def _tensor(parts: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))

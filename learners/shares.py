"""Who runs what: the micro-batches of each rank, the same number on all of them."""

from dataclasses import replace

import torch

from learners.packing import PackedBatch, Piece, StepTokens, build_batch, piece_tokens, plan_batches, trainable_pieces


def batches_of_rank(tokens: StepTokens, rank: int, num_ranks: int, max_tokens: int) -> list[tuple[PackedBatch, bool]]:
    """The rank's micro-batches, and whether each counts; as many on every rank, since collectives need all.

    A rank with fewer repeats the step's smallest piece with advantages 0. Needs at least one trainable token.
    """
    shares = share_out(tokens, trainable_pieces(tokens), num_ranks)
    plans = [plan_batches(tokens, share, max_tokens) for share in shares]
    mine = [(build_batch(tokens, plan), True) for plan in plans[rank]]
    num_idle = max(map(len, plans)) - len(mine)
    if num_idle:
        smallest = min(
            (piece for plan in plans for batch in plan for piece in batch), key=lambda piece: sum(piece.kept)
        )
        mine += [(without_effect(build_batch(tokens, [smallest])), False)] * num_idle
    return mine


def share_out(step: StepTokens, pieces: list[Piece], num_ranks: int) -> list[list[Piece]]:
    """Each rank's pieces, balanced by tokens: the largest first, each to the rank with the least so far.

    A group goes to one rank whole; every rank computes the same shares.
    """
    shares: list[list[Piece]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for piece in sorted(pieces, key=lambda piece: (-piece_tokens(step, piece), piece.group)):
        rank = loads.index(min(loads))
        shares[rank].append(piece)
        loads[rank] += piece_tokens(step, piece)
    return [sorted(share, key=lambda piece: piece.group) for share in shares]


def without_effect(batch: PackedBatch) -> PackedBatch:
    """The same batch with advantages 0: what a rank runs while the others still have work (collectives need all)."""
    return replace(batch, advantages=torch.zeros_like(batch.advantages))

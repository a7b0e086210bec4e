import numpy as np
import pytest

from learners.packing import piece_tokens, step_tokens, trainable_pieces
from learners.shares import batches_of_rank, share_out

pytestmark = pytest.mark.fast


def test_ranks_share_all_groups_once_and_evenly(make_group):
    groups = [make_group([length], seed=length) for length in (2, 9, 4, 7, 3, 8)]
    step = step_tokens(groups, [np.zeros(1)] * 6)
    shares = share_out(step, trainable_pieces(step), 2)
    assert sorted(piece.group for share in shares for piece in share) == list(range(6))
    # tokens are 5 + length - 1: 6, 13, 8, 11, 7, 12; 57 in all; 13+8+7 and 12+11+6
    assert [sum(piece_tokens(step, piece) for piece in share) for share in shares] == [28, 29]


def test_every_rank_runs_the_same_number_of_micro_batches_and_idle_ones_have_no_effect(make_group):
    step = step_tokens([make_group([4]), make_group([20], seed=1)], [np.ones(1)] * 2)
    ranks = [batches_of_rank(step, rank, 3, max_tokens=16) for rank in range(3)]
    assert [[counts for _, counts in batches] for batches in ranks] == [[True], [True], [False]]
    assert ranks[2][0][0].advantages.abs().sum() == 0

import pytest
import torch

from policy.attention import group_layout, shared_prefix_attention

pytestmark = pytest.mark.fast


def test_an_answer_sees_its_prompt_and_itself_only():
    layout = group_layout([(2, 1, 2)])  # prompt of 2, answers of 1 and 2
    assert layout.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_groups_of_different_length_are_padded_inside_attention_only():
    layout = group_layout([(1,), (1, 2)])
    assert layout.gather.tolist() == [0, 0, 0, 1, 2, 3]
    assert layout.scatter.tolist() == [0, 3, 4, 5]


def test_each_group_attends_as_if_it_were_alone():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    together, _ = shared_prefix_attention(None, query, key, value, None, layout=group_layout([(2, 3), (1, 2, 1)]))
    assert together.shape == (1, 9, 4, 8)
    for part, lengths in ((slice(0, 5), (2, 3)), (slice(5, 9), (1, 2, 1))):
        alone, _ = shared_prefix_attention(
            None, query[:, :, part], key[:, :, part], value[:, :, part], None, layout=group_layout([lengths])
        )
        torch.testing.assert_close(together[:, part], alone)


def test_a_missing_layout_and_a_short_window_are_refused():
    tensor = torch.zeros(1, 1, 3, 8)
    with pytest.raises(ValueError, match="must be given layout"):
        shared_prefix_attention(None, tensor, tensor, tensor, None)
    with pytest.raises(ValueError, match="sliding window of 2, got 3 tokens"):
        shared_prefix_attention(None, tensor, tensor, tensor, None, layout=group_layout([(3,)]), sliding_window=2)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        group_layout([(0, 2)])

"""Attention over a stream of groups: each prompt once, its answers seeing it and themselves, nothing else.

Legend: T tokens of the stream, B groups, L the longest group, H query heads, K key heads, D head width.
The projections run on the unpadded stream [1, T, ...]; groups are padded to [B, L] inside attention only, which is
cheap where one call a group is not (30 layers x B small calls). Works for every Hugging Face decoder that goes
through AttentionInterface.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "shared_prefix"


@dataclass(frozen=True)
class GroupLayout:
    """Where the groups of a stream lie, and who may see whom."""

    gather: torch.Tensor  # [B*L] int64, stream position of each padded place; 0 where it is padding
    scatter: torch.Tensor  # [T] int64, padded place of each stream position
    mask: torch.Tensor  # [B, 1, L, L] bool, True where a query (row) sees a key (column)

    @property
    def num_groups(self) -> int:
        return self.mask.shape[0]

    @property
    def max_length(self) -> int:
        return self.mask.shape[-1]

    def to(self, device: torch.device | str) -> "GroupLayout":
        return GroupLayout(self.gather.to(device), self.scatter.to(device), self.mask.to(device))


def group_layout(lengths: list[tuple[int, ...]]) -> GroupLayout:
    """The layout of a stream whose group b holds lengths[b][0] prompt tokens, then the tokens of each answer.

    Raises ValueError for an empty prompt: a query must see at least one key.
    """
    if any(group[0] < 1 for group in lengths):
        raise ValueError(f"a prompt must have at least one token, got {[group[0] for group in lengths]}")
    sizes = np.array([sum(group) for group in lengths])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    longest = int(sizes.max())
    segment = np.full((len(lengths), longest), -1)  # 0: prompt, s: answer s, -1: padding (which sees padding)
    for row, group in enumerate(lengths):
        segment[row, : sizes[row]] = np.repeat(np.arange(len(group)), group)
    place = np.arange(longest)
    inside = place[None, :] < sizes[:, None]
    gather = np.where(inside, starts[:, None] + place[None, :], 0).reshape(-1)
    segments = torch.from_numpy(segment)
    sees = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    mask = (sees & torch.ones(longest, longest, dtype=torch.bool).tril()).unsqueeze(1)
    return GroupLayout(torch.from_numpy(gather), torch.from_numpy(np.flatnonzero(inside)), mask)


def shared_prefix_attention(  # noqa: PLR0917 (the signature is AttentionInterface's)
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: GroupLayout | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [1, T, H, D] of query [1, H, T, D], key and value [1, K, T, D] under a layout's mask.

    Raises ValueError without a layout, or where a sliding window is shorter
    than a group (the mask here knows no window).
    """
    if layout is None:
        raise ValueError(f"{ATTENTION_NAME} attention must be given layout=group_layout(...), got None")
    if sliding_window is not None and sliding_window < layout.max_length:
        raise ValueError(
            f"a group must fit the model's sliding window of {sliding_window}, got {layout.max_length} tokens"
        )
    padded = (layout.num_groups, layout.max_length)
    queries, keys, values = (
        _Pad.apply(part[0].transpose(0, 1), layout.gather, layout.scatter).unflatten(0, padded).transpose(1, 2)
        for part in (query, key, value)
    )
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda:
        # On CUDA grouped heads with a mask fall back to the slow unfused kernel: repeat the keys instead.
        repeats = query.shape[1] // key.shape[1]
        keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
        grouped = False
    output = scaled_dot_product_attention(
        queries, keys, values, attn_mask=layout.mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    rows = output.transpose(1, 2).reshape(-1, *output.shape[1::2])
    return _Unpad.apply(rows, layout.scatter).unsqueeze(0), None


class _Pad(torch.autograd.Function):
    """Padded rows [B*L, ...] of stream rows [T, ...]; padding repeats row 0, which no real query sees.

    Written out because its gradient is a plain gather too (padding gets none), where autograd's own would add up rows
    one by one: on CPU that took longer than the attention.
    """

    @staticmethod
    def forward(ctx, rows, gather, scatter):
        ctx.save_for_backward(scatter)
        return rows.index_select(0, gather)

    @staticmethod
    def backward(ctx, grads):
        (scatter,) = ctx.saved_tensors
        return grads.index_select(0, scatter), None, None


class _Unpad(torch.autograd.Function):
    """Stream rows [T, ...] of padded rows [B*L, ...]; the padding gets a gradient of zero."""

    @staticmethod
    def forward(ctx, rows, scatter):
        ctx.save_for_backward(scatter)
        ctx.num_rows = len(rows)
        return rows.index_select(0, scatter)

    @staticmethod
    def backward(ctx, grads):
        (scatter,) = ctx.saved_tensors
        padded = grads.new_zeros(ctx.num_rows, *grads.shape[1:])
        return padded.index_copy_(0, scatter, grads), None


AttentionInterface.register(ATTENTION_NAME, shared_prefix_attention)

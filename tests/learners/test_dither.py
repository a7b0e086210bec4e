"""Dithered masters: the bf16 model stays, and updates below its grid are kept in expectation."""

import pytest
import torch

from learners.dither import dithered

pytestmark = pytest.mark.fast


def on_grid(num: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(num, generator=generator) * 0.1).bfloat16().float()


def test_dithering_leaves_every_bf16_weight_as_it_is():
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 2.0**-126, 1e30, -3.0]).bfloat16().float()
    for weight in (on_grid(100_000), special):
        assert torch.equal(dithered(weight, seed=5).bfloat16().float(), weight)


def test_masters_fill_their_cells_and_differ_by_seed():
    weight = torch.full((10_000,), 1.5)  # grid step 2^-7: the cell is 1.5 +- 2^-8
    offset = dithered(weight, seed=5) - weight
    assert offset.abs().max() <= 2**-8
    assert float(offset.std()) == pytest.approx(2**-7 / 12**0.5, rel=0.03)  # uniform
    assert torch.equal(dithered(weight, 5), dithered(weight, 5))
    assert not torch.equal(dithered(weight, 5), dithered(weight, 6))


def test_an_update_below_the_grid_moves_the_bf16_weights_by_it_in_expectation():
    weight = on_grid(1_000_000)
    update = 2e-5 * torch.sign(torch.randn(len(weight), generator=torch.Generator().manual_seed(2)))
    moved = (dithered(weight, seed=5) + update).bfloat16().float() - weight
    assert float((moved * torch.sign(update)).mean()) == pytest.approx(2e-5, rel=0.05)
    still = (weight + update).bfloat16().float() - weight  # what masters on the grid would do
    assert float((still * torch.sign(update)).mean()) < 0.6e-5  # only weights near 0 move


def test_a_weight_off_the_grid_is_left_alone():
    weight = torch.tensor([0.1, 0.2, 1.0])  # 0.1 and 0.2 are no bf16 numbers
    assert torch.equal(dithered(weight, seed=5)[:2], weight[:2])
    assert dithered(weight, seed=5)[2] != weight[2]

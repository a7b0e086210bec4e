"""Noise below bf16's rounding, laid once over the fp32 master weights, so that small updates are not rounded away.

Published weights lie on bf16's grid, and so would masters made from them. An update smaller than half a grid step then
changes no bf16 weight at all until many of them have added up: with Adam, weights of 0.1 and a learning rate of 2e-5,
some ten updates. The policy that samples and is differentiated stands still meanwhile. With each master placed
uniformly within its own grid cell, the bf16 model is the same to the bit, and an update of d moves a weight by one
grid step h with probability d / h: by d in expectation, from the first update on. This is stochastic rounding (Gupta
et al. 2015, arXiv:1502.02551, equation 1) with the draw taken once instead of at every update.
"""

import zlib
from typing import Any

import torch
from torch import nn

SIGNIFICANT_BITS = 8  # of bf16, the hidden one counted


def dithered(weight: torch.Tensor, seed: int) -> torch.Tensor:
    """float32 values, each uniform among those that round to the given weight in bf16; of the same shape.

    A weight that is not on the grid stays as it is: it lies somewhere in its cell already.
    """
    weight = weight.detach().float()
    grid = weight.bfloat16().float()
    _, exponent = torch.frexp(grid)
    step = torch.ldexp(torch.ones_like(grid), exponent - SIGNIFICANT_BITS)
    generator = torch.Generator(device=grid.device).manual_seed(seed)
    moved = grid + step * (torch.rand(grid.shape, generator=generator, device=grid.device) - 0.5)
    inside = moved.bfloat16().float() == grid  # not so for zeros, and where a cell is narrower on one side
    return torch.where((weight == grid) & inside, moved, weight)


def dither_parameters(parameters: dict[str, nn.Parameter], seed: int) -> None:
    """Dithers plain fp32 weights in place: for a learner in fp32 whose weights a sampler rounds to bf16."""
    for name, parameter in parameters.items():
        with torch.no_grad():
            parameter.copy_(dithered(parameter, _seed_of(name, seed)))


def dither_masters(engine: Any, deepspeed: Any, parameters: dict[str, nn.Parameter], seed: int) -> None:
    """Dithers the fp32 masters of DeepSpeed's bf16 weights, at any ZeRO stage; every rank must call it."""
    whole = _whole_masters(engine.optimizer) if engine.zero_optimization_stage() == 0 else {}
    for name, parameter in parameters.items():
        if id(parameter) in whole:
            whole[id(parameter)].data.copy_(dithered(whole[id(parameter)], _seed_of(name, seed)))
            continue
        master = deepspeed.utils.safe_get_full_fp32_param(parameter)
        if master is None:
            raise RuntimeError(f"{name} must have an fp32 master in DeepSpeed's optimizer, got none")
        deepspeed.utils.safe_set_full_fp32_param(parameter, dithered(master, _seed_of(name, seed)))


def _whole_masters(optimizer: Any) -> dict[int, torch.Tensor]:
    """Masters by the id of their bf16 weight: without ZeRO, DeepSpeed keeps them beside each other in lists."""
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}


def _seed_of(name: str, seed: int) -> int:
    """The same on every rank and at every ZeRO stage."""
    return zlib.crc32(f"{seed}/{name}".encode())

"""The plain way: every answer a row behind its own copy of the prompt, padded. What packing is measured against."""

from dataclasses import dataclass

import torch

from learners.packing import StepTokens


@dataclass(frozen=True)
class PaddedBatch:
    """A answers of L places each; the N answer tokens in the order of the step."""

    tokens: torch.Tensor  # [A, L] int64, padded on the right with 0
    attention_mask: torch.Tensor  # [A, L] int64, 1 on real tokens
    row: torch.Tensor  # [N] int64, the answer of each answer token
    source: torch.Tensor  # [N] int64, the place whose logits predict it


def pad(step: StepTokens) -> PaddedBatch:
    """All answers of a step as rows."""
    rows: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for group in step.groups:
        prompt = torch.from_numpy(group.prompt_tokens.astype("int64"))
        for sample in range(group.num_samples):
            answer = torch.from_numpy(group.answer_tokens(sample).astype("int64"))
            places.append(torch.full((len(answer),), len(rows)))
            sources.append(len(prompt) - 1 + torch.arange(len(answer)))
            rows.append(torch.cat([prompt, answer]))
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    attention_mask = (torch.arange(tokens.shape[1])[None, :] < lengths[:, None]).to(torch.int64)
    return PaddedBatch(tokens, attention_mask, torch.cat(places), torch.cat(sources))

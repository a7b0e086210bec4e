"""The model: loading, token log-probs of a packed stream, weights out as a Hugging Face folder.

Legend: T tokens of the stream, R rows (positions that predict), N predicted tokens, H hidden width, V vocabulary.
N > R where a prompt's last position predicts the first token of every answer: that row is computed once.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import core.machine
from core.errors import UserError
from policy.attention import ATTENTION_NAME, GroupLayout

# (log-probs [n], slice of the N tokens they belong to) -> the scalar those tokens add to the loss
Objective = Callable[[torch.Tensor, slice], torch.Tensor]

_COPIED = ("*.json", "*.jinja", "*.model", "*.txt")  # a folder's config and tokenizer; weights are not among them


@dataclass(frozen=True)
class TokenStream:
    """A micro-batch without padding: groups end to end, each [prompt, answer 1, answer 2, ...]."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, restarted after the prompt for each answer
    layout: GroupLayout
    rows: torch.Tensor  # [R] int64, stream positions whose hidden state predicts something
    row_of: torch.Tensor  # [N] int64, row that predicts each token; never falls
    targets: torch.Tensor  # [N] int64, the predicted tokens

    def to(self, device: torch.device | str) -> "TokenStream":
        return TokenStream(*(getattr(self, field.name).to(device) for field in fields(self)))


class TokenScores(NamedTuple):
    """What a pass over a stream gives."""

    loss: torch.Tensor  # scalar, differentiable; 0 where no objective was asked
    logprobs: torch.Tensor  # [N] float32, without gradient
    entropy: torch.Tensor  # [N] float32, nats, of the distribution each token was drawn from; without gradient


def resolve_dtype(name: Any, device: Any) -> torch.dtype:
    """The torch type of a config's dtype; auto is bfloat16 where the hardware multiplies it, else float32."""
    resolved = core.machine.resolve_dtype(name, device, core.machine.read_machine())
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[resolved]


def load_model(folder: Path | str, dtype: torch.dtype, device: str = "cpu") -> Any:
    """The causal language model of a Hugging Face folder, with shared-prefix attention; UserError without one."""
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION_NAME)
    except (OSError, ValueError) as error:
        raise UserError(f"model {folder} could not be loaded: {' '.join(str(error).split())}") from None
    return prepare_model(model).to(device)


def prepare_model(model: Any) -> Any:
    """The same model with shared-prefix attention and dropout off; UserError for a head this module does not know."""
    config: Any = model.config
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None) not in (None, 1.0):
            raise UserError(
                f"a model with {name} must not be trained here: log-probs would be wrong ({config.model_type})"
            )
    if model.get_output_embeddings().bias is not None:
        raise UserError(f"the output layer must have no bias, got one ({config.model_type})")
    model.set_attn_implementation(ATTENTION_NAME)
    config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if getattr(module, "attention_dropout", 0.0):
            module.attention_dropout = 0.0
    return model


class LogprobHead(nn.Module):
    """The output layer; shares its weight with the model's own, so that ZeRO 3 gathers it around this forward."""

    def __init__(self, weight: nn.Parameter, temperature: float, chunk: int):
        super().__init__()
        self.weight = weight
        self.temperature = temperature
        self.chunk = chunk

    def forward(
        self, hidden: torch.Tensor, row_of: torch.Tensor, targets: torch.Tensor, objective: Objective | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss scalar, log-probs [N], entropy [N]) of hidden [R, H]."""
        return _HeadLoss.apply(hidden, self.weight, row_of, targets, objective, self.temperature, self.chunk)


class Policy(nn.Module):
    """A causal language model seen as: a stream in, log-probs of its answer tokens out.

    temperature divides the logits, so the log-probs are those of the distribution the sampler draws from. A sampler's
    top_p or top_k below full is not applied here (the kept set depends on the sampler's own rounding); the difference
    is the importance weight's to correct, and shows in mean_abs_logprob_difference.
    """

    def __init__(self, model: Any, temperature: float = 1.0, chunk: int = 512, checkpoint_every_layers: int = 0):
        super().__init__()
        self.model = model
        self.head = LogprobHead(model.get_output_embeddings().weight, temperature, chunk)
        if checkpoint_every_layers:
            _checkpoint_layers(model, checkpoint_every_layers)

    def score(self, stream: TokenStream, objective: Objective | None = None) -> TokenScores:
        """Log-probs and entropy of the stream's targets, and with an objective its differentiable sum."""
        return TokenScores(*self(stream, objective))

    def forward(
        self, stream: TokenStream, objective: Objective | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The fields of TokenScores as a plain tuple, which is what DeepSpeed's hooks understand."""
        output = self.model.get_decoder()(
            input_ids=stream.tokens[None], position_ids=stream.positions[None], use_cache=False, layout=stream.layout
        )
        hidden = output.last_hidden_state[0].index_select(0, stream.rows)
        return self.head(hidden, stream.row_of, stream.targets, objective)


class _HeadLoss(torch.autograd.Function):
    """Output layer, log-softmax and loss in one pass over chunks of rows: [R, V] never stands whole in memory.

    The objective's derivative by the log-probs is taken inside each chunk, so both gradients (by hidden and by weight)
    come out of the forward pass and the logits are neither kept nor computed again.
    """

    @staticmethod
    def forward(ctx, hidden, weight, row_of, targets, objective, temperature, chunk):  # noqa: PLR0917
        num_rows = hidden.shape[0]
        edges = torch.arange(0, num_rows + chunk, chunk, device=row_of.device).clamp(max=num_rows)
        token_edges = torch.searchsorted(row_of, edges).tolist()
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        loss = logprobs.new_zeros((), dtype=torch.float64)
        trains = objective is not None and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        hidden_grad = torch.zeros_like(hidden if trains else hidden[:0])
        weight_grad = torch.zeros_like(weight if trains else weight[:0], dtype=torch.float32)
        for part, start in enumerate(range(0, num_rows, chunk)):
            tokens = slice(token_edges[part], token_edges[part + 1])
            rows, wanted = row_of[tokens] - start, targets[tokens]
            inputs = hidden[start : start + chunk]
            logits = inputs @ weight.t()
            exponentials, sums, logprobs[tokens], entropy[tokens] = _softmax_rows(logits, rows, wanted, temperature)
            if objective is None:
                continue
            value, slope = _value_and_slope(objective, logprobs[tokens], tokens)
            loss += value
            if trains:
                _logit_grad_(exponentials, sums, rows, wanted, slope / temperature)
                grads = exponentials.to(hidden.dtype)
                torch.mm(grads, weight, out=hidden_grad[start : start + chunk])
                _add_product_(weight_grad, grads, inputs)
        if trains:
            ctx.save_for_backward(hidden_grad, weight_grad)
            ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(logprobs, entropy)
        return loss.float(), logprobs, entropy

    @staticmethod
    def backward(ctx, loss_grad, *_):
        hidden_grad, weight_grad = ctx.saved_tensors
        scaled = weight_grad.mul_(loss_grad).to(ctx.weight_dtype)  # in place: this graph is walked once
        return hidden_grad.mul_(loss_grad), scaled, None, None, None, None, None


def _softmax_rows(
    logits: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(exponentials [r, V] float32, their sums [r], log-probs [n], entropy [n]) of logits [r, V].

    The logits are overwritten. Few passes over [r, V], no more than two such arrays: on CPU each pass is a share of
    the matrix product's own time.
    """
    scaled = logits.float()
    scaled.sub_(scaled.amax(dim=-1, keepdim=True))
    if temperature != 1.0:
        scaled.div_(temperature)
    picked = scaled[rows, wanted]
    exponentials = scaled.exp()
    sums = exponentials.sum(dim=-1)
    normaliser = sums.log()
    # entropy = normaliser - sum p * logit
    mean_logit = scaled.mul_(exponentials).sum(dim=-1) / sums
    return exponentials, sums, picked - normaliser[rows], (normaliser - mean_logit)[rows]


def _value_and_slope(objective: Objective, logprobs: torch.Tensor, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        value = objective(leaf, tokens)
        (slope,) = torch.autograd.grad(value, leaf)
    return value.detach(), slope


def _logit_grad_(
    exponentials: torch.Tensor, sums: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor, slope: torch.Tensor
) -> None:
    """Turns exponentials [r, V] into d loss / d logits: sum over a row's tokens of slope * (one-hot - probability)."""
    totals = torch.zeros_like(sums).index_add_(0, rows, slope)
    exponentials.mul_((-totals / sums)[:, None])
    exponentials.index_put_((rows, wanted), slope, accumulate=True)


def _add_product_(total: torch.Tensor, grads: torch.Tensor, inputs: torch.Tensor) -> None:
    if grads.dtype == total.dtype:
        total.addmm_(grads.t(), inputs)
    else:  # bf16 products, summed over the chunks in fp32
        total.add_(grads.t() @ inputs)


def _checkpoint_layers(model: Any, every: int) -> None:
    """Recomputes every n-th decoder layer in the backward pass instead of keeping its activations."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for position, layer in enumerate(model.get_decoder().layers):
        layer.gradient_checkpointing = position % every == 0


def export_weights(
    state_dict: dict[str, torch.Tensor], source: Path | str, folder: Path | str, dtype: torch.dtype | None = None
) -> None:
    """Writes a Hugging Face folder: source's config and tokenizer, state_dict as safetensors; whole or not at all.

    dtype None keeps the tensors' own; config.json names it. A tied output layer is left out, as save_pretrained does.
    """
    source, folder = Path(source), Path(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state_dict.items()}
    if config.get("tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
    config.pop("torch_dtype", None)
    config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    os.chmod(partial / "model.safetensors", 0o644)
    _replace_folder(partial, folder)


def _replace_folder(new: Path, folder: Path) -> None:
    """Puts `new` in the place of `folder`; a reader sees the old one, for a moment none, or the new one: never half."""
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old)
    else:
        new.rename(folder)

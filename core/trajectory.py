"""The datum: one prompt's G sampled answers, as one object in the object store.

Legend: P prompt tokens, G samples, N answer tokens of all samples laid end to end.
"""

from dataclasses import dataclass, fields

import numpy as np

FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Prompt:
    """One row of the data, templated: what a rollout worker is asked to answer."""

    prompt_id: str  # unique in its source
    text: str  # the user's words, before the template: what the encoder reads
    tokens: tuple[int, ...]  # [P] ids after the chat template
    answer: str
    family: str = ""  # optional label of the source, for reports only


@dataclass(frozen=True)
class Group:
    """One prompt's G sampled answers; checked once here, never mutated.

    Raises ValueError where the columns do not fit together.
    """

    group_id: str  # epoch:prompt_id:attempt, unique in the run
    prompt_id: str
    answer: str  # the reference answer the rewards compare with
    prompt_tokens: np.ndarray  # [P] int32
    tokens: np.ndarray  # [N] int32
    offsets: np.ndarray  # [G+1] int64, where each answer begins in `tokens`
    behavior_logprobs: np.ndarray  # [N] float32, under the weights and the distribution that drew the token
    version: np.ndarray  # [N] int32, weight version that drew each token
    finish_reason: tuple[str, ...]  # [G] of FINISH_REASONS
    loss_mask: np.ndarray  # [N] bool, False on tokens the policy did not sample
    cluster: int  # the prompt's label, given before rollout
    cluster_version: int
    text: tuple[str, ...]  # [G] decoded answers, what rewards read

    def __post_init__(self) -> None:
        num_tokens, num_samples = len(self.tokens), len(self.offsets) - 1
        _check(num_samples >= 1, "offsets must hold at least two entries", self.group_id)
        _check(len(self.prompt_tokens) >= 1, "prompt_tokens must not be empty", self.group_id)
        _check(
            self.offsets[0] == 0 and self.offsets[-1] == num_tokens and bool(np.all(np.diff(self.offsets) >= 0)),
            f"offsets must rise from 0 to {num_tokens}, got {self.offsets.tolist()}",
            self.group_id,
        )
        for name in ("behavior_logprobs", "version", "loss_mask"):
            got = len(getattr(self, name))
            _check(got == num_tokens, f"{name} must have {num_tokens} entries, got {got}", self.group_id)
        for name in ("finish_reason", "text"):
            got = len(getattr(self, name))
            _check(got == num_samples, f"{name} must have {num_samples} entries, got {got}", self.group_id)
        _check(
            set(self.finish_reason) <= set(FINISH_REASONS), f"finish_reason is one of {FINISH_REASONS}", self.group_id
        )
        _check(bool(np.all(np.isfinite(self.behavior_logprobs))), "behavior_logprobs must be finite", self.group_id)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def answer_tokens(self, sample: int) -> np.ndarray:
        """Token ids [L] of one sample."""
        return self.tokens[self.offsets[sample] : self.offsets[sample + 1]]


@dataclass(frozen=True)
class GroupInfo:
    """What the driver sees of a group: small, travels inline, holds no tokens."""

    group_id: str
    prompt_id: str
    worker: str
    num_samples: int
    num_prompt_tokens: int
    num_tokens: int
    num_truncated: int  # answers that ended by length
    num_distinct: int  # different answers among the G
    distinct_1: float  # different tokens as a share of the group's tokens; nan where there is none
    distinct_2: float  # the same of pairs of neighbouring tokens: distinct-n of Li et al. 2016 (1510.03055)
    min_version: int
    max_version: int
    cluster: int
    cluster_version: int
    seconds: float  # from ask to last token


def distinct_pairs(group: Group) -> float:
    """Different pairs of neighbouring tokens as a share of all such pairs of a group's answers; nan without a pair."""
    tokens = group.tokens.astype(np.int64)
    pairs = (tokens[:-1] << 32) | tokens[1:]
    inside = np.ones(max(0, len(tokens) - 1), bool)
    borders = group.offsets[1:-1] - 1  # the last token of one answer and the first of the next are no pair
    inside[borders[(borders >= 0) & (borders < len(inside))]] = False
    return distinct_share(pairs[inside])


def distinct_share(values: np.ndarray) -> float:
    """Different values as a share of all [N]; nan of none."""
    return len(np.unique(values)) / len(values) if len(values) else float("nan")


def _check(holds: bool, what: str, group_id: str) -> None:
    if not holds:
        raise ValueError(f"group {group_id}: {what}")


def answered(prompt: Prompt, text: str, where: str) -> Group:
    """A group of one answer of which only the text is known: what reward terms need where nothing is trained."""
    return Group(
        group_id=f"{where}:{prompt.prompt_id}:0",
        prompt_id=prompt.prompt_id,
        answer=prompt.answer,
        prompt_tokens=np.asarray(prompt.tokens, np.int32),
        tokens=np.zeros(0, np.int32),
        offsets=np.zeros(2, np.int64),
        behavior_logprobs=np.zeros(0, np.float32),
        version=np.zeros(0, np.int32),
        finish_reason=("stop",),
        loss_mask=np.zeros(0, bool),
        cluster=0,
        cluster_version=0,
        text=(text,),
    )

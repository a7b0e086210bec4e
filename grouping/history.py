"""Discounted reward statistics of every prompt judged so far.

Only per-prompt sums are kept; a cluster's statistics are their sums under whatever labels hold now, so a refit needs no
translation of old clusters into new ones.
"""

import numpy as np

from grouping.pools import Pool, PromptMoments, pools_by_label

# Columns of a prompt's sums over its groups v, each group weighted a_v = discount^(last_step - step_v):
WEIGHT, MEAN, NOISE, WITHIN, WITHIN_WEIGHT = range(5)  # sum a, sum a*mean, sum a^2/n, sum a*var, sum a[n>1]
NUM_COLUMNS = 5


class History:
    """The past rewards. A prompt's sums are as of its own last step; weights are brought to a common step when read."""

    def __init__(self, discount: float) -> None:
        self.discount = discount  # a step
        self.prompt_ids: list[str] = []
        self._row: dict[str, int] = {}
        self._sums = np.zeros((64, NUM_COLUMNS))
        self._last_step = np.zeros(64, dtype=np.int64)
        self._text_row = np.zeros(64, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def text_rows(self) -> np.ndarray:
        """For each prompt the row of its text among the known texts [R]."""
        return self._text_row[: len(self)]

    def add(self, step: int, prompt_id: str, text_row: int, rewards: np.ndarray) -> None:
        """Take in one group's rewards [G]; steps of a prompt never fall."""
        row = self._row.get(prompt_id)
        if row is None:
            row = self._new_row(prompt_id)
            self._last_step[row] = step
        decay = self.discount ** int(step - self._last_step[row])
        num_samples = len(rewards)
        sums = self._sums[row]
        sums *= decay
        sums[NOISE] *= decay  # squared weights
        sums += (
            1.0,
            np.mean(rewards),
            1.0 / num_samples,
            np.var(rewards, ddof=1) if num_samples > 1 else 0.0,
            float(num_samples > 1),
        )
        self._last_step[row] = step
        self._text_row[row] = text_row

    def pools(self, step: int, labels: np.ndarray) -> dict[int, Pool]:
        """The Pool of each label [R] (one a prompt, in the order of prompt_ids), discounted to `step`."""
        return pools_by_label(self.moments(step), labels)

    def moments(self, step: int) -> PromptMoments:
        """PromptMoments [R] of all prompts. Means and noise do not decay: ratios of sums that decay together."""
        sums = self._sums[: len(self)]
        decay = self.discount ** (step - self._last_step[: len(self)]).astype(np.float64)
        weight = sums[:, WEIGHT]
        return PromptMoments(
            weight=weight * decay,
            mean=sums[:, MEAN] / weight,
            noise=sums[:, NOISE] / weight**2,
            within_sum=sums[:, WITHIN] * decay,
            within_weight=sums[:, WITHIN_WEIGHT] * decay,
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """The sums, to be stored beside prompt_ids."""
        size = len(self)
        return {"sums": self._sums[:size], "last_step": self._last_step[:size], "text_row": self._text_row[:size]}

    def load(self, prompt_ids: list[str], arrays: dict[str, np.ndarray]) -> None:
        """Take the place of what was here with stored sums."""
        self.prompt_ids = list(prompt_ids)
        self._row = {name: row for row, name in enumerate(self.prompt_ids)}
        self._sums = arrays["sums"].reshape(-1, NUM_COLUMNS).copy()
        self._last_step, self._text_row = arrays["last_step"].copy(), arrays["text_row"].copy()

    def _new_row(self, prompt_id: str) -> int:
        row = self._row[prompt_id] = len(self)
        self.prompt_ids.append(prompt_id)
        if row == len(self._sums):
            room = max(64, row)  # doubles
            self._sums = np.concatenate([self._sums, np.zeros((room, NUM_COLUMNS))])
            self._last_step = np.concatenate([self._last_step, np.zeros(room, dtype=np.int64)])
            self._text_row = np.concatenate([self._text_row, np.zeros(room, dtype=np.int64)])
        return row

"""The texts seen so far, with their vectors and labels: the encoder's cache and what refits run on."""

from collections.abc import Callable, Sequence

import numpy as np

from grouping.clusters import SET_ASIDE, unit_rows


class KnownTexts:
    """A growing table: text, vector, label.

    Vectors are rounded to float16 once, before any use, so that a table stored in half the space is the same table.
    """

    def __init__(self, encode: Callable[[Sequence[str]], np.ndarray], width: int) -> None:
        self._encode = encode  # N texts -> [N, width]
        self.texts: list[str] = []
        self._row: dict[str, int] = {}
        self._vectors = np.zeros((64, width), dtype=np.float16)
        self._labels = np.full(64, SET_ASIDE, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def labels(self) -> np.ndarray:
        """Labels [N] int64, writable."""
        return self._labels[: len(self)]

    def rows(self, texts: Sequence[str]) -> np.ndarray:
        """The row of each text [T]; texts not seen before are encoded together and added, without a label."""
        new = [text for text in dict.fromkeys(texts) if text not in self._row]
        if new:
            self._add(new, self._encode(new))
        return np.array([self._row[text] for text in texts], dtype=np.int64)

    def vectors(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Unit vectors [T, width] float32 of some rows, of all without `rows`; 0 where a text has no direction."""
        stored = self._vectors[: len(self)]
        return unit_rows(stored if rows is None else stored[rows])

    def arrays(self) -> dict[str, np.ndarray]:
        """Vectors and labels, to be stored beside `texts`."""
        return {"vectors": self._vectors[: len(self)], "labels": self.labels}

    def load(self, texts: list[str], arrays: dict[str, np.ndarray]) -> None:
        """Take the place of what was here with a stored table."""
        self.texts = list(texts)
        self._row = {text: row for row, text in enumerate(self.texts)}
        self._vectors, self._labels = arrays["vectors"].copy(), arrays["labels"].copy()

    def _add(self, texts: list[str], vectors: np.ndarray) -> None:
        size, needed = len(self), len(self) + len(texts)
        if needed > len(self._vectors):
            room = max(needed, 2 * size) - len(self._vectors)
            self._vectors = np.concatenate([self._vectors, np.zeros((room, self._vectors.shape[1]), np.float16)])
            self._labels = np.concatenate([self._labels, np.full(room, SET_ASIDE, dtype=np.int64)])
        self._vectors[size:needed] = unit_rows(vectors)
        for text in texts:
            self._row[text] = len(self.texts)
            self.texts.append(text)

"""Texts that are alike: a user's turn asked before in nearly these words, an answer that goes round in circles.

Knows text only. Near copies are found as in Broder (1997): MinHash bands propose, the Jaccard index itself decides.
"""

import zlib

import numpy as np

PIECE = 5  # characters: turns are compared by their pieces of so many
BANDS, ROWS = 32, 4  # of a signature; turns as alike as 0.5 share a band in 87% of cases, as alike as 0.7 nearly always
WINDOW = 24  # characters: what an answer says again is measured in runs of so many
_PRIME = np.uint64((1 << 31) - 1)


class Known:
    """User's turns there are already. near: from this Jaccard index of their pieces on, two are nearly the same; None:
    only those that differ in nothing but case and spaces are one."""

    def __init__(self, near: float | None = None):
        self._near = near
        self._folded: set[str] = set()
        self._pieces: list[np.ndarray] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        factors = np.random.default_rng(0).integers(1, int(_PRIME), (2, BANDS * ROWS, 1), dtype=np.uint64)
        self._times, self._plus = factors

    def fault(self, text: str) -> str | None:
        """Why this turn is none to keep; a turn without fault is known from now on."""
        plain = folded(text)
        if plain in self._folded:
            return "user's turn written before"
        if self._near is not None:
            pieces = _pieces(plain)
            keys = self._keys(pieces)
            candidates = {index for key in keys for index in self._bands.get(key, ())}
            if any(_jaccard(pieces, self._pieces[index]) >= self._near for index in candidates):
                return "user's turn nearly written before"
            for key in keys:
                self._bands.setdefault(key, []).append(len(self._pieces))
            self._pieces.append(pieces)
        self._folded.add(plain)
        return None

    def _keys(self, pieces: np.ndarray) -> list[tuple[int, bytes]]:
        least = ((pieces.astype(np.uint64) * self._times + self._plus) % _PRIME).min(1).astype(np.uint32)
        return [(band, row.tobytes()) for band, row in enumerate(least.reshape(BANDS, ROWS))]


def folded(text: str) -> str:
    """What two user's turns have in common that are the same but for case and spaces."""
    return " ".join(text.lower().split())


def _pieces(text: str) -> np.ndarray:
    """31-bit hashes of all pieces of a text, each once, sorted."""
    starts = range(max(len(text) - PIECE + 1, 1))
    return np.unique(np.array([zlib.crc32(text[i : i + PIECE].encode()) >> 1 for i in starts], dtype=np.uint32))


def _jaccard(one: np.ndarray, other: np.ndarray) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def repetition(text: str) -> float:
    """The share of a text's windows that stood in it before: 0 where nothing is said twice, near 1 in a loop."""
    windows = [text[i : i + WINDOW] for i in range(len(text) - WINDOW + 1)]
    return 1 - len(set(windows)) / len(windows) if windows else 0.0

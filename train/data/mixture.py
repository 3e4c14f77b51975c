"""The source of each row of the data order: exact shares in every block of rows."""

import functools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from laneformer.train.data.permutation import permute

BLOCK = 1 << 14  # rows: shares are met to 1 in 16384


def apportion(weights: Sequence[float], seats: int) -> np.ndarray:
    """Divides `seats` in proportion to positive `weights[n]` -> int64[n] with that sum (largest remainders)."""
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) * seats / total for weight in weights]
    out = np.array([int(share) for share in shares], np.int64)
    by_remainder = sorted(range(len(shares)), key=lambda i: (int(shares[i]) - shares[i], i))
    out[by_remainder[: seats - int(out.sum())]] += 1
    return out


class Mixture:
    """The endless sequence of sources. In rows [b BLOCK, (b + 1) BLOCK) source i appears counts[i] times; seed and b
    determine the order.
    """

    def __init__(self, weights: Sequence[float], seed: int):
        self.counts, self.seed = apportion(weights, BLOCK), seed
        self._block = functools.lru_cache(4)(self._make_block)

    def place(self, row: int) -> tuple[int, int]:
        """The source of `row`, and the number of earlier rows from that source. `row` may be arbitrarily large."""
        block, within = divmod(row, BLOCK)
        source, before = self._block(block)
        return int(source[within]), block * int(self.counts[source[within]]) + int(before[within])

    def rows_before(self, row: int) -> list[int]:
        """Number of rows from each source among the first `row` rows."""
        block, within = divmod(row, BLOCK)
        started = np.bincount(self._block(block)[0][:within], minlength=len(self.counts))
        return [block * count + more for count, more in zip(self.counts.tolist(), started.tolist(), strict=True)]

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of every row of a block, and the number of earlier rows in the block from that source."""
        # ~seed, because the sources' own shuffling uses the key (seed, epoch).
        order = permute(np.arange(BLOCK), BLOCK, ~self.seed, block)
        source = np.repeat(np.arange(len(self.counts)), self.counts)[order]
        before = np.empty(BLOCK, np.int64)
        for i, count in enumerate(self.counts):
            before[source == i] = np.arange(count)
        return source, before

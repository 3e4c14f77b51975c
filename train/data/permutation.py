"""A keyed pseudo-random permutation of any range, computed per index: shuffling without a table."""

import math

import numpy as np

ROUNDS = 8
MASK = (1 << 64) - 1


def mix(x):
    """The splitmix64 finalizer (Steele, Lea & Flood 2014): a bijection of 64-bit words in which each input bit moves
    half the output bits.

    `x` is a uint64 array (multiplication wraps) or a Python int below 2^64.
    """
    wrap = (lambda y: y) if isinstance(x, np.ndarray) else (lambda y: y & MASK)
    x = wrap((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9)
    x = wrap((x ^ (x >> 27)) * 0x94D049BB133111EB)
    return x ^ (x >> 31)


def permute(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Images of `index[...]` under a keyed pseudo-random permutation of range(size) -> int64[...].

    A Feistel network over a grid (Black & Rogaway, Ciphers with Arbitrary Finite Domains, 2002): with a =
    ceil(sqrt(size)) and b = ceil(size / a), an index is x = l * b + r, and each round adds to one half a hash of the
    other,

        even rounds: l = (l + F(r)) mod a        odd rounds: r = (r + F(l)) mod b        F(y) = mix(y ^ key[round])

    which is invertible, hence a bijection of range(a * b). Results in [size, a * b), fewer than a of them, go through
    again until they are inside ("cycle walking"), which keeps it a bijection of range(size). The keys are key[i] =
    mix(mix(mix(seed) ^ epoch) + i + 1). The code uses only 64-bit integers and no library generator, so that no version
    of a library can change the order of a run.
    """
    a = math.isqrt(size - 1) + 1 if size > 1 else 1
    b = -(-size // a)
    base = mix(mix(seed & MASK) ^ (epoch & MASK))
    keys = np.array([mix((base + i + 1) & MASK) for i in range(ROUNDS)], np.uint64)
    out = np.array(index, np.uint64)
    if out.size and not out.max() < size:
        raise IndexError(f"index {out.max()} is outside a permutation of {size}")
    flat = out.reshape(-1)
    todo = np.arange(flat.size)
    while todo.size:
        l, r = np.divmod(flat[todo], np.uint64(b))
        for i in range(ROUNDS):
            if i % 2 == 0:
                l = (l + mix(r ^ keys[i]) % np.uint64(a)) % np.uint64(a)
            else:
                r = (r + mix(l ^ keys[i]) % np.uint64(b)) % np.uint64(b)
        flat[todo] = l * np.uint64(b) + r
        todo = todo[flat[todo] >= size]
    return out.astype(np.int64)

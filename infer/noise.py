"""The sampling noise: a pure function of seed, position and token id, the same in every backend and however the tokens
of an answer are divided into calls.

Threefry-2x32, 20 rounds (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the
function `threefry2x32` of the Random123 library):

    k0, k1 = low and high 32 bits of the seed, an unsigned 64-bit number;  k2 = k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = position, token id
    x0 += k0; x1 += k1
    for group j = 0..4:
        for each rotation r of (13, 15, 26, 6) if j is even, (17, 29, 16, 24) if j is odd:
            x0 += x1;  x1 = rotate_left(x1, r) ^ x0
        x0 += k[(j+1) mod 3];  x1 += k[(j+2) mod 3] + j + 1
    all arithmetic mod 2^32; the word used is w = x0.

    u = ((w >> 9) + 0.5) * 2^-23     exact in float32, from 2^-24 to 1 - 2^-24: the logarithms are finite
    g = -log(-log(u))                standard Gumbel, float32, from -2.8115 to 16.6355

`position` is the index in the whole sequence, prompt included, of the token to draw: the first token after a prompt of
n tokens (a begin-of-text token counts) has position n. Machines may differ in the last bits of the float32 logarithms,
but not in the word w.
"""

import jax
import jax.numpy as jnp
import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def threefry_2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The two output words, uint32. The key and counter words may have any shapes that broadcast."""
    k0, k1 = (jnp.asarray(word, jnp.uint32) for word in key)
    x0, x1 = (jnp.asarray(word, jnp.uint32) for word in counter)
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(PARITY))
    x0, x1 = x0 + k0, x1 + k1
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def gumbel(key: jax.Array | np.ndarray, position: jax.Array, tokens: jax.Array) -> jax.Array:
    """Gumbel noise for each token id, float32, in the shape of `tokens`.

    key: the seed, uint32 [2], low word first. position: integer scalar. tokens: integer token ids.
    """
    word, _ = threefry_2x32((key[0], key[1]), (position, tokens))
    uniform = ((word >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform))

"""How the next token is chosen from the logits: the definition that every backend follows.

For raw logits z [v] in float32, with every step in float32:

1. Repetition penalty r (Keskar et al., CTRL, arXiv 1909.05858): for each token of the prompt or of the answer so far,
   z = z / r where z > 0, otherwise z * r.
2. Presence penalty a, frequency penalty f and logit bias b (OpenAI's API): z = z + (b - (c * f + a)) for a token that
   was drawn c > 0 times in the answer so far, z = z + b for other tokens. Tokens of the prompt do not count. Then, for
   an answer with a grammar, a mask: z = -inf for tokens that the grammar forbids. It always allows at least one token.
3. Temperature T: 0 is greedy. It chooses the token with the largest z, the lowest id among equals, and skips steps 4
   and 5. Otherwise z = z / T.
4. Filters, each a threshold on z, so that equal logits are kept or dropped together, whatever the order of the tokens:
   - top-k, if k > 0: the k-th largest z (every token if k >= v);
   - top-p, if p < 1 (Holtzman et al., arXiv 1904.09751): with probabilities softmax(z) over the tokens that top-k
     keeps, the largest t for which the tokens with z >= t have probability >= p together;
   - min-p, if m > 0 (Nguyen et al., arXiv 2407.01082): max z + log(m);
   - top-n-sigma, if n > 0 (Tang et al., arXiv 2411.07641): max z - n s, with s the standard deviation of all finite z.
   Tokens with z >= the largest of these thresholds are kept. The best token is always kept.
5. Among the kept tokens, the one with the largest z + g is chosen, the lowest id among equals. g is the Gumbel noise of
   infer/noise.py for the seed, the position and the token's id. (The Gumbel-max trick: this draws from softmax(z) over
   the kept tokens.)

The log-probability reported with a token is that of the model, whatever the settings: log softmax of the raw logits.
The last bits of a sum depend on the order of summation, so top-p may keep or drop a set of tokens whose probability is
within rounding of p, and top-n-sigma a token whose z is within rounding of its threshold.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from laneformer.custom_calls.request import SamplingOptions
from laneformer.errors import ConfigError
from laneformer.infer.noise import gumbel

SMALLEST, LARGEST = 1e-6, 1e6  # bounds of temperature and penalty: a logit divided by them stays in float32
LATER = ("presence_penalty", "frequency_penalty", "logit_bias", "top_n_sigma")  # fields that older records do not have
# Absolute value of presence and frequency penalty, absolute value of a logit bias, number of logit biases.
LARGEST_PENALTY, LARGEST_BIAS, MOST_BIASES = 2.0, 100.0, 1024


SAMPLING_OPTIONS = frozenset(field.name for field in dataclasses.fields(SamplingOptions))
"""Names of all options."""


class Parameters(NamedTuple):
    """`Sampling` as arrays, so that one compiled program serves every setting."""

    temperature: np.float32
    top_k: np.int32
    top_p: np.float32
    min_p: np.float32
    repetition_penalty: np.float32
    top_n_sigma: np.float32
    key: np.ndarray
    """Low and high 32-bit word of the seed, uint32 [2]."""


class Adjustments(NamedTuple):
    """Step 2 of the definition as arrays."""

    bias: np.ndarray
    """Logit bias of each token, float32 [v]."""
    presence_penalty: np.float32
    frequency_penalty: np.float32

    def of(self, drawn_v: jax.Array) -> jax.Array:
        """The number to add to each logit, bias minus penalties, float32 [v]. drawn_v: how often each token has been
        drawn in the answer so far, int32 [v].
        """
        penalty = drawn_v.astype(jnp.float32) * self.frequency_penalty + self.presence_penalty
        return jnp.asarray(self.bias) - jnp.where(drawn_v > 0, penalty, 0.0)


@dataclass(frozen=True)
class Sampling(SamplingOptions):
    """Settings for choosing the next token. Raises ConfigError for a value outside its range."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.name == "logit_bias":
                continue
            value, whole = getattr(self, field.name), field.type is int
            kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
                raise ConfigError(f"{field.name} = {value!r}: give a {'whole' if whole else 'finite'} number")
            object.__setattr__(self, field.name, int(value) if whole else float(value))
        if self.temperature and not SMALLEST <= self.temperature <= LARGEST:
            raise ConfigError(
                f"temperature = {self.temperature}: give 0 for greedy, or a number from {SMALLEST:g} to {LARGEST:g}"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k = {self.top_k}: give the number of tokens to draw among, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p = {self.top_p}: give a probability above 0 and at most 1 (1 for all tokens)")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p = {self.min_p}: give a share from 0 (all tokens) to 1")
        if not 0 <= self.top_n_sigma <= LARGEST:
            raise ConfigError(f"top_n_sigma = {self.top_n_sigma}: give a number from 0 (all tokens) to {LARGEST:g}")
        if not SMALLEST <= self.repetition_penalty <= LARGEST:
            raise ConfigError(
                f"repetition_penalty = {self.repetition_penalty}: give {SMALLEST:g} to {LARGEST:g}, 1 for none"
            )
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed = {self.seed}: give a whole number from 0 to 2^64 - 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -LARGEST_PENALTY <= getattr(self, name) <= LARGEST_PENALTY:
                raise ConfigError(f"{name} = {getattr(self, name)}: give a number from -2 to 2, 0 for none")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def record(self) -> dict[str, Any]:
        """The settings for records. Fields of LATER are left out if they change nothing, so that older records stay
        comparable.
        """
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if name not in LATER or value}

    @property
    def adjusts(self) -> bool:
        """Whether step 2 of the definition changes anything."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)

    def adjustments(self, vocab_size: int) -> Adjustments | None:
        """Step 2 of the definition as arrays, for `Adjustments.of`; None if it changes nothing. Raises ConfigError for
        a biased token outside the vocabulary.
        """
        self.check(vocab_size)
        if not self.adjusts:
            return None
        bias = np.zeros(vocab_size, np.float32)
        for token, value in self.logit_bias:
            bias[token] = value
        return Adjustments(bias, np.float32(self.presence_penalty), np.float32(self.frequency_penalty))

    def check(self, vocab_size: int) -> None:
        """Raises ConfigError for a biased token outside the vocabulary."""
        for token, _ in self.logit_bias:
            if token >= vocab_size:
                raise ConfigError(f"logit_bias = {token}: give token ids from 0 to {vocab_size - 1}")

    def parameters(self) -> Parameters:
        """The settings as arrays, for `sample`."""
        return Parameters(
            np.float32(self.temperature),
            np.int32(min(self.top_k, np.iinfo(np.int32).max)),
            np.float32(self.top_p),
            np.float32(self.min_p),
            np.float32(self.repetition_penalty),
            np.float32(self.top_n_sigma),
            np.array([self.seed & 0xFFFFFFFF, self.seed >> 32], np.uint32),
        )


def _biases(given) -> tuple[tuple[int, float], ...]:
    """The checked pairs of token id and bias. Raises ConfigError for a wrong value or a repeated token."""
    try:
        pairs = [(token, bias) for token, bias in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError):
        raise ConfigError(f"logit_bias = {given!r}: give token ids and their biases") from None
    if len(pairs) > MOST_BIASES:
        raise ConfigError(f"logit_bias has {len(pairs)} entries: give at most {MOST_BIASES}")
    for token, bias in pairs:
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or token < 0:
            raise ConfigError(f"logit_bias = {token!r}: give token ids, whole numbers of at least 0")
        number = isinstance(bias, int | float | np.integer | np.floating) and not isinstance(bias, bool)
        if not number or not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
            raise ConfigError(f"logit_bias[{token}] = {bias!r}: give a number from -100 to 100")
    made = {int(token): float(bias) for token, bias in pairs}
    if len(made) < len(pairs):
        raise ConfigError("logit_bias has a token id twice: give each id once")
    return tuple(made.items())


def sample(
    logits_v: jax.Array,
    seen_v: jax.Array,
    position: jax.Array,
    params: Parameters,
    added_v: jax.Array | None = None,
    allowed_v: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The chosen token, int32 scalar, and its log-probability, float32 scalar.

    logits_v: raw logits [v]. seen_v: whether the prompt or the answer so far contains each token, bool [v]. position:
    index in the sequence of the token to draw. added_v: the result of `Adjustments.of`, float32 [v]; None if step 2
    changes nothing. allowed_v: the grammar's mask, bool [v]; None for all tokens. All arguments may be traced.
    """
    raw = logits_v.astype(jnp.float32)
    penalty = params.repetition_penalty
    z = jnp.where(seen_v, jnp.where(raw > 0, raw / penalty, raw * penalty), raw)
    if added_v is not None:
        z = z + added_v
    if allowed_v is not None:
        z = jnp.where(allowed_v, z, -jnp.inf)
    token = jax.lax.cond(
        params.temperature > 0, _draw, lambda z, position, params: jnp.argmax(z), z, position, params
    ).astype(jnp.int32)
    return token, raw[token] - jax.nn.logsumexp(raw)


def top_logprobs(logits_v: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` most likely tokens, int32 [count], and their log-probabilities, float32 [count]. The most likely
    token is first; equals are in the order of their ids.

    logits_v: raw logits [v], v >= count.
    """
    raw = logits_v.astype(jnp.float32)
    _, tokens = jax.lax.top_k(jnp.where(raw == 0, 0.0, raw), count)  # top_k puts 0 before -0
    return tokens, raw[tokens] - jax.nn.logsumexp(raw)


def _draw(z: jax.Array, position: jax.Array, params: Parameters) -> jax.Array:
    z = z / params.temperature
    best = jnp.max(z)
    order = _order(z)

    def top_k():
        return _largest(lambda kept: jnp.sum(kept) >= params.top_k, order)

    def top_p():
        weights = jnp.where(order >= kth, jnp.exp(z - best), 0.0)
        wanted = params.top_p * jnp.sum(weights)
        return _largest(lambda kept: jnp.sum(jnp.where(kept, weights, 0.0)) >= wanted, order)

    kth = jax.lax.cond(params.top_k > 0, top_k, lambda: jnp.uint32(0))
    least = jnp.maximum(kth, jax.lax.cond(params.top_p < 1, top_p, lambda: jnp.uint32(0)))

    def top_n_sigma() -> jax.Array:
        return best - params.top_n_sigma * jnp.std(z, where=jnp.isfinite(z))

    kept = (order >= least) & (z >= best + jnp.log(params.min_p))
    kept &= z >= jax.lax.cond(params.top_n_sigma > 0, top_n_sigma, lambda: -jnp.inf)
    noise = gumbel(params.key, position, jnp.arange(z.shape[0]))
    return jnp.argmax(jnp.where(kept, z + noise, -jnp.inf))


def _order(z: jax.Array) -> jax.Array:
    """uint32 numbers that sort like the float32 z, in the same shape."""
    bits = jax.lax.bitcast_convert_type(jnp.where(z == 0, 0.0, z), jnp.uint32)  # -0 and 0 are equal
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _largest(enough, order: jax.Array) -> jax.Array:
    """The largest threshold t, uint32, for which enough(order >= t) is true; 0 if it is true for none.

    t is found bit by bit in 32 passes over the vocabulary. On a CPU this is tens of times faster than sorting, and
    equal logits need no order.
    """

    def bit(n, t):
        higher = t | (jnp.uint32(1 << 31) >> n.astype(jnp.uint32))
        return jnp.where(enough(order >= higher), higher, t)

    return jax.lax.fori_loop(0, 32, bit, jnp.uint32(0))

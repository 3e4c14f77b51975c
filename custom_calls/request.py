"""What a call of a decode kernel needs, as data: the request whose tokens it draws.

custom_calls/words.py encodes a request as words; the C++ structs that decode them are generated from these classes, as
the ops' are from laneformer/ops.py (custom_calls/ops_header.py). To add a sampling option, write it in SamplingOptions,
define it in infer/sampling.py and compute it in the kernels.

Nothing here imports JAX, NumPy or another file of ours.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. infer/sampling.py defines what the options mean, and checks their values."""

    temperature: float = 0.0
    """0 always takes the most likely token; 1 draws from the model's distribution; values between are more
    conservative.
    """
    top_k: int = 0
    """Draw among this many of the most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Draw among the most likely tokens, as few as have this total probability; 1 for all."""
    min_p: float = 0.0
    """Draw among tokens whose probability is at least this share of the largest probability; 0 for all."""
    repetition_penalty: float = 1.0
    """Above 1, make tokens less likely that the prompt or the answer already contains; 1 for no change."""
    seed: int = 0
    """Seed of the noise, 0 to 2^64 - 1; the same seed gives the same tokens."""
    presence_penalty: float = 0.0
    """Subtract this from the logit of each token that the answer already contains, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtract this from a token's logit for each occurrence in the answer so far, -2 to 2."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids with a number to add to their logits, -100 to 100; as pairs or as a mapping."""
    top_n_sigma: float = 0.0
    """Draw among tokens whose logits are at most this many standard deviations below the largest; 0: all tokens."""


@dataclass(frozen=True)
class Source:
    """A running call whose text begins as the request's: keys and values of the common positions are copied from it.
    Each position is copied as soon as the other call has filled it. If that call has ended before this one begins, the
    positions are computed instead. The CPU kernel alone copies, and only for models without a recurrent state.
    """

    slot: int
    """Slot of the other call."""
    call: int
    """Number of the other call, as its `begin` returned it."""
    positions: int
    """Number of common positions, from position 0 on."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a call computes. Texts are token ids; NumPy arrays of whole numbers will do."""

    prompt: tuple[int, ...]
    """Tokens that go through the model."""
    start: int = 0
    """Position of the first of them; the caches contain all earlier positions."""
    limit: int
    """Most tokens to draw."""
    stops: tuple[int, ...] = ()
    """Tokens after which nothing is drawn."""
    sampling: SamplingOptions = SamplingOptions()
    masked: bool = False
    """Whether each draw waits for the host's mask of the allowed tokens (`give_mask`). The call makes no drafts then.
    """
    slot: int = 0
    """Slot of the session that runs the call, on the CPU."""
    drawn: int = 0
    """Tokens that the request drew in earlier calls, in a GPU's call of several slots."""
    before: tuple[int, ...] = ()
    """Text before the prompt, from which drafts may be copied as from prompt and answer. A part that ends with
    END_OF_TEXT is another text, whose drafts are counted separately.
    """
    forced: tuple[int, ...] = ()
    """First tokens of the answer, which replace the drawn ones, for measurements. Drafts equal to them are accepted as
    if the model had drawn them.
    """
    given: tuple[int, ...] = ()
    """Draft of each token of the answer, -1 for none, at any price, for tests."""
    most_drafts: int | None = None
    """Most drafts in a pass, if the call is to make fewer than others."""
    source: Source | None = None
    """Call to copy positions from."""


END_OF_TEXT = -1
"""Ends another text in `Request.before`; kEndOfText of common/drafts.h."""

"""Passes of several rows: right or wrong drafts change no bit of an answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer import custom_calls
from laneformer.custom_calls import ENDS, State, build
from laneformer.custom_calls.cpu.session import MOST_ROWS
from tests.support import small
from tests.support.decode_cases import CONFIGS, EXPERTS, LAYOUTS, MODELS, ON_CPU

pytestmark = small.needs_library

EQUAL = [1.0] * MOST_ROWS
ROOM = 64
SETTINGS = {
    "greedy": {},
    "greedy with a penalty": {"penalty": 1.5},
    "all tokens": {"temperature": 1.0},
    "top k": {"temperature": 0.7, "top_k": 5},
    "top p": {"temperature": 1.5, "top_p": 0.8},
    "min p": {"temperature": 1.2, "min_p": 0.1},
    "all filters and a penalty": {"temperature": 2.0, "top_k": 8, "top_p": 0.5, "min_p": 0.02, "penalty": 1.3},
}


class Model:
    """A model whose answers with and without drafts are compared."""

    def __init__(self, config, weights, compute="float32", **options):
        self.config, self.compute = config, compute
        self.session = small.make_session(config, weights, compute=compute, **options)
        self.call = small.jitted(self.session, room=ROOM, top=3, logits=True)

    def answer(
        self,
        prompt,
        limit,
        *,
        most=0,
        of_call=None,
        prices=EQUAL,
        drafts=(),
        before=(),
        forced=(),
        cache=0.0,
        **options,
    ):
        """Runs a call and returns all results that drafts must not change. of_call: most drafts of this call. prices:
        None for the session's prices, which its passes correct. cache: value that fills the caches before the call.
        """
        self.session.speculate(most, prices)
        texts = {"given": drafts, "before": before, "forced": forced, "most_drafts": of_call}
        inputs = small.make_inputs(prompt, limit, **texts, **options)
        state = small.make_state(self.config, 128, self.compute)
        if cache:
            state = State(state.seen, jax.tree.map(lambda x: jnp.full_like(x, cache), state.layers))
        outputs, state = self.call(inputs, state)
        drawn, _, position = outputs.status.tolist()
        of_tokens = [np.asarray(rows)[:drawn] for rows in outputs[:-1]]
        found = jax.tree.map(np.asarray, (of_tokens, outputs.status, state.seen, self.filled(state, position - 1)))
        # Passes advance a recurrent state in different steps: compare the logits that follow.
        if small.arrays_of(state, "base"):
            self.session.speculate(0, EQUAL)
            inputs = small.make_inputs(of_tokens[0][-1:], 20, start=position - 1, room=ROOM)
            found += (np.asarray(self.call(inputs, state)[0].logits[:20]),)
        return found

    @staticmethod
    def filled(state, count):
        """The cached entries of the first `count` positions."""
        arrays = small.arrays_of(state, "keys", "values", "latents", "positions")
        return [np.asarray(array)[:, :, :count] for array in arrays]

    def check(self, prompt, limit, **options):
        """Checks drafts from the text, right drafts, and drafts of which every third is wrong. Returns the answer's
        tokens.
        """
        expected = self.answer(prompt, limit, **options)
        tokens = expected[0][0].tolist()
        every_third = [(token + (n % 3 == 2)) % self.config.vocab_size for n, token in enumerate(tokens)]
        for most, drafts in ((15, ()), (15, tokens), (15, every_third), (2, every_third), (1, tokens)):
            found = self.answer(prompt, limit, most=most, drafts=drafts, **options)
            assert small.same(found, expected), (most, drafts)
        return tokens


def make(dtype="float32", changes=None, **options):
    config = small.make_config(**changes or {})
    return Model(config, small.make_weights(config, dtype), **options)


@pytest.fixture(scope="module")
def model():
    return Model(*small.windowed_model(), threads=2)


@pytest.mark.parametrize("name", SETTINGS)
def test_samplings_have_the_same_bits(name, model):
    tokens = model.check(small.prompt_of(model.config, 30), 40, **SETTINGS[name])
    assert len(tokens) == 40
    if "penalty" in SETTINGS[name] and "temperature" not in SETTINGS[name]:
        plain = model.answer(small.prompt_of(model.config, 30), 40)[0][0].tolist()
        assert plain != tokens


@pytest.mark.parametrize(("layout", "lanes"), LAYOUTS[::3], ids=[f"{layout}-{lanes}" for layout, lanes in LAYOUTS[::3]])
def test_layouts_have_the_same_bits(layout, lanes):
    for ways in ({"threads": 2}, {"one_thread_per_lane": True}):
        model = make(changes={"layout": layout, "lanes": lanes}, **ways)
        model.check(small.prompt_of(model.config, 19), 20, temperature=0.8)


BLOCKS = CONFIGS | MODELS | EXPERTS | ON_CPU
USUAL = ("lane head", "vocab head", "vocab head, few tokens", "tied, norm of the sum", "norms of lanes, lane head",
         "first layers slide", *EXPERTS, *ON_CPU)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.exhaustive) for name in BLOCKS]
)
def test_configs_have_the_same_bits(name):
    model = make(changes=BLOCKS[name], threads=3)
    model.check(small.prompt_of(model.config, 19), 20, temperature=0.8)


@pytest.mark.parametrize("instructions", build.instruction_sets())
def test_instruction_sets_and_dtypes_have_the_same_bits(instructions):
    if instructions not in custom_calls.instruction_sets():
        pytest.skip(f"this machine does not run {instructions}")
    cases = [("float32", "float32", {}), ("bfloat16", "float32", {}), ("bfloat16", "bfloat16", {}),
             ("float16", "float16", {}), ("bfloat16", "float32", {"bf12": True})]  # fmt: skip
    for dtype, compute, options in cases:
        changes = {"layout": "dtp(1)", "lanes": 3, "hidden_size": 72, "vocab_size": 95}
        model = make(dtype, changes, compute=compute, threads=2, instructions=instructions, **options)
        model.check(small.prompt_of(model.config, 19), 30, temperature=0.8)


@given(wrong=st.sets(st.integers(0, 39)), most=st.sampled_from([1, 3, 15]))
@settings(max_examples=20)
def test_right_drafts_are_marked(model, wrong, most):
    """The model draws the last token of a pass after its right drafts, so that token is not marked."""
    prompt = small.prompt_of(model.config, 30)
    tokens = model.answer(prompt, 40)[0][0].tolist()
    drafts = [(token + (n in wrong)) % model.config.vocab_size for n, token in enumerate(tokens)]
    model.answer(prompt, 40, most=most, drafts=drafts)
    expected = [False]
    while len(expected) < 40:
        right = 0
        while right < min(most, 39 - len(expected)) and len(expected) + right not in wrong:
            right += 1
        expected += [True] * right + [False]
    found = model.session.drawn(0, 40)
    assert found.drafted.tolist() == expected and not found.others.any()


def test_answer_may_end_inside_a_run(model):
    prompt, options = small.prompt_of(model.config, 30), {"temperature": 1.0}
    tokens = model.answer(prompt, 40, **options)[0][0].tolist()
    for limit in (1, 2, 3, 7, 15, 16, 17, 18):
        model.check(prompt, limit, **options)
    for place in (1, 5, 17, 30):
        assert model.check(prompt, 40, stops=[tokens[place]], **options)[-1] == tokens[place]
    ended = model.answer(prompt, 40, stops=[tokens[9]], most=15, drafts=tokens, **options)
    assert ended[1].tolist() == [tokens.index(tokens[9]) + 1, ENDS.index("stop"), 30 + tokens.index(tokens[9]) + 1]


def test_wrong_draft_leaves_no_penalty(model):
    """A wrong draft counts as drawn only for the rows after it in its pass."""
    prompt, options = small.prompt_of(model.config, 8), {"penalty": 1.8, "temperature": 1.0}
    expected = model.answer(prompt, 40, **options)
    unseen = sorted(set(range(model.config.vocab_size)) - set(prompt) - set(expected[0][0].tolist()))
    for wrong in unseen[:3]:
        assert small.same(model.answer(prompt, 40, most=15, drafts=[wrong] * 40, **options), expected)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_schedule_of_drafts_has_the_same_bits(data, model):
    prompt = small.prompt_of(model.config, data.draw(st.integers(1, 70)))
    limit = data.draw(st.integers(1, 50))
    options = SETTINGS[data.draw(st.sampled_from(sorted(SETTINGS)))] | {"seed": (data.draw(st.integers(0, 99)), 1)}
    expected = model.answer(prompt, limit, **options)
    tokens = expected[0][0].tolist()
    wrong = data.draw(st.lists(st.integers(-1, model.config.vocab_size - 1), min_size=limit, max_size=limit))
    right = data.draw(st.lists(st.integers(0, 4), min_size=limit, max_size=limit))
    drafts = [token if often else other for token, often, other in zip(tokens, right, wrong, strict=True)]
    most = data.draw(st.integers(0, 15))
    assert small.same(model.answer(prompt, limit, most=most, drafts=drafts, **options), expected)


@pytest.mark.parametrize("token", [0, 39])
def test_nan_logits_have_the_same_bits(token):
    config, weights = small.windowed_model()
    head = weights["lm_head"].copy()
    head[token] = np.resize([3e38, -3e38], head.shape[-1])
    model = Model(config, weights | {"lm_head": head, "norm": 9 * weights["norm"]}, threads=3)
    for options in ({}, {"temperature": 1.0, "top_p": 0.9, "top_k": 4}):
        model.check([1, 2], 20, **options)
        assert np.isnan(model.answer([1, 2], 20, most=15, drafts=[0] * 20, **options)[0][1]).any()


def test_positions_beyond_the_text_are_never_read(model):
    """These positions contain keys and values of wrong drafts. Here they contain NaN at first."""
    prompt = small.prompt_of(model.config, 30)
    expected = model.answer(prompt, 40, temperature=1.0)
    drafts = [(token + (n % 4 == 3)) % model.config.vocab_size for n, token in enumerate(expected[0][0].tolist())]
    assert small.same(model.answer(prompt, 40, temperature=1.0, most=15, drafts=drafts, cache=np.nan), expected)


def test_copied_text_takes_few_passes(model):
    """Forced tokens imitate a model that copies its prompt, or another text."""
    text = np.random.default_rng(0).integers(0, model.config.vocab_size, 60).tolist()
    for prompt, before in ((text, ()), (text[:1], text), (text[:1], [*text, -1])):
        outputs, *_ = model.answer(prompt, ROOM, most=15, before=before, forced=text)
        assert outputs[0][:60].tolist() == text
        counts = model.session.drafting
        assert counts.passes < 25 and counts.drafted >= sum(counts.accepted) > 40, (prompt, before, counts)
        other = (counts.drafted, sum(counts.accepted)) if -1 in before else (0, 0)
        assert (counts.predicted, counts.predicted_accepted) == other
        assert counts.tokens_per_pass == (ROOM - 1) / counts.passes and counts.drafts == sum(counts.rows[1:]) > 0
        plain, *_ = model.answer(prompt, ROOM, forced=text)
        counts = model.session.drafting
        assert small.same(plain, outputs) and (counts.passes, counts.drafted) == (ROOM - 1, 0) == (counts.rows[0], 0)
    free, *_ = model.answer(text, 20)
    assert free[0].tolist() != text[:20]  # the texts applied to one call


def test_call_may_limit_its_drafts(model):
    text = np.random.default_rng(0).integers(0, model.config.vocab_size, 60).tolist()
    expected = model.answer(text, ROOM, forced=text)
    for most in (0, 1, 4, 99):
        assert small.same(model.answer(text, ROOM, most=7, of_call=most, forced=text), expected)
        assert max(rows for rows, count in enumerate(model.session.drafting.rows) if count) == min(most, 7)
    model.answer(text, ROOM, most=7, forced=text)
    assert model.session.drafting.rows[7] > 0, "the limit applied to one call"


@pytest.mark.parametrize("period", range(1, 18))
def test_runs_of_right_drafts_of_any_length_have_the_same_bits(period, model):
    prompt = small.prompt_of(model.config, 21)
    for options in (SETTINGS["top p"], SETTINGS["greedy with a penalty"]):
        expected = model.answer(prompt, 40, **options)
        tokens = expected[0][0].tolist()
        drafts = [(token + (n % period == period - 1)) % model.config.vocab_size for n, token in enumerate(tokens)]
        assert small.same(model.answer(prompt, 40, most=15, drafts=drafts, **options), expected)


def test_filters_at_their_edges_have_the_same_bits(model):
    """Thresholds are equal to the sum of some tokens' shares, or next to it."""
    prompt = small.prompt_of(model.config, 21)
    logits = model.answer(prompt, 1)[0][4][0].astype(np.float64)
    shares = np.sort(np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum())[::-1]
    for count in (1, 2, 5):
        edge = np.float32(shares[:count].sum())
        for top_p in (np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(1))):
            model.check(prompt, 12, temperature=1.0, top_p=float(top_p))
        model.check(prompt, 12, temperature=1.0, min_p=float(np.float32(shares[count] / shares[0])))


@pytest.mark.parametrize("wrong", [1.0, 1.9], ids=["too low", "too high"])
def test_wrong_prices_are_corrected_by_the_passes(wrong, model, monkeypatch):
    """No token changes, whatever other processes do meanwhile. A price is at most its number of rows, and the prices of
    this list are below that.
    """
    listed = [1 + (wrong - 1) * rows for rows in range(MOST_ROWS)]
    monkeypatch.setattr(custom_calls.Session, "prices", listed)
    text = np.random.default_rng(1).integers(0, model.config.vocab_size, 60).tolist()
    expected, drafted = model.answer(text, ROOM, forced=text), 0
    for _ in range(10):
        assert small.same(model.answer(text, ROOM, most=15, prices=None, forced=text), expected)
        drafted += model.session.drafting.drafted
    prices = model.session.running_prices
    assert drafted and prices != listed
    assert prices[0] == 1 and sorted(prices) == prices and all(price <= n for n, price in enumerate(prices, 1))
    model.answer(text, ROOM, most=15, forced=text)
    assert model.session.running_prices == EQUAL, "given prices stay"


def test_measured_prices_rise_with_the_rows(model, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "cache", lambda: tmp_path)
    prices = model.session.prices
    assert len(prices) == MOST_ROWS and prices[0] == 1 and sorted(prices) == prices
    model.session.speculate(15)


def test_invalid_arguments_are_refused(model):
    for most in (-1, MOST_ROWS):
        with pytest.raises(custom_calls.NativeError, match=f"drafts of a pass must be 0 to 15, got {most}"):
            model.session.speculate(most, EQUAL)
    with pytest.raises(custom_calls.NativeError, match=r"16 .*got 3"):
        model.session.speculate(1, [1, 1, 1])
    with pytest.raises(custom_calls.NativeError, match="2 passes of up to 17 rows do not fit the context of 512"):
        model.session._time_passes([1, MOST_ROWS + 1])
    for texts in ({"before": [-2]}, {"forced": [-1]}, {"given": [model.config.vocab_size]}):
        with pytest.raises(jax.errors.JaxRuntimeError, match="is outside the vocabulary of 40"):
            jax.block_until_ready(
                model.call(small.make_inputs([1], 2, **texts), small.make_state(model.config, 128, model.compute))
            )

"""Mixtures of experts in a session: every format of weights, options that no config has, and prompts split in any way.
Any number of threads gives the same bits.
"""

import numpy as np
import pytest

from laneformer.custom_calls import NativeError, Session
from laneformer.ops import Chosen, Matrix, Weight
from laneformer.quantized import Quantized
from laneformer.quantized.rounding import USUAL, round_to
from tests.support import small
from tests.support.gpu_cases import state_of, weights_of
from tests.support.plan_interpreter import interpret

pytestmark = small.needs_library

CONFIG = small.make_config(
    lanes=2,
    hidden_size=64,
    head_dim=8,
    num_experts=6,
    num_experts_per_tok=3,
    moe_intermediate_size=2 * 40,
    layout="tp",
    shared_expert_intermediate_size=2 * 24,
    shared_expert_gate=True,
)
WAYS = ({"threads": 2}, {"threads": 3}, {"one_thread_per_lane": True})


def logits_of(session: Session, ids: list[int], at_once: int = 80, drawn: int = 3) -> list[np.ndarray]:
    """Runs the prompt in calls of `at_once` tokens. Returns the logits of the drawn tokens, and the caches."""
    run, state = small.jitted(session, room=80, top=0, logits=True), state_of(session.plan, 128)
    starts = range(0, len(ids), at_once)
    for first in starts:
        limit = drawn if first == starts[-1] else 1
        inputs = small.make_inputs(ids[first : first + at_once], limit, start=first, room=80)
        outputs, state = run(inputs, state._replace(seen=np.zeros(session.plan.ops.vocab_size, np.uint8)))
    return [np.asarray(outputs.logits[:drawn]), *map(np.asarray, small.arrays_of(state, "keys", "values"))]


def session_of(weights: dict, stored: str = "float32", **options) -> Session:
    session = small.open_session(CONFIG, stored, **options)
    for path, weight in weights.items():
        session.pack(path, weight)
    return session


def mixed(path: str, weight: np.ndarray) -> Quantized | np.ndarray:
    kind = {"w1": "int8", "w2": "mxfp4", "wo": "int4"}.get(path.rpartition(".")[2])
    return round_to(weight, kind) if kind else weight


FORMATS = {kind: lambda _, weight, kind=kind: round_to(weight, kind) for kind in USUAL} | {"mixed": mixed}


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_experts_match_the_dequantized_weights(name):
    weights, ids = small.make_weights(CONFIG), small.prompt_of(CONFIG, 9)
    paths = small.open_session(CONFIG, "float32", threads=1).plan.matrices
    assert not any("router" in path for path in paths)
    packed = {path: FORMATS[name](path, weight) if path in paths else weight for path, weight in weights.items()}
    exact = {path: w.dequantize(np.float32) if isinstance(w, Quantized) else w for path, w in packed.items()}
    session = session_of(packed, threads=1)
    found = logits_of(session, ids)
    tokens = [*ids, *found[0][:2].argmax(-1).tolist()]
    expected = small.interpreted_logits(CONFIG, exact, tokens)[len(ids) - 1 :]
    assert np.abs(found[0] - expected).max() < 1e-5 * np.abs(expected).max()
    for ways in WAYS:
        assert small.same(logits_of(session_of(packed, **ways), ids), found), ways
    of_experts = [path for path, w in packed.items() if isinstance(w, Quantized) and w.ndim == 4]
    read = sum(w.size / (2 if path in of_experts else 1) for path, w in weights.items() if path in paths)
    facts = session.quantized_weights
    assert facts["quantized_weights"] == read or name == "mixed"
    assert session.read_pass() > 0 and session.packed_bytes > facts["quantized_bytes"]


def test_experts_in_twelve_bits_have_the_same_results():
    weights, ids = small.make_weights(CONFIG, "bfloat16"), small.prompt_of(CONFIG, 50)
    expected = logits_of(session_of(weights, "bfloat16", threads=1), ids)
    for ways in ({"threads": 1}, *WAYS):
        session = session_of(weights, "bfloat16", bf12=True, **ways)
        assert small.same(logits_of(session, ids), expected), ways
        assert session.bf12_weights.left == 0 and session.read_pass() > 0
    plain = session_of(weights, "bfloat16", threads=2)
    assert session.packed_bytes < plain.packed_bytes
    gate = weights["layers.0.feed_forward.w1"]
    random = np.random.default_rng(0).integers(0, 0x7F80, gate.shape, np.uint16)
    many = weights | {"layers.0.feed_forward.w1": random.view(gate.dtype)}  # any finite bits
    session = session_of(many, "bfloat16", threads=2, bf12=True)
    assert session.bf12_weights.left == 1
    assert small.same(logits_of(session, ids), logits_of(session_of(many, "bfloat16", threads=1), ids))


@pytest.mark.parametrize("kind", [None, "int4"])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_any_split_of_a_prompt_has_the_same_bits(stored, kind):
    weights, ids = small.make_weights(CONFIG, stored), small.prompt_of(CONFIG, 61)
    packed = {path: round_to(w, kind) if kind and w.ndim == 4 else w for path, w in weights.items()}
    session = session_of(packed, stored, threads=2)
    whole = logits_of(session, ids)
    for at_once in (1, 2, 7, 48):
        assert small.same(logits_of(session, ids, at_once), whole), at_once


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"products": ()}, "a shared expert without products"),
        ({"gate": Matrix(Weight("other", (2, 64), lane_sharded=False))}, "a shared expert's gate is not one row"),
    ],
)
def test_damaged_shared_experts_are_refused(changes, message):
    plan = small.open_session(CONFIG, "float32", threads=1).plan
    with pytest.raises(NativeError, match=f"damaged plan: {message}"):
        Session(small.with_op(plan, 0, 6, **changes), instructions="none")
    products = plan.ops.layers[0].ops[6].products
    with pytest.raises(NativeError, match="damaged plan: a shared expert's last product, and no other, writes"):
        Session(small.with_op(plan, 0, 6, products=products[:1]), instructions="none")


def test_biases_and_limits_match_the_interpreter():
    """In one layer, many logits of the router are equal."""
    plan = small.with_expert_biases(small.open_session(CONFIG, "float32", threads=1).plan)
    weights, ids = weights_of(plan), small.prompt_of(CONFIG, 50)
    weights["layers.1.feed_forward.router"][:] = 0
    weights["layers.1.feed_forward.router_bias"][:] = [0, 1, 1, 1, 1, 0]
    results = []
    for ways in ({"threads": 1}, *WAYS):
        session = Session(plan, **ways)
        for path, weight in weights.items():
            session.pack(path, weight)
        results.append(logits_of(session, ids))
    found = results[0][0]
    expected = interpret(plan, weights, [*ids, *found[:2].argmax(-1).tolist()])[len(ids) - 1 :]
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max() > 1e-5
    assert all(small.same(result, results[0]) for result in results)


SCORES = {
    "softmax": {},
    "sigmoid": {"scoring_func": "sigmoid", "shared_expert_gate": False},
    "groups": {"scoring_func": "sigmoid", "shared_expert_gate": False, "n_group": 3, "topk_group": 2},
    "roots": {"scoring_func": "sqrtsoftplus", "shared_expert_gate": False},
}


@pytest.mark.parametrize("kind", SCORES)
def test_router_logit_that_is_not_a_number_gives_nan(kind):
    """Three of six experts are used, with shares that sum to one: the logit of another expert would be in no sum. The
    expert is any one, also one whose neighbours in the order are numbers on both sides.
    """
    config = CONFIG.replace(num_hidden_layers=1, **SCORES[kind])
    for expert in range(config.num_experts):
        weights = small.make_weights(config)
        weights["layers.0.feed_forward.router"][expert] = 3e38  # finite, but sums of products are inf - inf
        session = small.make_session(config, weights, threads=2)
        assert np.isnan(logits_of(session, [3, 4], drawn=1)[0]).all(), expert


def test_router_is_float32_with_products_in_bfloat16():
    """The logits of two experts differ by less than the precision of bfloat16, and the one with the larger is used."""
    config = CONFIG.replace(num_hidden_layers=1, num_lanes=1, num_experts=2, num_experts_per_tok=1)
    weights, layer = small.make_weights(config, "bfloat16"), "layers.0.feed_forward"
    weights["tok_embeddings"][3] = 1
    weights["layers.0.attention.wo"][:] = 0  # the stream is the embedding
    gain = np.ones(64, np.float32)
    gain[1] = 1.001
    weights["layers.0.ffn_norm"] = gain
    weights[f"{layer}.router"][:] = np.eye(2, 64)

    def found(without: int | None):
        changed = dict(weights)
        if without is not None:
            changed[f"{layer}.w2"] = weights[f"{layer}.w2"].copy()
            changed[f"{layer}.w2"][:, without] = 0
        return logits_of(small.make_session(config, changed, compute="bfloat16", threads=1), [3], drawn=1)[0]

    assert small.same(found(None), found(0)) and not small.same(found(None), found(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": Chosen(2, False)}, "a product uses another number of experts"),
        ({"chosen": None}, "a product's weight is of another number of experts"),
        ({"gated": False, "limit": 1.0}, "only a gated product has limits"),
    ],
)
def test_products_that_contradict_their_router_are_refused(changes, message):
    plan = small.open_session(CONFIG, "float32", threads=1).plan
    with pytest.raises(NativeError, match=f"damaged plan: {message}"):
        Session(small.with_op(plan, 0, 4, **changes), instructions="none")
    matrix = Matrix(Weight("other", (5, 64), lane_sharded=False))
    with pytest.raises(NativeError, match="damaged plan: a product has other experts than its router"):
        Session(small.with_op(plan, 0, 3, matrix=matrix), instructions="none")

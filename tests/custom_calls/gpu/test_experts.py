"""Mixtures of experts in the GPU kernel, on emulated GPUs: routers, pieces of any size, and every format of weights.
Several devices, one launch per op and delays give the same bits.
"""

import dataclasses

import jax
import numpy as np
import pytest

from laneformer.custom_calls import NativeError
from laneformer.custom_calls.gpu.codes import CodesChoice
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import H200, MI300X, Machine
from laneformer.custom_calls.plan import Plan, make_plan
from laneformer.decoder import decoder_ops
from laneformer.errors import CheckpointError
from laneformer.ops import Chosen, Product
from tests.support import emulated, small
from tests.support.gpu_cases import AMD, check, fail_often, logits_of, rounded, same, some, weights_of

pytestmark = [small.needs_library, emulated.needs_gpu]

SIZES = {"lanes": 2, "hidden_size": 64, "head_dim": 8, "layout": "tp", "num_hidden_layers": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 2 * 40}
SIGMOIDS = {"scoring_func": "sigmoid", "router_correction": True, "routed_scaling_factor": 2.5}
GROUPS = {**SIGMOIDS, "num_experts": 12, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
ROOTS = {"scoring_func": "sqrtsoftplus", "router_correction": True, "routed_scaling_factor": 1.5}
SHARED = {"shared_expert_intermediate_size": 6 * 24}
CASES = {  # changes of the config, and the machine
    "as GPT-OSS": ({"num_experts_per_tok": 4, "num_experts": 32}, emulated.SMALL),
    "one expert": ({"num_experts_per_tok": 1, "lanes": 1, "num_experts": 3}, emulated.SMALL),
    "more than CTAs": ({"num_experts": 80, "num_experts_per_tok": 16, "moe_intermediate_size": 2 * 6}, emulated.SMALL),
    "odd sizes": ({"hidden_size": 33, "moe_intermediate_size": 2 * 17, "num_experts_per_tok": 5}, emulated.SMALL),
    "delayed": ({"layout": "dtp(1)", "lanes": 3, "moe_intermediate_size": 3 * 24}, emulated.SMALL),
    "warps of 64": ({"num_experts": 7, "num_experts_per_tok": 1, "vocab_size": 400}, AMD),  # a head in several steps
    "eight warps": ({}, Machine(warp_size=32, ctas=6, warps=8, shared_bytes=300_000, bulk_copies=True)),
    "few slots": ({"moe_intermediate_size": 2 * 160}, dataclasses.replace(emulated.SMALL, shared_bytes=64_000)),
    "sigmoids": (SIGMOIDS, emulated.SMALL),
    "sigmoids alone": ({"scoring_func": "sigmoid", "norm_topk_prob": False, "lanes": 1}, emulated.SMALL),
    "groups": ({**GROUPS, "norm_topk_prob": False}, emulated.SMALL),
    "groups as DeepSeek-V3": (
        {**GROUPS, "num_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "lanes": 1},
        emulated.SMALL,
    ),
    "groups of three, warps of 64": ({**GROUPS, "num_experts": 15, "n_group": 5, "topk_group": 3}, AMD),
    "a group for each of 32 threads": (
        {**GROUPS, "num_experts": 64, "n_group": 32, "topk_group": 5, "moe_intermediate_size": 2 * 6},
        emulated.SMALL,
    ),
    "roots, a table in the first layer": ({**ROOTS, "hash_layers": 1}, emulated.SMALL),
    "roots alone, tables": (
        {"scoring_func": "sqrtsoftplus", "norm_topk_prob": False, "hash_layers": 2, "lanes": 1, "num_experts": 80},
        emulated.SMALL,
    ),
    "roots, a table and a shared expert, warps of 64": (
        {**ROOTS, "hash_layers": 1, "shared_expert_intermediate_size": 2 * 24, "num_experts_per_tok": 6},
        AMD,
    ),
    "shared": (SHARED, emulated.SMALL),
    "shared with a gate": ({**SHARED, "shared_expert_gate": True}, emulated.SMALL),
    "odd sizes, shared with a gate, behind sigmoids": (
        {
            **GROUPS,
            "norm_topk_prob": False,
            "moe_intermediate_size": 2 * 17,
            "shared_expert_gate": True,
            "shared_expert_intermediate_size": 2 * 33,
            "hidden_size": 33,
        },
        emulated.SMALL,
    ),
    "shared, delayed": (
        {**SHARED, "moe_intermediate_size": 3 * 24, "shared_expert_gate": True, "layout": "dtp(1)", "lanes": 3},
        emulated.SMALL,
    ),
    "shared, warps of 64": ({**SHARED, "shared_expert_gate": True, "norm_after": "lane", "layout": "dtp(1)"}, AMD),
    "shared, few slots": (
        {**SHARED, "shared_expert_intermediate_size": 2 * 300, "moe_intermediate_size": 2 * 160},
        dataclasses.replace(emulated.SMALL, shared_bytes=64_000),
    ),
    "shared, an MLP between": (
        {**GROUPS, "shared_expert_intermediate_size": 2 * 24, "num_hidden_layers": 4, "mlp_only_layers": (0, 3)},
        emulated.SMALL,
    ),
}
FAST = {  # test_rows.py and tests/infer/engine/test_gpu.py have experts as in GPT-OSS
    "warps of 64",
    "odd sizes, shared with a gate, behind sigmoids",
    "roots, a table in the first layer",
}


def plan_of(weight_dtype: str = "float32", biases: bool = True, **changes) -> Plan:
    config = small.make_config(**SIZES | EXPERTS | changes)
    plan = make_plan(decoder_ops(config), config.schedule, weight_dtype=weight_dtype)
    return small.with_expert_biases(plan) if biases else plan


@emulated.only_emulated
@pytest.mark.parametrize("name", some(CASES, FAST))
def test_logits_match_the_interpreter(name):
    changes, machine = CASES[name]
    plan = plan_of(**changes)
    check(plan, weights_of(plan), machine=machine)


def test_equal_logits_choose_the_lowest_numbers():
    """Signed zeros count as equal. One launch per op gives the same bits."""
    plan = plan_of()
    weights = weights_of(plan)
    weights["layers.1.feed_forward.router"][:] = 0
    weights["layers.1.feed_forward.router_bias"][:] = [0, 1, 1, 1, 1, 0]
    weights["layers.0.feed_forward.router"][:] = 0
    weights["layers.0.feed_forward.router_bias"][:] = [-1, 0, -0.0, 0, -0.0, -2]
    one, other = (check(plan, weights, launch=launch) for launch in ("persistent", "graph"))
    assert same(one, other)


@emulated.only_emulated
def test_router_logit_that_is_not_a_number_gives_nan():
    """Three of six experts are used, with shares that sum to one: the logit of another expert would be in no sum."""
    plan = plan_of()
    for expert in (0, 3, 5):
        weights = weights_of(plan)
        weights["layers.1.feed_forward.router"][expert] = 3e38  # finite, but sums of products are inf - inf
        session = emulated.open_session(plan, weights)
        assert np.isnan(logits_of(session, [3, 4], drawn=1).logits[0]).all(), expert


@emulated.only_emulated
@pytest.mark.slow
def test_scores_of_any_size_match_the_interpreter():
    """Arguments of the softplus are far from 0 on either side. With one launch per op, the token's row of the table is
    found too. Layers with a table and with a correction share code.
    """
    plan = plan_of(**ROOTS, hash_layers=1)
    assert [len(kinds) for kinds in Layout(plan, H200, 2).of_modules] == [1, 1]
    weights = weights_of(plan)
    for layer, factor in ((0, 30.0), (1, 8.0)):
        weights[f"layers.{layer}.feed_forward.router"] *= np.float32(factor)
    weights["layers.1.feed_forward.correction"][:] = [0, 0, 0, 4, 0, -2]
    one, other = (check(plan, weights, launch=launch) for launch in ("persistent", "graph"))
    assert same(one, other)


def test_table_with_an_unknown_expert_is_refused():
    plan = plan_of(**ROOTS, hash_layers=1)
    session, path = emulated.open_session(plan, {}), "layers.0.feed_forward.by_token"
    table = weights_of(plan)[path]
    table[7, 1] = 6
    with pytest.raises(CheckpointError, match=rf"weight {path} has expert 6 at \[7, 1\], .* 0 to 5"):
        session.pack(path, table)


@pytest.mark.exhaustive
def test_equal_scores_choose_the_lowest_numbers():
    """The scores of experts and the sums of groups are equal. In layer 1 only the correction decides."""
    plan = plan_of(**GROUPS)
    weights = weights_of(plan)
    weights["layers.0.feed_forward.router"][:] = 0
    weights["layers.0.feed_forward.correction"][:] = [1, 0, 0, 3, 2, 1, 0, 3, 1, 2, 2, 1]
    weights["layers.1.feed_forward.correction"][:] = 100 * np.array([0, 1, 2, 2, 1, 0, 0, 4, 1, 1, 2, 2])
    one, other = (check(plan, weights, launch=launch) for launch in ("persistent", "graph"))
    assert same(one, other)


FORMATS = {  # the format of gate and up, and the format of down
    "mxfp4": ("mxfp4", "mxfp4"),
    "fp8": ("fp8", "fp8"),
    "int8 and int4": ("int8", "int4"),
    "int4 and fp8 of the tensor": ("int4 zeros", "fp8 tensor"),
}


@emulated.only_emulated
@pytest.mark.parametrize("name", some(FORMATS, {"mxfp4"}))
@pytest.mark.parametrize("machine", some({"SMALL": emulated.SMALL, "AMD": AMD}, {"SMALL"}))
def test_quantized_experts_match_the_interpreter(name, machine):
    plan = plan_of("bfloat16", hidden_size=160, moe_intermediate_size=2 * 96)
    gate_up, down = FORMATS[name]
    of = {"w1": gate_up, "w3": gate_up, "w2": down}
    weights = {
        path: rounded(w.astype(np.float32), of[path[-2:]]) if path[-2:] in of and w.ndim == 4 else w
        for path, w in weights_of(plan, "bfloat16").items()
    }
    check(plan, weights, 1e-5, machine={"SMALL": emulated.SMALL, "AMD": AMD}[machine])


@emulated.only_emulated
def test_several_devices_and_delays_change_no_bit():
    plan = plan_of()
    weights, ids = weights_of(plan), [3, 1, 4, 1, 5]
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 2), ("data", "lane"), axis_types=axes, devices=jax.devices()[:2])
    whole = check(plan, weights, ids=ids)
    half = dataclasses.replace(emulated.SMALL, ctas=4)
    assert same(
        whole, logits_of(emulated.open_session(plan, weights, machine=half, mesh=mesh, chaos_us=20), ids, mesh=mesh)
    )


@emulated.only_emulated
@pytest.mark.exhaustive
def test_timeout_ends_the_call_before_a_wrong_token(monkeypatch):
    config = small.make_config(**SIZES | EXPERTS)
    fail_often(emulated.make_session(config, small.make_weights(config), timeout_ms=50), config, monkeypatch)


def test_packed_bytes_count_only_used_experts():
    plan = plan_of()
    session = emulated.open_session(plan, weights_of(plan))
    layout, used = session.layout, 3
    held = 4 * np.prod(layout.packed_shape, dtype=np.int64)
    each = sum(w.size for path, w in weights_of(plan).items() if w.ndim == 4) * 4 // 6
    assert session.packed_bytes < held - (6 - used) * each and session.packed_bytes > used * each
    assert session.read_pass() >= 0


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (3, {"used": 17}, "a token uses 17 experts, more than 16"),
        (4, {"chosen": Chosen(2, False)}, "the products after a router do not use its experts"),
    ],
)
def test_unsupported_experts_are_refused(number, changes, message):
    plan = small.with_op(plan_of(), 1, number, **changes)
    with pytest.raises(ValueError, match=f"cannot run layer 1: {message}.*; use backend xla"):
        Layout(plan, H200, 2)


def test_too_many_groups_are_refused():
    plan = plan_of(**GROUPS | {"num_experts": 66, "n_group": 33})
    with pytest.raises(ValueError, match="cannot run layer 0: its experts are in 33 groups, more than 32; use"):
        Layout(plan, H200, 2)


def test_scale_of_a_whole_tensor_is_refused():
    plan = plan_of()
    path = "layers.0.feed_forward.w2"
    records = {path: rounded(weights_of(plan)[path], "nvfp4")}
    with pytest.raises(NativeError, match=rf"weight {path} .* a scale for the whole tensor, .* add --weights bfloat16"):
        CodesChoice.of(plan, records.items())


@pytest.mark.parametrize("machine", [H200, MI300X])
def test_pieces_are_dealt_evenly(machine):
    """With the experts of published models, padding is less than 30 %, by CTAs for hidden channels and by warps for
    sums.
    """
    for used, columns in ((4, 2880), (8, 768), (2, 1024)):
        config = small.make_config(
            lanes=1, hidden_size=512, num_experts=32, num_experts_per_tok=used, moe_intermediate_size=columns
        )
        layout = Layout(make_plan(decoder_ops(config), config.schedule, weight_dtype="bfloat16"), machine, 1)
        _, feed_forward = layout.kinds
        for op, tiling in feed_forward.of_experts:
            product = feed_forward.ops[op]
            assert isinstance(product, Product)
            read = tiling.read_lines * layout.line_words * 4
            needed = product.rows * product.columns * used * 2
            most = tiling.pieces.each * tiling.lines * tiling.pieces.ctas * tiling.pieces.warps * layout.line_words * 4
            assert needed <= read <= most < 1.3 * needed

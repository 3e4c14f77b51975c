"""Latent attention in the GPU kernel, on emulated GPUs: blocks with any number of CTAs, groups of heads, splits of the
latents, and formats of weights. Several devices, one launch per op, several rows and delays give the same bits.
"""

import dataclasses

import jax
import numpy as np
import pytest

from laneformer.config import LatentAttention, RopeScaling
from laneformer.custom_calls.gpu.layout import Layout
from laneformer.custom_calls.gpu.tiling import H200, MI300X, Machine
from laneformer.custom_calls.plan import Plan, make_plan
from laneformer.decoder import decoder_ops
from laneformer.ops import Blocks, Product, ProductName
from tests.support import emulated, small
from tests.support.gpu_cases import AMD, check, logits_of, rounded, same, some, weights_of
from tests.support.several_rows import Model

pytestmark = [small.needs_library, emulated.needs_gpu]

SIZES = {"kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
LATENT = {"layout": "tp", "head_dim": None, "heads": 3, "kv_heads": 3}
FOUR = {"lanes": 1, "heads": 4, "kv_heads": 4}
EXPERTS = {
    "num_experts": 12,
    "num_experts_per_tok": 4,
    "scoring_func": "sigmoid",
    "router_correction": True,
    "n_group": 4,
    "topk_group": 2,
    "mlp_only_layers": (0,),
    "shared_expert_intermediate_size": 2 * 8,
}
YARN = RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=1.0)
MANY_CTAS = Machine(warp_size=32, ctas=20, warps=2, shared_bytes=232_448, bulk_copies=True)  # each has a channel
CASES = {  # changes of the sizes, of the config, and the machine
    "a rank of queries": ({"q_lora_rank": 8}, {"layout": "ladder"}, emulated.SMALL),
    "more heads than CTAs": (
        {"qk_nope_head_dim": 5},  # odd heads
        {"lanes": 1, "heads": 40, "kv_heads": 40, "rope_scaling": YARN},
        emulated.SMALL,
    ),
    "experts behind it": ({"q_lora_rank": 8}, EXPERTS, emulated.SMALL),
    "latents of whole vectors": ({"kv_lora_rank": 64, "qk_rope_head_dim": 16}, FOUR, emulated.SMALL),
    "groups of heads": ({"kv_lora_rank": 20}, {**FOUR, "hidden_size": 40}, dataclasses.replace(MANY_CTAS, ctas=40)),
    "four lanes": ({}, {"lanes": 4}, emulated.SMALL),
    "warps of 64": ({"q_lora_rank": 8, "qk_nope_head_dim": 3}, EXPERTS, AMD),
}
FAST = {"more heads than CTAs", "experts behind it"}


def plan_of(sizes: dict | None = None, weight_dtype: str = "float32", cache_dtype: str = "float32", **changes) -> Plan:
    latent = LatentAttention(**SIZES | (sizes or {}))
    config = small.make_config(**LATENT | {"latent_attention": latent} | changes)
    return make_plan(decoder_ops(config), config.schedule, weight_dtype=weight_dtype, cache_dtype=cache_dtype)


@emulated.only_emulated
@pytest.mark.parametrize("name", some(CASES, FAST))
def test_logits_match_the_interpreter(name):
    sizes, changes, machine = CASES[name]
    plan = plan_of(sizes, **changes)
    check(plan, weights_of(plan), machine=machine)


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_latents_are_split_over_ctas(cache_dtype):
    """150 latents are in three splits, the newest in the last one. One launch per op gives the same bits."""
    plan = plan_of({"kv_lora_rank": 24}, cache_dtype=cache_dtype, num_hidden_layers=2)
    ids = [(7 * n) % 40 for n in range(150)]
    tolerance = 1e-4 if cache_dtype == "float32" else 1e-2  # latents may be rounded in different directions
    one, other = (
        check(plan, weights_of(plan), tolerance, ids, launch=launch, room=200) for launch in ("persistent", "graph")
    )
    assert same(one, other)


@emulated.only_emulated
@pytest.mark.parametrize("kind", some(("int8", "int4", "mxfp4", "fp8 rows of 16"), ()))
@pytest.mark.parametrize("machine", some({"SMALL": emulated.SMALL, "AMD": AMD}, {"SMALL"}))
def test_quantized_latents_match_the_interpreter(kind, machine):
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 32}
    plan = plan_of(sizes, "bfloat16", hidden_size=64)
    weights = {
        path: rounded(w.astype(np.float32), kind) if path in plan.matrices and ".attention." in path else w
        for path, w in weights_of(plan, "bfloat16").items()
    }
    check(plan, weights, 1e-5, machine={"SMALL": emulated.SMALL, "AMD": AMD}[machine])


@emulated.only_emulated
@pytest.mark.exhaustive
def test_several_devices_and_delays_change_no_bit():
    plan = plan_of({"q_lora_rank": 8}, lanes=4)
    weights, ids = weights_of(plan), [3, 1, 4, 1, 5]
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 2), ("data", "lane"), axis_types=axes, devices=jax.devices()[:2])
    whole = check(plan, weights, ids=ids)
    half = dataclasses.replace(emulated.SMALL, ctas=4)
    session = emulated.open_session(plan, weights, machine=half, mesh=mesh, chaos_us=20)
    assert same(whole, logits_of(session, ids, mesh=mesh))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_rows_of_a_pass_change_no_bit(rows):
    plan = plan_of({"q_lora_rank": 8, "kv_lora_rank": 24})
    Model(plan, weights_of(plan), rows=rows, chaos_us=20).check([3, 1, 4, 1, 5, 9, 2], 12, temperature=0.8)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (ProductName.ABSORB, {"blocks": Blocks(2, 10)}, "product ABSORB has blocks .* 3 heads"),
        (ProductName.VALUES, {"blocks": None}, "product VALUES has blocks .* 3 heads"),
    ],
)
def test_unsupported_blocks_are_refused(name, changes, message):
    plan = plan_of()
    ops = plan.ops.layers[1].ops
    number = next(n for n, op in enumerate(ops) if isinstance(op, Product) and op.name is name)
    with pytest.raises(ValueError, match=f"cannot run layer 1: {message}; use backend xla"):
        Layout(small.with_op(plan, 1, number, **changes), H200, 2)


@pytest.mark.parametrize(
    ("machine", "heads"), [(H200, 8), *((machine, heads) for machine in (H200, MI300X) for heads in (16, 24, 64, 128))]
)
def test_blocks_are_dealt_evenly(machine, heads):
    """With the heads per lane of published models, padding is less than 35 %. 8 heads on an MI300X are left out: a CTA
    has 4 rows of values there, and a warp takes 8 at once.
    """
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    config = {"lanes": 1, "heads": heads, "kv_heads": heads, "hidden_size": 7168}
    layout = Layout(plan_of(sizes, "bfloat16", "bfloat16", num_hidden_layers=1, **config), machine, 1)
    blocks = [tiling for tiling in layout.kinds[0].tilings if tiling and tiling.blocks]
    assert len(blocks) == 2
    for tiling in blocks:
        assert tiling.blocks == heads and tiling.blocks * tiling.block_parts <= tiling.ctas
        _, ctas, warps, _ = layout.packed_shape
        read = tiling.all_lines * ctas * warps * layout.line_words * 4
        needed = heads * tiling.all_rows * tiling.columns * 2
        assert needed <= read < 1.35 * needed

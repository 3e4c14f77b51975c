"""The layout of a model on a GPU: kinds of modules, the order of the weight stream, packing, and unsupported ops."""

import dataclasses
import itertools
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from laneformer import ops
from laneformer.custom_calls.gpu import header as gpu_header
from laneformer.custom_calls.gpu.formats import Plain
from laneformer.custom_calls.gpu.header import model_header
from laneformer.custom_calls.gpu.layout import MOST_ROWS, STEPS, Layout
from laneformer.custom_calls.gpu.tiling import H200, MI300X, tile
from laneformer.custom_calls.ops_header import fields, sizes
from laneformer.custom_calls.plan import Dtype, make_plan
from laneformer.decoder import decoder_ops
from laneformer.ops import Activation, Norm, Product, Value, Weight
from tests.support import small
from tests.support.decode_cases import COMPRESSED, ON_CPU
from tests.support.gpu_cases import mixed_plan

pytestmark = small.needs_library


def plan_of(**changes):
    config = small.make_config(**changes)
    return make_plan(decoder_ops(config), config.schedule)


def test_layers_with_different_windows_are_of_one_kind():
    layout = Layout(plan_of(sliding_window=5, sliding_window_n_layers=2), H200, 2)
    assert [kind.layers for kind in layout.kinds] == [(0, 1, 2)] * 2
    header = model_header(layout)
    assert "kAttend0Window[] = {5, 5, 0}" in header and header.count("kind_of(int) { return 0; }") == 2


def test_mixed_modules_are_of_two_kinds():
    layout = Layout(mixed_plan(), H200, 3)
    assert [kind.layers for kind in layout.kinds] == [(0, 2), (1, 3)] * 2
    header = model_header(layout)
    assert "kAttentionsKindOf[] = {0, 1, 0, 1}" in header and "kFeedForwardsKindOf[] = {0, 1, 0, 1}" in header
    places = [
        (layout.offset(layer, number), layout.tiling(layer, number).lines * layout.line_words)
        for layer, stages in enumerate(layout.stages)
        for number, stage in enumerate(stages)
        if isinstance(stage.op, Product)
    ]
    for (offset, size), (following, _) in itertools.pairwise(places):
        assert offset + size == following, "products follow each other without gaps"
    assert layout.head_offset >= sum(places[-1]) and layout.head_offset % layout.line_words == 0


def test_feed_forward_networks_share_code_beside_several_kinds_of_attention():
    """DeepSeek-V4 has attention with entries and an index, with other entries, and without entries."""
    layout = Layout(plan_of(**COMPRESSED["compressed attention, several streams"]), H200, 2)
    assert [[kind.layers for kind in kinds] for kinds in layout.of_modules] == [[(0,), (1,), (2,)], [(0, 1, 2)]]
    starts = [line for layer in range(3) for line in (layout.module_start(layer, 0), layout.module_start(layer, 1))]
    lines = [kind.lines for kinds in layout.kinds_of for kind in kinds]
    assert [*starts, layout.layer_starts[-1]] == [0, *itertools.accumulate(lines)]


def test_steps_are_the_ops_in_order():
    layout = Layout(plan_of(num_hidden_layers=2), H200, 2)
    first = STEPS.index("op")
    ops = [(first + number, layer) for layer in range(2) for number in range(5)]
    assert layout.steps == [(STEPS.index("embed"), -1), *ops, (STEPS.index("final"), -1), (STEPS.index("head"), -1)]


@pytest.mark.parametrize("vocab", [40, 4001, 100_000])
def test_rows_of_a_pass_change_no_packing(vocab):
    """With the same packing, sums have the same order. This includes the head, whose rows may be computed in turns."""
    plan = plan_of(vocab_size=vocab, head_dim=16, heads=32)
    one, four = (Layout(plan, H200, 2, rows=rows) for rows in (1, 4))
    assert (one.kinds, one.head) == (four.kinds, four.head) and one.packed_shape == four.packed_shape
    assert four.memory.shared_floats > one.memory.shared_floats and one.draft_ints == 0 and one.head_parts == 1
    assert four.head.steps // four.head.together % four.head_parts == 0


def test_invalid_numbers_of_rows_are_refused():
    plan = plan_of()
    for rows in (0, MOST_ROWS + 1):
        with pytest.raises(ValueError, match=f"1 to {MOST_ROWS} rows, got {rows}"):
            Layout(plan, H200, 2, rows=rows)
    with pytest.raises(ValueError, match="several rows"):
        Layout(plan, H200, 1, peer_ctas=1, rows=2)
    plan = plan_of(num_experts=16, num_experts_per_tok=16, moe_intermediate_size=32)
    few = dataclasses.replace(H200, warps=4)
    model_header(Layout(plan, few, 2, rows=1))
    for requests, option in ((1, "--draft-max"), (8, "--parallel")):
        with pytest.raises(ValueError, match=f"passes of 8 rows would read .* in a warp of 32 threads: lower {option}"):
            model_header(Layout(plan, few, 2, rows=8, requests=requests))


@pytest.mark.parametrize("machine", [H200, MI300X], ids=["H200", "MI300X"])
@pytest.mark.parametrize(("rows", "columns", "unit"), [(768, 3072, 1), (33, 20, 1), (34, 129, 2), (1, 1, 1)])
def test_packing_places_each_element_once_and_pads_with_zeros(machine, rows, columns, unit):
    tiling = tile(rows, columns, 16, machine, Plain(Dtype.bfloat16), unit)
    matrix = np.arange(1, rows * columns + 1, dtype=np.float32).reshape(rows, columns)
    packed = np.asarray(tiling.deal(jnp.asarray(matrix)))
    assert packed.shape == (16, machine.warps, tiling.lines // tiling.dealt[1], *tiling.dealt[1:])
    np.testing.assert_array_equal(np.sort(packed[packed != 0]), matrix.reshape(-1))
    for cta in range(16):
        own = matrix[cta * tiling.rows : (cta + 1) * tiling.rows]
        assert set(packed[cta][packed[cta] != 0]) == set(own.reshape(-1)), "a CTA has only its own rows"


@pytest.mark.parametrize(
    ("number", "fields", "message"),
    [
        (2, {"norm": Norm(Weight("gain", (12,)), 1e-5)}, "product OUT reads ATTENDED with a norm"),
        (0, {"writes": Value.HIDDEN}, r"its ops are STREAM -> HIDDEN PROJECTED -> ATTENDED ATTENDED -> OUTPUT"),
        (1, {"heads": 3}, "3 query and 1 key heads of 6 do not fit 24 channels"),
        (1, {"attention_gate": True}, "2 query and 1 key heads of 6 do not fit 24 channels"),
        (4, {"activation": Activation.SILU}, "product DOWN writes OUTPUT through SILU"),
        (4, {"gated": True}, "product DOWN writes OUTPUT gated"),
    ],
)
def test_unsupported_ops_are_refused(number, fields, message):
    with pytest.raises(ValueError, match=f"the GPU kernel cannot run layer 1: {message}; use backend xla"):
        Layout(small.with_op(plan_of(), 1, number, **fields), H200, 2)


def test_norms_of_some_sums_are_refused():
    plan = plan_of(layout="tp", norm_after="sum")
    attention, feed_forward = (module.ops for module in plan.ops.layers[1].modules)
    with pytest.raises(ValueError, match="norm of the sum"):
        Layout(small.with_ops(plan, 1, attention, feed_forward, sum_norm=None), H200, 2)


def test_ops_in_another_order_are_refused():
    plan = plan_of(norm_after="lane")
    (*attention, out, norm), feed_forward = (module.ops for module in plan.ops.layers[1].modules)
    with pytest.raises(ValueError, match="PROJECTED -> ATTENDED OUTPUT -> OUTPUT ATTENDED -> OUTPUT"):
        Layout(small.with_ops(plan, 1, [*attention, norm, out], feed_forward), H200, 2)


def test_biases_of_some_matrices_are_refused():
    plan = plan_of(qkv_bias=True)
    first, *rest = plan.ops.layers[1].ops[0].matrices
    with pytest.raises(ValueError, match="product QKV has biases"):
        Layout(small.with_op(plan, 1, 0, matrices=(dataclasses.replace(first, bias=None), *rest)), H200, 2)


@pytest.mark.parametrize("name", ["latent attention", "delta net", "compressed attention, several streams"])
def test_constants_are_found_by_their_names(name):
    """A search for a constant of the kernel finds where it is made, unless it is a field's."""
    plan = plan_of(**ON_CPU[name])
    constants = re.findall(r"constexpr \w+ (k\w+) =", model_header(Layout(plan, H200, plan.ops.lanes)))
    sources = "".join(path.read_text() for path in Path(gpu_header.__file__).parent.rglob("*.py"))
    kinds = [kind for kind in vars(ops).values() if dataclasses.is_dataclass(kind)]
    members = {member for kind in kinds for member in (*dict(fields(kind)), *sizes(kind))}
    of_fields = "|".join(member.title().replace("_", "") for member in members)
    of_values = "|".join(value.name.title() for value in Value)
    made = re.compile(rf"k({of_fields})(ed|Eps|Stride|Given)?|kIs\w+|k({of_values})\d*Board")
    unknown = [one for one in constants if not made.fullmatch(one) and f'"{one}"' not in sources]
    assert len(constants) > 200 and unknown == []

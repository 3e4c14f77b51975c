"""Plans, weights and checks that the tests of GPU kernels share."""

import dataclasses
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer import Precision, custom_calls
from laneformer.config import CompressedAttention
from laneformer.custom_calls import ENDS, State
from laneformer.custom_calls.gpu.codes import CodesChoice, Header, arrays_of
from laneformer.custom_calls.gpu.session import Inputs
from laneformer.custom_calls.gpu.tiling import Machine, Tiling
from laneformer.custom_calls.plan import Plan, make_plan
from laneformer.decoder import decoder_ops
from laneformer.infer.engine.native import plan_of
from laneformer.ops import Norm, Weight
from laneformer.quantized import Quantized
from laneformer.quantized.rounding import round_to
from tests.support import emulated, small
from tests.support.decode_cases import COMPRESSED_SIZES
from tests.support.plan_interpreter import interpret

ROOM = 160

AMD = Machine(warp_size=64, ctas=8, warps=2, shared_bytes=65_536, bulk_copies=False)


def some(cases, fast, slow=()):
    """Cases as parameters. Each compiles a kernel, so cases that are neither in `fast` nor in `slow` are marked
    exhaustive.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=str(case),
            marks=() if case in fast else pytest.mark.slow if case in slow else pytest.mark.exhaustive,
        )
        for case in cases
    ]


def compressed(sizes: dict | None = None, **changes) -> dict:
    """Fields of a config with compressed attention (see COMPRESSED_SIZES) and one residual stream. sizes: changed
    fields of the attention. changes: other fields of the config.
    """
    attention = CompressedAttention(**COMPRESSED_SIZES | (sizes or {}))
    return {"layout": "tp", "heads": 4, "num_key_value_heads": 1, "compressed_attention": attention} | changes


def mixed_plan(**options) -> Plan:
    """The plan of a model whose layers alternate between two kinds with different heads, rotations, norms, biases,
    gates, sinks, activations, windows and widths. Modules of the first kind normalize their output. Layers of the
    second kind have norms over all heads, and biases of gate and up, which no config has.
    """
    shared = {"lanes": 3, "layout": "dtp(1)", "num_hidden_layers": 4, "pre_norm_lane_agg": True}
    one = {"qkv_bias": True, "qk_norm": True, "rope_theta": 50.0, "sliding_window": 4, "swa_layers": (0,)}
    one |= {"norm_after": "lane", "hidden_act": "relu2", "gated_mlp": False}
    other = {"heads": 4, "kv_heads": 2, "head_dim": 4, "ff": 17, "norm_eps": 1e-2}
    other |= {"hidden_act": "gelu", "attention_gate": True, "attention_sinks": True, "out_bias": True}
    configs = [small.make_config(**shared, **changes) for changes in (one, other)]
    ops = [decoder_ops(config) for config in configs]
    layers = tuple(ops[layer % 2].layers[layer] for layer in range(4))
    plan = make_plan(dataclasses.replace(ops[0], layers=layers), configs[0].schedule, **options)
    for layer in (1, 3):
        attend, gate_up = plan.ops.layers[layer].ops[1], plan.ops.layers[layer].ops[3]
        norms = {
            f"{name}_norm": Norm(Weight(f"layers.{layer}.attention.{name}_norm", (heads * attend.head_dim,)), 1e-2)
            for name, heads in (("q", attend.heads), ("k", attend.kv_heads))
        }
        matrices = tuple(
            dataclasses.replace(matrix, bias=Weight(f"{matrix.weight.path}_bias", (matrix.rows,)))
            for matrix in gate_up.matrices
        )
        plan = small.with_op(small.with_op(plan, layer, 1, **norms), layer, 3, matrices=matrices)
    return plan


def plan_of_normed_sums(layout: str) -> Plan:
    """A plan with norms of the sums over the lanes in any layout. A config can have them only in layouts that add
    nothing but the sum.
    """
    summed = small.make_config(layout="tp", norm_after="sum", lanes=3)
    return make_plan(decoder_ops(summed), summed.replace(layout=layout, norm_after=None).schedule)


def weights_of(plan: Plan, dtype="float32", seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of any plan, by path. Vectors are near 1, biases near 0; no row of a table names an expert
    twice.
    """
    rng = np.random.default_rng(seed)

    def draw(path: str, weight) -> np.ndarray:
        if path in plan.tables:
            rows, used = weight.shape
            return rng.permuted(np.tile(np.arange(plan.tables[path]), (rows, 1)), axis=1)[:, :used]
        normal = rng.standard_normal(plan.shape_of(path))
        if not weight.is_matrix:
            return 0.3 * normal + (not path.endswith("bias"))
        return normal * (2 if path == "lm_head" else 1) / (1 if path == "tok_embeddings" else weight.shape[-1] ** 0.5)

    return {path: draw(path, weight).astype(np.float32).astype(dtype) for path, weight in plan.weights.items()}


def of_config(config, dtype="float32", compute="float32") -> tuple[Plan, dict[str, np.ndarray]]:
    """The plan of a config and random weights of this dtype."""
    source = types.SimpleNamespace(config=config, precision=Precision(param=dtype, compute=compute), stored_dtype=dtype)
    return plan_of(source), small.make_weights(config, dtype)


def state_of(plan: Plan, capacity: int) -> State:
    """An empty state of any plan for `capacity` positions."""
    return State(jnp.zeros(plan.ops.vocab_size, jnp.uint8), small.zero_layers(plan, capacity))


def jitted(session, mesh=None, **sizes):
    """A function (inputs, state) -> (outputs, state) of a session, to which the state is donated. It returns once the
    device has finished.
    """
    function = jax.jit(partial(custom_calls.decode, session, mesh=mesh, **sizes), donate_argnums=1)
    return lambda inputs, state: jax.block_until_ready(
        function(small.inputs_of(session, inputs), state, session.operands)
    )


def logits_of(session, ids: list[int], drawn: int = 4, mesh=None, room: int = 64):
    """Outputs of a greedy call that draws `drawn` tokens, with the logits of each. room: positions of the caches."""
    outputs, _ = jitted(session, mesh, room=drawn, logits=True)(
        small.make_inputs(ids, drawn), state_of(session.plan, room)
    )
    assert session.failure is None
    return outputs


def answer(config, room: int, call, ids, sizes, drawn=3, state=None, start=0, **options):
    """Logits and tokens that follow a prompt, and the state after them. sizes: number of prompt tokens in each call.
    room: size of the calls' prompt array.
    """
    state = small.make_state(config, 128) if state is None else state
    for n, size in enumerate(sizes):
        limit = drawn if n == len(sizes) - 1 else 1
        inputs = small.make_inputs(ids[:size], limit, start=start, room=room, **options)
        outputs, state = call(inputs, state)
        ids, start = ids[size:], start + size
    return (np.asarray(outputs.logits[:drawn]), np.asarray(outputs.tokens[:drawn])), state


def check_devices(config, weights, room: int, call) -> None:
    """Asserts that two devices with random delays give the same bits as one. call: that of a session on one device with
    the same number of CTAs.
    """
    ids, axes = small.prompt_of(config, 18), (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 2), ("data", "lane"), axis_types=axes, devices=jax.devices()[:2])
    half = dataclasses.replace(emulated.SMALL, ctas=4)
    divided = emulated.make_session(config, weights, machine=half, mesh=mesh, chaos_us=20)
    state = small.make_state(config, 128, mesh=mesh)
    found, _ = answer(config, room, jitted(divided, mesh, room=room, logits=True), ids, [11, 7], 20, state)
    assert small.same(found, answer(config, room, call, ids, [11, 7], 20)[0])


def check_drafts(config, room: int, call, several, prompt: int) -> None:
    """Asserts that drafts change no bit of an answer, whether they are correct, wrong, or wrong at some places, and
    that its text continues with the same bits in a session with one row.

    call: that of the session with one row. several: a session with several rows. prompt: length of the prompt.
    """
    ids, drafting = small.prompt_of(config, prompt), jitted(several, room=room, logits=True)
    expected, state = answer(config, room, call, ids, [prompt], 25)
    tokens, end = expected[1].tolist(), prompt + 24

    def rest(state):
        return answer(config, room, call, tokens[-1:], [1], 20, state=state, start=end)[0]

    expected_rest = rest(state)
    for most, wrong in ((0, 1), (3, 1), (3, 3), (3, 100), (2, 4)):
        several.speculate(most, [1.0] * 4)
        drafts = [(token + (n % wrong == wrong - 1)) % config.vocab_size for n, token in enumerate(tokens)]
        found, state = answer(config, room, drafting, ids, [prompt], 25, given=drafts)
        assert small.same(found, expected), (most, wrong)
        assert small.same(rest(state), expected_rest), (most, wrong)
    assert sum(several.drafting.rows[1:]) > 0


def check_texts_of_the_cpu(config, weights, room: int, call) -> None:
    """Asserts that `call` continues a text from the CPU kernel's state, and the CPU kernel one from the state of
    `call`: both kernels keep the same arrays.
    """
    cpu = small.jitted(small.make_session(config, weights, threads=1), room=room, logits=True)
    for size in (5, 16, 33, 47):
        ids = small.prompt_of(config, size)
        (logits, tokens), _ = answer(config, room, call, ids, [size], 12)
        for first, then in ((cpu, call), (call, cpu)):
            _, state = answer(config, room, first, ids[:-1], [size - 1], 1)
            found, _ = answer(config, room, then, ids[-1:], [1], 12, state=state, start=size - 1)
            assert found[1].tolist() == tokens.tolist()
            assert np.abs(found[0] - logits).max() < 1e-5 * np.abs(logits).max()


def check(plan: Plan, weights: dict, tolerance: float = 1e-4, ids=(3, 1, 4, 1, 5), room: int = 64, **options):
    """Asserts that a session of the plan gives the interpreter's logits for the dequantized weights. Returns the
    outputs.
    """
    exact = {path: w.dequantize(np.float32) if isinstance(w, Quantized) else w for path, w in weights.items()}
    if any(isinstance(w, Quantized) for w in weights.values()):
        options["codes"] = CodesChoice.of(plan, weights.items())
    outputs = logits_of(emulated.open_session(plan, weights, **options), list(ids), room=room)
    expected = interpret(plan, exact, [*ids, *outputs.tokens[:3].tolist()])[len(ids) - 1 :]
    assert np.abs(expected - outputs.logits).max() < tolerance * np.abs(expected).max() and np.abs(expected).max() > 1
    return outputs


def same(a, b) -> bool:
    """Whether two calls' outputs are equal in every defined bit: the status, and the rows of drawn tokens."""
    count = int(a.status[0])
    cut = [
        [x[:count] for x in (r.tokens, r.logprobs, r.top_tokens, r.top_logprobs, r.logits)] + [r.status] for r in (a, b)
    ]
    return small.same(*cut)


def with_zero_points(record: Quantized) -> Quantized:
    zeros = np.random.default_rng(1).integers(0, 16, record.scales.shape).astype(np.uint8)
    return dataclasses.replace(record, zero_points=zeros, scales=record.scales.astype("bfloat16"))


def with_scale(record: Quantized) -> Quantized:
    return dataclasses.replace(record, global_scale=np.array(1.7 * record.global_scale, np.float32))


def with_scales_of(dtype: str):
    return lambda record: dataclasses.replace(record, scales=record.scales.astype(dtype))


def with_groups_of(columns: int | None):
    """A change of a record: groups of this many columns with random bfloat16 scales, or for None one group per row with
    the scale of its first group.
    """

    def changed(record: Quantized) -> Quantized:
        if columns is None:
            return dataclasses.replace(record, scales=record.scales[..., :1], group=(1, record.columns))
        shape = (*record.shape[:-1], -(-record.columns // columns))
        scales = np.random.default_rng(3).uniform(0.001, 0.01, shape).astype("bfloat16")
        return dataclasses.replace(record, scales=scales, group=(1, columns))

    return changed


def with_rows_of_16(record: Quantized) -> Quantized:
    """The record with groups of 16 rows, which have random float16 scales."""
    rows = -(-record.shape[-2] // 16)
    scales = np.random.default_rng(2).uniform(0.001, 0.01, (*record.shape[:-2], rows, 1)).astype(np.float16)
    return dataclasses.replace(record, scales=scales, group=(16, record.columns))


WAYS = {  # kind, weights that share a scale, change of the record
    "int8": ("int8", "row", None),
    "int8 group 32": ("int8", 32, None),
    "int4": ("int4", 32, None),
    "int4 group 128 float16": ("int4", 128, with_scales_of("float16")),
    "int4 group 16": ("int4", 32, with_groups_of(16)),
    "int4 row": ("int4", 32, with_groups_of(None)),
    "int4 zeros": ("int4", 64, with_zero_points),
    "int4 zeros group 16": ("int4", 32, lambda record: with_zero_points(with_groups_of(16)(record))),
    "mxfp4": ("mxfp4", 32, None),
    "nvfp4": ("nvfp4", 16, with_scale),
    "fp8": ("fp8", "block", None),
    "fp8 tensor": ("fp8", "tensor", None),
    "fp8 rows of 16": ("fp8", "row", with_rows_of_16),
}


def rounded(weights: np.ndarray, way: str) -> Quantized:
    kind, shared, change = WAYS[way]
    record = round_to(weights, kind, shared, search=False)
    record = change(record) if change else record
    assert record.problem() is None
    return record


def packed(record: Quantized, tiling: Tiling) -> tuple:
    """Lines of a matrix's codes, the number of the weight at each of their places (from 1, 0 for padding), and the
    factors of the rows in the matrix's order and in the tiling's.
    """
    format, header = tiling.format, Header(record.kind, record.group, record.columns)

    @jax.jit
    def pack(arrays):
        found = arrays_of(
            Quantized(record.kind, group=record.group, columns=record.columns, **arrays), header, format, tiling.granule
        )
        lines = format.pack(tiling.deal(found["codes"]))
        if format.scale:
            lines = format.with_scales(lines, tiling.deal_granules(found["scales"]), tiling.cluster)
        factors = found.get("factors", jnp.ones((record.shape[0], 1)))
        numbers = jnp.arange(1, record.shape[0] * record.columns + 1).reshape(record.shape)
        return lines, tiling.deal(numbers), factors, tiling.deal_rows(factors)

    return pack(record.arrays)


REFUSED = {
    "a prompt longer than its array": Inputs(
        np.ones(16, np.int32),
        np.array([17, 0, 4, 0, 0], np.int32),
        np.array([0, 1, 0, 1], np.float32),
        np.zeros(2, np.uint32),
        np.full(4, -1, np.int32),
    ),
    "a token beyond the vocabulary": small.make_inputs([1, 40], 4),
    "a negative token": small.make_inputs([-1], 4),
    "no token to draw": small.make_inputs([1], 0),
    "more tokens than the cache has": small.make_inputs([1] * 50, 150),
    "a negative position": small.make_inputs([1], 1, start=-1),
}


def fail_often(session, config, monkeypatch) -> None:
    """Pauses each CTA in two calls until the others have timed out. Asserts that such a call fails, and that all tokens
    that it has emitted are correct.
    """
    call = jitted(session, room=ROOM)
    ctas = config.num_lanes * session.layout.ctas
    prompts = [small.make_inputs([3 + n], 15, room=ROOM) for n in range(5)]
    answers = [np.asarray(call(inputs, small.make_state(config, 160))[0].tokens) for inputs in prompts]
    for index in range(2 * ctas):
        inputs, expected = prompts[index % 5], answers[index % 5]
        monkeypatch.setenv("EMULATOR_STILL", f"{index % ctas},{3 + index % 7}")
        session.begin()
        outputs, _ = call(inputs, small.make_state(config, 160))
        monkeypatch.delenv("EMULATOR_STILL")
        count = int(outputs.status[0])
        assert outputs.status[1] == len(ENDS) and "timed out waiting for" in session.failure
        assert 3 + index % 7 <= count < 15 and outputs.tokens[:count].tolist() == expected[:count].tolist()
        assert session.drawn(0, count).tokens.tolist() == expected[:count].tolist()
        session.begin()

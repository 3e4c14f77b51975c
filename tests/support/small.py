"""Small models for the tests of decode kernels: random weights for any config, sessions, and their calls."""

import dataclasses
import functools
import math
import types
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer import Laneformer, ModelConfig, Precision, custom_calls, save_hf
from laneformer.custom_calls import DecodeSession, Request, Session, State
from laneformer.custom_calls.decode import empty_layers
from laneformer.custom_calls.plan import Plan, make_plan
from laneformer.custom_calls.request import SamplingOptions
from laneformer.decoder import decoder_ops
from laneformer.infer.engine.backend import CheckpointSource
from laneformer.infer.engine.cpu import CpuBackend
from laneformer.infer.engine.native import plan_of
from laneformer.layout import parse_layout
from laneformer.ops import Activation, Matrix, Op, Product, Route
from laneformer.weights import parameter_table
from tests.support import reference
from tests.support.plan_interpreter import interpret

needs_library = pytest.mark.skipif(custom_calls.unavailable() is not None, reason=str(custom_calls.unavailable()))


def make_config(*, lanes: int = 2, heads: int = 2, kv_heads: int = 1, ff: int = 9, **changes) -> ModelConfig:
    """A config of a small model. heads, kv_heads and ff count one lane's. By default no size is a multiple of the
    length of a vector.
    """
    sizes = {"vocab_size": 40, "hidden_size": 20, "head_dim": 6, "num_hidden_layers": 3, "max_position_embeddings": 512}
    sizes |= {"num_lanes": lanes, "num_attention_heads": lanes * heads, "num_key_value_heads": lanes * kv_heads}
    return ModelConfig(**sizes | changes, intermediate_size=lanes * ff)


def make_weights(config: ModelConfig, dtype="float32", seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by path, large enough for logits that differ by a few units."""
    rng = np.random.default_rng(seed)

    def draw(path, parameter):
        if parameter.below is not None:  # a table of the experts of each token
            rows, used = parameter.shape
            return rng.permuted(np.tile(np.arange(parameter.below), (rows, 1)), axis=1)[:, :used]
        normal = rng.standard_normal(parameter.shape)
        if parameter.initial in ("ones", "zeros"):  # norms, biases
            return 0.3 * normal + (parameter.initial == "ones")
        if path == "tok_embeddings":
            return normal * (2 / math.sqrt(parameter.shape[-1]) if config.tie_word_embeddings else 1)
        return normal * (2 if path == "lm_head" else 1) / math.sqrt(parameter.shape[-1])

    return {
        path: draw(path, parameter).astype(np.float32).astype(jnp.dtype("int32" if parameter.below else dtype))
        for path, parameter in parameter_table(config).items()
    }


def windowed_model() -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Config and weights of a model with three lanes, a delay of one module, and a window in one layer."""
    config = make_config(lanes=3, layout="dtp(1)", sliding_window=40, sliding_window_n_layers=1)
    return config, make_weights(config)


def with_ops(plan: Plan, layer: int, attention: Iterable[Op], feed_forward: Iterable[Op], **fields) -> Plan:
    """The plan with other ops in one layer. fields: changed fields of that layer's attention module."""
    layers = [*plan.ops.layers]
    old = layers[layer]
    layers[layer] = dataclasses.replace(
        old,
        attention=dataclasses.replace(old.attention, ops=tuple(attention), **fields),
        feed_forward=dataclasses.replace(old.feed_forward, ops=tuple(feed_forward)),
    )
    return dataclasses.replace(plan, ops=dataclasses.replace(plan.ops, layers=tuple(layers)))


def with_op(plan: Plan, layer: int, number: int, **fields) -> Plan:
    """The plan with some fields of one op changed. number: index of the op in its layer."""
    ops, count = [*plan.ops.layers[layer].ops], len(plan.ops.layers[layer].attention.ops)
    ops[number] = dataclasses.replace(ops[number], **fields)
    return with_ops(plan, layer, ops[:count], ops[count:])


def with_expert_biases(plan: Plan) -> Plan:
    """The plan with biases of the routers and of all experts, and limits of the gate and up rows, as in GPT-OSS."""

    def biased(matrix: Matrix) -> Matrix:
        weight = matrix.weight
        bias = dataclasses.replace(weight, path=f"{weight.path}_bias", shape=weight.shape[:1])
        return dataclasses.replace(matrix, bias=bias)

    for layer, ops in enumerate(plan.ops.layers):
        for number, op in enumerate(ops.ops):
            if isinstance(op, Route):
                plan = with_op(plan, layer, number, matrix=biased(op.matrix))
            elif isinstance(op, Product) and op.chosen:
                limits = {"limit": 0.7, "up_offset": 1.0, "activation": Activation.QUICK_GELU} if op.gated else {}
                matrices = tuple(map(biased, op.matrices))
                plan = with_op(plan, layer, number, matrices=matrices, **limits)
    return plan


def make_session(
    config: ModelConfig, weights: dict[str, np.ndarray], *, compute: str = "float32", **options
) -> Session:
    """A session of the CPU kernel with all weights packed. options: those of custom_calls.Session."""
    session = open_session(config, weights["tok_embeddings"].dtype.name, compute, **options)
    pack_all(session, weights)
    return session


def pack_all(session: Session, weights: dict[str, np.ndarray]) -> None:
    """Packs all weights, which are given by their paths in the table of laneformer/weights.py."""
    for path, weight in weights.items():
        for part, own in session.plan.parts(path, weight).items():
            session.pack(part, own)


def open_session(config: ModelConfig, stored: str, compute: str = "float32", **options) -> Session:
    """A session of the CPU kernel without weights. stored: dtype in which the weights are stored."""
    source = types.SimpleNamespace(
        config=config, precision=Precision(param=stored, compute=compute), stored_dtype=stored
    )
    return Session(plan_of(source), **options)


def mapped_session(config: ModelConfig, weights: dict[str, np.ndarray], folder: Path, **options) -> Session:
    """A session of the CPU kernel that maps a folder's bf12 matrices. Writes the checkpoint if the folder has none."""
    if not (folder / "config.json").exists():
        model = Laneformer(config, {path: jax.device_put(weight) for path, weight in weights.items()})
        save_hf(model, folder, weights="bf12")
    return CpuBackend(CheckpointSource(folder), weights="bf12", **options).session


class Asked(NamedTuple):
    """A request, and the number of prompt tokens for which its arrays have room at least."""

    request: Request
    room: int

    def inputs(self, session: DecodeSession):
        """The arrays of the request for a session with one slot in each call."""
        return session.inputs(self.request, most_tokens=self.room)


def make_inputs(prompt, limit: int, *, room: int | None = None, seed=(1, 2), penalty: float = 1.0, **options) -> Asked:
    """A request that draws up to `limit` tokens, which `jitted` turns into arrays. options: other fields of
    SamplingOptions and Request. seed: its low and high word, or the whole number.
    """
    names = {field.name for field in dataclasses.fields(SamplingOptions)}
    sampling = {name: options.pop(name) for name in names & set(options)}
    number = seed if isinstance(seed, int) else int(seed[0]) | int(seed[1]) << 32
    chosen = SamplingOptions(seed=number, repetition_penalty=float(penalty), **sampling)
    return Asked(Request(prompt=tuple(prompt), limit=limit, sampling=chosen, **options), room or len(prompt))


def make_state(config: ModelConfig, capacity: int, dtype="float32", mesh=None) -> State:
    """An empty state for `capacity` positions. dtype: that of its caches."""
    if mesh is None:
        return zeros(state_shapes(config, capacity, jnp.dtype(dtype).name))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    plan = make_plan(decoder_ops(config), config.schedule, cache_dtype=dtype)
    return State(jnp.zeros(config.vocab_size, jnp.uint8, device=replicated), empty_layers(plan, capacity, mesh))


@functools.cache  # tests make thousands of states
def state_shapes(config: ModelConfig, capacity: int, dtype: str) -> State:
    plan = make_plan(decoder_ops(config), config.schedule, cache_dtype=dtype)
    seen = jax.ShapeDtypeStruct((config.vocab_size,), jnp.uint8)
    return State(seen, jax.eval_shape(partial(empty_layers, plan, capacity)))


def zeros(shapes):
    """A tree of arrays of these shapes on one device, made without a program for each shape."""
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), may_alias=False), shapes)


def zero_layers(plan: Plan, capacity: int) -> list[dict[str, jax.Array]]:
    """The arrays of `empty_layers` on one device."""
    return zeros(jax.eval_shape(partial(empty_layers, plan, capacity)))


def arrays_of(state: State, *names: str) -> list[jax.Array]:
    """The arrays of these names in all layers that keep them, name by name."""
    return [layer[name] for name in names for layer in state.layers if name in layer]


def jitted(session: Session, mesh=None, **sizes):
    """A function (inputs, state) -> (outputs, state) of a session, to which the state is donated. inputs: an `Asked` or
    the arrays of a request. The session keeps the compiled function for the next call with the same sizes.
    """
    kept, key = vars(session).setdefault("jitted", {}), (mesh, *sorted(sizes.items()))
    if key not in kept:
        kept[key] = jax.jit(partial(custom_calls.decode, session, mesh=mesh, **sizes), donate_argnums=1)
    return lambda inputs, state: kept[key](inputs_of(session, inputs), state)


def inputs_of(session: DecodeSession, inputs):
    """The arrays of an `Asked`; other inputs unchanged."""
    return inputs.inputs(session) if isinstance(inputs, Asked) else inputs


def same(a, b) -> bool:
    """Whether two trees of arrays are equal in every bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.shape(x) == np.shape(y) and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def prompt_of(config: ModelConfig, length: int) -> list[int]:
    """Random tokens, the same for each length."""
    return np.random.default_rng(length).integers(0, config.vocab_size, length).tolist()


def reference_logits(config: ModelConfig, weights: dict[str, np.ndarray], ids) -> np.ndarray:
    """Logits of tests/support/reference, float64 [s, vocab]."""
    table, arrays = parameter_table(config), {}
    for path, weight in weights.items():
        arrays[table[path].file_name] = (
            np.concatenate(list(weight), 1) if config.lm_head_type == "lane" and path == "lm_head" else weight
        )
    values = dataclasses.asdict(config)
    name, arguments = parse_layout(config.layout)
    if name == "laneformer":
        return reference.reference_logits(values, arrays, [ids])[0]
    named = {"desync": "n", "caat": "p", "track": "D", "dtp": "delta"}
    arguments = {"drop": arguments} if name == "spd" else {named[name]: arguments[0]} if arguments else {}
    return reference.layout_logits(name, arguments, values, arrays, [ids])[0]


def interpreted_logits(config: ModelConfig, weights: dict[str, np.ndarray], ids) -> np.ndarray:
    """Logits of the plan's interpreter, float64 [s, vocab], which every decode kernel must compute."""
    return interpret(make_plan(decoder_ops(config), config.schedule), weights, ids)


def model_logits(config: ModelConfig, weights: dict[str, np.ndarray], ids, compute: str = "float32") -> np.ndarray:
    """Logits of the model in laneformer/, float32 [s, vocab]."""
    precision = Precision(param=weights["tok_embeddings"].dtype.name, compute=compute)
    model = Laneformer(config, {path: jax.device_put(weight) for path, weight in weights.items()}, precision)
    return np.asarray(model(np.array([ids], np.int32))[0])

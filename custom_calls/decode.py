"""The JAX function of the decode kernel: one custom call runs a prompt and generates a whole answer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer.custom_calls.plan import Kept, Plan
from laneformer.custom_calls.session import DecodeSession

ENDS = ("length", "stop", "cancelled")
YIELDED = len(ENDS) + 1  # in place of an index into ENDS: the request continues in another call


class Inputs(NamedTuple):
    """The request of a call. All fields may be traced; the sizes p and s are those of the arrays. If a call has several
    slots (`DecodeSession.together`), each array has a leading slot axis.
    """

    prompt: jax.Array
    """int32 [p]: token ids; only the first control[0] are used."""
    control: jax.Array
    """int32 [5]: number of prompt tokens, position of the first of them, most tokens to draw, top_k, and the number of
    the session's slot that runs the call. If a call has several slots, the last value is instead the number of tokens
    that the request drew in earlier calls, and a slot without a request has 0 prompt tokens.
    """
    settings: jax.Array
    """float32 [4]: temperature, top_p, min_p, repetition penalty (defined in infer/sampling.py)."""
    key: jax.Array
    """uint32 [2]: low and high word of the seed."""
    stops: jax.Array
    """int32 [s]: stop tokens, after which nothing is drawn; -1 for an unused entry."""


class State(NamedTuple):
    """The arrays that a call updates in place: donate them. Except `seen`, each field lists the arrays of that name in
    Plan.kept, one for each layer that has it, in order. If a call has several slots, they are the second axis of these
    arrays (of size 1 below) and a leading axis of `seen`.
    """

    seen: jax.Array
    """uint8 [vocab]: 1 for tokens of the text so far, including the prompt; the call adds the tokens that it draws."""
    keys: list[jax.Array]
    """[lanes, 1, positions, kv heads, head size]; `values` too."""
    values: list[jax.Array]
    latents: list[jax.Array] | tuple[()] = ()
    """[lanes, 1, positions, channels]."""
    base: list[jax.Array] | tuple[()] = ()
    """int32 [lanes, 1, 1, key heads]. `base` to `state` belong to DeltaNet; `kept_of` in custom_calls/plan.py describes
    them. Compressed attention also keeps a base, [lanes, 1, 1, 1].
    """
    entries: list[jax.Array] | tuple[()] = ()
    """float32 [lanes, 1, 1, key heads, floats]."""
    inputs: list[jax.Array] | tuple[()] = ()
    """[lanes, 1, 1, key heads, positions, channels]."""
    state: list[jax.Array] | tuple[()] = ()
    """float32 [lanes, 1, 1, key heads, tiles, key_dim, 16]."""
    positions: list[jax.Array] | tuple[()] = ()
    """[lanes, 1, positions, head_dim]. This field and the following ones belong to compressed attention (`kept_of`)."""
    compressed: list[jax.Array] | tuple[()] = ()
    """[lanes, 1, entries, head_dim]."""
    compressed_tail: list[jax.Array] | tuple[()] = ()
    """float32 [lanes, 1, 1, newest positions, channels of vectors and gates]."""
    index_keys: list[jax.Array] | tuple[()] = ()
    """[lanes, 1, entries, channels]."""
    index_keys_tail: list[jax.Array] | tuple[()] = ()
    """float32 [lanes, 1, 1, newest positions, channels of vectors and gates]."""

    @classmethod
    def of(cls, seen: jax.Array, layers: list[dict[str, jax.Array]]) -> "State":
        """The state with these arrays of each layer, by name."""
        return cls(seen, *([layer[name] for layer in layers if name in layer] for name in cls._fields[1:]))

    def layers_like(self, layers: list[dict[str, jax.Array]]) -> list[dict[str, jax.Array]]:
        """The inverse of `of`: this state's arrays by layer and name, for layers with the names in `layers`."""
        arrays = {name: iter(getattr(self, name)) for name in self._fields[1:]}
        return [{name: next(arrays[name]) for name in layer} for layer in layers]


def empty_layers(plan: Plan, capacity: int, mesh: Mesh | None = None, slots: int = 1) -> list[dict[str, jax.Array]]:
    """The arrays of each layer, by name, before the first token, with room for `capacity` positions."""
    device = None if mesh is None else NamedSharding(mesh, P("lane"))

    def make(kept: Kept) -> jax.Array:
        shape = (plan.ops.lanes, slots, kept.entries(capacity), *kept.shape)
        return jnp.zeros(shape, kept.dtype, device=device)

    return [{kept.name: make(kept) for kept in layer} for layer in plan.kept]


class Outputs(NamedTuple):
    """The results of a call. Rows after the last token are 0 in `tokens` and `logprobs`, and undefined in the three
    fields after these. If the call has several slots, each array has a leading slot axis.
    """

    tokens: jax.Array
    """int32 [room]: the drawn tokens; a stop token is the last."""
    logprobs: jax.Array
    """float32 [room]: log softmax of the raw logits at each token."""
    top_tokens: jax.Array
    """int32 [room, top]: the most likely tokens, most likely first."""
    top_logprobs: jax.Array
    """float32 [room, top]: log-probabilities of `top_tokens`."""
    logits: jax.Array
    """float32 [room, vocab], or [0, vocab] without the option `logits`."""
    status: jax.Array
    """int32 [3]: number of tokens drawn, index into ENDS or YIELDED, position of the next token."""


def decode(
    session: DecodeSession,
    inputs: Inputs,
    state: State,
    operands: tuple[jax.Array, ...] = (),
    *,
    room: int,
    top: int = 0,
    logits: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Outputs, State]:
    """Runs the prompt through the model and draws up to control[2] tokens, in one call. Returns the drawn tokens and
    the updated state.

    operands: `session.operands`, passed as arguments of the jitted function, because a weight that the function closes
    over would become a constant of the program. room: most tokens that fit in the result. mesh: axes (data, lane); the
    caches are sharded over its lane axis.

    The caches are updated in place: call this under jax.jit with `state` donated. Otherwise XLA copies it in every
    call. Raises ValueError outside of jax.jit. A call that fails raises jax.errors.JaxRuntimeError with the reason; it
    also fails if a device is missing after the session's timeout. A failure that only a GPU can detect sets status[1]
    to len(ENDS), and `session.failure` gives the reason.

    A call with several slots ends once one of its requests has ended; the others have YIELDED. Such a request continues
    in the next call, whose prompt is what its cache does not contain yet: the rest of its prompt, or its last drawn
    token.
    """
    if not all(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        raise ValueError(
            "custom_calls.decode updates its state in place: call it under jax.jit with the state donated"
            " (donate_argnums)"
        )
    vocab, slots = session.plan.ops.vocab_size, session.together
    outputs = Outputs(
        jax.ShapeDtypeStruct((slots * room,), jnp.int32),
        jax.ShapeDtypeStruct((slots * room,), jnp.float32),
        jax.ShapeDtypeStruct((slots * room, top), jnp.int32),
        jax.ShapeDtypeStruct((slots * room, top), jnp.float32),
        jax.ShapeDtypeStruct((slots * room if logits else 0, vocab), jnp.float32),
        jax.ShapeDtypeStruct((slots * 3,), jnp.int32),
    )
    devices, places = (1, _everywhere()) if mesh is None else (len(_ordinals(mesh)), _places(mesh))

    if len(operands) != len(session.operands):
        raise ValueError(f"got {len(operands)} operands, expected {len(session.operands)}: pass session.operands")

    def local(inputs: Inputs, operands: tuple, state: State) -> tuple[Outputs, State]:
        changed = jax.tree.leaves(state)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in changed]
        first = len(inputs) + len(operands)
        results = jax.ffi.ffi_call(
            session.target,
            [*outputs, *shapes],
            has_side_effect=True,
            input_output_aliases={first + i: len(outputs) + i for i in range(len(changed))},
        )(
            *inputs,
            *operands,
            *changed,
            session=np.int64(session.id),
            devices=np.int64(devices),
            position_of_device=places,
        )
        return Outputs(*results[: len(outputs)]), jax.tree.unflatten(jax.tree.structure(state), results[len(outputs) :])

    if slots > 1:  # in the custom call, the arrays of all slots follow each other
        inputs = jax.tree.map(jnp.ravel, inputs)
        state = state._replace(seen=jnp.ravel(state.seen))
    if mesh is None:
        return _by_slot(slots, *local(inputs, operands, state))
    lanes = jax.tree.map(lambda _: P("lane"), state)._replace(seen=P())
    weights = tuple(P("lane") if split else P() for split in session.of_lanes)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), weights, lanes), out_specs=(P(), lanes), check_vma=False)
    return _by_slot(slots, *mapped(inputs, operands, state))


def _by_slot(slots: int, outputs: Outputs, state: State) -> tuple[Outputs, State]:
    """The results of a call, with a leading slot axis if there are several slots."""
    if slots == 1:
        return outputs, state
    rows = jax.tree.map(lambda x: x.reshape(slots, x.shape[0] // slots, *x.shape[1:]), outputs)
    return rows, state._replace(seen=state.seen.reshape(slots, -1))


def _ordinals(mesh: Mesh) -> list[int]:
    """Ordinals of this process's devices, in the order of the lanes. A handler identifies its device by this number.
    Raises ValueError if the mesh has an axis other than `lane` with more than one device.
    """
    if mesh.size != mesh.shape["lane"]:
        raise ValueError(f"decoding uses only the lane axis of the mesh {dict(mesh.shape)}: make it with data = 1")
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return [device.id if device.platform == "cpu" else device.local_hardware_id for device in own]


def _places(mesh: Mesh) -> np.ndarray:
    """For each ordinal, the position of its device among this process's devices on the lane axis, or -1 for a device
    outside the mesh; int32 [ordinals].
    """
    ordinals = _ordinals(mesh)
    if len(ordinals) == 1 < mesh.size:  # the same for every ordinal, because all processes must compile one program
        return np.zeros(1, np.int32)
    places = np.full(max(ordinals) + 1, -1, np.int32)
    places[ordinals] = np.arange(len(ordinals), dtype=np.int32)
    return places


def _everywhere() -> np.ndarray:
    """Position 0 for the ordinal of every local device: the call runs on one device, and it may be any."""
    return np.zeros(max(device.local_hardware_id for device in jax.local_devices()) + 1, np.int32)

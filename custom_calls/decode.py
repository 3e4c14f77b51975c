"""The JAX function of the decode kernel: one custom call runs a prompt and generates a whole answer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from laneformer.custom_calls.plan import Plan
from laneformer.custom_calls.session import DecodeSession
from laneformer.ops import Kept

ENDS = ("length", "stop", "cancelled")
YIELDED = len(ENDS) + 1  # in place of an index into ENDS: the request continues in another call


class State(NamedTuple):
    """The arrays that a call updates in place: donate them. If a call has several slots, they are a leading axis of
    `seen` and the second axis of the other arrays.
    """

    seen: jax.Array | np.ndarray
    """uint8 [vocab]: 1 for tokens of the text so far, including the prompt; the call adds the tokens that it draws."""
    layers: list[dict[str, jax.Array]]
    """The arrays of `Plan.kept` of each layer, by name: [lanes, slots, entries, *shape of an entry]."""

    def arrays(self, plan: Plan) -> list[jax.Array | np.ndarray]:
        """All arrays in the order of a call's operands. Raises ValueError if they are not those that the plan's layers
        keep.
        """
        if len(self.layers) != len(plan.kept):
            raise ValueError(f"the state must have the arrays of {len(plan.kept)} layers, got {len(self.layers)}")
        for number, (layer, kept) in enumerate(zip(self.layers, plan.kept, strict=True)):
            if layer.keys() != kept.keys():
                raise ValueError(f"layer {number} must have the arrays {', '.join(kept)}, got {', '.join(layer)}")
        return [self.seen, *(layer[name] for layer, kept in zip(self.layers, plan.kept, strict=True) for name in kept)]

    @classmethod
    def of_arrays(cls, plan: Plan, arrays: Sequence[jax.Array]) -> "State":
        """The inverse of `arrays`."""
        seen, *layers = arrays
        rest = iter(layers)
        return cls(seen, [{name: next(rest) for name in kept} for kept in plan.kept])


def empty_layers(
    plan: Plan, capacity: int, mesh: Mesh | None = None, slots: int = 1, lanes: int | None = None
) -> list[dict[str, jax.Array]]:
    """The arrays of each layer, by name, before the first token, with room for `capacity` positions. lanes: lanes of
    the call, by default all of the plan.
    """
    device = None if mesh is None else NamedSharding(mesh, P("lane"))

    def make(kept: Kept) -> jax.Array:
        shape = (lanes or plan.ops.lanes, slots, kept.entries(capacity), *kept.shape)
        return jnp.zeros(shape, plan.kept_dtype(kept), device=device)

    return [{name: make(kept) for name, kept in layer.items()} for layer in plan.kept]


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
    inputs: Any,
    state: State,
    operands: tuple[jax.Array, ...] = (),
    *,
    room: int,
    top: int = 0,
    logits: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Outputs, State]:
    """Runs the prompt of a request through the model and draws up to `limit` tokens, in one call. Returns the drawn
    tokens and the updated state.

    inputs: the request as the arrays of `session.inputs`. operands: `session.operands`, passed as arguments of the
    jitted function, because a weight that the function closes over would become a constant of the program. room: most
    tokens that fit in the result. mesh: axes (data, lane); the caches are sharded over its lane axis.

    The caches are updated in place: call this under jax.jit with `state` donated. Otherwise XLA copies it in every
    call. Raises ValueError outside of jax.jit, or if the state has other arrays than the model's layers keep. A call
    that fails raises jax.errors.JaxRuntimeError with the reason; it also fails if a device is missing after the
    session's timeout. A failure that only a GPU can detect sets status[1] to len(ENDS), and `session.failure` gives the
    reason.

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
    outputs = [  # in the order of Outputs
        jax.ShapeDtypeStruct((slots * room,), jnp.int32),
        jax.ShapeDtypeStruct((slots * room,), jnp.float32),
        jax.ShapeDtypeStruct((slots * room, top), jnp.int32),
        jax.ShapeDtypeStruct((slots * room, top), jnp.float32),
        jax.ShapeDtypeStruct((slots * room if logits else 0, vocab), jnp.float32),
        jax.ShapeDtypeStruct((slots * 3,), jnp.int32),
    ]
    devices, places = (1, _everywhere()) if mesh is None else (len(_ordinals(mesh)), _places(mesh))

    if len(operands) != len(session.operands):
        raise ValueError(f"got {len(operands)} operands, expected {len(session.operands)}: pass session.operands")

    def local(inputs: Any, operands: tuple, state: State) -> tuple[Outputs, State]:
        changed = state.arrays(session.plan)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in changed]
        asked = jax.tree.leaves(inputs)
        first = len(asked) + len(operands)
        results = jax.ffi.ffi_call(
            session.target,
            [*outputs, *shapes],
            has_side_effect=True,
            input_output_aliases={first + i: len(outputs) + i for i in range(len(changed))},
        )(
            *asked,
            *operands,
            *changed,
            session=np.int64(session.id),
            devices=np.int64(devices),
            position_of_device=places,
        )
        return Outputs(*results[: len(outputs)]), State.of_arrays(session.plan, results[len(outputs) :])

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

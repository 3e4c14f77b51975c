"""The JAX function of the decode kernel: one custom call takes a prompt and generates a whole answer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from custom_calls.plan import Kept, Plan
from custom_calls.session import DecodeSession

ENDS = ("length", "stop", "cancelled")
YIELDED = len(ENDS) + 1  # in place of an index into ENDS: the request goes on in another call


class Inputs(NamedTuple):
    """What a call is to do. Everything may be traced; sizes are those of the arrays. Where a call has several slots
    (`DecodeSession.together`), each array begins with an axis of them.
    """

    prompt: jax.Array
    """int32 [p]: token ids; only the first control[0] are used."""
    control: jax.Array
    """int32 [5]: tokens of the prompt, position of the first of them, tokens to draw at most, top_k, and the session's
    slot that runs the call. Where it has several slots, tokens that the request has drawn in calls before, in place of
    the slot's number; 0 tokens for a slot without a request.
    """
    settings: jax.Array
    """float32 [4]: temperature, top_p, min_p, repetition penalty (infer/sampling.py says what they do)."""
    key: jax.Array
    """uint32 [2]: low and high word of the seed."""
    stops: jax.Array
    """int32 [s]: tokens after which nothing is drawn; -1 is none."""


class State(NamedTuple):
    """What a call changes in place: donate it. Beside `seen`, the arrays of Plan.kept by their names there, of those
    layers that have one, in order. Where a call has several slots, they are the second axis, and the first of `seen`.
    """

    seen: jax.Array
    """uint8 [vocab]: 1 for tokens of the text so far, those of the prompt included; drawn ones are added."""
    keys: list[jax.Array]
    """[lanes, 1, positions, kv heads, head size]."""
    values: list[jax.Array]
    latents: list[jax.Array] | tuple[()] = ()
    """[lanes, 1, positions, channels]."""
    base: list[jax.Array] | tuple[()] = ()
    """int32 [lanes, 1, 1, key heads], or 1 of compressed attention. This and the following are of DeltaNet: kept_of in
    custom_calls/plan.py.
    """
    entries: list[jax.Array] | tuple[()] = ()
    """float32 [lanes, 1, 1, key heads, floats]."""
    inputs: list[jax.Array] | tuple[()] = ()
    """[lanes, 1, 1, key heads, positions, channels]."""
    state: list[jax.Array] | tuple[()] = ()
    """float32 [lanes, 1, 1, key heads, tiles, key_dim, 16]."""
    positions: list[jax.Array] | tuple[()] = ()
    """[lanes, 1, positions, head_dim]. This and the following are of compressed attention, likewise."""
    compressed: list[jax.Array] | tuple[()] = ()
    """[lanes, 1, entries, head_dim]."""
    compressed_tail: list[jax.Array] | tuple[()] = ()
    """float32 [lanes, 1, 1, newest positions, vectors and gates]."""
    index_keys: list[jax.Array] | tuple[()] = ()
    """[lanes, 1, entries, channels]."""
    index_keys_tail: list[jax.Array] | tuple[()] = ()
    """float32 [lanes, 1, 1, newest positions, vectors and gates]."""

    @classmethod
    def of(cls, seen: jax.Array, layers: list[dict[str, jax.Array]]) -> "State":
        """From what the layers keep."""
        return cls(seen, *([layer[name] for layer in layers if name in layer] for name in cls._fields[1:]))

    def layers_like(self, layers: list[dict[str, jax.Array]]) -> list[dict[str, jax.Array]]:
        """The inverse of `of`: what layers with these arrays keep now."""
        arrays = {name: iter(getattr(self, name)) for name in self._fields[1:]}
        return [{name: next(arrays[name]) for name in layer} for layer in layers]


def empty_layers(plan: Plan, capacity: int, mesh: Mesh | None = None, slots: int = 1) -> list[dict[str, jax.Array]]:
    """What each layer keeps of an empty text, for `capacity` positions."""
    device = None if mesh is None else NamedSharding(mesh, P("lane"))

    def make(kept: Kept) -> jax.Array:
        shape = (plan.ops.lanes, slots, kept.entries(capacity), *kept.shape)
        return jnp.zeros(shape, kept.dtype, device=device)

    return [{kept.name: make(kept) for kept in layer} for layer in plan.kept]


class Outputs(NamedTuple):
    """What a call has drawn; rows after the last token are 0, those of the last three not defined. Where it has several
    slots, each array begins with an axis of them.
    """

    tokens: jax.Array
    """int32 [room]; a stop token is the last one."""
    logprobs: jax.Array
    """float32 [room]: log softmax of the raw logits at each token."""
    top_tokens: jax.Array
    """int32 [room, top]: the most likely tokens, most likely first."""
    top_logprobs: jax.Array
    """float32 [room, top]."""
    logits: jax.Array
    """float32 [room, vocab], or [0, vocab] unless asked for."""
    status: jax.Array
    """int32 [3]: tokens drawn, index into ENDS or YIELDED, position of the next token."""


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
    """Runs the prompt through the model and draws up to control[2] tokens, in one call, and the text so far in `state`
    with them.

    operands: `session.operands`, as arguments of the function under jax.jit: a weight that it only closes over would
    become a constant of the program. room: tokens that fit the result. mesh: (data, lane), over whose lane axis the
    caches lie. The caches are updated in place: call this under jax.jit, with `state` donated (where it is not, XLA
    copies it for every call). Raises ValueError outside of jax.jit. A call that fails raises a
    jax.errors.JaxRuntimeError which says why, also when a device is missing after the session's timeout. A failure that
    only a GPU can notice has status[1] = len(ENDS), and `session.failure` says why.

    A call of several slots ends for all once one of them has ended; the others have yielded then. A request goes on
    with a prompt of what is not in its cache yet: what is left of its own, or the last token that it has drawn.
    """
    if not all(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        raise ValueError(
            "custom_calls.decode updates its state in place: call it under jax.jit, with the state donated"
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
        raise ValueError(f"{len(operands)} operands: pass session.operands, which are {len(session.operands)}")

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

    if slots > 1:  # the call has them one after the other
        inputs = jax.tree.map(jnp.ravel, inputs)
        state = state._replace(seen=jnp.ravel(state.seen))
    if mesh is None:
        return _by_slot(slots, *local(inputs, operands, state))
    lanes = jax.tree.map(lambda _: P("lane"), state)._replace(seen=P())
    weights = tuple(P("lane") if split else P() for split in session.of_lanes)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), weights, lanes), out_specs=(P(), lanes), check_vma=False)
    return _by_slot(slots, *mapped(inputs, operands, state))


def _by_slot(slots: int, outputs: Outputs, state: State) -> tuple[Outputs, State]:
    """With an axis of the slots in front, if there are several."""
    if slots == 1:
        return outputs, state
    rows = jax.tree.map(lambda x: x.reshape(slots, x.shape[0] // slots, *x.shape[1:]), outputs)
    return rows, state._replace(seen=state.seen.reshape(slots, -1))


def _ordinals(mesh: Mesh) -> list[int]:
    """Of this process's devices, in the order of the lanes: what a handler knows of its device."""
    if mesh.size != mesh.shape["lane"]:
        raise ValueError(f"a mesh {dict(mesh.shape)}: decoding uses the lane axis alone; make the mesh with data = 1")
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return [device.id if device.platform == "cpu" else device.local_hardware_id for device in own]


def _places(mesh: Mesh) -> np.ndarray:
    """For each ordinal its device's position among this process's on the lane axis, -1 for others."""
    ordinals = _ordinals(mesh)
    if len(ordinals) == 1 < mesh.size:  # whichever it is: all processes must compile the same program
        return np.zeros(1, np.int32)
    places = np.full(max(ordinals) + 1, -1, np.int32)
    places[ordinals] = np.arange(len(ordinals), dtype=np.int32)
    return places


def _everywhere() -> np.ndarray:
    return np.zeros(max(device.local_hardware_id for device in jax.local_devices()) + 1, np.int32)

"""Gradients: against finite differences of the float64 reference, on meshes, and with recomputed activations."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer import Laneformer, Precision, make_mesh
from laneformer.weights import parameter_table
from tests.support import reference, tiny

IDS = tiny.token_ids(40, (2, 9))
# Projects the logits to one number.
PROJECTION = np.random.default_rng(5).standard_normal((2, 9, 40)).astype(np.float32) / 27


@partial(jax.jit, static_argnames="remat")
def gradient_of(model: Laneformer, ids, *, remat="none") -> Laneformer:
    """d(projection of the logits) / d(weights)."""
    return jax.grad(lambda model: (model(ids, remat=remat) * PROJECTION).sum())(model)


def flat(gradient: Laneformer) -> dict[str, np.ndarray]:
    """The gradient as path -> array."""
    return {path: np.asarray(g) for path, g in gradient.weights().items()}


def apart(one: dict, other: dict) -> float:
    """The largest difference of two gradients, relative to the largest entry of each weight's gradient."""
    assert one.keys() == other.keys()
    return max(tiny.difference(one[path], other[path]) / max(np.abs(one[path]).max(), 1e-3) for path in one)


SMALL = {
    "num_hidden_layers": 2,
    "num_lanes": 2,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "broadcast_delay": 1,
}
CASES = {  # every layout with its own backward pass, and every option of the blocks under one of them
    "laneformer early; gated attention, sinks, window, bias of the output": {
        "attention_gate": True,
        "attention_sinks": True,
        "out_bias": True,
        "sliding_window": 4,
        "swa_layers": (0,),
    },
    "laneformer alone; lane head, softcap, exact geglu": {
        "use_early_comm": False,
        "lm_head_type": "lane",
        "final_logit_softcapping": 2.0,
        "hidden_act": "gelu",
    },
    "dtp(1); norms of lanes after, vocab_parallel, yarn": {
        "layout": "dtp(1)",
        "norm_before": False,
        "norm_after": "lane",
        "replicated_rmsn_scale": False,
        "lm_head_type": "vocab_parallel",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    },
    "desync(3); tied, squared relu": {
        "layout": "desync(3)",
        "tie_word_embeddings": True,
        "hidden_act": "relu2",
        "gated_mlp": False,
    },
    "tp; norms of sums, softcaps, factors, windows that rotate otherwise": {
        "layout": "tp",
        "norm_after": "sum",
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 2.0,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.7,
        "sliding_window": 4,
        "swa_layers": (1,),
        "rope_local_base_freq": 30.0,
    },
    "caat(0.5); aggregation before the norm, lane norms": {
        "layout": "caat(0.5)",
        "pre_norm_lane_agg": True,
        "replicated_rmsn_scale": False,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_finite_differences(case):
    """For one random direction v per weight: the gradient times v equals (f(w + t v) - f(w - t v)) / 2t in float64."""
    values = tiny.values(**(SMALL | CASES[case]))
    arrays = reference.in_float64(tiny.random_weights(values))
    name, _, argument = values.get("layout", "laneformer").rstrip(")").partition("(")
    args = {"dtp": {"delta": 1}, "desync": {"n": 3}, "caat": {"p": 0.5}}.get(name, {})
    assert not argument or [float(argument)] == [float(v) for v in args.values()]

    def loss(arrays):
        if name == "laneformer":
            logits = reference.reference_logits(values, arrays, IDS)
        else:
            logits = reference.layout_logits(name, args, values, arrays, IDS)
        return float((logits * PROJECTION).sum())

    model = tiny.random_model(values)
    gradient = flat(gradient_of(model, IDS))
    rng, step = np.random.default_rng(1), 1e-5
    for path, parameter in parameter_table(model.config).items():
        direction = rng.standard_normal(arrays[parameter.file_name].shape)
        shifted = [
            loss(arrays | {parameter.file_name: arrays[parameter.file_name] + sign * step * direction})
            for sign in (1, -1)
        ]
        slope = gradient[path]
        if values.get("lm_head_type") == "lane" and path == "lm_head":
            slope = np.concatenate(list(slope), axis=-1)  # lanes end to end, as in files
        expected = (shifted[0] - shifted[1]) / (2 * step)
        assert float((slope * direction).sum()) == pytest.approx(expected, rel=1e-3, abs=1e-3), path


EIGHT = {
    "num_hidden_layers": 2,
    "num_lanes": 8,
    "num_key_value_heads": 8,
    "num_attention_heads": 8,
    "broadcast_delay": 1,
}
ROWS = [
    pytest.param("laneformer", None, marks=pytest.mark.exhaustive),
    pytest.param("dtp(1.5)", "lane", marks=pytest.mark.slow),
    pytest.param("desync(2)", None, marks=pytest.mark.exhaustive),
    pytest.param("caat(0.5)", None, marks=pytest.mark.slow),
    pytest.param("tp", "sum", marks=pytest.mark.slow),
]


@cache
def of_one_device(layout: str, norm_after: str | None = None) -> dict[str, np.ndarray]:
    return flat(gradient_of(tiny.random_model(tiny.values(layout=layout, norm_after=norm_after, **EIGHT)), IDS))


@pytest.mark.parametrize(("layout", "norm_after"), ROWS)
def test_eight_devices_give_the_gradients_of_one(layout, norm_after):
    model = tiny.random_model(tiny.values(layout=layout, norm_after=norm_after, **EIGHT), lane_devices=8)
    assert apart(of_one_device(layout, norm_after), flat(gradient_of(model, IDS))) < 1e-4


@pytest.mark.parametrize("layout", ["laneformer", pytest.param("desync(2)", marks=pytest.mark.slow)])
def test_mesh_of_data_and_lanes_gives_the_gradients_of_one_device(layout):
    """With data = 2 and lane = 4, weights are split over both axes, and the batch over data."""
    values = tiny.values(layout=layout, **EIGHT)
    mesh = make_mesh(8, data=2, lane=4)
    model = tiny.model_of(values, tiny.random_weights(values), mesh)
    ids = jax.device_put(IDS, jax.NamedSharding(mesh, jax.P("data")))
    assert apart(of_one_device(layout), flat(gradient_of(model, ids))) < 1e-4


@pytest.mark.parametrize(
    ("layout", "remat"), [("laneformer", "dots"), pytest.param("caat(0.5)", "dots", marks=pytest.mark.slow)]
)
def test_remat_changes_no_gradient(layout, remat):
    values = tiny.values(layout=layout, **EIGHT)
    model = tiny.random_model(values)
    assert apart(of_one_device(layout), flat(gradient_of(model, IDS, remat=remat))) < 1e-5


def test_remat_on_eight_devices_repeats_no_reduction():
    """The gradients equal those of one device without remat, and are sharded like the weights."""
    model = tiny.random_model(tiny.values(**EIGHT), lane_devices=8)
    gradient = gradient_of(model, IDS, remat="block")
    assert apart(of_one_device("laneformer"), flat(gradient)) < 1e-4
    assert gradient.layers[0].attention.wq[...].sharding.is_equivalent_to(model.layers[0].attention.wq[...].sharding, 3)
    none, dots, block = (gradient_of.lower(model, IDS, remat=remat).as_text() for remat in ("none", "dots", "block"))
    assert tiny.all_reduces(none) == tiny.all_reduces(dots) == tiny.all_reduces(block)
    assert dots.count("dot_general") < block.count("dot_general"), "only block recomputes matrix products"
    assert dots.count("stablehlo.negate") > none.count("stablehlo.negate"), "dots recomputes silu"


def test_bfloat16_products_have_gradients_on_a_mesh():
    """XLA:CPU aborts the process on a bfloat16 all-reduce, so that the backward pass must sum float32 over devices."""
    values = tiny.values(**SMALL | {"num_hidden_layers": 1})
    model = tiny.random_model(values, precision=Precision(compute="bfloat16"), lane_devices=2)
    exact = flat(gradient_of(tiny.random_model(values), IDS))
    rounded = flat(gradient_of(model, IDS))
    assert rounded["tok_embeddings"].dtype == jnp.float32
    assert apart(exact, rounded) < 0.15

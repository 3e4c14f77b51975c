"""The mixture of experts: reference models, a float64 reference of the block, gradients, and wrong values."""

import shutil
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import laneformer
from laneformer import CheckpointError, ConfigError, ModelConfig, Precision
from laneformer.blocks.experts import Experts
from laneformer.blocks.rotary import rotations
from laneformer.config import ExpertsOptions, MlpOptions
from laneformer.decoder import decoder_ops
from laneformer.hf import read_hf_config
from laneformer.ops import Activation, without_kernel
from laneformer.routing import router_sums
from tests.support import tiny
from tests.support.paths import MOE


def options(**changes) -> ExpertsOptions:
    usual = {"hidden_size": 8, "num_lanes": 2, "columns": 6, "experts": 5, "used": 2, "normalized": True}
    return ExpertsOptions(**usual | {"activation": Activation.SILU} | changes)


def shared(lanes: int = 2) -> dict:
    """A shared expert with a gate."""
    size = {"hidden_size": 8, "num_lanes": lanes, "columns": 3}
    return {"shared": MlpOptions(**size, activation=Activation.SILU, gated=True), "shared_gate": True}


def block(own: ExpertsOptions, seed: int = 0) -> Experts:
    rng = np.random.default_rng(seed)
    table = Experts.table(own, "at")
    weights = {path.removeprefix("at."): rng.normal(size=weight.shape) for path, weight in table.items()}
    return Experts({name: jax.device_put(np.float32(w)) for name, w in weights.items()}, own, Precision())


choose = jax.jit(Experts.route)  # without jit, each operation would be compiled separately


def route(own: Experts, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The experts that a token with these logits uses, the best first, and their shares, in float64."""
    options = own.options
    if options.scores == "softmax":
        scores = choice = np.exp(logits) / np.exp(logits).sum()
    else:
        scores = choice = 1 / (1 + np.exp(-logits))
        if options.correction:
            choice = choice + np.float64(own.correction[...])
        groups = np.split(choice, options.groups)
        best = np.argsort([-np.sort(group)[-2:].sum() for group in groups], kind="stable")[: options.groups_used]
        choice = np.concatenate([group if n in best else group - 1e9 for n, group in enumerate(groups)])
    chosen = np.argsort(-choice, kind="stable")[: options.used]
    total = scores[chosen].sum() if options.normalized else 1.0
    return chosen, options.factor * scores[chosen] / total


def reference(own: Experts, h_lbsd: np.ndarray) -> np.ndarray:
    """The block's output in float64, token by token."""

    def bias(name: str) -> np.ndarray:
        found = getattr(own, f"{name}_bias", None)
        return np.zeros(getattr(own, name)[...].shape[:-1]) if found is None else np.float64(found[...])

    names, limit = ("router", "w1", "w3", "w2"), own.options.limit
    router, w1, w3, w2 = (np.float64(getattr(own, name)[...]) for name in names)
    br, b1, b3, b2 = map(bias, names)
    out = np.zeros_like(h_lbsd, np.float64)
    for place in np.ndindex(h_lbsd.shape[:3]):
        lane, h = place[0], np.float64(h_lbsd[place])
        for e, share in zip(*route(own, router @ h + br), strict=True):
            gate, up = w1[lane, e] @ h + b1[lane, e], w3[lane, e] @ h + b3[lane, e]
            if limit is None:
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                hidden = gate / (1 + np.exp(-own.options.alpha * gate)) * (up + 1)
            out[place] += share * (w2[lane, e] @ hidden + b2[lane, e])
        if own.options.shared:
            w1s, w3s, w2s = (np.float64(getattr(own.shared, name)[...])[lane] for name in names[1:])
            gate = w1s @ h
            beside = w2s @ (gate / (1 + np.exp(-gate)) * (w3s @ h))
            out[place] += beside / (
                1 + np.exp(-np.float64(own.shared_gate[...])[0] @ h) if own.options.shared_gate else 1
            )
    return out


GROUPED = {"experts": 12, "used": 3, "scores": "sigmoid", "correction": True}
GROUPED |= {"groups": 4, "groups_used": 2, "factor": 2.5}


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 1),
        ({"used": 5}, 4),
        ({"experts": 3, "used": 1}, 40),
        ({"columns": 1, "normalized": False}, 29),
        ({"router_bias": True, "biases": True, "limit": 1.5}, 9),
        (GROUPED, 30),
        (GROUPED | {"normalized": False, "correction": False, "used": 4}, 9),
        (shared() | {"scores": "sigmoid", "correction": True}, 3),
        (shared() | {"shared_gate": False}, 3),
    ],
    ids=str,
)
def test_block_equals_float64(changes, tokens):
    """The cases include blocks of one and of several tokens, and experts that no token or every token uses."""
    own = block(options(**changes))
    h_lbsd = np.float32(np.random.default_rng(1).normal(size=(2, 1, tokens, 8)))
    found = jax.jit(lambda block, h: block(h))(own, h_lbsd)
    np.testing.assert_allclose(found, reference(own, h_lbsd), rtol=1e-6, atol=2e-5)


def test_equal_logits_choose_the_lower_number():
    own = block(options())
    own.router[...] = jax.device_put(np.zeros((5, 8), np.float32))
    shares, routing = choose(own, np.ones((2, 1, 3, 8), np.float32))
    assert (np.asarray(routing.chosen_lbsj) == [0, 1]).all() and (np.asarray(shares) == 0.5).all()
    own = block(options(**GROUPED))
    own.router[...], own.correction[...] = (jax.device_put(np.zeros(shape, np.float32)) for shape in ((12, 8), 12))
    shares, routing = choose(own, np.ones((2, 1, 3, 8), np.float32))
    assert (np.asarray(routing.chosen_lbsj) == [0, 1, 2]).all() and np.allclose(shares, 2.5 / 3)


def test_correction_chooses_and_has_no_gradient():
    """The correction is so large that it decides alone. The shares and the router's gradient depend on the scores."""
    own, h_lbsd = block(options(**GROUPED, num_lanes=1)), np.ones((1, 1, 1, 8), np.float32)
    own.correction[...] = jax.device_put(np.arange(12, dtype=np.float32) * 100)
    shares, routing = choose(own, h_lbsd)
    assert routing.chosen_lbsj.tolist() == [[[[11, 10, 9]]]]
    scores = 1 / (1 + np.exp(-np.float64(own.router[...]).sum(-1)[[11, 10, 9]]))
    np.testing.assert_allclose(np.asarray(shares)[0, 0, 0], 2.5 * scores / scores.sum(), rtol=1e-5)
    gradients = jax.jit(jax.grad(lambda own: own.route(h_lbsd)[0][..., 0].sum()))(own)
    correction, router = np.asarray(gradients.correction[...]), np.asarray(gradients.router[...])
    assert not correction.any() and router[9:].all() and not router[:9].any()


def test_router_sums_of_sigmoids_equal_float64():
    """The shares in the load-balancing loss are the sigmoids divided by their sum."""
    own = block(options(**GROUPED))
    _, routing = choose(own, np.random.default_rng(3).normal(size=(2, 1, 5, 8)).astype(np.float32))
    sums = jax.jit(router_sums)([routing], np.ones((1, 5), np.float32))
    scores = 1 / (1 + np.exp(-np.float64(routing.logits_lbse)))
    shares = scores / scores.sum(-1, keepdims=True)
    np.testing.assert_allclose(sums.share_nle[0], shares.sum((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(sums.entropy_nl[0], -(shares * np.log(shares)).sum((1, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"router_bias": True, "biases": True, "limit": 1.5}, 9),
        (shared(1) | {"scores": "sigmoid", "correction": True, "factor": 2.5}, 9),
        ({"experts": 3, "used": 1}, 1100),  # several blocks for each expert
    ],
    ids=str,
)
def test_gradients_equal_those_of_all_experts(changes, tokens):
    """Gradients of every weight and of the input, against a program that computes all experts and masks them."""
    own = block(options(num_lanes=1, normalized=False, **changes))
    h_lbsd = jnp.float32(np.random.default_rng(2).normal(size=(1, 2, tokens, 8)))
    names = [path.removeprefix("at.") for path in Experts.table(own.options, "at")]
    weights = {name: attrgetter(name)(own)[...] for name in names}
    limit, alpha = own.options.limit, own.options.alpha

    def chosen(weights, h):
        return jnp.mean(jnp.sin(Experts(weights, own.options, Precision())(h)))

    def all_experts(weights, h):
        def times(name, formula, x):
            return jnp.einsum(formula, x, weights[name], precision="highest") + bias(name)

        def bias(name):
            found = weights.get(f"{name}_bias", 0.0)
            return found if name == "router" or isinstance(found, float) else found[:, None, None]

        logits = times("router", "lbsd,ed->lbse", h)
        shares = own.options.factor * (jax.nn.sigmoid if own.options.scores == "sigmoid" else jax.nn.softmax)(logits)
        choice = shares / own.options.factor + weights.get("correction", 0.0)
        kept = shares * (choice >= jax.lax.top_k(choice, own.options.used)[0][..., -1:])
        gate, up = (times(name, "lbsd,lefd->lbsef", h) for name in ("w1", "w3"))
        if limit is None:
            hidden = jax.nn.silu(gate) * up
        else:
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
            hidden = gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
        each = times("w2", "lbsef,ledf->lbsed", hidden)
        total = jnp.einsum("lbse,lbsed->lbsd", kept, each, precision="highest")
        if own.options.shared:
            gate, up = (jnp.einsum("lbsd,lfd->lbsf", h, weights[f"shared.{name}"]) for name in ("w1", "w3"))
            beside = jnp.einsum("lbsf,ldf->lbsd", jax.nn.silu(gate) * up, weights["shared.w2"])
            total += beside * jax.nn.sigmoid(h @ weights["shared_gate"].T)
        return jnp.mean(jnp.sin(total))

    found, wanted = (jax.jit(jax.grad(f, (0, 1)))(weights, h_lbsd) for f in (chosen, all_experts))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=3e-6)


def test_vectors_of_all_uses_are_never_in_memory_together():
    """A training step of 4,096 tokens with 8 experts each. The experts are narrow, as in lanes; a use has d values."""
    own = options(hidden_size=128, num_lanes=1, columns=4, experts=16, used=8)
    weights = {
        path.removeprefix("at."): jax.ShapeDtypeStruct(weight.shape, jnp.float32)
        for path, weight in Experts.table(own, "at").items()
    }
    h_lbsd = jax.ShapeDtypeStruct((1, 1, 4096, 128), jnp.float32)

    def loss(weights, h):
        return jnp.sum(jnp.sin(Experts(weights, own, Precision())(h)))

    memory = jax.jit(jax.grad(loss, (0, 1))).lower(weights, h_lbsd).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 6 * 4 * 4096 * 128


@pytest.mark.parametrize(
    ("case", "lanes", "devices"),
    [
        pytest.param("qwen3_moe_1", 4, 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe_2", 1, 0, marks=pytest.mark.exhaustive),
        pytest.param("mixtral", 2, 0, marks=pytest.mark.slow),
        pytest.param("qwen3_moe_mixed", 1, 0, marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss_2", 1, 0, marks=pytest.mark.exhaustive),
        pytest.param("gpt_oss_1", 8, 2, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("qwen3_moe_1", 1, 0), ("qwen3_moe_2", 2, 2))),
        pytest.param("mixtral", 4, 4, marks=pytest.mark.exhaustive),
        *(pytest.param("gpt_oss_1", *cut, marks=pytest.mark.exhaustive) for cut in ((1, 0), (2, 2), (4, 0))),
        pytest.param("gpt_oss_2", 4, 4, marks=pytest.mark.exhaustive),
        *(pytest.param("gpt_oss_2", *cut, marks=pytest.mark.exhaustive) for cut in ((2, 0), (8, 8))),
    ],
)
def test_models_equal_the_reference(case, lanes, devices):
    """Logits, and greedy tokens with a cache. FP8 and MXFP4 stay packed. Eight lanes share two key/value heads."""
    mesh = laneformer.make_mesh(lanes, lane=devices) if devices else None
    model = laneformer.load(MOE / case, dtype="float32", num_lanes=lanes, mesh=mesh)
    io = np.load(MOE / case / "io.npz")
    assert tiny.difference(model(io["input_ids"]), io["logits"]) < 1e-4
    greedy = tiny.continue_greedily(model, io["greedy_prompt"], len(io["greedy_ids"]))
    assert greedy == io["greedy_ids"].tolist()


@pytest.mark.parametrize(("case", "pieces"), [("qwen3_moe_mixed", None), ("gpt_oss_2", (1,) * 48)])
def test_logits_equal_the_reference(case, pieces):
    """A whole text, and one token after another with a cache, across the window of GPT-OSS. The test before this one
    also reads several tokens with a cache.
    """
    model, io = laneformer.load(MOE / case, dtype="float32"), np.load(MOE / case / "io.npz")
    found = tiny.in_pieces(model, io["input_ids"], pieces) if pieces else model(io["input_ids"])
    assert tiny.difference(found, io["logits"]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *("gpt_oss_2", "qwen3_next_1"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss_1", "qwen3_moe_1", "qwen3_next_2")),
    ],
)
def test_routes_equal_the_reference(case):
    """The chosen experts and their shares in every layer."""
    io, model = np.load(MOE / case / "io.npz"), laneformer.load(MOE / case, dtype="float32")

    @jax.jit
    def routes(model, ids_bs):
        x_lbsd, found = model.tok_embeddings[...][ids_bs][None], []
        rotary = rotations(model.config, jnp.arange(ids_bs.shape[1]))
        for layer in model.layers:
            x_lbsd = x_lbsd + layer.attend(x_lbsd, rotary, None, None)[0]
            shares, routing = layer.feed_forward.route(layer.ffn_norm(x_lbsd))
            found.append((shares, routing.chosen_lbsj))
            x_lbsd = x_lbsd + layer.feed(x_lbsd)[0]
        return found

    for layer, found in enumerate(routes(model, io["input_ids"][:1])):
        (chosen, shares), (experts, weights) = (
            (np.take_along_axis(x, order, -1), np.take_along_axis(y, order, -1))
            for x, y in (
                (np.asarray(found[1])[0, 0], np.asarray(found[0])[0, 0]),
                (io["router_indices_row0"][layer], io["router_weights_row0"][layer]),
            )
            for order in [np.argsort(x, -1)]
        )
        np.testing.assert_array_equal(chosen, experts)
        np.testing.assert_allclose(shares, weights, atol=2e-5)


def test_records_stay_packed():
    model = laneformer.load(MOE / "qwen3_moe_2", dtype="float32")
    record = model.weights()["layers.0.feed_forward.w1"]
    assert (record.kind, record.codes.shape) == ("fp8", (1, 8, 128, 256))


def test_saved_model_is_read_again_unchanged(tmp_path):
    model = laneformer.load(MOE / "mixtral", num_lanes=2)
    laneformer.save_hf(model, tmp_path / "own")
    again = laneformer.load(tmp_path / "own")
    assert again.config == model.config
    for path, weight in model.weights().items():
        np.testing.assert_array_equal(weight, again.weights()[path])


def damaged(folder, change):
    shutil.copytree(MOE / "qwen3_moe_1", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "model.layers.1.mlp.experts.3.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, name: tensors.pop(name), "lacks tensor(s) model.layers.1.mlp.experts.3.up_proj.weight:"),
        (
            lambda tensors, name: tensors.update({name: tensors[name][:40]}),
            r"experts.3.up_proj.weight is BF16 [40, 64], but",
        ),
    ],
)
def test_damaged_experts_are_named(tmp_path, change, words):
    with pytest.raises(CheckpointError) as caught:
        laneformer.load(damaged(tmp_path / "model", change))
    assert words in str(caught.value)


def test_kernels_refuse_another_factor_of_the_clamped_swiglu():
    with pytest.raises(ConfigError, match=r"swiglu_alpha = 1\.5.*use backend xla"):
        decoder_ops(read_hf_config(MOE / "gpt_oss_2").replace(swiglu_alpha=1.5))


def test_kernels_run_a_shared_expert():
    ops = decoder_ops(read_hf_config(MOE / "qwen3_moe_1").replace(shared_expert_intermediate_size=8))
    assert without_kernel(ops) is None


def test_wrong_values_are_refused():
    usual = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    usual |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    sigmoid = {"num_experts": 4, "scoring_func": "sigmoid"}
    for changes, words in (
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok = 5"),
        ({"num_experts": 0}, "num_experts = 0"),
        ({"moe_intermediate_size": 4}, "requires num_experts"),
        ({"num_experts": 4, "mlp_only_layers": (2,)}, "mlp_only_layers"),
        ({"num_experts": 4, "moe_intermediate_size": 3, "num_lanes": 2}, "moe_intermediate_size = 3"),
        ({"num_experts": 4, "gated_mlp": False}, "gated_mlp"),
        ({"expert_bias": True}, "expert_bias = True requires num_experts"),
        ({"num_experts": 4, "swiglu_limit": -1.0}, "swiglu_limit = -1.0"),
        ({"num_experts": 4, "swiglu_limit": 7.0, "hidden_act": "gelu"}, "swiglu_limit requires"),
        ({"shared_expert_intermediate_size": 4}, "shared_expert_intermediate_size = 4 requires num_experts"),
        (
            {"num_experts": 4, "shared_expert_intermediate_size": 3, "num_lanes": 2},
            "shared_expert_intermediate_size = 3",
        ),
        ({"num_experts": 4, "shared_expert_gate": True}, "shared_expert_gate = true requires"),
        ({"num_experts": 4, "scoring_func": "relu"}, "scoring_func 'relu'; choose softmax, sigmoid, sqrtsoftplus"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' requires num_experts"),
        ({"num_experts": 4, "n_group": 2}, "n_group = 2 requires another scoring_func than 'softmax'"),
        (sigmoid | {"n_group": 3}, "n_group = 3 must divide num_experts = 4"),
        (sigmoid | {"n_group": 4}, "groups of at least 2"),
        (sigmoid | {"n_group": 2, "topk_group": 3}, "topk_group = 3"),
        (sigmoid | {"n_group": 2, "num_experts_per_tok": 3}, "num_experts_per_tok = 3 exceeds the 2 .* topk_group = 1"),
        (sigmoid | {"routed_scaling_factor": 0.0}, "routed_scaling_factor = 0.0"),
        (sigmoid | {"router_bias": True}, "did you mean router_correction"),
    ):
        with pytest.raises(ConfigError, match=words):
            ModelConfig(**usual | changes)

"""Training with compressed attention and several residual streams: gradients against finite differences in float64,
steps on meshes, and a run that resumes bitwise.
"""

import dataclasses
import json
from functools import cache

import jax
import numpy as np
import pytest

from laneformer import ConfigError, Laneformer, load, make_mesh
from laneformer.config import CompressedAttention, ResidualStreams
from laneformer.hf import config_from_hf
from laneformer.hf.families.deepseek_v4 import sources
from laneformer.train.config import TrainConfig
from laneformer.train.step import Trainer
from laneformer.weights import parameter_table
from tests.support.hf import deepseek_v4
from tests.support.paths import MOE
from tests.support.tiny_recipe import changed, losses, tiny

MODEL = {
    "num_key_value_heads": 1,
    "head_dim": 8,
    "layout": "tp",
    "compressed_attention": CompressedAttention(
        ratios=(4, 8), window=6, q_lora_rank=12, qk_rope_head_dim=4, o_groups=8, o_lora_rank=4, index_heads=2,
        index_head_dim=8, index_topk=4,
    ),
    "residual_streams": ResidualStreams(count=2, iterations=2),
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "scoring_func": "sqrtsoftplus"},
    **{"swiglu_limit": 10.0, "swiglu_alpha": 1.0, "swiglu_plus_one": False, "shared_expert_intermediate_size": 16},
}  # fmt: skip


def recipe() -> TrainConfig:
    return changed(tiny(), **{f"model__{name}": value for name, value in MODEL.items()})


# ---- gradients

HF = json.loads((MOE / "deepseek_v4_1/config.json").read_text()) | {
    **{"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 4, "head_dim": 8, "qk_rope_head_dim": 4},
    **{"num_hidden_layers": 3, "compress_ratios": [4, 128, 0], "num_hash_layers": 0, "sliding_window": 5},
    **{"q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 6, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 5},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "hc_mult": 3},
    **{"hc_sinkhorn_iters": 5, "eos_token_id": 1},
}
RATIOS = (4, 8, 0)  # a ratio of 128 would need 128 positions
TOKENS = 20
STEP = 1e-5
# The indexer only chooses entries. A choice has no gradient.
UNTRAINED = ("index_compressor", "indexer")


class Case:
    """A model of two lanes with random weights, the tensors of its files in float64, and the gradients of its loss."""

    def __init__(self):
        config = config_from_hf(HF, 2)
        config = config.replace(compressed_attention=dataclasses.replace(config.compressed_attention, ratios=RATIOS))
        self.random = np.random.default_rng(8)
        self.sources, self.files = sources(config, parameter_table(config)), {}
        for source in self.sources.values():
            shape = source.shape[1:] if source.experts else source.shape
            for name in source.names:
                self.files[name] = self.random.normal(size=shape) * (1.0 if len(shape) == 1 else shape[-1] ** -0.5)
        weights = {path: self.of(path, self.files).astype(np.float32) for path in self.sources}
        self.ids = ids = self.random.integers(0, HF["vocab_size"], TOKENS + 1)

        def loss(weights):
            return Laneformer(config, weights).loss(ids[None, :-1], ids[None, 1:])[0]

        value, found = jax.jit(jax.value_and_grad(loss))(weights)
        np.testing.assert_allclose(value, self.loss(self.files), rtol=1e-5)
        self.gradients = {path: np.asarray(gradient, np.float64) for path, gradient in found.items()}

    def of(self, path: str, tensors: dict) -> np.ndarray:
        """The weight of the model at `path`, converted from the tensors of the files."""
        source = self.sources[path]
        found = [tensors[name] for name in source.names]
        return source.convert(np.stack(found) if source.experts else found[0])

    def loss(self, tensors: dict) -> float:
        """The loss of the reference implementation in float64, summed over tokens."""
        logits, _ = deepseek_v4.Model(HF | {"compress_ratios": RATIOS}, tensors)(self.ids[:-1])
        most = logits.max(-1)
        logs = np.log(np.exp(logits - most[:, None]).sum(-1)) + most
        return (logs - logits[np.arange(TOKENS), self.ids[1:]]).sum()

    def check(self, paths: list[str]) -> None:
        """Compares the gradient along a random direction of the weights at `paths` with a finite difference."""
        names = [name for path in paths for name in self.sources[path].names]
        direction = {name: self.random.normal(size=self.files[name].shape) for name in names}
        moved = [{name: self.files[name] + e * d for name, d in direction.items()} for e in (STEP, -STEP)]
        first, second = (self.loss(self.files | tensors) for tensors in moved)
        expected = (first - second) / (2 * STEP)
        directions = {path: self.of(path, direction) for path in paths}
        found = sum((self.gradients[path] * directions[path]).sum() for path in paths)
        size = np.sqrt(
            sum((self.gradients[path] ** 2).sum() for path in paths) * sum((d**2).sum() for d in directions.values())
        )
        assert abs(found - expected) < 1e-4 * size, paths


@pytest.fixture(scope="module")
def case():
    return Case()


def untrained(path: str) -> bool:
    return any(part in path for part in UNTRAINED) or path.endswith("feed_forward.correction")


@pytest.mark.slow
def test_gradient_matches_finite_differences(case):
    """The direction is in all trained weights at once. Only untrained weights have gradients of 0."""
    for path, gradient in case.gradients.items():
        assert gradient.any() != untrained(path), path
    case.check([path for path in case.sources if not untrained(path)])


@pytest.mark.slow
def test_gradient_of_each_weight_matches_finite_differences(case):
    for path in case.sources:
        if not untrained(path):
            case.check([path])


# ---- steps and runs


@cache
def initial_state():
    """The state before the first step, which does not depend on the mesh."""
    config = recipe()
    return jax.device_get(Trainer(config, config.phases[0], make_mesh(8, data=2, lane=4)).init())


@cache
def steps(data: int, lane: int, **changes):
    """Losses, gradient norms and router losses of three steps, [3, 3], and the weights after them."""
    config = changed(recipe(), **changes)
    trainer = Trainer(config, config.phases[0], make_mesh(8, data=data, lane=lane))
    state, found = jax.tree.map(jax.device_put, initial_state(), trainer.state_shardings), []
    ids = np.random.default_rng(0).integers(1, 64, (8, 17)).astype(np.int32)
    rows = {"ids": ids, "weights": np.ones((8, 16), np.float32)}
    for _ in range(3):
        batch = trainer.put_batch(lambda span: {key: x[span] for key, x in rows.items()}, rows)
        state, values = trainer.step(state, batch, trainer.put_asked(False))
        found.append([float(values[name]) for name in ("loss", "grad_norm", "load_balance_loss")])
    return np.array(found), jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", pytest.param("block", marks=pytest.mark.exhaustive)])
def test_meshes_and_recomputation_change_no_loss(remat):
    """A mesh of 2 x 4 gives the losses of 1 x 8, also with recomputation of blocks."""
    usual = steps(2, 4)[0]
    assert usual[-1, 0] < usual[0, 0] and (usual[:, 1] > 0).all()
    np.testing.assert_allclose(steps(1, 8, remat=remat)[0], usual, rtol=2e-4)


@pytest.mark.exhaustive  # test_experts.py and test_delta_net.py test resuming more often
def test_run_resumes_bitwise_and_loads(resumed):
    run, _ = resumed(6, "--steps", "12", "--save-every", "4", "--validate-every", "6", recipe=f"{__file__}:recipe")
    assert losses(run)[-1] < losses(run)[0]
    assert load(run).config.residual_streams == MODEL["residual_streams"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__attend_across_documents": False}, "data.attend_across_documents = False with model.compressed"),
        (
            {"data__sequence_length": 32},
            "model.compressed_attention.index_topk = 4 must be at least 8, the entries of data.sequence_length = 32",
        ),
        ({"distill__teacher": "other"}, "model.compressed_attention with distill is not supported"),
    ],
)
def test_unsupported_options_raise(changes, words):
    with pytest.raises(ConfigError) as caught:
        changed(recipe(), **changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)

"""Training with latent attention and a router with sigmoids: steps on meshes, and a run that resumes bitwise."""

from functools import cache

import jax
import numpy as np
import pytest

from laneformer import load, make_mesh
from laneformer.config import LatentAttention
from laneformer.train.config import TrainConfig
from laneformer.train.step import Trainer
from tests.support.tiny_recipe import changed, losses, tiny

MODEL = {
    "latent_attention": LatentAttention(
        q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6
    ),
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": (0,)},
    **{"scoring_func": "sigmoid", "router_correction": True, "n_group": 4, "topk_group": 2},
    **{"routed_scaling_factor": 2.5, "shared_expert_intermediate_size": 16},
}


def recipe() -> TrainConfig:
    return changed(tiny(), **{f"model__{name}": value for name, value in MODEL.items()})


@cache
def initial_state():
    """The state before the first step, which does not depend on the mesh."""
    config = recipe()
    return jax.device_get(Trainer(config, config.phases[0], make_mesh(8, data=2, lane=4)).init())


@cache
def steps(data: int, lane: int):
    """Losses, gradient norms and router losses of three steps, [3, 3], and the weights after them."""
    config = recipe()
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
def test_steps_learn_and_keep_the_correction():
    """Steps do not change the router's correction."""
    found, weights = steps(2, 4)
    assert found[-1, 0] < found[0, 0] and (found[:, 2] > 0).all()
    assert not weights["layers.1.feed_forward.correction"].any()


@pytest.mark.slow
def test_meshes_change_no_loss():
    """A mesh of 2 x 4 gives the losses of 1 x 8."""
    np.testing.assert_allclose(steps(2, 4)[0], steps(1, 8)[0], rtol=2e-4)


@pytest.mark.exhaustive  # test_experts.py and test_delta_net.py test resuming more often
def test_run_resumes_bitwise_and_loads(resumed):
    run, _ = resumed(6, "--steps", "12", "--save-every", "4", "--validate-every", "6", recipe=f"{__file__}:recipe")
    assert losses(run)[-1] < losses(run)[0]
    assert load(run).config.latent_attention == MODEL["latent_attention"]

"""Distillation: the objective against float64 numpy, the growing delay, and bitwise resuming with the same teacher."""

import hashlib
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

import laneformer
from laneformer import ConfigError, Laneformer, ModelConfig, make_mesh
from laneformer.commands.convert_dense import main as convert_dense
from laneformer.train.config import DistillConfig, recorded
from laneformer.train.distill import TEACHER, annealed
from laneformer.train.same_run import check_same_run
from laneformer.train.step import Trainer
from laneformer.weights import parameter_table
from tests.support.tiny_recipe import changed, losses, records, tiny

DENSE = tiny().model.replace(num_lanes=1, layout="tp")
STEPS = ("--steps", "6", "--optimizer.warmup-steps", "2", "--save-every", "2", "--validate-every", "100")
STEPS += ("--data.batch-size", "2")
ON = ("--model.num-lanes", "2", "--mesh.lane", "1", "--model.layout", "dtp(1)")
GROWING = ("--distill.anneal-steps", "4", "--distill.anneal-stages", "2")


def sharp(config: ModelConfig, seed: int) -> Laneformer:
    """A model with random weights and an enlarged head, so that its distributions are far from uniform."""
    random = np.random.default_rng(seed)
    weights = {
        path: np.ones(p.shape, np.float32)
        if p.initial == "ones"
        else (0.4 if path == "lm_head" else 0.02) * random.standard_normal(p.shape, np.float32)
        for path, p in parameter_table(config).items()
    }
    return Laneformer(config, jax.device_put(weights))


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return laneformer.save_hf(sharp(DENSE, 3), tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def student(tmp_path_factory, dense) -> Path:
    folder = tmp_path_factory.mktemp("student") / "lanes"
    assert convert_dense([str(dense), str(folder), "--lanes", "2", "--assignment", "random"]) == 0
    return folder


@pytest.fixture(scope="module")
def lanes(tmp_path_factory) -> Path:
    """Folder of a student with its own random weights, faster to write than a conversion of the dense model."""
    model = sharp(DENSE.replace(num_lanes=2, layout="dtp(1)"), 3)
    return laneformer.save_hf(model, tmp_path_factory.mktemp("lanes") / "model")


@cache
def trainer(**changes) -> Trainer:
    config = changed(
        tiny(), model=DENSE.replace(num_lanes=2, layout="dtp(1)"), distill=DistillConfig(teacher=Path("x"), **changes)
    )
    return Trainer(config, config.phases[0], make_mesh(2, lane=1))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def example(t: Trainer):
    """Model weights, and a batch with token weights and logits of a teacher."""
    random = np.random.default_rng(0)
    params = sharp(t.phase.model, 1).weights()
    batch = {
        "ids": random.integers(1, 64, (8, 17), np.int32),
        "weights": random.uniform(0, 2, (8, 16)).astype(np.float32),
    }
    return params, batch | {TEACHER: 3 * random.normal(size=(8, 16, 64)).astype(np.float32)}


def logits_of(t: Trainer, params, batch):
    return jax.jit(lambda params: t.model(params)(batch["ids"][:, :-1]))(params)


def test_objective_matches_float64_numpy():
    t = trainer(kl_weight=0.7, temperature=2.0)
    params, batch = example(t)
    logits = np.asarray(logits_of(t, params, batch), np.float64)
    nll = -np.take_along_axis(log_softmax(logits), batch["ids"][:, 1:, None], -1)[..., 0]
    wanted, found = log_softmax(batch[TEACHER].astype(np.float64) / 2), log_softmax(logits / 2)
    kl = (np.exp(wanted) * (wanted - found)).sum(-1)
    total, sums = jax.jit(t._sums)(params, batch)
    w = batch["weights"]
    assert float(sums["nll"]) == pytest.approx((w * nll).sum(), rel=1e-5)
    assert float(sums["kl"]) == pytest.approx((w * kl).sum(), rel=1e-5)
    assert float(total) == pytest.approx((w * (nll + 0.7 * 4 * kl)).sum(), rel=1e-5)


@pytest.mark.slow
def test_gradient_follows_the_teacher():
    """T^2 KL has the gradient T (softmax(logits / T) - softmax(teacher / T)) by logits; the head's is compared."""
    t = trainer(kl_weight=1.0, temperature=2.0)
    params, batch = example(t)
    gradient = jax.jit(jax.grad(lambda params, batch: t._sums(params, batch)[0]))
    with_teacher = np.asarray(gradient(params, batch)["lm_head"], np.float64)
    logits = logits_of(t, params, batch)
    # A teacher with the logits of the student leaves only the gradient of the cross-entropy.
    agreeing = np.asarray(gradient(params, batch | {TEACHER: logits})["lm_head"], np.float64)

    slope = 2 * (jax.nn.softmax(logits / 2) - jax.nn.softmax(batch[TEACHER] / 2)) * batch["weights"][..., None]

    @jax.jit
    @jax.grad
    def slope_of(head):
        return (slope * logits_of(t, params | {"lm_head": head}, batch)).sum()

    wanted = slope_of(params["lm_head"])
    np.testing.assert_allclose(with_teacher - agreeing, wanted, atol=1e-4 * float(np.abs(wanted).max()))


def test_delay_grows_in_stages():
    config = changed(
        tiny(), model=tiny().model.replace(layout="dtp(2)"), distill=DistillConfig(anneal_steps=8, anneal_stages=4)
    )
    layouts = [annealed(config, config.phases[0], step).model.layout for step in range(10)]
    assert layouts == ["dtp(0)"] * 2 + ["dtp(0.5)"] * 2 + ["dtp(1)"] * 2 + ["dtp(1.5)"] * 2 + ["dtp(2)"] * 2
    phase = config.phases[0]
    assert annealed(config, phase, 8) is phase


def test_runs_recorded_without_distillation_resume():
    before = {name: value for name, value in recorded(tiny()).items() if not name.startswith("distill")}
    check_same_run(before, tiny(), Path("run"))
    with pytest.raises(ConfigError, match=r"distill.kl_weight \(was 1.0, now 2.0\)"):
        check_same_run(before, changed(tiny(), distill=DistillConfig(kl_weight=2.0)), Path("run"))
    moved = changed(tiny(), distill=DistillConfig(teacher=Path("elsewhere")), initial=Path("elsewhere"))
    # A fingerprint identifies the teacher, not its folder; `student` was the name of `initial`.
    check_same_run(before | {"distill.student": "old"}, moved, Path("run"))


@pytest.mark.slow
def test_distilled_run_learns_and_resumes_bitwise(dense, student, resumed):
    options = (*STEPS, *ON, *GROWING, "--distill.teacher", str(dense), "--initial", str(student))
    before = hashlib.sha256((dense / "model.safetensors").read_bytes()).digest()
    run, out = resumed(2, *options)  # step 3, within the second stage, is the last before the interruption
    assert "6 steps done" in out
    steps = [record for record in records(run) if "loss" in record]
    assert [step["delay"] for step in steps] == [0, 0, 0.5, 0.5, 1, 1]
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-4), "without delay the lanes compute the teacher"
    assert steps[-1]["kl"] > 10 * abs(steps[0]["kl"])
    assert hashlib.sha256((dense / "model.safetensors").read_bytes()).digest() == before, "the teacher is unchanged"


@pytest.mark.slow
def test_another_teacher_raises(tmp_path, dense, command, stop_at):
    run, other = tmp_path / "run", laneformer.save_hf(sharp(DENSE, 4), tmp_path / "other")
    stop_at(1)
    assert command(run, *STEPS, *ON, "--distill.teacher", str(dense))[0] == 143
    status, _, err = command(run, *STEPS, *ON, "--distill.teacher", str(other))
    assert status == 2 and "distill.teacher" in err and err.count("\n") == 1
    (run / "distill.json").unlink()
    status, _, err = command(run, *STEPS, *ON, "--distill.teacher", str(dense))
    assert status == 2 and "distill.json is damaged or missing" in err


@pytest.mark.exhaustive
def test_losses_agree_on_every_mesh(tmp_path, dense, student, command):
    options = (
        *STEPS[:8],
        "--model.num-lanes",
        "2",
        "--model.layout",
        "dtp(1)",
        "--distill.teacher",
        str(dense),
        "--initial",
        str(student),
    )
    for mesh, more in {"one": ("--mesh.lane", "1"), "four": ("--mesh.lane", "2", "--mesh.data", "2")}.items():
        assert command(tmp_path / mesh, *options, *more)[0] == 0
    np.testing.assert_allclose(losses(tmp_path / "one"), losses(tmp_path / "four"), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--distill.teacher", "nowhere"), "nowhere is not a folder"),
        (("--initial", "nowhere"), "nowhere is not a folder"),
        (("--distill.teacher", "DENSE", "--model.vocab-size", "128"), "vocabulary of 64, but the model has 128"),
        (
            ("--distill.teacher", "DENSE", "--data.sequence-length", "48", "--model.max-position-embeddings", "64"),
            "data.sequence_length",
        ),
        (("--initial", "STUDENT", "--model.num-lanes", "4"), "num_lanes = 4"),
        (("--initial", "STUDENT", "--model.rope-theta", "5e5"), "rope_theta 10000.0 (model.rope_theta = 500000.0)"),
        (("--distill.anneal-steps", "4", "--model.layout", "ladder"), "not ladder"),
        (("--distill.anneal-steps", "7"), "distill.anneal_steps = 7 must be at most steps = 6"),
        (("--distill.temperature", "0"), "distill.temperature above 0, got 1.0 and 0.0"),
        (("--distill.anneal-stages", "0"), "distill.anneal_stages at least 1, got 0 and 0"),
    ],
)
def test_bad_options_are_one_line(tmp_path, dense, lanes, command, options, message):
    named = {"DENSE": str(dense), "STUDENT": str(lanes)}
    status, _, err = command(tmp_path / "run", *STEPS, *ON, *(named.get(option, option) for option in options))
    assert status == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()

"""Checkpoints: restored states equal the saved ones bitwise, damage is reported and skipped, and failed saves raise."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import laneformer
from laneformer import CheckpointError, make_mesh
from laneformer.errors import say_errors_once
from laneformer.train.checkpoint import Checkpoints, fingerprint, saved_steps
from laneformer.train.config import LaterPhase, OptimizerConfig
from laneformer.train.step import Trainer
from tests.support.tiny_recipe import changed, finish, losses, start, tiny


@pytest.fixture(scope="module")
def trainer():
    say_errors_once()  # otherwise pytest reports exceptions that a failing Orbax leaves unhandled
    return Trainer(tiny(), tiny().phases[0], make_mesh(8))


@pytest.fixture(scope="module")
def initial(trainer):
    """A state of step 0 with random arrays, which tests must not donate: for that, use `fresh`."""
    random = np.random.default_rng(0)

    def filled(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put((random.normal(size=x.shape) * (x.ndim > 0)).astype(x.dtype), x.sharding)

    return jax.tree.map(filled, trainer.abstract_state())


@pytest.fixture
def fresh(trainer, initial):
    return jax.tree.map(lambda x, where: jax.device_put(np.array(x), where), initial, trainer.state_shardings)


@pytest.fixture
def opened():
    """opened(run) returns the Checkpoints of the run, and closes them at the end of the test."""
    closing = []

    def open_run(run, **changes):
        closing.append(Checkpoints(changed(tiny(), run=run, **changes), "sha"))
        return closing[-1]

    yield open_run
    for checkpoints in closing:
        checkpoints.close()


def wanted(trainer):
    return lambda step: trainer.abstract_state()


def bits(state) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def test_save_keeps_its_state_while_training_continues(tmp_path, trainer, fresh, opened):
    """The next step donates the state while it is being saved, as a training step does."""
    state, saved, checkpoints = fresh, {}, opened(tmp_path / "run")
    next_state = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    for step in range(1, 7):
        before, state = state, next_state(state)
        assert before.params["norm"].is_deleted()
        if step % 2 == 0:
            saved[step] = bits(state)
            checkpoints.save(state, step)
    checkpoints.wait()
    for step in (6, 4, 2):
        restored = opened(tmp_path / "run").restore(wanted(trainer))
        assert int(restored.step) == step and bits(restored) == saved[step]
        assert [x.sharding for x in jax.tree.leaves(restored)] == [
            x.sharding for x in jax.tree.leaves(trainer.abstract_state())
        ]
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    assert opened(tmp_path / "run").restore(wanted(trainer)) is None


@pytest.mark.parametrize(("data", "lane"), [(2, 4), (1, 1)])
def test_state_is_restored_on_any_mesh(finished_copy, trainer, opened, data, lane):
    config = changed(tiny(), mesh__data=data, mesh__lane=lane)
    other = Trainer(config, config.phases[0], make_mesh(8, data=data, lane=lane))
    assert bits(opened(finished_copy).restore(wanted(other))) == bits(opened(finished_copy).restore(wanted(trainer)))


def test_newest_checkpoints_are_kept(finished):
    assert saved_steps(finished) == [40, 50, 60]


@pytest.mark.slow
def test_phase_ends_and_multiples_of_keep_every_are_kept(tmp_path, initial, opened):
    """Phases end after 2 and 5 steps, and every fourth step is kept."""
    none = OptimizerConfig(warmup_steps=0)
    later = {
        name: LaterPhase(steps=steps, data=tiny().data, optimizer=none) for name, steps in (("mid", 3), ("end", 40))
    }
    checkpoints = opened(tmp_path / "run", optimizer=none, steps=2, then=later, keep=2, keep_every=4)
    for step in (1, 2, 4, 5, 6, 7, 9):
        checkpoints.save(initial, step)
    checkpoints.wait()
    assert saved_steps(tmp_path / "run") == [2, 4, 5, 7, 9]


def test_step_has_metadata(finished):
    meta = json.loads((finished / "checkpoints" / "60" / "meta" / "metadata").read_text())
    assert meta["step"] == 60 and meta["param_dtype"] == "float32"
    assert (
        meta["phase"] == "pretrain"
        and meta["run"]["data.batch_size"] == 8
        and set(meta["fingerprint"]) == {"params", "optimizer"}
    )
    assert {"jax", "flax", "optax", "orbax", "python", "commit"} == set(meta["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", meta["saved_at"])


def test_load_and_export_return_the_trained_model(finished, tmp_path, trainer, opened):
    ids = np.arange(1, 17)[None]
    trained = laneformer.load(finished)
    state = opened(finished).restore(wanted(trainer))
    for path, weight in trained.weights().items():
        np.testing.assert_array_equal(weight, state.params[path], err_msg=path)
    assert trained.config == tiny().model
    counting = np.asarray(trained(ids)).argmax(-1)[0]
    assert (counting[4:] == ids[0, 4:] + 1).mean() > 0.5, "the model has learned to count"
    step = laneformer.load(finished / "checkpoints" / "60", mesh=make_mesh(8))
    np.testing.assert_allclose(step(ids), trained(ids), rtol=1e-4, atol=1e-4)
    before = laneformer.load(finished / "checkpoints" / "50")
    assert not np.array_equal(before(ids), trained(ids))
    laneformer.save_hf(trained, tmp_path / "hf")
    again = laneformer.load(tmp_path / "hf")
    for path, weight in trained.weights().items():
        np.testing.assert_array_equal(weight, again.weights()[path], err_msg=path)
    np.testing.assert_array_equal(again(ids), trained(ids))


def files(folder):
    return [file for file in folder.rglob("*") if file.is_file()]


def stale(step):
    """Replaces the weights with those of an earlier step, whose files are valid."""
    shutil.rmtree(step / "params")
    shutil.copytree(step.parent / str(int(step.name) - 10) / "params", step / "params")


def flip(step):
    for file in files(step / "optimizer"):
        data = bytearray(file.read_bytes())
        for place in range(len(data) // 3, len(data), 500):
            data[place] ^= 16
        file.write_bytes(data)


def zeros(step):
    for file in files(step / "optimizer"):
        file.write_bytes(bytes(file.stat().st_size))


def cut(step):
    for file in files(step / "params"):
        os.truncate(file, file.stat().st_size // 2)


def cut_meta(step):
    os.truncate(step / "meta" / "metadata", 100)


def no_meta(step):
    shutil.rmtree(step / "meta")


def no_optimizer(step):
    for file in files(step / "optimizer"):
        file.unlink()


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


DAMAGES = [stale, flip, zeros, cut, cut_meta, no_meta, no_optimizer, empty]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_moved_aside_and_the_previous_one_used(finished_copy, trainer, opened, capsys, damage):
    damage(finished_copy / "checkpoints" / "60")
    state = opened(finished_copy).restore(wanted(trainer))
    assert int(state.step) == 50
    err = capsys.readouterr().err
    assert re.fullmatch(
        rf"warning: the checkpoint of step 60 is damaged \(.+\); moved to {finished_copy}/damaged-60\n", err
    ), err
    assert saved_steps(finished_copy) == [40, 50] and (finished_copy / "damaged-60").is_dir()


@pytest.mark.slow
def test_run_after_damage_ends_bitwise_the_same(finished_copy, command, same_end):
    for names, damaged in ((["damaged-60"], (60,)), (["damaged-50", "damaged-60", "damaged-60-1"], (60, 50))):
        for step in damaged:
            zeros(finished_copy / "checkpoints" / str(step))
        status, out, err = command(finished_copy)
        assert status == 0 and err.count("warning: the checkpoint of step") == err.count("\n") == len(damaged)
        assert f" after step {min(damaged) - 10}\n" in out
        assert sorted(folder.name for folder in finished_copy.glob("damaged-*")) == names
        same_end(finished_copy)


def test_unreadable_checkpoints_are_left_alone(finished_copy, command):
    for step, damage in ((40, cut_meta), (50, cut), (60, flip)):
        damage(finished_copy / "checkpoints" / str(step))
    before = sorted(finished_copy.rglob("*"))
    for _ in range(2):
        status, _, err = command(finished_copy)
        assert status == 2 and err.startswith("error: no checkpoint in ") and err.count("\n") == 1
        assert "step 60: " in err and "step 50: " in err and "step 40: " in err and "--run" in err
        assert sorted(finished_copy.rglob("*")) == before
    assert len(losses(finished_copy)) == 60


def test_half_written_checkpoints_are_removed(finished_copy, trainer, opened):
    folder = finished_copy / "checkpoints"
    shutil.copytree(folder / "60", folder / "70.orbax-checkpoint-tmp")
    shutil.copytree(folder / "60", folder / "70.orbax-checkpoint-tmp-1234")
    checkpoints = opened(finished_copy)
    state = checkpoints.restore(wanted(trainer))
    assert int(state.step) == 60
    checkpoints.save(state, 70)
    checkpoints.wait()
    assert sorted(file.name for file in folder.iterdir()) == ["50", "60", "70"]


def test_saving_an_existing_or_older_step_raises(finished_copy, trainer, opened):
    checkpoints = opened(finished_copy)
    state = checkpoints.restore(wanted(trainer))
    for step in (60, 55):
        with pytest.raises(CheckpointError, match=f"cannot save step {step} in .*checkpoints: .*(exists|later)"):
            checkpoints.save(state, step)


def test_full_disk_fails_before_writing(finished_copy, trainer, opened, monkeypatch):
    checkpoints = opened(finished_copy)
    state = checkpoints.restore(wanted(trainer))
    monkeypatch.setattr("laneformer.train.checkpoint.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"cannot save step 70 .* 29\d,\d{3} bytes .* 1,000 left"):
        checkpoints.save(state, 70)
    assert saved_steps(finished_copy) == [40, 50, 60]


@pytest.mark.slow
def test_run_resumes_after_a_save_failed_in_the_background(tmp_path, store, command, same_end):
    """`ulimit -f` limits files to 16 KiB, as if the disk filled up while a checkpoint is written."""
    run = tmp_path / "run"
    status, _, err = finish(start(run, store, limit="-f 16"))
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert "File too large" in err
    assert saved_steps(run) == []
    status, _, err = command(run)
    assert (status, err) == (0, "")
    same_end(run)


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("check_for_errors", OSError(28, "No space left on device")),
        ("wait_until_finished", Exception("bare\nwith more")),
        ("save", ValueError(1000 * "long " + "cause [source locations=x]")),
    ],
)
def test_failed_save_reports_one_line(tmp_path, initial, opened, monkeypatch, method, error):
    checkpoints = opened(tmp_path / "run")
    calls = {
        "check_for_errors": checkpoints.check,
        "wait_until_finished": checkpoints.wait,
        "save": lambda: checkpoints.save(initial, 10),
    }
    checkpoints.check()
    checkpoints.saving = 10

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.manager, method, fail)
        with pytest.raises(CheckpointError) as raised:
            calls[method]()
    expected = r"cannot save step 10 in .*: .*(No space left on device|bare with more|cause); .*"
    assert re.fullmatch(expected, str(raised.value)) and len(str(raised.value)) < 600


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_fingerprint_changes_with_every_bit_and_exchange(data):
    random = np.random.default_rng(0)
    tree = {
        "a": random.normal(size=(4, 3, 5)).astype(np.float32),
        "b": np.arange(7, dtype=np.int32),
        "c": jnp.ones((6,), jnp.bfloat16),
    }
    before = fingerprint(tree)
    assert 0 <= before < 2**32 and before == fingerprint(tree)
    name = data.draw(st.sampled_from("abc"))
    changed_leaf = np.array(tree[name])
    raw = changed_leaf.view(f"u{changed_leaf.itemsize}").reshape(-1)
    raw[data.draw(st.integers(0, raw.size - 1))] ^= 1 << data.draw(st.integers(0, 8 * raw.itemsize - 1))
    assert fingerprint(tree | {name: changed_leaf}) != before
    swapped = tree["a"].copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert fingerprint(tree | {"a": swapped}) != before


def test_fingerprint_equals_its_formula_on_every_mesh():
    x = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    step = np.int32(5)
    expected = (
        sum(int(b) * (2 * i + 1) for i, b in enumerate(x.view(np.uint32).reshape(-1))) + 5 * (2 * 32 + 1)
    ) % 2**32
    for data, lane in ((1, 8), (2, 4), (1, 1)):
        put = jax.device_put(x, NamedSharding(make_mesh(8, data=data, lane=lane), P("lane", "data")))
        assert fingerprint({"x": put, "z": jnp.asarray(step)}) == expected

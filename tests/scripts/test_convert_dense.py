"""scripts.convert_dense: the lanes compute the dense model, with heads and neurons assigned to lanes by affinity."""

import json
from pathlib import Path

import numpy as np
import pytest

import laneformer
from laneformer.commands.convert_dense import Options, cut, lane_config, main, report
from laneformer.commands.convert_dense_affinity import Assignment, Units, assign, contiguous, late_pairs, random
from laneformer.layout import make_schedule
from tests.support.paths import TESTS

DENSE = TESTS / "dense"
FAST = ("--calibration-rows", "1")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """converted(family): the folder of a dense model cut into 4 lanes with affinity; written once per module."""
    base, done = tmp_path_factory.mktemp("converted"), {}

    def convert(family: str) -> Path:
        if family not in done:
            done[family] = base / family
            assert main([str(DENSE / family), str(done[family]), "--lanes", "4", *FAST]) == 0
        return done[family]

    return convert


# qwen3 has norms of queries and keys, qwen2 biases, llama2 a KV head per head, and arcee an MLP without a gate.
@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "llama2", "arcee"))]
)
def test_lanes_compute_the_dense_logits(converted, family):
    lanes = laneformer.load(converted(family))
    assert lanes.config.num_lanes == 4 and lanes.config.layout == "dtp(1)"
    as_tp = laneformer.Laneformer(lanes.config.replace(layout="tp"), lanes.weights())
    with np.load(DENSE / family / "io.npz") as io:
        assert np.abs(np.asarray(as_tp(io["input_ids"])) - io["logits"]).max() < 1e-4
        assert np.abs(np.asarray(lanes(io["input_ids"])) - io["logits"]).max() > 1e-2, (
            "the delayed layout computes another function"
        )


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_every_weight_is_bitwise_a_dense_one(converted, family):
    """The lanes of qwen3 are written by the command. Those of qwen2, which has biases, are random."""
    dense = laneformer.load(DENSE / family)
    if family == "qwen3":
        lanes = laneformer.load(converted(family)).weights()
        layers = json.loads((converted(family) / "lanes.json").read_text())["layers"]
    else:
        options = Options(source=DENSE / family, target=Path("lanes"), lanes=2)
        config = lane_config(dense.config, options)
        units = [config.num_key_value_heads, config.intermediate_size] * config.num_hidden_layers
        chosen = random(units, options.lanes, 1)
        lanes, layers = cut(dense, config, chosen).weights(), report(options, chosen, {}, 0.0)["layers"]
    dense = dense.weights()
    for path, found in lanes.items():
        names, wanted = path.split("."), np.asarray(dense[path])
        if names[-1].removesuffix("_bias") in ("wq", "wk", "wv", "wo", "w1", "w2", "w3"):
            members = layers[int(names[1])]["kv_heads" if names[2] == "attention" else "neurons"]
            count = sum(map(len, members))
            assert (
                sorted(unit for lane in members for unit in lane) == list(range(count))
                and len({len(lane) for lane in members}) == 1
            )
            axis = 1 if names[-1] in ("wo", "w2") else 0  # units are columns or rows of the dense matrix
            pieces = np.split(wanted[0], count, axis)
            wanted = np.stack([np.concatenate([pieces[unit] for unit in lane], axis) for lane in members])
        np.testing.assert_array_equal(found, wanted, err_msg=path)


@pytest.mark.slow
def test_laneformer_of_one_lane_is_cut(tmp_path):
    config = laneformer.ModelConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        num_lanes=1,
        layout="dtp(0)",
        lm_head_type="lane",
        replicated_rmsn_scale=False,
        attention_gate=True,
    )
    dense = laneformer.Laneformer.init(config, 1)
    laneformer.save_hf(dense, tmp_path / "dense")
    options = ["--lanes", "2", "--layout", "tp", "--assignment", "random", *FAST]
    assert main([str(tmp_path / "dense"), str(tmp_path / "lanes"), *options]) == 0
    ids = np.arange(20, dtype=np.int32)[None]
    lanes = laneformer.load(tmp_path / "lanes")
    np.testing.assert_allclose(lanes(ids), dense(ids), atol=1e-5)
    assert json.loads((tmp_path / "lanes" / "lanes.json").read_text())["read_late"] == {}, "tp delays nothing"


def test_affinity_misses_less_and_follows_the_seed(tmp_path, capsys, converted):
    again = tmp_path / "again"
    assert main([str(DENSE / "qwen3"), str(again), "--lanes", "4", *FAST]) == 0
    reported = capsys.readouterr().out
    assert "4 lanes, layout dtp(1), affinity assignment" in reported and "with layout tp" in reported
    first, second = (json.loads((path / "lanes.json").read_text()) for path in (converted("qwen3"), again))
    assert first == second
    assert (again / "model.safetensors").read_bytes() == (converted("qwen3") / "model.safetensors").read_bytes()
    scores = first["read_late"]
    assert scores["this (affinity)"] < min(scores["contiguous"], scores["mean of 5 random"])


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere", ("--lanes", "4"), "is not a folder"),
        (DENSE / "qwen3", ("--lanes", "3"), "--lanes 3 does not divide num_key_value_heads"),
        (DENSE / "qwen3", ("--lanes", "1"), "--lanes must be at least 2, got 1"),
        (DENSE / "qwen3", ("--lanes", "4", "--layout", "tp"), "layout tp"),
        (DENSE / "qwen3", ("--lanes", "4", "--layout", "dtq"), "'dtq'"),
        (DENSE / "qwen3", ("--lanes", "4", "--calibration", "nowhere"), "nowhere"),
        (DENSE / "qwen3", ("--lanes", "4", "--calibration-rows", "0"), "--calibration-rows"),
        (TESTS / "oracle" / "case_03", ("--lanes", "4"), "case_03"),
    ],
)
def test_bad_options_are_one_line(tmp_path, capsys, source, options, message):
    assert main([str(source), str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_existing_checkpoint_is_not_replaced(converted, capsys):
    target = converted("qwen3")
    for source, message in ((DENSE / "qwen3", "--overwrite"), (target, "TARGET")):
        assert main([str(source), str(target), "--lanes", "2", *(["--overwrite"] if source == target else [])]) == 2
        assert message in capsys.readouterr().err


def planted(count: int = 3, sizes=(6, 12, 6, 12), width: int = 8, seed: int = 0):
    """Returns modules whose units read and write only the channels of their group, and the group of every unit.

    Each module has `sizes[m]` units in `count` groups of equal size, in random order.
    """
    random_ = np.random.default_rng(seed)
    groups, modules = random(list(sizes), count, seed + 7), []
    for group in groups:
        own = np.eye(count)[group].repeat(width, 1)  # [units, d]
        reads, writes = (own[:, None] * random_.normal(size=(len(group), 2, count * width)) for _ in range(2))
        activations = random_.normal(size=(50, len(group), 2))
        modules.append(Units(*(x.astype(np.float32) for x in (reads, activations, writes))))
    return modules, groups


@pytest.mark.parametrize("seed", range(3))
def test_planted_groups_are_found(seed):
    modules, groups = planted(seed=seed)
    late = {(m, m + 1): 1.0 for m in range(3)}
    assert Assignment(modules, late, groups, 3).missed() == 0
    found = assign(modules, late, 3, seed)
    missed = Assignment(modules, late, found, 3).missed()
    by_chance = [Assignment(modules, late, random([6, 12, 6, 12], 3, 100 + n), 3).missed() for n in range(20)]
    assert missed == 0 < min(by_chance)
    assert all(np.bincount(lanes).tolist() == [len(lanes) // 3] * 3 for lanes in found)


def test_missed_and_value_match_the_formula():
    modules, _ = planted(2, (4, 4, 4))
    # Every unit also reads and writes the channels of the other groups.
    modules = [units._replace(reads=units.reads + 0.3, writes=units.writes - 0.2) for units in modules]
    late, lanes = {(0, 1): 1.0, (0, 2): 0.5, (1, 2): 1.0}, contiguous([4, 4, 4], 2)

    def missed(lanes) -> float:
        total = 0.0
        for (m, n), share in late.items():
            written = np.einsum("tuc,ucd->tud", modules[m].activations, modules[m].writes, dtype=np.float64)
            for unit, lane in enumerate(lanes[n]):
                others = written[:, lanes[m] != lane].sum(1)
                total += share * np.square(others @ modules[n].reads[unit].T.astype(np.float64)).sum() / len(others)
        return total

    state = Assignment(modules, late, lanes, 2)
    assert state.missed() == pytest.approx(missed(lanes), rel=1e-5)
    for m in range(3):
        without = state.value(m)
        for unit in range(4):
            moved = [lane.copy() for lane in lanes]
            moved[m][unit] = 1 - lanes[m][unit]
            gain = without[unit, moved[m][unit]] - without[unit, lanes[m][unit]]
            assert missed(lanes) - missed(moved) == pytest.approx(gain, rel=1e-4), "gain of moving one unit"


def test_late_pairs_match_the_schedule():
    config = laneformer.ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_lanes=2,
    )
    wanted = {
        "tp": {},
        "dtp(1)": {(0, 1): 1, (1, 2): 1, (2, 3): 1},
        "dtp(0.25)": {(0, 1): 0.25, (1, 2): 0.25, (2, 3): 0.25},
        "parallel": {(0, 1): 1, (2, 3): 1},
        "desync(2)": {(0, 1): 1, (2, 3): 1},
        "none": {(m, n): 1 for m in range(4) for n in range(m + 1, 4)},
    }
    for layout, late in wanted.items():
        assert late_pairs(make_schedule(config.replace(layout=layout))) == late, layout


@pytest.mark.parametrize(
    ("changes", "lanes", "words"),
    [
        ({"norm_after": "sum"}, 2, "norm_after = 'sum'"),
        ({"residual_streams": {"count": 2}}, 2, r"residual_streams = ResidualStreams\(.*layout tp instead"),
        ({"num_experts": 4}, 2, "num_experts = 4.*layout tp instead"),
        ({"attention_sinks": True}, 2, "attention_sinks = True"),
        ({"out_bias": True}, 2, "out_bias = True"),
        ({}, 4, "--lanes 4 does not divide num_key_value_heads = 2"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(changes, lanes, words):
    dense = laneformer.ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        layout="tp",
        **changes,
    )
    with pytest.raises(laneformer.ConfigError, match=words):
        lane_config(dense, Options(source=Path("dense"), target=Path("lanes"), lanes=lanes))


def test_interrupted_conversion_can_be_repeated(tmp_path, monkeypatch, capsys):
    """It is interrupted while weights are written, after minutes of assigning."""
    target = tmp_path / "lanes"

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    command = [str(DENSE / "llama3"), str(target), "--lanes", "2", *FAST]
    monkeypatch.setattr("laneformer.commands.convert_dense.Progress.SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr("laneformer.hf.folder.write_tensors", interrupt)
        assert main(command) == 130
    err = capsys.readouterr().err
    assert "measuring layer 1 of 2\n" in err and "assigning: start 2 of 2, sweep 1, module 4 of 4, " in err
    assert not (target / "config.json").exists()
    assert main(command) == 0
    assert json.loads((target / "lanes.json").read_text())["lanes"] == 2
    assert main(command) == 2 and "already holds a checkpoint" in capsys.readouterr().err

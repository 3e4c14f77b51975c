"""Recipes and the command line: every option is documented and can be set, and every error is one line."""

import subprocess
import sys

import pytest

from laneformer import ConfigError, RopeScaling, parameter_count
from laneformer.recipes import RECIPES
from laneformer.recipes.models import MODELS
from laneformer.train.__main__ import main
from laneformer.train.config import TrainConfig, recorded
from laneformer.train.recipes import find_recipe, parse
from tests.support.paths import ROOT
from tests.support.tiny_recipe import RECIPE, tiny


@pytest.mark.parametrize("name", RECIPES)
def test_our_recipes_are_complete_and_documented(name):
    config = find_recipe(name)
    assert isinstance(config, TrainConfig) and config.name == name
    assert config == parse([name]) == find_recipe(RECIPES[name])
    assert config.phases[-1].model == MODELS[name], "configs/models.py has the model of the last phase"
    assert config.data.sequence_length <= config.model.max_position_embeddings
    assert parameter_count(config.model) > 0


def test_recipes_are_found_by_module_and_file():
    assert find_recipe(RECIPE) == tiny()
    assert find_recipe("laneformer.recipes.stdlib:stdlib") == find_recipe("stdlib")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--steps", "7"], {"steps": 7}),
        (["--optimizer.learning-rate", "1e-4"], {"optimizer.learning_rate": 1e-4}),
        (["--optimizer.learning_rate=1e-4"], {"optimizer.learning_rate": 1e-4}),
        (["--model.layout", "tp", "--model.num-lanes", "4"], {"model.layout": "tp", "model.num_lanes": 4}),
        (["--mesh.lane", "2", "--mesh.host-devices", "None"], {"mesh.lane": 2, "mesh.host_devices": None}),
        (["--remat", "dots", "--compute-dtype", "bfloat16"], {"remat": "dots", "compute_dtype": "bfloat16"}),
        (["--data.path", "a b", "--run", "c"], {"data.path": ["a b"], "run": "c"}),
        (["--data.path", "a", "b", "--data.weights", "3", "1"], {"data.path": ["a", "b"], "data.weights": [3.0, 1.0]}),
        (
            ["--optimizer.kind", "muon", "--optimizer.schedule", "cosine"],
            {"optimizer.kind": "muon", "optimizer.schedule": "cosine"},
        ),
        (["--watch.prompts", "def ", "class "], {"watch.prompts": ["def ", "class "]}),
    ],
)
def test_every_field_can_be_set(options, expected):
    assert recorded(parse([RECIPE, *options])) == recorded(tiny()) | expected


def test_options_of_later_phases_have_their_names():
    options = [
        "--then.mid.steps",
        "7",
        "--then.instruct.optimizer.learning-rate",
        "1e-6",
        "--then.mid.sliding-window",
        "64",
    ]
    config = parse(["laneformer_2b", *options])
    assert [phase.name for phase in config.phases] == ["pretrain", "mid", "instruct"]
    assert config.then["mid"].steps == 7 and config.then["instruct"].optimizer.learning_rate == 1e-6
    assert [phase.model.sliding_window for phase in config.phases] == [512, 64, 64]
    assert config.phases[2].first_step == config.steps + 7


def test_rope_scaling_can_be_added_changed_and_removed():
    spelled = "yarn:factor=4,original_max_position_embeddings=16"
    config = parse([RECIPE, "--model.rope-scaling", spelled])
    assert config.model.rope_scaling == RopeScaling(type="yarn", factor=4, original_max_position_embeddings=16)
    assert (
        parse(["tiny", "--then.long.rope-scaling", "linear:factor=2.0"]).phases[1].model.rope_scaling.type == "linear"
    )
    assert parse(["tiny", "--then.long.rope-scaling", "None"]).phases[1].model.rope_scaling is None


def test_laneformer_2b_has_the_published_sizes():
    config = find_recipe("laneformer_2b")
    assert parameter_count(config.model) == 2_320_069_632
    assert [round(phase.steps * phase.tokens_per_step, -6) for phase in config.phases] == [
        4e12 - 1e6,
        2e12 - 1e6,
        210e6,
    ]


def test_long_phase_of_the_350m_reaches_131072_positions():
    first, long = find_recipe("laneformer_350m").phases
    assert (first.model.max_position_embeddings, long.model.max_position_embeddings) == (4096, 131_072)
    assert first.model.rope_scaling is None and long.model.rope_scaling.factor == 32


def fails(capsys, *arguments) -> str:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and "│" not in err, err
    return err


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--steps", "0"], ["steps must be at least 1, got 0"]),
        (["--steps", "many"], ["--steps = 'many' is not"]),
        (["--step", "3"], ["Unrecognized options: --step"]),
        (["3"], ["Unrecognized", "3"]),
        (["--steps"], ["--steps"]),
        (["--compute-dtype", "int8"], ["'int8'", "--compute-dtype", "bfloat16"]),
        (["--model.num-lanes", "3"], ["num_lanes"]),
        (["--model.layout", "nope"], ["nope"]),
        (["--optimizer.clip-norm", "-1"], ["optimizer.clip_norm must be a positive number, got -1.0"]),
        (["--mesh.lane", "x"], ["--mesh.lane"]),
        (["--remat", "perhaps"], ["--remat"]),
        (["--data.path"], ["data.path is empty"]),
        (
            ["--model.rope-scaling", "yarn"],
            ["--model.rope-scaling", "write it as yarn:factor=4,original_max_position_embeddings=4096 ("],
        ),
        (
            ["--model.rope-scaling", "llama3:factor=8"],
            ["write it as llama3:factor=8,original_max_position_embeddings=8192 ("],
        ),
        (["--model.rope-scaling", "linear:fac=8"], ["write it as linear:factor=4 ("]),
        (["--stpes", "4"], ["Unrecognized options: --stpes, 4; perhaps you meant --steps; "]),
        (["--seed", "9" * 20], ["seed must be between 0 and 4294967295, got 99999999999999999999"]),
        (["--model.rope-scaling", "nope:factor=2"], ["rope_scaling.type", "'nope'"]),
        (["--data.weights", "1", "2"], ["data.weights must have one number per folder of data.path (1), got 2"]),
        (["--watch.humaneval-every", "10"], ["watch.humaneval_every", "watch.humaneval"]),
    ],
)
def test_bad_options_are_one_line(capsys, options, parts):
    err = fails(capsys, RECIPE, *options)
    assert all(part in err for part in parts), err
    assert err.endswith(f"python -m train {RECIPE} --help lists all options\n")


def test_impossible_meshes_are_one_line(capsys, tmp_path, store):
    place = ["--run", str(tmp_path / "run"), "--data.path", str(store)]
    assert "lane = 3" in fails(capsys, RECIPE, *place, "--mesh.lane", "3")
    assert "16 devices" in fails(capsys, RECIPE, *place, "--mesh.lane", "8", "--mesh.data", "2")
    assert "4 CPU devices" in fails(capsys, RECIPE, *place, "--mesh.host-devices", "4")


def test_bad_recipes_are_one_line(capsys, tmp_path):
    assert "'nope'" in (err := fails(capsys, "nope")) and "stdlib, tiny" in err
    assert "recipe file nope.py does not exist" in fails(capsys, "nope.py:f")
    assert "has no attribute 'nope'" in fails(capsys, RECIPE.replace(":tiny", ":nope"))
    assert "No module named 'nope'" in fails(capsys, "nope:f")
    assert "missing a required argument: 'obj'" in fails(capsys, "json:dumps")
    assert "returns a str" in fails(capsys, RECIPE.replace(":tiny", ":RECIPE"))
    assert "--steps precedes the recipe" in fails(capsys, "--steps", "3")
    (tmp_path / "broken.py").write_text("def f():\n    return undefined.name\n")
    with pytest.raises(NameError):  # an error in the user's file: the traceback shows where
        main([f"{tmp_path}/broken.py:f"])
    with pytest.raises(ConfigError, match="nope"):
        find_recipe("nope")


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_missing_recipe_lists_all_recipes(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == (0 if arguments else 2)
    out = capsys.readouterr().out
    assert "usage: python -m train RECIPE" in out
    assert [line.split()[0] for line in out.split("recipes:\n")[1].splitlines()] == list(RECIPES)
    assert "The model of `stdlib` pretrained" in out, "the first line of a recipe's docstring"


def test_ctrl_c_while_libraries_are_loaded_is_one_line():
    """SIGINT is sent at the import of train.loop, the first that takes long."""
    code = (
        "import builtins, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "load = builtins.__import__\n"
        "def stop(name, *args, **options):\n"
        "    if name == 'laneformer.train.loop': signal.raise_signal(signal.SIGINT)\n"
        "    return load(name, *args, **options)\n"
        "builtins.__import__ = stop\n"
        "sys.argv = ['train', 'stdlib']\n"
        "runpy.run_module('train', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.count("\n") == 1 and done.stderr.endswith(" python -m train stdlib\n")


def test_help_shows_every_option_with_type_default_and_meaning(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main(["stdlib", "--help"])
    shown, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    config = find_recipe("stdlib")
    for option in recorded(config):
        assert f"--{option.replace('_', '-')} " in shown, option
    assert f"Optimizer steps. (default: {config.steps})" in shown
    assert "Lanes (L): equal shares of the model, on at most L devices." in shown

"""scripts.convert: the written folder loads as the same model."""

import json
import shutil
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest
from tokenizers import Tokenizer, models

import laneformer
from laneformer.checkpoint import fingerprint
from laneformer.commands.convert import main
from laneformer.hf import config_to_hf
from laneformer.infer.text.chat_template import CHATML, TURN_END, TURN_START
from laneformer.infer.text.tokenizer import Tokenizer as TextTokenizer
from laneformer.infer.text.tokenizer import with_tokens_before
from tests.support.paths import TESTS

DENSE, LANED = TESTS / "dense" / "qwen3", TESTS / "oracle" / "case_03"


def test_dense_model_becomes_lanes_with_the_same_logits(tmp_path, capsys):
    assert main([str(DENSE), str(tmp_path / "out"), "--lanes", "4"]) == 0
    assert "4 lanes, layout tp; no tokenizer.json found" in capsys.readouterr().out
    model = laneformer.load(tmp_path / "out")
    with np.load(DENSE / "io.npz") as io:
        assert np.abs(np.asarray(model(io["input_ids"])) - io["logits"]).max() < 1e-4


def test_dtype_spelling_and_tokenizer_are_written(tmp_path, capsys):
    source = tmp_path / "source"
    laneformer.save_hf(laneformer.load(LANED), source)
    (source / "tokenizer.json").write_text("{}")
    assert main([str(source), str(tmp_path / "out"), "--dtype", "bfloat16", "--spelling", "laneformer"]) == 0
    assert "bfloat16" in capsys.readouterr().out
    model = laneformer.load(tmp_path / "out")
    assert model.tok_embeddings[...].dtype == "bfloat16" and model.config == laneformer.load(LANED).config
    assert '"model_type": "laneformer"' in (tmp_path / "out" / "config.json").read_text()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_link_to_a_private_file_is_not_exported(tmp_path, capsys):
    source, secret = shutil.copytree(LANED, tmp_path / "source"), tmp_path / "secret"
    secret.write_text("{}")
    (source / "generation_config.json").symlink_to(secret)
    assert main([str(source), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "generation_config.json" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_bf12_round_trip_changes_no_byte(tmp_path, capsys):
    for source, target, *options in (
        (LANED, "plain", "--dtype", "bfloat16"),
        (LANED, "packed", "--dtype", "bfloat16", "--weights", "bf12"),
        (tmp_path / "packed", "back", "--weights", "bfloat16"),
        (LANED, "rounded", "--dtype", "bfloat16", "--weights", "bf12", "--round-exceptions"),
    ):
        assert main([str(source), str(tmp_path / target), *options]) == 0
    assert " parameters in bfloat16, " in (out := capsys.readouterr().out) and out.count("of them in 12 bits each") == 2
    assert " in 12 bits each (11 changed to the nearest value that their table holds), 8 lanes" in out
    plain, packed, back = ((tmp_path / name / "model.safetensors") for name in ("plain", "packed", "back"))
    assert back.read_bytes() == plain.read_bytes() != packed.read_bytes()


def test_begin_token_of_a_recipe_is_written_into_the_tokenizer(tmp_path):
    """The same tokens are before a text in the training run and, by the tokenizer alone, in the written folder."""
    made = Tokenizer(models.BPE({"a": 0}, []))
    made.add_special_tokens(["<s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    with_tokens_before(tmp_path / "tokenizer.json", (1, 1))
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert found.encode("aa").ids == [1, 1, 0, 0] and TextTokenizer.find(tmp_path).before == (1, 1)


def test_generation_config_has_the_end_of_a_turn(tmp_path):
    source = tmp_path / "source"
    laneformer.save_hf(laneformer.load(LANED), source)
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.add_special_tokens([TURN_START, TURN_END])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "chat_template.jinja").write_text(CHATML)
    assert main([str(source), str(tmp_path / "out")]) == 0
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [*laneformer.load(LANED).config.eos_token_id, tokenizer.token_to_id(TURN_END)]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("infer generate --checkpoint {run} --prompt-ids 1,2", marks=pytest.mark.slow),
        pytest.param("scripts.convert {run} {run}/out", marks=pytest.mark.exhaustive),
    ],
)
def test_damaged_run_is_one_line(tmp_path, command):
    """Threads of Orbax must not print tracebacks."""
    weights, config = laneformer.load(LANED).weights(), laneformer.load(LANED).config
    for number in ("5", "10"):
        step = tmp_path / "checkpoints" / number
        with ocp.StandardCheckpointer() as writer:
            writer.save(step / "params", weights)
        (step / "meta").mkdir()
        meta = {
            "config": config_to_hf(config),
            "param_dtype": "float32",
            "fingerprint": {"params": fingerprint(weights)},
        }
        (step / "meta" / "metadata").write_text(json.dumps(meta))
    shutil.rmtree(step / "params" / "d")
    words = command.format(run=tmp_path).split()
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=TESTS.parent, capture_output=True, text=True, timeout=120, check=False
    )
    errors = [line for line in done.stderr.splitlines() if not line.startswith("backend ")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert errors[0].startswith(f"error: {step} is damaged") and errors[0].endswith(
        f"use {tmp_path / 'checkpoints' / '5'} instead"
    )


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere", (), "is not a folder"),
        (LANED, ("--lanes", "4"), "8 lanes"),
        (DENSE, ("--lanes", "3"), "num_lanes"),
        (LANED, ("--weights", "bf12"), "must be bfloat16, got float32"),
        (LANED, ("--round-exceptions",), "add --weights bf12"),
        (LANED, (), "--overwrite"),
    ],
)
def test_bad_options_are_one_line(tmp_path, capsys, source, options, message):
    if not options and source == LANED:
        laneformer.save_hf(laneformer.load(LANED), tmp_path / "out")
    assert main([str(source), str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1

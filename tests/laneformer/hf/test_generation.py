"""generation_config.json of a folder."""

import json
import shutil

import pytest

from laneformer.errors import CheckpointError, ConfigError
from laneformer.hf import config_from_hf, read_hf_config
from tests.support.paths import ROOT

LLAMA = ROOT / "tests" / "dense" / "llama2"


@pytest.fixture
def folder(tmp_path):
    shutil.copyfile(LLAMA / "config.json", tmp_path / "config.json")
    return tmp_path


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eos_token_id": [5, 7]}, (5, 7)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": []}, ()),
        ({"eos_token_id": None}, (2,)),
        ({"eos_token_id": -1}, ()),
        ({"temperature": 0.6}, (2,)),
    ],
)
def test_end_tokens_are_those_of_the_generation_config(folder, values, expected):
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert read_hf_config(folder).eos_token_id == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"eos_token_id": "</s>"}', ConfigError),
        ('{"eos_token_id": [2, "a"]}', ConfigError),
        ('{"eos_token_id": [2, 1000000]}', ConfigError),
        ('{"eos_token_id": true}', ConfigError),
        ("[]", CheckpointError),
        ("{", CheckpointError),
    ],
)
def test_bad_files_are_refused_in_one_line(folder, text, error):
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(error) as raised:
        read_hf_config(folder)
    assert "generation_config.json" in str(raised.value) and "\n" not in str(raised.value)


def test_negative_tokens_mean_none():
    values = json.loads((LLAMA / "config.json").read_bytes())
    found = config_from_hf(values | {"bos_token_id": -1, "eos_token_id": -1})
    assert found.bos_token_id is None and found.eos_token_id == ()

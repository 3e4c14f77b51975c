"""Sampling settings that generation_config.json recommends."""

import json
import logging

import pytest

from laneformer.errors import CheckpointError, ConfigError
from laneformer.infer.engine.defaults import GivenSampling, named, over, recommended
from laneformer.infer.sampling import Sampling

LLAMA2 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "eos_token_id": 2}


def write(folder, values):
    (folder / "generation_config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (LLAMA2, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "top_k": 20, "min_p": 0.1, "temperature": None},
            {"temperature": 1.0, "top_k": 20, "min_p": 0.1},
        ),
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05},
            {"temperature": 0, "repetition_penalty": 1.05},
        ),
        ({"temperature": 0.3, "presence_penalty": 1.5}, {"temperature": 0.3, "presence_penalty": 1.5}),
        ({"eos_token_id": [1, 2], "transformers_version": "4.51.0"}, {}),
        (None, {}),
    ],
)
def test_recommended_settings(tmp_path, values, expected):
    if values is not None:
        write(tmp_path, values)
    assert recommended(tmp_path) == expected


def test_recipes_recommend_nothing():
    assert recommended("laneformer_2b") == {}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"temperature": -1}', ConfigError),
        ('{"temperature": "hot"}', ConfigError),
        ('{"top_p": 0, "do_sample": true}', ConfigError),
        ('{"top_k": 1.5}', ConfigError),
        ('{"do_sample": "yes"}', ConfigError),
        ('{"temperature": NaN}', ConfigError),
        ("[1]", CheckpointError),
        ("{", CheckpointError),
    ],
)
def test_bad_values_are_refused_in_one_line(tmp_path, text, error):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(error) as raised:
        recommended(tmp_path)
    assert "generation_config.json" in str(raised.value) and "\n" not in str(raised.value)


def test_unsupported_settings_are_named(tmp_path, caplog):
    write(tmp_path, LLAMA2 | {"no_repeat_ngram_size": 3, "typical_p": 1.0, "num_beams": 4, "bad_words_ids": None})
    with caplog.at_level(logging.WARNING, "laneformer"):
        recommended(tmp_path)
    assert "num_beams, no_repeat_ngram_size" in caplog.text and "typical_p" not in caplog.text


def test_given_settings_precede_recommended_ones():
    made = over(GivenSampling(temperature=0.0, seed=3), {"temperature": 0.6, "top_p": 0.9})
    assert made == Sampling(temperature=0.0, top_p=0.9, seed=3) and type(made) is Sampling
    assert over(GivenSampling(), {}) == Sampling()
    with pytest.raises(ConfigError, match="top_p = 2"):
        over(GivenSampling(top_p=2.0), {})
    assert named({"temperature": 0.6, "top_k": 20}) == "temperature 0.6, top_k 20"

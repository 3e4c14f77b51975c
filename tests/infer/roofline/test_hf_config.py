"""config.json files for `infer roofline`: the kind of model, the model's name, and damaged files."""

import json

import pytest

from laneformer.errors import ConfigError, InputError
from laneformer.infer.roofline.hf_config import read_config_file
from laneformer.infer.roofline.published import MOE
from tests.support import tiny
from tests.support.hf.configs import GPT, KIMI, MIXTRAL, QWEN, V4


@pytest.fixture
def read(tmp_path):
    def read(values, name="some-model.json"):
        (tmp_path / name).write_text(json.dumps(values))
        return read_config_file(str(tmp_path / name))

    return read


@pytest.mark.parametrize(
    ("name", "values"),
    [("qwen3-coder-next", QWEN), ("gpt-oss-120b", GPT), ("deepseek-v4-flash", V4), ("kimi-k2.6", KIMI)],
)
def test_configs_match_built_in_models(read, name, values):
    ours, row = read(values, f"{name}.json").moe(), MOE[name]
    assert ours.name == name and ours.layers == row.layers and ours.parts == row.parts
    for context in (0, 100, 5000):
        assert ours.kv_bytes(context, "bfloat16") == row.kv_bytes(context, "bfloat16")


@pytest.mark.parametrize(
    ("values", "shown"),
    [({"model_type": "jamba"}, "'jamba'"), ({}, "None"), (MIXTRAL | {"num_local_experts": None}, "num_local_experts")],
)
def test_errors_name_file_and_field(read, values, shown):
    with pytest.raises(ConfigError) as error:
        read(values).moe()
    text = str(error.value)
    assert shown in text and "some-model.json: " in text and "\n" not in text


def test_models_that_run_here_are_not_read_as_mixtures(read):
    for kind in ("laneformer_tp", "llama", "mistral", "olmo2"):
        assert not read(tiny.values(model_type=kind)).is_moe
    for values in (MIXTRAL, KIMI, {"model_type": "jamba"}, {"model_type": ["llama"]}, {}):
        assert read(values).is_moe


def test_files_and_folders_are_read(tmp_path, read):
    (tmp_path / "big").mkdir()
    found = read(MIXTRAL, "big/config.json")
    assert found.name == "big" and read_config_file(str(tmp_path / "big")) == found
    for content in ("[]", "{"):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(InputError, match=r"x\.json"):
            read_config_file(str(tmp_path / "x.json"))
    with pytest.raises(InputError, match=r"none\.json"):
        read_config_file(str(tmp_path / "none.json"))

"""Extreme values in config.json: an error in one line, or a config, at once."""

import time

import pytest
from hypothesis import HealthCheck, example, given, settings

from laneformer.errors import LaneformerError
from laneformer.hf.folder import HfFolder
from tests.support.hf.extreme_values import FOLDERS, FURTHER, VALUES, changes, config_of, fields_of, write_changed
from tests.support.paths import DENSE, MOE

SECONDS = 1  # of processor time


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("changed") / "model"


def check(folder, changed, place):
    write_changed(folder, changed, place)
    start = time.process_time()
    try:
        assert HfFolder(place).config.num_hidden_layers > 0
    except LaneformerError as error:
        assert "\n" not in str(error)
    assert time.process_time() - start < SECONDS, (folder.name, changed)


@given(case=changes())
@example(case=(MOE / "deepseek_v3_1", {("num_nextn_predict_layers",): 2**31 - 1}))
@example(case=(MOE / "deepseek_v3_1", {("rope_scaling", "mscale_all_dim"): 1e308}))
@example(case=(MOE / "kimi_2", {("model_type",): [0]}))
@example(case=(MOE / "qwen3_moe_1", {("num_experts",): 2**16, ("num_hidden_layers",): 2**12}))
@example(case=(DENSE / "qwen3", {("num_hidden_layers",): 2**12}))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_extreme_values_are_refused_or_read_at_once(place, case):
    check(*case, place)


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_extreme_value_is_refused_or_read_at_once(place, folder):
    for field in dict.fromkeys([*fields_of(config_of(folder)), *((name,) for name in FURTHER)]):
        for value in VALUES:
            check(folder, {field: value}, place)

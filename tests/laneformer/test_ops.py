"""The ops of a model name every weight of its table, with the shapes that the table has."""

import subprocess
import sys

import pytest

from custom_calls.plan import make_plan
from laneformer.decoder import decoder_ops
from laneformer.ops import Attend, OutputNorm, Product, Route, Value, Weight
from laneformer.weights import parameter_table
from tests.support import small
from tests.support.decode_cases import CONFIGS, EXPERTS, MODELS

CASES = CONFIGS | MODELS | EXPERTS


def weights_of(value):
    if isinstance(value, Weight):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from weights_of(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from weights_of(getattr(value, name))


@pytest.mark.parametrize("name", CASES)
def test_ops_name_every_weight_of_the_table(name):
    config = small.make_config(**CASES[name])
    plan = make_plan(decoder_ops(config), config.schedule)
    shapes = {weight.path: plan.shape_of(weight.path) for weight in weights_of(plan.ops)}
    assert shapes == {path: parameter.shape for path, parameter in parameter_table(config).items()}


@pytest.mark.parametrize("name", CASES)
def test_values_are_written_before_they_are_read(name):
    config = small.make_config(**CASES[name])
    for layer in decoder_ops(config).layers:
        for module in layer.modules:
            sizes = {Value.STREAM: config.hidden_size}
            for op in module.ops:
                if isinstance(op, Product):
                    assert all(matrix.weight.shape[1] == op.columns for matrix in op.matrices)
                    assert sizes[op.reads] == op.inputs
                    assert op.chosen is None or op.chosen.used == sizes[Value.ROUTES]
                    assert not op.gated or len({matrix.rows for matrix in op.matrices}) == 1
                    sizes[op.writes] = op.channels
                elif isinstance(op, Route):
                    sizes[Value.ROUTES] = op.used
                elif isinstance(op, OutputNorm):
                    assert op is module.ops[-1] and op.norm.gain.shape == (sizes[Value.OUTPUT],)
                else:
                    assert isinstance(op, Attend)
                    assert sizes[Value.PROJECTED] == op.projected
                    assert op.rotary is None or len(op.rotary.frequencies) == op.head_dim // 2
                    sizes[Value.ATTENDED] = op.heads * op.head_dim
                assert op.reads in sizes and op.writes in sizes
            assert sizes[Value.OUTPUT] == config.hidden_size
            assert module.sum_norm is None or module.sum_norm.gain == Weight(
                module.sum_norm.gain.path, (config.hidden_size,), lane_sharded=False
            )


def test_windows_are_those_of_each_layer():
    config = small.make_config(sliding_window=5, swa_layers=(0, 2))
    attends = [op for layer in decoder_ops(config).layers for op in layer.attention.ops if isinstance(op, Attend)]
    assert [attend.window for attend in attends] == [5, None, 5]


def test_ops_import_without_jax():
    code = "import sys, laneformer.ops; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

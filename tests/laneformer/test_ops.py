"""The ops of a model refer to every weight of its table, with the table's shapes, and fit each other."""

import subprocess
import sys

import numpy as np
import pytest

from laneformer.custom_calls.plan import make_plan
from laneformer.decoder import decoder_ops
from laneformer.ops import (
    Attend,
    CompressedAttend,
    CompressedKeep,
    DeltaNet,
    GatherStreams,
    LatentAttend,
    LatentKeep,
    OutputNorm,
    Product,
    RootRoute,
    Route,
    SharedExpert,
    SigmoidRoute,
    Value,
    Weight,
)
from laneformer.weights import parameter_table
from tests.support import small
from tests.support.decode_cases import CONFIGS, EXPERTS, MODELS, ON_CPU

CASES = CONFIGS | MODELS | EXPERTS | ON_CPU


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
    shapes = {weight.path: plan.shape_of(weight.path) for weight in weights_of(plan.ops) if not weight.cut_from}
    table = {path: parameter.shape for path, parameter in parameter_table(config).items()}
    cuts = [weight for weight in weights_of(plan.ops) if weight.cut_from]
    whole = {weight.cut_from for weight in cuts}
    assert shapes == {path: shape for path, shape in table.items() if path not in whole}
    for path in whole:  # the parts contain every value once
        parts = plan.parts(path, np.arange(np.prod(table[path])).reshape(table[path]))
        assert {own: part.shape for own, part in parts.items()} == {
            weight.path: plan.shape_of(weight.path) for weight in cuts if weight.cut_from == path
        }
        values = np.concatenate([part.reshape(-1) for part in parts.values()])
        assert np.array_equal(np.sort(values), np.arange(np.prod(table[path])))


def check_product(op: Product, sizes: dict[Value, int]) -> None:
    assert all(matrix.weight.shape[1] == op.columns for matrix in op.matrices)
    assert sizes[op.reads] == op.inputs
    assert op.chosen is None or op.chosen.used == sizes[Value.ROUTES]
    assert op.blocks is None or {matrix.weight.experts for matrix in op.matrices} == {op.blocks.count}
    assert not op.gated or len({matrix.rows for matrix in op.matrices}) == 1
    sizes[op.writes] = op.channels


@pytest.mark.parametrize("name", CASES)
def test_values_are_written_before_they_are_read(name):
    config = small.make_config(**CASES[name])
    for layer in decoder_ops(config).layers:
        for module in layer.modules:
            sizes = {Value.STREAM: config.hidden_size}
            for op in module.ops:
                if isinstance(op, Product):
                    check_product(op, sizes)
                elif isinstance(op, LatentKeep):
                    assert sizes[Value.PROJECTED] == op.rank + 2 * len(op.rotary.frequencies)
                elif isinstance(op, LatentAttend):
                    assert sizes[Value.QUERIES] == op.heads * (op.still + op.rotating)
                    assert sizes[Value.ABSORBED] == op.heads * op.rank
                    sizes[Value.ATTENDED] = op.heads * op.rank
                elif isinstance(op, GatherStreams):
                    sizes[Value.STREAMS] = op.count * config.hidden_size
                    rows = 2 * op.count + op.count**2
                    assert op is module.ops[0] and op.mix.weight.shape == (rows, sizes[Value.STREAMS])
                elif isinstance(op, CompressedKeep):
                    ends = [op.channels, *(own.first + 2 * own.width for own in (op.entries, op.keys) if own)]
                    assert ends[0] == (op.entries.first if op.entries else sizes[Value.PROJECTED])
                    assert ends[-1] <= sizes[Value.PROJECTED]
                elif isinstance(op, CompressedAttend):
                    assert sizes[Value.QUERIES] == op.heads * op.head_dim
                    if op.index:
                        assert sizes[Value.INDEX] == op.index.heads * op.index.channels
                        assert sizes[Value.PROJECTED] == op.index.first + op.index.heads
                    sizes[Value.ATTENDED] = op.heads * op.head_dim
                elif isinstance(op, Route | SigmoidRoute | RootRoute):
                    sizes[Value.ROUTES] = op.used
                elif isinstance(op, SharedExpert):
                    hidden, down = op.products
                    assert (hidden.reads, hidden.columns) == (Value.STREAM, sizes[Value.STREAM])
                    assert (down.reads, down.columns) == (hidden.writes, hidden.channels) and Value.OUTPUT in sizes
                    assert op.gate is None or op.gate.weight.shape == (1, config.hidden_size)
                elif isinstance(op, DeltaNet):
                    assert sizes[Value.PROJECTED] == op.projected
                    sizes[Value.ATTENDED] = op.value_heads * op.value_dim
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


def test_every_layer_has_its_window():
    config = small.make_config(sliding_window=5, swa_layers=(0, 2))
    attends = [op for layer in decoder_ops(config).layers for op in layer.attention.ops if isinstance(op, Attend)]
    assert [attend.window for attend in attends] == [5, None, 5]


def test_ops_import_without_jax():
    code = "import sys, laneformer.ops; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

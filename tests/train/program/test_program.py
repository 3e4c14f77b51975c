"""The summary of a compiled training step, and the files that describe it."""

import dataclasses
import gzip
import json
from functools import cache

import jax
import numpy as np
import pytest

import laneformer as lf
from laneformer.train.planning.cluster import find_kind, speeds_of
from laneformer.train.program.hlo import Module
from laneformer.train.program.program import UNSCHEDULED, describe, gigabytes, read_program, save_program
from laneformer.train.step import Trainer
from laneformer.weights import matmul_parameters
from tests.support.tiny_recipe import changed, tiny
from tests.support.training.recorded_programs import read


@cache
def compiled(data=1, lane=8, **changes):
    """The trainer, the lowered step and the compiled step."""
    mesh = lf.make_mesh(8, data=data, lane=lane)
    config = changed(tiny(), mesh__data=data, mesh__lane=lane, **changes)
    trainer = Trainer(config, config.phases[0], mesh)
    lowered = trainer.lower_step()
    return trainer, lowered, lowered.compile()


@cache
def program(*mesh, **changes):
    trainer, lowered, executable = compiled(*mesh, **changes)
    return read_program(lowered, executable, trainer.mesh)


def one_layer(layout):
    return tiny().model.replace(num_hidden_layers=1, layout=layout)


def test_exchanges_match_the_schedule():
    """Forward and backward pass each issue the reductions of the schedule. The stream is [1, 4, 16, 32] float32."""
    found = {layout: program(2, 4, model=one_layer(layout)) for layout in ("tp", "none")}
    reductions = 2 * found["tp"].issued["all_reduce"] - 2 * found["none"].issued["all_reduce"]
    assert reductions == 2 * (2 * 2), "two modules, forward and backward"
    stream = 4 * 16 * 32 * 4
    surplus = found["tp"].sent("lane") - found["none"].sent("lane")
    assert 3 * stream * 3 / 2 <= surplus <= 4 * stream * 3 / 2, (
        "in both layouts, the backward sum of the first module is also that of the embedding"
    )
    assert found["tp"].sent("data") > 0


@pytest.mark.slow
def test_accumulated_parts_are_all_counted():
    once, twice = (program(2, 4, model=one_layer("tp"), **parts) for parts in ({}, {"accumulate": 2}))
    assert twice.unknown_loops == once.unknown_loops == ()
    assert twice.matmul_flops == once.matmul_flops
    assert twice.sent("lane") == pytest.approx(once.sent("lane"), rel=0.02), "half the bytes, twice as often"


def test_products_are_at_least_those_of_the_weights():
    """Only products with weights have a known number of FLOPs, 6 per weight and token, shared by 8 devices. Attention
    computes whole tiles.
    """
    tokens = 8 * 16
    config = one_layer("tp")
    weights = 6 * matmul_parameters(config) * tokens / 8
    assert weights < program(2, 4, model=config).matmul_flops < 1.5 * weights


@pytest.mark.slow
def test_memory_includes_the_state():
    trainer, *_ = compiled(2, 4, model=one_layer("tp"))
    shapes = jax.tree.leaves(trainer.abstract_state())
    state = [jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for x in shapes]
    held = sum(shard.data.nbytes for x in state for shard in x.addressable_shards if shard.device.id == 0)
    memory = program(2, 4, model=one_layer("tp")).memory
    batch = 4 * 17 * 4
    assert held + batch <= memory.arguments <= held + batch + 64
    assert memory.outputs - memory.aliased < 1000, "the new state replaces the old one in memory"
    assert memory.total == memory.arguments + memory.outputs - memory.aliased + memory.temporary


def test_saved_program_is_read_back(tmp_path):
    trainer, lowered, executable = compiled(2, 4, model=one_layer("tp"))
    mesh = trainer.mesh
    saved = save_program(lowered, executable, tmp_path / "program", "tiny", mesh)
    module = Module(gzip.decompress((tmp_path / "program/tiny.hlo.txt.gz").read_bytes()).decode())
    assert tuple(module.collectives(mesh)) == saved.collectives
    summary = json.loads((tmp_path / "program/tiny.json").read_text())
    assert summary["memory_total"] == saved.memory.total and summary["mesh"] == {"data": 2, "lane": 4}
    assert (
        summary["matmul_flops"] == saved.matmul_flops > 0
        and summary["collectives"][0]["sent"] == saved.collectives[0].sent
    )
    text = (tmp_path / "program/tiny.md").read_text()
    assert "| all-reduce | lane | 4 |" in text and gigabytes(saved.memory.total) in text
    assert summary["overlaps"] is None and UNSCHEDULED[1:] in text, "programs of XLA:CPU have no overlaps"


def test_overlaps_are_described():
    """The text describes a recorded program that XLA:GPU ordered, with the speeds of its device."""
    steps = Module(read("dtp(4)", "dots")).steps(lf.make_mesh(8, lane=8))
    text = describe(
        dataclasses.replace(program(2, 4, model=one_layer("tp")), steps=steps),
        speeds_of(find_kind("NVIDIA H200"), {"data": 1, "lane": 8}),
    )
    assert "| lanes, forward | 4 | 4 | 0 | 0 | 0.00626 | 0 |" in text and UNSCHEDULED[1:] not in text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (5e6, "5 MB"), (2e12, "2,000 GB")]
)
def test_bytes_are_written_with_decimal_units(count, text):
    assert gigabytes(count) == text

"""The roofline's arithmetic: public figures, bytes, waits of every layout, sweeps."""

import math

import pytest

from laneformer.config import ModelConfig
from laneformer.errors import ConfigError
from laneformer.formats import FORMATS
from laneformer.infer.roofline.agent import AgentTask, agent_table
from laneformer.infer.roofline.devices import DEVICES, Node, make_node
from laneformer.infer.roofline.model import (
    Work,
    bytes_by_part,
    hidden_up_to,
    module_bytes,
    module_seconds,
    token,
    token_of_bytes,
    waits,
    weights_in_memory,
)
from laneformer.infer.roofline.references import references, share, share_of_spec
from laneformer.infer.roofline.sweeps import by_context, by_delay, by_lanes, by_layout, by_precision, layouts_of
from laneformer.layout import LAYOUTS, _schedule, make_schedule
from laneformer.weights import kv_bytes_per_token, parameter_table, weight_bytes_per_token

# The published 2B, whose sums are in docs/roofline.md.
LARGE = ModelConfig(
    vocab_size=32_000,
    hidden_size=3072,
    intermediate_size=12_288,
    num_hidden_layers=15,
    num_attention_heads=32,
    num_key_value_heads=16,
    max_position_embeddings=4096,
    num_lanes=8,
    sliding_window=512,
    sliding_window_n_layers=10,
)
SMALL = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    num_lanes=4,
    max_position_embeddings=64,
)
H200 = {"device": "h200", "devices": 8}


def bare(devices=4, *, bandwidth=1e9, exchange=0.0, sync=0.0, link=None) -> Node:
    return make_node("custom", devices, bandwidth=bandwidth, exchange=exchange, sync=sync, link=link)


def column(table, name):
    return [row[[c.name for c in table.columns].index(name)] for row in table.rows]


def test_public_figures_are_reproduced():
    h200, mi300x = (token_of_bytes(4e9, make_node(name, 8), None) for name in ("h200", "mi300x"))
    assert h200.ceiling == pytest.approx(7700, rel=0.005) and mi300x.ceiling == pytest.approx(8400, rel=0.011)
    exactly = token_of_bytes(4e9, make_node("mi300x", 8, bandwidth=4.2e12), None)
    assert exactly.ceiling == pytest.approx(8400)
    launches = token_of_bytes(4e9, make_node("mi300x", 8, launches=250, launch=4.5e-6), None).terms[-1]
    assert 1 / launches.seconds == pytest.approx(890, rel=0.002)
    assert share(2100, h200) == pytest.approx(0.273, abs=5e-4) and share(3000, exactly) == pytest.approx(
        0.357, abs=5e-4
    )
    assert share_of_spec(2100, h200) == pytest.approx(0.219, abs=5e-4) and share_of_spec(3000, mi300x) == pytest.approx(
        0.283, abs=5e-4
    )


def test_references_are_close():
    table = references()
    for figure, difference in zip(column(table, "figure"), column(table, "difference %"), strict=True):
        assert abs(difference) < 5 or "3,000 tok/s, s" in figure  # the public figure "under 20 s" is a bound
    under = next(row for row in table.rows if "3,000 tok/s, s" in row[0])
    assert under[3] == pytest.approx(50_000 / 3000) and under[3] < under[1]


@pytest.mark.parametrize(
    ("devices", "ceiling", "megabytes"), [(8, 7742, 555.4), (4, 3871, 1110.8), (2, 1935, 2221.7), (1, 968, 4443.3)]
)
def test_2b_at_4300_gb_per_s_has_the_documented_floors(devices, ceiling, megabytes):
    found = token(LARGE, make_node("h200", devices, bandwidth=4.3e12), Work())
    # The lower bounds in the kernel's design, without keys and values (0.25 MB are written) and the embedding's row.
    assert found.ceiling == pytest.approx(ceiling, abs=1) and found.bytes / devices / 1e6 == pytest.approx(
        megabytes, rel=2e-4
    )
    edges = next(term for term in found.terms if term.name == "dependent operations")
    assert edges.count == 77 and edges.seconds == pytest.approx(77 * 0.65e-6)
    assert len(found.terms) == (2 if devices == 1 else 5)


def test_norms_after_modules_add_bytes_and_edges():
    """Each layer reads two more vectors, and a whole device waits for two more square sums."""
    node, layers = make_node("h200", 8), LARGE.num_hidden_layers
    before, after = (token(LARGE.replace(norm_after=norm), node, Work()) for norm in (None, "lane"))
    assert after.bytes - before.bytes == 2 * layers * LARGE.hidden_size * 2
    edges = [
        next(term.count for term in found.terms if term.name == "dependent operations") for found in (before, after)
    ]
    assert edges[1] - edges[0] == 2 * layers
    alone = token(LARGE.replace(norm_before=False, norm_after="lane"), node, Work())
    assert alone.bytes == before.bytes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"lm_head_type": "lane"},
        {"lm_head_type": "vocab_parallel"},
        {"qkv_bias": True, "qk_norm": True},
        {"replicated_rmsn_scale": False},
        {"norm_after": "lane"},
        {"sliding_window": 8, "sliding_window_n_layers": 3},
    ],
)
def test_parts_and_modules_sum_to_all_bytes(changes):
    config = SMALL.replace(**changes)
    for work in (Work(), Work("fp8", "float32", 20)):
        kv = kv_bytes_per_token(config, work.context, FORMATS[work.kv].bytes)
        parts, modules = bytes_by_part(config, work), module_bytes(config, work)
        assert sum(parts.values()) == pytest.approx(weight_bytes_per_token(config, FORMATS[work.weights].bytes) + kv)
        final_norm = (
            config.hidden_size * (config.num_lanes if config.lane_norm_scales[1] else 1) * FORMATS[work.weights].bytes
        )
        assert sum(modules) == pytest.approx(
            sum(parts.values()) - parts["head"] - parts["row of the embedding"] - final_norm
        )
        assert list(parts.values())[-1] == kv
    # A sliding layer reads its window, a full one the context.
    if "sliding_window" in changes:
        assert modules[10] - modules[0] == pytest.approx(4 * 2 * 8 * 4 * (20 - 7))


def test_waits_match_hand_computation():
    four = [1.0] * 4

    def waited(layout, exchange, modules=four):
        return waits(
            make_schedule(SMALL.replace(num_hidden_layers=2, layout=layout)), modules, bare(exchange=exchange), 32
        )

    assert waited("tp", 2.5) == pytest.approx(4 * 2.5)
    assert waited("parallel", 2.5) == pytest.approx(2 * 2.5)
    assert waited("none", 2.5) == 0
    # dtp(2): exchanges start at 1 and 2 and land at 3 and 4 (4.5 after a wait). With 2.5 s the second arrives at 4.5.
    assert waited("dtp(2)", 2.0) == 0 and waited("dtp(2)", 2.5) == pytest.approx(0.5)
    # The second exchange waits longer if the module before its landing is shorter.
    assert waited("dtp(2)", 2.5, [1.0, 1.0, 1.0, 0.25]) == pytest.approx(0.5 + 0.75)


def test_exchange_pushes_to_every_device():
    node = bare(4, exchange=2e-6, link=1e9)
    assert node.exchange_seconds(1000) == pytest.approx(2e-6 + 3 * 4000 / 1e9) and node.exchange_seconds() == 2e-6
    assert bare(1, exchange=2e-6, link=1e9).exchange_seconds(1000) == 0
    half = waits(make_schedule(SMALL.replace(layout="caat(0.5)")), [0.0] * 12, node, 1000)
    assert half == pytest.approx(12 * (2e-6 + 3 * 2000 / 1e9))


@pytest.mark.parametrize("layout", layouts_of(SMALL))
def test_waits_of_every_layout_match_a_simulation(layout):
    schedule, modules = SMALL.replace(layout=layout).schedule, [1.0] * 12
    found = [waits(schedule, modules, bare(exchange=exchange), 32) for exchange in (0.0, 0.5, 1.0, 2.0, 8.0)]
    assert found[0] == 0 and found == sorted(found)
    moments = {min(landing.at, 11) for landing in schedule.exposed}
    assert found[1] == pytest.approx(0.5 * len(moments))  # exchanges that overlap a module are hidden
    hides = hidden_up_to(schedule, modules)
    if hides is not None:
        assert waits(schedule, modules, bare(exchange=hides), 32) == pytest.approx(hides * len(moments))


def test_new_layout_is_swept(monkeypatch):
    def lastly(n: int, lanes: int, share: float):
        if not 0 < share < 1:
            raise ConfigError("share")
        return _schedule("lastly", LAYOUTS["none"](n, lanes).own, ())

    monkeypatch.setitem(LAYOUTS, "lastly", lastly)
    assert "lastly(0.5)" in column(by_layout(SMALL, bare(exchange=1e-6), Work()), "layout")


def test_layouts_are_between_none_and_tp():
    table = by_layout(LARGE, make_node(**H200), Work(context=1000))
    rates = dict(zip(column(table, "layout"), column(table, "tok/s"), strict=True))
    assert {name.split("(")[0] for name in rates} == set(LAYOUTS)
    assert all(rates["tp"] <= rate <= rates["none"] for rate in rates.values())
    assert rates["tp"] < rates["parallel"] < rates["laneformer"] < rates["dtp(2)"] == pytest.approx(rates["none"])


def test_longer_delays_hide_more():
    table = by_delay(LARGE, make_node(**H200 | {"exchange": 20e-6}), Work())
    waited, rates, hides = (column(table, name) for name in ("wait us", "tok/s", "hides up to us"))
    assert (
        waited == sorted(waited, reverse=True) and waited[0] == pytest.approx(30 * 20.19, rel=1e-3) and waited[-1] == 0
    )
    assert rates == sorted(rates) and rates[0] < rates[2] < rates[-1] and hides[0] == "-"
    assert hides[1:] == sorted(hides[1:])


def test_longer_context_is_slower_and_fewer_bits_are_faster():
    node = make_node(**H200)
    by = by_context(LARGE, node, Work())
    assert column(by, "context") == [0, 512, 1024, 2048, 4096]
    rates = column(by, "tok/s")
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 5
    table = by_precision(LARGE, node, Work(context=100))
    rates, bits = column(table, "tok/s"), column(table, "bits")
    assert bits == sorted(bits, reverse=True) and rates == sorted(rates)
    assert column(table, "weights")[0] == "float32" and rates[0] < rates[1] < rates[-1]


def test_quantized_matrices_count_the_bytes_of_their_format():
    """Compares a model with two packed matrices in one layer to the same model in 16 bits."""
    table, packed = parameter_table(SMALL), {"layers.1.attention.wq": 1.0, "layers.3.feed_forward.w2": 4.25 / 8}
    usual, mixed = Work(context=20), Work(context=20, packed=packed)
    saved = sum(table[path].read * (2 - size) for path, size in packed.items())
    before, after = (bytes_by_part(SMALL, work) for work in (usual, mixed))
    assert (
        sum(before.values()) - sum(after.values())
        == saved
        == weights_in_memory(SMALL, usual) - weights_in_memory(SMALL, mixed)
    )
    pairs = zip(module_bytes(SMALL, usual), module_bytes(SMALL, mixed), strict=True)
    assert [n for n, (a, b) in enumerate(pairs) if a != b] == [2, 7]
    found = by_precision(SMALL, bare(), mixed)
    assert column(found, "weights")[:2] == ["as published", "float32"] and 15 < column(found, "bits")[0] < 16
    assert mixed.words == "2 matrices in 4.25, 8 bits as published, the others bfloat16"


def test_lanes_raise_the_ceiling_in_proportion():
    table = by_lanes(LARGE, make_node(**H200), Work(), H200)
    assert column(table, "lanes") == [1, 2, 4, 8]  # the heads allow 16 lanes, but a node has 8 devices
    ceilings = column(table, "ceiling tok/s")
    assert ceilings == pytest.approx([n * ceilings[0] for n in (1, 2, 4, 8)])
    rates = column(table, "tok/s")
    assert rates == sorted(rates) and rates[-1] < 8 * rates[0]


def test_sync_explains_a_measured_speed():
    found = token(LARGE, make_node(**H200), Work())
    sync = found.sync_for(3000)
    assert token(LARGE, make_node(**H200, sync=sync), Work()).rate == pytest.approx(3000)
    assert (
        found.sync_for(2 * found.ceiling) is None and token_of_bytes(1e9, make_node(**H200), None).sync_for(100) is None
    )


def test_overrides_replace_the_table():
    node = make_node("mi355x", 8, bandwidth=1e12, share=0.5, sync=1e-6, exchange=3e-6, launches=2, launch=5e-6)
    found = token_of_bytes(4e9, node, 10)
    assert found.seconds == pytest.approx(4e9 / 4e12 + (5 * 10 + 2) * 1e-6 + (2 * 10 + 1) * 3e-6 + 2 * 5e-6)
    assert found.rate == pytest.approx(1 / math.fsum(term.seconds for term in found.terms))
    modules = module_seconds(SMALL, node, Work())
    assert len(modules) == 12 and modules[0] == pytest.approx(module_bytes(SMALL, Work())[0] / 4e12 + 3e-6)


def test_devices_have_sources():
    for device in DEVICES.values():
        node = make_node(next(name for name, d in DEVICES.items() if d is device), 2)
        assert node.bandwidth == pytest.approx(0.8 * device.bandwidth) and len(node.assumptions) == 4
        assert device.source in node.assumptions[0] and "20" in device.source


def test_agent_time_is_split():
    task = AgentTask(tokens=50_000, iterations=4, tool_seconds=2.0, test_seconds=8.0)
    assert task.split(100) == (500, 8, 32) and task.even_rate == pytest.approx(1250)
    rows = agent_table(task, {"slow": (100.0, "example"), "fast": (5000.0, "projected")}).rows
    assert [row[-1] for row in rows] == ["generating", "tests"]
    assert rows[0][6] == 540 and rows[1][7] == pytest.approx(20)
    alone = AgentTask(tool_seconds=0, test_seconds=0)
    assert alone.even_rate is None and agent_table(alone, {"one": (50.0, "example")}).rows[0][7] == 100


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: make_node("h900", 8), "--device h900: .*h100, h200"),
        (lambda: make_node("h200", 9), "--devices .* 8,.*got 9"),
        (lambda: make_node("h200", 0), "--devices .*got 0"),
        (lambda: make_node("custom", 1), "--bandwidth"),
        (lambda: make_node("custom", 2, bandwidth=1e9, sync=0.0), "--exchange-us"),
        (lambda: make_node("custom", 1, bandwidth=1e9), "--sync-us"),
        (lambda: make_node("h200", 8, share=1.5), "--bandwidth-share .*got 1.5"),
        (lambda: make_node("h200", 8, bandwidth=math.nan), "--bandwidth .*got nan"),
        (lambda: make_node("h200", 8, exchange=-1e-6), "--exchange-us .*got -1"),
        (lambda: token(SMALL, make_node("h200", 3), Work()), "--devices 3: .* 1, 2, 4 devices"),
        (lambda: token(SMALL, make_node("h200", 4), Work(context=65)), "--context 65: .*64"),
        (lambda: Work("fp3"), "--precision fp3: .*bfloat16"),
        (lambda: Work(context=-1), "--context .*got -1"),
        (lambda: AgentTask(tokens=0).check(), "--tokens .*got 0"),
        (lambda: AgentTask(test_seconds=-1).check(), "--test-seconds .*got -1"),
    ],
)
def test_bad_values_are_named(act, words):
    with pytest.raises(ConfigError, match=words):
        act()

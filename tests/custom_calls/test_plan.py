"""A model's plan as words: decoded, it is the same plan; run by the interpreter, it computes the same model."""

import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from laneformer import LAYOUTS, custom_calls
from laneformer.custom_calls.library import NativeError, call
from laneformer.custom_calls.plan import ALIGNED, Dtype, Event, Table, decode_plan, make_plan
from laneformer.custom_calls.request import Request, SamplingOptions, Source
from laneformer.custom_calls.words import Reader, Writer, request_words
from laneformer.decoder import decoder_ops
from laneformer.formats import KERNEL_FORMATS
from laneformer.layout import Landing, Own, Payload, Schedule
from laneformer.ops import HeadKind, Matrix, Norm, OutputNorm, Rotary, Value, Weight
from tests.support import small
from tests.support.decode_cases import CONFIGS, EXPERTS, MODELS, ON_CPU
from tests.support.decode_cases import LAYOUTS as LAYOUT_CASES
from tests.support.plan_interpreter import interpret, run_schedule

HIDDEN = 10


def layouts_of(n: int):
    """Strategy for the name of a layout, and arguments that are valid for n layers."""
    flag, count = st.booleans(), st.integers(1, 2 * n + 2)
    arguments = {
        "desync": st.tuples(count),
        "spd": st.sets(st.integers(0, n - 1)).map(tuple),
        "caat": st.tuples(st.floats(0.05, 1)),
        "track": st.tuples(count),
        "dtp": st.tuples(st.one_of(st.integers(0, 2 * n + 2), st.floats(0, 2 * n + 2))),
        "laneformer": st.tuples(st.integers(0, n + 1), flag, flag, flag, flag),
    }
    return st.sampled_from(sorted(LAYOUTS)).flatmap(
        lambda name: st.tuples(st.just(name), arguments.get(name, st.just(())))
    )


cases = st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, 5), layouts_of(n)))


def decoded(schedule) -> Table:
    """The schedule's table after encoding it as words and decoding these."""
    writer = Writer()
    writer.put(Table.of(schedule, HIDDEN), Table)
    reader = Reader(writer.finish([], 0), np.array(writer.floats, np.float32))
    table = reader.get(Table)
    reader.finish()
    return table


def test_every_format_of_the_kernels_is_a_dtype():
    assert list(Dtype.__members__) == list(KERNEL_FORMATS)


def toy_module(matrices, m, X):
    return np.tanh(np.einsum("lde,le->ld", matrices[m], X))


def run_definition(schedule, matrices, x):
    """Runs a schedule by its definition: own parts are added at their times, the other lanes' parts where they land."""
    X, outputs = x.copy(), {}
    for t in range(schedule.num_modules + 1):
        before = X.copy()
        if t < schedule.num_modules:
            outputs[t] = toy_module(matrices, t, X)
        for m, own in enumerate(schedule.own):
            if own.at == t:
                X = X + own.scale * outputs[m]
        for at, payload in schedule.landings:
            if at != t:
                continue
            width = round(payload.channels * HIDDEN)
            share = sum(w * outputs[m] for m, w in payload.parts)
            if payload.stream_mean_at is not None:
                assert payload.stream_mean_at == t, "no layout averages streams of another time"
                X = np.broadcast_to((share + before / len(x)).sum(0), X.shape).copy()
            else:
                X[:, :width] += (share.sum(0) - share)[:, :width]
    return X


def check(schedule, lanes, seed=0):
    rng = np.random.default_rng(seed)
    matrices = rng.normal(size=(schedule.num_modules, lanes, HIDDEN, HIDDEN))
    x = np.broadcast_to(rng.normal(size=HIDDEN), (lanes, HIDDEN))
    np.testing.assert_allclose(
        run_schedule(decoded(schedule), x, partial(toy_module, matrices)),
        run_definition(schedule, matrices, x),
        rtol=0,
        atol=1e-4,
    )


@given(case=cases)
@example(case=(3, 4, ("laneformer", (1, True, True, True, True))))
@example(case=(3, 4, ("laneformer", (1, True, False, True, False))))
@example(case=(3, 4, ("dtp", (1.25,))))
@example(case=(3, 4, ("kraken", ())))
@example(case=(2, 3, ("desync", (3,))))
def test_decoded_schedules_follow_the_definition(case):
    n, lanes, (name, arguments) = case
    check(LAYOUTS[name](n, lanes, *arguments), lanes)


def test_decoded_schedule_of_no_layout_follows_the_definition():
    """Its sums have several weighted parts on a share of the channels; own parts are added before or after landings."""
    first, second = Payload(((0, 0.5), (1, 2.0)), channels=0.55), Payload(((2, 1.0), (0, 0.25), (3, 1.5)))
    own = (Own(0, 0.5), Own(3, 2.0), Own(2), Own(4, 1.5))
    check(Schedule("strange", own, (Landing(1, first), Landing(3, first), Landing(4, second))), 3)


@given(case=cases)
def test_sums_are_listed_once_in_the_order_of_issue(case):
    n, lanes, (name, arguments) = case
    schedule = LAYOUTS[name](n, lanes, *arguments)
    sums = decoded(schedule).sums
    times = [total.complete_at for total in sums]
    assert times == sorted(times) and len(times) == schedule.num_reductions
    assert all(0 < total.width <= HIDDEN or name == "caat" for total in sums)


def test_schedules_of_one_layer_have_these_words():
    """The words of an event are its payload or -1, module, index of its weight, and number of parts apart. The words of
    a sum are its width, the time at which it is complete, whether it has the streams' mean, and its parts.
    """
    for layout, events, sums, floats in [
        ("none", [[[-1, 0, 0, 0]], [[-1, 1, 0, 0]], []], [], [2]),
        ("tp", [[[0, 0, 0, 0]], [[1, 0, 0, 0]], []], [[10, 0, 0, 1, 0, 0], [10, 1, 0, 1, 1, 0]], [1]),
    ]:
        writer = Writer()
        writer.put(Table.of(LAYOUTS[layout](1, 4), HIDDEN), Table)
        words = [len(events)]
        for now in events:
            words += [len(now), *itertools.chain(*now)]
        assert writer.words == [*words, len(sums), *itertools.chain(*sums)] and writer.floats == floats


CASES = CONFIGS | MODELS | EXPERTS | ON_CPU


def interpreted(config, weights, ids):
    return interpret(make_plan(decoder_ops(config), config.schedule), weights, ids)


@pytest.mark.parametrize(("layout", "lanes"), LAYOUT_CASES, ids=[f"{x}-{n}" for x, n in LAYOUT_CASES])
def test_interpreted_layouts_agree_with_the_reference(layout, lanes):
    config = small.make_config(layout=layout, lanes=lanes)
    weights, ids = small.make_weights(config), small.prompt_of(config, 21)
    expected = small.reference_logits(config, weights, ids)
    np.testing.assert_allclose(interpreted(config, weights, ids), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


# Without a float64 reference, each case compiles the model. The kernel is compared with the interpreter for all cases
# (test_decode.py), and with other implementations for nearly all kinds of layers (tests/infer/engine/test_cpu.py).
FAST = {
    *CONFIGS,
    "one plus the gains, half of the channels rotate",
    "latent attention of many heads without a rank of queries",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES])
def test_interpreted_configs_agree_with_the_reference(name):
    """The reference is float64 NumPy for CONFIGS, otherwise laneformer's own model in float32."""
    config = small.make_config(**CASES[name])
    weights, ids = small.make_weights(config), small.prompt_of(config, 21)
    known = name in CONFIGS
    expected = (small.reference_logits if known else small.model_logits)(config, weights, ids)
    atol = (2e-6 if known else 2e-5) * np.abs(expected).max()
    np.testing.assert_allclose(interpreted(config, weights, ids), expected, rtol=0, atol=atol)


def plan_of(name, **options):
    config = small.make_config(**CASES[name])
    return make_plan(decoder_ops(config), config.schedule, **options)


def renamed(plan, value):
    """The tree as it is decoded from words: numbers instead of paths, floats rounded to float32."""
    if isinstance(value, Weight):
        return dataclasses.replace(value, path=str(plan.index_of[value.path]))
    if isinstance(value, tuple):
        return tuple(renamed(plan, item) for item in value)
    if isinstance(value, float):
        return float(np.float32(value))
    if dataclasses.is_dataclass(value):
        changes = {field.name: renamed(plan, getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


@pytest.mark.parametrize("name", CASES)
def test_decoded_words_equal_the_plan(name):
    plan = plan_of(name, weight_dtype="bfloat16", cache_dtype="float16", rounded_activations=True)
    decoded = decode_plan(plan.words, plan.floats)
    assert decoded.plan == renamed(plan, plan)
    assert (decoded.plan.weight_dtype, decoded.plan.cache_dtype) == (Dtype.bfloat16, Dtype.float16)
    assert dict(zip(plan.weights, decoded.places, strict=True)) == {
        path: plan.places.get(path) for path in plan.weights
    }
    assert decoded.small_size == plan.small_size


@pytest.mark.parametrize("name", CASES)
def test_small_weights_have_separate_places(name):
    plan = plan_of(name)
    small_weights = {path: weight for path, weight in plan.weights.items() if not weight.is_matrix}
    owners = np.full(plan.small_size, -1)
    for index, (path, weight) in enumerate(small_weights.items()):
        mine = np.full(plan.small_size, -1.0)
        values = 1 + np.arange(np.prod(plan.shape_of(path))).reshape(plan.shape_of(path))
        plan.place(mine, path, values)
        assert (mine > 0).sum() == values.size and (owners[mine > 0] == -1).all()
        owners[mine > 0] = index
        offset, stride = plan.places[path]
        for lane in range(plan.ops.lanes):
            own = (values[lane] if weight.lane_sharded else values).reshape(-1)
            np.testing.assert_array_equal(mine[offset + lane * stride :][: len(own)], own + weight.plus)


def test_biases_of_a_product_are_one_vector_per_lane():
    plan = plan_of("biases")
    offsets = [plan.places[f"layers.1.attention.{name}_bias"] for name in ("wq", "wk", "wv")]
    rows = [plan.weights[f"layers.1.attention.{name}_bias"].shape[0] for name in ("wq", "wk", "wv")]
    assert offsets[0].offset % ALIGNED == 0
    assert [place.offset - offsets[0].offset for place in offsets] == [0, rows[0], rows[0] + rows[1]]
    assert {place.stride for place in offsets} == {sum(rows)}


def test_damaged_words_are_refused():
    plan = plan_of("dense")
    words, floats = plan.words, plan.floats
    for damaged, message in [
        (words[:-1], "must begin with"),
        (np.r_[words, 0].astype(np.int32), "must begin with"),
        (np.r_[words[:1], words[1] + 1, words[2:], 0].astype(np.int32), "1 words follow the end"),
        (np.r_[words[:1], words[1] - 1, words[2:-1]].astype(np.int32), "truncated"),
    ]:
        with pytest.raises(ValueError, match=message):
            decode_plan(damaged, floats)
    with pytest.raises(ValueError, match="must begin with"):
        decode_plan(words, floats[:-1])


def test_size_beyond_32_bits_is_refused():
    config = small.make_config()
    ops = dataclasses.replace(decoder_ops(config), context=2**31)
    with pytest.raises(ValueError, match=r"contains 2147483648, .*32 bits"):
        _ = make_plan(ops, config.schedule).words


@small.needs_library
def test_library_refuses_damaged_words():
    """The library decodes the words before it looks up the instruction set, here one that does not exist."""
    plan = plan_of("biases and head norms")

    def opened(words, floats):
        with pytest.raises(NativeError) as caught:
            encoded = words.ctypes.data, len(words), floats.ctypes.data, len(floats)
            call("open", *encoded, 1, 0, 0, 1000, 0, 1, 1.5, b"none")
        return str(caught.value)

    assert opened(plan.words, plan.floats) == "this machine cannot run the instructions none"
    assert opened(plan.words[:-1], plan.floats) == "damaged plan: its number of words or floats is wrong"
    other = plan.words.copy()
    other[0] += 1
    assert (
        opened(other, plan.floats)
        == "damaged plan: it has another format: rebuild the library (python -m custom_calls)"
    )


def matrix(*shape: int) -> Matrix:
    return Matrix(Weight(f"matrix {shape}", shape))


def norm(size: int) -> Norm:
    return Norm(Weight("gain", (size,)), 1e-5)


# small.make_config has 20 channels, 2 query heads and 1 key head of 6 channels, and 9 hidden channels.
@small.needs_library
@pytest.mark.parametrize(("number", "fields", "message"), [
    (0, {"matrices": ()}, "a product without matrices"),
    (0, {"matrices": (Matrix(Weight("vector", (24,))),)}, "a product's weight is not a matrix"),
    (0, {"matrices": (matrix(12, 20), matrix(12, 19))}, "matrices of one product differ in columns"),
    (0, {"matrices": (matrix(2, 3, 4),)}, "a weight has more than two dimensions"),
    (0, {"matrices": (matrix(2, 3, 4, 5, 6),)}, "number of dimensions = 5"),
    (0, {"matrices": (matrix(2**30, 2**15),)}, "a weight is too large"),
    (0, {"matrices": (matrix(0, 20),)}, "dimension = 0"),
    (0, {"matrices": (Matrix(Weight("wq", (24, 20)), Weight("bias", (23,))),)}, "a bias has another size"),
    (0, {"norm": norm(19)}, "a norm has another size"),
    (0, {"reads": Value.HIDDEN}, "a product has other columns than the value that it reads"),
    (0, {"writes": Value.STREAM}, "a product writes what it must not"),
    (0, {"writes": Value.ATTENDED}, "a product writes what it must not"),
    (1, {"kv_heads": 3}, "heads are not a multiple of kv_heads"),
    (1, {"heads": 2**20 + 1}, "too many heads"),
    (1, {"rotary": Rotary((1.0,), 1.0)}, "a rotation has other channels than a head"),
    (1, {"q_norm": norm(18)}, "a norm has another size"),
    (1, {"k_norm": norm(12)}, "a norm has another size"),
    (1, {"sinks": Weight("sinks", (1,))}, "Attend.sinks has another size"),
    (1, {"heads": 3}, "attention reads another number of channels than are projected"),
    (1, {"attention_gate": True}, "attention reads another number of channels than are projected"),
    (2, {"matrices": (matrix(19, 12),)}, "a module's output has another size than the stream"),
    (3, {"matrices": (matrix(9, 20), matrix(8, 20))}, "a gated product needs two equal matrices"),
    (3, {"matrices": (matrix(9, 20),)}, "a gated product needs two equal matrices"),
    (4, {"writes": Value.HIDDEN}, "a module has no output"),
])  # fmt: skip
def test_library_refuses_invalid_ops(number, fields, message):
    with pytest.raises(NativeError, match=f"damaged plan: {message}"):
        custom_calls.Session(small.with_op(plan_of("biases"), 1, number, **fields), instructions="none")


def with_ops(plan, **fields):
    return dataclasses.replace(plan, ops=dataclasses.replace(plan.ops, **fields))


def with_head(plan, **fields):
    return with_ops(plan, head=dataclasses.replace(plan.ops.head, **fields))


def with_attention(plan, change):
    first = plan.ops.layers[0]
    return small.with_ops(plan, 0, change(first.attention.ops), first.feed_forward.ops)


def with_event(plan, time: int, event: Event):
    events = list(plan.schedule.events)
    events[time] = (*events[time], event)
    return dataclasses.replace(plan, schedule=Table(tuple(events), plan.schedule.sums))


def with_sum(plan, **fields):
    first, *rest = plan.schedule.sums
    sums = (dataclasses.replace(first, **fields), *rest)
    return dataclasses.replace(plan, schedule=Table(plan.schedule.events, sums))


def with_small(plan, place=None, less: int = 0):
    """The plan with another place of the last small weight, or with a smaller array of small weights."""
    path = max(plan.places, key=plan.places.get)
    size, places = plan.small_size - less, plan.places | ({path: place} if place else {})
    plan = dataclasses.replace(plan)
    vars(plan).update(places=places, small_size=size)
    return plan


@small.needs_library
@pytest.mark.parametrize(("change", "message"), [
    (lambda plan: with_ops(plan, lanes=2**16 + 1), "too many lanes"),
    (lambda plan: with_ops(plan, vocab_size=41), "the embedding has another shape"),
    (lambda plan: with_ops(plan, embedding=Weight("embedding", (40, 20))), "the embedding has another shape"),
    (lambda plan: with_head(plan, kind=HeadKind.LANE), "the head has another shape"),
    (lambda plan: with_head(plan, weight=Weight("head", (39, 20), False)), "the head has another shape"),
    (lambda plan: with_head(plan, kind=HeadKind.LANE, weight=Weight("head", (40, 20)), norm_of_sum=True),
     "a norm of the sum needs head replicate"),
    (lambda plan: with_attention(plan, lambda ops: (*ops, OutputNorm(norm(19)))), "a norm has another size"),
    (lambda plan: with_attention(plan, lambda ops: ops[:2]), "a module has no output"),
    (lambda plan: dataclasses.replace(plan, schedule=Table(plan.schedule.events[1:], plan.schedule.sums)),
     "the schedule is for another number of layers"),
    (lambda plan: with_event(plan, 0, Event(-1, 1)), "an output is added before it is computed"),
    (lambda plan: with_event(plan, 6, Event(-1, 6)), "module 6 does not exist"),
    (lambda plan: with_event(plan, 1, Event(0, apart=((2, 1.0),))), "module 2 does not exist"),
    (lambda plan: with_event(plan, 6, Event(99)), "a sum lands that does not exist or is not complete"),
    (lambda plan: with_event(plan, 0, Event(1)), "a sum lands that does not exist or is not complete"),
    (lambda plan: with_sum(plan, width=21), "a sum is wider than the stream"),
    (lambda plan: with_sum(plan, width=19, stream_mean=True), "a mean of the streams needs all channels"),
    (lambda plan: with_sum(plan, parts=((1, 1.0),)), "module 1 does not exist"),
    (lambda plan: with_small(plan, less=1), "a vector lies beyond the small weights"),
    (lambda plan: with_small(plan, place=(-1, 20)), "a vector has no place"),
    (lambda plan: with_small(plan, place=(0, 19)), "lanes' vectors overlap"),
])  # fmt: skip
def test_library_refuses_invalid_plans(change, message):
    plan = plan_of("norms of lanes")
    with pytest.raises(NativeError, match=f"damaged plan: {message}"):
        custom_calls.Session(change(plan), instructions="none")


@small.needs_library
@pytest.mark.parametrize("layout", ["tp", "none"])
def test_library_refuses_norms_of_another_size(layout):
    """A norm of a sum (tp), and a norm of an output (none)."""
    config = small.make_config(layout=layout, norm_after="sum" if layout == "tp" else "lane")
    first, *layers = (ops := decoder_ops(config)).layers
    gain = first.attention.ops[0].norm.gain
    norm = Norm(dataclasses.replace(gain, shape=(gain.shape[0] - 1,), path="other"), 1e-5)
    module = first.attention
    changes = {"sum_norm": norm} if module.sum_norm else {"ops": (*module.ops[:-1], OutputNorm(norm))}
    first = dataclasses.replace(first, attention=dataclasses.replace(module, **changes))
    plan = make_plan(dataclasses.replace(ops, layers=(first, *layers)), config.schedule)
    with pytest.raises(NativeError, match="damaged plan: a norm has another size than its vector"):
        custom_calls.Session(plan, instructions="none")


@small.needs_library
@pytest.mark.parametrize("name", CASES)
def test_library_decodes_every_plan(name):
    plan = plan_of(name, weight_dtype="bfloat16", cache_dtype="float16", rounded_activations=True)
    with pytest.raises(NativeError, match="cannot run the instructions none"):
        custom_calls.Session(plan, instructions="none")


def test_words_of_a_request():
    """The number of words, then the fields: two words for an integer, the bits of a float, a list with its count."""
    sampling = SamplingOptions(temperature=1.5, top_k=-1, seed=2**63 + 5, logit_bias=((7, -0.5),), top_n_sigma=1.5)
    source = Source(slot=1, call=2**32, positions=3)
    request = Request(prompt=(4, 5), start=6, limit=2, sampling=sampling, masked=True, given=(-1,), source=source)
    one, half = (int(np.float32(value).view(np.int32)) for value in (1.5, -0.5))
    unit = int(np.float32(1).view(np.int32))
    fields = [2, 4, 5, 6, 0, 2, 0, 0, one, -1, -1, unit, 0, unit, 5, -(2**31), 0, 0, 1, 7, 0, half, one]
    fields += [1, 0, 0, 0, 0, 0, 0, 1, -1, 0, 1, 1, 0, 0, 1, 3, 0]
    words = request_words(request)
    assert words[0] == 1 + len(fields) and words[1 : words[0]].tolist() == fields and not words[words[0] :].any()


def test_requests_of_many_sizes_have_one_number_of_words():
    def size(prompt: int, room: int = 0, **fields) -> int:
        return len(request_words(Request(prompt=(1,) * prompt, limit=1, **fields), room))

    assert size(1) == size(40) == size(1, source=Source(0, 1, 1), most_drafts=2, stops=(3, 4)) < size(100)
    biases = SamplingOptions(logit_bias=tuple((token, 1.0) for token in range(20)))
    assert size(100) == size(70, forced=(1,) * 30) == size(1, room=128) == size(60, sampling=biases)

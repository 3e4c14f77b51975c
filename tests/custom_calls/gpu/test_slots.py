"""Several requests in one session on emulated GPUs (or real ones, see tests/support/emulated.py): each has the bits
that it has alone, whatever comes and goes beside it.
"""

import threading

import numpy as np
import pytest

from custom_calls import ENDS, YIELDED, NativeError
from custom_calls.gpu.codes import CodesChoice
from laneformer.mesh import make_mesh
from laneformer.quantized.rounding import round_to
from tests.support import emulated, small
from tests.support.decode_cases import CONFIGS, DELTA_NET, LATENTS, LAYOUTS, MODELS
from tests.support.gpu_cases import AMD, mixed_plan, of_config, weights_of
from tests.support.several_slots import Request, Slots, random_requests

pytestmark = [small.needs_library, emulated.needs_gpu]


@pytest.fixture(scope="module")
def model():
    return Slots(*of_config(small.windowed_model()[0]))


def serve(model: Slots, seed: int, count: int = 6) -> None:
    rng = np.random.default_rng(seed)
    model.serve(random_requests(rng, model.plan.ops.vocab_size, count), rng)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(3, 60))])
def test_random_schedules(seed, model):
    serve(model, seed)


def test_a_call_ends_with_the_first_of_its_requests(model):
    """By its limit, its stop token, or a cancellation; also while others still read their prompts."""
    long, short = Request([1, 2], 40, {"temperature": 1.0}), Request([3] * 20, 40, {"seed": (5, 6)})
    tokens = model.expected(Request([4], 9, {}))[0][0].tolist()
    for request, drawn, end in (
        (Request([4], 4, {}), 4, "length"),
        (Request([4], 30, {"stops": [tokens[6], 50]}), tokens.index(tokens[6]) + 1, "stop"),
        (Request([4] * 40, 1, {}), 1, "length"),
    ):
        model.slots[:] = [request, long, short]
        assert model.run() == [request] and (request.drawn, ENDS[request.end]) == (drawn, end)
        assert long.end == short.end == YIELDED and long.drawn > 0
        model.check(request)
    model.slots[0] = cancelled = Request([7] * 30, 20, {})
    model.session.slots[0].begin()
    model.session.slots[0].cancel()
    assert model.run() == [cancelled] and (cancelled.drawn, ENDS[cancelled.end]) == (0, "cancelled")
    while any(model.slots):
        model.run()
    model.check(long)
    model.check(short)


def test_the_host_ends_a_running_call(model):
    """And goes on with the same requests; their streams have the tokens of both calls."""
    requests = [Request([n], 40, {"temperature": 1.0, "seed": (n, 0)}) for n in range(2)]
    model.slots[:2] = requests
    for slot in model.session.slots[:2]:
        slot.begin()
    model.session.begin()
    stream = model.session.slots[1]
    waiting = threading.Thread(target=lambda: [stream.wait(4, 10_000), model.session.yield_()])
    waiting.start()
    ended = model.run()
    waiting.join()
    assert ended or all(4 < request.drawn < 40 for request in requests)
    model.session.begin()
    model.run()
    for slot, request in enumerate(requests):
        model.check(request)
        stream = model.session.slots[slot]
        assert stream.finished and stream.wait(39, 0) == 40
        drawn = stream.drawn(0, 40, 2)
        tokens, logprobs, top_tokens, top_logprobs, _ = model.expected(request)[0]
        assert small.same(drawn[:2] + drawn[3:5], [tokens, logprobs, top_tokens, top_logprobs])
        assert (np.diff(drawn.times) > 0).all()


def test_what_does_not_fit_is_refused(model):
    for bad in (Request([1, 40], 4, {}), Request([-1], 4, {}), Request([1], 0, {}), Request([1], 64, {})):
        model.slots[:2] = Request([1], 4, {}), bad
        with pytest.raises(NativeError, match="do not fit the cache"):
            model.run()
        model.session.begin()
    model.slots[:2] = None, None
    for options in ({"rows": 2, "slots": 3}, {"rows": 1, "slots": 2}, {"rows": 2, "slots": 0}):
        with pytest.raises(NativeError, match="each slot needs a row"):
            emulated.open_session(model.plan, {}, **options)


@pytest.mark.slow
def test_layers_of_several_kinds():
    plan = mixed_plan(weight_dtype="float16", cache_dtype="bfloat16")
    serve(Slots(plan, weights_of(plan, "float16"), rows=2, slots=2, chaos_us=20), 1)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["vocab_parallel", "replicate", "lane"])
def test_several_devices(head):
    config = small.make_config(lanes=4, layout="dtp(1)", lm_head_type=head)
    serve(Slots(*of_config(config), mesh=make_mesh(4, lane=2), chaos_us=20), 2, 4)


CASES = CONFIGS | MODELS | LATENTS | DELTA_NET
WITHOUT_EXPERTS = [name for name, changes in CASES.items() if "num_experts" not in changes]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WITHOUT_EXPERTS)
def test_configs(name):
    config = small.make_config(**CASES[name])
    model = Slots(*of_config(config), rows=3, slots=2)
    for seed in range(3):
        serve(model, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "lanes"), LAYOUTS)
def test_layouts(layout, lanes):
    serve(Slots(*of_config(small.make_config(layout=layout, lanes=lanes))), 3)


@emulated.only_emulated
@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "compute"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_amd(dtype, compute):
    config = small.make_config(layout="dtp(1)", hidden_size=40)
    serve(Slots(*of_config(config, dtype, compute), machine=AMD), 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "mxfp4"])
def test_quantized_weights(kind):
    config = small.make_config(layout="dtp(1)", hidden_size=96, ff=64, vocab_size=64, num_hidden_layers=2)
    plan, weights = of_config(config, "bfloat16")
    weights = {path: round_to(w, kind, search=False) if path in plan.matrices else w for path, w in weights.items()}
    serve(Slots(plan, weights, codes=CodesChoice.of(plan, weights.items())), 5)

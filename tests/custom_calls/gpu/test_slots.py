"""Several requests in one session on emulated GPUs (or real ones, see tests/support/emulated.py): each request has the
bits that it has alone, whichever requests join and leave beside it.
"""

import dataclasses
import threading
from collections import deque

import jax
import numpy as np
import pytest

from laneformer import custom_calls
from laneformer.custom_calls import ENDS, YIELDED, NativeError, State
from laneformer.custom_calls.gpu.codes import CodesChoice
from laneformer.mesh import make_mesh
from laneformer.quantized.rounding import round_to
from tests.support import emulated, small
from tests.support.decode_cases import (
    COMPRESSED,
    CONFIGS,
    DELTA_NET,
    EXPERTS,
    LATENTS,
    LAYOUTS,
    MODELS,
    SHARED_EXPERTS,
    SIGMOIDS,
    STREAMS,
)
from tests.support.gpu_cases import AMD, jitted, mixed_plan, of_config, some, state_of, weights_of
from tests.support.several_rows import EQUAL

pytestmark = [small.needs_library, emulated.needs_gpu]
ROOM, CAPACITY, STOPS = 48, 64, 2


@dataclasses.dataclass
class Request:
    """A client's request, and its results so far."""

    prompt: list[int]
    limit: int
    options: dict
    """Options of small.make_inputs."""
    cancel: bool = False
    """Whether it is cancelled at a random time while it runs."""
    drafts: str = "none"
    """A name in DRAFTS."""
    answer: list[int] = dataclasses.field(default_factory=list)
    """The tokens of the request alone, from which drafts are made."""
    drawn: int = 0
    """Number of tokens drawn so far."""
    filled: int = 0
    """Positions whose keys and values are in the cache."""
    parts: list = dataclasses.field(default_factory=list)
    """The results of each call."""
    end: int = YIELDED
    """Index into ENDS, or YIELDED."""

    @property
    def text(self) -> list[int]:
        return self.prompt + [token for tokens, *_ in self.parts for token in tokens.tolist()]

    def asked(self, drafts: bool) -> custom_calls.Request:
        """The request of the next call. drafts: whether it has texts to draft from."""
        rest, texts = self.text[self.filled :], {}
        if drafts:
            texts = {"before": self.text[: self.filled]} | DRAFTS[self.drafts](self)
        options = {"start": self.filled, "drawn": self.drawn} | self.options | texts
        return small.make_inputs(rest, self.limit - self.drawn, **options).request


DRAFTS = {  # texts for the drafts of a request, as fields of its kernel request
    "none": lambda one: {"most_drafts": 0},
    "text": lambda one: {},
    "another text": lambda one: {"before": [*one.answer, -1, *one.text[: one.filled]]},
    "right": lambda one: {"given": one.answer[one.drawn :]},
    "some wrong": lambda one: {"given": [t if n % 3 else 0 for n, t in enumerate(one.answer)][one.drawn :]},
    "one, right": lambda one: {"given": one.answer[one.drawn :], "most_drafts": 1},
}


class Slots:
    """A model with a session of one slot and a session of several slots, whose answers are compared. `like`: Slots of
    the same model, whose session of one slot is shared.
    """

    def __init__(self, plan, weights, rows=4, slots=3, mesh=None, drafts=False, like: "Slots | None" = None, **options):
        self.plan, self.mesh, self.drafts = plan, mesh, drafts
        self.session = emulated.open_session(plan, weights, mesh=mesh, rows=rows, slots=slots, drafts=drafts, **options)
        if drafts:
            self.session.speculate(rows - 1, EQUAL[:rows])
        self.call = jitted(self.session, mesh, room=ROOM, top=2, logits=True)
        if like:
            self.alone, self.call_alone, self._expected = like.alone, like.call_alone, like._expected
        else:
            self.alone = emulated.open_session(plan, weights, mesh=mesh, **options)
            self.call_alone = jitted(self.alone, mesh, room=ROOM, top=2, logits=True)
            self._expected = {}  # by prompt, limit and options
        self.state = self._put(State(None, custom_calls.empty_layers(plan, CAPACITY, slots=slots)))
        self.slots: list[Request | None] = [None] * slots

    def _put(self, state: State) -> State:
        """Puts the state on the devices of the mesh, if there is a mesh."""
        if self.mesh is None:
            return state
        lanes = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec("lane"))
        return State(state.seen, jax.device_put(state.layers, lanes))

    def expected(self, request: Request) -> list:
        """The results of the request alone: its outputs without the status, the end, and the cached entries."""
        key = repr((request.prompt, request.limit, request.options))
        if key not in self._expected:
            self._expected[key] = self._run_alone(request)
        return self._expected[key]

    def _run_alone(self, request: Request) -> list:
        state = self._put(state_of(self.plan, CAPACITY))
        inputs = small.make_inputs(request.prompt, request.limit, room=ROOM, **request.options)
        outputs, state = self.call_alone(inputs, state._replace(seen=np.zeros(self.plan.ops.vocab_size, np.uint8)))
        assert self.alone.failure is None
        count, end, position = outputs.status.tolist()
        return [[np.asarray(part)[:count] for part in outputs[:-1]], end, self._kept(state, 0, position - 1)]

    def _kept(self, state: State, slot: int, filled: int):
        """Keys, values, latents and vectors of a slot's first `filled` positions. The tokens that follow test the other
        states.
        """
        arrays = small.arrays_of(state, "keys", "values", "latents", "positions")
        return [np.asarray(array)[:, slot, :filled] for array in arrays]

    def run(self, passes: int = 0) -> list[Request]:
        """Runs a call with all requests in slots. It yields after `passes` passes (0: no limit). Returns the requests
        that have ended, and removes them from their slots.
        """
        asked = [None if request is None else request.asked(self.drafts) for request in self.slots]
        seen = np.zeros((len(self.slots), self.plan.ops.vocab_size), np.uint8)
        for slot, request in enumerate(self.slots):
            if request is not None:
                seen[slot, request.text[len(request.prompt) :]] = 1  # without the prompt, as for the request alone
        self.session.yield_after(passes)
        together = [(slot, request) for slot, request in enumerate(self.slots) if request is not None]
        for slot, request in together:
            self.session.slots[slot].join(request.drawn, len(together) - 1)
        inputs = self.session.inputs(*asked, most_tokens=ROOM, most_stops=STOPS)
        outputs, self.state = self.call(inputs, self.state._replace(seen=seen))
        if self.session.failure is not None:
            raise NativeError(self.session.failure)
        for slot, _ in together:
            self.session.slots[slot].leave(self.session.passes)
        ended = []
        for slot, request in enumerate(self.slots):
            count, request_end, position = outputs.status[slot].tolist()
            if request is None:
                assert (count, request_end) == (0, YIELDED)
                continue
            request.parts.append([np.asarray(part)[slot, :count] for part in outputs[:-1]])
            request.drawn += count
            request.filled, request.end = position - (request.drawn > 0), request_end
            if request_end != YIELDED:
                request.kept = self._kept(self.state, slot, request.filled)
                self.slots[slot] = None
                ended.append(request)
        assert ended or passes in (0, self.session.passes)
        return ended

    def put(self, request: Request, slot: int) -> None:
        """Puts a request into a slot."""
        if self.drafts:
            request.answer = self.expected(request)[0][0].tolist()
        self.slots[slot] = request
        self.session.slots[slot].begin()

    def check(self, request: Request) -> None:
        """Checks that a request that has ended has the bits that it has alone; a cancelled one up to its end."""
        parts, end, kept = self.expected(request)
        found = [np.concatenate(part) for part in zip(*request.parts, strict=True)]
        if request.end == ENDS.index("cancelled"):
            parts = [part[: request.drawn] for part in parts]
            kept = [array[:, : request.filled] for array in kept]
        else:
            assert request.end == end
        assert small.same(found, parts) and small.same(request.kept, kept)

    def serve(self, requests: list[Request], rng: np.random.Generator) -> None:
        """Runs all requests with random joins, yields and cancellations, and checks them."""
        waiting, ended = deque(requests), []
        while waiting or any(self.slots):
            for slot, request in enumerate(self.slots):
                if request is None and waiting and rng.random() < 0.7:
                    self.put(waiting.popleft(), slot)
            for slot, request in enumerate(self.slots):
                if request is not None and request.cancel and rng.random() < 0.3:
                    self.session.slots[slot].cancel()
            if any(self.slots):
                ended += self.run(int(rng.choice([1, 2, 3, 5, 9, 0])))
        for request in ended:
            self.check(request)
        assert len(ended) == len(requests)


SETTINGS = (
    {},
    {"penalty": 1.5},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 2.0, "top_k": 8, "top_p": 0.5, "min_p": 0.02, "penalty": 1.3},
)


def random_requests(rng: np.random.Generator, vocab: int, count: int) -> list[Request]:
    """Some of twelve requests, whose results alone are computed once, with random drafts and cancellations. They have
    prompts of 1 to 20 tokens, answers of 1 to 25 tokens, and random settings and stops.
    """
    same = np.random.default_rng(0)
    requests = [
        Request(
            same.integers(0, vocab, same.integers(1, 21)).tolist(),
            int(same.integers(1, 26)),
            {"seed": (number, 7), "stops": [int(same.integers(-1, vocab))]} | SETTINGS[number % len(SETTINGS)],
        )
        for number in range(12)
    ]
    for request in requests:
        request.cancel, request.drafts = bool(rng.random() < 0.2), [*DRAFTS][rng.integers(len(DRAFTS))]
    return [requests[number] for number in rng.permutation(len(requests))[:count]]


@pytest.fixture(scope="module")
def model():
    return Slots(*of_config(small.windowed_model()[0]))


def serve(model: Slots, seed: int, count: int = 6) -> None:
    rng = np.random.default_rng(seed)
    model.serve(random_requests(rng, model.plan.ops.vocab_size, count), rng)


SEEDS = [*range(2), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedules_have_the_bits_of_each_request_alone(seed, model):
    serve(model, seed)


@pytest.fixture(scope="module")
def drafting(model):
    return Slots(*of_config(small.windowed_model()[0]), drafts=True, like=model)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedules_with_drafts_have_the_bits_of_each_request_alone(seed, drafting):
    serve(drafting, seed)


def test_drafts_share_the_rows_that_requests_leave(drafting):
    """Equally likely drafts get equal numbers of rows. A request that is alone gets all rows."""
    requests = [Request([n], 9 + 11 * n, {"seed": (n, 0), "temperature": 1.0}, drafts="right") for n in range(2)]
    for slot, request in enumerate(requests):
        drafting.put(request, slot)
    first = drafting.session.slots[0]
    assert drafting.run() == requests[:1] and drafting.session.passes == 5
    assert requests[1].drawn == 4 * 2 + 3  # the last token of the other request leaves one more row
    assert first.drafting.rows == (1, 3, 0, 0) and first.drafting.accepted == (3, 0, 0)
    while any(drafting.slots):
        drafting.run()
    drafting.put(alone := Request([5], 17, {}, drafts="right"), 2)
    assert drafting.run() == [alone] and drafting.session.passes == 5  # passes of four tokens, and the last of one
    assert drafting.session.slots[2].drafting.accepted == (3, 3, 3)
    drafting.put(wrong := Request([5], 5, {}, drafts="right"), 0)
    wrong.answer = [(token + 1) % drafting.plan.ops.vocab_size for token in wrong.answer]
    assert drafting.run() == [wrong] and drafting.session.passes == 5
    assert first.drafting.drafted == 3 + 2 + 1 and sum(first.drafting.accepted) == 0
    for request in (*requests, alone, wrong):
        drafting.check(request)


def test_copied_drafts_are_counted(drafting):
    """Drafts from another text are counted separately, over all calls of a request."""
    drafting.put(request := Request([3, 1], 25, {"temperature": 1.0}, drafts="another text"), 1)
    while any(drafting.slots):
        drafting.run(4)
    counts = drafting.session.slots[1].drafting
    assert counts.tokens_per_pass > 2 and counts.predicted_accepted > 8
    drafting.check(request)


def test_call_ends_with_its_first_request(model):
    """A request ends by its limit, a stop token or a cancellation, also while others still read their prompts."""
    for slot in model.session.slots:
        slot.begin()  # forgets cancellations of earlier requests
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


def test_requests_continue_after_the_host_ends_a_call(model):
    """Their streams contain the tokens of both calls."""
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


def test_invalid_requests_and_options_are_refused(model):
    for bad in (Request([1, 40], 4, {}), Request([-1], 4, {}), Request([1], 0, {}), Request([1], 64, {})):
        model.slots[:2] = Request([1], 4, {}), bad
        with pytest.raises(NativeError, match="do not fit the cache"):
            model.run()
        model.session.begin()
    model.slots[:2] = None, None
    with pytest.raises(NativeError, match="compiled without drafts"):
        model.session.inputs(small.make_inputs([1], 2, given=(1,)).request, None, None)
    with pytest.raises(NativeError, match="compiled without drafts"):
        model.session.speculate(1)
    for options in ({"rows": 2, "slots": 3}, {"rows": 1, "slots": 2}, {"rows": 2, "slots": 0}):
        with pytest.raises(NativeError, match="number of slots must be 1 to"):
            emulated.open_session(model.plan, {}, **options)


@pytest.mark.slow
def test_layers_of_several_kinds_have_the_bits_of_each_request_alone():
    plan = mixed_plan(weight_dtype="float16", cache_dtype="bfloat16")
    serve(Slots(plan, weights_of(plan, "float16"), rows=3, slots=2, drafts=True, chaos_us=20), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head", ["lane", *(pytest.param(head, marks=pytest.mark.exhaustive) for head in ("vocab_parallel", "replicate"))]
)
def test_several_devices_have_the_bits_of_each_request_alone(head):
    config = small.make_config(lanes=4, layout="dtp(1)", lm_head_type=head)
    serve(Slots(*of_config(config), mesh=make_mesh(4, lane=2), drafts=head == "lane", chaos_us=20), 2, 4)


CASES = CONFIGS | MODELS | EXPERTS | SHARED_EXPERTS | LATENTS | SIGMOIDS | DELTA_NET | STREAMS | COMPRESSED


@pytest.mark.parametrize("drafts", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", some(CASES, (), ("experts", "smallest")))
def test_configs_have_the_bits_of_each_request_alone(name, drafts):
    config = small.make_config(**CASES[name])
    model = Slots(*of_config(config), rows=3, slots=2, drafts=drafts)
    for seed in range(2):
        serve(model, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "lanes"), LAYOUTS)
def test_layouts_have_the_bits_of_each_request_alone(layout, lanes):
    serve(Slots(*of_config(small.make_config(layout=layout, lanes=lanes))), 3)


@emulated.only_emulated
@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "compute"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_amd_has_the_bits_of_each_request_alone(dtype, compute):
    config = small.make_config(layout="dtp(1)", hidden_size=40)
    serve(Slots(*of_config(config, dtype, compute), machine=AMD), 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "mxfp4"])
def test_quantized_weights_have_the_bits_of_each_request_alone(kind):
    config = small.make_config(layout="dtp(1)", hidden_size=96, ff=64, vocab_size=64, num_hidden_layers=2)
    plan, weights = of_config(config, "bfloat16")
    weights = {path: round_to(w, kind, search=False) if path in plan.matrices else w for path, w in weights.items()}
    serve(Slots(plan, weights, codes=CodesChoice.of(plan, weights.items())), 5)
